"""Copies of a life: made by fork while it is idle, kept frozen until they are thawed.

Owns: whether a copy would be sound, how one is made, and what makes it a life of its own.
Must not know: what copies are for, how cells are run.

| in the original       | in the copy                                    | from the host                        |
| --------------------- | ---------------------------------------------- | ------------------------------------ |
| is it sound?          |                                                | `copy`                               |
| `copy-begins`         |                                                | `wires`, with the copy's descriptors |
| forks                 | (the process between: own session, marker)     |                                      |
| is it sound still?    | forked by the process between, which leaves    |                                      |
| `copied` or           | own wires, event loop; `copy-is`: it is frozen | `thaw`, or the end of its wires      |
| `copy-refused`        | environment, folder, callbacks; `ready`        |                                      |

Forked twice, so that the copy is nobody's child in the cells of the original: it comes to the template, which reaps it.
The original answers after the first fork; before it takes the next frame it waits for the end of the process between.
"""

import _signal
import os
import sys
import time

from . import api, failures, fresh, threads, wires
from .jobs import Jobs

_WIRES = 6
_LOOK_AGAIN_MS = 50
# How long a life waits for a process between to be gone: it copies and frees the page tables of a large kernel.
_SECONDS_BETWEEN = 0.2
_LOOK_EVERY_SECONDS = 0.0002
# How a frozen copy is called in lists of processes; 15 characters at most.
_FROZEN_NAME = "kernel-frozen"
_MARKER = "KERNELHOST_LIFE"
# What has no state that two processes could disturb each other's of.
_HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx")
_HARMLESS_FOLDERS = ("/dev/shm/", "/dev/pts/", "/dev/mqueue/", "/dev/hugepages/")


# `fflush` and `fork` of the C library, once they have been needed.
_c_library = None


class _Refused(Exception):
    """No copy is made; the text says why."""


def copy(life, number, payload):
    """Makes a copy, or says why not. Returns in the original, and in the copy too: there the life is frozen."""
    marker = wires.field(wires.object_of(payload), "marker", str)
    try:
        _refuse_unsound(life)
        life.outbox.send(wires.COPY_BEGINS, number, {})
        descriptors = _receive_wires(life, number)
        if _fork(life, descriptors, marker):
            life.outbox.send(wires.COPY_IS, 0, {"pid": life.pid})
            return
        left = threads.others()
        if left:
            raise _Refused(_lost(left))
    except _Refused as refused:
        life.outbox.send(wires.COPY_REFUSED, number, {"why": str(refused)})
        return
    except OSError as error:
        # Nothing can be said to be sound that could not be looked at.
        life.outbox.send(wires.COPY_REFUSED, number, {"why": _system(error)})
        return
    life.outbox.send(wires.COPIED, number, {})


def thaw(life, payload):
    """The frozen copy becomes a life that runs cells. Returns what the callbacks that failed have raised, as text.

    Raises what the start of a life raises.
    """
    request = wires.object_of(payload)
    _show_name(life.name)
    for name, value in wires.field(request, "env", dict).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    time.tzset()
    life.settle(request)
    fresh.forget_folder()
    life.frozen = False
    failed = api.restored(wires.field(request, "what", str))
    return [f"{name} raised {type(error).__name__}: {error}" for name, error in failed]


# Soundness


def _refuse_unsound(life):
    left = threads.of_python()
    if left:
        raise _Refused(_lost(left))
    if life.loop.has_work():
        raise _Refused(f"its event loop has something in flight: {life.loop.work()}")
    children = _running_children(life)
    if children:
        raise _Refused(f"a copy could not wait for its running child processes: {', '.join(children)}")
    devices = _devices()
    if devices:
        raise _Refused(f"it has a device open, whose state a copy would share: {', '.join(devices)}")


def _system(error):
    limit = {24: " (RLIMIT_NOFILE)", 11: " (RLIMIT_NPROC, or a limit of the cgroup)"}.get(error.errno, "")
    return f"the system does not let it be copied: {error.strerror}{limit}"


def _lost(names):
    return f"it has threads that a copy would lose: {', '.join(names)}"


def _running_children(life):
    with open(f"/proc/self/task/{os.getpid()}/children", "rb") as listing:
        pids = listing.read().split()
    found = []
    for pid in map(int, pids):
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()[0]
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = file.read().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        except OSError:
            continue
        # Nobody waits for the tracker, and a copy that needs one starts its own.
        if pid not in life.between and state not in (b"Z", b"X") and "multiprocessing.resource_tracker" not in command:
            found.append(f"{command[:80] or 'a process'} (pid {pid})")
    return found


def _devices():
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target == "anon_inode:[io_uring]":
            found.add("io_uring")
        elif (
            target.startswith("/dev/") and target not in _HARMLESS_DEVICES and not target.startswith(_HARMLESS_FOLDERS)
        ):
            found.add(target)
    return sorted(found)


# Making one


def _receive_wires(life, number):
    """The descriptors of the copy. They come once they have been asked for, so no other read can take and lose them."""
    import _socket

    buffer = life.requests.buffer
    arrived = []
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM, 0, life.requests.fd)
    try:
        connection.setblocking(True)
        while True:
            found = buffer.next_frame()
            if found is not None:
                kind, of, payload = found
                if kind == wires.WIRES and of == number:
                    break
                life.postponed = found
                raise _Refused("the kernel is being ended")
            data, ancillary, _, _ = connection.recvmsg(65536, _socket.CMSG_SPACE(4 * _WIRES), _socket.MSG_CMSG_CLOEXEC)
            if not data:
                os._exit(0)
            for level, kind, content in ancillary:
                if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
                    whole = len(content) - len(content) % 4
                    arrived += [int.from_bytes(content[at : at + 4], sys.byteorder) for at in range(0, whole, 4)]
            buffer.data += data
    except _Refused:
        _close(arrived)
        raise
    finally:
        connection.detach()
    if len(arrived) != _WIRES:
        _close(arrived)
        why = wires.object_of(payload).get("why") or "it has reached its limit of open files (RLIMIT_NOFILE)"
        raise _Refused(f"there are no wires for a copy: {why}")
    return arrived


def _fork(life, descriptors, marker):
    """True in the copy."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    fork_again = _prepare_c_library()
    try:
        there, tell = os.pipe2(os.O_CLOEXEC)
    except OSError:
        _close(descriptors)
        raise
    life.copying = True
    blocked = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
    try:
        pid = _quiet_fork()
        if pid == 0:
            try:
                _leave(marker)
                # From here on what ends the original does not end the copy too.
                os.write(tell, b"1")
                between = os.getpid()
                if fork_again() != 0:
                    os._exit(0)
                _become(life, descriptors)
                _wait_for_end_of(between)
            except BaseException as error:
                # This must not run on into the original's own ways.
                failures.print_report(error)
                os._exit(1)
            return True
        life.between.append(pid)
        os.close(tell)
        tell = -1
        if not os.read(there, 1):
            raise _Refused("the system does not give it another process")
    finally:
        life.copying = False
        # What a cell has blocked stays blocked, here and in the copy.
        _signal.pthread_sigmask(_signal.SIG_SETMASK, blocked)
        _close((*descriptors, there, tell) if tell >= 0 else (*descriptors, there))
    return False


def reap(life):
    """The processes between a life and its copies end a moment after these have begun.

    That moment is waited for, so that no cell finds children that it has not made.
    """
    deadline = time.monotonic() + _SECONDS_BETWEEN
    for pid in list(life.between):
        try:
            while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
                time.sleep(_LOOK_EVERY_SECONDS)
            if ended == (0, 0):
                continue
        except ChildProcessError:
            # A cell has waited for any child, or has told the system to reap them by itself.
            pass
        life.between.remove(pid)


def _quiet_fork():
    """Whether threads matter is judged here, by what is left of them."""
    if len(os.listdir("/proc/self/task")) == 1:
        return os.fork()
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _prepare_c_library():
    """What forks the second time: the C library's own fork, because Python's would call what is registered again."""
    global _c_library
    if _c_library is None:
        try:
            import ctypes

            library = ctypes.PyDLL(None)
            _c_library = library.fflush, library.fork
        except (ImportError, OSError, AttributeError):
            _c_library = (lambda _: None), os.fork
    fflush, fork = _c_library
    # What a C library has printed and not written yet would be written by the copy once more.
    fflush(None)
    return fork


def _close(descriptors):
    for fd in descriptors:
        try:
            os.close(fd)
        except OSError:
            pass


# Becoming one


def _wait_for_end_of(between):
    """Then the template is the parent."""
    import select

    try:
        fd = os.pidfd_open(between)
    except (AttributeError, OSError):
        fd = None
    poll = select.poll()
    if fd is not None:
        poll.register(fd, select.POLLIN)
    while os.getppid() == between:
        poll.poll(_LOOK_AGAIN_MS if fd is not None else 1)
    if fd is not None:
        os.close(fd)


def _leave(marker):
    """In the process between: nothing that looks for what belongs to the original finds it, or what it forks."""
    fresh.lead_session()
    os.environ[_MARKER] = marker
    fresh.show_environment(fresh.shown_environment())


def _become(life, descriptors):
    fresh.lead_session()
    for fd, number in zip(descriptors, (1, 2, *life.descriptors), strict=True):
        os.dup2(fd, number, inheritable=number < 3)
    fresh.arm_lifeline(life.descriptors[3])
    fresh.rename_main_thread()
    fresh.forget_randomness(())
    fresh.forget_processes()
    _forget_tracker()
    here = os.getpid()
    for part in (life, life.loop, life.outbox, life.calls, life.interrupts):
        part.pid = here
    life.requests.buffer.data.clear()
    life.calls.begin_anew()
    life.interrupts.begin_anew()
    life.loop.begin_anew()
    life.jobs = Jobs()
    life.between = []
    life.postponed = None
    if not life.frozen:
        life.name = _name()
    life.frozen = True
    _show_name(_FROZEN_NAME)


def _forget_tracker():
    """The tracker of the original ends with the original. The next need starts another one."""
    module = sys.modules.get("multiprocessing.resource_tracker")
    tracker = getattr(module, "_resource_tracker", None)
    fd = getattr(tracker, "_fd", None)
    if fd is not None:
        tracker._fd = tracker._pid = None
        os.close(fd)


def _name():
    try:
        with open("/proc/self/comm") as comm:
            return comm.read().rstrip("\n")
    except OSError:
        return None


def _show_name(name):
    if name is not None:
        try:
            with open("/proc/self/comm", "w") as comm:
                comm.write(name)
        except OSError:
            pass
