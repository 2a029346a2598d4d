"""Standard output and standard error: what is printed is in the pipe when `print` returns.

Owns: the text streams over fd 1 and 2, and `print`. Must not know: frames, cells.

Nothing is ever buffered here: a kernel can be killed at any instant, and C code and children write to the same pipes.
`print` of one line costs one system call, not two, because our own `print` joins the text and its end first.
"""

import builtins
import io
import os
import sys

_write = os.write
_builtin_print = builtins.print
_SIMPLE = frozenset((str, int, float, bool, type(None), bytes, complex))


def _write_all(fd, data):
    """Writes everything, also when a signal cuts a write short or somebody has made the pipe non-blocking."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[_write(fd, rest) :]
        except BlockingIOError:
            import select

            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()


class Pipe(io.FileIO):
    """The bytes side of a stream. Closing it leaves the descriptor open, as Python does with 1 and 2."""

    def __init__(self, fd):
        super().__init__(fd, "w", closefd=False)

    def write(self, data):
        view = memoryview(data).cast("B")
        self._checkClosed() if self.closed else None
        _write_all(self.fileno(), view)
        return len(view)


class Stream(io.TextIOWrapper):
    """The text side of a stream. UTF-8 whatever the locale says."""

    def __init__(self, fd, name):
        pipe = Pipe(fd)
        pipe.name = name
        super().__init__(pipe, encoding="utf-8", errors="backslashreplace", newline="\n", write_through=True)
        self.mode = "w"
        self._fd = fd
        # False once something has been changed that only the general path knows about.
        self._direct = True

    def write(self, text):
        if not self._direct or type(text) is not str:
            return super().write(text)
        self.put(text)
        return len(text)

    def put(self, text):
        try:
            data = text.encode()
        except UnicodeEncodeError:
            data = text.encode("utf-8", "backslashreplace")
        try:
            written = _write(self._fd, data)
        except BlockingIOError:
            written = 0
        if written != len(data):
            _write_all(self._fd, memoryview(data)[written:])

    def reconfigure(self, **changes):
        super().reconfigure(**changes)
        super().reconfigure(write_through=True)
        self._direct = False

    def close(self):
        self._direct = False
        super().close()

    def detach(self):
        self._direct = False
        return super().detach()


def print(*args, sep=" ", end="\n", file=None, flush=False):
    __tracebackhide__ = True
    if file is None:
        file = sys.stdout
    if type(file) is Stream and file._direct and "write" not in file.__dict__:
        if len(args) == 1:
            text = args[0]
            text = text if type(text) is str else str(text)
            if end is None:
                end = "\n"
            if type(end) is str and (sep is None or isinstance(sep, str)):
                return file.put(text + end)
            return _builtin_print(text, sep=sep, end=end, file=file, flush=flush)
        if type(sep) is str and type(end) is str and all(type(each) in _SIMPLE for each in args):
            return file.put(sep.join([str(each) for each in args]) + end)
    return _builtin_print(*args, sep=sep, end=end, file=file, flush=flush)


print.__doc__ = _builtin_print.__doc__
print.__module__ = "builtins"


def install():
    """Puts the streams in place of those the interpreter made from its locale and environment."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    sys.stdout = sys.__stdout__ = Stream(1, "<stdout>")
    sys.stderr = sys.__stderr__ = Stream(2, "<stderr>")
    builtins.print = print
