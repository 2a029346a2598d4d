"""The template: it has imported what kernels need, forks them, and tells the host how they end.

Owns: the `control` socket and the processes it has forked, until they are reaped.
Must not know: cells, what a life does.

| a life is | event                          | it becomes  | what is sent                |
| --------- | ------------------------------ | ----------- | --------------------------- |
| -         | `fork`                         | running     | `forked` (or `fork-failed`) |
| -         | `fork` with `abandon` behind it | -           | `fork-failed` ECANCELED     |
| an orphan | `adopt`                        | running     | `forked` (or `fork-failed`) |
| running   | its end                        | ended       | `ended`; the zombie is kept |
| running   | `abandon` or `release`         | unwanted    |                             |
| unwanted  | its end                        | -           | `released`                  |
| ended     | `release` or `abandon`         | -           | `released`                  |
"""

import _signal
import faulthandler
import os
import select
import socket
import sys
import time
from collections import deque

from . import failures, fresh, searchpath, shells, threads, warden, wires
from .output import install
from .runtime import introduction
from .threadpools import Pools

_CONTROL, _LIFELINE = 3, 4
_WIRES_OF_A_LIFE = 6
_FROM_HOST = frozenset((wires.PREPARE, wires.FORK, wires.RELEASE, wires.ABANDON, wires.ADOPT))
_RUNNING, _UNWANTED, _ENDED = "running", "unwanted", "ended"
# Adopted orphans come in crowds, when a life with children ends; one look serves them all. The host waits for them.
_ORPHAN_SECONDS = 0.001
# What is killed is gone within milliseconds, unless it sits in an uninterruptible system call, or the machine is busy.
_END_SECONDS = 1.5


class Refused(Exception):
    """The template cannot serve. `error` is the protocol's object."""

    def __init__(self, stage, error):
        super().__init__(stage)
        self.stage = stage
        self.error = error


class Fork:
    """What a forked child takes with it."""

    __slots__ = ("configuration", "shell")

    def __init__(self, configuration, shell):
        self.configuration = configuration
        self.shell = shell


class Child:
    """One process that the template has forked and not reaped."""

    __slots__ = ("number", "pid", "pidfd", "state")

    def __init__(self, number, pid, pidfd):
        self.number = number
        self.pid = pid
        self.pidfd = pidfd
        self.state = _RUNNING


def serve():
    """Runs the template. Returns only in forked children, with their Fork."""
    for fd in (_CONTROL, _LIFELINE):
        os.set_inheritable(fd, False)
    fresh.reserve_standard_numbers()
    install()
    # For the template's own crash, and so that no fork has to load what faulthandler needs (a fifth of a fork's time).
    faulthandler.enable(2)
    template = Template()
    try:
        return template.run()
    except wires.ProtocolError as error:
        wires.leave(error)
    except (BrokenPipeError, ConnectionResetError):
        template.end()


class Template:
    """See the module."""

    def __init__(self):
        self.control = socket.socket(fileno=_CONTROL)
        self.control.setblocking(True)
        self.buffer = wires.FrameBuffer(_FROM_HOST)
        self.frames = deque()
        self.descriptors = deque()
        self.at_end = False
        self.children = {}
        self.by_pidfd = {}
        self.shell = None
        self.pools = None
        self.inheritance = None

    def run(self):
        try:
            request = self._first_request()
            preloaded = self._prepare(request)
        except Refused as refusal:
            self._send(wires.TEMPLATE_FAILED, 0, {"stage": refusal.stage, "error": refusal.error})
            sys.exit(1)
        except (wires.ProtocolError, OSError):
            raise
        except BaseException as error:
            self._send(wires.TEMPLATE_FAILED, 0, {"stage": "python", "error": failures.report_of(error)})
            sys.exit(1)
        self.inheritance = fresh.Inheritance()
        self._open_watch()
        self._disarm()
        self._settle_memory()
        self._send(
            wires.TEMPLATE_READY,
            0,
            {
                **introduction(self.shell.name),
                "preloaded": preloaded,
                "sources": searchpath.sources(),
                "cannotFork": why_not_to_fork(),
            },
        )
        return self._serve()

    # Preparation

    def _first_request(self):
        self._read(wait=True)
        while not self.frames:
            if self.at_end:
                os._exit(0)
            self._read(wait=True)
        kind, _, payload = self.frames.popleft()
        if kind != wires.PREPARE:
            raise wires.ProtocolError("the first frame is not `prepare`")
        return wires.object_of(payload)

    def _prepare(self, request):
        if request.get("protocol") != wires.VERSION:
            text = f"this side speaks protocol {wires.VERSION}, the host asked for {request.get('protocol')!r}"
            raise Refused("protocol", {"name": "ProtocolError", "value": text, "traceback": []})
        wanted = wires.field(request, "shell", str)
        preload = wires.field(request, "preload", list)
        started_with = _Circumstances()
        self.pools = Pools()
        sys.argv = [""]
        sys.orig_argv = [sys.executable]
        try:
            self.shell = shells.make(wanted, searchpath.new_main_module())
        except Exception as error:
            raise Refused("shell", failures.report_of(error)) from None
        with searchpath.without_user_paths():
            _load_what_cells_soon_need()
            self.shell.warm_up()
        for name in preload:
            try:
                __import__(name)
            except BaseException as error:
                report = failures.report_of(error)
                report["value"] = f"preloading {name!r} failed: {report['value']}"
                raise Refused("preload", report) from None
        self.pools.find()
        started_with.restore()
        return preload

    def _disarm(self):
        import fcntl

        fcntl.fcntl(_LIFELINE, fcntl.F_SETFL, fcntl.fcntl(_LIFELINE, fcntl.F_GETFL) & ~os.O_ASYNC)

    def _settle_memory(self):
        import gc

        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:
                pass
        try:
            import ctypes

            # What a C library has printed and not written yet would be written once more by every child.
            ctypes.CDLL(None).fflush(None)
            ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        except (ImportError, OSError, AttributeError):
            pass
        gc.collect()
        gc.freeze()

    # Waiting

    def _open_watch(self):
        self.wakeup, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        _signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        _signal.signal(_signal.SIGCHLD, lambda *_: None)
        _signal.signal(_signal.SIGINT, lambda *_: None)
        self.watch = select.epoll()
        self.watch.register(_CONTROL, select.EPOLLIN)
        self.watch.register(self.wakeup, select.EPOLLIN)
        self.orphans_due = None

    def _serve(self):
        while True:
            if not self.frames:
                if self.at_end:
                    self.end()
                self._wait()
            self._read(wait=False)
            if self.frames:
                fork = self._act(*self.frames.popleft())
                if fork is not None:
                    return fork

    def _wait(self):
        timeout = -1 if self.orphans_due is None else max(0.0, self.orphans_due - time.monotonic())
        for fd, _ in self.watch.poll(timeout):
            if fd == self.wakeup:
                try:
                    os.read(self.wakeup, 4096)
                except BlockingIOError:
                    pass
                if self.orphans_due is None:
                    self.orphans_due = time.monotonic() + _ORPHAN_SECONDS
                for child in [each for each in self.children.values() if each.pidfd is None]:
                    self._look_at(child)
            elif fd in self.by_pidfd:
                self._look_at(self.by_pidfd[fd])
        if self.orphans_due is not None and time.monotonic() >= self.orphans_due:
            self.orphans_due = None
            self._reap_orphans()

    def _read(self, wait):
        """Everything that has arrived; with `wait`, at least something."""
        space = socket.CMSG_SPACE(4 * 64)
        flags = socket.MSG_CMSG_CLOEXEC
        while not self.at_end:
            try:
                data, ancillary, message_flags, _ = self.control.recvmsg(
                    262144, space, flags if wait else flags | socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return
            except ConnectionResetError:
                data, ancillary, message_flags = b"", (), 0
            wait = False
            arrived = []
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    for at in range(0, len(content) - 3, 4):
                        arrived.append(int.from_bytes(content[at : at + 4], sys.byteorder))
            if message_flags & socket.MSG_CTRUNC:
                # There was no room for all of them. This fork fails; the lives that are there keep their reaper.
                _close(arrived)
                arrived = [None] * _WIRES_OF_A_LIFE
            self.descriptors.extend(arrived)
            if not data:
                self.at_end = True
                return
            self.buffer.data += data
            while (found := self.buffer.next_frame()) is not None:
                self.frames.append(found)

    def _send(self, kind, number, thing, descriptor=None):
        whole = wires.frame(kind, number, wires.payload_of(thing))
        sent = 0
        if descriptor is not None:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptor.to_bytes(4, sys.byteorder))]
            sent = self.control.sendmsg([whole], rights)
        if sent < len(whole):
            self.control.sendall(memoryview(whole)[sent:])

    # Requests

    def _act(self, kind, number, payload):
        if kind == wires.FORK:
            return self._fork(number, payload)
        if kind == wires.ADOPT:
            self._take_in(number, payload)
            return None
        child = self.children.get(number)
        if kind == wires.PREPARE:
            raise wires.ProtocolError("a second `prepare`")
        if child is None:
            # It is gone already, or the fork failed; both have been reported.
            return None
        if kind == wires.ABANDON and child.state is not _ENDED:
            kill(child.pid)
        if child.state is _ENDED:
            self._reap(child)
        else:
            child.state = _UNWANTED
            self._look_at(child)
        return None

    def _fork(self, number, payload):
        if len(self.descriptors) < _WIRES_OF_A_LIFE:
            raise wires.ProtocolError("a fork came without its six descriptors")
        given = [self.descriptors.popleft() for _ in range(_WIRES_OF_A_LIFE)]
        if None in given:
            text = "the template has reached its limit of open files (RLIMIT_NOFILE)"
            self._send(wires.FORK_FAILED, number, {"errno": 24, "code": "EMFILE", "message": text})
            return None
        if any(kind == wires.ABANDON and of == number for kind, of, _ in self.frames):
            _close(given)
            self._send(wires.FORK_FAILED, number, {"errno": 125, "code": "ECANCELED", "message": "abandoned"})
            return None
        configuration = wires.object_of(payload)
        environment = wires.field(configuration, "env", dict)
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
        try:
            pid = os.fork()
        except OSError as error:
            _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
            _close(given)
            import errno

            code = errno.errorcode.get(error.errno, str(error.errno))
            self._send(wires.FORK_FAILED, number, {"errno": error.errno, "code": code, "message": error.strerror})
            return None
        if pid == 0:
            try:
                # First of all, so that whatever goes wrong from here on is told where this life is told of.
                os.dup2(given[1], 2)
                self._let_go()
                fresh.become(given, environment, self.inheritance)
                self.pools.lift()
            except BaseException as error:
                # This must not run on into the template's own ways of failing.
                failures.print_report(error)
                os._exit(1)
            return Fork(configuration, self.shell)
        _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
        _close(given)
        self._adopt(number, pid)
        return None

    def _adopt(self, number, pid):
        try:
            pidfd = os.pidfd_open(pid)
        except (OSError, AttributeError):
            pidfd = None
        child = self.children[number] = Child(number, pid, pidfd)
        self._send(wires.FORKED, number, {"pid": pid}, pidfd)
        if pidfd is None:
            self._look_at(child)
        else:
            self.by_pidfd[pidfd] = child
            self.watch.register(pidfd, select.EPOLLIN)

    def _take_in(self, number, payload):
        """A copy that a life has made of itself has come to us as an orphan; now it is a life like any other."""
        pid = wires.field(wires.object_of(payload), "pid", int)
        if pid in {child.pid for child in self.children.values()} or pid not in _own_children():
            text = "the copy has ended, or did not come to this template"
            self._send(wires.FORK_FAILED, number, {"errno": 10, "code": "ECHILD", "message": text})
            return
        self._adopt(number, pid)

    def _let_go(self):
        """In the child: none of our objects may close a number that will soon be somebody else's."""
        self.control.detach()
        self.watch.close()

    # Ends

    def _look_at(self, child):
        """Reports the end of a child, or finishes one that nobody waits for."""
        if child.state is _ENDED:
            return
        how = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if how is None:
            return
        if child.pidfd is not None:
            self.watch.unregister(child.pidfd)
            del self.by_pidfd[child.pidfd]
            os.close(child.pidfd)
            child.pidfd = None
        unwanted, child.state = child.state is _UNWANTED, _ENDED
        if unwanted:
            self._reap(child)
            return
        end = {"pid": child.pid}
        if how.si_code == os.CLD_EXITED:
            end["exited"] = how.si_status
        else:
            end["signaled"] = how.si_status
            end["coreDumped"] = how.si_code == os.CLD_DUMPED
        self._send(wires.ENDED, child.number, end)

    def _reap(self, child):
        _, _, usage = os.wait4(child.pid, 0)
        del self.children[child.number]
        self._send(
            wires.RELEASED,
            child.number,
            {
                "maxRssBytes": usage.ru_maxrss * 1024,
                "userMs": usage.ru_utime * 1000,
                "systemMs": usage.ru_stime * 1000,
            },
        )

    def _reap_orphans(self):
        """Descendants of lives whose parent has gone come to us. Our own children are not touched here."""
        ours = {child.pid for child in self.children.values()}
        for pid in _own_children():
            if pid not in ours:
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    pass

    def end(self):
        """The host is gone: so is everything that was forked for it, and what came to us when its parent was gone.

        A child of ours is unreaped until we reap it, so its number is its own.
        """
        for child in self.children.values():
            if child.state is not _ENDED:
                kill(child.pid)
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                left = [pid for pid in _own_children() if not warden.is_spared(pid)]
                if not left:
                    break
                for pid in left:
                    _kill_one(pid)
                time.sleep(0.001)
        os._exit(0)


class _Circumstances:
    """What a preloaded module may change around the process, and a kernel must not notice."""

    def __init__(self):
        import resource

        self.umask = os.umask(0o22)
        os.umask(self.umask)
        self.niceness = os.getpriority(os.PRIO_PROCESS, 0)
        self.resource = resource
        self.limits = {number: resource.getrlimit(number) for number in _limits(resource)}
        self.folder = os.open(".", os.O_PATH | os.O_CLOEXEC)

    def restore(self):
        os.umask(self.umask)
        try:
            os.fchdir(self.folder)
        except OSError:
            pass
        os.close(self.folder)
        if os.getpriority(os.PRIO_PROCESS, 0) != self.niceness:
            try:
                os.setpriority(os.PRIO_PROCESS, 0, self.niceness)
            except OSError:
                pass
        for number, limits in self.limits.items():
            if self.resource.getrlimit(number) != limits:
                try:
                    self.resource.setrlimit(number, limits)
                except (OSError, ValueError):
                    pass


def _limits(resource):
    return sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})


def _load_what_cells_soon_need():
    import ast
    import asyncio
    import inspect
    import linecache
    import subprocess
    import traceback

    return ast, asyncio, inspect, linecache, subprocess, traceback


def why_not_to_fork():
    """None, or which threads would be missing in a forked child."""
    names = threads.others()
    if not names:
        return None
    return "what was preloaded has left threads that a fork would lose: " + ", ".join(names)


def kill(pid):
    """The process, and its group if it leads one already. It is unreaped, so the number is its own."""
    for send in (os.killpg, os.kill):
        try:
            send(pid, _signal.SIGKILL)
        except OSError:
            pass


def _kill_one(pid):
    try:
        os.kill(pid, _signal.SIGKILL)
    except OSError:
        pass


def _own_children():
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as listing:
            return [int(pid) for pid in listing.read().split()]
    except OSError:
        return []


def _close(descriptors):
    for fd in descriptors:
        os.close(fd)
