"""Which checkpoint is meant, and which ones go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import longtake.checkpoint.runs as runs
from longtake.checkpoint import checkpoint_path, list_checkpoints, resolve, retain, save_checkpoint
from longtake.contracts import UserError


def save_steps(run: Path, *steps: int) -> None:
    for step in steps:
        save_checkpoint(run, step // 100, step, {"model.w": torch.ones(4)}, {})


def cut_off(run: Path, step: int) -> None:
    (checkpoint_path(run, step // 100, step) / "COMPLETE").unlink()


def steps_of(run: Path) -> list[int]:
    return [info.step for info in list_checkpoints(run)]


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """`old` was saved first, `new` after it; step 300 of `new` is incomplete."""
    save_steps(tmp_path / "outputs" / "old", 50, 1000)
    save_steps(tmp_path / "outputs" / "new", 20, 100, 300)
    cut_off(tmp_path / "outputs" / "new", 300)
    (tmp_path / "outputs" / "new" / "metrics.jsonl").write_text("")
    return tmp_path / "outputs"


def test_checkpoints_are_listed_by_step_with_what_is_known_of_them(outputs):
    infos = list_checkpoints(outputs / "new")
    assert [(info.epoch, info.step, info.complete) for info in infos] == [
        (0, 20, True),
        (1, 100, True),
        (3, 300, False),
    ]
    files = [path for path in infos[0].path.iterdir() if path.name != "COMPLETE"]
    assert infos[0].num_bytes == sum(path.stat().st_size for path in files)
    assert infos[0].when <= infos[1].when
    assert list_checkpoints(outputs / "nowhere") == []


@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        ("latest", "new/epoch1-global_step100"),
        ("old", "old/epoch10-global_step1000"),
        ("new", "new/epoch1-global_step100"),
        ("{outputs}/old", "old/epoch10-global_step1000"),
        ("{outputs}/old/epoch0-global_step50/", "old/epoch0-global_step50"),
        ("old/epoch0-global_step50", "old/epoch0-global_step50"),
        ("{outputs}/old/epoch0*", "old/epoch0-global_step50"),
        ("{outputs}/new/*", "new/epoch1-global_step100"),
        ("{outputs}/o*", "old/epoch10-global_step1000"),
        ("*/epoch0-*", "new/epoch0-global_step20"),
    ],
)
def test_a_folder_a_run_a_glob_and_latest_mean_one_checkpoint(spec, meant, outputs):
    assert resolve(spec.format(outputs=outputs), outputs) == outputs / meant


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("{outputs}/new/epoch3-global_step300", "only incomplete checkpoints .epoch3-global_step300 without COMPLETE"),
        ("nowhere", "nowhere: nothing is there"),
        ("nowhere*/x", "nothing is there; give a checkpoint folder, a run folder, a glob, or 'latest'"),
        ("{outputs}/new/metrics.jsonl", "holds no checkpoint"),
    ],
)
def test_what_cannot_be_found_is_told(spec, said, outputs):
    with pytest.raises(UserError, match=said):
        resolve(spec.format(outputs=outputs), outputs)


def test_latest_of_nothing_is_told(tmp_path):
    with pytest.raises(UserError, match=r"latest, in .*outputs/\*: nothing is there"):
        resolve("latest", tmp_path / "outputs")


def test_the_newest_stay_and_incomplete_ones_do_not_count(tmp_path):
    save_steps(tmp_path, 10, 20, 30, 40)
    cut_off(tmp_path, 40)
    assert [path.name for path in retain(tmp_path, 2)] == ["epoch0-global_step10"]
    assert steps_of(tmp_path) == [20, 30, 40]


def test_every_nth_step_stays(tmp_path):
    save_steps(tmp_path, 10, 20, 30, 40, 50)
    retain(tmp_path, 1, keep_every=20)
    assert steps_of(tmp_path) == [20, 40, 50]


def test_minus_one_keeps_all(tmp_path):
    save_steps(tmp_path, 10, 20)
    assert retain(tmp_path, -1) == []
    assert steps_of(tmp_path) == [10, 20]


@pytest.mark.parametrize("number", [0, -2])
def test_a_retention_that_would_keep_nothing_is_refused(number, tmp_path):
    save_steps(tmp_path, 10)
    with pytest.raises(UserError, match=f"keep_n_latest = {number}: choose -1"):
        retain(tmp_path, number)
    assert steps_of(tmp_path) == [10]


def cut(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_removal_that_is_cut_off_after_its_marker_leaves_no_checkpoint(tmp_path, monkeypatch):
    save_steps(tmp_path, 10, 20)
    monkeypatch.setattr(runs.Path, "rename", cut)
    with pytest.raises(KeyboardInterrupt):
        retain(tmp_path, 1)
    assert [(info.step, info.complete) for info in list_checkpoints(tmp_path)] == [(10, False), (20, True)]


def test_a_removal_that_is_cut_off_among_its_files_is_finished_by_the_next_save(tmp_path, monkeypatch):
    save_steps(tmp_path, 10, 20)
    with monkeypatch.context() as patch:
        patch.setattr(runs.shutil, "rmtree", lambda path, ignore_errors=False: ignore_errors or cut())
        with pytest.raises(KeyboardInterrupt):
            retain(tmp_path, 1)
    assert steps_of(tmp_path) == [20]
    assert len(list(tmp_path.iterdir())) == 2
    save_steps(tmp_path, 30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch0-global_step20", "epoch0-global_step30"]
