"""What cells find in the package `kernelhost`, and the `input` and `getpass` they are given.

Owns: the public names of Python's side. Must not know: frames.
"""

import builtins
import os
import sys

from . import arrivals
from .calls import HostCallError

__all__ = ["HostCallError", "acall", "call", "on_restore", "tools"]

_life = None
_callbacks = []
_input = builtins.input


def call(name, args=None, /):
    """Calls a function of the daemon's (`onCall` of the kernel's options) and returns what it returns.

    `args` is anything made of JSON's types and bytes, and so is the result. What the function throws becomes a
    HostCallError with its message. Other tasks of the event loop do not run meanwhile: see `acall`.
    """
    life = _connected()
    return life.calls.call(life.outbox.cell, name, args)


async def acall(name, args=None, /):
    """The same, awaited: other tasks go on meanwhile."""
    life = _connected()
    return await life.calls.acall(life.outbox.cell, name, args)


class _Tool:
    """A function of the daemon's; keyword arguments arrive there as one object."""

    __slots__ = ("__name__",)

    def __init__(self, name):
        self.__name__ = name

    def __call__(self, /, **args):
        return call(self.__name__, args)

    def acall(self, /, **args):
        return acall(self.__name__, args)

    def __repr__(self):
        return f"<function {self.__name__} of the daemon>"


class _Tools:
    """The functions of the daemon's, by name: `kernelhost.tools.search(query="…")`."""

    __slots__ = ()

    def __getattr__(self, name):
        known = _names()
        if name in known:
            return _Tool(name)
        told = f"it has {', '.join(known)}" if known else "it has none"
        raise AttributeError(f"the daemon has no function {name!r} for this kernel; {told}")

    def __dir__(self):
        return _names()

    def __repr__(self):
        return f"<functions of the daemon: {', '.join(_names()) or 'none'}>"


tools = _Tools()


def on_restore(callback, /):
    """Has `callback(what)` called whenever state came back, to reconnect what cannot be copied.

    `what` is "fork", "checkpoint" or "load".
    """
    if not callable(callback):
        raise TypeError(f"on_restore() needs something to call, not {type(callback).__name__}")
    _callbacks.append(callback)
    return callback


def restored(what):
    """Calls them all, in order; returns the names of those that raised, with what they raised."""
    failed = []
    for callback in list(_callbacks):
        try:
            callback(what)
        except Exception as error:
            failed.append((getattr(callback, "__name__", repr(callback)), error))
    return failed


def _connected():
    if _life is None:
        raise HostCallError("there is no daemon: this is not a kernel")
    return _life


def _names():
    return [] if _life is None else list(_life.functions)


def connect(life):
    """A life begins: calls go to its daemon."""
    global _life
    _life = life
    builtins.input = input
    arrivals.when("getpass", _adopt_getpass)


def input(prompt="", /):
    """Asks the daemon for a line (`onInput` of the kernel's options)."""
    # A child that was forked from the kernel has an empty standard input, and nobody to ask.
    if _life is None or os.getpid() != _life.pid:
        return _input(prompt)
    return _ask("input()", str(prompt), False)


def _ask(who, prompt, password):
    life = _life
    if not life.answers_input:
        raise EOFError(f"{who} was called, but this kernel has no onInput handler, and its standard input is empty")
    sys.stdout.flush()
    return life.calls.call(life.outbox.cell, "", prompt, password)


def _adopt_getpass(module):
    original = module.getpass

    def getpass(prompt="Password: ", *args, **options):
        """Asks the daemon for a password (`onInput` of the kernel's options)."""
        if os.getpid() != _life.pid:
            return original(prompt, *args, **options)
        return _ask("getpass()", str(prompt), True)

    module.getpass = getpass
