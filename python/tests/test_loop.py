from kernel_case import KernelCase


class Loop(KernelCase):
    def test_await_works_at_the_top_level(self):
        for life in self.lives():
            self.assertEqual(life.text("import asyncio\nx = await asyncio.sleep(0.01, 5)\nx + 1"), "6")
            self.assertEqual(life.text("await asyncio.sleep(0, 7)"), "7")
            self.assert_error(life.run("await asyncio.sleep(0)\n1/0"), "ZeroDivisionError")
            self.assertEqual(life.text("[await asyncio.sleep(0, i) for i in range(3)]"), "[0, 1, 2]")

    def test_tasks_go_on_between_cells(self):
        code = """
import asyncio
async def tick():
    for n in range(3):
        print('tick', n)
        await asyncio.sleep(0.01)
    return 'ticked'
t = asyncio.create_task(tick())
"""
        for life in self.lives():
            self.assert_ok(life.run(code))
            life.wait_output("tick 2")
            self.assertEqual(life.text("await t"), "'ticked'")

    def test_the_cell_that_imports_asyncio_can_use_the_shared_loop_without_await(self):
        code = """
import asyncio
from asyncio import create_task, ensure_future, get_event_loop
loop = get_event_loop()
async def me(): return asyncio.get_running_loop()
t, u = create_task(me()), ensure_future(me())
g = asyncio.gather(me(), me())
"""
        for life in self.lives():
            self.assert_ok(life.run(code))
            self.assertEqual(life.text("(await t) is loop and (await u) is loop and (await g) == [loop, loop]"), "True")
            self.assertEqual(life.text("asyncio.get_event_loop() is loop"), "True")
            self.assertEqual(life.text("await me() is loop"), "True")
            self.assertNotIn(b"Warning", life.err)

    def test_asyncio_run_works_in_a_cell(self):
        for life in self.lives():
            self.assertEqual(life.text("import asyncio\nasync def f(): return 3\nasyncio.run(f())"), "3")
            self.assertEqual(life.text("await f()"), "3")
            self.assertEqual(life.text("asyncio.get_event_loop().run_until_complete(f())"), "3")
            self.assert_error(life.run("await f()\nasyncio.run(f())"), "RuntimeError")
            self.assert_alive(life)

    def test_hostile_cells_do_not_break_the_loop_for_the_next(self):
        for life in self.lives():
            life.run("import asyncio, warnings\nwarnings.simplefilter('ignore')\nawait asyncio.sleep(0)")
            for code in (
                "asyncio.get_event_loop().stop()",
                "asyncio.get_event_loop().close()",
                "asyncio.get_running_loop().stop()\nawait asyncio.sleep(0.01)",
                "asyncio.set_event_loop(None)",
                "asyncio.set_event_loop(asyncio.new_event_loop())",
                "asyncio.set_event_loop_policy(None)",
                "asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())",
                "t = asyncio.create_task(asyncio.sleep(0))\nasyncio.get_event_loop().call_later(0.01, exec, '1/0')",
                "async def die(): raise SystemExit(3)\nt = asyncio.create_task(die())",
                "async def stop(): asyncio.get_running_loop().stop()\nt = asyncio.create_task(stop())",
            ):
                life.run(code)
                self.assertEqual(life.text("await asyncio.sleep(0.02, 1)"), "1")
                self.assert_alive(life)

    def test_a_kernel_with_an_idle_loop_takes_no_time(self):
        for life in self.lives(launches=("cold",)):
            life.run("import asyncio, time\nt = asyncio.create_task(asyncio.sleep(60))\nbefore = time.process_time()")
            life.run("await asyncio.sleep(0.3)")
            self.assertLess(float(life.text("time.process_time() - before")), 0.15)
