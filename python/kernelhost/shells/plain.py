"""A shell with nothing but the interpreter: statements, the value of the last expression, top-level `await`.

Owns: compiling and running cells in `__main__`, their source lines, `_`, `display`, `exit`. Must not know: frames.
"""

import _ast
import builtins
import sys

from .. import arrivals, bundles, failures
from ..backend import use_backend
from ..interrupts import gate, wall
from ..outbox import Outcome

_FLAGS = _ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_ONLY_AST = _ast.PyCF_ONLY_AST | _FLAGS
_COROUTINE = 0x80  # inspect.CO_COROUTINE
# The flags of `from __future__ import …`, which hold for the cells that follow.
_FUTURES = 0x1FE0000


@gate
def _evaluate(check, code, namespace):
    check()
    return eval(code, namespace)


@gate
def _bundle(check, value):
    check()
    return bundles.bundle_of(value)


@gate
def _show_figures(check, figures):
    check()
    figures.show_what_is_left()


@gate
def _report(error):
    return failures.report_of(error)


class Exit:
    """`exit` and `quit`: end this life."""

    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"Use {self.name}() to end this kernel's process"

    def __call__(self, code=None):
        raise failures.LifeExit(code)


class PlainShell:
    """See the module."""

    name = "plain"

    def __init__(self, main):
        self.namespace = main.__dict__
        self.count = 0
        self.silent_count = 0
        self.futures = 0
        self.sources = {}
        self.life = None
        # The backend of matplotlib, once a cell has made a figure.
        self.figures = None
        builtins.exit = Exit("exit")
        builtins.quit = Exit("quit")
        builtins.display = self.display
        arrivals.when("linecache", self._hand_over_sources)

    def warm_up(self):
        """In the template: what the first cells of every kernel would otherwise load or build anew."""

    def refresh(self):
        """In every life, forked or not: what depends on its environment."""
        arrivals.when("matplotlib", self._use_figures)
        arrivals.when("kernelhost.figures", self._take_figures)

    # Figures

    def _use_figures(self, matplotlib):
        use_backend(matplotlib, "module://kernelhost.figures")

    def _take_figures(self, backend):
        backend.publish = self.display
        self.figures = backend

    # Sources: linecache loads much, so it gets them when somebody imports it.

    def _remember(self, name, code):
        entry = (len(code), None, code.splitlines(keepends=True), name)
        linecache = sys.modules.get("linecache")
        cache = getattr(linecache, "cache", None)
        if cache is None:
            self.sources[name] = entry
        else:
            cache[name] = entry

    def _hand_over_sources(self, linecache):
        linecache.cache.update(self.sources)
        self.sources.clear()

    # Running

    def run(self, code, silent):
        if silent:
            self.silent_count += 1
            name = f"<silent cell {self.silent_count}>"
        else:
            self.count += 1
            name = f"<cell {self.count}>"
        self._remember(name, code)
        try:
            try:
                self._run(code, name, silent)
            finally:
                if self.figures is not None:
                    _show_figures(self.life.interrupts.check, self.figures)
        except BaseException as error:
            return Outcome(self.count, self._failure(error))
        return Outcome(self.count)

    def _compile(self, code, name):
        """The statements and the last expression of a cell, each compiled, or None where there are none."""
        flags = self.futures
        # One line that is an expression needs no syntax tree, which is most of the time that a small cell takes. A line
        # that begins with a blank, or whose escapes may be warned of, is left to the way that reports it right.
        if "\n" not in code and "\\" not in code and code[:1] not in (" ", "\t", "\f", ""):
            try:
                return None, compile(code, name, "eval", _FLAGS | flags, True)
            except SyntaxError:
                pass
        tree = compile(code, name, "exec", _ONLY_AST | flags, True)
        body = tree.body
        last = None
        if body and type(body[-1]) is _ast.Expr:
            last = _ast.Expression(body.pop().value)
        first = None
        if body:
            first = compile(tree, name, "exec", _FLAGS | flags, True)
            self.futures = flags = flags | (first.co_flags & _FUTURES)
        if last is not None:
            last = compile(last, name, "eval", _FLAGS | flags, True)
        return first, last

    def _run(self, code, name, silent):
        first, last = self._compile(code, name)
        check = self.life.interrupts.check
        if (first is not None and first.co_flags & _COROUTINE) or (last is not None and last.co_flags & _COROUTINE):
            value = self.life.loop.drive(self._run_in_loop(first, last))
        else:
            if first is not None:
                _evaluate(check, first, self.namespace)
            value = None if last is None else _evaluate(check, last, self.namespace)
        if value is None or silent:
            return
        builtins._ = value
        bundle = _bundle(check, value)
        if bundle is not None:
            self.life.outbox.keep_value(*bundle)

    async def _run_in_loop(self, first, last):
        for code in (first, last):
            value = None
            if code is not None:
                value = eval(code, self.namespace)
                if code.co_flags & _COROUTINE:
                    value = await value
        return value

    @wall
    def _failure(self, error):
        life = self.life
        if isinstance(error, failures.LifeExit):
            life.leaving = error.code if error.code is not None else 0
        if life.interrupts.struck and failures.is_cancellation(error):
            error = failures.as_interrupt(error)
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, failures.users_part(error.__traceback__)
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        return failures.report_of(error)

    # Questions about code

    def complete(self, code, cursor):
        from .lookup import complete

        return complete(self.namespace, code, cursor)

    def look_at(self, code, cursor, detail):
        from .lookup import look_at

        return look_at(self.namespace, code, cursor, detail)

    def is_complete(self, code):
        from .lookup import is_complete

        return is_complete(code, self.futures)

    def display(self, *values, display_id=None, update=False, raw=False, metadata=None):
        """Shows values to the host. With `display_id`, a later call with `update=True` replaces what was shown."""
        if display_id is True:
            import binascii
            import os

            display_id = binascii.hexlify(os.urandom(8)).decode()
        for value in values:
            bundle = (value, {}) if raw else bundles.bundle_of(value)
            if bundle is not None:
                data, found = bundle
                self.life.outbox.display(data, {**found, **(metadata or {})}, display_id, update)
        if display_id is not None:
            return DisplayHandle(self, display_id)


class DisplayHandle:
    """What `display(…, display_id=…)` returns."""

    def __init__(self, shell, display_id):
        self.shell = shell
        self.display_id = display_id

    def display(self, value, **options):
        self.shell.display(value, display_id=self.display_id, **options)

    def update(self, value, **options):
        self.shell.display(value, display_id=self.display_id, update=True, **options)
