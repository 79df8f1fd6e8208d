"""Report versions, start NCCL with one rank, and measure what the GPU sustains: copies, GEMMs for 0.2 s and 8 s."""

import json
import shutil
import time

import torch
from machine import machine
from step_limits import GpuWatch, sustained_seconds

from longtake.parallel import start_world

ROWS, INNER, OUTER = 26880, 3072, 12288  # the MLP of the 11B model at 3 x 8,960 tokens
facts = {**machine(), "cudnn": torch.backends.cudnn.version(), "compiler": shutil.which("gcc")}


def report(**measured):
    """Print all facts so far; after a kill the last such line counts."""
    facts.update(measured)
    print("facts", json.dumps(facts), flush=True)


report(triton=__import__("triton").__version__)
if torch.cuda.is_available():
    start = time.perf_counter()
    with start_world("cuda") as world:
        torch.distributed.all_reduce(torch.ones(1, device=world.device))
        torch.cuda.synchronize()
        report(nccl_seconds=round(time.perf_counter() - start, 2), memory_bytes=torch.cuda.mem_get_info())
    x, y = (torch.empty(1 << 32, dtype=torch.uint8, device="cuda") for _ in range(2))
    a, b = (torch.randn(n, INNER, device="cuda", dtype=torch.bfloat16) for n in (ROWS, OUTER))
    flops = 2 * ROWS * INNER * OUTER
    for name, call, work, seconds in (
        ("copy_bytes_per_second", lambda: y.copy_(x), 2 * x.nbytes, 0.5),
        ("gemm_burst", lambda: a @ b.t(), flops, 0.2),
        ("gemm_sustained", lambda: a @ b.t(), flops, 8.0),
    ):
        with GpuWatch() as watch:
            rate = work / sustained_seconds([call], world.device, seconds)
        report(**{name: rate, **{f"{name}_{key}": value for key, value in watch.figures.items()}})
