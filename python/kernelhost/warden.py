"""The warden: waits for the end of the host, and then ends everything that carries the host's marker.

Owns: the last resort, when the host was killed and the template with it. Must not know: frames, cells, templates. It
imports next to nothing, so that it costs little and nothing can keep it from starting.
"""

import os
import signal
import time

_MARKER = b"KERNELHOST_LIFE="
_OPT_OUT = b"KERNELHOST_DETACHED="
# The last two fields of a marker name the life; what is before them names the host.
_FIELDS_OF_A_LIFE = 2
_HOST_IS_GONE = 3
_LIMIT_SECONDS = 5.0
_QUIET_LOOKS = 3
_SOBER_ROUNDS = 4
_CROWD = 32
# A tracker of multiprocessing removes what its processes have left in shared memory and then leaves by itself.
_TRACKER = b"multiprocessing.resource_tracker"
_TRACKER_SECONDS = 0.5


def watch():
    """Returns the exit code, when the host is gone and nothing of it is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    host = host_of(os.environb[_MARKER[:-1]])
    while os.read(_HOST_IS_GONE, 64):
        pass
    return sweep(host)


def host_of(marker):
    """The part of a marker that all of one host's share."""
    return marker.rsplit(b"-", _FIELDS_OF_A_LIFE)[0] + b"-"


def sweep(host):
    """Looks and kills until several looks find nothing: what forks and leaves all the time can be missed by one."""
    began = time.monotonic()
    pause = 0.001
    quiet = 0
    rounds = 0
    stopped = set()
    while quiet < _QUIET_LOOKS:
        found = family(host)
        elapsed = time.monotonic() - began
        if elapsed > _LIMIT_SECONDS:
            return 1 if found else 0
        quiet = 0 if found else quiet + 1
        rounds += 1
        awake = [process for process in found if process not in stopped and not is_tracker(process[0])]
        if awake and (rounds > _SOBER_ROUNDS or len(found) > _CROWD):
            # Something multiplies faster than it is found. What has been told to stop cannot fork any more.
            for process in awake:
                send(*process, signal.SIGSTOP)
            stopped.update(awake)
            continue
        trackers = [process for process in found if is_tracker(process[0])]
        for process in found:
            if process not in trackers or (trackers == found and elapsed > _TRACKER_SECONDS):
                send(*process, signal.SIGKILL)
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
    return 0


def family(host):
    """What carries the host's marker and all that descends from it, as (pid, start time), without what opted out."""
    processes = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            stat = stat_of(int(name))
            if stat is not None:
                processes[int(name)] = stat
    verdicts = {os.getpid(): False, 1: False}
    return [(pid, start) for pid, (_, start) in processes.items() if _belongs(pid, host, processes, verdicts)]


def stat_of(pid):
    """The parent and the start time of a living process."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    if len(fields) < 20 or fields[0] in b"ZX":
        return None
    return int(fields[1]), int(fields[19])


def _belongs(pid, host, processes, verdicts):
    path = []
    verdict = False
    # Up to an ancestor of whom it is known.
    while pid in processes and pid not in path:
        if pid in verdicts:
            verdict = verdicts[pid]
            break
        path.append(pid)
        variables = _variables_of(pid)
        if has_opted_out(variables):
            break
        if any(each.startswith(_MARKER + host) for each in variables):
            verdict = True
            break
        pid = processes[pid][0]
    for each in path:
        verdicts[each] = verdict
    return verdict


def is_spared(pid):
    """Whether it outlives its host, or cleans up after others and leaves by itself."""
    return has_opted_out(_variables_of(pid)) or is_tracker(pid)


def has_opted_out(variables):
    """Whether an environment says that its process outlives its host."""
    return any(each.startswith(_OPT_OUT) and each != _OPT_OUT for each in variables)


def is_tracker(pid):
    """Whether it is a resource tracker of multiprocessing."""
    return _TRACKER in _read(f"/proc/{pid}/cmdline")


def send(pid, start, number):
    """Signals the process that was found, and nobody who has got its pid since."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        stat = stat_of(pid)
        # The same start time after the pidfd was opened: so it is of that very process.
        if stat is not None and stat[1] == start:
            signal.pidfd_send_signal(pidfd, number)
    except OSError:
        pass
    finally:
        os.close(pidfd)


def _variables_of(pid):
    return _read(f"/proc/{pid}/environ").split(b"\0")


def _read(path):
    try:
        with open(path, "rb", buffering=0) as file:
            return file.readall()
    except OSError:
        return b""
