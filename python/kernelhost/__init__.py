"""The Python side of kernelhost: what runs inside a kernel, and the template that forks kernels.

Owns: the version that cells can ask for. Must not know: anything else, because importing it has to cost nothing.
"""

__version__ = "0.1.0"
