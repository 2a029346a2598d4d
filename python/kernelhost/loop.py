"""The event loop that all cells of a life share.

Owns: the loop, what `asyncio` answers in cells that do not run inside it, and the wait between cells while tasks go on.
Must not know: frames, shells.
"""

import _signal
import os
import sys
from _contextvars import ContextVar
from _thread import get_ident

from .arrivals import when
from .interrupts import driver, wall
from .searchpath import without_user_paths

# A cell whose loop is stopped again and again from outside makes no progress.
_FUTILE_ROUNDS = 1000

# How long the tasks of an interrupted cell have for their clean-up, before the cell is over without them.
_SECONDS_TO_CLEAN_UP = 0.5

# The cell that a task belongs to. Tasks inherit it from what makes them, so it holds also for what they make later.
_CELL = ContextVar("kernelhost_cell", default=0)


class Loop:
    """The persistent loop of a life; it exists from its first need on."""

    def __init__(self, interrupts):
        self.interrupts = interrupts
        self.pid = os.getpid()
        self.main = get_ident()
        self.current = None
        self.chosen = None
        self.originals = {}
        # A descriptor that is watched while a cell awaits something, and what is done when it can be read.
        self.attend = None
        self.cell = 0
        # Those of the running cell: the loop itself cannot tell whose a task is.
        self.tasks = ()
        when("asyncio", self._adopt_asyncio)

    def get(self):
        """The loop, made when there is none and replaced when a cell has closed it."""
        loop = self.current
        if loop is None or loop.is_closed():
            loop = self.current = self._new()
            self._note_tasks(loop)
            self._show_to_policy()
        return loop

    def begin(self, cell):
        """A cell starts: what it makes in the loop is its own."""
        self.cell = cell
        _CELL.set(cell)
        if self.tasks:
            self.tasks = ()

    def _note_tasks(self, loop):
        create_task = loop.create_task

        def create_and_note(coro, **options):
            task = create_task(coro, **options)
            if self.cell and _CELL.get() == self.cell:
                if not self.tasks:
                    from weakref import WeakSet

                    self.tasks = WeakSet()
                self.tasks.add(task)
            return task

        loop.create_task = create_and_note

    @wall
    def _new(self):
        # An import that is broken off could not be made good in every case.
        with without_user_paths():
            import asyncio
        return asyncio.new_event_loop()

    def _show_to_policy(self):
        if self.chosen is None and "set_event_loop" in self.originals:
            self.originals["set_event_loop"](self.current)

    # asyncio in cells that run outside the loop

    def _is_for_us(self):
        return get_ident() == self.main and os.getpid() == self.pid

    def _adopt_asyncio(self, asyncio):
        """Code of a cell finds the shared loop where an asyncio program would find a running one."""
        from functools import wraps

        events, tasks = asyncio.events, asyncio.tasks
        get_event_loop, set_event_loop = events.get_event_loop, events.set_event_loop
        create_task, ensure_future = tasks.create_task, tasks.ensure_future
        running = events._get_running_loop
        self.originals = {"set_event_loop": set_event_loop}

        @wraps(get_event_loop)
        def get_event_loop_in_cell():
            if running() is None and self._is_for_us():
                chosen = self.chosen
                if chosen is None or chosen.is_closed():
                    self.chosen = None
                    loop = self.get()
                    self.interrupts.check()
                    self._show_to_policy()
                    return loop
            return get_event_loop()

        @wraps(set_event_loop)
        def set_event_loop_in_cell(loop):
            set_event_loop(loop)
            if self._is_for_us():
                self.chosen = None if loop is self.current else loop

        @wraps(create_task)
        def create_task_in_cell(coro, **options):
            if running() is None and self._is_for_us():
                return get_event_loop_in_cell().create_task(coro, **options)
            return create_task(coro, **options)

        @wraps(ensure_future)
        def ensure_future_in_cell(coro_or_future, *, loop=None):
            if loop is None and running() is None and self._is_for_us():
                loop = getattr(coro_or_future, "get_loop", get_event_loop_in_cell)()
            return ensure_future(coro_or_future, loop=loop)

        for name, old, new in (
            ("get_event_loop", get_event_loop, get_event_loop_in_cell),
            ("set_event_loop", set_event_loop, set_event_loop_in_cell),
            ("create_task", create_task, create_task_in_cell),
            ("ensure_future", ensure_future, ensure_future_in_cell),
        ):
            for module in (asyncio, events, tasks):
                if getattr(module, name, None) is old:
                    setattr(module, name, new)

    # Cells that run inside the loop

    @driver
    def drive(self, coroutine):
        """Runs a coroutine as a task of the loop, to its end, whatever other tasks and interrupts do meanwhile."""
        loop = self.get()
        if loop.is_running():
            coroutine.close()
            raise RuntimeError("a cell with await cannot run inside a running event loop")
        self._show_to_policy()
        task = loop.create_task(coroutine)
        if self.tasks:
            self.tasks.discard(task)
        interrupts = self.interrupts
        strike = interrupts.strike
        asked = False

        def cancel(origin):
            def in_loop():
                nonlocal asked
                # The clean-up of a cell may need its own tasks, so at first only the cell itself is cancelled.
                if asked:
                    self._cancel_tasks()
                asked = True
                if task.cancel():
                    strike(origin)

            loop.call_soon_threadsafe(in_loop)

        def look_again():
            kept, interrupts.pending = interrupts.pending, 0
            if kept:
                cancel(kept)

        interrupts.remind = lambda: loop.call_soon_threadsafe(look_again)
        interrupts.cancel = cancel
        if interrupts.pending:
            # After the first step: a task that is cancelled before it has begun tells its shell nothing.
            interrupts.remind()
        futile = 0
        # A signal that comes just before the loop starts to wait has to end that wait.
        waker = getattr(loop, "_csock", None)
        before = _signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False) if waker is not None else -1
        attended = None
        try:
            while not task.done():
                if attended is not loop and self.attend is not None:
                    attended = loop
                    loop.add_reader(*self.attend)
                try:
                    loop.run_until_complete(task)
                except KeyboardInterrupt:
                    # It was raised in the code of some task. Others may be about to block as that one did, and would
                    # each need an interrupt of its own.
                    self._cancel_tasks()
                    task.cancel()
                except BaseException:
                    # loop.stop(), or another task's SystemExit. The cell's own exception is taken from its task.
                    futile += 1
                    if futile > _FUTILE_ROUNDS or loop.is_closed() or os.getpid() != self.pid:
                        raise
        finally:
            interrupts.cancel = interrupts.remind = None
            if waker is not None:
                _signal.set_wakeup_fd(before)
            if attended is not None and not loop.is_closed():
                loop.remove_reader(self.attend[0])
        return task.result()

    def _cancel_tasks(self):
        for task in list(self.tasks):
            if isinstance(getattr(task, "_exception", None), KeyboardInterrupt):
                # Told as the cell's own end. asyncio would tell it once more, on stderr, in some later cell.
                task.exception()
            task.cancel()

    @driver
    def end_tasks(self):
        """An interrupted cell is over: what it has made in the loop is cancelled, and has a moment to clean up."""
        loop = self.current
        if loop is None or loop.is_closed() or loop.is_running():
            return
        self._cancel_tasks()
        left = [task for task in self.tasks if not task.done()]
        if not left:
            return
        waiting = loop.create_task(sys.modules["asyncio"].wait(left, timeout=_SECONDS_TO_CLEAN_UP))
        futile = 0
        while not waiting.done():
            try:
                loop.run_until_complete(waiting)
            except BaseException:
                futile += 1
                if futile > _FUTILE_ROUNDS or loop.is_closed():
                    return
                for task in left:
                    task.cancel()

    # Copies

    def begin_anew(self):
        """In a copy of the process. The loop stays what cells know, and gets an epoll instance and a waker of its own.

        The old instance is the original's too: closing our number of it changes nothing there, and nothing else is done
        to it. There was no work when the copy was made, so nothing but the waker was registered with it.
        """
        loop = self.current
        if loop is None or loop.is_closed():
            return
        selector = loop._selector
        selector._selector.close()
        loop._selector = type(selector)()
        loop._ssock.close()
        loop._csock.close()
        loop._internal_fds -= 1
        loop._make_self_pipe()
        if loop._signal_handlers:
            _signal.set_wakeup_fd(loop._csock.fileno())

    def work(self):
        """What `has_work` has found, for people."""
        try:
            tasks = sys.modules["asyncio"].all_tasks(self.current)
            names = [getattr(task.get_coro(), "__qualname__", None) or task.get_name() for task in tasks]
        except Exception:
            names = []
        return f"the tasks {', '.join(sorted(names))}" if names else "callbacks, timers or watched descriptors"

    # Between cells

    def has_work(self):
        """Whether anything in the loop could want to run before the next cell."""
        loop = self.current
        if loop is None or loop.is_closed():
            return False
        try:
            if loop._ready or loop._scheduled or len(loop._selector.get_map()) > 1:
                return True
        except (AttributeError, RuntimeError, TypeError):
            return True
        return bool(sys.modules["asyncio"].all_tasks(loop))

    def wait_readable(self, fd):
        """Runs the loop until the descriptor has something to read, or until there is nothing more to run."""
        loop = self.current
        arrived = False

        def stop():
            nonlocal arrived
            arrived = True
            loop.stop()

        while not arrived and not loop.is_closed():
            loop.add_reader(fd, stop)
            try:
                loop.run_forever()
            finally:
                if not loop.is_closed():
                    loop.remove_reader(fd)
            if os.getpid() != self.pid:
                return
