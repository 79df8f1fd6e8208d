"""The tables and ways of Open-Sora 1.2 and CogVideoX-Fun, against what those programs computed."""

from __future__ import annotations

import json

import numpy as np
import pytest

from longtake.buckets.aspect import aspect_table, closest_ratio, frame_size, num_pixels, ratio_weights
from longtake.buckets.assignment import BucketRule, assign
from longtake.buckets.protocol import Unused, keyed_draw
from longtake.contracts import UserError
from tests.buckets.tables import clip_columns, column, golden

V1_2 = "opensora_v1_2"
FUN = "cogvideox_fun"
TABLES = golden("bucket_tables.json", V1_2)
IDS = golden("bucket_ids.json.xz", V1_2)
SAMPLER = golden("sampler.json", V1_2)
SHAPES = golden("aspect_tables.json", V1_2)
FUN_ASPECT = golden("aspect.json", FUN)


def v1_2_rule(table: dict, frame_interval: int = 1) -> BucketRule:
    return BucketRule.from_config(table, 16, law=V1_2, frame_interval=frame_interval)


class TheirDraws:
    """Open-Sora 1.2's: a NumPy generator for each row and entry; an entry with two numbers draws the second first."""

    def __init__(self, rule: BucketRule, seeds: np.ndarray) -> None:
        self.seeds = seeds
        entries = [(resolution.name, entry) for resolution in rule.resolutions for entry in resolution.entries]
        self.ordinals = {(name, entry.num_frames): i for i, (name, entry) in enumerate(entries)}
        self.two = {(name, entry.num_frames) for name, entry in entries if entry.skip is not None}

    def __call__(self, rows: np.ndarray, resolution: str, num_frames: int, skip: bool) -> np.ndarray:
        where = (resolution, num_frames)
        drawn = [np.random.default_rng(int(self.seeds[row]) + self.ordinals[where]).random(2) for row in rows]
        drawn = np.array(drawn).reshape(-1, 2)
        return 1 - drawn[:, 0] if skip else drawn[:, int(where in self.two)]  # skips where u > p, we where u < 1 - p


def codes_of(rule: BucketRule, rows: list, seeds: np.ndarray) -> np.ndarray:
    columns = [column(rows, index) for index in range(3)]
    return assign(rule, *columns, np.full(len(rows), 60.0), TheirDraws(rule, seeds))


@pytest.mark.parametrize("name", SHAPES)
def test_the_literal_tables_of_open_sora_1_2_are_as_they_were_written(name: str) -> None:
    assert num_pixels(name, V1_2) == SHAPES[name]["num_pixels"]
    ours = [[ratio, *shape] for ratio, shape in aspect_table(name, 16, law=V1_2).items()]
    assert ours == SHAPES[name]["sizes"]


def test_the_nearest_key_is_that_of_open_sora_1_2() -> None:
    closest = golden("closest_ratio.json", V1_2)
    height, width = np.array(closest["pairs"]).T
    for name, expected in closest["closest"].items():
        table = aspect_table(name, 16, law=V1_2)
        assert [list(table)[place] for place in closest_ratio(height, width, table, V1_2)] == expected


def test_the_size_of_a_sampled_picture_is_that_of_open_sora_1_2() -> None:
    for name, sizes in golden("image_size.json", V1_2)["get_image_size"].items():
        for ratio, size in sizes.items():
            if isinstance(size, list):
                assert frame_size(name, ratio, 16, V1_2) == tuple(size)
            else:
                with pytest.raises(UserError, match="choose one of"):
                    frame_size(name, ratio, 16, V1_2)


@pytest.mark.parametrize("name", TABLES)
def test_the_buckets_of_the_three_tables_are_counted_and_ordered_as_there(name: str) -> None:
    rule = v1_2_rule(TABLES[name]["table"])
    assert len(rule.buckets) == TABLES[name]["num_bucket"]
    entries = [[each.name, entry.num_frames] for each in rule.resolutions for entry in each.entries]
    assert entries == [ordinal[:2] for ordinal in TABLES[name]["ordinals"]]


@pytest.mark.parametrize("name", IDS["draws"])
def test_every_clip_falls_into_the_bucket_of_open_sora_1_2(name: str) -> None:
    case = IDS["draws"][name]
    rule = v1_2_rule(TABLES[case["table"]]["table"], case["frame_interval"])
    rows = IDS["rows"][: case["count"]]
    codes = codes_of(rule, rows, case["seed"] + np.arange(len(rows)) * len(rule.buckets))
    ours = [[b.resolution, b.num_frames, b.ratio, *b.shape, b.batch_size] for b in rule.buckets]
    found = [None if code < 0 else ours[code] for code in codes]
    assert found == [None if place < 0 else case["buckets"][place] for place in case["result"]]


@pytest.mark.parametrize("run", SAMPLER["runs"][:8], ids=range(8))
def test_every_epoch_of_their_sampler_holds_the_rows_of_our_buckets(run: dict) -> None:
    rule = v1_2_rule(SAMPLER["tables"][run["name"]], run.get("interval", 1))
    for epoch, steps in zip(run["epochs_run"], run["steps"], strict=True):
        seeds = run["seed"] + epoch + np.arange(len(SAMPLER["rows"])) * len(rule.buckets)
        codes = codes_of(rule, SAMPLER["rows"], seeds)
        for *shape, numbers in (rank for step in steps for rank in step if rank):
            assert {rule.buckets[codes[number]].shape for number in numbers} == {tuple(shape)}


def test_a_length_with_probability_0_keeps_its_clips_from_the_shorter_ones() -> None:
    rule = v1_2_rule({"480p": {51: (1.0, 5), 408: (0.0, None)}})
    columns = (np.array([408.0, 409.0]), np.array([480, 480]), np.array([854, 854]), np.array([24, 24]))
    codes = assign(rule, *columns, keyed_draw(0, 0, 0, np.arange(2, dtype=np.uint64)))
    assert rule.buckets[codes[0]].num_frames == 51
    assert codes[1] == Unused.DISABLED


def test_a_clip_of_exactly_the_length_is_too_short_there() -> None:
    rule = v1_2_rule({"144p": {51: (1.0, 2)}}, frame_interval=2)
    columns = (np.array([102.0, 103.0, 1.0]), *(np.full(3, size) for size in (144, 256, 24)))
    codes = assign(rule, *columns, keyed_draw(0, 0, 0, np.arange(3, dtype=np.uint64)))
    assert codes.tolist()[::2] == [Unused.TOO_SHORT, Unused.NO_STILLS]
    assert codes[1] >= 0


@pytest.mark.parametrize("name", ["B1", "B2", "B3"])
def test_a_rule_with_another_law_survives_json(name: str) -> None:
    rule = v1_2_rule(TABLES[name]["table"], 3)
    assert BucketRule.from_json(json.loads(json.dumps(rule.to_json()))) == rule


def test_the_tables_of_cogvideox_fun_are_scaled_from_512() -> None:
    for side, sizes in FUN_ASPECT["scaled_to_multiple_of_16"].items():
        ours = aspect_table(f"{side}px", 16, law=FUN)
        assert {float(ratio): list(shape) for ratio, shape in ours.items()} == {float(r): s for r, s in sizes.items()}
    table = aspect_table("512px", 16, law=FUN)
    height, width = (np.array([case[side] for case in FUN_ASPECT["nearest"]]) for side in "hw")
    places = closest_ratio(height, width, table, FUN)
    assert [float(list(table)[place]) for place in places] == [float(case["key"]) for case in FUN_ASPECT["nearest"]]


def test_the_random_crop_ratios_of_cogvideox_fun_are_drawn_with_their_weights() -> None:
    table = aspect_table("512px_crop", 16, law=FUN)
    crops = FUN_ASPECT["ASPECT_RATIO_RANDOM_CROP_512"]
    assert {float(r): list(s) for r, s in table.items()} == {float(r): [int(v) for v in s] for r, s in crops.items()}
    weights = ratio_weights("512px_crop", FUN)
    np.testing.assert_allclose(weights, FUN_ASPECT["ASPECT_RATIO_RANDOM_CROP_PROB"])
    rule = BucketRule.from_config({"512px_crop": {49: (1.0, 1)}}, 16, law=FUN, frame_interval=3)
    columns = (np.full(40_000, value) for value in (147, 90, 160, 30))  # not too small: that program enlarges
    codes = assign(rule, *columns, keyed_draw(0, 0, 0, np.arange(40_000, dtype=np.uint64)))
    np.testing.assert_allclose(np.bincount(codes, minlength=15) / 40_000, weights, atol=0.008)


@pytest.mark.parametrize(("name", "compat"), [("256px", V1_2), ("512", FUN), ("512px_max", FUN), ("16px", FUN)])
def test_a_name_of_another_system_is_answered_with_a_sentence(name: str, compat: str) -> None:
    with pytest.raises(UserError, match=r"expected|choose"):
        aspect_table(name, 16, law=compat)
    with pytest.raises(UserError, match="law = 'opensora_v3'"):
        BucketRule.from_config({"256px": {1: (1.0, 1)}}, 16, law="opensora_v3")


def test_rows_of_every_kind_have_a_bucket_or_a_reason_under_every_law() -> None:
    columns = clip_columns(3000)
    draw = keyed_draw(0, 0, 0, columns.pop("clip_ids"))
    for compat, name in ((None, "64px"), ("opensora_v2", "64px"), (V1_2, "144p"), (FUN, "64px")):
        rule = BucketRule.from_config({name: {1: (0.5, 2), 5: ((0.5, 0.5), 2), 9: (1.0, 1)}}, 16, law=compat)
        codes = assign(rule, *columns.values(), draw)
        assert np.isin(codes, [*range(len(rule.buckets)), *map(int, Unused)]).all()
