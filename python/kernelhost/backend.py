"""Which backend matplotlib uses where the kernel's environment names none.

Owns: that choice, made when a cell imports matplotlib. Must not know: what the backends do.
"""

import os


def use_backend(matplotlib, name):
    """As MPLBACKEND would, which is how Jupyter's kernel does it; but programs that cells start would inherit that."""
    if os.environ.get("MPLBACKEND"):
        return
    try:
        for parameters in (matplotlib.rcParams, matplotlib.rcParamsOrig):
            parameters["backend"] = name
        matplotlib.interactive(True)
    except Exception:
        # Whatever goes by that name, its import must not fail for this.
        pass
