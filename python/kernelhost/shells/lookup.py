"""Completion, inspection and completeness for the plain shell, from names and attributes alone.

Owns: which names are offered, and what is said about an object. Must not know: frames. Loaded when first asked for.

Nothing is called to find out: an expression such as `f().x` is not completed. What is looked up runs the user's
properties and `__dir__`, as everywhere.
"""

import ast
import builtins
import inspect
import keyword
import re
import warnings

_WORD_BEFORE = re.compile(r"(?:[^\W\d]\w*\s*\.\s*)*(?:[^\W\d]\w*)?\Z")
_WORD_AFTER = re.compile(r"\w*")
_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def _found(namespace, names):
    """The object that a dotted name stands for. Raises LookupError or AttributeError."""
    first, *rest = names
    thing = namespace[first] if first in namespace else getattr(builtins, first)
    for name in rest:
        thing = getattr(thing, name)
    return thing


def _names_before(code, cursor):
    word = _WORD_BEFORE.search(code[:cursor]).group()
    # What follows a closing bracket, a string or a number is an attribute of something that would have to be run.
    before = code[: cursor - len(word)].rstrip()
    if word and before.endswith("."):
        return None
    return [part.strip() for part in word.split(".")]


def complete(namespace, code, cursor):
    names = _names_before(code, cursor)
    matches = []
    start = cursor
    if names is not None:
        *path, stem = names
        start = cursor - len(stem)
        if path:
            try:
                offered = [name for name in dir(_found(namespace, path)) if isinstance(name, str)]
            except (LookupError, AttributeError):
                offered = []
        else:
            offered = [*namespace, *dir(builtins), *keyword.kwlist, *keyword.softkwlist] if stem else [*namespace]
        matches = sorted({name for name in offered if name.startswith(stem) and (stem or not name.startswith("_"))})
    return {"matches": matches, "start": start, "end": cursor, "metadata": {}}


def look_at(namespace, code, cursor, detail):
    end = cursor + len(_WORD_AFTER.match(code[cursor:]).group())
    names = _names_before(code, end)
    # Inside the brackets of a call it is the function that is asked about.
    if names == [""] and code[:cursor].rstrip().endswith("("):
        names = _names_before(code, len(code[:cursor].rstrip()) - 1)
    if not names or "" in names:
        return {"found": False, "data": {}}
    try:
        thing = _found(namespace, names)
    except (LookupError, AttributeError):
        return {"found": False, "data": {}}
    return {"found": True, "data": {"text/plain": _told(".".join(names), thing, detail)}}


def _told(name, thing, detail):
    kind = type(thing)
    lines = []
    if callable(thing):
        try:
            lines.append(f"Signature: {name}{inspect.signature(thing)}")
        except (TypeError, ValueError):
            pass
    lines.append(f"Type: {kind.__name__}")
    if not callable(thing) and not inspect.ismodule(thing):
        lines.append(f"Value: {thing!r}")
    source = None
    if detail:
        try:
            source = inspect.getsource(thing)
        except (OSError, TypeError):
            pass
    if source is not None:
        lines.append(f"Source:\n{source}")
    else:
        text = inspect.getdoc(thing)
        if text:
            lines.append(f"Doc:\n{text}")
    return "\n".join(lines)


def is_complete(code, futures):
    """`complete`, `incomplete` or `invalid`, as an interactive Python would take it."""
    flags = _FLAGS | futures
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(code, "<is it complete?>", "exec", flags, True)
        except (OverflowError, ValueError):
            return "invalid"
        except SyntaxError as error:
            whole = error
        else:
            whole = None
        if whole is None:
            # An indented block goes on until a line that is empty, or that is not indented.
            last = code.rstrip(" \t").rpartition("\n")[2]
            is_open = last[:1] in (" ", "\t") and last.strip() != "" and "\n" in code.strip()
            return "incomplete" if is_open and not code.endswith("\n") else "complete"
        # What becomes another error, or none, when more lines follow is only not finished.
        incomplete = getattr(ast, "PyCF_ALLOW_INCOMPLETE_INPUT", None) or 0x4000
        try:
            compile(code, "<is it complete?>", "exec", flags | incomplete, True)
        except SyntaxError as error:
            return (
                "incomplete"
                if type(error).__name__ == "_IncompleteInputError" or "incomplete input" in str(error)
                else "invalid"
            )
        except (OverflowError, ValueError):
            return "invalid"
        return "incomplete"
