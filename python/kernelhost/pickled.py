"""What is pickled in which way: functions of cells by value on the live namespace, modules by name, and all else as
cloudpickle, dill or pickle do it.

Ordinary classes of cells are pickled here too, except for cloudpickle, which knows all kinds of them: pickle would look
for them by name, and dill cannot when a method's cell holds its class.

Owns: the picklers, and the functions that their pickles call. Must not know: files.
"""

import enum
import functools
import hashlib
import importlib
import io
import linecache
import marshal
import pickle
import sys
import types
import typing
import warnings

_CACHED = type(functools.lru_cache(lambda: None))
_FILES = (io.FileIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair, io.TextIOWrapper)
_NAMED_ONLY = ("TypeVar", "ParamSpec", "TypeVarTuple", "TypeAliasType", "NewType")
# Types of dataclasses' own marks, and their names there.
_MARKS = {"_FIELD_BASE": None, "_MISSING_TYPE": "MISSING", "_HAS_DEFAULT_FACTORY_CLASS": "_HAS_DEFAULT_FACTORY"}
_OF_NO_CLASS = ("__dict__", "__weakref__", "__annotations_cache__", "__annotate_func__")
_OF_FUNCTIONS = ("__defaults__", "__kwdefaults__", "__doc__", "__module__", "__qualname__")


def library():
    """The name of what this interpreter pickles with, and a function (file, namespace) that makes a pickler."""
    for name in ("cloudpickle", "dill"):
        try:
            base = importlib.import_module(name).Pickler
            return name, _makes(name, base if name == "cloudpickle" else _made(_Strict, _Simple, base))
        except Exception:
            # One that cannot be imported, for whatever reason, is as good as none.
            continue
    return "pickle", _makes("pickle", _made(_Simple, _made(_Plain, pickle.Pickler)))


def _made(*bases):
    return type("Pickler", bases, {})


def _makes(name, base):
    kind = _made(_Live, base)

    def make(file, namespace):
        pickler = kind(file, protocol=5)
        pickler.namespace, pickler.bare, pickler.library = namespace, {}, name
        # Its number on the other side too, where it is the namespace of that life.
        pickler.memo = {id(namespace): (0, namespace)}
        if name == "dill":
            pickler._main = sys.modules["__main__"]
        return pickler

    return make


class _Plain:
    """In front of pickle's own."""

    def reducer_override(self, thing):
        if type(thing) is types.FunctionType and (thing.__module__ == "__main__" or not _is_found(thing)):
            # What a library has made in a function of its own, such as a decorator: on the live names of its module.
            module = sys.modules.get(thing.__globals__.get("__name__"))
            if module is not None and vars(module) is thing.__globals__:
                return self._function(thing, module)
        # By reference it would be saved, and then be missing in the life that loads it.
        if isinstance(thing, (type, types.FunctionType)) and thing.__module__ == "__main__":
            raise pickle.PicklingError(f"{thing.__qualname__} is defined in a cell, which needs cloudpickle or dill")
        return NotImplemented


class _Strict:
    """In front of dill, which only warns where it saves a class by a name that nobody will find."""

    def dump(self, thing):
        dill = sys.modules["dill"]
        with warnings.catch_warnings():
            warnings.simplefilter("error", dill.PicklingWarning)
            return super().dump(thing)


def _is_found(function):
    place = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        place = getattr(place, name, None)
    return place is function


class _Simple:
    """In front of a pickler that has no good way for classes of cells."""

    def reducer_override(self, thing):
        kind = type(thing)
        if kind is type and thing.__module__ == "__main__" and "__slots__" not in vars(thing):
            state = {name: value for name, value in vars(thing).items() if name not in _OF_NO_CLASS}
            if getattr(thing, "__annotate__", None) is not None:
                state["__annotate__"] = thing.__annotate__
            return new_class, (thing.__name__, thing.__bases__, thing.__qualname__), state, None, None, set_class
        if kind.__module__ == "dataclasses" and kind.__name__ in _MARKS:
            # They are compared by identity.
            return getattr, (sys.modules["dataclasses"], _MARKS[kind.__name__] or thing.name)
        if kind in (types.GetSetDescriptorType, types.MemberDescriptorType):
            return new_descriptor, (thing.__objclass__, thing.__name__)
        if kind is types.MappingProxyType:
            return new_proxy, (dict(thing),)
        if isinstance(thing, enum.EnumMeta) and thing.__module__ == "__main__":
            # dill would save it, and not be able to load it.
            raise pickle.PicklingError(f"{thing.__qualname__} is an enum of a cell, which needs cloudpickle")
        if kind in (staticmethod, classmethod):
            return kind, (thing.__func__,)
        if kind is property:
            return property, (thing.fget, thing.fset, thing.fdel, thing.__doc__)
        return _by_base(super(), thing)


def _by_base(base, thing):
    others = getattr(base, "reducer_override", None)
    return NotImplemented if others is None else others(thing)


class _Live:
    """In front of a pickler: what would come back with a copy of the namespace comes back on the live one."""

    def reducer_override(self, thing):
        kind = type(thing)
        if kind is types.FunctionType:
            if thing.__globals__ is self.namespace:
                return self._function(thing)
        elif kind is types.CellType:
            return self._cell(thing)
        elif kind is _CACHED:
            if getattr(thing, "__module__", None) == "__main__":
                return new_cached, (thing.__wrapped__, *thing.cache_parameters().values())
        elif isinstance(thing, types.ModuleType):
            name = thing.__name__
            is_found = sys.modules.get(name) is thing and (thing.__spec__ is not None or hasattr(thing, "__file__"))
            if name == "__main__" or is_found:
                return importlib.import_module, (name,)
            if self.library != "cloudpickle" or kind is not types.ModuleType:
                raise pickle.PicklingError(f"no module can be imported as {name!r} to get this one")
        elif isinstance(thing, _FILES):
            for name in ("stdin", "stdout", "stderr"):
                if thing is getattr(sys, name):
                    return getattr, (sys, name)
            # cloudpickle would make a copy of what it holds, and dill open it again.
            raise pickle.PicklingError("an open file is not saved")
        elif kind.__name__ in _NAMED_ONLY and kind.__module__ == "typing" and thing.__module__ == "__main__":
            if kind.__name__ == "NewType":
                return typing.NewType, (thing.__name__, thing.__supertype__)
            if self.library != "cloudpickle" or kind.__name__ != "TypeVar":
                raise pickle.PicklingError(f"{kind.__name__} {thing.__name__} is known only by its name in a cell")
        return _by_base(super(), thing)

    def _function(self, function, home=None):
        cells = function.__closure__ or ()
        # A cell can hold the function itself, which has no number yet: what they hold comes with the state.
        self.bare.update((id(cell), cell) for cell in cells)
        state = {name: getattr(function, name) for name in _OF_FUNCTIONS}
        state["__dict__"] = function.__dict__ or None
        annotate = getattr(function, "__annotate__", None)
        if annotate is not None:
            # From Python 3.14 on, to read the annotations would be to evaluate them.
            state["__annotate__"] = annotate
        elif function.__annotations__:
            state["__annotations__"] = function.__annotations__
        if getattr(function, "__type_params__", ()):
            state["__type_params__"] = function.__type_params__
        state["cells"] = [(cell, cell.cell_contents) for cell in cells if _is_full(cell)]
        code, source = _with_source(function.__code__)
        arguments = (self.namespace if home is None else home, marshal.dumps(code), function.__name__, cells, source)
        return new_function, arguments, state, None, None, set_function

    def _cell(self, cell):
        if self.bare.pop(id(cell), None) is not None or not _is_full(cell):
            return new_cell, ()
        return new_cell, (), (cell.cell_contents,), None, None, set_cell


def _is_full(cell):
    try:
        cell.cell_contents  # noqa: B018 - an empty one raises
    except ValueError:
        return False
    return True


# Where cells' code comes from


def _with_source(code):
    """The code under a name that no cell of another life has, and the text of its cell."""
    name = code.co_filename
    if not (name.startswith("<cell ") or "ipython-input-" in name or "ipykernel_" in name):
        return code, None
    lines = linecache.getlines(name)
    if not lines:
        return code, None
    text = "".join(lines)
    if name.startswith("<cell ") and ", saved " not in name:
        name = f"{name[:-1]}, saved {hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:8]}>"
        code = _renamed(code, name)
    return code, text


def _renamed(code, name):
    inner = tuple(_renamed(each, name) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=name, co_consts=inner)


# What pickles call: these names and what they take are part of the files' format


def new_cell():
    return types.CellType()


def set_cell(cell, state):
    (cell.cell_contents,) = state


def new_function(home, code, name, cells, source):
    code = marshal.loads(code)
    if source is not None:
        entry = (len(source), None, source.splitlines(keepends=True), code.co_filename)
        linecache.cache.setdefault(code.co_filename, entry)
    return types.FunctionType(code, home if type(home) is dict else vars(home), name, None, cells)


def set_function(function, state):
    for cell, value in state.pop("cells"):
        cell.cell_contents = value
    function.__dict__.update(state.pop("__dict__") or {})
    for name, value in state.items():
        setattr(function, name, value)


def new_class(name, bases, qualname):
    return types.new_class(name, bases, None, lambda space: space.update(__module__="__main__", __qualname__=qualname))


def set_class(kind, state):
    for name, value in state.items():
        setattr(kind, name, value)


def new_descriptor(kind, name):
    return vars(kind)[name]


def new_proxy(mapping):
    return types.MappingProxyType(mapping)


def new_cached(function, maxsize, typed):
    return functools.lru_cache(maxsize, typed)(function)
