"""Plays the host: starts kernels cold or through a template, sends frames, collects what comes back.

Every wait has a deadline; `Host.close` asserts that no process is left over.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

BOOT = str(Path(__file__).resolve().parent.parent / "boot.py")
HEADER = struct.Struct("<IHHQ")
DEADLINE = float(os.environ.get("KERNELHOST_TEST_DEADLINE", "30"))

CONFIGURE, EXECUTE, SHUTDOWN = 1, 2, 3
READY, START_FAILED, DISPLAY, CLEAR, VALUE, DONE, EXITING = 16, 17, 18, 19, 20, 21, 22
BARRIER, BARRIER_PASSED = 32, 33
PREPARE, FORK, RELEASE, ABANDON = 64, 65, 66, 67
TEMPLATE_READY, TEMPLATE_FAILED, FORKED, FORK_FAILED, ENDED, RELEASED = 80, 81, 82, 83, 84, 85

PYTHON = os.environ.get("KERNELHOST_TEST_PYTHON", sys.executable)


def has_ipython():
    return subprocess.run([PYTHON, "-c", "import IPython"], capture_output=True, check=False).returncode == 0


HAS_IPYTHON = has_ipython()
SHELLS = ("plain", "ipython") if HAS_IPYTHON else ("plain",)


def frame(kind, number, thing=None):
    payload = b"" if thing is None else json.dumps(thing, ensure_ascii=False).encode()
    return HEADER.pack(len(payload), kind, 0, number) + payload


class Wires:
    """The six wires of a life, both ends."""

    def __init__(self):
        self.requests, self.their_requests = socket.socketpair()
        self.calls, self.their_calls = socket.socketpair()
        self.out, self.their_out = os.pipe()
        self.err, self.their_err = os.pipe()
        self.their_interrupts, self.interrupts = os.pipe()
        self.their_lifeline, self.lifeline = os.pipe()
        for fd in (self.out, self.err):
            os.set_blocking(fd, False)

    def theirs(self):
        return [
            self.their_out,
            self.their_err,
            self.their_requests.fileno(),
            self.their_calls.fileno(),
            self.their_interrupts,
            self.their_lifeline,
        ]

    def close_theirs(self):
        self.their_requests.close()
        self.their_calls.close()
        for fd in (self.their_out, self.their_err, self.their_interrupts, self.their_lifeline):
            os.close(fd)


class Ended(Exception):
    """The life has closed its end."""


class Life:
    """One kernel process, seen from the host."""

    def __init__(self, wires, pid, reap):
        self.wires = wires
        self.pid = pid
        self.reap = reap
        self.out = self.err = b""
        self.frames = []
        self.buffers = {"requests": b"", "calls": b""}
        self.cell = 0
        self.hold_barriers = False
        self.barriers = 0
        # What had been printed when each display arrived, to check the order.
        self.out_at_frame = []

    # Reading

    def drain(self):
        for name in ("out", "err"):
            while True:
                try:
                    data = os.read(getattr(self.wires, name), 1 << 20)
                except BlockingIOError:
                    break
                if not data:
                    break
                setattr(self, name, getattr(self, name) + data)

    def _cut(self, name):
        data = self.buffers[name]
        if len(data) < HEADER.size:
            return None
        length, kind, reserved, number = HEADER.unpack_from(data)
        assert reserved == 0 and length <= 64 << 20
        if len(data) < HEADER.size + length:
            return None
        payload = data[HEADER.size : HEADER.size + length]
        self.buffers[name] = data[HEADER.size + length :]
        return kind, number, json.loads(payload) if payload else None

    def step(self, timeout):
        """Reads what is there. Raises Ended when the requests wire is closed."""
        wires = self.wires
        fds = [wires.requests, wires.calls, wires.out, wires.err]
        ready, _, _ = select.select(fds, [], [], timeout)
        self.drain()
        for name in ("requests", "calls"):
            wire = getattr(wires, name)
            if wire not in ready:
                continue
            try:
                data = wire.recv(1 << 20)
            except ConnectionResetError:
                data = b""
            if not data and name == "requests":
                self.drain()
                raise Ended
            self.buffers[name] += data
            while (found := self._cut(name)) is not None:
                if name == "requests":
                    self.frames.append(found)
                    self.drain()
                    self.out_at_frame.append(self.out)
                else:
                    kind, number, _ = found
                    assert kind == BARRIER and number == self.barriers + 1
                    self.barriers = number
                    if not self.hold_barriers:
                        with contextlib.suppress(BrokenPipeError):
                            wires.calls.sendall(frame(BARRIER_PASSED, number))
        if wires.out in ready and not ready[1:]:
            pass

    def next(self, *kinds, deadline=DEADLINE):
        """The next frame of one of the kinds; those before it stay in `shown`."""
        until = time.monotonic() + deadline
        while True:
            for at, (kind, _, _) in enumerate(self.frames):
                if kind in kinds:
                    before, self.frames = self.frames[:at], self.frames[at:]
                    self.shown = getattr(self, "shown", []) + before
                    return self.frames.pop(0)
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"no frame of kinds {kinds}; stdout {self.out[-500:]!r}, stderr {self.err[-3000:]!r}"
                )
            self.step(left)

    def wait_output(self, text, deadline=DEADLINE, stream="out"):
        """Waits until something has been printed, and returns all that has been printed so far."""
        wanted = text.encode()
        until = time.monotonic() + deadline
        self.drain()
        while wanted not in getattr(self, stream):
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{text!r} was not printed; stdout {self.out[-300:]!r}, stderr {self.err[-3000:]!r}")
            self.step(left)
        return getattr(self, stream)

    # Writing

    def send(self, kind, number, thing=None):
        self.wires.requests.sendall(frame(kind, number, thing))

    def start_cell(self, code, silent=False):
        self.cell += 1
        self.shown = []
        self.drain()
        self.out = self.err = b""
        self.send(EXECUTE, self.cell, {"code": code, "silent": silent})
        return self.cell

    def end_cell(self, deadline=DEADLINE):
        kind, number, done = self.next(DONE, EXITING, deadline=deadline)
        assert number == self.cell, (number, self.cell)
        self.drain()
        return done if kind == DONE else {"exiting": done}

    def run(self, code, silent=False, deadline=DEADLINE):
        self.start_cell(code, silent)
        return self.end_cell(deadline)

    def text(self, code):
        """The text of the value of a cell that must go well."""
        done = self.run(code)
        assert done["status"] == "ok", "\n".join(done["error"]["traceback"])
        return None if done["value"] is None else done["value"]["data"]["text/plain"]

    def interrupt(self, cell=None, group=True):
        os.write(self.wires.interrupts, (self.cell if cell is None else cell).to_bytes(8, "little"))
        (os.killpg if group else os.kill)(self.pid, signal.SIGINT)

    # Ends

    def wait(self, deadline=DEADLINE):
        """The exit code (or minus the signal), with everything that was printed."""
        until = time.monotonic() + deadline
        while True:
            with contextlib.suppress(Ended, OSError):
                self.step(0.02)
            code = self.reap(0.02)
            if code is not None:
                self.drain()
                return code
            assert time.monotonic() < until, f"process {self.pid} did not end; stderr {self.err[-3000:]!r}"

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        wires = self.wires
        wires.requests.close()
        wires.calls.close()
        for fd in (wires.out, wires.err, wires.interrupts, wires.lifeline):
            with contextlib.suppress(OSError):
                os.close(fd)


def configuration(shell="plain", cwd=None, env=None, init=None, **more):
    env = dict(os.environ) if env is None else env
    return {
        "protocol": 1,
        "generation": 1,
        "cwd": cwd,
        "env": env,
        "shell": shell,
        "init": init,
        "oomScoreAdj": None,
        **more,
    }


def spawn(arguments, descriptors, env, cwd=None):
    """A process that leads its own session and has exactly these descriptors (and /dev/null as its fd 0)."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        parked = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for number, fd in descriptors.items()}
        null = fcntl.fcntl(os.open("/dev/null", os.O_RDONLY), fcntl.F_DUPFD, 100)
        os.dup2(null, 0)
        for number, fd in parked.items():
            os.dup2(fd, number)
        os.closerange(max(descriptors) + 1, 4096)
        if cwd is not None:
            os.chdir(cwd)
        os.execve(PYTHON, [PYTHON, BOOT, *arguments], env)
    finally:
        os._exit(127)


def arm_lifeline(fd, pid):
    fcntl.fcntl(fd, fcntl.F_SETOWN, -pid)
    fcntl.fcntl(fd, 10, signal.SIGKILL)
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_ASYNC)


def reaper(pid):
    state = {}

    def reap(timeout):
        if "code" not in state:
            until = time.monotonic() + timeout
            while True:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    state["code"] = os.waitstatus_to_exitcode(status)
                    break
                if time.monotonic() >= until:
                    return None
                time.sleep(0.001)
        return state["code"]

    return reap


def cold(config, cwd=None, configure=True):
    """A cold life; `ready` has not been read."""
    wires = Wires()
    descriptors = dict(zip(range(1, 7), wires.theirs(), strict=True))
    pid = spawn(["kernel"], descriptors, config["env"], cwd)
    arm_lifeline(wires.their_lifeline, pid)
    wires.close_theirs()
    life = Life(wires, pid, reaper(pid))
    if configure:
        with contextlib.suppress(BrokenPipeError):
            life.send(CONFIGURE, 0, config)
    return life


class Template:
    """A template process, seen from the host."""

    def __init__(self, shell="plain", preload=(), env=None, cwd=None, protocol=1):
        self.control, theirs = socket.socketpair()
        self.out, out = os.pipe()
        self.err, err = os.pipe()
        lifeline, self.lifeline = os.pipe()
        env = dict(os.environ) if env is None else env
        self.pid = spawn(["template"], {1: out, 2: err, 3: theirs.fileno(), 4: lifeline}, env, cwd)
        arm_lifeline(lifeline, self.pid)
        theirs.close()
        for fd in (out, err, lifeline):
            os.close(fd)
        for fd in (self.out, self.err):
            os.set_blocking(fd, False)
        self.reap = reaper(self.pid)
        self.buffer = b""
        self.fds = []
        self.frames = []
        self.number = 0
        self.printed = {"out": b"", "err": b""}
        self.control.sendall(frame(PREPARE, 0, {"protocol": protocol, "shell": shell, "preload": list(preload)}))

    def drain(self):
        for name in ("out", "err"):
            with contextlib.suppress(BlockingIOError):
                while data := os.read(getattr(self, name), 65536):
                    self.printed[name] += data
        return self.printed

    def next(self, kind, number=None, deadline=DEADLINE):
        until = time.monotonic() + deadline
        while True:
            for at, found in enumerate(self.frames):
                if found[0] == kind and number in (None, found[1]):
                    return self.frames.pop(at)
            left = until - time.monotonic()
            ready, _, _ = select.select([self.control], [], [], max(left, 0))
            assert ready, f"no frame {kind}; {self.frames}, {self.drain()}"
            data, fds, _, _ = socket.recv_fds(self.control, 1 << 20, 64)
            self.fds += fds
            if not data:
                raise Ended(self.drain())
            self.buffer += data
            while len(self.buffer) >= HEADER.size:
                length, got, _, number_got = HEADER.unpack_from(self.buffer)
                if len(self.buffer) < HEADER.size + length:
                    break
                thing = json.loads(self.buffer[HEADER.size : HEADER.size + length])
                self.buffer = self.buffer[HEADER.size + length :]
                self.frames.append((got, number_got, thing))

    def ready(self):
        return self.next(TEMPLATE_READY)[2]

    def send_fork(self, config):
        self.number += 1
        wires = Wires()
        socket.send_fds(self.control, [frame(FORK, self.number, config)], wires.theirs())
        wires.close_theirs()
        return self.number, wires

    def fork(self, config):
        """A forked life; `ready` has not been read."""
        number, wires = self.send_fork(config)
        _, _, forked = self.next(FORKED, number)
        state = {}

        def reap(timeout):
            if "code" not in state:
                try:
                    end = self.next(ENDED, number, deadline=timeout)[2]
                except AssertionError:
                    return None
                self.control.sendall(frame(RELEASE, number))
                state["usage"] = self.next(RELEASED, number)[2]
                state["code"] = end["exited"] if "exited" in end else -end["signaled"]
            return state["code"]

        life = Life(wires, forked["pid"], reap)
        life.number = number
        return life

    def close(self):
        self.control.close()
        until = time.monotonic() + DEADLINE
        while self.reap(0.05) is None:
            assert time.monotonic() < until, "the template did not end with its host"
        os.close(self.lifeline)
        for fd in (self.out, self.err, *self.fds):
            os.close(fd)


def alive(pid):
    """Whether a process exists and is not a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_gone(pid, deadline=DEADLINE):
    until = time.monotonic() + deadline
    while alive(pid):
        assert time.monotonic() < until, f"process {pid} is still there"
        time.sleep(0.005)
