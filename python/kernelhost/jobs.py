"""What an interrupt of the process group passes by, although it belongs to the interrupted cell.

| process                                | why SIGINT does not end it                         | what it gets          |
| -------------------------------------- | -------------------------------------------------- | --------------------- |
| a background job whose shell has ended | a shell without a terminal lets its jobs ignore it | SIGTERM, then SIGKILL |
| a child that was just being started    | it was not there yet when the signal was sent      | SIGINT                |

They would run on beside the next cells, and nobody would wait for them.

Owns: which processes these are, and their end. Must not know: frames, what a cell is.
"""

import os
import time

_SIGINT_BIT = 1 << 1
# How long they have to heed a signal, before SIGKILL or before the cell ends without them.
_SECONDS_TO_END = 0.3
_LOOK_EVERY_SECONDS = 0.005
# A cell that took less than this has started no shell with a job.
_TOO_SHORT_SECONDS = 0.0003
# A shell that was killed is gone after this time.
_SECONDS_OF_A_SHELL = 0.1
# From a signal to its handler: what runs in between may be what starts a child.
_SECONDS_TO_HANDLER = 0.1
_UNKNOWN_DISTANCE = 99


def start_clock():
    """The time, by the clock that the start times of processes are given in."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Jobs:
    """When cells begin and end, and what of the one that runs is left."""

    def __init__(self):
        self.began = 0.0
        self.reaped = 0
        self.earlier = ()

    def begin(self):
        self.began = start_clock()

    def end(self):
        if start_clock() - self.began < _TOO_SHORT_SECONDS:
            return
        import resource

        # Every child that has been waited for adds to it.
        reaped = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
        if reaped != self.reaped:
            self.reaped = reaped
            # Start times are coarse: what is left of a cell that ends just before the next one begins looks like one of
            # that cell's.
            self.earlier = frozenset(_members(_tick(self.began)))

    def interrupt(self, struck_at):
        """Brings the interrupt to those it has passed by. The cell is about to end."""
        from signal import SIGINT, SIGKILL, SIGTERM

        from .warden import send

        first = _tick(self.began)
        late = max(first, _tick(struck_at - _SECONDS_TO_HANDLER))
        started = [
            (pid, start)
            for pid, start in self._members_of_cell(first)
            # Without a handler it would be gone, had it been there when the signal was sent, however long ago that was.
            if not _ignores_sigint(pid) and (start >= late or not _has(pid, b"SigCgt:"))
        ]
        for process in started:
            send(*process, SIGINT)
        patience = time.monotonic() + _SECONDS_OF_A_SHELL
        for number in (SIGTERM, SIGKILL):
            until = time.monotonic() + _SECONDS_TO_END
            told = set()
            while True:
                ignoring = [process for process in self._members_of_cell(first) if _ignores_sigint(process[0])]
                distances = {process: _distance(process[0]) for process in ignoring}
                jobs = [process for process, distance in distances.items() if distance is None]
                # The shell of a job may be about to end: it has been told to.
                perhaps = any(distance is not None and distance > 1 for distance in distances.values())
                for job in jobs:
                    # Not those again that are ending; but they may have started others meanwhile.
                    if job not in told:
                        told.add(job)
                        send(*job, number)
                started = [process for process in started if _is_there(*process)]
                if not jobs and not started and not (perhaps and time.monotonic() < patience):
                    return
                if time.monotonic() > until:
                    break
                time.sleep(_LOOK_EVERY_SECONDS)
            started = []

    def _members_of_cell(self, first):
        return [process for process in _members(first) if process not in self.earlier]


def _tick(seconds):
    return int(seconds * os.sysconf("SC_CLK_TCK"))


def _members(first):
    """The others of this process's group that have started in this tick or later: (pid, start time)."""
    group = os.getpgrp()
    here = os.getpid()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == here:
            continue
        pid = int(name)
        try:
            if os.getpgid(pid) == group and (start := _stat(pid)[1]) >= first:
                found.append((pid, start))
        except OSError:
            pass
    return found


def _is_there(pid, start):
    try:
        return _stat(pid)[1] == start
    except OSError:
        return False


def _distance(pid):
    """How many generations of living processes lie between it and this process. None: it does not come from here."""
    here = os.getpid()
    distance = 0
    while pid != here:
        if pid in (0, 1):
            return None
        try:
            pid = _stat(pid)[0]
        except OSError:
            # It has ended just now, and its children have got another parent.
            return _UNKNOWN_DISTANCE
        distance += 1
    return distance


def _stat(pid):
    """The parent and the start time of a living process."""
    from .warden import stat_of

    stat = stat_of(pid)
    if stat is None:
        raise ProcessLookupError(pid)
    return stat


def _ignores_sigint(pid):
    return _has(pid, b"SigIgn:")


def _has(pid, mask):
    """Whether SIGINT is in one of the masks that procfs shows of a process."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(mask):
                    return bool(int(line.split()[1], 16) & _SIGINT_BIT)
    except OSError:
        pass
    return False
