"""`%%bash`, `%%script` and their like, as plain child processes.

Owns: how a cell's text becomes the input of a program. Must not know: frames.

IPython itself would start a thread with an event loop, and copy what the program prints; here the program prints for
itself.
"""

import os
import subprocess

from IPython.core import magic_arguments
from IPython.core.magic import cell_magic, magics_class
from IPython.core.magics.script import ScriptMagics, script_args
from IPython.utils.process import arg_split

from ..interrupts import wall

# How long a program that has felt an interrupt gets to end by itself, and then to end after SIGTERM.
_SECONDS_TO_END = 0.5


def _as_file(text):
    """The text as a file that a program can read as its standard input. A pipe would need somebody to fill it."""
    if not text.endswith("\n"):
        text += "\n"
    fd = os.memfd_create("cell")
    file = os.fdopen(fd, "w+b")
    file.write(text.encode("utf-8", "replace"))
    file.seek(0)
    return file


@magics_class
class ScriptsOnOurOutput(ScriptMagics):
    """See the module."""

    @magic_arguments.magic_arguments()
    @script_args
    @cell_magic("script")
    def shebang(self, line, cell):
        """Runs the cell's text with a program. `%%bash` and others are short for `%%script bash`."""
        args, command = self.shebang.parser.parse_known_args(arg_split(line, posix=True))
        # Nobody reads what a background program prints without a name for it.
        otherwise = subprocess.DEVNULL if args.bg else None
        stdout = subprocess.PIPE if args.out else otherwise
        stderr = subprocess.PIPE if args.err else otherwise
        try:
            with _as_file(cell) as source:
                process = subprocess.Popen(command, stdin=source, stdout=stdout, stderr=stderr)
        except FileNotFoundError:
            print(f"Couldn't find program: {command[0]!r}")
            return
        if args.bg:
            self._leave_in_background(process, args)
            return
        try:
            out, err = process.communicate()
        except BaseException:
            _end(process)
            raise
        names = self.shell.user_ns
        if args.out:
            names[args.out] = out.decode("utf-8", "replace")
        if args.err:
            names[args.err] = err.decode("utf-8", "replace")
        if args.raise_error and process.returncode != 0:
            raise subprocess.CalledProcessError(process.returncode, cell)

    def _leave_in_background(self, process, args):
        self.bg_processes.append(process)
        names = self.shell.user_ns
        for name, stream in ((args.out, process.stdout), (args.err, process.stderr)):
            if name:
                names[name] = stream
        if args.proc:
            names[args.proc] = process


@wall
def _end(process):
    for ask in (None, process.terminate, process.kill):
        if ask is not None:
            ask()
        try:
            process.wait(_SECONDS_TO_END)
            return
        except subprocess.TimeoutExpired:
            continue
