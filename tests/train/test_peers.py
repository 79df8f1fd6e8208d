"""Ranks that hold parts of the same micro-batch: one of them decodes, all get the same bytes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from longtake.buckets import BucketRule, OrderInputs, plan_pass
from longtake.contracts import Batch, Slot
from longtake.data import SlotLoader
from longtake.parallel import Mesh, ParallelConfig, start_world
from longtake.train.stream import StepStream
from tests.data.sources import Numbers, same
from tests.train.runs import free_port

STEPS, BAD = 3, 2


def order_inputs() -> OrderInputs:
    columns = {name: np.full(12, value) for name, value in (("num_frames", 8), ("height", 32), ("width", 32))}
    rule = BucketRule.from_config({"32px": {8: (1.0, 2)}}, 16)
    ids = np.arange(12, dtype=np.uint64)
    return OrderInputs(1, 0, 2, rule, **columns, fps=np.full(12, 12.0), clip_ids=ids, table="t")


def own(batch: Batch) -> Batch:
    """The batch with memory of its own for each tensor, as `torch.save` wants it."""
    tensors = {name: getattr(batch, name).clone() for name in ("video", "fps", "size", "weights")}
    return replace(batch, **tensors, draws={name: draw.clone() for name, draw in batch.draws.items()})


def play(rank: int, port: int, folder: Path) -> None:
    """One of two peers: a pass of the stream, and what came of it."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    read = []

    def note(slot: Slot, sample: int) -> None:
        read.append(sample)
        if sample == BAD:
            raise OSError("no such file")

    with start_world("cpu") as world:
        mesh = Mesh.create(ParallelConfig(shard=1, sequence=2), world)
        loader = SlotLoader(Numbers(note), num_workers=0)
        stream = StepStream(order_inputs(), loader, mesh, world, folder / f"quarantine{rank}.jsonl", lambda line: None)
        order = plan_pass(order_inputs(), 0, None)
        steps = []
        for step in stream.steps(order, 0, epochs=1):
            batches = [own(batch) for batch in step.batches]
            steps.append((batches, step.slots, step.loaded, step.faults, step.state))
        torch.save((steps, read), folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    folder = tmp_path_factory.mktemp("peers")
    mp.start_processes(play, (free_port(), folder), nprocs=2, start_method="fork")
    return folder, [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_peers_get_the_batches_of_the_one_that_decodes(played: tuple[Path, list]) -> None:
    (ours, read), (theirs, not_read) = played[1]
    assert sorted(read) == list(range(12))
    assert not_read == []
    assert len(ours) == len(theirs) == STEPS
    for (a, slots, loaded, _, state), (b, _, as_loaded, _, same_state) in zip(ours, theirs, strict=True):
        assert (loaded, state) == (as_loaded, same_state)
        assert loaded == 4 - sum(BAD in slot.samples for slot in slots)
        for one, other, slot in zip(a, b, slots, strict=True):
            assert torch.equal(one.video, other.video)
            assert torch.equal(one.weights, other.weights)
            assert (one.text, one.keys.tolist()) == (other.text, other.keys.tolist())
            assert BAD in slot.samples or (same(one, Numbers()[slot]) and same(other, one))


def test_a_bad_clip_is_written_down_by_the_one_that_decodes(played: tuple[Path, list]) -> None:
    folder, (ours, theirs) = played
    assert sum(len(faults) for _, _, _, faults, _ in ours[0]) == 1
    assert sum(len(faults) for _, _, _, faults, _ in theirs[0]) == 0
    assert (folder / "quarantine0.jsonl").exists()
    assert not (folder / "quarantine1.jsonl").exists()
