"""The floor under every contender: no daemon, no wire, nothing to do but the thing itself.

`floor.py ipython`: a bare `os.fork()` of a process with IPython's shell, until its first byte; `run_cell` in process.
`floor.py plain`: the same without IPython; compile and evaluate in process.
"""

import gc
import io
import os
import sys
import time
from contextlib import redirect_stdout

from daemon_protocol import serve


def since(began):
    return (time.perf_counter() - began) * 1000


def fork_first_byte():
    reader, writer = os.pipe()
    began = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.write(writer, b".")
        os._exit(0)
    os.read(reader, 1)
    ms = since(began)
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    return ms


def plain_cell():
    return eval(compile("1+1", "<cell>", "eval"))


def ipython_cell():
    os.environ["IPYTHONDIR"] = os.getcwd()
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    return lambda: shell.run_cell("1+1", store_history=True).result


def answer(request):
    kind = request["do"]
    if kind == "start":
        return {"ms": fork_first_byte()}
    if kind == "cells":
        times = []
        with redirect_stdout(io.StringIO()):
            for _ in range(request["count"]):
                began = time.perf_counter()
                value = cell()
                times.append(since(began))
                if value != 2:
                    raise RuntimeError(f"1+1 gave {value}")
        return {"ms": times}
    if kind == "open":
        answer({"do": "cells", "count": 20})
    return {}


cell = ipython_cell() if sys.argv[1] == "ipython" else plain_cell
gc.collect()
gc.freeze()
serve(answer)
