"""What a life tells the host: displays, values and the ends of cells, in their right order with what is printed.

Owns: the writing side of `requests`, and the value that waits for the end of its cell.
Must not know: how code is run or formatted, how barriers are waited for (`calls`).
"""

import os
from _thread import RLock, get_ident

from . import wires
from .interrupts import wall

# What is left of a text that would not fit into a frame.
HEAD_CHARACTERS = TAIL_CHARACTERS = 500_000
ERROR_CHARACTERS = 50_000
ERROR_ENTRIES = 200
# What a bundle may be besides its largest texts.
_ROOM_FOR_OTHERS = 1024 * 1024


def cut_text(text, head=HEAD_CHARACTERS, tail=TAIL_CHARACTERS):
    """The head and the tail of a text, and how much of it is missing between them."""
    if len(text) <= head + tail:
        return text
    return f"{text[:head]}… [{len(text) - head - tail} characters cut] …{text[-tail:]}"


def _size(thing):
    return len(thing) if isinstance(thing, (str, bytes, bytearray, memoryview)) else 0


def is_too_large(data):
    """Whether a bundle surely does not fit: to find that out by encoding it would take several times its memory."""
    return isinstance(data, dict) and sum(map(_size, data.values())) > wires.LIMIT


def cut_bundle(data):
    """A bundle that surely fits into a frame: small parts as they are, text cut, and a note of what was left out."""
    kept, missing = {}, {}
    for mime, part in data.items():
        if mime == "text/plain" and isinstance(part, str):
            kept[mime] = cut_text(part)
            if kept[mime] is not part:
                missing[mime] = len(part) - HEAD_CHARACTERS - TAIL_CHARACTERS
        elif isinstance(part, (str, bytes, bytearray)) and len(part) <= _ROOM_FOR_OTHERS // (2 * len(data)):
            kept[mime] = part
        else:
            missing[mime] = _size(part) or None
    left_out = {mime: size for mime, size in missing.items() if mime != "text/plain"}
    if left_out:
        sizes = ", ".join(mime if size is None else f"{mime} of {size}" for mime, size in left_out.items())
        note = f"[left out, because all of it is more than the {wires.LIMIT} bytes that can be shown at once: {sizes}]"
        text = kept.get("text/plain")
        kept["text/plain"] = note if text is None else f"{text}\n{note}"
    return kept, {"kernelhost": {"missing": missing}}


def cut_error(error):
    """An error that surely fits into a frame."""
    lines = [cut_text(line, ERROR_CHARACTERS, ERROR_CHARACTERS) for line in error["traceback"]]
    if len(lines) > ERROR_ENTRIES:
        half = ERROR_ENTRIES // 2
        lines = [*lines[:half], f"… [{len(lines) - 2 * half} entries cut]", *lines[-half:]]
    name, value = (cut_text(error[key], ERROR_CHARACTERS, ERROR_CHARACTERS) for key in ("name", "value"))
    return {"name": name, "value": value, "traceback": lines}


def _cut_value(value):
    data, metadata = cut_bundle(value["data"])
    return {"data": data, "metadata": metadata}


def bundle_payload(extra, data, metadata):
    """The payload of a frame that holds a MIME bundle, cut or explained where it cannot be sent as it is."""
    if not is_too_large(data):
        try:
            return wires.payload_of({"data": data, "metadata": metadata, **extra})
        except wires.TooLarge:
            pass
    data, metadata = cut_bundle(data)
    return wires.payload_of({"data": data, "metadata": metadata, **extra})


class Outbox:
    """Frames of one life to its host. Used from any thread; a forked child of the life uses it in vain."""

    def __init__(self, requests, calls):
        self.pid = os.getpid()
        self.main = get_ident()
        self.requests = requests
        self.calls = calls
        self.lock = RLock()
        self.cell = 0
        self.value = None

    # What cells cause

    def display(self, data, metadata=None, display_id=None, update=False):
        extra = {"displayId": display_id, "update": bool(update)}
        self._show(wires.DISPLAY, bundle_payload(extra, data, metadata or {}))

    def clear(self, wait=False):
        self._show(wires.CLEAR, wires.payload_of({"wait": bool(wait)}))

    def keep_value(self, data, metadata, at_once=False):
        """The value of the cell's last expression: it travels with `done` unless something else comes first."""
        if get_ident() != self.main or os.getpid() != self.pid or not self.cell:
            at_once = True
        if at_once:
            self._show(wires.VALUE, bundle_payload({}, data, metadata))
        else:
            self._flush_value()
            self.value = {"data": data, "metadata": metadata}

    def _flush_value(self):
        value, self.value = self.value, None
        if value is not None:
            self._send_and_wait(wires.VALUE, bundle_payload({}, value["data"], value["metadata"]))

    def _show(self, kind, payload):
        if os.getpid() != self.pid:
            # A forked child has no host. What it displays is dropped; what it prints is not.
            return
        self._flush_value()
        self._send_and_wait(kind, payload)

    def _send_and_wait(self, kind, payload):
        self.calls.wait(self._send_with_barrier(kind, payload))

    @wall
    def _send_with_barrier(self, kind, payload):
        with self.lock:
            self.requests.send(wires.frame(kind, self.cell, payload))
            return self.calls.barrier()

    # What the runtime says

    @wall
    def send(self, kind, number, thing):
        with self.lock:
            self.requests.send(wires.frame(kind, number, wires.payload_of(thing)))

    def done(self, cell, outcome, interrupted):
        value, self.value = self.value, None
        if value is not None and is_too_large(value["data"]):
            value = _cut_value(value)
        answer = {
            "status": "ok" if outcome.error is None else "error",
            "executionCount": outcome.count,
            "interrupted": interrupted,
            "value": value,
            "error": outcome.error,
        }
        try:
            payload = wires.payload_of(answer)
        except wires.TooLarge:
            if value is not None:
                answer["value"] = _cut_value(value)
            if outcome.error is not None:
                answer["error"] = cut_error(outcome.error)
            payload = wires.payload_of(answer)
        with self.lock:
            self.cell = 0
            self.requests.send(wires.frame(wires.DONE, cell, payload))


class Outcome:
    """How a cell ended."""

    __slots__ = ("count", "error")

    def __init__(self, count, error=None):
        self.count = count
        self.error = error
