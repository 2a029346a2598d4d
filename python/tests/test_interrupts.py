import os
import random
import signal
import sys
import tempfile
import time
import unittest
from pathlib import Path

import driver
from kernel_case import KernelCase

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernelhost import interrupts


class SignalsAndIds(unittest.TestCase):
    def setUp(self):
        read, self.write = os.pipe()
        before = signal.getsignal(signal.SIGINT)
        self.interrupts = interrupts.Interrupts(read)
        self.addCleanup(signal.signal, signal.SIGINT, before)
        self.addCleanup(os.close, self.write)
        self.addCleanup(os.close, read)

    def told(self, ids, signals=1):
        os.write(self.write, b"".join(cell.to_bytes(8, "little") for cell in ids))
        for _ in range(signals):
            self.interrupts.handler(signal.SIGINT, None)

    def test_signals_that_are_still_to_come_for_ids_already_read_are_never_the_next_cells(self):
        self.interrupts.begin(1)
        self.told([1, 1])
        self.told([1, 1, 1])
        self.told([1])
        self.interrupts.end()
        self.interrupts.begin(2)
        # Six ids, three signals so far.
        self.told([], signals=3)
        self.assertEqual(self.interrupts.pending, 0)
        self.told([])
        self.assertNotEqual(self.interrupts.pending, 0, "one more is from elsewhere")

    def test_a_signal_that_comes_while_another_is_decided_does_not_decide_for_it(self):
        nested = [True]

        class Nesting(interrupts.Interrupts):
            def _arrived(self):
                ids = super()._arrived()
                if nested:
                    nested.pop()
                    self.handler(signal.SIGINT, sys._getframe())
                return ids

        struck = Nesting(self.interrupts.fd)
        struck.begin(1)

        @interrupts.gate
        def user():
            struck.handler(signal.SIGINT, sys._getframe())

        os.write(self.write, (1).to_bytes(8, "little"))
        with self.assertRaises(KeyboardInterrupt):
            user()
        self.assertEqual(nested, [])
        self.assertTrue(struck.by_host)


class Interrupts(KernelCase):
    def interrupt_when(self, life, code, printed="go", **how):
        life.start_cell(code)
        life.wait_output(printed)
        # What has been printed is read before the cell has come to its next line.
        time.sleep(0.05)
        life.interrupt(**how)
        try:
            return life.end_cell(deadline=3)
        except TimeoutError:
            # A signal that comes in the instant before a system call blocks ends nothing; so the host asks again.
            life.interrupt(**how)
            return life.end_cell(deadline=5)

    def assert_interrupted(self, done):
        self.assert_error(done, "KeyboardInterrupt")
        self.assertNotIn("kernelhost", "\n".join(done["error"]["traceback"]))
        self.assertTrue(done["interrupted"])

    def test_an_interrupt_ends_sync_code(self):
        for life in self.lives():
            for body in ("time.sleep(60)", "while True: pass"):
                self.assert_interrupted(self.interrupt_when(life, f"import time\nprint('go')\n{body}\n1"))
            self.assert_alive(life)

    def test_an_interrupt_ends_a_child_process_that_the_cell_waits_for(self):
        for life in self.lives():
            code = "import subprocess\nprint('go')\nsubprocess.run(['sleep', '60'])"
            self.assert_interrupted(self.interrupt_when(life, code))
            self.assert_alive(life)

    def test_an_interrupt_cancels_a_cell_that_awaits(self):
        code = """
import asyncio
seen = []
async def inner():
    try:
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        seen.append('cancelled')
        raise
print('go')
await inner()
"""
        for life in self.lives():
            self.assert_interrupted(self.interrupt_when(life, code))
            self.assertEqual(life.text("seen"), "['cancelled']")

    def test_an_interrupt_in_one_of_many_tasks_ends_the_whole_gather(self):
        code = """
import asyncio, time
ticks = []
async def block(n):
    for _ in range(600):
        if not ticks: print('go', flush=True)
        ticks.append(n)
        time.sleep(0.1)
        await asyncio.sleep(0)
await asyncio.gather(*[block(n) for n in range(10)])
"""
        for life in self.lives():
            self.assert_interrupted(self.interrupt_when(life, code))
            before = life.text("len(ticks)")
            life.run("await asyncio.sleep(0.3)")
            self.assertEqual(life.text("len(ticks)"), before)

    def test_an_interrupt_in_one_of_many_tasks_of_their_own_cancels_the_others(self):
        # Each of them would block, and need an interrupt of its own.
        code = """
import asyncio, time
async def block(n):
    print('go' if n == 0 else n)
    time.sleep(600)
tasks = [asyncio.create_task(block(n)) for n in range(10)]
for task in tasks: await task
"""
        for life in self.lives():
            self.assert_interrupted(self.interrupt_when(life, code))
            self.assertEqual(life.text("sum(task.cancelled() for task in tasks)"), "9")
            self.assertEqual(life.text("del tasks, task\nimport gc; gc.collect(); 1"), "1")
            self.assertEqual(life.err, b"")

    def test_what_an_interrupted_cell_has_made_in_the_loop_is_cancelled_and_cleans_up_in_its_time(self):
        make = """
async def work(name):
    try:
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(0.01)
        seen.append(name)
async def outer(): return asyncio.create_task(work('inner'))
"""
        for life in self.lives():
            life.run("import asyncio, time\nseen = []" + make)
            life.run("kept = asyncio.create_task(work('kept'))\nawait asyncio.sleep(0)")
            # In a cell that never lets the loop run, the task does not begin.
            for hang, expected in (
                ("await asyncio.sleep(600)", "['inner', 'task']"),
                ("time.sleep(600)", "[]"),
                ("asyncio.get_event_loop().run_until_complete(asyncio.sleep(600))", "['task']"),
                ("asyncio.run(asyncio.sleep(600))", "[]"),
            ):
                code = "t = asyncio.create_task(work('task'))\n"
                if hang.startswith("await"):
                    code += "i = await outer()\nawait asyncio.sleep(0)\n"
                self.assert_interrupted(self.interrupt_when(life, f"{code}print('go')\n{hang}"))
                self.assertEqual(life.text("sorted(seen)"), expected, hang)
                self.assertEqual(life.text("t.cancelled(), kept.done()"), "(True, False)", hang)
                life.run("seen.clear()")
            self.assert_ok(life.run("kept.cancel()\nawait asyncio.wait([kept])"))

    def test_the_clean_up_of_an_interrupted_cell_may_use_its_own_tasks(self):
        code = """
import asyncio
async def serve():
    while True: (await queue.get()).set_result('answered')
queue = asyncio.Queue()
server = asyncio.create_task(serve())
print('go')
try:
    await asyncio.sleep(600)
finally:
    answer = asyncio.get_running_loop().create_future()
    queue.put_nowait(answer)
    said = await answer
"""
        for life in self.lives():
            self.assert_interrupted(self.interrupt_when(life, code))
            self.assertEqual(life.text("said, server.cancelled()"), "('answered', True)")

    def test_a_task_that_refuses_to_end_does_not_hold_its_interrupted_cell_up(self):
        code = """
import asyncio
async def deaf():
    while not over:
        try: await asyncio.sleep(600)
        except asyncio.CancelledError: pass
over = False
t = asyncio.create_task(deaf())
print('go')
await asyncio.sleep(600)
"""
        for life in self.lives():
            self.assert_interrupted(self.interrupt_when(life, code))
            self.assertEqual(life.text("t.done()"), "False")
            self.assert_ok(life.run("over = True\nt.cancel()\nawait t"))

    def test_a_cell_that_swallows_its_interrupt_keeps_its_tasks(self):
        code = """
import asyncio
t = asyncio.create_task(asyncio.sleep(600))
print('go')
try: await asyncio.sleep(600)
except asyncio.CancelledError: pass
"""
        for life in self.lives():
            self.assert_ok(self.interrupt_when(life, code))
            self.assertEqual(life.text("t.done()"), "False")
            self.assertEqual(life.text("t.cancel()"), "True")

    def test_an_interrupt_of_a_command_of_os_system_ends_the_cell_too(self):
        # C's `system` lets its caller ignore SIGINT meanwhile.
        thread = "import threading\nt = threading.Thread(target=os.system, args=('echo go; sleep 600',))\nt.start()"
        for life in self.lives():
            for code in (
                "import os\nos.system('echo go; sleep 600')\nprint('after')",
                "import os\nwhile True: os.system('echo go; sleep 600')",
                f"import os\n{thread}\nt.join()\nprint('after')",
            ):
                self.assert_interrupted(self.interrupt_when(life, code))
                self.assertNotIn(b"after", life.out)
                # The next one is not hit by what is left of it.
                self.assert_ok(life.run("import time\nos.system('true')\ntime.sleep(0.05)"))

    def test_interrupts_keep_working_when_the_cell_swallows_them(self):
        sync = """
import time
count = 0
while count < 3:
    try:
        print('go', count)
        time.sleep(60)
    except KeyboardInterrupt:
        count += 1
count
"""
        awaiting = """
import asyncio
count = 0
while count < 3:
    try:
        print('go', count)
        await asyncio.sleep(60)
    except asyncio.CancelledError:
        count += 1
count
"""
        for life in self.lives():
            for code in (sync, awaiting):
                life.start_cell(code)
                for n in range(3):
                    life.wait_output(f"go {n}")
                    time.sleep(0.02)
                    life.interrupt()
                done = life.end_cell()
                self.assert_ok(done)
                self.assertTrue(done["interrupted"])
                self.assertEqual(done["value"]["data"]["text/plain"], "3")

    def test_an_interrupt_for_another_cell_is_ignored(self):
        for life in self.lives():
            life.start_cell("import time\nprint('go')\ntime.sleep(0.3)\n'done'")
            life.wait_output("go")
            for cell in (life.cell - 1, life.cell + 1000):
                life.interrupt(cell)
            done = life.end_cell()
            self.assert_ok(done)
            self.assertFalse(done["interrupted"])

    def test_an_interrupt_that_overtakes_its_cell_is_kept_for_it(self):
        for life in self.lives():
            life.interrupt(life.cell + 1)
            time.sleep(0.1)
            self.assert_interrupted(life.run("import time\ntime.sleep(60)"))
            self.assert_ok(life.run("1"))

    def test_sigint_from_elsewhere_interrupts_a_cell_and_is_not_called_ours(self):
        for life in self.lives():
            life.start_cell("import time\nprint('go')\ntime.sleep(60)")
            life.wait_output("go")
            time.sleep(0.05)
            os.kill(life.pid, signal.SIGINT)
            done = life.end_cell()
            self.assert_error(done, "KeyboardInterrupt")
            self.assertFalse(done["interrupted"])
            self.assert_error(life.run("import os, signal\nos.kill(os.getpid(), signal.SIGINT)"), "KeyboardInterrupt")

    def test_sigint_between_cells_does_nothing(self):
        for life in self.lives():
            for _ in range(20):
                os.kill(life.pid, signal.SIGINT)
                time.sleep(0.002)
            life.run("import asyncio\nt = asyncio.create_task(asyncio.sleep(60))")
            for _ in range(20):
                os.kill(life.pid, signal.SIGINT)
                time.sleep(0.002)
            self.assertEqual(life.text("t.done()"), "False")
            self.assertEqual(life.err, b"")

    def test_a_thousand_rapid_interrupts_neither_kill_nor_desync(self):
        draw = random.Random(4)
        cells = ("1 + 1", "x = [i for i in range(200)]", "display(1); 2", "1/0", "print('a')\n3", "sum(range(2000))")
        waiting = "await asyncio.sleep(0.001)"
        for life in self.lives():
            self.assert_ok(life.run("import asyncio"))
            for n in range(1000):
                life.start_cell(waiting if n % 10 == 0 else draw.choice(cells))
                until = time.perf_counter() + draw.random() * 0.0012
                while time.perf_counter() < until:
                    pass
                life.interrupt(group=False)
                done = life.end_cell()
                name = done["error"]["name"] if done["status"] == "error" else None
                if name not in (None, "KeyboardInterrupt", "ZeroDivisionError"):
                    # A library that is interrupted in its own work may raise what it likes from that.
                    self.assertTrue(done["interrupted"], done["error"])
                    self.assertIn("KeyboardInterrupt", "\n".join(done["error"]["traceback"]), done["error"])
            self.assert_alive(life)
            self.assertNotIn(b"Traceback", life.err)

    def test_a_storm_from_elsewhere_neither_kills_nor_desyncs(self):
        for life in self.lives(launches=("fork",)):
            for n in range(150):
                life.start_cell(("1 + 1", "print('a' * 100)", "1/0", "display(2); 3")[n % 4])
                for _ in range(10):
                    os.kill(life.pid, signal.SIGINT)
                life.end_cell()
            self.assert_alive(life)

    def test_a_handler_that_a_cell_installs_works_in_cells_only(self):
        for life in self.lives():
            life.run("import signal\nhits = []\n_h = signal.signal(signal.SIGINT, lambda *a: hits.append(1))")
            os.kill(life.pid, signal.SIGINT)
            life.start_cell("import time\nprint('go')\nuntil = time.monotonic() + 10\nwhile not hits: time.sleep(0.01)")
            life.wait_output("go")
            os.kill(life.pid, signal.SIGINT)
            self.assert_ok(life.end_cell())
            self.assert_ok(life.run("signal.signal(signal.SIGINT, signal.SIG_DFL)"))
            os.kill(life.pid, signal.SIGINT)
            self.assert_alive(life)

    def test_a_cell_that_waits_for_a_barrier_can_be_interrupted(self):
        for life in self.lives():
            life.hold_barriers = True
            life.start_cell("display(1)\ndisplay(2)")
            life.next(driver.DISPLAY)
            time.sleep(0.05)
            life.interrupt()
            self.assert_interrupted(life.end_cell())
            life.hold_barriers = False
            life.wires.calls.sendall(driver.frame(driver.BARRIER_PASSED, life.barriers))
            self.assert_ok(life.run("display(3)\ndisplay(4)"))
            self.assertEqual(len(life.shown), 2)

    def test_a_slow_repr_can_be_interrupted(self):
        code = """
import time
class Slow:
    def __repr__(self):
        print('go')
        time.sleep(60)
Slow()
"""
        for life in self.lives():
            self.assert_interrupted(self.interrupt_when(life, code))
            self.assert_alive(life)

    def test_signals_that_end_a_process_end_a_kernel(self):
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL):
            for life in self.lives(shells=("plain",)):
                os.kill(life.pid, number)
                self.assertEqual(life.wait(), -number)

    def test_an_interrupt_between_two_statements_is_not_lost(self):
        # Each statement is a round trip through the shell's own code, where an interrupt is only kept.
        code = (
            "n = 0\n"
            + "n += 1\n" * 400
            + "print('go')\n"
            + "n += 1\n" * 400
            + "import time\nwhile True: time.sleep(0.01)"
        )
        for life in self.lives(launches=("fork",)):
            for n in range(25):
                life.start_cell(code)
                life.wait_output("go")
                until = time.perf_counter() + n * 0.0004
                while time.perf_counter() < until:
                    pass
                life.interrupt()
                self.assert_interrupted(life.end_cell(deadline=5))

    def test_a_package_whose_import_was_interrupted_can_be_imported_again(self):
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder, "half_way")
            package.mkdir()
            (package / "part.py").write_text("value = 5")
            (package / "__init__.py").write_text(
                "from .part import *\nimport sys, time\n"
                "if not hasattr(sys, 'second_time'):\n    print('go')\n    time.sleep(60)\n"
                "found = part.value\n"
            )
            for life in self.lives():
                self.assert_ok(life.run(f"import sys\nsys.path.insert(0, {folder!r})"))
                self.assert_ok(life.run("import types; sys.modules['by.hand'] = types.ModuleType('by.hand')"))
                self.assert_interrupted(self.interrupt_when(life, "import half_way"))
                self.assertEqual(life.text("sys.second_time = 1; import half_way; half_way.found"), "5")
                self.assertEqual(life.text("'by.hand' in sys.modules"), "True")
