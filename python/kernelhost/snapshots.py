"""Variables saved to a file, by value, and loaded from it.

Every variable is first pickled alone into nothing, which finds those that fail without leaving a trace of them in a
memo or in the file. One pickler then writes the others, a pickle each: its memo keeps what variables share. A file is
read only after its checksum held. The order is magic, pickles, manifest (JSON), length of the manifest, SHA-256 of all
before.

Owns: the file's format. Must not know: frames.
"""

import hashlib
import importlib
import json
import os
import pickle
import struct
import sys
import tempfile
import time
import types

from . import __version__

_MAGIC = b"KHSNAP\x00\x01"
_TAIL = struct.Struct("<Q32s")
_HIDDEN = frozenset(("In", "Out", "get_ipython", "exit", "quit", "open"))


class SnapshotError(Exception):
    """A file that cannot be written, or that is none of ours or not whole."""


class _Refused(Exception):
    pass


class _Sink:
    """Counts and hashes what goes through it, and stops it at a limit."""

    def __init__(self, file, limit, deadline):
        self.file, self.limit, self.deadline = file, limit, deadline
        self.count = 0
        self.digest = hashlib.sha256()

    def write(self, data):
        size = memoryview(data).nbytes
        self.count += size
        if self.limit is not None and self.count > self.limit:
            raise _Refused(f"larger than the limit of {self.limit} bytes")
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise _Refused("the time for saving was up")
        if self.file is not None:
            self.digest.update(data)
            self.file.write(data)
        return size


class _Plain(pickle.Pickler):
    def reducer_override(self, thing):
        if isinstance(thing, types.ModuleType):
            return importlib.import_module, (thing.__name__,)
        # By reference it would be saved, and then be missing in the life that loads it.
        if isinstance(thing, type | types.FunctionType) and thing.__module__ == "__main__":
            raise pickle.PicklingError(f"{thing.__qualname__} is defined in a cell, which needs cloudpickle or dill")
        return NotImplemented


def _pickler():
    for name in ("cloudpickle", "dill"):
        try:
            return name, importlib.import_module(name).Pickler
        except Exception:
            continue
    return "pickle", _Plain


def _why(error):
    return f"{type(error).__name__}: {error}" if not isinstance(error, _Refused) else str(error)


def _variables(namespace):
    shell = namespace.get("get_ipython")
    hidden = getattr(getattr(shell, "__self__", None), "user_ns_hidden", {})
    for name, value in list(namespace.items()):
        if name.startswith("_") or name in _HIDDEN or (name in hidden and hidden[name] is value):
            continue
        yield name, value


def save(path, namespace=None, max_variable_bytes=None, max_bytes=None, timeout=None):
    """Writes the variables of `namespace`; the file that was there stays whole until the new one is."""
    namespace = sys.modules["__main__"].__dict__ if namespace is None else namespace
    deadline = None if timeout is None else time.monotonic() + timeout
    library, pickler = _pickler()
    path = os.path.abspath(path)
    good, skipped, total = {}, [], 0
    for name, value in _variables(namespace):
        sink = _Sink(None, max_variable_bytes, deadline)
        try:
            pickler(sink, protocol=5).dump(value)
            if max_bytes is not None and total + sink.count > max_bytes:
                raise _Refused(f"all together larger than the limit of {max_bytes} bytes")
        except Exception as error:
            skipped.append({"name": name, "why": _why(error)})
            continue
        total += sink.count
        good[name] = value
    folder = os.path.dirname(path)
    try:
        # Made with mode 0600 whatever the umask.
        handle, temporary = tempfile.mkstemp(prefix=".kernelhost-", dir=folder)
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror}") from error
    try:
        with os.fdopen(handle, "wb") as file:
            while (failed := _write(file, good, library, pickler, deadline)) is not None:
                # It could be saved a moment ago; what it left in the memo must not stay.
                skipped.append(failed)
                del good[failed["name"]]
            file.flush()
            size = file.tell()
            os.fsync(file.fileno())
        os.rename(temporary, path)
        temporary = None
        directory = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror}") from error
    finally:
        if temporary is not None:
            os.unlink(temporary)
    return {"path": path, "bytes": size, "saved": list(good), "skipped": skipped, "pickler": library}


def _write(file, variables, library, pickler, deadline):
    file.seek(0)
    file.truncate()
    sink = _Sink(file, None, deadline)
    sink.write(_MAGIC)
    writer = pickler(sink, protocol=5)
    sizes = []
    for name, value in variables.items():
        before = sink.count
        try:
            writer.dump(value)
        except OSError:
            raise
        except Exception as error:
            return {"name": name, "why": _why(error)}
        sizes.append({"name": name, "bytes": sink.count - before})
    sink.deadline = None
    manifest = {
        "kernelhost": __version__,
        "python": list(sys.version_info[:2]),
        "pickler": library,
        "variables": sizes,
    }
    text = json.dumps(manifest).encode()
    sink.write(text)
    length = struct.pack("<Q", len(text))
    sink.write(length)
    file.write(sink.digest.digest())
    return None


def _checked(file, path):
    size = os.fstat(file.fileno()).st_size
    if file.read(len(_MAGIC)) != _MAGIC:
        raise SnapshotError(f"{path}: not a snapshot of this version of kernelhost")
    if size < len(_MAGIC) + _TAIL.size:
        raise SnapshotError(f"{path}: cut short")
    file.seek(0)
    digest, left = hashlib.sha256(), size - 32
    while left:
        data = file.read(min(left, 1 << 20))
        if not data:
            raise SnapshotError(f"{path}: cut short")
        digest.update(data)
        left -= len(data)
    if file.read(32) != digest.digest():
        raise SnapshotError(f"{path}: the checksum does not hold: it is damaged or cut short")
    file.seek(size - _TAIL.size)
    length, _ = _TAIL.unpack(file.read(_TAIL.size))
    file.seek(size - _TAIL.size - length)
    manifest = json.loads(file.read(length))
    file.seek(len(_MAGIC))
    return size, manifest


def load(path, namespace=None):
    """Runs what the file says: loading is code execution, and the checksum is no signature."""
    namespace = sys.modules["__main__"].__dict__ if namespace is None else namespace
    path = os.path.abspath(path)
    loaded, skipped = {}, []
    try:
        with open(path, "rb") as file:
            size, manifest = _checked(file, path)
            if manifest["python"] != list(sys.version_info[:2]):
                version = ".".join(map(str, manifest["python"]))
                raise SnapshotError(f"{path}: saved by Python {version}, which is another version")
            reader = pickle.Unpickler(file)
            for number, entry in enumerate(manifest["variables"]):
                try:
                    loaded[entry["name"]] = reader.load()
                except Exception as error:
                    skipped.append({"name": entry["name"], "why": _why(error)})
                    # Later pickles count on this one's memo, and would get other objects than they mean.
                    for later in manifest["variables"][number + 1 :]:
                        skipped.append({"name": later["name"], "why": f"comes after {entry['name']}, which failed"})
                    break
    except OSError as error:
        raise SnapshotError(f"{path}: {error.strerror}") from error
    namespace.update(loaded)
    api = sys.modules.get(f"{__package__}.api")
    if api is not None:
        skipped.extend({"name": f"on_restore: {name}", "why": _why(error)} for name, error in api.restored("load"))
    return {
        "path": path,
        "bytes": size,
        "saved": list(loaded),
        "skipped": skipped,
        "pickler": manifest["pickler"],
    }


def answer(what, arguments):
    """What the daemon runs, in a silent cell."""
    if what == "save":
        path, variable, everything, milliseconds = json.loads(arguments)
        report = save(path, None, variable, everything, None if milliseconds is None else milliseconds / 1000)
    else:
        report = load(*json.loads(arguments))
    # Variables that print while they are saved have not always ended their line.
    print(f"\nkernelhost-snapshot:{json.dumps(report)}", flush=True)
