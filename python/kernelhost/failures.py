"""Exceptions as the host hears of them: name, value, and a traceback without our own frames.

Owns: the `error` object of the protocol. Must not know: shells, wires.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


class LifeExit(SystemExit):
    """`exit()` or `quit()` in a cell: the life ends once the cell has been unwound."""


def is_cancellation(error):
    return type(error).__name__ == "CancelledError" and type(error).__module__.startswith(("asyncio", "concurrent"))


def as_interrupt(error):
    """A cell that was cancelled by an interrupt was interrupted, as far as anybody outside can tell."""
    interrupt = KeyboardInterrupt()
    interrupt.__traceback__ = error.__traceback__
    return interrupt


def text_of(error):
    """`str()` of an exception, whatever its class does."""
    try:
        if isinstance(error, SystemExit):
            return "" if error.code is None else str(error.code)
        return str(error)
    except Exception:
        return f"<{type(error).__name__}: str() failed>"


def is_ours(code):
    return code.co_filename.startswith(_HERE)


def users_part(trace):
    """The traceback from the first frame that is neither ours nor the event loop's on."""
    first = trace
    while first is not None:
        code = first.tb_frame.f_code
        name = first.tb_frame.f_globals.get("__name__")
        if not is_ours(code) and not (isinstance(name, str) and name.partition(".")[0] == "asyncio"):
            return first
        first = first.tb_next
    return None


def without_our_frames(trace):
    """The same traceback without the frames of ours that stand in its middle or at its end."""
    kept = []
    while trace is not None:
        if not is_ours(trace.tb_frame.f_code):
            kept.append(trace)
        trace = trace.tb_next
    whole = None
    for each in reversed(kept):
        whole = type(each)(whole, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return whole


def _drop_our_frames(report, seen):
    if report is None or id(report) in seen:
        return
    seen.add(id(report))
    if report.stack is not None:
        report.stack[:] = [line for line in report.stack if not line.filename.startswith(_HERE)]
    _drop_our_frames(report.__cause__, seen)
    _drop_our_frames(report.__context__, seen)
    for each in getattr(report, "exceptions", None) or ():
        _drop_our_frames(each, seen)


def traceback_text(error):
    from .searchpath import without_user_paths

    with without_user_paths():
        import traceback
    try:
        report = traceback.TracebackException(type(error), error, users_part(error.__traceback__), compact=True)
        _drop_our_frames(report, set())
        text = "".join(report.format(chain=True))
    except Exception as failure:
        text = f"{type(error).__name__}: {text_of(error)}\n(the traceback could not be formatted: {failure!r})"
    return text.rstrip("\n")


def report_of(error):
    """The protocol's `error` for an exception."""
    return {"name": type(error).__name__, "value": text_of(error), "traceback": traceback_text(error).split("\n")}


def print_report(error):
    """For those who have nobody to report to but stderr."""
    try:
        print(traceback_text(error), file=sys.stderr)
    except Exception:
        pass
