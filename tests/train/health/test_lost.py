"""Too many bad clips end a run on all ranks together, with a checkpoint and the list; mended, it goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from longtake.checkpoint.state import Samples
from longtake.contracts import ClipFault, UserError
from longtake.data.config import DatasetConfig
from longtake.data.loading.quarantine import append_quarantine
from longtake.train.health.left_out import LostSamples
from longtake.train.run import train_run
from tests.train.runs import (
    assert_one_sentence,
    exact,
    finish,
    metrics,
    run_command,
    start,
    state_of,
    steps_saved,
    train_here,
    write_config,
)

BAD = (3, 8, 11, 17, 20, 25, 30)  # of 32 clips; six are more than 5 % of a hundred


@pytest.fixture
def own_clips(tmp_path: Path, clips: Path) -> Path:
    """A copy of the clips, some of them empty."""
    table = Path(shutil.copytree(clips.parent, tmp_path / "clips")) / clips.name
    for number in BAD:
        clip(table, number).write_bytes(b"")
    return table


def clip(table: Path, number: int) -> Path:
    return table.parent / "clips" / f"clip_{number:05}.mp4"


def config_of(max_bad: int | float | str = "5%") -> DatasetConfig:
    return DatasetConfig(data_path="t.csv", max_bad=max_bad)


@pytest.mark.parametrize(
    ("max_bad", "tried", "most"),
    [
        ("5%", 10, 5),
        ("5%", 100, 5),
        ("5%", 2000, 100),
        (0.5, 10, 50),
        (1.0, 7, 100),
        (3, 5, 3),
        (3, 9999, 3),
        (0, 9, 0),
        ("0%", 9, 0),
        ("2.5%", 200, 5),
    ],
)
def test_a_share_counts_from_the_hundredth_sample_on_and_a_number_at_once(
    max_bad: int | float | str, tried: int, most: int
) -> None:
    config = config_of(max_bad)
    assert not LostSamples(tried, most).too_many(config)
    assert LostSamples(tried, most + 1).too_many(config)


@pytest.mark.parametrize("max_bad", ["5", "x%", "nan%", "101%", "-1%", -1, 1.5, -0.1])
def test_what_is_neither_a_share_nor_a_number_is_refused(max_bad: int | float | str) -> None:
    with pytest.raises(ValueError, match=r'write a share such as "5%" or 0\.05, or a whole number of samples'):
        config_of(max_bad)


def test_a_tally_goes_on_and_mended_clips_leave_it() -> None:
    tally = LostSamples().add(12, 12).add(12, 9)
    assert tally == LostSamples(24, 3)
    kept = Samples(24, 3)
    assert LostSamples.going_on(kept, num_quarantined=5) == tally, "two lines are of steps that will be made again"
    assert LostSamples.going_on(kept, num_quarantined=1) == LostSamples(24, 1)
    assert LostSamples.going_on(Samples(), num_quarantined=3) == LostSamples()


def test_the_sentence_names_the_first_clips_and_where_the_rest_is(tmp_path: Path) -> None:
    file = tmp_path / "quarantine.jsonl"
    append_quarantine(file, [ClipFault(f"{number}.mp4", number, 0, "no such file") for number in range(7)])
    said = str(LostSamples(50, 7).refusal(config_of(), file))
    assert said.startswith("dataset.max_bad = 5%: 7 of the 50 samples tried so far could not be loaded (0.mp4: no such")
    assert f"4.mp4: no such file; 2 more in {file})" in said
    assert "5.mp4" not in said


def test_a_run_with_too_many_bad_clips_stops_with_a_checkpoint_and_the_list(
    tmp_path: Path, own_clips: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path, own_clips)
    code, _, error = run_command(capsys, ["train", config])
    assert_one_sentence(code, error, "dataset.max_bad = 5%: ", " could not be loaded (clips/clip_", "quarantine.jsonl")
    folder = tmp_path / "outputs" / "tiny"
    step = metrics(folder)[-1]["step"]
    assert steps_saved(folder) == [step]
    assert step < 8
    kept = state_of(next(folder.glob("epoch*")))["samples"]
    assert kept["tried"] - kept["lost"] == sum(line["samples"] for line in metrics(folder))
    assert 6 <= kept["lost"] <= len((folder / "quarantine.jsonl").read_text().splitlines())

    with pytest.raises(UserError, match=f"dataset.max_bad = 5%: {kept['lost']} of the {kept['tried']} samples tried"):
        train_here(folder)
    assert steps_saved(folder) == [step]

    code, said, _ = run_command(capsys, ["train", folder, "--dataset.max_bad", "30%"])
    assert code == 0
    assert "done at step 8" in said
    assert state_of(next(folder.glob("epoch*-global_step8")))["samples"]["lost"] == len(BAD)


def test_who_mends_the_clips_and_deletes_their_lines_goes_on(tmp_path: Path, own_clips: Path, clips: Path) -> None:
    config = write_config(tmp_path, own_clips)
    with pytest.raises(UserError, match="could not be loaded"):
        train_here(config)
    for number in BAD:
        shutil.copy(clip(clips, number), clip(own_clips, number))
    folder = tmp_path / "outputs" / "tiny"
    (folder / "quarantine.jsonl").unlink()
    outcome, _ = train_here(folder)
    assert outcome.clock.global_step == 8
    assert state_of(outcome.checkpoint)["samples"]["lost"] == 0


@pytest.mark.slow
def test_the_tally_of_a_run_that_was_stopped_is_that_of_one_that_was_not(tmp_path: Path, own_clips: Path) -> None:
    whole, _ = train_here(write_config(tmp_path / "a", own_clips), "--dataset.max-bad", "50")
    first, _ = train_here(write_config(tmp_path / "b", own_clips), "--dataset.max-bad", "50", "--max-steps", "2")
    second, _ = train_here(first.folder, "--max-steps", "8", "--num-workers", "1")
    assert state_of(second.checkpoint)["samples"] == state_of(whole.checkpoint)["samples"]
    assert exact(second.folder) == exact(whole.folder)


def test_bad_clips_of_the_last_step_are_told_too(tmp_path: Path, own_clips: Path) -> None:
    config = write_config(tmp_path, own_clips, max_steps=1, slots_per_step=16)
    with pytest.raises(UserError, match=r"dataset\.max_bad = 5%: 7 of the 40 samples"):
        train_run(str(config))
    assert steps_saved(tmp_path / "outputs" / "tiny") == [1]


@pytest.mark.slow
def test_two_ranks_stop_after_the_same_step(tmp_path: Path, own_clips: Path) -> None:
    config = write_config(tmp_path, own_clips)
    code, _, error = finish(start("train", config, "--num-workers", "1", processes=2))
    assert code == 1  # torchrun's own
    folder = tmp_path / "outputs" / "tiny"
    assert steps_saved(folder) == [metrics(folder)[-1]["step"]]
    assert error.count("dataset.max_bad = 5%: ") >= 2  # of both ranks, themselves or in torchrun's report
    lines = [json.loads(line) for line in (folder / "quarantine.jsonl").read_text().splitlines()]
    assert {line["path"] for line in lines} <= {f"clips/clip_{number:05}.mp4" for number in BAD}
