"""The `calls` wire: barriers and calls into the daemon, waited for by any thread or task.

Owns: who reads the wire, what each waiter gets, and how arguments with bytes in them are packed.
Must not know: cells' code, displays, under which names cells find all this (`api`).

One waiting thread reads for all. It is the *leader* until it has what it waits for; then it wakes another one. Nothing
depends on that but speed: whoever is not woken for a while reads for itself.
"""

import os
from _thread import RLock, allocate_lock, get_ident

from . import wires
from .interrupts import wall

_PATIENCE_SECONDS = 0.2
_BYTES = (bytes, bytearray, memoryview)


class HostCallError(Exception):
    """What the daemon's function has thrown, or why it could not be called. `name` is that of the JavaScript error."""

    def __init__(self, message, name="Error"):
        super().__init__(message)
        self.name = name


class _HoldsBytes(Exception):
    pass


def _refuse(thing):
    if isinstance(thing, _BYTES):
        raise _HoldsBytes
    raise TypeError(
        f"an object of type {type(thing).__name__} cannot be sent to the daemon: it is neither JSON nor bytes"
    )


_encode = wires.strict_encoder(_refuse)


def _lift(thing, path, places, parts):
    """The same thing with nothing in the place of bytes; these come to stand in `parts`, their places in `places`."""
    if isinstance(thing, _BYTES):
        view = memoryview(thing)
        part = view.cast("B") if view.c_contiguous else view.tobytes()
        places.append([path, len(part)])
        parts.append(part)
        return None
    if isinstance(thing, dict):
        lifted = {}
        for key, each in thing.items():
            if isinstance(key, float):
                raise TypeError("a dict that holds bytes cannot have floats as keys")
            lifted[key] = _lift(each, [*path, key], places, parts)
        return lifted
    if isinstance(thing, (list, tuple)):
        return [_lift(each, [*path, at], places, parts) for at, each in enumerate(thing)]
    return thing


def pack(header, name, thing):
    """The payload of a frame that holds a value under this name: a header in JSON, then the bytes."""
    try:
        parts = []
        try:
            text = _encode({**header, name: thing, "places": []})
        except _HoldsBytes:
            places = []
            lifted = _lift(thing, [], places, parts)
            text = _encode({**header, name: lifted, "places": places})
    except RecursionError:
        raise ValueError("what is sent to the daemon is nested too deeply, or holds itself") from None
    head = text.encode("utf-8", "kernelhost.replace")
    payload = b"".join((len(head).to_bytes(4, "little"), head, *parts))
    if len(payload) > wires.LIMIT:
        raise ValueError(f"{len(payload)} bytes are too many for one call into the daemon; the limit is {wires.LIMIT}")
    return payload


def unpack(payload):
    """The header of such a payload, with its `value` whole again."""
    end = 4 + int.from_bytes(payload[:4], "little")
    if end > len(payload):
        raise wires.ProtocolError("a header is longer than its frame")
    header = wires.object_of(payload[4:end])
    try:
        for path, length in header.get("places") or ():
            if end + length > len(payload):
                raise ValueError("bytes are missing")
            part, end = payload[end : end + length], end + length
            holder, key = header, "value"
            for step in path:
                holder, key = holder[key], step
            holder[key] = part
    except (LookupError, TypeError, ValueError) as error:
        raise wires.ProtocolError(f"bytes have no place: {error!r}") from None
    return header


class Waiter:
    """Somebody who waits for one frame: a thread, or with `wake` a task."""

    __slots__ = ("answer", "is_done", "lock", "number", "thread", "wake")

    def __init__(self, number, wake=None):
        self.number = number
        self.wake = wake
        self.thread = get_ident()
        self.is_done = False
        self.answer = None
        self.lock = None
        if wake is None:
            self.lock = allocate_lock()
            self.lock.acquire()

    def rouse(self):
        if self.wake is not None:
            self.wake()
        elif self.thread != get_ident() and self.lock.locked():
            self.lock.release()


class Calls:
    """See the module. A forked child of the life has no daemon to call."""

    def __init__(self, wire, interrupts):
        self.pid = os.getpid()
        self.main = get_ident()
        self.wire = wire
        self.interrupts = interrupts
        self.lock = RLock()
        self.leader = None
        self.last_barrier = self.last_call = 0
        self.barriers = {}
        self.waiting = {}
        self.watched = {}
        self.closed = False
        os.set_blocking(wire.fd, False)

    def begin_anew(self):
        """In a copy of the process: its wire is another one. Nobody waits, or there would be no copy."""
        os.set_blocking(self.wire.fd, False)
        self.wire.buffer.data.clear()
        self.main = get_ident()
        self.leader = None
        self.barriers, self.waiting, self.watched = {}, {}, {}

    # Barriers

    @wall
    def barrier(self):
        """Asks the host to say when it has taken all that was sent before."""
        with self.lock:
            self.last_barrier += 1
            waiter = Waiter(self.last_barrier)
            waiter.is_done = self.closed
            self.barriers[waiter.number] = waiter
            self._send(wires.BARRIER, waiter.number)
            return waiter

    # Calls

    def call(self, cell, name, args, password=None):
        """Calls a function of the daemon's and waits for what it returns. With `password`: asks for a line of input."""
        self._must_be_ours()
        payload = self._packed(cell, name, args, password)
        waiter = self._post(payload, None)
        try:
            self.wait(waiter)
        finally:
            self._give_up(waiter)
        return self._value(waiter)

    async def acall(self, cell, name, args):
        """The same for a task, while its loop goes on."""
        import asyncio

        self._must_be_ours()
        payload = self._packed(cell, name, args, None)
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def answered():
            if not future.done():
                future.set_result(None)

        def wake():
            try:
                loop.call_soon_threadsafe(answered)
            except RuntimeError:
                # The loop is closed, and with it whoever waited.
                pass

        self._watch(loop)
        try:
            waiter = self._post(payload, wake)
            try:
                await future
            finally:
                self._give_up(waiter)
        finally:
            self._unwatch(loop)
        return self._value(waiter)

    def _must_be_ours(self):
        if os.getpid() != self.pid:
            raise HostCallError("a process that was forked from a kernel cannot call the kernel's daemon")

    @staticmethod
    def _packed(cell, name, args, password):
        if not isinstance(name, str):
            raise TypeError(f"the name of a function of the daemon's is a string, not {type(name).__name__}")
        return pack({"cell": cell, "name": name, "password": password}, "args", args)

    @staticmethod
    def _value(waiter):
        if waiter.answer is None:
            raise HostCallError("the daemon is gone")
        answer = unpack(waiter.answer)
        error = answer.get("error")
        if error is not None:
            raise HostCallError(str(error.get("message")), str(error.get("name")))
        return answer.get("value")

    @wall
    def _post(self, payload, wake):
        with self.lock:
            self.last_call += 1
            waiter = Waiter(self.last_call, wake)
            if self.closed:
                self._finish(waiter, None)
                return waiter
            self.waiting[waiter.number] = waiter
            self._send(wires.CALL, waiter.number, payload)
            return waiter

    @wall
    def _give_up(self, waiter):
        if waiter.is_done:
            return
        with self.lock:
            if self.waiting.pop(waiter.number, None) is not None and not self.closed and os.getpid() == self.pid:
                self._send(wires.GIVEN_UP, waiter.number)

    def _watch(self, loop):
        with self.lock:
            count = self.watched.get(loop, 0)
            if count == 0:
                loop.add_reader(self.wire.fd, self.read)
            self.watched[loop] = count + 1

    def _unwatch(self, loop):
        with self.lock:
            count = self.watched[loop] = self.watched[loop] - 1
            if count == 0:
                del self.watched[loop]
                if not loop.is_closed():
                    loop.remove_reader(self.wire.fd)

    # Waiting

    def wait(self, waiter):
        """Until it is done. An interrupt may end the wait."""
        import select

        is_main = get_ident() == self.main
        try:
            poll = None
            while not waiter.is_done:
                leads = self._leads(waiter)
                if is_main:
                    # What came inside a wall has woken nobody.
                    self.interrupts.check()
                if leads:
                    if poll is None:
                        poll = select.poll()
                        poll.register(self.wire.fd, select.POLLIN)
                    # A limit, because a signal may come in the instant before the wait begins.
                    poll.poll(200)
                    self.read()
                elif not waiter.lock.acquire(True, _PATIENCE_SECONDS):
                    self.read()
        finally:
            self._step_down(waiter)
        if is_main:
            self.interrupts.check()

    @wall
    def _leads(self, waiter):
        with self.lock:
            leader = self.leader
            # A thread that was torn out of its wait may have stayed the leader.
            if leader is None or leader.is_done or leader.thread == waiter.thread:
                self.leader = waiter
            return self.leader is waiter

    @wall
    def _step_down(self, waiter):
        with self.lock:
            self.barriers.pop(waiter.number, None) if self.barriers.get(waiter.number) is waiter else None
            if self.leader is not waiter:
                return
            self.leader = None
            for others in (self.barriers, self.waiting):
                for other in others.values():
                    if other.wake is None and not other.is_done and other.thread != waiter.thread:
                        other.rouse()
                        return

    @wall
    def read(self):
        """Takes what has arrived, and gives it to whom it is for. Does not wait."""
        with self.lock:
            while not self.closed:
                try:
                    found = self.wire.buffer.next_frame()
                except wires.ProtocolError as error:
                    # Not the cell's: it could catch it.
                    wires.leave(error)
                if found is not None:
                    self._take(*found)
                    continue
                try:
                    if not self.wire.fill():
                        self._close()
                except BlockingIOError:
                    return

    def _take(self, kind, number, payload):
        if kind == wires.BARRIER_PASSED:
            for each in [each for each in self.barriers if each <= number]:
                self._finish(self.barriers.pop(each), b"")
            return
        waiter = self.waiting.pop(number, None)
        # Nobody waits for the answer to what was given up.
        if waiter is not None:
            self._finish(waiter, payload)

    @staticmethod
    def _finish(waiter, answer):
        waiter.answer = answer
        waiter.is_done = True
        waiter.rouse()

    def _close(self):
        self.closed = True
        for others in (self.barriers, self.waiting):
            while others:
                self._finish(others.popitem()[1], None)

    def _send(self, kind, number, payload=b""):
        self.wire.send_all(wires.frame(kind, number, payload))
