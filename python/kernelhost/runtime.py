"""One life: it starts, answers requests one after the other, and leaves.

Owns: the start, the request loop, and every way out. Must not know: how code is run (shells), how a fork is made fresh.
"""

import faulthandler
import os
import sys

from . import api, copies, failures, queries, searchpath, shells, trackers, wires
from .calls import Calls
from .interrupts import Interrupts
from .jobs import Jobs
from .loop import Loop
from .outbox import Outbox
from .output import install

_CPU_GRACE_SECONDS = 2
_COLD_WIRES = (3, 4, 5, 6)
_FROM_HOST = queries.KINDS | {wires.CONFIGURE, wires.EXECUTE, wires.SHUTDOWN, wires.COPY, wires.WIRES, wires.THAW}


_TO_FROZEN = frozenset((wires.COPY, wires.THAW, wires.SHUTDOWN))


class StartFailed(Exception):
    """The life cannot begin. `error` is the protocol's object."""

    def __init__(self, stage, error):
        super().__init__(stage)
        self.stage = stage
        self.error = error


def start_cold():
    """A life in an interpreter of its own. Returns its exit code."""
    requests, calls, interrupts, lifeline = _COLD_WIRES
    for fd in _COLD_WIRES:
        os.set_inheritable(fd, False)
    return Life(requests, calls, interrupts, lifeline).live(None, None)


def start_forked(fork):
    """A life in a process that the template has forked and made fresh. Returns its exit code."""
    shell = fork.shell
    return Life(*_COLD_WIRES).live(fork.configuration, shell)


class Life:
    """See the module."""

    def __init__(self, requests, calls, interrupts, lifeline):
        self.pid = os.getpid()
        self.descriptors = (requests, calls, interrupts, lifeline)
        self.requests = wires.Wire(requests, _FROM_HOST)
        self.interrupts = Interrupts(interrupts)
        self.calls = Calls(wires.Wire(calls, frozenset((wires.BARRIER_PASSED, wires.RETURNED))), self.interrupts)
        self.outbox = Outbox(self.requests, self.calls)
        self.loop = Loop(self.interrupts)
        self.loop.attend = (requests, self._attend)
        # A frame that came while a cell was running.
        self.postponed = None
        self.jobs = Jobs()
        self.shell = None
        # What the daemon's side offers: names of functions, and whether it answers `input()`.
        self.functions = ()
        self.answers_input = False
        # The code of `exit(code)`, once a cell has called it.
        self.leaving = None
        # It is being copied; it is a copy that waits to be thawed; how it was called before that.
        self.copying = self.frozen = False
        self.name = None
        # The processes between it and its copies, until they are reaped.
        self.between = []
        # The report of the snapshot that this life began with.
        self.restored = None

    # The start

    def live(self, configuration, shell):
        """From the configuration to the exit code."""
        install()
        faulthandler.enable(2)
        try:
            if configuration is None:
                configuration = self._configuration()
            try:
                self._start(configuration, shell)
            except StartFailed as failure:
                self.outbox.send(wires.START_FAILED, 0, {"stage": failure.stage, "error": failure.error})
                return 1
            except wires.ProtocolError:
                raise
            except Exception as error:
                report = failures.report_of(error)
                self.outbox.send(wires.START_FAILED, 0, {"stage": "python", "error": report})
                return 1
            del configuration, shell
            self.outbox.send(wires.READY, 0, introduction(self.shell.name))
            if self.restored is not None:
                self._tell_restored()
            return self._serve()
        except wires.ProtocolError as error:
            wires.leave(error)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)

    def _configuration(self):
        found = self.requests.receive()
        if found is None:
            os._exit(0)
        kind, _, payload = found
        if kind != wires.CONFIGURE:
            raise wires.ProtocolError("the first frame is not a configuration")
        return wires.object_of(payload)

    def _start(self, configuration, shell):
        if configuration.get("protocol") != wires.VERSION:
            text = f"this side speaks protocol {wires.VERSION}, the host asked for {configuration.get('protocol')!r}"
            raise StartFailed("protocol", {"name": "ProtocolError", "value": text, "traceback": []})
        wanted = wires.field(configuration, "shell", str)
        wires.field(configuration, "env", dict)
        self.settle(configuration)
        if shell is None:
            main = searchpath.new_main_module()
            searchpath.as_interactive()
            try:
                shell = shells.make(wanted, main)
            except Exception as error:
                raise StartFailed("shell", failures.report_of(error)) from None
        else:
            searchpath.as_interactive()
        self.shell = shell
        shell.life = self
        shell.refresh()
        os.register_at_fork(after_in_child=self._after_fork_in_cell)
        trackers.let_outlive()
        api.connect(self)
        self.interrupts.cover_system()
        self.interrupts.cover_forks()
        set_limits(configuration.get("limits") or {})
        self._run_init(configuration.get("init"), configuration.get("restoreFrom"))

    def settle(self, configuration):
        """Where it works, and what the daemon offers its cells."""
        set_oom_score(configuration.get("oomScoreAdj"))
        enter(wires.field(configuration, "cwd", str, type(None)))
        self.functions = tuple(configuration.get("functions") or ())
        self.answers_input = configuration.get("input") is True

    def _run_init(self, init, snapshot):
        if init or snapshot:
            # From here on code of the user's runs, and it must not run twice.
            self.outbox.send(wires.INIT_BEGINS, 0, None)
        if init:
            outcome = self.shell.run(init, True)
            self.leave_if_not_ours(outcome)
            if outcome.error is not None:
                raise StartFailed("init", outcome.error)
        if snapshot:
            from . import snapshots

            self.restored = snapshots.restore(snapshot)
            self.leave_if_not_ours(None)

    def _tell_restored(self):
        """Now that this life can call the daemon and show things, which callbacks may want to."""
        from . import snapshots

        report, self.restored = self.restored, None
        if "failed" not in report:
            report["skipped"] += snapshots.tell_restored()
        self.leave_if_not_ours(None)
        self.outbox.display({snapshots.MIME: report})

    # Requests

    def _serve(self):
        receive = self._receive
        while True:
            found = receive()
            if found is None:
                # The host is gone: there is nobody to leave in good order for.
                os._exit(0)
            kind, number, payload = found
            if self.frozen and kind not in _TO_FROZEN:
                raise wires.ProtocolError("a frozen copy runs nothing")
            if kind == wires.EXECUTE:
                self._execute(number, payload)
                if self.leaving is not None:
                    return self._exit_code(number)
            elif kind in queries.KINDS:
                queries.answer(self, kind, number, payload)
            elif kind == wires.SHUTDOWN:
                self.interrupts.leave()
                return 0
            elif kind == wires.COPY:
                copies.copy(self, number, payload)
            elif kind == wires.THAW and self.frozen:
                self._thaw(payload)
            else:
                raise wires.ProtocolError(f"frame {kind} at the wrong time")

    def _thaw(self, payload):
        try:
            failed = copies.thaw(self, payload)
            request = wires.object_of(payload)
            set_limits(request.get("limits") or {})
            self._run_init(request.get("init"), None)
        except StartFailed as failure:
            self.outbox.send(wires.START_FAILED, 0, {"stage": failure.stage, "error": failure.error})
            os._exit(1)
        self.outbox.send(wires.READY, 0, {**introduction(self.shell.name), "failed": failed})

    def _receive(self):
        while True:
            found = self.postponed or self.requests.buffer.next_frame()
            self.postponed = None
            if found is not None:
                return found
            if self.loop.current is not None and self.loop.has_work():
                try:
                    self.loop.wait_readable(self.requests.fd)
                except failures.LifeExit as leaving:
                    self.leaving = leaving.code
                    return wires.SHUTDOWN, 0, b""
                except BaseException as error:
                    if isinstance(error, Exception):
                        failures.print_report(error)
                    continue
                if os.getpid() != self.pid:
                    self.leave_if_not_ours(None)
                if self.loop.current.is_closed():
                    continue
            if self.between:
                copies.reap(self)
            if not self.requests.fill():
                return None

    def _attend(self):
        """While a cell awaits something: questions are answered, anything else is kept until the cell is over."""
        if not self.requests.fill():
            os._exit(0)
        while self.postponed is None:
            found = self.requests.buffer.next_frame()
            if found is None:
                return
            kind, number, payload = found
            if kind in queries.KINDS:
                queries.answer(self, kind, number, payload, in_cell=True)
            else:
                self.postponed = found

    def _execute(self, cell, payload):
        request = wires.object_of(payload)
        code = wires.field(request, "code", str)
        silent = wires.field(request, "silent", bool)
        outbox, interrupts = self.outbox, self.interrupts
        outbox.cell = cell
        self.loop.begin(cell)
        self.jobs.begin()
        interrupts.begin(cell)
        outcome = self.shell.run(code, silent)
        if interrupts.struck:
            searchpath.forget_half_imports()
        if interrupts.struck and outcome.error is not None and os.getpid() == self.pid:
            self.loop.end_tasks()
            if interrupts.by_host:
                self.jobs.interrupt(interrupts.struck_at)
        self.jobs.end()
        interrupts.end()
        self.leave_if_not_ours(outcome)
        if self.leaving is None:
            outbox.done(cell, outcome, interrupts.by_host)

    def _exit_code(self, cell):
        self.interrupts.leave()
        code = self.leaving
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
        code &= 0xFF
        self.outbox.send(wires.EXITING, cell, {"code": code})
        return code

    # Children of cells

    def leave_if_not_ours(self, outcome):
        """What `os.fork()` in a cell left behind ends here: only one process may answer the host."""
        if os.getpid() == self.pid:
            return
        code = 0
        if outcome is not None and outcome.error is not None:
            code = 1
            if self.leaving is not None:
                code = self.leaving if isinstance(self.leaving, int) else 1
            else:
                print("\n".join(outcome.error["traceback"]), file=sys.stderr)
        os._exit(code & 0xFF)

    def _after_fork_in_cell(self):
        if os.getpid() == self.pid or self.copying:
            return
        import _signal

        for fd in self.descriptors:
            try:
                os.close(fd)
            except OSError:
                pass
        if _signal.getsignal(_signal.SIGINT) is self.interrupts.handler:
            _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        loop = self.loop.current
        if loop is not None and not self.outbox.cell and loop.is_running():
            loop.stop()


def introduction(shell_name):
    """What `ready` and `template-ready` have in common."""
    return {
        "protocol": wires.VERSION,
        "pid": os.getpid(),
        "python": sys.executable,
        "pythonVersion": ".".join(map(str, sys.version_info[:3])),
        "shell": shell_name,
    }


def set_oom_score(score):
    if isinstance(score, int):
        try:
            fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
            try:
                os.write(fd, str(score).encode())
            finally:
                os.close(fd)
        except OSError:
            pass


def set_limits(limits):
    """What Linux keeps of a kernel's limits. A limit that is lower already stays."""
    # Most kernels have none, and need not load this for it.
    if not any(limits.values()):
        return
    import resource

    for number, name, grace in (
        (resource.RLIMIT_DATA, "memoryBytes", 0),
        # SIGXCPU ends what has used up its time; SIGKILL what ignores that.
        (resource.RLIMIT_CPU, "cpuSeconds", _CPU_GRACE_SECONDS),
        (resource.RLIMIT_NOFILE, "openFiles", 0),
    ):
        limit = limits.get(name)
        if limit is None:
            continue
        soft, hard = resource.getrlimit(number)
        hard = limit + grace if hard == resource.RLIM_INFINITY else min(hard, limit + grace)
        soft = limit if soft == resource.RLIM_INFINITY else min(soft, limit)
        resource.setrlimit(number, (min(soft, hard), hard))


def enter(cwd):
    """Makes a folder the working directory; one that cannot be entered is a start failure that names it."""
    if cwd is None:
        return
    try:
        os.chdir(cwd)
    except (OSError, ValueError) as error:
        text = f"the working directory {cwd!r} cannot be entered: {getattr(error, 'strerror', None) or error}"
        raise StartFailed("cwd", {"name": type(error).__name__, "value": text, "traceback": []}) from None
