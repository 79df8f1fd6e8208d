"""Server that runs `longtake` commands as forks of one process with everything imported: `same_runs.py` starts it.

Reads one JSON object per line: `arguments` of the command, `folder` to run in, `processes`, `port`, `log`. Answers each
with the exit codes of its processes. PYTHONPATH chooses the checkout.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import pkgutil
import signal
import sys
import threading
import traceback
from importlib import import_module
from typing import Any

TIMEOUT_SECONDS = 600
ALSO_LOADED = ("torch._dynamo", "torch.distributed.tensor.experimental", "pyarrow.parquet", "av")
LEFT_OUT = (".__main__", "triton", "kernels", ".ui", ".scripts", ".demo", ".doctor", ".verification", ".cluster")


def main() -> None:
    """Load everything, then serve until standard input ends."""
    import longtake

    for module in pkgutil.walk_packages(longtake.__path__, "longtake."):
        if not any(name in module.name for name in LEFT_OUT):
            import_module(module.name)
    for name in ALSO_LOADED:
        import_module(name)
    gc.freeze()
    print(json.dumps(longtake.__file__), flush=True)
    for line in sys.stdin:
        print(json.dumps(exit_codes(json.loads(line))), flush=True)
    os._exit(0)  # libraries complain of what the interpreter's own end does not free


def exit_codes(command: dict[str, Any]) -> list[int]:
    """Exit codes of the processes of one command, negative for signals. If one fails, the others are killed."""
    ranks = range(command["processes"])
    children = {_fork(command, rank): rank for rank in ranks}
    codes: dict[int, int] = {}
    signal.signal(signal.SIGALRM, lambda *_: [os.kill(child, signal.SIGKILL) for child in children])
    signal.alarm(TIMEOUT_SECONDS)
    while children:
        child, status = os.wait()
        rank = children.pop(child)
        codes[rank] = os.waitstatus_to_exitcode(status)
        if codes[rank]:
            for other in children:
                os.kill(other, signal.SIGKILL)
    signal.alarm(0)
    return [codes[rank] for rank in ranks]


def _fork(command: dict[str, Any], rank: int) -> int:
    """Start one process of a command."""
    if child := os.fork():
        return child
    size = command["processes"]
    if size > 1:
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)})
        os.environ.update({"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"})
        os.environ["MASTER_PORT"] = str(command["port"])
    log = os.open(command["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    os.chdir(command["folder"])
    code = 1
    try:
        from longtake.cli import main as longtake

        longtake(command["arguments"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        traceback.print_exception(error)
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    os._exit(code)


if __name__ == "__main__":
    main()
