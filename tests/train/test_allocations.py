"""What a step allocates is settled by its bucket from its third step on: nothing grows while a run goes on."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

from longtake.contracts import Conditions
from longtake.train.loop import Trainer
from longtake.train.stream import StepInput
from tests.train.runs import train_here


def test_steps_of_a_bucket_allocate_alike_from_the_third_on(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    run = Trainer.forward_backward

    def traced(trainer: Trainer, step: StepInput, empty: Conditions) -> torch.Tensor:
        with profile(profile_memory=True) as trace:
            sums = run(trainer, step, empty)
        events: Any = trace.profiler.kineto_results.events()
        sizes = [event.nbytes() for event in events if event.name() == "[memory]"]
        made = sorted(size for size in sizes if size > 0)
        seen[" ".join(slot.bucket.name for slot in step.slots)].append(tuple(made))
        return sums

    monkeypatch.setattr(Trainer, "forward_backward", traced)
    train_here(config, "--num_workers", "0", "--slots_per_step", "1", "--max_steps", "20", "--ckpt_every", "0")
    long = {name: steps for name, steps in seen.items() if len(steps) > 3}
    assert len(long) >= 2
    for steps in long.values():
        assert len(set(steps[2:])) == 1, steps
