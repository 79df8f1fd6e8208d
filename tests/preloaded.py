"""What the fork server of the tests has imported before its first fork: all of Longtake, and what it stands on.

PyTorch imports its compiler when a step is first made, compiled or not: half a second that no fork is to spend anew,
and one and a half where blocks are compiled.
"""

from __future__ import annotations

import atexit
import gc
import os
import pkgutil
from importlib import import_module
from pathlib import Path

import longtake

ALSO = (
    "torch._dynamo",
    *("torch._dynamo.backends.debugging", "torch._dynamo.backends.inductor", "torch._dynamo.repro.after_dynamo"),
    *("torch._inductor.compile_fx", "torch.distributed.tensor.experimental", "torch.export._trace"),
    "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler",
    "torch.distributed.run",
    "tensorboard.compat.proto.event_pb2",
    "tests.train.runs",
)
for _found in pkgutil.walk_packages(longtake.__path__, "longtake."):
    if not _found.name.endswith((".__main__", ".ttt_kernels", ".ttt_triton")):  # Triton is not everywhere
        import_module(_found.name)
for _name in ALSO:
    import_module(_name)
gc.freeze()  # no fork's collection goes through them, and their pages stay shared
atexit.register(gc.unfreeze)  # libraries complain of what the server's end does not collect
_threads = {Path(f"/proc/self/task/{number}/comm").read_text().strip() for number in os.listdir("/proc/self/task")}
# The allocator of Arrow stops its thread for a fork, and starts another in the child when it needs it.
assert len(_threads - {"jemalloc_bg_thd"}) == 1, f"a fork would find locks of {_threads} held"
