"""Run `longtake` command lines, each a JSON list, in one process; report memory, graphs and waits for the device."""

import json
import sys
import traceback
import warnings
from collections import Counter

import torch
from torch._dynamo.utils import counters

from longtake.cli import main
from longtake.plan.machine import Machine
from longtake.plan.run import plan_run
from longtake.track.devices import gpu_named
from longtake.train.loop import Trainer
from longtake.train.run_file import read_run

on_gpu, forward_backward, waits = torch.cuda.is_available(), Trainer.forward_backward, Counter()


def show_warning(message, category, filename, lineno, file=None, line=None):
    """Count a wait by the three innermost lines of Longtake; print any other warning."""
    frames = [frame for frame in traceback.extract_stack() if "/longtake/" in frame.filename][:-4:-1]
    if "synchroniz" in str(message):
        waits[" < ".join(f"{frame.filename.rpartition('longtake/')[2]}:{frame.lineno}" for frame in frames)] += 1
    else:
        print(f"{category.__name__}: {message}", file=sys.stderr)


def watched(trainer, *step):
    """Take the place of a step; from the fourth on PyTorch warns of each call in which the host waits."""
    trainer.steps_of_job = getattr(trainer, "steps_of_job", 0) + 1
    if on_gpu and trainer.steps_of_job == 4:
        torch.cuda.set_sync_debug_mode("warn")
    return forward_backward(trainer, *step)


def report(**more):
    counted = waits.most_common(12) if on_gpu else [("(no CUDA device)", 0)]
    facts = {"waits": dict(counted), "graphs": counters["stats"]["unique_graphs"], **more}
    if on_gpu:
        facts |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    print("facts", json.dumps(facts), flush=True)


Trainer.forward_backward, warnings.showwarning = watched, show_warning
warnings.simplefilter("always")
commands = list(map(json.loads, sys.argv[1:]))
for command in commands:
    try:
        main(command)
    except SystemExit as end:
        if end.code:
            raise
    finally:
        torch.cuda.set_sync_debug_mode("default") if on_gpu else None
        report()
config = read_run(commands[0][1], commands[0][2:]).value
plan = plan_run(config, 1, Machine(gpu_named(torch.cuda.get_device_name() if on_gpu else "h100")))
report(forecast_bytes=max(entry.memory.total for entry in plan.entries))
