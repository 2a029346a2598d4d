"""Entry of every Python process that the host starts: `boot.py kernel`, `template` or `warden`.

Owns: the check of the interpreter's version, and the search path during our own imports.
Must not know: anything about wires, shells or cells. Python 2.7 must be able to parse this file.
"""

import sys


def main():
    if sys.version_info < (3, 10):
        sys.stderr.write("kernelhost needs Python 3.10 or newer; this is %d.%d.%d\n" % tuple(sys.version_info[:3]))
        return 1
    import os

    here = os.path.dirname(os.path.abspath(__file__))
    # The folder of the script stands first unless the interpreter was told to be safe; no cell may see it.
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated and sys.path:
        del sys.path[0]
    sys.path.insert(0, here)
    try:
        from kernelhost import searchpath
    finally:
        sys.path.remove(here)
    role = sys.argv[1] if len(sys.argv) == 2 else None
    if role == "warden":
        from kernelhost import warden

        return warden.watch()
    if role == "kernel":
        with searchpath.without_user_paths():
            from kernelhost import runtime
        return runtime.start_cold()
    if role == "template":
        with searchpath.without_user_paths():
            from kernelhost import runtime, template
        fork = template.serve()
        return runtime.start_forked(fork)
    sys.stderr.write("usage: boot.py kernel|template|warden\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
