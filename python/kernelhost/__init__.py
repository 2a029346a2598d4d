"""The Python side of kernelhost: what runs inside a kernel, and the template that forks kernels.

Owns: the version, and the names that cells can use (`api`). Must not know: anything else, because importing it has to
cost nothing.
"""

__version__ = "0.1.0"
__all__ = ["HostCallError", "acall", "call", "on_restore", "tools"]


def __getattr__(name):
    if name in __all__:
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return [*globals(), *__all__]
