"""Which threads a process has besides its main one: what a fork would lose.

Owns: how they are found and named. Must not know: why somebody asks.
"""

import os
import sys


def others():
    """All of them, by name; an empty list where there are none."""
    threads = os.listdir("/proc/self/task")
    if len(threads) == 1:
        return []
    known = {}
    threading = sys.modules.get("threading")
    if threading is not None:
        known = {thread.native_id: thread.name for thread in threading.enumerate()}
    names = []
    for thread in sorted(map(int, threads)):
        if thread == os.getpid():
            continue
        if thread in known:
            names.append(f"the Python thread {known[thread]!r}")
            continue
        try:
            with open(f"/proc/self/task/{thread}/comm") as comm:
                names.append(f"the native thread {comm.read().strip()!r}")
        except OSError:
            continue
    return names


def of_python():
    """Those that Python code has started: no library can bring them back after a fork."""
    threading = sys.modules.get("threading")
    if threading is None:
        return []
    main = threading.main_thread()
    return [f"the Python thread {thread.name!r}" for thread in threading.enumerate() if thread is not main]
