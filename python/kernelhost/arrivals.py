"""What is to be done when a module is imported for the first time, by whomever.

Owns: one finder on `sys.meta_path`, which leaves when nothing is awaited any more. Must not know: why somebody waits.
"""

import sys

_awaited = {}


class _Finder:
    """Finds nothing itself: it lets the others find, and has itself called when the module has run."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in _awaited:
            return None
        for finder in sys.meta_path:
            if finder is _Finder:
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader:
    def __init__(self, loader):
        self.loader = loader

    def __getattr__(self, name):
        # Who only looks for a module, and does not import it, may ask its loader for more.
        return getattr(self.loader, name)

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = self.loader
        module.__loader__ = self.loader
        self.loader.exec_module(module)
        # An import that fails, or is interrupted, will be tried again.
        for action in _awaited.pop(module.__name__, ()):
            action(module)
        if not _awaited and _Finder in sys.meta_path:
            sys.meta_path.remove(_Finder)


def when(name, action):
    """Calls `action(module)` as soon as the module has been imported; at once if it has been."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    _awaited.setdefault(name, []).append(action)
