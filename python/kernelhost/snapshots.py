"""Variables saved to a file, by value, and loaded from it.

One pickler writes all variables, a pickle each, and its memo keeps what they share. Where one fails, the file, the
checksum and the memo go back to where it began, so that it leaves no trace. The order in a file is: magic, pickles,
manifest (JSON), length of the manifest, SHA-256 of all before, mark of the end. A file is read only after its checksum
held.

The namespace is entry 0 of the memo on both sides: whatever refers to it when it is saved refers to the live one
when it is loaded. `pickled` says what is saved in which way.

Owns: the file and its format, and the report. Must not know: frames.
"""

import errno
import fcntl
import hashlib
import io
import json
import os
import pickle
import re
import stat
import struct
import sys
import tempfile
import time

from . import __version__, pickled

# What the report travels under: not in the cell's text, where variables print while they are pickled.
MIME = "application/vnd.kernelhost.snapshot+json"

_MAGIC = b"KHSNAP\x00"
_FORMAT = b"\x02"
_END = b"KHSNAPok"
_TAIL = struct.Struct("<Q32s8s")
_PUT = struct.Struct("<cicci")
_PUT_FAR = struct.Struct("<ci")
# The first pickle of a file: what has the persistent id None, the namespace, becomes entry 0 of the memo.
_PREAMBLE = b"\x80\x05NQ\x94."
_CHUNK = 4 << 20
# What is not on the disk yet when the last call waits for it. The more, the longer a cell may wait behind that call.
_UNSYNCED = 32 << 20
_WHY_CHARACTERS = 500
_ASK_EVERY_SECONDS = 0.05
_LOOK_SECONDS = 0.2
_LOOK_BYTES = 1 << 20
_LOOK_ITEMS = 1000
_LOOK_DEPTH = 8
# What IPython keeps of earlier cells, under names of which there is no list.
_OF_IPYTHON = re.compile(r"_+|_i+|_i?\d+|In|Out|_exit_code")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SnapshotError(Exception):
    """A file that cannot be written, or that is none of ours or not whole. `reason` is the API's word for it."""

    def __init__(self, reason, text):
        super().__init__(text)
        self.reason = reason


class _Refused(Exception):
    """A limit that a variable has met."""


class _Stopped(BaseException):
    """The daemon wants the kernel for something else. No code of the user's may catch it."""


class _Sink:
    """Hashes what goes through it to the file, and stops it at limits."""

    def __init__(self, file, look):
        self.file = file
        self.look = look
        self.digest = hashlib.sha256()
        self.count = self.unsynced = 0
        self.limit = self.told = None
        self.failure = None

    def bound(self, limits):
        """From here on, no more than the smallest of these (size, words) is taken."""
        known = [(self.count + size, told) for size, told in limits if size is not None]
        self.limit, self.told = min(known) if known else (None, None)

    def write(self, data):
        flat = memoryview(data).cast("B")
        size = flat.nbytes
        if self.limit is not None and self.count + size > self.limit:
            raise _Refused(self.told)
        for start in range(0, size, _CHUNK):
            self.look()
            part = flat[start : start + _CHUNK]
            self.digest.update(part)
            try:
                self.file.write(part)
                self.unsynced += part.nbytes
                if self.unsynced > _UNSYNCED:
                    self.sync()
            except OSError as error:
                self.failure = error
                raise
        self.count += size
        return size

    def sync(self):
        self.file.flush()
        os.fdatasync(self.file.fileno())
        self.unsynced = 0

    def mark(self):
        return self.count, self.digest.copy()

    def go_back(self, mark):
        self.count, self.digest = mark
        try:
            self.file.seek(self.count)
            self.file.truncate()
        except OSError as error:
            self.failure = error
            raise


class _Capture:
    """Keeps what is written: a pickler whose sink it is for a moment shows the number of an object in its memo."""

    def __init__(self):
        self.data = b""

    def write(self, data):
        self.data += bytes(data)


class _Enough(Exception):
    pass


class _Nowhere:
    def __init__(self):
        self.count = 0

    def write(self, data):
        self.count += memoryview(data).nbytes
        if self.count > _LOOK_BYTES:
            raise _Enough


class _Switch:
    """The file of a pickler, which cannot be given another one."""

    def __init__(self, target):
        self.target = target

    def write(self, data):
        return self.target.write(data)


class _Writer:
    """One pickler after the other, each with the memo of the one before."""

    def __init__(self, sink, namespace, library):
        self.sink, self.namespace = sink, namespace
        self.library, self.make = library
        self.switch = _Switch(sink)
        self.pickler = self.make(self.switch, namespace)

    def write(self, value):
        """Raises what pickling raises, and then nothing of the value is left, neither in the file nor in the memo.

        Not after an interrupt: then nothing else is written either, and nobody should wait for that.
        """
        mark = self.sink.mark()
        # The list has its number before anything of the value has one.
        holder = [value]
        try:
            self.pickler.dump(holder)
        except (Exception, SystemExit):
            self._forget(holder)
            self.sink.go_back(mark)
            raise
        return self._number(holder)

    def _number(self, thing):
        """The number of an object in the memo, as the pickler writes it. The memo itself only comes as a copy."""
        capture = self.switch.target = _Capture()
        try:
            self.pickler.dump(thing)
        finally:
            self.switch.target = self.sink
        data = capture.data[2:]
        if data[:1] == pickle.FRAME:
            data = data[9:]
        return int.from_bytes(data[1:-1], "little")

    def end(self):
        return self._number(self._dumped([]))

    def _dumped(self, thing):
        self.switch.target = _Capture()
        self.pickler.dump(thing)
        return thing

    def _forget(self, holder):
        memo = self.pickler.memo.copy()
        first = memo[id(holder)][0] if id(holder) in memo else len(memo)
        fresh = self.make(self.switch, self.namespace)
        fresh.memo = {key: entry for key, entry in memo.items() if entry[0] < first}
        # cloudpickle's: which functions have globals in common.
        if hasattr(fresh, "globals_ref"):
            fresh.globals_ref = self.pickler.globals_ref
        self.pickler = fresh


def _why(error, place=""):
    text = str(error) if isinstance(error, _Refused) else f"{type(error).__name__}: {error}"
    text = f"{place}: {text}" if place else text
    return text if len(text) <= _WHY_CHARACTERS else f"{text[:_WHY_CHARACTERS]}…"


def _items(value):
    if isinstance(value, dict):
        for key, each in list(value.items())[:_LOOK_ITEMS]:
            yield f"[{key!r:.60}]", each
    elif isinstance(value, (list, tuple)):
        for at, each in enumerate(value[:_LOOK_ITEMS]):
            yield f"[{at}]", each
    elif not isinstance(value, type):
        try:
            attributes = list(vars(value).items())
        except Exception:
            return
        for name, each in attributes[:_LOOK_ITEMS]:
            yield f".{name}", each


def _culprit(value, path, make, namespace):
    """Where in a value that cannot be pickled the trouble is, and its error. A look, within bounds."""
    until = time.monotonic() + _LOOK_SECONDS
    found = None
    for _ in range(_LOOK_DEPTH):
        for step, each in _items(value):
            if time.monotonic() > until:
                return found
            try:
                make(_Nowhere(), namespace).dump(each)
            except _Enough:
                continue
            except Exception as error:
                value, path = each, path + step
                found = path, error
                break
        else:
            return found
    return found


def _variables(namespace):
    """What is a variable of the user's: what Python and IPython keep there is not."""
    shell = None
    if "IPython" in sys.modules:
        shell = sys.modules["IPython"].get_ipython()
        if shell is not None and shell.user_ns is not namespace:
            shell = None
    hidden = {} if shell is None else shell.user_ns_hidden
    for name, value in list(namespace.items()):
        if not isinstance(name, str) or (name.startswith("__") and name.endswith("__") and len(name) > 4):
            continue
        if shell is not None and _OF_IPYTHON.fullmatch(name):
            continue
        if name in hidden and hidden[name] is value:
            continue
        yield name, value


def _failed(error, path, doing):
    if isinstance(error, OSError):
        reason = "disk-full" if error.errno in _FULL else "not-writable"
        return SnapshotError(reason, f"{path}: {doing}: {error.strerror or error}")
    return SnapshotError("not-writable", f"{path}: {doing}: {error}")


def _may_replace(path):
    """Whatever stands at the path and is none of ours stays there."""
    try:
        with _opened(path) as file:
            found = file.read(len(_MAGIC))
    except SnapshotError as error:
        if error.reason == "missing":
            return
        raise
    if found and found != _MAGIC:
        raise SnapshotError("not-a-snapshot", f"{path}: is a file that is no snapshot, and is not overwritten")


class _Temporary:
    """The new file beside the old one. Its lock says that somebody writes it: what is not locked was left by a kill."""

    def __init__(self, path):
        self.path = path
        folder, name = os.path.split(path)
        self.folder = folder
        prefix, suffix = f".{name[:100]}.", ".kernelhost"
        self._clear(prefix, suffix)
        while True:
            # Made with mode 0600 whatever the umask.
            handle, self.name = tempfile.mkstemp(suffix, prefix, folder)
            self.file = os.fdopen(handle, "w+b", buffering=1 << 20)
            fcntl.flock(handle, fcntl.LOCK_EX)
            # Another saver may have taken it for a left-over before it was locked.
            if os.fstat(handle).st_nlink:
                return
            self.file.close()

    def _clear(self, prefix, suffix):
        for name in os.listdir(self.folder):
            if not (name.startswith(prefix) and name.endswith(suffix)):
                continue
            try:
                handle = os.open(os.path.join(self.folder, name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(os.path.join(self.folder, name))
            except OSError:
                pass
            finally:
                os.close(handle)

    def keep(self):
        """In the place of the old one, at once."""
        self.file.flush()
        os.fsync(self.file.fileno())
        os.rename(self.name, self.path)
        self.name = None
        try:
            handle = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError:
            # Not every file system can do that with folders.
            pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.name is not None:
            try:
                os.unlink(self.name)
            except OSError:
                pass
        try:
            self.file.close()
        except OSError:
            # Of what is thrown away, nothing has to be written.
            pass


def _look_of(deadline, may_go_on):
    """What is asked again and again while a file is written."""
    asked = time.monotonic()

    def look():
        nonlocal asked
        moment = time.monotonic()
        if deadline is not None and moment > deadline:
            raise _Refused("the time for saving was up")
        if may_go_on is not None and moment > asked + _ASK_EVERY_SECONDS:
            asked = moment
            if not may_go_on():
                raise _Stopped

    return look


def save(
    path, namespace=None, max_variable_bytes=None, max_bytes=None, timeout=None, may_go_on=None, all_or_nothing=False
):
    """Writes the variables of `namespace`; the file that was there stays whole until the new one is.

    `all_or_nothing`: a time that is up is a failure, and costs not only what was not saved by then.
    """
    namespace = sys.modules["__main__"].__dict__ if namespace is None else namespace
    deadline = None if timeout is None else time.monotonic() + timeout
    library = pickled.library()
    path = os.path.realpath(path)
    _may_replace(path)
    saved, skipped = [], []
    try:
        with _Temporary(path) as temporary:
            sink = _Sink(temporary.file, _look_of(deadline, may_go_on))
            try:
                sink.write(_MAGIC + _FORMAT + _PREAMBLE)
                entries, end = _write_all(
                    _Writer(sink, namespace, library), skipped, max_variable_bytes, max_bytes, deadline
                )
            except _Refused as error:
                raise SnapshotError("timed-out", f"{path}: {error}") from None
            if all_or_nothing and deadline is not None and time.monotonic() > deadline:
                raise SnapshotError("timed-out", f"{path}: the time for saving was up")
            saved.extend(each["name"] for each in entries)
            _write_end(sink, entries, end, library[0])
            size = temporary.file.tell()
            temporary.keep()
    except OSError as error:
        raise _failed(error, path, "cannot be written") from error
    except _Stopped:
        raise SnapshotError("stopped", f"{path}: the kernel was wanted for a cell") from None
    return {"path": path, "bytes": size, "saved": saved, "skipped": skipped, "pickler": library[0]}


def _write_all(writer, skipped, max_variable_bytes, max_bytes, deadline):
    sink, namespace, entries = writer.sink, writer.namespace, []
    for name, value in _variables(namespace):
        if value is namespace:
            skipped.append({"name": name, "why": "it is the namespace itself"})
            continue
        if deadline is not None and time.monotonic() > deadline:
            skipped.append({"name": name, "why": "the time for saving was up"})
            continue
        before = sink.count
        sink.bound(
            (
                (max_variable_bytes, f"larger than the limit of {max_variable_bytes} bytes for a variable"),
                (
                    None if max_bytes is None else max_bytes - before,
                    f"with it, all together are larger than the limit of {max_bytes} bytes",
                ),
            )
        )
        try:
            number = writer.write(value)
        except (Exception, SystemExit) as error:
            if sink.failure is not None:
                raise sink.failure from None
            found = None if isinstance(error, _Refused) else _culprit(value, name, writer.make, namespace)
            skipped.append({"name": name, "why": _why(error) if found is None else _why(found[1], found[0])})
            continue
        entries.append({"name": name, "bytes": sink.count - before, "number": number})
    return entries, writer.end()


def _write_end(sink, entries, end, library):
    sink.bound(())
    # What is whole is not given up any more.
    sink.look = lambda: None
    manifest = {
        "kernelhost": __version__,
        "python": list(sys.version_info[:2]),
        "pickler": library,
        "savedAt": time.time(),
        "variables": entries,
        "end": end,
    }
    text = json.dumps(manifest).encode()
    sink.write(text)
    sink.write(struct.pack("<Q", len(text)))
    sink.file.write(sink.digest.digest() + _END)


def _opened(path):
    try:
        # What is no file may never be ready to be opened.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SnapshotError("missing", f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        text = getattr(error, "strerror", None) or error
        raise SnapshotError("unreadable", f"{path}: cannot be read: {text}") from None
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind):
        os.close(handle)
        what = "is a directory" if stat.S_ISDIR(kind) else "is no regular file"
        raise SnapshotError("not-a-file", f"{path}: {what}")
    return os.fdopen(handle, "rb")


def _checked(file, path):
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        raise SnapshotError("empty", f"{path}: the file is empty")
    head = file.read(len(_MAGIC) + 1)
    if head[: len(_MAGIC)] != _MAGIC[: len(head)]:
        raise SnapshotError("not-a-snapshot", f"{path}: the file is no snapshot of kernelhost")
    if len(head) == len(_MAGIC) + 1 and head[-1:] != _FORMAT:
        raise SnapshotError("version", f"{path}: the file is a snapshot of another version of kernelhost")
    if size < len(head) + _TAIL.size:
        raise SnapshotError("cut-short", f"{path}: the snapshot is cut short")
    file.seek(size - _TAIL.size)
    length, expected, end = _TAIL.unpack(file.read(_TAIL.size))
    if end != _END:
        raise SnapshotError("cut-short", f"{path}: the snapshot has no end: it is cut short, or damaged there")
    file.seek(0)
    digest, left = hashlib.sha256(), size - len(_END) - len(expected)
    while left:
        data = file.read(min(left, _CHUNK))
        if not data:
            raise SnapshotError("cut-short", f"{path}: the snapshot is cut short")
        digest.update(data)
        left -= len(data)
    if digest.digest() != expected:
        raise SnapshotError("damaged", f"{path}: the checksum does not hold: the snapshot is damaged")
    file.seek(size - _TAIL.size - length)
    manifest = json.loads(file.read(length))
    if manifest["python"] != list(sys.version_info[:2]):
        saved, here = (".".join(map(str, each)) for each in (manifest["python"], sys.version_info[:2]))
        raise SnapshotError("version", f"{path}: the snapshot was saved by Python {saved}, and this is Python {here}")
    file.seek(len(_MAGIC) + 1)
    return size, manifest


class _Reader(pickle.Unpickler):
    """Gives what stands for the namespace, and after a failure what an earlier reader has in its memo."""

    def __init__(self, file, namespace, loaded, memo=None):
        super().__init__(file)
        self.namespace, self.loaded, self.kept = namespace, loaded, memo

    def persistent_load(self, number):
        return self.namespace if number is None else self.kept[number]

    def find_class(self, module, name):
        if module == "__builtin__" and name == "__main__":
            # dill's words for the namespace.
            return self.namespace
        if module == "__main__" and name in self.loaded:
            return self.loaded[name]
        return super().find_class(module, name)


class _Chain:
    """Bytes, and then a file. Without `peek`, so that nobody reads further than the end of a pickle."""

    def __init__(self, head, file):
        self.head, self.file = io.BytesIO(head), file

    def read(self, size):
        return self.head.read(size) or self.file.read(size)

    def readinto(self, buffer):
        return self.head.readinto(buffer) or self.file.readinto(buffer)

    def readline(self):
        return self.head.readline() or self.file.readline()


def _counts_what_was_put():
    """Whether new entries of a memo are numbered by how many there are, wherever these stand. From 3.15 on not."""
    far = _PUT_FAR.pack(b"r", 1 << 20)
    try:
        # A None far away, then a list that has to be entry 1.
        return pickle.loads(b"\x80\x05N" + far + b"0]\x940h\x01.") == []
    except pickle.UnpicklingError:
        return False


def _reader_after(failed, file, first, following, end):
    """A reader for what follows a failure.

    Its memo has what came before the failure, and holes in the place of what failed: a later variable that refers
    to that fails too, and no other does. New entries are numbered by how many there are, so as many as there are
    holes stand behind all that will come.
    """
    memo = {number: each for number, each in failed.memo.copy().items() if number < first}
    parts = [_PUT.pack(b"J", number, b"Q", b"r", number) + b"0" for number in sorted(memo)]
    parts += [b"Nr%b0" % struct.pack("<i", end + at) for at in range(following - len(memo))]
    head = b"".join((b"\x80\x05", *parts, b"N."))
    reader = _Reader(_Chain(head, file), failed.namespace, failed.loaded, memo)
    reader.load()
    return reader


def load(path, namespace=None, tell=True):
    """Runs what the file says: loading is code execution, and the checksum is no signature."""
    namespace = sys.modules["__main__"].__dict__ if namespace is None else namespace
    path = os.path.realpath(path)
    loaded, skipped = {}, []
    try:
        with _opened(path) as file:
            size, manifest = _checked(file, path)
            _load_all(file, manifest, namespace, loaded, skipped)
    except OSError as error:
        raise SnapshotError("unreadable", f"{path}: cannot be read: {error.strerror}") from error
    namespace.update(loaded)
    if tell:
        skipped.extend(tell_restored())
    return {
        "path": path,
        "bytes": size,
        "saved": list(loaded),
        "skipped": skipped,
        "pickler": manifest["pickler"],
    }


def _load_all(file, manifest, namespace, loaded, skipped):
    variables = manifest["variables"]
    reader = _Reader(file, namespace, loaded)
    reader.load()
    at = file.tell()
    lost = []
    for number, entry in enumerate(variables):
        name = entry["name"]
        try:
            loaded[name] = reader.load()[0]
        except (Exception, SystemExit) as error:
            if isinstance(error, pickle.UnpicklingError) and "Memo value not found" in str(error):
                why = f"it shares something with what could not be loaded: {', '.join(lost)}"[:_WHY_CHARACTERS]
            else:
                why = _why(error)
                lost.append(name)
            skipped.append({"name": name, "why": why})
            if not _counts_what_was_put():
                # What a later variable shares could not be told from other things.
                why = f"it comes after what could not be loaded, and this version of Python cannot skip that: {name}"
                skipped.extend({"name": each["name"], "why": why} for each in variables[number + 1 :])
                return
            file.seek(at + entry["bytes"])
            following = variables[number + 1]["number"] if number + 1 < len(variables) else manifest["end"]
            reader = _reader_after(reader, file, entry["number"], following, manifest["end"])
        at += entry["bytes"]


def tell_restored():
    """Calls what cells have asked to be called; those that raised, as they stand in a report."""
    from . import api

    return [{"name": f"on_restore: {name}", "why": _why(error)} for name, error in api.restored("load")]


def restore(path):
    """At the start of a life. A file that cannot be loaded keeps no kernel from starting: the report says why."""
    try:
        return load(path, tell=False)
    except SnapshotError as error:
        return {"failed": {"reason": error.reason, "message": str(error)}}
    except Exception as error:
        return {"failed": {"reason": "failed", "message": f"{path}: {_why(error)}"}}


def answer(what, arguments):
    """What the daemon runs, in a silent cell."""
    from . import api

    life = api._connected()
    arguments = json.loads(arguments)
    try:
        report = load(arguments["path"]) if what == "load" else _save(life, arguments)
    except SnapshotError as error:
        report = {"failed": {"reason": error.reason, "message": str(error)}}
    life.outbox.display({MIME: report})


def _save(life, arguments):
    path, milliseconds, pid = arguments["path"], arguments["timeoutMs"], arguments["pid"]
    # The life that was to be saved has ended, and a new one must not take its file.
    if pid is not None and pid != os.getpid():
        raise SnapshotError("stopped", f"{path}: the life that was to be saved has ended")

    def may_go_on():
        return life.calls.call(life.outbox.cell, arguments["ask"], None) is True

    return save(
        path,
        max_variable_bytes=arguments["maxVariableBytes"],
        max_bytes=arguments["maxBytes"],
        timeout=None if milliseconds is None else milliseconds / 1000,
        may_go_on=None if arguments["ask"] is None else may_go_on,
        all_or_nothing=pid is not None,
    )
