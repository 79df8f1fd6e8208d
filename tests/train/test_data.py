"""What a run trains on when its data or its settings change under way, and when clips are bad."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from longtake.contracts import Batch, UserError
from longtake.parallel.world import World
from longtake.train import loop, record, stream
from tests.train.runs import (
    STEPS_PER_PASS,
    assert_one_sentence,
    metrics,
    run_command,
    steps_saved,
    train_here,
    write_config,
)

Seen = dict[int, Counter[int]]  # pass -> sample -> how often it was trained on


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Fills up with the samples of every step that a run in this process makes."""
    found: Seen = defaultdict(Counter)
    push = record.Recorder.push

    def watched(self: record.Recorder, step: record.StepRecord) -> bool:
        for slot in step.slots:
            found[slot.pass_index].update(slot.samples[slot.weights > 0].tolist())
        return push(self, step)

    monkeypatch.setattr(record.Recorder, "push", watched)
    return found


@pytest.fixture
def own_clips(tmp_path: Path, clips: Path) -> Path:
    """A copy of the clips that a test may damage."""
    return Path(shutil.copytree(clips.parent, tmp_path / "clips")) / clips.name


def rows_of(table: Path, target: Path, first: int, last: int) -> Path:
    """A table beside the clips with some of their rows."""
    pq.write_table(pq.read_table(table).slice(first, last - first), target)
    return target


def test_a_pass_is_as_long_as_the_tests_take_it_to_be(config: Path, seen: Seen) -> None:
    outcome, _ = train_here(config)
    assert [line["pass"] for line in metrics(outcome.folder)] == [0] * STEPS_PER_PASS + [1] * STEPS_PER_PASS
    assert [set(seen[number].values()) for number in (0, 1)] == [{1}, {1}]
    assert seen[0].keys() == seen[1].keys()
    assert len(seen[0]) == 40


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("--bucket_config.32px.8", "(1.0, 5)"), marks=pytest.mark.slow),
        pytest.param(("--slots_per_step", "3"), marks=pytest.mark.slow),
        ("--bucket_config.32px.16", "((1.0, 0.5), 2)"),
        ("--bucket_config.32px.8", "(1.0, 2)", "--slots_per_step", "5", "--num_workers", "1"),
    ],
    ids=" ".join,
)
def test_no_sample_is_seen_twice_or_lost_when_settings_change_in_mid_pass(
    config: Path, seen: Seen, change: tuple[str, ...]
) -> None:
    first, _ = train_here(config, "--max-steps", "2")
    assert 0 < len(seen[0]) < 40
    second, _ = train_here(first.folder, *change, "--max-steps", "3")
    train_here(second.folder, "--max-steps", "100", "--epochs", "2")
    assert set(seen[0].values()) == set(seen[1].values()) == {1}
    assert len(seen[0]) == len(seen[1]) == 40


def test_rows_added_in_mid_pass_are_seen_once_at_most_and_all_of_them_in_the_next(
    tmp_path: Path, own_clips: Path, seen: Seen
) -> None:
    few = rows_of(own_clips, own_clips.parent / "few.parquet", 0, 28)
    first, _ = train_here(write_config(tmp_path, few), "--max-steps", "1")
    train_here(first.folder, "--dataset.data_path", str(own_clips), "--max-steps", "100", "--epochs", "2")
    old = {int(clip) for clip in pq.read_table(few)["clip_id"].to_pylist()}
    assert set(seen[0].values()) == set(seen[1].values()) == {1}
    assert old <= seen[0].keys()
    assert len(seen[0]) > len(old)  # a new row whose turn has not come yet is taken in
    assert len(seen[1]) == 40


def test_rows_taken_away_in_mid_pass_lose_nothing_else(tmp_path: Path, own_clips: Path, seen: Seen) -> None:
    first, _ = train_here(write_config(tmp_path, own_clips), "--max-steps", "1")
    few = rows_of(own_clips, own_clips.parent / "few.parquet", 0, 28)
    train_here(first.folder, "--dataset.data_path", str(few), "--max-steps", "100", "--epochs", "1")
    left = {int(clip) for clip in pq.read_table(few)["clip_id"].to_pylist()}
    assert set(seen[0].values()) == {1}
    assert left <= seen[0].keys()


def quarantined(folder: Path) -> list[dict]:
    file = folder / "quarantine.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def test_clips_without_a_caption_are_counted_before_the_first_step(tmp_path: Path, own_clips: Path) -> None:
    columns = pq.read_table(own_clips)
    texts = columns["text"]
    place = columns.column_names.index("text")
    columns = columns.set_column(place, "text", [[""] * len(texts)]).append_column("caption", texts)
    pq.write_table(columns, own_clips)
    config = write_config(tmp_path, own_clips, max_steps=1)
    _, said = train_here(config)
    said = " ".join(said.split())
    assert f"warning: captions: column text, empty for {len(texts)} of {len(texts)} clips (" in said
    _, said = train_here(config, "--dataset.captions.caption", "1")
    assert f"captions: column caption, empty for 0 of {len(texts)} clips" in said
    assert "warning: captions" not in said


@pytest.mark.parametrize("damage", ["emptied", "cut", "missing"])
def test_a_bad_clip_costs_that_clip(tmp_path: Path, own_clips: Path, seen: Seen, damage: str) -> None:
    bad = own_clips.parent / "clips" / "clip_00003.mp4"
    content = bad.read_bytes()
    bad.unlink()
    if damage != "missing":
        bad.write_bytes(content[: len(content) // 3] if damage == "cut" else b"")
    outcome, _ = train_here(write_config(tmp_path, own_clips))
    lines = quarantined(outcome.folder)
    assert [(line["path"], line["pass_index"]) for line in lines] == [("clips/clip_00003.mp4", 0)]
    assert all(math.isfinite(line["loss"]) for line in metrics(outcome.folder))
    assert outcome.clock.global_step == 8
    assert seen[0].keys() - seen[1].keys() == {lines[0]["sample"]}  # it kept its place, and has none in the next pass
    assert len(seen[1]) == 39


def test_a_restart_does_not_try_a_bad_clip_again(tmp_path: Path, own_clips: Path, seen: Seen) -> None:
    bad = own_clips.parent / "clips" / "clip_00003.mp4"
    whole = bad.read_bytes()
    bad.write_bytes(b"")
    config = write_config(tmp_path, own_clips)
    undisturbed, _ = train_here(config, "--max-steps", "6")
    started, _ = train_here(config, "--start-step", "99", "--epochs", "1")  # a checkpoint of step 0
    shutil.copy(undisturbed.folder / "quarantine.jsonl", started.folder)
    bad.write_bytes(whole)  # it could be read now: only the list keeps it out
    again, _ = train_here(started.folder, "--epochs", "2", "--start-epoch", "0", "--max-steps", "6")
    assert [line["loss_bits"] for line in metrics(again.folder)] == [
        line["loss_bits"] for line in metrics(undisturbed.folder)
    ]
    assert len(quarantined(again.folder)) == 1


def test_a_wrong_root_is_said_at_once_and_ends_the_run(
    tmp_path: Path, own_clips: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (own_clips.parent / "clips").iterdir():
        file.unlink()
    code, said, error = run_command(capsys, ["train", write_config(tmp_path, own_clips)])
    assert_one_sentence(code, error, "step 1: none of its ", "(first: clips/", "dataset.root", "quarantine.jsonl")
    shown = [line for line in said.splitlines() if line.startswith("left out clips/")]
    assert len(shown) == 10
    folder = tmp_path / "outputs" / "tiny"
    assert (steps_saved(folder), metrics(folder)) == ([], [])


def test_a_run_too_short_to_be_sure_is_no_success_either(tmp_path: Path, own_clips: Path) -> None:
    shutil.rmtree(own_clips.parent / "clips")
    one = write_config(tmp_path, own_clips, bucket_config={"32px": {1: (1.0, 1)}}, slots_per_step=1, max_steps=2)
    with pytest.raises(UserError, match=r"step 2: none of its 1 samples could be loaded \(first: clips/"):
        train_here(one)
    assert steps_saved(tmp_path / "outputs" / "tiny") == []


def test_steps_of_one_clip_outlive_a_bad_clip(tmp_path: Path, own_clips: Path) -> None:
    (own_clips.parent / "clips" / "clip_00003.mp4").write_bytes(b"")
    single = {"bucket_config": {"32px": {1: (1.0, 1), 8: (1.0, 1), 16: (1.0, 1)}}, "slots_per_step": 1}
    outcome, _ = train_here(write_config(tmp_path, own_clips, max_steps=100, epochs=1, **single))
    assert [line["samples"] for line in metrics(outcome.folder)].count(0) == 1
    assert outcome.clock.global_step == 40


def test_a_run_whose_passes_have_no_step_is_no_success(tmp_path: Path, clips: Path) -> None:
    config = write_config(tmp_path, clips, bucket_config={"32px": {1: (1e-9, 4), 8: (1e-9, 3)}})
    with pytest.raises(UserError, match="pass 0: has no step, none of the 40 clips is used in it"):
        train_here(config)
    assert steps_saved(tmp_path / "outputs" / "tiny") == []


def test_a_bad_clip_is_in_the_quarantine_before_its_batch_is_there_and_on_all_ranks_before_the_next_pass(
    tmp_path: Path, own_clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own_clips.parent / "clips" / "clip_00003.mp4").write_bytes(b"")
    micro_batch, plan, barrier = loop.Trainer.micro_batch, stream.StepStream.plan, World.barrier
    events: list[str] = []

    def trained(self: loop.Trainer, batch: Batch, *args: object) -> object:
        known = [line["sample"] for line in quarantined(tmp_path / "outputs" / "tiny")]
        assert {fault.sample for fault in batch.faults} <= set(known)
        events.append("bad" if batch.faults else "good")
        return micro_batch(self, batch, *args)

    monkeypatch.setattr(loop.Trainer, "micro_batch", trained)
    monkeypatch.setattr(World, "barrier", lambda self: events.append("barrier") or barrier(self))
    monkeypatch.setattr(stream.StepStream, "plan", lambda *args: events.append("plan") or plan(*args))
    train_here(write_config(tmp_path, own_clips, max_steps=5))
    assert events.count("bad") == 1
    first, second = (place for place, event in enumerate(events) if event == "plan")
    assert "bad" in events[first:second]
    assert events[second - 1] == "barrier"
