"""Questions of the host about code, answered between cells, and in the event loop while a cell awaits something.

Owns: the frames `complete`, `inspect`, `is-complete` and their `answer`. Must not know: how a shell finds its answers.
"""

import time

from . import failures, wires
from .interrupts import gate
from .outbox import cut_text

KINDS = frozenset((wires.COMPLETE, wires.INSPECT, wires.IS_COMPLETE))
_MATCHES = 5000
_CHARACTERS = 4_000_000


@gate
def _ask(check, function, *arguments):
    check()
    return function(*arguments)


def _bounded(answer):
    matches = answer.get("matches")
    if matches is not None and len(matches) > _MATCHES:
        return {**answer, "matches": matches[:_MATCHES], "metadata": {"missing": len(matches) - _MATCHES}}
    data = answer.get("data")
    if data:
        texts = {mime: cut_text(each, _CHARACTERS) for mime, each in data.items() if isinstance(each, str)}
        return {**answer, "data": texts}
    return answer


def _answer(kind, request, shell, check):
    code = wires.field(request, "code", str)
    if kind == wires.IS_COMPLETE:
        return {"status": _ask(check, shell.is_complete, code)}
    cursor = wires.field(request, "cursor", int)
    if kind == wires.COMPLETE:
        return _bounded(_ask(check, shell.complete, code, cursor))
    return _bounded(_ask(check, shell.look_at, code, cursor, wires.field(request, "detail", int)))


def answer(life, kind, number, payload, in_cell=False):
    """Answers one. `in_cell`: a cell is running, and interrupts are for that."""
    request = wires.object_of(payload)
    until = wires.field(request, "until", float, int)
    said = {"answer": None, "error": None}
    # Nobody waits for what is late. The clock is the host's as well.
    if time.monotonic() < until:
        interrupts = life.interrupts
        struck_before = interrupts.struck
        if not in_cell:
            interrupts.begin(number)
        try:
            said["answer"] = _answer(kind, request, life.shell, interrupts.check)
            if interrupts.struck and not (in_cell and struck_before):
                # Whoever looks things up may swallow an interrupt and come back with half of them.
                raise KeyboardInterrupt
        except wires.ProtocolError:
            raise
        except BaseException as error:
            said = {"answer": None, "error": failures.report_of(error)}
            if in_cell and isinstance(error, KeyboardInterrupt):
                life.outbox.send(wires.ANSWER, number, said)
                raise
        finally:
            if not in_cell:
                interrupts.end()
        life.leave_if_not_ours(None)
    life.outbox.send(wires.ANSWER, number, said)
