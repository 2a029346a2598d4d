import os
import signal

from kernel_case import KernelCase


class Output(KernelCase):
    def test_what_is_printed_is_in_the_pipe_before_a_kill(self):
        for life in self.lives():
            life.start_cell(
                "import os, sys\nprint('a', end='')\nsys.stdout.write('b')\nprint('c', 1, None)\n"
                "print(2, end='.')\nsys.stderr.write('e')\nsys.stdout.buffer.write(b'f')\nos.kill(os.getpid(), 9)"
            )
            self.assertEqual(life.wait(), -signal.SIGKILL)
            self.assertEqual((life.out, life.err), (b"abc 1 None\n2.f", b"e"))

    def test_print_is_print(self):
        code = """
import io, sys
print()
print('a', 'b', sep='-', end='!\\n')
print('a', None, 1.5, True, sep=None)
print('x', end=None)
print('x', flush=True)
print('to', 'err', file=sys.stderr)
memory = io.StringIO()
print('in', 'memory', file=memory)
assert memory.getvalue() == 'in memory\\n'
class Loud:
    def __str__(self):
        print('<inner>', end='')
        return 'loud'
print('1', Loud(), Loud())
for bad in ({'sep': 1}, {'end': 1}, {'nothing': 1}):
    try:
        print('x', **bad)
    except TypeError:
        print('TypeError')
keep, sys.stdout = sys.stdout, None
print('nowhere')
sys.stdout = memory
print('there')
sys.stdout = keep
print(print.__name__, print.__module__)
"""
        for life in self.lives():
            self.assert_ok(life.run(code))
            begin, end = "\na-b!\na None 1.5 True\nx\nx\n1 <inner>loud <inner>loud\n", "TypeError\n" * 3
            self.assertEqual(life.out.decode(), begin + end + "print builtins\n")
            self.assertEqual(life.err, b"to err\n")

    def test_the_streams_are_files(self):
        code = """
import faulthandler, logging, subprocess, sys
assert sys.stdout.fileno() == 1 and sys.stderr.fileno() == 2 and not sys.stdout.isatty()
assert sys.__stdout__ is sys.stdout and sys.__stderr__ is sys.stderr
assert sys.stdout.encoding == sys.stderr.encoding == 'utf-8' and sys.stdout.writable()
subprocess.run(['echo', 'child'], stdout=sys.stdout, check=True)
subprocess.run('echo child >&2', shell=True, stderr=sys.stderr, check=True)
sys.stdout.buffer.write('é\\n'.encode())
print('line', file=sys.stdout)
sys.stdout.writelines(['x', 'y\\n'])
logging.getLogger().warning('logged')
faulthandler.enable()
sys.stdout.reconfigure(errors='strict')
try:
    print('\\udc80')
except UnicodeEncodeError:
    print('strict')
sys.stdout.flush()
assert sys.stdin.read() == ''
"""
        for life in self.lives():
            self.assert_ok(life.run(code))
            self.assertEqual(life.out.decode(), "child\né\nline\nxy\nstrict\n")
            self.assertIn(b"child\nlogged\n", life.err)

    def test_a_non_blocking_pipe_and_signals_lose_no_bytes(self):
        code = """
import os, signal, sys
os.set_blocking(1, False)
signal.signal(signal.SIGALRM, lambda *a: None)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
for n in range(200):
    print(f'{n:04d}' * 5000)
signal.setitimer(signal.ITIMER_REAL, 0)
os.set_blocking(1, True)
"""
        for life in self.lives(shells=("plain",)):
            self.assert_ok(life.run(code))
            self.assertEqual(life.out.decode(), "".join(f"{n:04d}" * 5000 + "\n" for n in range(200)))

    def test_output_is_utf8_whatever_the_locale_is(self):
        for env in (
            {"LANG": "C", "LC_ALL": "POSIX"},
            {"LANG": "", "LC_ALL": ""},
            {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"},
        ):
            for life in self.lives(env={**os.environ, **env}):
                self.assert_ok(life.run("print('é🐍'); import sys; print('ü', file=sys.stderr)\n'ö'"))
                self.assertEqual((life.out, life.err), ("é🐍\n".encode(), "ü\n".encode()))
                self.assertEqual(life.text("'😀'"), "'😀'")

    def test_closing_a_stream_does_not_end_the_kernel(self):
        for life in self.lives():
            life.run("import sys\nsys.stdout.close()\nsys.stderr.close()")
            self.assert_error(life.run("print('x')"), "ValueError")
            self.assert_error(life.run("1/0"), "ZeroDivisionError")
            self.assert_alive(life)

    def test_a_crash_leaves_the_frame_of_the_cell_on_stderr(self):
        for life in self.lives():
            life.start_cell("import ctypes\ndef crash():\n    ctypes.memset(1, 0, 1)\ncrash()")
            self.assertEqual(life.wait(), -signal.SIGSEGV)
            self.assertIn(b"Segmentation fault", life.err)
            self.assertIn(b"line 3 in crash", life.err)
