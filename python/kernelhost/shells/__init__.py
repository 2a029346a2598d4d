"""The two ways to run a cell: with IPython where it can be imported, and without.

A shell has `name`, `run(code, silent) -> Outcome`, `refresh()`, which a forked life calls once, and three questions
about code: `complete(code, cursor)`, `look_at(code, cursor, detail)` and `is_complete(code)`.
Owns: the choice between them. Must not know: frames.
"""

from ..searchpath import without_user_paths


def make(wanted, main):
    """A shell of the wanted kind, whose cells run in the module `main`. `auto`: IPython where it can be imported."""
    if wanted != "plain":
        try:
            return _ipython(main)
        except ImportError:
            if wanted == "ipython":
                raise
    from .plain import PlainShell

    return PlainShell(main)


def _ipython(main):
    import warnings

    # What a version of IPython warns of concerns us and not the user, and must not keep a kernel from starting.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with without_user_paths():
                from .ipython import make_shell
        except ImportError:
            # IPython may be installed in a folder of PYTHONPATH.
            from .ipython import make_shell
        return make_shell(main)
