"""SIGINT: which cell it is meant for, and where in our stack it may become an exception.

Owns: the handler, the `interrupts` pipe, and the marks that say which frames are user code.
Must not know: what a cell is.

| where the main thread is when SIGINT comes              | what happens                                           |
| ------------------------------------------------------- | ------------------------------------------------------ |
| no cell runs                                            | nothing; an id of a cell still to come is remembered   |
| the pipe names other cells only                         | nothing                                                |
| inside a *gate*, or a frame called through one          | KeyboardInterrupt                                      |
| the event loop waits for the cell, no user frame inside | the cell's task is cancelled                           |
| inside a *wall*, or in our own code between gates       | kept, and raised when the next gate is entered; inside |
|                                                         | the event loop, the cell's task is cancelled then      |

The decision is taken from the frames of the stack, not from a flag: there is no instant at which a flag lags behind.
"""

import _signal
import os
import time
from _thread import get_ident
from sys import _getframe

from .jobs import start_clock

GATES = set()
WALLS = set()
DRIVERS = set()

_ELSEWHERE, _HOST = 1, 2
_HELD, _USER, _WAITING = range(3)

# Frames of these packages do not count as user code inside the event loop.
_MACHINERY = ("asyncio", "selectors", "IPython", "kernelhost", "traitlets")

# The host sends one SIGINT per id. When one handler call has read several ids, the other signals are still to come;
# they follow the ids within microseconds, or milliseconds on a machine under load.
_SURPLUS_SECONDS = 1.0


def gate(function):
    """Marks a function whose callees are user code. It checks for what was kept, calls them, and does nothing else.

    Its own frame counts as user code: an interrupt in it, before or after the call, is an exception of the call.
    """
    GATES.add(function.__code__)
    return function


def wall(function):
    """Marks a function that no interrupt may leave half done."""
    WALLS.add(function.__code__)
    return function


def driver(function):
    """Marks the function that runs the event loop for a cell."""
    DRIVERS.add(function.__code__)
    return function


def _place(frame):
    user = False
    while frame is not None:
        code = frame.f_code
        if code in WALLS:
            return _HELD
        if code in GATES:
            return _USER
        if code in DRIVERS:
            return _USER if user else _WAITING
        if not user:
            name = frame.f_globals.get("__name__")
            user = not isinstance(name, str) or name.partition(".")[0] not in _MACHINERY
        frame = frame.f_back
    return _HELD


class Interrupts:
    """The interrupts of one life."""

    def __init__(self, fd):
        self.fd = fd
        os.set_blocking(fd, False)
        self.cell = 0
        self.early = 0
        self.pending = 0
        self.struck = False
        self.by_host = False
        self.struck_at = 0.0
        self.cancel = None
        # Has what is kept looked at again in the event loop: a wall there may be followed by no gate.
        self.remind = None
        self.surplus = 0
        self.surplus_until = 0.0
        self.deciding = False
        self.again = False
        self.user_handler = None
        self.pid = os.getpid()
        self.main = get_ident()
        # One bound method, so that it can be recognised by identity.
        self.handler = self._on_sigint
        _signal.signal(_signal.SIGINT, self.handler)

    def begin_anew(self):
        """In a copy of the process: its pipe is another one, and what came for the original is not for the copy."""
        os.set_blocking(self.fd, False)
        self.main = get_ident()
        self.cell = self.early = self.pending = self.surplus = 0

    def begin(self, cell):
        """A cell starts. Order matters: an interrupt that comes between the lines must set `pending`, and it stays."""
        self.struck = False
        self.by_host = False
        self.cell = cell
        if self.early == cell:
            self.pending = _HOST
        if self.user_handler is not None:
            _signal.signal(_signal.SIGINT, self.user_handler)
            self.user_handler = None

    def end(self):
        """A cell has ended; what came too late for it is dropped."""
        self.cell = 0
        self.pending = 0
        self.cancel = self.remind = None
        installed = _signal.getsignal(_signal.SIGINT)
        if installed is not self.handler:
            # Between cells SIGINT must do nothing, so the cell's own handler rests until the next one.
            _signal.signal(_signal.SIGINT, self.handler)
            if callable(installed) and installed is not _signal.default_int_handler:
                self.user_handler = installed

    @staticmethod
    def leave():
        """The life leaves. An interpreter that shuts down gives SIGINT back its default, and would die of it."""
        _signal.signal(_signal.SIGINT, _signal.SIG_IGN)

    def check(self):
        """Raises what was kept. Called where user code is about to go on."""
        pending = self.pending
        if pending:
            self.pending = 0
            self.strike(pending)
            raise KeyboardInterrupt

    def strike(self, origin):
        self.struck = True
        if origin == _HOST:
            self.by_host = True
            self.struck_at = start_clock()

    def cover_system(self):
        """`os.system` has SIGINT ignored while its command runs, in all threads. What came meanwhile comes after it."""
        original = os.system

        def system(command):
            status = original(command)
            if os.getpid() == self.pid and self._unread():
                # The signal of these ids is gone, or comes yet: then it is not the next cell's.
                self.surplus += 1
                self.surplus_until = time.monotonic() + _SURPLUS_SECONDS
                os.kill(self.pid, _signal.SIGINT)
            return status

        system.__doc__ = original.__doc__
        os.system = system

    def cover_forks(self):
        """Python swallows what a hook of a fork raises, so that an interrupt would be lost, and perhaps a lock kept for
        ever that the hook was about to give back. What comes meanwhile comes after the fork."""
        for name in ("fork", "forkpty"):
            setattr(os, name, self._covered(getattr(os, name)))

    def _covered(self, original):
        @wall
        def with_its_hooks():
            return original()

        def fork():
            made = with_its_hooks()
            # Of a process that has just come to be the handler is another one, and other threads get no interrupts.
            if self.pending and os.getpid() == self.pid and get_ident() == self.main and _place(_getframe()) == _USER:
                self.check()
            return made

        fork.__name__ = fork.__qualname__ = original.__name__
        fork.__doc__ = original.__doc__
        return fork

    def _unread(self):
        import select

        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return bool(poll.poll(0))

    def _arrived(self):
        ids = []
        while True:
            try:
                data = os.read(self.fd, 4096)
            except OSError:
                return ids
            ids += [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data) - 7, 8)]
            if len(data) < 4096:
                return ids

    def _origin(self):
        """Whom one look at the pipe says the interrupt of the running cell is from; 0: it is not for that cell."""
        ids = self._arrived()
        cell = self.cell
        if not ids:
            if self.surplus:
                self.surplus -= 1
                if time.monotonic() < self.surplus_until:
                    return 0
                self.surplus = 0
            return _ELSEWHERE if cell else 0
        if len(ids) > 1 or self.surplus:
            self.surplus += len(ids) - 1
            self.surplus_until = time.monotonic() + _SURPLUS_SECONDS
        if cell and cell in ids:
            return _HOST
        self.early = max(ids)
        return 0

    def _on_sigint(self, _signum, frame):
        if os.getpid() != self.pid:
            # A fork that has not got its own handler yet. The ids are its parent's.
            return
        # A signal that comes while one is decided would find the ids read and the decision not yet taken.
        self.again = True
        if self.deciding:
            return
        self.deciding = True
        try:
            origin = 0
            while self.again:
                self.again = False
                origin = max(origin, self._origin())
        finally:
            self.deciding = False
        if not origin:
            return
        place = _place(frame)
        if place == _USER:
            self.strike(origin)
            raise KeyboardInterrupt
        if place == _WAITING and self.cancel is not None:
            self.cancel(origin)
        elif origin > self.pending:
            self.pending = origin
            if self.remind is not None:
                self.remind()
