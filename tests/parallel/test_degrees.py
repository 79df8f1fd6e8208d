"""Sequence degrees of entries of the bucket table: which are taken, which follow, which are refused in what words."""

from __future__ import annotations

from typing import Any

import pytest

from longtake.contracts import Bucket, UserError
from longtake.parallel.config import ParallelConfig
from longtake.parallel.degrees import BucketPeers, bucket_degrees, check_bucket_sequence
from longtake.parallel.mesh import Mesh
from tests.train.optimizer.test_schedule import run_config

TOKENS = {("256px", 1): 900, ("256px", 33): 2_600, ("256px", 129): 7_800, ("768px", 1): 4_000}


def by_entry(config: ParallelConfig, peers: int) -> dict[tuple[str, int], int]:
    buckets = [Bucket(resolution, frames, "1:1", (frames, 256, 256), 1) for resolution, frames in TOKENS]
    return bucket_degrees(config, peers, buckets, lambda bucket: TOKENS[bucket.resolution, bucket.num_frames])


def test_without_a_setting_every_entry_runs_at_the_degree_of_the_mesh() -> None:
    assert set(by_entry(ParallelConfig(), 4).values()) == {4}


def test_entries_that_are_not_named_run_at_the_degree_of_the_mesh() -> None:
    config = ParallelConfig(bucket_sequence={"256px": {1: 1, 33: 2}})
    assert list(by_entry(config, 4).values()) == [1, 2, 4, 4]


@pytest.mark.parametrize(("peers", "degrees"), [(1, [1] * 4), (2, [1, 1, 2, 2]), (4, [1, 2, 4, 4]), (8, [1, 4, 8, 8])])
def test_auto_takes_the_smallest_that_gives_no_rank_more_than_the_largest_entry(peers: int, degrees: list[int]) -> None:
    found = by_entry(ParallelConfig(bucket_sequence="auto"), peers)
    assert list(found.values()) == degrees
    most = max(TOKENS.values()) / peers
    for entry, degree in found.items():
        assert TOKENS[entry] / degree <= most
        assert degree == 1 or 2 * TOKENS[entry] / degree > most


@pytest.mark.parametrize("peers", [1, 2])
def test_a_degree_above_the_meshs_own_stands_for_all_of_it(peers: int) -> None:
    config = ParallelConfig(bucket_sequence={"256px": {33: 4}})
    assert by_entry(config, peers)["256px", 33] == peers


def test_a_degree_that_does_not_divide_is_refused_with_those_that_do() -> None:
    config = ParallelConfig(bucket_sequence={"256px": {1: 1, 33: 3}})
    with pytest.raises(UserError) as refused:
        check_bucket_sequence(config, 4)
    assert str(refused.value) == (
        "parallel.bucket_sequence.256px.33 = 3: does not divide parallel.sequence = 4; choose one of 1, 2, 4"
    )


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"512px": {1: 1}}, "parallel.bucket_sequence.512px: no resolution of bucket_config; choose one of 256px"),
        ({"256px": {2: 1}}, "parallel.bucket_sequence.256px.2: no length of bucket_config.256px; choose one of 1, 33"),
        ({"256px": {1: 0}}, "greater than 0"),
        ("none", "auto"),
    ],
)
def test_a_setting_that_fits_no_entry_is_refused(setting: Any, said: str) -> None:
    table = {"256px": {1: (1.0, 4), 33: (1.0, 1)}}
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        run_config(bucket_config=table, parallel={"bucket_sequence": setting})


@pytest.mark.parametrize("rank", range(8))
def test_every_rank_knows_its_neighbourhood_and_its_place_in_it(rank: int) -> None:
    mesh = Mesh(1, 1, 4, 2, rank, ParallelConfig(), weights=None)
    peers = BucketPeers(mesh, {("256px", 1): 1, ("256px", 33): 2}, None, {})
    for num_frames, at_once, block in ((1, 4, 2), (33, 2, 4), (129, 1, 8)):
        bucket = Bucket("256px", num_frames, "1:1", (num_frames, 256, 256), 1)
        assert (peers.at_once(bucket), peers.count(bucket)) == (at_once, block)
        assert peers.place(bucket) == (rank // block, rank % block)
