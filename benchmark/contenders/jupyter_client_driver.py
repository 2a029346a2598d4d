"""The daemon that drives ipykernel through jupyter_client.

Its best configuration as found by trial: `ipc` sockets, no history database, the blocking client for one kernel (a
tenth faster per cell than the asynchronous one) and the asynchronous manager for many at once.
"""

import asyncio
import os
import random
import signal
import threading
import time
from queue import Empty

from daemon_protocol import serve
from jupyter_client import AsyncKernelManager, KernelManager
from jupyter_client.restarter import KernelRestarter

WARM_UP_CELLS = 20
HOLD_AT_ONCE = 4
START_TIMEOUT_S = 240
POLL_S = KernelRestarter.time_to_dead.default_value
ARGUMENTS = ["--HistoryManager.hist_file=:memory:"]


class Kernel:
    """One kernel through the blocking client."""

    def __init__(self, address):
        self.manager = KernelManager(transport="ipc", ip=address)
        self.manager.start_kernel(extra_arguments=ARGUMENTS)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=START_TIMEOUT_S)

    @property
    def pid(self):
        return self.manager.provisioner.pid

    def run(self, code):
        """The value and the printed text, when reply and `idle` are both here."""
        request = self.client.execute(code)
        value, printed = None, []
        while True:
            message = self.client.get_iopub_msg(timeout=START_TIMEOUT_S)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream" and content["name"] == "stdout":
                printed.append(content["text"])
            elif kind == "execute_result":
                value = content["data"]["text/plain"]
            elif kind == "status" and content["execution_state"] == "idle":
                break
        while True:
            reply = self.client.get_shell_msg(timeout=START_TIMEOUT_S)
            if reply["parent_header"].get("msg_id") == request:
                break
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"the cell failed: {reply['content']}")
        return value, "".join(printed)

    def end(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


async def start_async(address):
    manager = AsyncKernelManager(transport="ipc", ip=address)
    await manager.start_kernel(extra_arguments=ARGUMENTS)
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=START_TIMEOUT_S)
    except Exception:
        await end_async(manager, client)
        raise
    return manager, client


async def run_async(client, code):
    request = client.execute(code)
    value = None
    while True:
        message = await client.get_iopub_msg(timeout=START_TIMEOUT_S)
        if message["parent_header"].get("msg_id") != request:
            continue
        if message["msg_type"] == "execute_result":
            value = message["content"]["data"]["text/plain"]
        elif message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
            break
    await client.get_shell_msg(timeout=START_TIMEOUT_S)
    return value


async def end_async(manager, client):
    client.stop_channels()
    await manager.shutdown_kernel(now=True)


class Daemon:
    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.folder = None
        self.main = None
        self.held = []
        self.started = 0

    def answer(self, request):
        request = dict(request)
        return getattr(self, request.pop("do"))(**request)

    def address(self):
        self.started += 1
        return os.path.join(self.folder, f"j{self.started}")

    def open(self, python, folder):
        del python  # The kernel spec is that of the interpreter this runs on.
        self.folder = folder
        os.chdir(folder)
        os.environ["IPYTHONDIR"] = os.path.join(folder, "ipython")
        os.environ["JUPYTER_RUNTIME_DIR"] = os.path.join(folder, "runtime")
        os.environ["JUPYTER_NO_CONFIG"] = "1"
        os.makedirs(os.environ["IPYTHONDIR"], exist_ok=True)
        self.main = Kernel(self.address())
        for _ in range(WARM_UP_CELLS):
            self.main.run("1+1")
        return {}

    def start(self):
        began = time.perf_counter()
        kernel = Kernel(self.address())
        ms = since(began)
        kernel.end()
        return {"ms": ms}

    def cells(self, count):
        times = []
        for _ in range(count):
            began = time.perf_counter()
            value, _ = self.main.run("1+1")
            times.append(since(began))
            if value != "2":
                raise RuntimeError(f"1+1 gave {value}")
        return {"ms": times}

    def many(self, count):
        return self.loop.run_until_complete(self.many_async(count))

    async def many_async(self, count):
        started = []

        async def one():
            manager, client = await start_async(self.address())
            started.append((manager, client))
            return await run_async(client, "1+1")

        began = time.perf_counter()
        values = await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)
        ms = since(began)
        await asyncio.gather(*(end_async(manager, client) for manager, client in started))
        return {"ms": ms, "succeeded": values.count("2")}

    def hold(self, count):
        self.loop.run_until_complete(self.hold_async(count))
        return {"pids": [manager.provisioner.pid for manager, _ in self.held]}

    async def hold_async(self, count):
        left = iter(range(count))

        async def start_up_to():
            for _ in left:
                manager, client = await start_async(self.address())
                self.held.append((manager, client))
                await run_async(client, "1+1")

        await asyncio.gather(*(start_up_to() for _ in range(HOLD_AT_ONCE)))

    def release(self):
        held, self.held = self.held, []
        self.loop.run_until_complete(self.release_async(held))
        return {}

    async def release_async(self, held):
        await asyncio.gather(*(end_async(manager, client) for manager, client in held))

    def death(self):
        """Waits for output as a daemon does, and asks `is_alive` as often as jupyter_client's restarter."""
        kernel = Kernel(self.address())
        killed = []

        def kill():
            killed.append(time.perf_counter())
            os.kill(kernel.pid, signal.SIGKILL)

        kernel.client.execute("import time; time.sleep(600)")
        killer = threading.Timer(0.2 + random.random() * POLL_S, kill)
        killer.start()
        next_poll = time.perf_counter() + POLL_S
        while True:
            try:
                kernel.client.get_iopub_msg(timeout=max(next_poll - time.perf_counter(), 0))
            except Empty:
                next_poll += POLL_S
                if not kernel.manager.is_alive():
                    break
        ms = since(killed[0])
        kernel.end()
        return {"ms": ms}

    def lines(self, count):
        began = time.perf_counter()
        _, printed = self.main.run(f"for i in range({count}): print(i)")
        return {"ms": since(began), "lines": printed.count("\n")}

    def bulk(self, bytes, capped):
        del capped  # jupyter_client has no limit on output.
        began = time.perf_counter()
        _, printed = self.main.run(f"print(('x' * 99 + '\\n') * {bytes // 100}, end='')")
        return {"ms": since(began), "received": len(printed)}

    def close(self):
        self.release()
        self.main.end()
        return {}


def since(began):
    return (time.perf_counter() - began) * 1000


serve(Daemon().answer)
