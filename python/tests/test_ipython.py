import os
import signal
import tempfile
import time
import unittest
from pathlib import Path

import driver
from kernel_case import KernelCase


@unittest.skipUnless(driver.HAS_IPYTHON, "IPython is not there")
class IPython(KernelCase):
    shells = ("ipython",)

    def threads(self, life):
        return len(os.listdir(f"/proc/{life.pid}/task"))

    def test_scripts_write_to_our_own_output_and_leave_no_thread(self):
        for life in self.lives():
            self.assert_ok(life.run("%%bash\necho out\necho err >&2\n"))
            self.assertEqual((life.out, life.err), (b"out\n", b"err\n"))
            self.assert_ok(life.run("%%sh\nread x\necho after"))
            self.assert_ok(life.run("%%script cat\nhello"))
            self.assertEqual(life.out, b"hello\n")
            self.assert_error(life.run("%%bash\nexit 3"), "CalledProcessError")
            self.assert_ok(life.run("%%bash --no-raise-error\nexit 3"))
            self.assert_ok(life.run("%%bash --out a --err b\necho out\necho err >&2"))
            self.assertEqual((life.out, life.err), (b"", b""))
            self.assertEqual(life.text("a, b"), "('out\\n', 'err\\n')")
            self.assert_ok(life.run("%%bash --bg --out c --proc p\necho later"))
            self.assertEqual(life.text("p.wait(), c.read()"), "(0, b'later\\n')")
            self.assert_ok(life.run("%%script nowhere-at-all\nx"))
            self.assertIn(b"Couldn't find program", life.out)
            self.assertEqual(self.threads(life), 1)

    def test_the_output_of_a_script_is_live_and_an_interrupt_reaches_it(self):
        for life in self.lives():
            life.start_cell("%%bash\necho go\nsleep 60")
            life.wait_output("go")
            time.sleep(0.05)
            life.interrupt()
            self.assert_error(life.end_cell(), "KeyboardInterrupt")
            life.start_cell("!echo go; sleep 60")
            life.wait_output("go")
            time.sleep(0.05)
            life.interrupt()
            self.assert_error(life.end_cell(), "KeyboardInterrupt")
            self.assertEqual(self.threads(life), 1)

    def test_an_interrupt_that_comes_while_nested_code_is_compiled_ends_the_cell_too(self):
        code = (
            "import time\n"
            "ip = get_ipython(); flags = ip.compile.extra_flags\n"
            "def slow(_):\n"
            "    ip.compile.extra_flags = flags; print('go'); time.sleep(600)\n"
            "def nested():\n"
            "    ip.compile.extra_flags = slow; ip.run_cell('1')"
        )
        for life in self.lives():
            self.assert_ok(life.run(code))
            life.start_cell("nested()\nprint('after')")
            life.wait_output("go")
            life.interrupt()
            self.assert_error(life.end_cell(), "KeyboardInterrupt")
            self.assertNotIn(b"after", life.out)

    def test_an_interrupt_ends_a_cell_whatever_ipython_runs_for_it(self):
        loop = "while True:\n    "
        for life in self.lives():
            for code in (
                "!echo go; sleep 600\nprint('after')",
                f"{loop}!echo go; sleep 600",
                "x = !echo go >&2; sleep 600\nprint('after')",
                f"{loop}x = !sleep 0.05\n    print('go')",
                f"{loop}x = %sx sleep 0.05\n    print('go')",
                f"import time\n{loop}%time print('go'); time.sleep(600)",
                "%%time\nprint('go')\nimport time; time.sleep(600)",
                "%%capture\nimport os, time\nos.write(1, b'go')\ntime.sleep(600)",
                "get_ipython().run_cell('print(\"go\"); import time; time.sleep(600)')\nprint('after')",
                "%%bash --out x\necho go >&2\nsleep 600",
                "%%bash\ntrap '' INT\necho go\nsleep 600",
            ):
                life.start_cell(code)
                life.wait_output("go") if ">&2" not in code else time.sleep(0.3)
                time.sleep(0.05)
                life.interrupt()
                done = life.end_cell()
                self.assert_error(done, "KeyboardInterrupt")
                self.assertTrue(done["interrupted"])
                self.assertNotIn(b"after", life.out, code)
                self.assertEqual(life.text("1 + 1"), "2", code)

    def test_the_output_of_a_command_is_taken_as_ipython_takes_it(self):
        for life in self.lives():
            self.assertEqual(
                life.text("x = !echo one; echo two >&2; exit 3\nx, type(x).__name__"), "(['one', 'two'], 'SList')"
            )
            self.assertEqual(life.text("y = 'v'\nx = !echo $y {y}\nx.n"), "'v v'")
            self.assertEqual(life.text("%sx echo a"), "['a']")
            self.assertEqual(life.text("!!echo a"), "['a']")
            self.assert_error(life.run("x = !sleep 1 &"), "OSError")

    def test_system_commands_run_without_a_terminal(self):
        for life in self.lives():
            self.assert_ok(life.run("x = 'y'\n!echo $x {x}; test -t 1 || echo no-tty\n!exit 4"))
            self.assertEqual(life.out, b"y y\nno-tty\n")
            self.assertEqual(life.text("_exit_code"), "4")
            self.assertEqual(life.text("z = !echo one; echo two\nz"), "['one', 'two']")

    def test_magics_and_history_work(self):
        for life in self.lives():
            self.assert_ok(life.run("%timeit -n1 -r1 pass"))
            self.assert_ok(life.run("%%time\n1"))
            self.assert_ok(life.run("%cd /"))
            self.assertEqual(life.text("import os; os.getcwd()"), "'/'")
            self.assert_ok(life.run("v = 5"))
            self.assert_ok(life.run("%history -n"))
            self.assertIn(b"v = 5", life.out)
            self.assert_ok(life.run("%who"))
            self.assert_ok(life.run("%bookmark here"))
            self.assert_error(life.run("%nowhere"), "UsageError")
            self.assert_ok(life.run("%%capture c\nprint('x')\ndisplay(1)"))
            self.assertEqual((life.out, life.shown), (b"", []))
            self.assertEqual(life.text("c.stdout, len(c.outputs)"), "('x\\n', 1)")
            self.assertEqual(life.text("3;"), None)
            self.assert_ok(life.run("from IPython.display import clear_output, HTML\nclear_output(wait=True)"))
            self.assertEqual(life.shown[0][::2], (driver.CLEAR, {"wait": True}))
            self.assertEqual(life.run("HTML('<b>')")["value"]["data"]["text/html"], "<b>")
            self.assertEqual(life.text("len(_oh) > 2 and _ is not None"), "True")

    def test_a_value_that_other_output_follows_has_a_frame_of_its_own(self):
        for life in self.lives():
            life.run("get_ipython().ast_node_interactivity = 'all'")
            done = life.run("1\n2")
            self.assertIsNone(done["value"])
            self.assertEqual([frame[2]["data"]["text/plain"] for frame in life.shown], ["1", "2"])
            life.run("get_ipython().ast_node_interactivity = 'last_expr'")
            life.run("hook = lambda result: display('after')\nget_ipython().events.register('post_run_cell', hook)")
            done = life.run("3")
            self.assertIsNone(done["value"])
            self.assertEqual([kind for kind, _, _ in life.shown], [driver.VALUE, driver.DISPLAY])

    def test_exit_needs_no_parentheses(self):
        for word in ("exit", "quit"):
            for life in self.lives():
                self.assertEqual(life.run(word), {"exiting": {"code": 0}})
                self.assertEqual(life.wait(), 0)

    def test_no_file_of_the_home_is_read_or_written(self):
        with tempfile.TemporaryDirectory() as home:
            startup = Path(home, ".ipython", "profile_default", "startup")
            startup.mkdir(parents=True)
            Path(startup, "00.py").write_text("import os; os._exit(4)")
            Path(startup.parent, "ipython_config.py").write_text("import os; os._exit(5)")
            before = sorted(Path(home).rglob("*"))
            for folder in (home, "/nowhere/at-all", "/proc"):
                for life in self.lives(env={**os.environ, "HOME": folder}):
                    self.assert_ok(life.run("1"))
                    self.assert_ok(life.run("!true"))
                    life.send(driver.SHUTDOWN, 0)
                    self.assertEqual(life.wait(), 0)
                    self.assertEqual((life.out, life.err), (b"", b""))
                self.assertEqual(sorted(Path(home).rglob("*")), before)

    def test_exception_groups_and_nested_runs_are_told(self):
        for life in self.lives():
            done = life.run("%tb")
            self.assertEqual(done["status"], "ok")
            self.assert_ok(life.run("get_ipython().run_cell('1/0'); 5"))
            self.assertIn(b"ZeroDivisionError", life.err)
            if "3.10" not in life.introduction["pythonVersion"]:
                done = life.run("raise ExceptionGroup('many', [ValueError('one')])")
                self.assert_error(done, "ExceptionGroup")
                self.assertIn("ValueError: one", "\n".join(done["error"]["traceback"]))

    def test_what_the_user_installs_for_interrupts_is_felt_by_children_only_once(self):
        for life in self.lives(launches=("fork",)):
            life.start_cell("!trap 'echo felt; exit 0' INT; echo go; while true; do sleep 0.05; done")
            life.wait_output("go")
            time.sleep(0.1)
            life.interrupt()
            life.end_cell()
            self.assertEqual(life.out.count(b"felt"), 1)
            os.kill(life.pid, signal.SIGINT)
            self.assert_alive(life)
