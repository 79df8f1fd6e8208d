"""Run `longtake` command lines, each a JSON list, in one process; report memory, host waits and compiled graphs.

From the fourth step of a launch on, PyTorch warns of each call in which the host waits for the device.
"""

import json
import sys
import time
import traceback
import warnings
from collections import Counter
from itertools import pairwise

import torch
from torch._dynamo.utils import counters

from longtake.cli import main
from longtake.plan import Machine, plan_run
from longtake.presets import run_file
from longtake.track import gpu_named
from longtake.train import read_run
from longtake.train.loop import Trainer

on_gpu, forward_backward = torch.cuda.is_available(), Trainer.forward_backward
waits, starts = Counter(), []


def show_warning(message, category, filename, lineno, file=None, line=None):
    """Count a wait by the three innermost lines of Longtake; print any other warning."""
    if "synchroniz" not in str(message):
        print(f"{category.__name__}: {message}", file=sys.stderr)
        return
    frames = [frame for frame in traceback.extract_stack() if "/longtake/" in frame.filename]
    waits[" < ".join(f"{one.filename.rpartition('longtake/')[2]}:{one.lineno}" for one in frames[:-4:-1])] += 1


def watched(trainer, *step):
    if on_gpu and len(starts) == 3:
        torch.cuda.set_sync_debug_mode("warn")
    starts.append(time.perf_counter())
    return forward_backward(trainer, *step)


def report(**more):
    facts = {"waits": dict(waits.most_common(12)), "graphs": counters["stats"]["unique_graphs"], **more}
    facts["side_by_side_ms"] = [round(1e3 * (after - before)) for before, after in pairwise(starts)]
    if on_gpu:
        facts |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    print("facts", json.dumps(facts), flush=True)


Trainer.forward_backward, warnings.showwarning = watched, show_warning
warnings.simplefilter("always")
commands = list(map(json.loads, sys.argv[1:]))
for command in commands:
    starts.clear()
    try:
        main(command)
    except SystemExit as end:
        if end.code:
            raise
    finally:
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
        report()
_, run, *keys = commands[0]
machine = Machine(gpu_named(torch.cuda.get_device_name() if on_gpu else "h100"))
plan = plan_run(read_run(run_file(run, "train"), keys).value, 1, machine)
report(forecast_bytes=max(entry.memory.total for entry in plan.entries))
