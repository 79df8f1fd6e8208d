from __future__ import annotations

import json
import re

import numpy as np
import pytest

from longtake.buckets.held_back import choose_held_back
from longtake.buckets.inputs import OrderInputs
from longtake.buckets.order import plan_pass
from longtake.buckets.protocol import Unused
from longtake.contracts import UserError
from tests.buckets.tables import inputs, rule


def test_used_and_unused_clips_are_all_clips_and_each_unused_one_has_a_reason() -> None:
    report = plan_pass(inputs(500), 0).report
    assert report.num_used + sum(line.clips for line in report.unused) == report.num_clips == 500
    assert sum(line.clips for line in report.buckets) == report.num_used
    reasons = {line.reason for line in report.unused}
    assert {Unused.TOO_SMALL, Unused.TOO_SHORT, Unused.INVALID, Unused.NOT_KEPT} <= reasons


def test_example_rows_have_the_reason_they_stand_for() -> None:
    made = inputs(500)
    lines = {line.reason: line for line in plan_pass(made, 0).report.unused}
    assert np.isnan(made.num_frames[list(lines[Unused.INVALID].rows)]).all()
    small = list(lines[Unused.TOO_SMALL].rows)
    assert len(small) == 5
    assert ((made.height * made.width)[small] < 0.8 * 32 * 32).all()


def test_fillers_make_up_whole_micro_batches() -> None:
    report = plan_pass(inputs(), 0).report
    for line in report.buckets:
        assert line.samples + line.fillers == line.micro_batches * line.bucket.batch_size
        assert 0 <= line.fillers < line.bucket.batch_size


def test_copies_count_as_samples_and_once_as_clips() -> None:
    everything = rule({"16px": {1: (1.0, 2), 2: (1.0, 2)}})
    single = plan_pass(inputs(rule=everything), 0).report
    double = plan_pass(inputs(rule=everything, weights=2.0), 0).report
    assert double.num_samples == 2 * single.num_samples
    assert double.num_used == single.num_used
    assert [line.clips for line in double.buckets] == [line.clips for line in single.buckets]


def test_a_clip_without_a_copy_is_reported() -> None:
    weights = np.ones(200)
    weights[[3, 8]] = 0
    report = plan_pass(inputs(weights=weights), 0).report
    (line,) = [line for line in report.unused if line.reason is Unused.NO_COPY]
    assert line.rows == (3, 8)
    assert report.num_used + sum(line.clips for line in report.unused) == 200


def few_clips(frames: list[int], config: dict, **changes: object) -> OrderInputs:
    """Clips of 16 x 16 at 24 fps by their numbers of frames."""
    size, ids = np.full(len(frames), 16.0), np.arange(len(frames), dtype=np.uint64)
    columns = {"num_frames": np.array(frames, float), "height": size, "width": size, "fps": size + 8}
    return OrderInputs(0, 0, 1, rule({"16px": config}), **columns, clip_ids=ids, table="few", **changes)


def test_report_batches_above_their_buckets_name_the_sizes_that_fit() -> None:
    config = {1: (1.0, 32), 4: (1.0, 8), 8: (1.0, 4)}
    report = plan_pass(few_clips([1] * 7 + [4] * 9 + [8] * 5, config), 0).report
    assert (report.num_samples, report.num_fillers) == (21, 32 - 7 + 16 - 9 + 8 - 5)
    line = report.text().splitlines()[-1]
    assert "35 of 56" in line
    sizes = sorted(re.findall(r"(\d+)f (\d+) instead of (\d+)", line))
    assert sizes == [("1", "7", "32"), ("4", "5", "8"), ("8", "3", "4")]
    fitting = few_clips([1] * 7 + [4] * 9 + [8] * 5, {1: (1.0, 7), 4: (1.0, 5), 8: (1.0, 3)})
    assert "fillers:" not in plan_pass(fitting, 0).report.text()


@pytest.mark.parametrize(("share", "count"), [(0.1, 2), (0.12, 3), (0.02, 0), (0.5, 11)])
def test_held_back_is_the_nearest_whole_number_and_never_the_last_of_a_bucket(share: float, count: int) -> None:
    made = few_clips([1] + [4] * 20, {1: (1.0, 1), 4: (1.0, 1)})
    numbers = np.arange(21) / 21  # the only image comes first
    held_back = choose_held_back(made, numbers, share)
    assert np.flatnonzero(held_back).tolist() == list(range(1, count + 1))
    assert not choose_held_back(few_clips([1, 4], {1: (1.0, 1), 4: (1.0, 1)}), numbers[:2], 0.5).any()


def test_report_clips_held_back_are_counted_apart_from_those_without_a_copy() -> None:
    weights, held_back = np.ones(5), np.arange(5) < 2
    weights[:3] = 0
    report = plan_pass(few_clips([1] * 5, {1: (1.0, 1)}, weights=weights, held_back=held_back), 0).report
    assert [(line.reason, line.rows) for line in report.unused] == [(Unused.NO_COPY, (2,)), (Unused.HELD_BACK, (0, 1))]
    assert "  2 held back for validation (rows 0, 1)" in report.text().splitlines()


def test_the_report_is_plain_data_and_a_readable_table() -> None:
    report = plan_pass(inputs(), 0).report
    data = json.loads(json.dumps(report.to_json()))
    assert data["used"] == report.num_used
    assert sum(bucket["samples"] for bucket in data["buckets"].values()) == data["samples"]
    lines = report.text().splitlines()
    heading = ["bucket", "TxHxW", "batch", "clips", "samples", "micro-batches", "fillers", "time", "cut", "area", "cut"]
    assert lines[0].split() == heading
    first = report.buckets[0].bucket
    assert lines[1].split()[:2] == [first.name, "x".join(map(str, first.shape))]
    assert len({len(line) for line in lines[: len(report.buckets) + 2]}) == 1
    for line in report.unused:
        assert f"{line.clips} unused: {line.reason.sentence}" in report.text()


def test_a_run_without_a_single_fitting_clip_is_told_why_and_what_to_change() -> None:
    with pytest.raises(UserError) as caught:
        plan_pass(inputs(40, rule=rule({"720p": {129: (1.0, 1)}})), 0)
    assert "none of the 40 clips fits a bucket" in str(caught.value)
    assert "smaller than 80 %" in str(caught.value)
    assert "add a lower resolution" in str(caught.value)
    with pytest.raises(UserError, match="no rows"):
        plan_pass(inputs(0), 0)
    with pytest.raises(UserError, match="raise the keep probability"):
        plan_pass(inputs(2, num_frames=np.ones(2), height=np.full(2, 40), width=np.full(2, 40),
                         rule=rule({"32px": {1: (0.0, 1), 9: (1.0, 1)}})), 0)  # fmt: skip


def test_a_pass_emptied_by_its_draws_alone_has_no_steps_and_is_no_mistake() -> None:
    one = inputs(
        1, num_frames=np.ones(1), height=np.full(1, 40), width=np.full(1, 40), rule=rule({"32px": {1: (0.5, 1)}})
    )
    lengths = {plan_pass(one, pass_index).num_steps for pass_index in range(20)}
    assert lengths == {0, 1}


def test_the_report_tells_how_much_of_the_clips_is_trimmed() -> None:
    square = rule({"32px_ar1:1": {4: (1.0, 2)}})
    columns = {"num_frames": [8, 4, 16], "height": [32, 64, 32], "width": [64, 64, 32], "fps": [24, 24, 48]}
    made = inputs(3, **{name: np.array(values) for name, values in columns.items()}, clip_ids=np.arange(3), rule=square)
    report = plan_pass(made, 0).report
    (line,) = report.buckets
    assert line.frames_cut == pytest.approx(1 - (4 + 4 + 8) / (8 + 4 + 16))  # at 48 fps every second frame is read
    assert line.area_cut == pytest.approx(0.5 / 3)
    assert (report.frames_cut, report.area_cut) == pytest.approx((line.frames_cut, line.area_cut))
    assert f"{line.area_cut:.1%}" in report.text()
    half = plan_pass(made, 0, plan_pass(made, 0).state(1)).report
    assert half == report
