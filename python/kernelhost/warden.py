"""The warden: waits for the end of the host, and then ends everything that carries the host's marker.

Owns: the last resort, when the host was killed and the template with it. Must not know: frames, cells, templates. It imports
next to nothing, so that it costs little and nothing can keep it from starting.
"""

import os
import signal
import time

MARKER = b"KERNELHOST_LIFE="
OPT_OUT = b"KERNELHOST_DETACHED="
# The last two fields of a marker name the life; what is before them names the host.
_FIELDS_OF_A_LIFE = 2
_HOST_IS_GONE = 3
_LIMIT_SECONDS = 5.0
# A tracker of multiprocessing removes what its processes have left in shared memory and then leaves by itself.
TRACKER = b"multiprocessing.resource_tracker"
_TRACKER_SECONDS = 0.5


def watch():
    """Returns the exit code, when the host is gone and nothing of it is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    host = host_of(os.environb[MARKER[:-1]])
    while os.read(_HOST_IS_GONE, 64):
        pass
    return sweep(host)


def host_of(marker):
    """The part of a marker that all of one host's share."""
    return marker.rsplit(b"-", _FIELDS_OF_A_LIFE)[0] + b"-"


def sweep(host):
    """Looks and kills until nothing is found."""
    began = time.monotonic()
    pause = 0.001
    while True:
        found = [each for each in processes() if each != os.getpid() and belongs(each, host)]
        if not found:
            return 0
        elapsed = time.monotonic() - began
        if elapsed > _LIMIT_SECONDS:
            return 1
        trackers = [pid for pid in found if is_tracker(pid)]
        for pid in found:
            if pid not in trackers or (trackers == found and elapsed > _TRACKER_SECONDS):
                end(pid, host)
        time.sleep(pause)
        pause = min(pause * 2, 0.05)


def processes():
    """The pids of this PID namespace."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def belongs(pid, host):
    """Whether a living process carries the host's marker and has not opted out."""
    variables = _read(f"/proc/{pid}/environ").split(b"\0")
    ours = any(each.startswith(MARKER + host) for each in variables)
    detached = any(each.startswith(OPT_OUT) and each != OPT_OUT for each in variables)
    # The environment of a zombie is empty.
    return ours and not detached


def is_tracker(pid):
    """Whether it is a resource tracker of multiprocessing."""
    return TRACKER in _read(f"/proc/{pid}/cmdline")


def end(pid, host):
    """Kills a process that still is what it was taken for."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        # Looked at again now that the pidfd is open: it is of a process that carries the marker.
        if belongs(pid, host):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        pass
    finally:
        os.close(pidfd)


def _read(path):
    try:
        with open(path, "rb", buffering=0) as file:
            return file.readall()
    except OSError:
        return b""
