from __future__ import annotations

import json

import numpy as np
import pytest

from longtake.buckets.assignment import BucketRule, assign
from longtake.buckets.protocol import Unused, keyed_draw
from tests.buckets.tables import clip_columns, column, golden, rule

IDS = golden("bucket_ids.json.xz")
SAMPLER = golden("sampler.json")


class SequentialDraws:
    """The draws of the reference: each row has its own NumPy generator and asks it only where it must."""

    def __init__(self, seeds: list[int]) -> None:
        self.uniforms = np.array([np.random.default_rng(seed).random(32) for seed in seeds])
        self.used = np.zeros(len(seeds), int)

    def __call__(self, rows: np.ndarray, *_: object) -> np.ndarray:
        out = self.uniforms[rows, self.used[rows]]
        self.used[rows] += 1
        return out


def no_draw(rows: np.ndarray, *_: object) -> np.ndarray:
    raise AssertionError("no draw is needed here")


def one(rule: BucketRule, num_frames: float, height: float, width: float, fps: float = 24.0) -> int:
    """Bucket or reason of a single clip, without draws."""
    columns = (np.array([value]) for value in (num_frames, height, width, fps))
    return int(assign(rule, *columns, no_draw)[0])


@pytest.mark.parametrize("name", IDS["cases"])
def test_every_row_falls_into_the_bucket_of_the_reference_under_compat(name: str) -> None:
    case, rows = IDS["cases"][name], IDS["rows"]
    theirs = BucketRule.from_config(
        case["bucket_config"], case["ae_spatial_compression"], case["fps_max"], law="opensora_v2"
    )
    assert len(theirs.buckets) == case["num_bucket"]
    codes = assign(theirs, *(column(rows, i) for i in range(4)), SequentialDraws([row[4] for row in rows]))
    buckets = [[b.resolution, b.num_frames, b.ratio, *b.shape, b.batch_size] for b in theirs.buckets]
    found = [None if code < 0 else buckets[code] for code in codes]
    assert found == [None if place < 0 else case["buckets"][place] for place in case["results"]]


@pytest.mark.parametrize("run", SAMPLER["runs"][:2], ids=["one rank", "four ranks"])
def test_every_epoch_of_the_reference_sampler_holds_the_rows_of_our_buckets(run: dict) -> None:
    theirs = BucketRule.from_config(run["bucket_config"], 16, run["fps_max"], law="opensora_v2")
    rows = SAMPLER["rows"]
    for epoch, steps in enumerate(run["steps"]):
        draws = SequentialDraws([run["seed"] + epoch + i * run["num_bucket"] for i in range(len(rows))])
        codes = assign(theirs, *(column(rows, i) for i in range(4)), draws)
        micro_batches = [rank for step in steps for rank in step]
        assert sum(len(numbers) for *_, numbers in micro_batches) > 200
        for *shape, numbers in micro_batches:
            assert {theirs.buckets[codes[number]].shape for number in numbers} == {tuple(shape)}


def test_a_still_with_a_high_frame_rate_is_kept_by_default_and_dropped_under_compat() -> None:
    config = {"32px": {1: (1.0, 2), 5: (1.0, 2)}}
    assert rule(config).buckets[one(rule(config), 1, 64, 64, fps=60.0)].num_frames == 1
    assert one(rule(config, law="opensora_v2"), 1, 64, 64, fps=60.0) == Unused.TOO_SHORT


def test_the_reason_of_an_unused_clip_is_told() -> None:
    videos = rule({"32px": {5: (1.0, 2)}})
    assert one(videos, 5, 8, 8) == Unused.TOO_SMALL
    assert one(videos, 4, 64, 64) == Unused.TOO_SHORT
    assert one(videos, 9, 64, 64, fps=48.0) == Unused.TOO_SHORT  # every second frame is read: 4 are left
    assert one(videos, 1, 64, 64) == Unused.NO_STILLS
    assert one(rule({"32px": {5: (0.0, 2), 9: (1.0, 2)}}), 5, 64, 64) == Unused.DISABLED
    assert one(rule({"32px": {5: ((1.0, 1.0), 2), 9: (1.0, 2)}}), 5, 64, 64) == Unused.DISABLED
    for numbers in ((np.nan, 64, 64), (5, 0, 64), (5, 64, -1), (0, 64, 64), (5, 64, np.inf)):
        assert one(videos, *numbers) == Unused.INVALID


def test_a_clip_may_be_enlarged_by_a_quarter_of_its_area_and_no_more() -> None:
    stills = rule({"40px": {1: (1.0, 1)}})  # 1,600 pixels: 1,280 are enough
    assert one(stills, 1, 32, 40) >= 0
    assert one(stills, 1, 31, 41) == Unused.TOO_SMALL


def test_a_clip_takes_the_largest_resolution_and_the_longest_length_it_fits() -> None:
    both = rule({"32px": {1: (1.0, 1), 5: (1.0, 1), 9: (1.0, 1)}, "64px": {5: (1.0, 1)}})

    def found(*clip: float) -> tuple[str, int]:
        bucket = both.buckets[one(both, *clip)]
        return bucket.resolution, bucket.num_frames

    assert found(100, 40, 40) == ("32px", 9)
    assert found(8, 40, 40) == ("32px", 5)
    assert found(100, 64, 64) == ("64px", 5)
    assert found(1, 64, 64) == ("32px", 1)  # 64px has no stills


def _shares(config: dict, num_clips: int = 40_000) -> dict[tuple[str, int], float]:
    """Share of long 64 x 64 clips in each (resolution, length); ("", reason) for the unused."""
    ours = rule(config)
    samples = np.arange(num_clips, dtype=np.uint64) * np.uint64(7919)
    columns = (np.full(num_clips, value) for value in (100, 64, 64, 24))
    codes = assign(ours, *columns, keyed_draw(3, 0, 0, samples))
    values, counts = np.unique(codes, return_counts=True)
    names = [(ours.buckets[v].resolution, ours.buckets[v].num_frames) if v >= 0 else ("", int(v)) for v in values]
    return dict(zip(names, counts / num_clips, strict=True))


def test_keep_and_skip_draws_have_their_probabilities() -> None:
    shares = _shares({"64px": {33: ((0.8, 0.25), 1), 17: (0.5, 1)}, "32px": {9: (0.9, 1)}})
    # 33: not skipped and kept; 17: skipped and kept; what either rejects goes to 32px
    rejected = 0.75 * 0.2 + 0.25 * 0.5
    expected = {
        ("64px", 33): 0.75 * 0.8,
        ("64px", 17): 0.25 * 0.5,
        ("32px", 9): rejected * 0.9,
        ("", int(Unused.NOT_KEPT)): rejected * 0.1,
    }
    assert shares.keys() == expected.keys()
    for name, share in expected.items():
        assert shares[name] == pytest.approx(share, abs=0.01)  # four standard deviations


def test_a_clip_skipped_off_the_shortest_length_is_told_as_skipped() -> None:
    shares = _shares({"64px": {33: ((1.0, 0.3), 1)}})
    assert shares[("", int(Unused.SKIPPED))] == pytest.approx(0.3, abs=0.01)


def test_a_decision_does_not_depend_on_other_entries() -> None:
    columns = clip_columns(2000)
    draw = keyed_draw(1, 0, 4, columns.pop("clip_ids"))
    few = rule({"32px": {1: (0.5, 2)}})
    many = rule({"32px": {1: (0.5, 7), 5: (0.3, 2), 9: ((0.2, 0.5), 1)}, "16px": {17: (0.9, 1)}})
    kept = [
        np.flatnonzero(np.isin(assign(each, *columns.values(), draw), _places(each, "32px", 1))) for each in (few, many)
    ]
    assert len(kept[0]) > 100
    np.testing.assert_array_equal(*kept)


def _places(rule: BucketRule, resolution: str, num_frames: int) -> list[int]:
    return [i for i, b in enumerate(rule.buckets) if (b.resolution, b.num_frames) == (resolution, num_frames)]


def test_assignment_is_the_same_however_the_rows_are_cut() -> None:
    columns = clip_columns(300_000)  # more than one internal sweep
    ids = columns.pop("clip_ids")
    whole = assign(rule(), *columns.values(), keyed_draw(1, 0, 0, ids))
    for part in (slice(0, 1), slice(131_000, 131_200), slice(250_000, 300_000)):
        cut = assign(rule(), *(values[part] for values in columns.values()), keyed_draw(1, 0, 0, ids[part]))
        np.testing.assert_array_equal(cut, whole[part])


def test_a_rule_survives_json() -> None:
    for each in (rule(), rule(fps_max=None, law="opensora_v2"), rule(IDS["cases"]["stage2"]["bucket_config"], 16)):
        assert BucketRule.from_json(json.loads(json.dumps(each.to_json()))) == each


def test_bucket_names_are_unique() -> None:
    names = [
        bucket.name
        for bucket in rule({"32px": {1: (1, 1)}, "32px_ar1:1": {1: (1, 1)}, "32px_max": {1: (1, 1)}}).buckets
    ]
    assert len(set(names)) == len(names)
