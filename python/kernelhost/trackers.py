"""The resource tracker of multiprocessing outlives its kernel's process group, so that it can do its work.

It removes semaphores and shared memory once the processes that used them are gone, however they went. A group that is
killed as one would take it along, and what it was to remove would stay in memory until the machine is restarted. In a
session of its own it leaves by itself a moment later; what ends the tree of a life waits for that.

Owns: how that one process is started. Must not know: anything else of multiprocessing.
"""

import sys

_MODULE = "multiprocessing.resource_tracker"


def let_outlive():
    """Now if the module is there already, else when it is imported."""
    module = sys.modules.get(_MODULE)
    if module is not None:
        _change(module)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Stands in front of the import system for one import."""

    def find_spec(self, name, path=None, target=None):
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        from importlib.machinery import PathFinder

        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_change(module):
                load(module)
                _change(module)

            spec.loader.exec_module = load_and_change
        return spec


class _Util:
    """`multiprocessing.util` as the tracker's module sees it: one function is another one."""

    def __init__(self, util):
        self._util = util

    def __getattr__(self, name):
        return getattr(self._util, name)

    def spawnv_passfds(self, path, args, passfds):
        import subprocess

        tracker = subprocess.Popen(args, executable=path, pass_fds=passfds, start_new_session=True)
        # Its module waits for it; to subprocess it is nothing to be waited for.
        tracker.returncode = 0
        return tracker.pid


def _change(module):
    util = getattr(module, "util", None)
    if hasattr(util, "spawnv_passfds") and not isinstance(util, _Util):
        module.util = _Util(util)
