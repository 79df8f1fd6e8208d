"""What the trainer adds to forward and backward: `longtake train` itself on made-up clips, its parts timed."""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from machine import commit_of
from rich.console import Console

from longtake.buckets.order import PassOrder
from longtake.data.probing.probe import probe_table
from longtake.data.shapes import make_shapes
from longtake.train.loop import Trainer
from longtake.train.run import train_run

TARGET_OVERHEAD = 0.02
RUN_FILE = Path(__file__).parents[1] / "configs" / "demo" / "shapes.py"
_SKIPPED = 10  # steps at the start: compilation, first allocations, workers


def measure_overhead(tiny: bool = False) -> dict[str, Any]:
    """Medians over the steps of a run of the demo's model, in milliseconds.

    `overhead` is all of a step that is neither the denoiser's forward nor backward, over the step;
    `overhead_without_optimizer` leaves clipping, AdamW and the average out too, which any training needs. `wait`:
    for data; `prepare`: encoding, embedding, noising, the loss; `other`: gradients gathered up, bookkeeping, logging.
    `overhead_bookkeeping` is the share of `other` alone.
    """
    watch = _Watch()
    with tempfile.TemporaryDirectory() as folder:
        made = make_shapes(folder, num_clips=64, num_stills=0)
        probe_table(made, Path(folder) / "clips.parquet")
        batch = 4 if tiny else 32
        overrides = {
            "dataset.data_path": f"{folder}/clips.parquet",
            "bucket_config": {"32px": {8: (1.0, batch)}},
            "outputs": folder,
            "max_steps": _SKIPPED + (6 if tiny else 60),
            "ckpt_every": 0,
            "log_every": 10,
            "tensorboard": not tiny,
        }
        words = [word for key, value in overrides.items() for word in (f"--{key}", repr(value).strip("'"))]
        with watch.on_trainer():
            train_run(str(RUN_FILE), words, Console(file=io.StringIO()))
    return watch.figures()


def overhead_of_trees(trees: Mapping[str, Path], tiny: bool, turns: int = 3) -> dict[str, dict[str, Any]]:
    """`measure_overhead` of several checkouts, in turns and each in a process of its own: the turn with the fastest
    step of each, with the checkout's commit."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for _ in range(1 if tiny else turns):
        for name, tree in trees.items():
            command = [sys.executable, __file__, *(["--tiny"] if tiny else [])]
            variables = {**os.environ, "PYTHONPATH": str(tree.resolve())}
            done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True)
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
    best = {name: min(figures, key=lambda one: one["step_ms"]) for name, figures in found.items()}
    return {name: {"commit": commit_of(tree), **best[name]} for name, tree in trees.items()}


class _Watch:
    """Seconds of each part of each step; on CUDA the device is waited for, which a run does not do."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)
        self._start: float | None = None

    def on_trainer(self) -> _Patched:
        """A context in which every `Trainer` is watched."""
        return _Patched(self)

    def part(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, with its time added to a part of the step under way."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            _wait()
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                _wait()
                self._now[name] += time.perf_counter() - start

        return timed

    def part_of(self, name: str, seconds: float) -> None:
        """Adds a time that the trainer itself took to a part of the step under way."""
        self._now[name] += seconds

    def begin(self) -> None:
        """A step begins, and the one before it ends."""
        now = time.perf_counter()
        if self._start is not None:
            prepare = self._now.pop("micro_batch") - self._now["forward"]
            self.steps.append({**self._now, "prepare": prepare, "step": now - self._start})
        self._now.clear()
        self._start = now

    def figures(self) -> dict[str, Any]:
        """Medians over the steps, and the shares of the overhead."""
        steps = self.steps[_SKIPPED:]
        middle = {name: statistics.median(step.get(name, 0.0) for step in steps) for name in ("step", *_PARTS)}
        middle["other"] = statistics.median(
            step["step"] - sum(step.get(part, 0.0) for part in _PARTS) for step in steps
        )
        both = [step["forward"] + step["backward"] for step in steps]
        added = [1 - work / step["step"] for work, step in zip(both, steps, strict=True)]
        rest = [
            (step["step"] - work - step["optimizer"]) / step["step"] for work, step in zip(both, steps, strict=True)
        ]
        known = [sum(step.get(part, 0.0) for part in _PARTS) for step in steps]
        left = [1 - seconds / step["step"] for seconds, step in zip(known, steps, strict=True)]
        return {
            "steps": len(steps),
            "step_ms": 1e3 * middle.pop("step"),
            "parts_ms": {name: 1e3 * seconds for name, seconds in middle.items()},
            "overhead": statistics.median(added),
            "overhead_without_optimizer": statistics.median(rest),
            "overhead_bookkeeping": statistics.median(left),
        }


_PARTS = ("forward", "backward", "optimizer", "wait", "prepare")


class _Patched:
    """`Trainer.run` replaced by one that puts watches around the parts of the trainer, until the end of the context."""

    def __init__(self, watch: _Watch) -> None:
        self.watch, self.run, self.backward = watch, Trainer.run, torch.Tensor.backward

    def __enter__(self) -> None:
        watch, run = self.watch, self.run

        def watched(trainer: Trainer, order: PassOrder, skip: int = 0) -> None:
            trainer.system.denoiser.forward = watch.part("forward", trainer.system.denoiser.forward)
            trainer.micro_batch = watch.part("micro_batch", trainer.micro_batch)
            update = trainer.updates[0]
            update.optimizer.step = watch.part("optimizer", update.optimizer.step)
            update.optimizer.grad_square_sum = watch.part("optimizer", update.optimizer.grad_square_sum)
            if update.ema is not None:
                update.ema.update = watch.part("optimizer", update.ema.update)
            steps = trainer.stream.steps

            def counted(*args: Any, **kwargs: Any) -> Any:
                watch.begin()
                for step in steps(*args, **kwargs):
                    yield step
                    watch.part_of("wait", step.wait_seconds)
                    watch.begin()

            trainer.stream.steps = counted
            run(trainer, order, skip)

        Trainer.run = watched
        torch.Tensor.backward = watch.part("backward", torch.Tensor.backward)

    def __exit__(self, *_: object) -> None:
        Trainer.run, torch.Tensor.backward = self.run, self.backward


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    print(json.dumps(measure_overhead(tiny="--tiny" in sys.argv[1:])))
