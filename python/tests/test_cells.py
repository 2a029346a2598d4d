import os
import tempfile
from pathlib import Path

import driver
from kernel_case import KernelCase

LONE = "\N{REPLACEMENT CHARACTER}"


class Cells(KernelCase):
    def test_a_kernel_introduces_itself(self):
        for life in self.lives():
            hello = life.introduction
            self.assertEqual(hello["pid"], life.pid)
            self.assertEqual(hello["protocol"], 1)
            self.assertEqual(hello["shell"], life.shell)
            self.assertEqual(hello["python"], life.text("__import__('sys').executable").strip("'"))

    def test_the_value_of_the_last_expression_travels_with_done(self):
        for life in self.lives():
            done = life.run("x = 20\nx + 1")
            self.assert_ok(done)
            self.assertEqual(done["value"], {"data": {"text/plain": "21"}, "metadata": {}})
            self.assertEqual(life.shown, [])
            self.assertIsNone(life.run("x = 1")["value"])
            self.assertIsNone(life.run("None")["value"])
            self.assertIsNone(life.run("")["value"])
            self.assertIsNone(life.run("# nothing\n")["value"])
            self.assertEqual(life.text("x"), "1")
            self.assertEqual(life.text("_"), "1")

    def test_cells_are_counted_and_silent_ones_are_not(self):
        for life in self.lives():
            self.assertEqual([life.run("1")["executionCount"] for _ in range(3)], [1, 2, 3])
            done = life.run("y = 5\ny", silent=True)
            self.assertEqual((done["executionCount"], done["value"]), (3, None))
            self.assertEqual(life.run("y")["executionCount"], 4)
            self.assertEqual(life.run("1/0")["executionCount"], 5)

    def test_an_exception_has_name_value_and_source_lines_but_no_frames_of_ours(self):
        for life in self.lives():
            done = life.run("def f(n):\n    return 1 / n\n\nprint(f(0))")
            self.assert_error(done, "ZeroDivisionError", "division by zero")
            text = "\n".join(done["error"]["traceback"])
            self.assertIn("return 1 / n", text)
            self.assertIn("print(f(0))", text)
            self.assertNotIn("kernelhost", text)
            self.assertNotIn("\x1b", text)
            self.assertEqual(life.err, b"")
            # Source lines of a cell that ended long ago.
            life.run("1")
            self.assertIn("return 1 / n", "\n".join(life.run("f(0)")["error"]["traceback"]))

    def test_a_syntax_error_is_an_error_of_its_cell(self):
        for life in self.lives():
            for code, name in (("x = (", "SyntaxError"), ("  x\n y", "IndentationError"), ("return 1", "SyntaxError")):
                done = life.run(code)
                self.assert_error(done, name)
                self.assertNotIn("compile", "\n".join(done["error"]["traceback"]))
            self.assertIn(life.run("x = '\0'")["error"]["name"], ("SyntaxError", "ValueError"))
            self.assert_alive(life)

    def test_system_exit_is_an_error_and_the_kernel_lives(self):
        for life in self.lives():
            for code, value in (
                ("import sys; sys.exit(3)", "3"),
                ("sys.exit('why')", "why"),
                ("raise SystemExit", ""),
                ("import asyncio\nawait asyncio.sleep(0)\nsys.exit(4)", "4"),
            ):
                self.assert_error(life.run(code), "SystemExit", value)
                self.assertEqual(life.err, b"")
            self.assert_alive(life)

    def test_exit_ends_the_life_with_its_code_after_atexit(self):
        for code, wanted in (
            ("exit()", 0),
            ("exit(7)", 7),
            ("quit(3)", 3),
            ("def f():\n    exit(9)\nf()", 9),
            ("exit('why')", 1),
            ("import asyncio\nawait asyncio.sleep(0)\nexit(6)", 6),
        ):
            for life in self.lives(launches=("cold",) if wanted in (3, 9) else None):
                life.run("import atexit\natexit.register(print, 'at exit')")
                done = life.run(f"{code}\nprint('not reached')")
                self.assertEqual(done, {"exiting": {"code": wanted}})
                self.assertEqual(life.wait(), wanted)
                self.assertIn(b"at exit", life.out)
                self.assertNotIn(b"not reached", life.out)
                self.assertEqual(life.err, b"why\n" if "why" in code else b"")

    def test_a_repr_that_raises_is_an_error_and_the_kernel_lives(self):
        for life in self.lives():
            done = life.run("class Bad:\n    def __repr__(self): raise ValueError('no repr')\nBad()")
            self.assert_error(done, "ValueError", "no repr")
            self.assert_error(life.run("raise type('E', (Exception,), {'__str__': lambda s: 1/0})()"), "E")
            self.assert_alive(life)

    def test_lone_surrogates_reach_the_host_as_replacement_characters(self):
        for life in self.lives():
            self.assertEqual(life.text("class S:\n    def __repr__(self): return '\\ud8ff!'\nS()"), LONE + "!")
            self.assert_error(life.run("raise ValueError('\\udc80')"), "ValueError", LONE)
            self.assert_ok(life.run("print('\\udc80')"))
            self.assertEqual(life.out, b"\\udc80\n")
            self.assert_ok(life.run("display({'text/plain': 'a\\udc80'}, raw=True)"))
            self.assertEqual(life.shown[0][2]["data"], {"text/plain": "a" + LONE})
            self.assert_alive(life)

    def test_what_is_too_large_for_a_frame_is_cut(self):
        for life in self.lives(launches=("cold",)):
            done = life.run("class Big:\n    def __repr__(self): return 'é' * (70 << 20)\nBig()")
            text = done["value"]["data"]["text/plain"]
            self.assertTrue(text.startswith("éé"))
            self.assertRegex(text, r"^'é+… \[\d+ characters cut\] …é+'$|^é+… \[\d+ characters cut\] …é+$")
            self.assertLess(len(text), 2_000_000)
            done = life.run("raise ValueError('v' * (70 << 20))")
            self.assert_error(done, "ValueError")
            self.assertLess(len(str(done)), 2_000_000)
            self.assert_ok(life.run("display({'image/png': 'x' * (70 << 20)}, raw=True)"))
            self.assertIn("left out", life.shown[0][2]["data"]["text/plain"])
            self.assert_alive(life)

    def test_bundles_that_json_has_no_word_for_are_sent_all_the_same(self):
        for life in self.lives():
            code = "display({'application/json': {'n': float('nan'), 's': {1}, 'b': b'ab', 2: object}}, raw=True)"
            self.assert_ok(life.run(code))
            sent = life.shown[0][2]["data"]["application/json"]
            self.assertEqual((sent["n"], sent["s"], sent["b"]), (None, [1], "YWI="))
            self.assert_ok(life.run("a = []\na.append(a)\ndisplay({'application/json': a}, raw=True)"))
            self.assert_alive(life)

    def test_displays_keep_their_place_in_what_is_printed(self):
        for life in self.lives():
            done = life.run("import os\nprint('a')\ndisplay(1)\nos.system('echo b')\ndisplay(2)\nprint('c')\n3")
            self.assert_ok(done)
            self.assertEqual([kind for kind, _, _ in life.shown], [driver.DISPLAY] * 2)
            self.assertEqual(life.out_at_frame[-3:], [b"a\n", b"a\nb\n", b"a\nb\nc\n"])
            self.assertEqual(done["value"]["data"]["text/plain"], "3")

    def test_a_display_can_be_updated(self):
        for life in self.lives():
            self.assert_ok(life.run("h = display('one', display_id='d')\nh.update('two')"))
            first, second = (frame[2] for frame in life.shown)
            self.assertEqual((first["displayId"], first["update"]), ("d", False))
            self.assertEqual((second["displayId"], second["update"]), ("d", True))
            self.assertEqual(second["data"]["text/plain"], "'two'")

    def test_rich_values_have_their_bundles(self):
        code = """
class Rich:
    def __repr__(self): return 'rich'
    def _repr_html_(self): return '<b>rich</b>'
    def _repr_png_(self): return b'png'
class Whole:
    def _repr_mimebundle_(self, include=None, exclude=None): return {'text/markdown': '*w*'}
    def __repr__(self): return 'whole'
"""
        for life in self.lives():
            self.assert_ok(life.run(code))
            data = life.run("Rich()")["value"]["data"]
            self.assertEqual(data["text/plain"], "rich")
            self.assertEqual(data["text/html"], "<b>rich</b>")
            self.assertEqual(data["image/png"].strip(), "cG5n")
            data = life.run("Whole()")["value"]["data"]
            self.assertEqual((data["text/markdown"], data["text/plain"]), ("*w*", "whole"))

    def test_displays_from_threads_and_between_cells_reach_the_host(self):
        code = "import threading\nt = threading.Thread(target=lambda: display('t'))\nt.start()\nt.join()\n5"
        for life in self.lives():
            self.assert_ok(life.run(code))
            self.assertEqual(life.shown[0][:2], (driver.DISPLAY, life.cell))
            life.run("import time\nthreading.Thread(target=lambda: (time.sleep(0.1), display('late'))).start()")
            self.assertEqual(life.next(driver.DISPLAY)[1], 0)

    def test_future_imports_hold_for_later_cells(self):
        for life in self.lives():
            life.run("from __future__ import annotations")
            self.assertEqual(life.text("def f(x: nowhere): pass\nf.__annotations__"), "{'x': 'nowhere'}")

    def test_cells_run_in_a_main_module_like_that_of_an_interactive_python(self):
        for life in self.lives():
            self.assertEqual(life.text("__name__"), "'__main__'")
            self.assertEqual(life.text("'__file__' in globals()"), "False")
            self.assertEqual(life.text("__spec__ is None"), "True")
            self.assertEqual(life.text("import sys; (sys.argv, sys.path[0])"), "([''], '')")
            self.assertEqual(life.text("sys.modules['__main__'].__dict__ is globals()"), "True")
            self.assertEqual(life.text("[p for p in sys.path if p.endswith('/python')]"), "[]")
            self.assertEqual(life.text("import kernelhost; kernelhost.__version__"), "'0.1.0'")
            self.assertEqual(
                life.text("import pickle; C = type('C', (), {}); pickle.loads(pickle.dumps(C)) is C"), "True"
            )

    def test_init_runs_silently_before_ready(self):
        for life in self.lives(init="z = 3\nprint('init')\nz"):
            self.assertEqual(life.run("z")["executionCount"], 1)

    def test_an_init_that_fails_is_a_start_failure(self):
        for launch in self.launches:
            for shell in self.shells:
                life = self.start(launch, shell, init="1/0")
                failed = life.next(driver.START_FAILED)[2]
                self.assertEqual((failed["stage"], failed["error"]["name"]), ("init", "ZeroDivisionError"))
                self.assertEqual(life.wait(), 1)

    def test_a_cwd_that_cannot_be_entered_is_a_start_failure_that_names_it(self):
        for launch in self.launches:
            for cwd, why in (("/nowhere/at-all", "No such file"), ("/etc/passwd", "Not a directory")):
                life = self.start(launch, "plain", cwd=cwd)
                failed = life.next(driver.START_FAILED)[2]
                self.assertEqual(failed["stage"], "cwd")
                self.assertIn(cwd, failed["error"]["value"])
                self.assertIn(why, failed["error"]["value"])
                self.assertEqual(life.wait(), 1)

    def test_a_deleted_cwd_does_not_stop_cells(self):
        for launch in self.launches:
            for shell in self.shells:
                with tempfile.TemporaryDirectory() as folder:
                    path = Path(folder, "gone")
                    path.mkdir()
                    life = self.start(launch, shell, cwd=str(path))
                    life.next(driver.READY)
                    path.rmdir()
                    self.assert_alive(life)
                    self.assert_error(life.run("1/0"), "ZeroDivisionError")
                    self.assert_ok(life.run(f"import os; os.chdir({folder!r})"))
                    self.assertEqual(life.text("os.getcwd()"), repr(os.path.realpath(folder)))

    def test_modules_in_the_cwd_or_in_pythonpath_do_not_stop_a_start(self):
        names = ("random", "email", "signal", "types", "json", "code", "traceback", "linecache", "asyncio", "inspect")
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                Path(folder, f"{name}.py").write_text("mine = True\n")
            for shell in self.shells:
                env = {**os.environ, "PYTHONPATH": folder}
                for config in ({"cwd": folder}, {"env": env}):
                    life = driver.cold(driver.configuration(shell, **config))
                    self.addCleanup(self._end, life)
                    life.next(driver.READY)
                    self.assert_alive(life)
                    done = life.run("1/0")
                    self.assert_error(done, "ZeroDivisionError")
                    self.assertIn("line 1", "\n".join(done["error"]["traceback"]))
                    if shell == "plain":
                        self.assertEqual(life.text("import random; random.mine"), "True")
                life = self.start("fork", shell, cwd=folder)
                life.next(driver.READY)
                self.assert_alive(life)

    def test_any_shell_may_be_asked_for(self):
        life = driver.cold(driver.configuration("auto"))
        self.addCleanup(self._end, life)
        self.assertEqual(life.next(driver.READY)[2]["shell"], driver.SHELLS[-1])
        if not driver.HAS_IPYTHON:
            life = driver.cold(driver.configuration("ipython"))
            self.addCleanup(self._end, life)
            failed = life.next(driver.START_FAILED)[2]
            self.assertEqual(failed["stage"], "shell")
            self.assertIn("IPython", failed["error"]["value"])
            self.assertEqual(life.wait(), 1)
