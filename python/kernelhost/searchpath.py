"""Where modules are looked for: by cells as in a plain interactive Python, by us without the user's folders.

Owns: `sys.path` at the start of a life, and what an import that was broken off has left. Must not know: wires, shells.
"""

import os
import sys


def _user_folders():
    if sys.flags.ignore_environment:
        return set()
    return {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}


class without_user_paths:
    """While it lasts, a file such as `random.py` in the cwd or in PYTHONPATH cannot stand in for a module we need."""

    __slots__ = ("saved",)

    def __enter__(self):
        folders = _user_folders()
        self.saved = sys.path
        sys.path = [entry for entry in sys.path if entry and entry not in folders]

    def __exit__(self, *_):
        sys.path = self.saved


def as_interactive():
    """Cells see the current folder first, as in an interactive Python, unless the interpreter was told to be safe."""
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated and "" not in sys.path:
        sys.path.insert(0, "")
    sys.argv = [""]
    sys.orig_argv = [sys.executable]


def sources():
    """The files and folders whose change makes what is imported here out of date."""
    import sysconfig

    folders = [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    # Also those that are not there: an interpreter that starts when they are will find them.
    folders += [path for key in ("purelib", "platlib") if (path := sysconfig.get_path(key)) not in folders]
    return [sys.executable, os.path.join(sys.prefix, "pyvenv.cfg"), *dict.fromkeys(folders)]


def new_main_module():
    """A fresh `__main__`, with what an interactive Python puts into it, in place of the one that holds boot.py."""
    import builtins

    module = type(sys)("__main__")
    module.__loader__ = sys.modules["_frozen_importlib"].BuiltinImporter
    module.__builtins__ = builtins
    if sys.version_info < (3, 14):
        module.__annotations__ = {}
    sys.modules["__main__"] = module
    return module


def forget_half_imports():
    """After an interrupt: the parts of packages whose own import it has broken off.

    Python forgets such a package but not the parts it had loaded, and the next import of it then fails for ever: a part
    that is there is not put into the new package.
    """
    modules = sys.modules
    for name, module in list(modules.items()):
        package = name.rpartition(".")[0]
        # What somebody has put there by hand has no spec.
        if package and package not in modules and getattr(module, "__spec__", None) is not None:
            del modules[name]
