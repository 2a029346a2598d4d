import os
import signal
import socket
import subprocess
import tempfile
import time
import unittest

import driver
from kernel_case import KernelCase

PYTHON2 = os.environ.get("KERNELHOST_TEST_PYTHON2", "")


class Processes(KernelCase):
    def test_a_child_that_runs_off_its_cell_never_answers(self):
        report = "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))"
        for life in self.lives():
            self.assert_ok(life.run(f"import os\npid = os.fork()\nif pid: {report}\nelse: print('child')"))
            self.assertEqual(life.out, b"child\n0\n")
            self.assertEqual(life.frames, [])
            self.assert_ok(life.run(f"pid = os.fork()\nif pid: {report}\nelse: 1/0"))
            self.assertEqual(life.out, b"1\n")
            self.assertIn(b"ZeroDivisionError", life.err)
            self.assert_ok(life.run(f"pid = os.fork()\nif pid: {report}\nelse: exit(5)"))
            self.assertEqual(life.out, b"5\n")
            self.assert_ok(life.run(f"pid = os.fork()\nif pid: {report}\nelse: display('child'); print('shown')"))
            self.assertEqual((life.out, life.shown), (b"shown\n0\n", []))
            awaiting = (
                f"import asyncio\nawait asyncio.sleep(0)\npid = os.fork()\nif pid: {report}\nelse: print('child')"
            )
            self.assert_ok(life.run(awaiting))
            self.assertEqual(life.out, b"child\n0\n")
            self.assert_alive(life)

    def test_a_child_that_lives_on_does_not_hold_the_wires(self):
        for life in self.lives(shells=("plain",)):
            code = "import os, time\nif os.fork() == 0:\n    print(os.getpid())\n    time.sleep(60)\n    os._exit(0)"
            self.assert_ok(life.run(code))
            child = int(life.wait_output("\n"))
            fds = sorted(int(fd) for fd in os.listdir(f"/proc/{child}/fd"))
            self.assertEqual(fds, [0, 1, 2])
            os.kill(life.pid, signal.SIGKILL)
            self.assertEqual(life.wait(), -signal.SIGKILL)
            life.close()
            life.closed = True
            driver.wait_gone(child)

    def test_a_fork_in_a_task_between_cells_never_answers(self):
        code = """
import asyncio, os
async def later():
    await asyncio.sleep(0.05)
    global pid
    pid = os.fork()
t = asyncio.create_task(later())
"""
        for life in self.lives():
            self.assert_ok(life.run(code))
            time.sleep(0.2)
            self.assertEqual(life.text("await t\nos.waitpid(pid, 0)[1]"), "0")
            self.assert_alive(life)

    def test_multiprocessing_by_fork_and_by_spawn_works(self):
        code = """
import multiprocessing, operator, os
out = []
for way in ('fork', 'spawn'):
    with multiprocessing.get_context(way).Pool(2) as pool:
        out.append(pool.map(operator.neg, [1, 2]))
out
"""
        for life in self.lives():
            self.assertEqual(life.text(code), "[[-1, -2], [-1, -2]]")
            self.assertEqual(life.err, b"")

    def test_background_jobs_end_with_their_interrupted_cell_and_others_stay(self):
        def job(name, deaf=False):
            trap = 'trap "" TERM; ' if deaf else ""
            return f"sh -c 'echo {name} $$; {trap}while true; do sleep 0.05; done' &"

        runs = ["subprocess.run({!r}, shell=True)", "os.system({!r})"]
        for life in self.lives():
            of_shell = [*runs, "get_ipython().system({!r})"] if life.shell == "ipython" else runs
            for run in of_shell:
                life.run("import os, subprocess")
                self.assert_ok(life.run(run.format(job("early"))))
                early = self._printed_pid(life, "early")
                hang = f"{job('late')} {job('deaf', deaf=True)} wait"
                life.start_cell(run.format(hang))
                late = self._printed_pid(life, "late")
                deaf = self._printed_pid(life, "deaf")
                time.sleep(0.05)
                life.interrupt()
                self.assert_error(life.end_cell(), "KeyboardInterrupt")
                for pid in (late, deaf):
                    driver.wait_gone(pid)
                self.assertTrue(os.path.exists(f"/proc/{early}"), run)
                os.kill(early, signal.SIGKILL)

    def test_a_child_that_was_being_started_when_the_interrupt_came_feels_it(self):
        # A signal to the group that comes before the fork does not reach the child.
        code = """
import os, signal, subprocess
class Late(subprocess.Popen):
    def _execute_child(self, *args, **options):
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        print('go')
        while signal.SIGINT not in signal.sigpending(): pass
        super()._execute_child(*args, **options)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
p = None
Late(['sleep', '600'], restore_signals=True, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, []))
"""
        for life in self.lives():
            life.start_cell(code)
            life.wait_output("go")
            life.interrupt()
            self.assert_error(life.end_cell(), "KeyboardInterrupt")
            group = [int(name) for name in os.listdir("/proc") if name.isdigit() and self._group(name) == life.pid]
            self.assertEqual([pid for pid in group if pid != life.pid and not self._is_zombie(pid)], [])

    def _printed_pid(self, life, name):
        printed = life.wait_output(f"{name} ")
        return int(printed.partition(f"{name} ".encode())[2].split()[0])

    def _group(self, name):
        try:
            return os.getpgid(int(name))
        except OSError:
            return None

    def _is_zombie(self, pid):
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"Z"

    def test_shutdown_leaves_as_a_script_does(self):
        for life in self.lives():
            life.run("import atexit, threading, time\natexit.register(print, 'at exit')")
            life.run("threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()")
            life.send(driver.SHUTDOWN, 0)
            self.assertEqual(life.wait(), 0)
            self.assertEqual(life.out, b"thread\nat exit\n")
            self.assertEqual(life.err, b"")

    def test_shutdown_while_a_cell_runs_comes_after_it(self):
        for life in self.lives():
            life.start_cell("import asyncio\nawait asyncio.sleep(0.1)\n3")
            life.send(driver.SHUTDOWN, 0)
            self.assertEqual(life.end_cell()["value"]["data"]["text/plain"], "3")
            self.assertEqual(life.wait(), 0)

    def test_the_end_of_requests_ends_the_kernel_at_once(self):
        for life in self.lives():
            life.run("import atexit\natexit.register(print, 'at exit')")
            life.wires.requests.shutdown(socket.SHUT_WR)
            self.assertEqual(life.wait(), 0)

    def test_the_end_of_the_lifeline_kills_the_kernel(self):
        for life in self.lives():
            life.start_cell("import time\nprint('go')\ntime.sleep(60)")
            life.wait_output("go")
            os.close(life.wires.lifeline)
            self.assertEqual(life.wait(), -signal.SIGKILL)

    def test_exit_codes_arrive_as_they_are(self):
        for life in self.lives(shells=("plain",)):
            life.start_cell("import os; os._exit(23)")
            self.assertEqual(life.wait(), 23)

    def test_a_frame_that_breaks_the_format_ends_the_kernel_with_70(self):
        header = driver.HEADER
        for bad in (
            header.pack(1 << 30, 2, 0, 1),
            header.pack(0, 2, 1, 1),
            header.pack(0, 99, 0, 1),
            header.pack(3, 2, 0, 1) + b"[1]",
            header.pack(3, 2, 0, 1) + b"\xff{}",
            header.pack(2, 2, 0, 1) + b"{}",
            driver.frame(driver.EXECUTE, 1, {"code": 1, "silent": False}),
            driver.frame(driver.CONFIGURE, 0, {}),
        ):
            for life in self.lives(launches=("cold",), shells=("plain",)):
                life.wires.requests.sendall(bad)
                self.assertEqual(life.wait(), 70)
                self.assertEqual(life.err.count(b"\n"), 1, life.err)
                self.assertIn(b"protocol", life.err)

    def test_another_protocol_is_a_start_failure(self):
        for launch in self.launches:
            life = self.start(launch, "plain", protocol=2)
            failed = life.next(driver.START_FAILED)[2]
            self.assertEqual(failed["stage"], "protocol")
            self.assertEqual(life.wait(), 1)

    def test_a_kernel_has_its_wires_and_no_other_descriptor(self):
        code = """
import fcntl, os
for fd in range(64):
    if os.path.exists(f'/proc/self/fd/{fd}'):
        print(fd, bool(fcntl.fcntl(fd, fcntl.F_GETFD)))
"""
        for life in self.lives():
            self.assert_ok(life.run(code))
            self.assertEqual(life.out, b"0 False\n1 False\n2 False\n3 True\n4 True\n5 True\n6 True\n")

    @unittest.skipUnless(PYTHON2, "KERNELHOST_TEST_PYTHON2 names no interpreter")
    def test_an_interpreter_that_is_too_old_is_told_so(self):
        done = subprocess.run([PYTHON2, driver.BOOT, "kernel"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("kernelhost needs Python 3.10 or newer; this is 2.7.", done.stderr)


FACTS = """
import os, sys, signal, locale, time, random, tempfile, multiprocessing, resource
facts = {
    'argv': sys.argv, 'orig_argv': sys.orig_argv, 'path': sys.path, 'flags': str(sys.flags), 'cwd': os.getcwd(),
    'env': dict(os.environ), 'umask': os.umask(0o22), 'nice': os.nice(0), 'sid': os.getsid(0) == os.getpid(),
    'pgid': os.getpgid(0) == os.getpid(), 'locale': locale.setlocale(locale.LC_ALL),
    'encoding': [sys.getfilesystemencoding(), sys.stdout.encoding, sys.stdin.encoding], 'tz': time.tzname,
    'signals': {n: str(signal.getsignal(n)) for n in range(1, 65) if n not in (2, 32, 33)},
    'mask': signal.pthread_sigmask(signal.SIG_BLOCK, []), 'limits': [resource.getrlimit(n) for n in range(16)],
    'main': sorted(k for k in globals() if k.startswith('__')), 'mpdir': multiprocessing.process.ORIGINAL_DIR,
    'threads': len(os.listdir('/proc/self/task')), 'tempdir': tempfile.gettempdir(), 'wakeup': signal.set_wakeup_fd(-1),
    'oom': open('/proc/self/oom_score_adj').read(), 'cookies': [sys.prefix, sys.executable, sys.warnoptions],
    'hooks': [sys.excepthook.__name__, sys.unraisablehook.__name__], 'comm': open('/proc/self/comm').read(),
}
for name in FACTS_LEFT_OUT: facts.pop(name)
print(repr(facts))
"""


class Freshness(KernelCase):
    def test_a_forked_life_is_like_a_spawned_one(self):
        with tempfile.TemporaryDirectory() as folder:
            # Variables that are read at the interpreter's start belong to the template.
            env = {
                **{name: value for name, value in os.environ.items() if name.startswith("PYTHON")},
                "PATH": os.environ["PATH"],
                "HOME": folder,
                "TZ": "Asia/Tokyo",
                "X": "1",
                "TMPDIR": folder,
                "LC_ALL": "C.UTF-8",
            }
            for shell in self.shells:
                seen = []
                for life in self.lives(shells=(shell,), cwd=folder, env=env, oomScoreAdj=300):
                    self.assert_ok(life.run("FACTS_LEFT_OUT = []" + FACTS))
                    seen.append(eval(life.out))
                spawned, forked = seen
                for name, value in spawned.items():
                    self.assertEqual(value, forked[name], name)

    def test_the_environment_is_exact(self):
        os.environ["KERNELHOST_LEAK"] = "1"
        self.addCleanup(os.environ.pop, "KERNELHOST_LEAK", None)
        env = {"PATH": os.environ["PATH"], "Y": "é"}
        for life in self.lives(env=env):
            for code in (
                "dict(os.environ)",
                "dict(e.split('=', 1) for e in subprocess.check_output(['env'], text=True).splitlines())",
            ):
                seen = eval(life.text(f"import os, subprocess; {code}"))
                seen = {k: v for k, v in seen.items() if k not in ("LC_CTYPE", "_", "PWD", "SHLVL")}
                self.assertEqual(seen, env)
