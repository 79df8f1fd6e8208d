"""Which folder a launch writes to, and which checkpoint it starts from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.checkpoint import save_checkpoint
from longtake.contracts import UserError
from longtake.parallel import World
from longtake.train import RunConfig, read_run
from longtake.train.folder import (
    FolderLock,
    RunFolder,
    given_up_on_error,
    open_folder,
    save_config,
    take_over_quarantine,
)
from tests.train.runs import write_config
from tests.train.test_schedule import run_config

ALONE = World(0, 1, 0, torch.device("cpu"))


def opened(outputs: Path, source: str = "tiny.py", **values: Any) -> RunFolder:
    config = run_config(outputs=str(outputs), **values)
    place = open_folder(config, ALONE, source)
    save_config(place, config, ALONE)
    return place


def saved(folder: Path, step: int) -> Path:
    return save_checkpoint(folder, 0, step, {"model.p": torch.zeros(2)}, {})


def test_the_same_name_twice_makes_two_folders(tmp_path: Path) -> None:
    folders = [opened(tmp_path, exp_name="a") for _ in range(3)]
    assert [place.path.name for place in folders] == ["a", "a-2", "a-3"]
    assert all(place.checkpoint is None and not place.continues for place in folders)


def test_without_a_name_the_folder_has_date_and_config(tmp_path: Path) -> None:
    place = opened(tmp_path, "configs/stage1.py")
    date, time, name = place.path.name.replace("-", "_", 1).split("_", 2)
    assert (len(date), len(time), name) == (6, 6, "stage1")


def test_resume_continues_the_newest_run_of_the_name_that_has_a_checkpoint(tmp_path: Path) -> None:
    first, second, _third = (opened(tmp_path, exp_name="a") for _ in range(3))
    saved(first.path, 9)
    newest = saved(second.path, 5)
    place = opened(tmp_path, exp_name="a", resume="auto")
    assert place == RunFolder(second.path, newest, continues=True)


def test_resume_takes_the_highest_step_of_a_run_whatever_order_they_were_written_in(tmp_path: Path) -> None:
    run = opened(tmp_path, exp_name="a")
    newest = saved(run.path, 12)
    saved(run.path, 8)
    assert opened(tmp_path, exp_name="a", resume="auto").checkpoint == newest


def test_resume_does_not_take_another_run_for_a_numbered_folder(tmp_path: Path) -> None:
    saved(opened(tmp_path, exp_name="stage-2").path, 5)
    assert opened(tmp_path, exp_name="stage", resume="auto").checkpoint is None
    assert opened(tmp_path, exp_name="stage-3", resume="auto").checkpoint is None
    assert opened(tmp_path, exp_name="stage-2", resume="auto").checkpoint is not None


def test_resume_without_a_name_goes_by_the_configs(tmp_path: Path) -> None:
    saved(tmp_path / "260101_120000-stage1", 5)
    mine = saved(tmp_path / "260101_110000-stage1-long", 5)
    assert opened(tmp_path, "stage1-long.py", resume="auto").checkpoint == mine
    assert opened(tmp_path, "long.py", resume="auto").checkpoint is None


def test_resume_without_anything_to_continue_begins_a_run(tmp_path: Path) -> None:
    place = opened(tmp_path, exp_name="a", resume="auto")
    assert place == RunFolder(tmp_path / "a", None, continues=False)


def left(folder: Path) -> Path:
    """What a launch leaves that was killed before its first checkpoint."""
    FolderLock(RunFolder(folder, None, continues=False), ALONE).close()
    return folder


def test_resume_begins_anew_in_the_folder_of_a_launch_that_was_killed_before_its_first_checkpoint(
    tmp_path: Path,
) -> None:
    first = left(opened(tmp_path, exp_name="a").path)
    (first / "epoch0-global_step5.partial").mkdir()
    assert opened(tmp_path, exp_name="a", resume="auto") == RunFolder(first, None, continues=True)
    assert opened(tmp_path, exp_name="a").path == tmp_path / "a-2", "without resume nothing is taken over"
    saved(first, 3)
    assert opened(tmp_path, exp_name="a", resume="auto").checkpoint == first / "epoch0-global_step3"


def test_resume_takes_the_last_of_several_folders_without_a_checkpoint(tmp_path: Path) -> None:
    folders = [left(opened(tmp_path, exp_name="a").path) for _ in range(3)]
    for age, folder in zip((2, 0, 1), folders, strict=True):
        os.utime(folder, (1e9 - age, 1e9 - age))
    assert opened(tmp_path, exp_name="a", resume="auto").path == folders[1]


@pytest.mark.parametrize("files", [(), ("launch.json",)])
def test_resume_takes_a_folder_whose_launch_had_no_time_to_lock_it(tmp_path: Path, files: tuple[str, ...]) -> None:
    (tmp_path / "a").mkdir()
    for name in files:
        (tmp_path / "a" / name).touch()
    assert opened(tmp_path, exp_name="a", resume="auto") == RunFolder(tmp_path / "a", None, continues=True)


def test_resume_takes_neither_a_folder_that_is_at_work_nor_one_that_is_no_run(tmp_path: Path) -> None:
    lock = FolderLock(opened(tmp_path, exp_name="a"), ALONE)
    assert opened(tmp_path, exp_name="a", resume="auto").path == tmp_path / "a-2"
    lock.close()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").touch()
    assert opened(tmp_path, exp_name="b", resume="auto").path == tmp_path / "b-2"
    (tmp_path / "c").touch()
    assert opened(tmp_path, exp_name="c", resume="auto").path == tmp_path / "c-2"


def test_the_folder_of_a_run_is_continued_in_place(tmp_path: Path) -> None:
    run = opened(tmp_path, exp_name="a")
    assert opened(tmp_path, str(run.path), exp_name="a") == RunFolder(run.path, None, continues=True)
    newest = saved(run.path, 3)
    assert opened(tmp_path, str(run.path), exp_name="a") == RunFolder(run.path, newest, continues=True)


def test_an_incomplete_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run = opened(tmp_path, exp_name="a")
    whole = saved(run.path, 3)
    os.remove(saved(run.path, 6) / "COMPLETE")
    assert opened(tmp_path, str(run.path), exp_name="a").checkpoint == whole


@pytest.mark.parametrize("spec", ["a", "a/epoch0-global_step5", "a/epoch*", "latest"])
def test_load_makes_a_new_folder(tmp_path: Path, spec: str) -> None:
    checkpoint = saved(opened(tmp_path, exp_name="a").path, 5)
    place = opened(tmp_path, exp_name="a", load=spec)
    assert place == RunFolder(tmp_path / "a-2", checkpoint, continues=False)


def test_load_of_nothing_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing is there"):
        opened(tmp_path, exp_name="a", load="elsewhere")
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_found_before_the_first_step_leaves_only_folders_of_earlier_launches(tmp_path: Path) -> None:
    new = opened(tmp_path, exp_name="a")
    with pytest.raises(UserError), given_up_on_error(new, ALONE):
        raise UserError("no")
    assert not new.path.exists()
    old = opened(tmp_path, str(opened(tmp_path, exp_name="a").path), exp_name="a")
    with pytest.raises(UserError), given_up_on_error(old, ALONE):
        raise UserError("no")
    assert old.path.exists()


def test_the_saved_config_says_the_same_and_an_earlier_one_is_kept(tmp_path: Path) -> None:
    config = read_run(str(write_config(tmp_path, tmp_path / "clips.parquet"))).value
    place = open_folder(config, ALONE, "tiny.py")
    save_config(place, config, ALONE)
    assert read_run(str(place.path)).value == config
    changed = read_run(str(place.path), ["--lr", "0.5", "--start-epoch", "0"]).value
    save_config(open_folder(changed, ALONE, str(place.path)), changed, ALONE)
    assert read_run(str(place.path)).value == config.model_copy(update={"lr": 0.5})
    assert sorted(path.name for path in place.path.iterdir()) == ["config.before-1.py", "config.py"]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.py in it"):
        read_run(str(tmp_path))


def test_the_saved_config_belongs_to_the_schema(tmp_path: Path) -> None:
    place = opened(tmp_path, exp_name="a")
    assert isinstance(read_run(str(place.path)).value, RunConfig)


def test_the_quarantine_comes_with_the_checkpoint_of_another_run(tmp_path: Path) -> None:
    first = opened(tmp_path, exp_name="a")
    (first.path / "quarantine.jsonl").write_text("known\n", encoding="utf-8")
    saved(first.path, 5)
    second = opened(tmp_path, exp_name="a", load="a")
    take_over_quarantine(second, ALONE)
    assert (second.path / "quarantine.jsonl").read_text(encoding="utf-8") == "known\n"
