"""Thread pools of numerical libraries: none while the template preloads, as many as there are CPUs in its kernels.

Owns: the variables and C functions that say how many threads such a pool has. Must not know: which module loaded them.
"""

import os
import sys

_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_SETTERS = (
    ("openblas", "openblas_set_num_threads", "OPENBLAS_NUM_THREADS"),
    ("openblas", "openblas_set_num_threads64_", "OPENBLAS_NUM_THREADS"),
    ("openblas", "scipy_openblas_set_num_threads", "OPENBLAS_NUM_THREADS"),
    ("openblas", "scipy_openblas_set_num_threads64_", "OPENBLAS_NUM_THREADS"),
    ("gomp", "omp_set_num_threads", "OMP_NUM_THREADS"),
    ("iomp", "omp_set_num_threads", "OMP_NUM_THREADS"),
    ("libomp", "omp_set_num_threads", "OMP_NUM_THREADS"),
    ("mkl_rt", "MKL_Set_Num_Threads", "MKL_NUM_THREADS"),
)


class Pools:
    """The limit of one thread, and its end."""

    def __init__(self):
        self.limited = [name for name in _VARIABLES if name not in os.environ]
        for name in self.limited:
            os.environ[name] = "1"
        self.setters = []

    def find(self):
        """To be called when everything is loaded. The environment gets back what it was."""
        for name in self.limited:
            os.environ.pop(name, None)
        if "numpy" not in sys.modules:
            return
        try:
            import ctypes

            with open("/proc/self/maps") as maps:
                paths = {line.split(None, 5)[5].strip() for line in maps if line.count("/")}
            for path in paths:
                name = os.path.basename(path)
                for part, symbol, variable in _SETTERS:
                    if part in name and variable in self.limited:
                        setter = getattr(ctypes.CDLL(path), symbol, None)
                        if setter is not None:
                            self.setters.append((setter, variable))
        except (OSError, ImportError):
            self.setters = []

    def lift(self):
        """In the child: as many threads as a new interpreter would use with this environment."""
        for setter, variable in self.setters:
            wanted = os.environ.get(variable) or os.environ.get("OMP_NUM_THREADS") or ""
            setter(int(wanted) if wanted.isdecimal() and int(wanted) > 0 else len(os.sched_getaffinity(0)))
