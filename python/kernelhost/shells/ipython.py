"""A shell around IPython's InteractiveShell: its magics, displays and tracebacks, without its threads and files.

Owns: what of IPython is replaced, and why. Must not know: frames.

IPython is used from version 8 on. What it does in threads, over pseudo-terminals, or in files of the user's home is
replaced: the history keeps no database, `!cmd` and `%%script` run children on our own fd 1 and 2, no profile is read.
"""

import builtins
import os
import sys
import warnings
from contextlib import contextmanager

from IPython import version_info
from IPython.core import interactiveshell
from IPython.core.autocall import IPyAutocall
from IPython.core.displayhook import DisplayHook
from IPython.core.displaypub import DisplayPublisher
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.profiledir import ProfileDir
from IPython.utils.text import LSString, SList
from traitlets import Type
from traitlets.config import Config

from .. import arrivals, failures
from ..backend import use_backend
from ..interrupts import gate, wall
from ..outbox import Outcome

_BARE = frozenset((int, float, complex, str, bytes, list, tuple, dict, set, frozenset))
_AT_THE_END = ("last_expr", "last_expr_or_assign")


@gate
def _execute(check, code, global_names, local_names):
    check()
    exec(code, global_names, local_names)


class MemoryStore(dict):
    """Stands in for IPython's file database (`%store`, bookmarks): it lasts as long as the life."""

    def __init__(self, *_):
        super().__init__()

    def keys(self, pattern=None):
        if pattern is None:
            return list(super().keys())
        from fnmatch import fnmatch

        return [key for key in self if fnmatch(key, pattern)]


class Exit(IPyAutocall):
    """`exit` and `quit`, also without parentheses: end this life."""

    rewrite = False

    def __call__(self, code=None):
        raise failures.LifeExit(code)


class ValueHook(DisplayHook):
    """Values of expressions go to the host; nothing is printed."""

    # The formatters other than that of text/plain, each with its printers: dicts that IPython changes in place.
    _others = None

    def compute_format_data(self, result):
        """Builtin values have no display methods, and most kernels register no printers for them: text is all there is.

        Asking every formatter takes as long as all else that a small cell does.
        """
        formatter = self.shell.display_formatter
        formatters = formatter.formatters
        if type(result) in _BARE and "text/plain" in formatters:
            if self._others is None:
                others = {mime: each for mime, each in formatters.items() if mime != "text/plain"}
                general = (formatter.ipython_display_formatter, formatter.mimebundle_formatter)
                printers = [each.type_printers for each in (*others.values(), *general)]
                printers += [each.deferred_printers for each in (*others.values(), *general)]
                self._others = (others, printers)
            others, printers = self._others
            if len(formatters) != len(others) + 1 or any(formatters.get(mime) is not others[mime] for mime in others):
                self._others = None
            elif not any(printers):
                text = formatters["text/plain"](result)
                return ({} if text is None else {"text/plain": text}), {}
        return super().compute_format_data(result)

    def cull_cache(self):
        # IPython warns about it on stderr; a kernel that lives long would do so for ever.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().cull_cache()

    def quiet(self):
        parsed = self.shell.history_manager.input_hist_parsed
        # Without a semicolon there is nothing to find out by tokenizing the cell.
        return bool(parsed) and ";" in parsed[-1] and super().quiet()

    def __call__(self, result=None):
        self.check_for_underscore()
        if result is None or self.quiet():
            return
        shell = self.shell
        shell.format_failures = []
        try:
            data, metadata = self.compute_format_data(result)
        finally:
            failed, shell.format_failures = shell.format_failures, None
        if failed and "text/plain" not in data:
            # A value that has no text is a failure of its cell, not a note on stderr. An interrupt inside IPython's
            # printer can come out of it as another error.
            if shell.life.interrupts.struck:
                raise KeyboardInterrupt from None
            raise failed[-1]
        for error in failed:
            shell.showtraceback((type(error), error, error.__traceback__))
        self.update_user_ns(result)
        self.fill_exec_result(result)
        if data:
            text = data.get("text/plain")
            if text is not None:
                self.shell.history_manager.output_hist_reprs[self.prompt_count] = text
            at_once = self.shell.ast_node_interactivity not in _AT_THE_END
            self.shell.life.outbox.keep_value(data, metadata, at_once)


class Publisher(DisplayPublisher):
    """Displays go to the host."""

    def publish(self, data, metadata=None, *_, transient=None, update=False, **__):
        self._validate_data(data, metadata)
        display_id = (transient or {}).get("display_id")
        self.shell.life.outbox.display(data, metadata, display_id, update)

    def clear_output(self, wait=False):
        self.shell.life.outbox.clear(wait)


class Shell(InteractiveShell):
    """IPython's shell as far as cells can see it."""

    displayhook_class = Type(ValueHook)
    display_pub_class = Type(Publisher)

    life = None
    failure = None
    # How many calls of run_code are under way: cells can run code through the shell themselves.
    depth = 0
    # While a value is formatted: what its display methods have raised.
    format_failures = None

    # No files, no terminal

    def init_ipython_dir(self, ipython_dir):
        pass

    def init_profile_dir(self, profile_dir):
        # One without a location makes no folders and reads none.
        self.profile_dir = ProfileDir()

    def init_virtualenv(self):
        pass

    def init_io(self):
        pass

    def init_user_ns(self):
        super().init_user_ns()
        leave = Exit()
        for name in ("exit", "quit"):
            self.user_ns[name] = self.user_ns_hidden[name] = leave

    def ask_exit(self):
        raise failures.LifeExit(0)

    def enable_gui(self, gui=None):
        """There is no terminal whose event loop could be shared."""

    @contextmanager
    def _tee(self, channel):
        # IPython would keep everything that is ever printed.
        yield

    # Running

    def run_cell(self, *arguments, **options):
        """A cell that runs code through the shell (`%%time` and `%%capture` do) is interrupted with that code."""
        nested = self.depth
        result = super().run_cell(*arguments, **options)
        if nested:
            # It may have come while that code was parsed.
            error = result.error_in_exec or result.error_before_exec
            if isinstance(error, KeyboardInterrupt) and self.life.interrupts.struck:
                raise error
        return result

    def should_run_async(self, raw_cell, *, transformed_cell=None, preprocessing_exc_tuple=None):
        """As IPython answers it, but without compiling a cell that cannot await anything."""
        text = raw_cell if transformed_cell is None else transformed_cell
        if "await" not in text and "async" not in text:
            return False
        return super().should_run_async(
            raw_cell, transformed_cell=transformed_cell, preprocessing_exc_tuple=preprocessing_exc_tuple
        )

    def _find_with_lazy_load(self, type_, magic_name):
        found = self._load_magic(type_, magic_name)
        if self.life is not None:
            self.life.interrupts.check()
        return found

    @wall
    def _load_magic(self, type_, magic_name):
        # A module that is interrupted while it registers its magics is never asked for them again.
        return super()._find_with_lazy_load(type_, magic_name)

    async def run_code(self, code_obj, result=None, *, async_=False):
        __tracebackhide__ = "__ipython_bottom__"
        self.depth += 1
        try:
            check = self.life.interrupts.check
            if async_:
                check()
                await eval(code_obj, self.user_global_ns, self.user_ns)
            else:
                _execute(check, code_obj, self.user_global_ns, self.user_ns)
        except BaseException as error:
            if isinstance(error, GeneratorExit):
                raise
            self._take(error, result)
            return True
        finally:
            self.depth -= 1
        return False

    @wall
    def _take(self, error, result):
        """The exception of a cell, or of code that a cell runs through the shell."""
        life = self.life
        if life.interrupts.struck and failures.is_cancellation(error):
            error = failures.as_interrupt(error)
        if result is not None:
            result.error_in_exec = error
        if self.depth > 1 and isinstance(error, KeyboardInterrupt) and life.interrupts.struck:
            # Told as the end of the cell itself.
            return
        if self.depth > 1:
            self.showtraceback((type(error), error, error.__traceback__))
        elif isinstance(error, self.custom_exceptions):
            self.CustomTB(type(error), error, error.__traceback__)
            self.failure = self._describe(error)
        else:
            self.failure = self._describe(error)

    def _format_exception_for_storage(self, exception, *_, **__):
        # Kept by IPython in memory for each failed cell; it would format the traceback a second time.
        return self.failure or {"ename": type(exception).__name__, "evalue": "", "traceback": []}

    def _describe(self, error):
        trace = failures.without_our_frames(failures.users_part(error.__traceback__))
        if isinstance(error, SyntaxError) and not self.depth:
            # The cell has not run: what is on the stack is the way to the compiler.
            error, trace = _without_incompleteness(error), None
        error.__traceback__ = trace
        kind = type(error)
        self._get_exc_info((kind, error, trace))
        try:
            if isinstance(error, UsageError):
                lines = [f"UsageError: {error}"]
            elif hasattr(error, "_render_traceback_"):
                lines = list(error._render_traceback_())
            elif isinstance(error, SyntaxError):
                import traceback

                lines = self.SyntaxTB.structured_traceback(kind, error, traceback.extract_tb(trace))
            elif isinstance(error, SystemExit) or _holds_group(error):
                # IPython has no layout for groups, and would only advise on how to leave.
                lines = failures.traceback_text(error).split("\n")
            else:
                lines = self.InteractiveTB.structured_traceback(kind, error, trace, tb_offset=0)
        except BaseException:
            lines = failures.traceback_text(error).split("\n")
        return {"name": kind.__name__, "value": failures.text_of(error), "traceback": [str(line) for line in lines]}

    def showtraceback(self, exc_tuple=None, filename=None, tb_offset=None, exception_only=False, **_):
        try:
            _, error, _ = self._get_exc_info(exc_tuple)
        except ValueError:
            print("No traceback available to show.", file=sys.stderr)
            return
        self._report(error)

    def showsyntaxerror(self, filename=None, **_):
        _, error, _ = self._get_exc_info()
        if filename:
            try:
                error.filename = filename
            except AttributeError:
                pass
        self._report(error)

    def showindentationerror(self):
        self.showsyntaxerror()

    def _report(self, error):
        """What happens before a cell's code runs is the cell's failure; what its code shows is output."""
        if self.format_failures is not None:
            self.format_failures.append(error)
            return
        description = self._describe(error)
        if self.depth:
            print("\n".join(description["traceback"]), file=sys.stderr)
        else:
            self.failure = description

    def _showtraceback(self, etype, evalue, stb):
        print("\n".join(stb), file=sys.stderr)

    # Children

    def system(self, cmd):
        """`!cmd`: a child on our own fd 1 and 2. Its output is live, and it feels an interrupt as we do."""
        import subprocess

        expanded = self.var_expand(cmd, depth=1)
        code = subprocess.call(expanded, shell=True)
        self.user_ns["_exit_code"] = code
        if code != 0 and getattr(self, "system_raise_on_error", False):
            raise subprocess.CalledProcessError(code, cmd)

    system_raw = system_piped = system

    def getoutput(self, cmd, split=True, depth=0):
        """`x = !cmd`. IPython's own takes an interrupt for the end of the command, and the cell would go on."""
        import subprocess

        if cmd.rstrip().endswith("&"):
            raise OSError("Background processes not supported.")
        done = subprocess.run(
            self.var_expand(cmd, depth=depth + 1),
            shell=True,
            executable=os.environ.get("SHELL"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        if getattr(self, "system_raise_on_error", False):
            self.user_ns["_exit_code"] = done.returncode
            if done.returncode != 0:
                raise subprocess.CalledProcessError(done.returncode, cmd)
        text = done.stdout.decode("utf-8", "replace")
        return SList(text.splitlines()) if split else LSString(text)


def _without_incompleteness(error):
    """IPython asks the compiler to tell incomplete input apart, which takes the better message away."""
    if type(error) is not SyntaxError and type(error).__name__ == "_IncompleteInputError":
        import linecache

        try:
            compile("".join(linecache.getlines(error.filename)), error.filename, "exec", dont_inherit=True)
        except SyntaxError as better:
            better.__context__ = None
            return better
    return error


def _holds_group(error):
    group = getattr(builtins, "BaseExceptionGroup", None)
    seen = set()
    while group is not None and error is not None and id(error) not in seen:
        if isinstance(error, group):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _show_figures_inline(matplotlib):
    from importlib.util import find_spec

    if find_spec("matplotlib_inline") is not None:
        use_backend(matplotlib, "module://matplotlib_inline.backend_inline")


def _configuration():
    config = Config()
    config.InteractiveShell.colors = "nocolor" if version_info >= (9,) else "NoColor"
    config.InteractiveShell.autocall = 0
    config.InteractiveShell.banner1 = ""
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    return config


class IPythonShell:
    """See the module."""

    name = "ipython"

    def __init__(self, shell):
        self.shell = shell

    @property
    def life(self):
        return self.shell.life

    @life.setter
    def life(self, life):
        self.shell.life = life
        self.shell.loop_runner = life.loop.drive

    def run(self, code, silent):
        shell = self.shell
        shell.failure = None
        shell.depth = 0
        try:
            result = shell.run_cell(code, store_history=not silent, silent=silent)
            error = result.error_before_exec or result.error_in_exec if result is not None else None
        except BaseException as raised:
            error = raised
            if self.life.interrupts.struck and failures.is_cancellation(raised):
                error = failures.as_interrupt(raised)
        failure = shell.failure
        if error is not None:
            if failure is None:
                failure = shell._describe(error)
            if isinstance(error, failures.LifeExit):
                self.life.leaving = 0 if error.code is None else error.code
        return Outcome(shell.execution_count - 1, failure)

    # Questions about code

    def complete(self, code, cursor):
        from IPython.core.completer import provisionalcompleter, rectify_completions

        with provisionalcompleter():
            found = list(rectify_completions(code, self.shell.Completer.completions(code, cursor)))
        kinds = [
            {"text": each.text, "start": each.start, "end": each.end, "type": each.type, "signature": each.signature}
            for each in found
        ]
        return {
            "matches": [each.text for each in found],
            "start": found[0].start if found else cursor,
            "end": found[0].end if found else cursor,
            "metadata": {"types": kinds},
        }

    def look_at(self, code, cursor, detail):
        from IPython.utils.tokenutil import token_at_cursor

        name = token_at_cursor(code, cursor)
        try:
            data = self.shell.object_inspect_mime(name, detail_level=detail)
        except KeyError:
            return {"found": False, "data": {}}
        return {"found": True, "data": data}

    def is_complete(self, code):
        return self.shell.check_complete(code)[0]

    def warm_up(self):
        """In the template: what the first cells of every kernel would otherwise load or build anew."""
        shell = self.shell
        shell.transform_cell("1\n")
        shell.display_formatter.format(1)
        shell.logger  # noqa: B018 - made when it is first asked for
        try:
            exec(compile("1/0", shell.compile.cache("1/0\n", 0), "exec"), {})
        except ZeroDivisionError as error:
            shell._describe(error)
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            if hasattr(sys, name):
                delattr(sys, name)

    def refresh(self):
        """In every life, forked or not: what depends on where and when it began."""
        shell = self.shell
        try:
            folder = os.getcwd()
        except OSError:
            folder = os.path.expanduser("~")
        shell.starting_dir = folder
        shell.history_manager.dir_hist[:] = [folder]
        arrivals.when("matplotlib", _show_figures_inline)


def make_shell(main):
    """The one shell of a process, whose cells run in the module `main`."""
    database = getattr(interactiveshell, "PickleShareDB", None)
    if database is not None:
        # Some versions open their database in the constructor.
        interactiveshell.PickleShareDB = MemoryStore
    try:
        shell = Shell.instance(config=_configuration(), user_module=main)
    finally:
        if database is not None:
            interactiveshell.PickleShareDB = database
    shell.db = MemoryStore()
    from .scripts import ScriptsOnOurOutput

    shell.register_magics(ScriptsOnOurOutput)
    return IPythonShell(shell)
