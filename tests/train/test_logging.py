"""What a run writes down: a line for each step, curves for TensorBoard and Weights & Biases, the report of buckets."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.track.meters import StepMeter
from tests.train.runs import metrics, train_here, write_config

KEYS = {
    "step", "pass", "loss", "loss_bits", "digest", "grad_norm", "lr", "samples", "seconds", "wait", "buckets",
}  # fmt: skip
CURVES = {
    "loss", "grad_norm", "lr", "pass", "samples", "step_seconds", "clips_per_second", "tokens_per_second",
    "tflops_per_device", "wait_share", "rss_gib",
}  # fmt: skip


def test_each_step_has_one_line_with_everything_needed_to_compare_runs(config: Path) -> None:
    outcome, _ = train_here(config)
    lines = metrics(outcome.folder)
    assert [line["step"] for line in lines] == list(range(1, 9))
    for line in lines:
        several = {"drawn"} if len(line["buckets"]) > 1 else set()
        assert line.keys() == KEYS | several
        assert not several or sum(line["drawn"].values()) == line["samples"]
        assert float.fromhex(line["loss_bits"]) == line["loss"]
        assert len(line["digest"]) == 16
        assert line["seconds"] > 0
        assert line["grad_norm"] > 0
    assert sum(line["samples"] for line in lines[:4]) == 40
    assert any("drawn" in line for line in lines)
    assert lines[0]["lr"] < lines[1]["lr"] < lines[2]["lr"] == 3e-3
    assert {name for line in lines for name in line["buckets"]} >= {"32px/16f/3:2", "32px/8f/3:2", "32px/1f/3:2"}


def test_a_run_that_its_passes_end_before_its_steps_says_so(config: Path) -> None:
    outcome, _ = train_here(config, "--epochs", "1", "--max-steps", "4")
    _, said = train_here(outcome.folder, "--max-steps", "6")
    assert "epochs = 1: passes end about step 4, before max_steps = 6; a larger --epochs goes on" in said
    assert "done at step 4" in said
    _, said = train_here(outcome.folder, "--max-steps", "6", "--epochs", "2")
    assert "done at step 6" in said
    assert "before max_steps" not in said


def test_tensorboard_holds_the_curves_up_to_the_last_step(tmp_path: Path, clips: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    outcome, _ = train_here(write_config(tmp_path, clips, tensorboard=True, max_steps=5))
    events = EventAccumulator(str(outcome.folder / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert tags >= CURVES
    assert {tag for tag in tags if tag.startswith("loss/32px/")}
    assert [event.step for event in events.Scalars("loss")] == [2, 4, 5]  # log_every 2, and what was left at the end
    lines = metrics(outcome.folder)
    assert events.Scalars("loss")[0].value == pytest.approx((lines[0]["loss"] + lines[1]["loss"]) / 2)
    assert 0 <= events.Scalars("wait_share")[-1].value <= 1


def test_every_figure_that_a_run_writes_down_has_its_meaning_in_the_table(tmp_path: Path, clips: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    section = page.split("## Watching a run")[1].split("\n## ")[0]
    tables = [re.findall(r"^\| (`.*?) \|", part, re.MULTILINE) for part in section.split("`metrics.jsonl`")]
    told = [{name for row in rows for name in re.findall(r"`([^`]+)`", row)} for rows in tables]
    meter = StepMeter(peak=1.0, clock=itertools.count().__next__)
    for _ in range(2):
        meter.step(clips=1, tokens=1, flops=1)

    groups = [{"match": ["*.bias"], "lr": 1e-3, "name": "biases"}]
    run = write_config(tmp_path, clips, tensorboard=True, max_steps=3, optim={"groups": groups})
    outcome, _ = train_here(run)
    events = EventAccumulator(str(outcome.folder / "tensorboard"))
    events.Reload()
    tags = {re.sub(r"^(loss|lr)/.*", r"\1/", tag) for tag in events.Tags()["scalars"]}
    named = {re.sub(r"^(loss|lr)/.*", r"\1/", name) for name in told[0]}
    assert named == tags | meter.read().keys() | {"cuda_gib"}
    sometimes = {"skipped", "clips", "watts", "ranks", "expert"}
    assert told[1] == {key for line in metrics(outcome.folder) for key in line} | sometimes


@pytest.mark.usefixtures("fresh_wandb")
def test_weights_and_biases_writes_a_run_without_network(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    outcome, _ = train_here(config, "--wandb", "--max-steps", "2")
    runs = list((outcome.folder / "wandb").glob("offline-run-*/*.wandb"))
    assert len(runs) == 1
    assert runs[0].stat().st_size > 0


def test_the_report_of_buckets_is_printed_and_saved_before_step_1(config: Path) -> None:
    outcome, said = train_here(config, "--max-steps", "1")
    saved = (outcome.folder / "bucket_report.txt").read_text(encoding="utf-8").strip()
    assert "40 of 40 clips used" in saved
    printed = "\n".join(line.rstrip() for line in said.splitlines())
    assert "\n".join(line.rstrip() for line in saved.splitlines()) in printed
    assert printed.index("40 of 40 clips used") < printed.index("step 1/1")
    assert json.loads((outcome.folder / "bucket_report.json").read_text(encoding="utf-8"))["clips"] == 40


def test_the_terminal_shows_where_a_run_is(config: Path) -> None:
    outcome, said = train_here(config, "--max-steps", "4")
    assert f"run folder: {outcome.folder}" in said
    assert "compute in float32 on cpu, 1 process" in said
    assert "step 2/4  loss " in said
    assert "step 4/4  loss " in said
    last, following = said.rstrip().splitlines()[-2:]
    assert last == f"done at step 4; checkpoint: {outcome.checkpoint}"
    assert f"longtake generate {outcome.folder} " in following


def test_a_tracker_that_does_not_start_leaves_no_folder(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise UserError("wandb = True: Weights & Biases did not start")

    monkeypatch.setattr("longtake.track.trackers.WeightsAndBiases.__init__", refuse)
    with pytest.raises(UserError, match="did not start"):
        train_here(config, "--wandb", "--max-steps", "1", "--exp-name", "named")
    assert not list((config.parent / "outputs").iterdir())
