"""Ranks that hold parts of the same micro-batch: one of them decodes, all get the same bytes."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from longtake.buckets.assignment import BucketRule
from longtake.buckets.inputs import OrderInputs
from longtake.buckets.order import plan_pass
from longtake.contracts import Batch, Slot
from longtake.data.loading.loader import SlotLoader
from longtake.parallel.config import ParallelConfig
from longtake.parallel.degrees import BucketPeers
from longtake.parallel.mesh import Mesh
from longtake.parallel.world import start_world
from longtake.train.stream import StepStream, Turn
from tests.data.sources import Numbers, same
from tests.train.runs import free_port

RANKS, CLIPS, BAD = 4, 50, 2
DEGREES = {("32px", 1): 1, ("32px", 4): 2, ("32px", 8): 4}
EACH_ALIKE = {}  # every bucket at the degree of the mesh


@dataclass(frozen=True)
class Seen:
    """A step as one rank sees it."""

    slots: list[Slot]
    turns: list[Turn]
    batches: list[Batch]
    loaded: int
    num_faults: int
    state: dict


def order_inputs(degrees: dict[tuple[str, int], int]) -> OrderInputs:
    columns = {name: np.full(CLIPS, 32) for name in ("height", "width")}
    num_frames = np.array([1, 1, 1, 4, 8])[np.arange(CLIPS) % 5]
    rule = BucketRule.from_config({"32px": {1: (1.0, 2), 4: (1.0, 2), 8: (1.0, 2)}}, 16)
    ids = np.arange(CLIPS, dtype=np.uint64)
    sizes = {entry: RANKS // degree for entry, degree in degrees.items()}
    columns |= {"num_frames": num_frames, "fps": np.full(CLIPS, 12.0), "clip_ids": ids}
    return OrderInputs(1, 0, 3, rule, **columns, table="t", slot_sizes=sizes)


def own(batch: Batch) -> Batch:
    """The batch with memory of its own for each tensor, as `torch.save` wants it."""
    tensors = {name: getattr(batch, name).cpu().clone() for name in ("video", "fps", "size", "weights")}
    return replace(batch, **tensors, draws={name: draw.cpu().clone() for name, draw in batch.draws.items()})


def play(rank: int, port: int, folder: Path, device: str = "cpu") -> None:
    """One of four peers: a pass of the stream with all buckets alike, and one with a degree for each."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    with start_world(device) as world:
        mesh = Mesh.create(ParallelConfig(shard=1, sequence=RANKS), world)
        for name, degrees in (("alike", EACH_ALIKE), ("degrees", DEGREES)):
            read: list[int] = []

            def note(slot: Slot, sample: int, read: list[int] = read) -> None:
                read.append(sample)
                if sample == BAD:
                    raise OSError("no such file")

            loader, inputs = SlotLoader(Numbers(note), num_workers=0), order_inputs(degrees)
            (folder / name).mkdir(exist_ok=True)
            quarantine = folder / name / f"quarantine{rank}.jsonl"
            peers = BucketPeers.create(mesh, degrees)
            stream = StepStream(inputs, loader, peers, world, quarantine, lambda line: None)
            steps = []
            for step in stream.steps(plan_pass(inputs, 0, None), 0, epochs=1):
                batches = [own(batch) for batch in step.batches]
                faults = len(step.faults)
                steps.append(Seen(list(step.slots), list(step.turns), batches, step.loaded, faults, step.state))
            torch.save((steps, read), folder / name / f"{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peers")
    mp.start_processes(play, (free_port(), folder), nprocs=RANKS, start_method="fork")
    return folder


@pytest.fixture(params=["alike", "degrees"])
def played(request: pytest.FixtureRequest, folder: Path) -> tuple[list[list[Seen]], list[list[int]], Path]:
    """What each rank saw, by step; what it decoded; where it wrote."""
    found = [torch.load(folder / request.param / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    return [steps for steps, _ in found], [read for _, read in found], folder / request.param


Played = tuple[list[list[Seen]], list[list[int]], Path]


def degree_of(slot: Slot, where: Path) -> int:
    return DEGREES[slot.bucket.resolution, slot.bucket.num_frames] if where.name == "degrees" else RANKS


def test_every_sample_is_decoded_by_one_rank_and_all_of_them_take_their_turn(played: Played) -> None:
    _, read, _ = played
    assert sorted(chain.from_iterable(read)) == list(range(CLIPS))
    assert min(map(len, read)) >= CLIPS / RANKS / 2


def test_ranks_make_as_many_forwards_and_tell_every_micro_batch_once(played: Played) -> None:
    steps, _, where = played
    for of_ranks in zip(*steps, strict=True):
        slots = of_ranks[0].slots
        assert len({len(step.turns) for step in of_ranks}) == 1
        told = [turn.number for step in of_ranks for turn in step.turns if turn.number is not None]
        assert sorted(told) == list(range(len(slots)))
        assert sum(step.loaded for step in of_ranks) == sum(
            int(slot.weights.sum()) - (BAD in slot.samples[slot.weights > 0]) for slot in slots
        )
        assert all(step.state == of_ranks[0].state for step in of_ranks)
        at_once = [RANKS // degree_of(turn.slot, where) for turn in of_ranks[0].turns]
        assert sum(at_once) - len(slots) < max(at_once) * 2, "only a bucket's last slot has fillers"


def test_those_that_share_a_micro_batch_get_the_same_bytes_and_others_their_own(played: Played) -> None:
    steps, _, where = played
    for of_ranks in zip(*steps, strict=True):
        for forward in zip(*(zip(step.turns, step.batches, strict=True) for step in of_ranks), strict=True):
            degree = degree_of(forward[0][0].slot, where)
            for rank, (turn, batch) in enumerate(forward):
                first_turn, first = forward[rank // degree * degree]
                assert turn.slot.samples.tolist() == first_turn.slot.samples.tolist()
                assert torch.equal(batch.video, first.video)
                assert torch.equal(batch.weights, first.weights)
                assert (batch.text, batch.keys.tolist()) == (first.text, first.keys.tolist())
                assert turn.slot.is_real == bool(batch.weights.any()) or BAD in turn.slot.samples
                assert BAD in turn.slot.samples or not turn.slot.is_real or same(batch, Numbers()[turn.slot])
            real = [turn.slot.keys.tolist() for turn, _ in forward[::degree] if turn.slot.is_real]
            assert max(Counter(map(tuple, real)).values()) == 1, "the same work twice"


def test_a_bad_clip_is_written_down_by_the_one_that_decodes(played: Played) -> None:
    steps, read, where = played
    (reader,) = [rank for rank in range(RANKS) if BAD in read[rank]]
    assert [sum(step.num_faults for step in of_rank) for of_rank in steps] == [int(r == reader) for r in range(RANKS)]
    assert [path.name for path in where.glob("quarantine*")] == [f"quarantine{reader}.jsonl"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs")
def test_gpus_share_what_one_of_them_decoded(folder: Path, tmp_path: Path) -> None:
    """Plans travel over the CPU and bytes over NCCL; what arrives is what arrives on CPUs."""
    mp.start_processes(play, (free_port(), tmp_path, "cuda"), nprocs=RANKS, start_method="spawn")
    for rank in range(RANKS):
        theirs, _ = torch.load(folder / "degrees" / f"{rank}.pt", weights_only=False)
        ours, _ = torch.load(tmp_path / "degrees" / f"{rank}.pt", weights_only=False)
        for step, expected in zip(ours, theirs, strict=True):
            assert all(torch.equal(a.video, b.video) for a, b in zip(step.batches, expected.batches, strict=True))
