"""Which checkpoint is meant, and which ones go."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from longtake.checkpoint.folder import checkpoint_path, verify
from longtake.checkpoint.runs import list_checkpoints, resolve, retain
from longtake.checkpoint.save import save_checkpoint
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
    """`old` was saved first, `new` after it; step 60 of `new` is incomplete."""
    save_steps(tmp_path / "outputs" / "old", 50, 1000)
    save_steps(tmp_path / "outputs" / "new", 20, 60, 100)
    cut_off(tmp_path / "outputs" / "new", 60)
    (tmp_path / "outputs" / "new" / "metrics.jsonl").write_text("")
    return tmp_path / "outputs"


def test_checkpoints_are_listed_by_step_with_what_is_known_of_them(outputs):
    infos = list_checkpoints(outputs / "new")
    assert [(info.epoch, info.step, info.complete) for info in infos] == [
        (0, 20, True),
        (0, 60, False),
        (1, 100, True),
    ]
    files = [path for path in infos[0].path.iterdir() if path.name != "COMPLETE"]
    assert infos[0].num_bytes == sum(path.stat().st_size for path in files)
    assert infos[0].when <= infos[2].when
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
        ("*/epoch0-*[25]0", "new/epoch0-global_step20"),
    ],
)
def test_a_folder_a_run_a_glob_and_latest_mean_one_checkpoint(spec, meant, outputs):
    assert resolve(spec.format(outputs=outputs), outputs) == outputs / meant


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            "{outputs}/new/epoch0-global_step60",
            "step60: is damaged: has no COMPLETE .*such as .*new/epoch1-global_step100",
        ),
        ("nowhere", "nowhere: nothing is there"),
        ("nowhere*/x", "nothing is there; give a checkpoint folder, a run folder, a glob, or 'latest'"),
        ("{outputs}/new/metrics.jsonl", "holds no checkpoint; give a folder"),
        ("{outputs}", "holds no checkpoint of its own; give one of the runs in it: .*/new, "),
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


@pytest.mark.parametrize("keep", [-1, 2, 3, 9])
def test_minus_one_keeps_all_and_so_do_fewer_than_are_kept(tmp_path, keep):
    save_steps(tmp_path, 10, 20)
    assert retain(tmp_path, keep) == []
    assert steps_of(tmp_path) == [10, 20]


def cut(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("moment", range(12))
def test_a_removal_that_is_cut_off_leaves_what_the_next_save_removes(moment, tmp_path, monkeypatch):
    save_steps(tmp_path, 10, 20)
    before, steps = sorted((tmp_path / "epoch0-global_step10").iterdir()), iter(range(20))

    def cut_off(call):
        return lambda *args, **more: cut() if next(steps) == moment else call(*args, **more)

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        for name in ("replace", "rename", "unlink", "rmdir", "fsync"):
            patch.setattr(f"os.{name}", cut_off(getattr(os, name)))
        retain(tmp_path, 1)
    for info in list_checkpoints(tmp_path):
        assert info.complete
        assert verify(info.path) == []
    assert (10 in steps_of(tmp_path)) == all(path.exists() for path in before)
    save_steps(tmp_path, 30)
    retain(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch0-global_step20", "epoch0-global_step30"]


@pytest.mark.parametrize("spec", ["new", "latest", "{outputs}/new/*"])
@pytest.mark.parametrize("spoil", ["COMPLETE", "run.json", "head", "size"])
def test_an_older_checkpoint_is_named_but_not_taken_in_place_of_a_damaged_one(spec, spoil, outputs):
    newest = outputs / "new" / "epoch1-global_step100"
    shard = next(newest.glob("*.safetensors"))
    match spoil:
        case "head":
            content = bytearray(shard.read_bytes())
            content[20] ^= 1
            shard.write_bytes(content)
        case "size":
            os.truncate(shard, shard.stat().st_size + 1)
        case name:
            (newest / name).write_bytes(b"{}")
    os.utime(newest)
    with pytest.raises(UserError, match=f"{newest}: is damaged: .*such as {outputs}/new/epoch0-global_step20$"):
        resolve(spec.format(outputs=outputs), outputs)
