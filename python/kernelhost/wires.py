"""Frames: how they are cut out of a stream, and how objects become their payload.

Owns: the format of `docs/protocol.md`. Must not know: what a frame means, cells, shells.
"""

import codecs
import os

VERSION = 1
LIMIT = 64 * 1024 * 1024
HEADER_SIZE = 16

CONFIGURE, EXECUTE, SHUTDOWN, COMPLETE, INSPECT, IS_COMPLETE, COPY, WIRES, THAW = 1, 2, 3, 4, 5, 6, 7, 8, 9
READY, START_FAILED, DISPLAY, CLEAR, VALUE, DONE, EXITING, INIT_BEGINS, ANSWER = 16, 17, 18, 19, 20, 21, 22, 23, 24
COPY_BEGINS, COPIED, COPY_REFUSED, COPY_IS = 25, 26, 27, 28
BARRIER, BARRIER_PASSED, CALL, RETURNED, GIVEN_UP = 32, 33, 34, 35, 36
PREPARE, FORK, RELEASE, ABANDON, ADOPT = 64, 65, 66, 67, 68
TEMPLATE_READY, TEMPLATE_FAILED, FORKED, FORK_FAILED, ENDED, RELEASED = 80, 81, 82, 83, 84, 85

PROTOCOL_ERROR_EXIT = 70


class ProtocolError(Exception):
    """The other end sent what the format does not allow."""


def leave(error):
    """The only answer to a peer that does not keep to the format."""
    os.write(2, f"kernelhost: the host does not keep to the protocol: {error}\n".encode())
    os._exit(PROTOCOL_ERROR_EXIT)


class TooLarge(Exception):
    """A payload is above the limit of a frame."""


def _replace_surrogates(error):
    # As bytes: the UTF-8 encoder takes nothing but ASCII from a handler that answers with text.
    return "\N{REPLACEMENT CHARACTER}".encode() * (error.end - error.start), error.end


codecs.register_error("kernelhost.replace", _replace_surrogates)


def _as_json(thing):
    if isinstance(thing, (bytes, bytearray, memoryview)):
        import binascii

        return binascii.b2a_base64(thing, newline=False).decode("ascii")
    if isinstance(thing, (set, frozenset)):
        return list(thing)
    return str(thing)


def _refuse_constant(name):
    raise ValueError(f"{name} is not JSON")


def _codec():
    """The encoder and decoder; from `_json` where it is as expected, because `json` loads `re` and `enum`."""
    try:
        import _json

        encoder = _json.make_encoder(
            None, _as_json, _json.encode_basestring, None, ":", ",", False, False, False
        )  # the arguments stand in for those of json.JSONEncoder

        class Context:
            strict = True
            object_hook = object_pairs_hook = None
            parse_float = float
            parse_int = int
            memo: dict = {}  # noqa: RUF012 - the C scanner wants the attribute, and keeps its own

            parse_constant = staticmethod(_refuse_constant)

        scan = _json.make_scanner(Context)

        def encode(thing):
            return "".join(encoder(thing, 0))

        def decode(text):
            try:
                value, end = scan(text, 0)
            except StopIteration:
                raise ValueError("no JSON value") from None
            if text[end:].strip(" \t\n\r"):
                raise ValueError("something follows the JSON value")
            return value

        if encode({"a": ["é", None, 1]}) == '{"a":["é",null,1]}' and decode('{"a":[1,"\\u00e9"]}') == {"a": [1, "é"]}:
            return encode, decode
    except Exception:
        pass
    import json

    plain = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_as_json)
    return plain.encode, json.JSONDecoder(parse_constant=_refuse_constant).decode


_encode, _decode = _codec()


def strict_encoder(default):
    """JSON text of what is JSON; anything else is given to `default`, which raises. No cycles are looked for."""
    try:
        import _json

        encoder = _json.make_encoder(None, default, _json.encode_basestring, None, ":", ",", False, False, False)
        encoder({"a": [1]}, 0)
        return lambda thing: "".join(encoder(thing, 0))
    except Exception:
        import json

        plain = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=default)
        return plain.encode


def without_nan(thing, depth=0):
    """The same thing with what JSON has no word for (NaN, cycles, odd keys) replaced."""
    if depth > 50:
        return "…"
    if isinstance(thing, float) and (thing != thing or thing in (float("inf"), float("-inf"))):
        return None
    if isinstance(thing, dict):
        return {key if isinstance(key, str) else str(key): without_nan(each, depth + 1) for key, each in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [without_nan(each, depth + 1) for each in thing]
    return thing


def payload_of(thing):
    """UTF-8 JSON of an object. Raises TooLarge, or whatever the object's own methods raise."""
    try:
        text = _encode(thing)
    except (ValueError, TypeError, RecursionError):
        text = _encode(without_nan(thing))
    if len(text) > LIMIT:
        raise TooLarge
    try:
        payload = text.encode()
    except UnicodeEncodeError:
        payload = text.encode("utf-8", "kernelhost.replace")
    if len(payload) > LIMIT:
        raise TooLarge
    return payload


def object_of(payload):
    """The object in a payload; anything else breaks the protocol."""
    try:
        thing = _decode(payload.decode())
    # SystemError: what some releases of the C scanner say of text that is not JSON.
    except (ValueError, RecursionError, SystemError) as error:
        raise ProtocolError(f"a payload is not JSON: {error}") from None
    if not isinstance(thing, dict):
        raise ProtocolError("a payload is not a JSON object")
    return thing


def frame(kind, number, payload=b""):
    """A whole frame, ready to be written."""
    return len(payload).to_bytes(4, "little") + kind.to_bytes(4, "little") + number.to_bytes(8, "little") + payload


def field(thing, name, *types):
    """A required field of an object, of one of the types given; `type(None)` allows null or absence."""
    value = thing.get(name)
    if type(value) not in types:
        raise ProtocolError(f"field {name!r} is missing or of the wrong type")
    return value


class FrameBuffer:
    """Bytes as they came, cut into frames."""

    __slots__ = ("data", "kinds")

    def __init__(self, kinds):
        self.data = bytearray()
        self.kinds = kinds

    def next_frame(self):
        """(kind, id, payload), or None when the frame is not complete."""
        data = self.data
        if len(data) < HEADER_SIZE:
            return None
        length = int.from_bytes(data[:4], "little")
        kind = int.from_bytes(data[4:6], "little")
        if length > LIMIT:
            raise ProtocolError(f"a frame of {length} bytes is above the limit")
        if data[6] or data[7]:
            raise ProtocolError("a reserved field is not 0")
        if kind not in self.kinds:
            raise ProtocolError(f"frame kind {kind} is not known here")
        end = HEADER_SIZE + length
        if len(data) < end:
            return None
        number = int.from_bytes(data[8:16], "little")
        payload = bytes(data[HEADER_SIZE:end])
        if len(data) == end:
            data.clear()
        else:
            del data[:end]
        return kind, number, payload


class Wire:
    """One socket that carries frames, blocking."""

    __slots__ = ("buffer", "fd")

    def __init__(self, fd, kinds):
        self.fd = fd
        self.buffer = FrameBuffer(kinds)
        os.set_blocking(fd, True)

    def receive(self):
        """The next frame, or None at the end of the stream."""
        buffer = self.buffer
        while True:
            found = buffer.next_frame()
            if found is not None:
                return found
            if not self.fill():
                return None

    def fill(self):
        """Reads what is there, waiting for at least one byte. False at the end of the stream."""
        try:
            chunk = os.read(self.fd, 262144)
        except ConnectionResetError:
            return False
        self.buffer.data += chunk
        return bool(chunk)

    def send(self, whole):
        """Writes a whole frame."""
        written = os.write(self.fd, whole)
        if written != len(whole):
            rest = memoryview(whole)[written:]
            while rest:
                rest = rest[os.write(self.fd, rest) :]

    def send_all(self, whole):
        """The same on a descriptor that does not block."""
        rest = memoryview(whole)
        while rest:
            try:
                rest = rest[os.write(self.fd, rest) :]
            except BlockingIOError:
                import select

                poll = select.poll()
                poll.register(self.fd, select.POLLOUT)
                poll.poll()
