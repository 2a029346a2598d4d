import errno
import os
import resource
import signal
import tempfile
import time
import unittest
from pathlib import Path

import driver
from kernel_case import KernelCase, template


class Template(unittest.TestCase):
    def start(self, *args, **kwargs):
        made = driver.Template(*args, **kwargs)
        self.addCleanup(made.close)
        return made

    def fork(self, made, **config):
        life = made.fork(driver.configuration(**config))
        self.addCleanup(life.close)
        life.next(driver.READY)
        return life

    def with_module(self, text, name="preloaded_module"):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        Path(folder.name, f"{name}.py").write_text(text)
        return {**os.environ, "PYTHONPATH": folder.name}

    def test_it_introduces_itself(self):
        made = self.start(driver.SHELLS[-1], preload=["wave"])
        hello = made.ready()
        self.assertEqual(hello["pid"], made.pid)
        self.assertEqual(hello["shell"], driver.SHELLS[-1])
        self.assertEqual((hello["preloaded"], hello["cannotFork"]), (["wave"], None))
        life = self.fork(made, shell=driver.SHELLS[-1])
        self.assertEqual(life.text("import sys; 'wave' in sys.modules"), "True")

    def test_it_is_single_threaded_and_forks_without_a_warning(self):
        env = {**os.environ, "PYTHONWARNINGS": "error"}
        made = self.start("plain", env=env)
        self.assertIsNone(made.ready()["cannotFork"])
        life = self.fork(made, env=env)
        self.assertEqual(life.text("1"), "1")
        self.assertEqual(life.err + made.drain()["err"], b"")
        self.assertEqual(len(os.listdir(f"/proc/{made.pid}/task")), 1)

    def test_ends_are_reported_and_the_zombie_is_kept_until_released(self):
        made = self.start()
        made.ready()
        for code, end in (
            ("import os; os._exit(7)", {"exited": 7}),
            ("import os; os.kill(os.getpid(), 15)", {"signaled": 15, "coreDumped": False}),
        ):
            life = self.fork(made)
            life.start_cell(code)
            _, number, ended = made.next(driver.ENDED)
            self.assertEqual((number, ended), (life.number, {"pid": life.pid, **end}))
            self.assertTrue(os.path.exists(f"/proc/{life.pid}"))
            made.control.sendall(driver.frame(driver.RELEASE, number))
            usage = made.next(driver.RELEASED, number)[2]
            self.assertGreater(usage["maxRssBytes"], 1 << 20)
            self.assertFalse(os.path.exists(f"/proc/{life.pid}"))

    def test_a_pidfd_comes_with_the_fork(self):
        made = self.start()
        made.ready()
        life = self.fork(made)
        signal.pidfd_send_signal(made.fds[0], signal.SIGKILL)
        self.assertEqual(made.next(driver.ENDED, life.number)[2]["signaled"], signal.SIGKILL)

    def test_an_abandoned_fork_is_ended_and_reaped(self):
        made = self.start()
        made.ready()
        life = self.fork(made)
        made.control.sendall(driver.frame(driver.ABANDON, life.number))
        made.next(driver.RELEASED, life.number)
        self.assertFalse(os.path.exists(f"/proc/{life.pid}"))

    def test_a_fork_whose_abandon_is_there_already_is_never_started(self):
        made = self.start()
        made.ready()
        os.kill(made.pid, signal.SIGSTOP)
        number, wires = made.send_fork(driver.configuration())
        made.control.sendall(driver.frame(driver.ABANDON, number))
        os.kill(made.pid, signal.SIGCONT)
        failed = made.next(driver.FORK_FAILED, number)[2]
        self.assertEqual(failed["code"], "ECANCELED")
        self.assertEqual(failed["errno"], errno.ECANCELED)
        driver.Life(wires, 1 << 30, None).close()
        self.fork(made)

    def test_the_end_of_control_ends_every_life_and_the_template(self):
        made = driver.Template()
        made.ready()
        lives = [self.fork(made) for _ in range(3)]
        lives[0].start_cell("import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid)")
        sleeper = int(lives[0].wait_output("\n"))
        made.close()
        for pid in (sleeper, *(life.pid for life in lives)):
            driver.wait_gone(pid)

    def test_lives_go_on_when_the_template_is_killed(self):
        made = self.start()
        made.ready()
        life = self.fork(made)
        os.kill(made.pid, signal.SIGKILL)
        made.reap(driver.DEADLINE)
        self.assertEqual(life.text("1 + 1"), "2")

    def test_orphans_are_adopted_and_reaped(self):
        made = self.start()
        made.ready()
        life = self.fork(made)
        code = """
import os, time
r, w = os.pipe()
if os.fork() == 0:
    if os.fork():
        os._exit(0)
    os.read(r, 1)
    print(os.getpid(), os.getppid())
    os._exit(0)
os.wait()
os.write(w, b'x')
"""
        life.start_cell(code)
        orphan, parent = map(int, life.wait_output("\n").split())
        self.assertEqual(parent, made.pid)
        until = time.monotonic() + driver.DEADLINE
        while os.path.exists(f"/proc/{orphan}"):
            self.assertLess(time.monotonic(), until)
            time.sleep(0.02)

    def test_preloads_that_fail_say_why(self):
        for text, name in (("import nowhere_at_all", "ModuleNotFoundError"), ("1/0", "ZeroDivisionError")):
            made = self.start(preload=["preloaded_module"], env=self.with_module(text))
            failed = made.next(driver.TEMPLATE_FAILED)[2]
            self.assertEqual((failed["stage"], failed["error"]["name"]), ("preload", name))
            self.assertIn("preloaded_module", failed["error"]["value"])
            self.assertIn(text, "\n".join(failed["error"]["traceback"]))
            self.assertEqual(made.reap(driver.DEADLINE), 1)

    def test_threads_that_a_preload_leaves_are_named(self):
        text = "from threading import Event, Thread\nThread(target=Event().wait, name='left-over', daemon=True).start()"
        made = self.start(preload=["preloaded_module"], env=self.with_module(text))
        self.assertIn("left-over", made.ready()["cannotFork"])

    def test_nothing_that_a_preload_does_around_itself_reaches_a_kernel(self):
        text = """
import os, random, resource, signal, sys, tempfile
sys.stdout.write('not yet')
random.random()
tempfile.gettempdir()
os.umask(0o77)
os.chdir('/')
resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda *_: None)
held = open(os.devnull)
"""
        env = self.with_module(text)
        made = self.start(preload=["preloaded_module"], env=env)
        made.ready()
        one, two = self.fork(made, env=env), self.fork(made, env=env)
        self.assertEqual(one.out, b"")
        self.assertEqual(made.drain()["out"], b"not yet")
        self.assertEqual(one.text("import os; os.getcwd()"), repr(os.getcwd()))
        before = os.umask(0o22)
        os.umask(before)
        self.assertEqual(one.text("os.umask(0)"), str(before))
        code = "import resource; resource.getrlimit(resource.RLIMIT_NOFILE)"
        self.assertEqual(one.text(code), str(resource.getrlimit(resource.RLIMIT_NOFILE)))
        code = "import signal; [int(signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)]"
        self.assertEqual(one.text(code), "[0, 0, 0]")
        for code in (
            "import random; random.random()",
            "import uuid; uuid.uuid4()",
            "import tempfile; tempfile.mktemp()",
        ):
            self.assertNotEqual(one.text(code), two.text(code))

    def test_another_protocol_is_refused(self):
        made = self.start(protocol=7)
        self.assertEqual(made.next(driver.TEMPLATE_FAILED)[2]["stage"], "protocol")
        self.assertEqual(made.reap(driver.DEADLINE), 1)

    def test_a_frame_that_breaks_the_format_ends_it_with_70(self):
        for bad in (driver.HEADER.pack(0, 1, 0, 0), driver.frame(driver.FORK, 1, driver.configuration())):
            made = self.start()
            made.ready()
            made.control.sendall(bad)
            self.assertEqual(made.reap(driver.DEADLINE), 70)
            self.assertEqual(made.drain()["err"].count(b"\n"), 1)

    def test_a_fork_that_the_system_refuses_is_reported(self):
        env = self.with_module("import os\ndef no(): raise BlockingIOError(11, 'no more processes')\nos.fork = no")
        made = self.start(preload=["preloaded_module"], env=env)
        made.ready()
        number, wires = made.send_fork(driver.configuration())
        failed = made.next(driver.FORK_FAILED, number)[2]
        self.assertEqual(failed, {"errno": 11, "code": "EAGAIN", "message": "no more processes"})
        driver.Life(wires, 1 << 30, None).close()

    def test_a_template_whose_folder_is_gone_still_forks(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "gone")
            path.mkdir()
            made = self.start(driver.SHELLS[-1], cwd=str(path))
            made.ready()
            path.rmdir()
            self.assertEqual(self.fork(made, shell=driver.SHELLS[-1], cwd=folder).text("1"), "1")
            self.assertEqual(self.fork(made, shell=driver.SHELLS[-1]).text("1"), "1")

    def test_many_forks_at_once_are_all_answered(self):
        made = self.start()
        made.ready()
        asked = [made.send_fork(driver.configuration()) for _ in range(60)]
        lives = []
        for number, wires in asked:
            life = driver.Life(wires, made.next(driver.FORKED, number)[2]["pid"], None)
            self.addCleanup(life.close)
            lives.append(life)
        for life in lives:
            life.next(driver.READY)
            self.assertEqual(life.text("1 + 1"), "2")

    @unittest.skipUnless(os.environ.get("KERNELHOST_TEST_NUMPY"), "numpy is not there")
    def test_numpy_preloaded_leaves_one_thread_and_kernels_use_more(self):
        made = self.start(preload=["numpy"])
        self.assertIsNone(made.ready()["cannotFork"])
        one, two = self.fork(made), self.fork(made)
        self.assertNotEqual(
            one.text("import numpy; numpy.random.rand()"), two.text("import numpy; numpy.random.rand()")
        )
        self.assertEqual(one.text("a = numpy.ones((500, 500)); int((a @ a)[0, 0])"), "500")
        threads = int(one.text("import os; len(os.listdir('/proc/self/task'))"))
        self.assertEqual(threads, len(os.sched_getaffinity(0)))


class Shared(KernelCase):
    def test_the_shared_template_is_one_process(self):
        for life in self.lives(launches=("fork",)):
            self.assertEqual(int(life.text("import os; os.getppid()")), template(life.shell).pid)
