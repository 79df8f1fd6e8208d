"""Which folder a launch writes to, and which checkpoint it starts from."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.checkpoint.runs import remove_checkpoint
from longtake.checkpoint.save import save_checkpoint
from longtake.contracts import UserError
from longtake.parallel.world import World
from longtake.train import folder
from longtake.train.config import RunConfig
from longtake.train.folder import (
    RunFolder,
    give_up,
    given_up_on_error,
    new_name,
    open_folder,
    save_config,
    starting_point,
    take_over_quarantine,
)
from longtake.train.run_file import read_run
from tests.train.optimizer.test_schedule import run_config
from tests.train.runs import write_config

ALONE = World(0, 1, 0, torch.device("cpu"))


def opened(outputs: Path, source: str = "tiny.py", **values: Any) -> RunFolder:
    """The folder of a launch that ends as soon as it has chosen it."""
    config = run_config(outputs=str(outputs), **values)
    with (
        open_folder(config, ALONE, source) as taken,
        given_up_on_error(taken, ALONE),
        starting_point(taken, config, ALONE) as place,
    ):
        save_config(place.path, config)
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


def test_number_in_a_name_is_the_next_free_one_of_all_folders(tmp_path: Path) -> None:
    name = "{n}-STDiT3"
    (tmp_path / "008-other").mkdir()
    (tmp_path / "261128_101112-dated").mkdir()
    first, second = (opened(tmp_path, exp_name=name).path for _ in range(2))
    assert (first.name, second.name) == ("009-STDiT3", "010-STDiT3")
    assert new_name(run_config(outputs=str(tmp_path), exp_name=name), "tiny.py") == "011-STDiT3"
    saved(first, 5)
    assert opened(tmp_path, exp_name=name, resume="auto").path == first
    assert new_name(run_config(outputs=str(tmp_path / "empty"), exp_name=name), "tiny.py") == "001-STDiT3"


def test_resume_without_a_name_goes_by_the_configs(tmp_path: Path) -> None:
    saved(tmp_path / "260101_120000-stage1", 5)
    mine = saved(tmp_path / "260101_110000-stage1-long", 5)
    assert opened(tmp_path, "stage1-long.py", resume="auto").checkpoint == mine
    assert opened(tmp_path, "long.py", resume="auto").checkpoint is None


def test_resume_without_anything_to_continue_begins_a_run(tmp_path: Path) -> None:
    place = opened(tmp_path, exp_name="a", resume="auto")
    assert place == RunFolder(tmp_path / "a", None, continues=False)


def test_resume_begins_anew_in_the_folder_of_a_launch_that_was_killed_before_its_first_checkpoint(
    tmp_path: Path,
) -> None:
    first = opened(tmp_path, exp_name="a").path
    (first / "epoch0-global_step5.partial").mkdir()
    assert opened(tmp_path, exp_name="a", resume="auto") == RunFolder(first, None, continues=True)
    assert opened(tmp_path, exp_name="a").path == tmp_path / "a-2", "without resume nothing is taken over"
    saved(first, 3)
    assert opened(tmp_path, exp_name="a", resume="auto").checkpoint == first / "epoch0-global_step3"


def test_resume_takes_the_last_of_several_folders_without_a_checkpoint(tmp_path: Path) -> None:
    folders = [opened(tmp_path, exp_name="a").path for _ in range(3)]
    for age, path in zip((2, 0, 1), folders, strict=True):
        os.utime(path, (1e9 - age, 1e9 - age))
    assert opened(tmp_path, exp_name="a", resume="auto").path == folders[1]


@pytest.mark.parametrize("files", [(), ("launch.json",)])
def test_resume_takes_a_folder_whose_launch_had_no_time_to_lock_it(tmp_path: Path, files: tuple[str, ...]) -> None:
    (tmp_path / "a").mkdir()
    for name in files:
        (tmp_path / "a" / name).touch()
    assert opened(tmp_path, exp_name="a", resume="auto") == RunFolder(tmp_path / "a", None, continues=True)


def test_resume_takes_neither_a_folder_that_is_at_work_nor_one_that_is_no_run(tmp_path: Path) -> None:
    with open_folder(run_config(outputs=str(tmp_path), exp_name="a"), ALONE, "tiny.py"):
        assert opened(tmp_path, exp_name="a", resume="auto").path == tmp_path / "a-2"
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


def wait_for(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """The next launch that has to wait for a folder finds this done when it looks again."""
    monkeypatch.setattr("longtake.train.folder.time.sleep", lambda _: action())


def test_the_checkpoint_is_chosen_when_the_launch_before_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config = tmp_path / "a", run_config(outputs=str(tmp_path), exp_name="a")
    with ExitStack() as before:
        before.enter_context(open_folder(config, ALONE, "tiny.py"))
        first = saved(folder, 3)
        wait_for(monkeypatch, lambda: (saved(folder, 6), remove_checkpoint(first), before.close()))
        assert opened(tmp_path, exp_name="a", resume="auto").checkpoint == folder / "epoch0-global_step6"


def test_a_folder_that_is_given_up_meanwhile_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as before:
        place = before.enter_context(open_folder(run_config(outputs=str(tmp_path), exp_name="a"), ALONE, "tiny.py"))
        wait_for(monkeypatch, lambda: (give_up(place, ALONE), before.close()))
        assert opened(tmp_path, str(place.path), exp_name="a") == place
        assert (place.path / "config.py").exists()


def test_a_folder_that_another_launch_takes_before_it_is_locked_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = run_config(outputs=str(tmp_path), exp_name="a", resume="auto")
    with ExitStack() as stack:

        def made(outputs: Path, name: str) -> Path:
            path = make(outputs, name)
            monkeypatch.undo()
            assert stack.enter_context(open_folder(config, ALONE, "tiny.py")).path == path
            return path

        make = folder._new_folder
        monkeypatch.setattr(folder, "_new_folder", made)
        assert opened(tmp_path, exp_name="a").path == tmp_path / "a-2"


def damage(checkpoint: Path, how: str) -> None:
    shard = next(checkpoint.glob("*.safetensors"))
    match how:
        case "COMPLETE is missing":
            (checkpoint / "COMPLETE").unlink()
        case "COMPLETE is empty":
            (checkpoint / "COMPLETE").write_bytes(b"")
        case "a file is cut":
            os.truncate(shard, shard.stat().st_size - 1)
        case "a bit is flipped":
            shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
        case "run.json is missing":
            (checkpoint / "run.json").unlink()


DAMAGES = ("COMPLETE is missing", "COMPLETE is empty", "a file is cut", "a bit is flipped", "run.json is missing")


@pytest.mark.parametrize("how", DAMAGES)
def test_a_run_goes_on_from_its_last_whole_checkpoint_and_names_and_keeps_the_damaged_one(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = opened(tmp_path, exp_name="a").path
    whole, spoilt = saved(run, 3), saved(run, 6)
    damage(spoilt, how)
    assert opened(tmp_path, str(run), exp_name="a").checkpoint == whole
    assert f"{spoilt}: is damaged" in caplog.text
    assert (run / "epoch0-global_step6.damaged").is_dir()
    assert saved(run, 6) == spoilt, "its step can be saved again"
    assert opened(tmp_path, exp_name="a", resume="auto").checkpoint == spoilt


@pytest.mark.parametrize("how", DAMAGES)
def test_a_run_of_which_nothing_is_whole_does_not_begin_anew(tmp_path: Path, how: str) -> None:
    run = opened(tmp_path, exp_name="a").path
    for step in (3, 6):
        damage(saved(run, step), how)
    with pytest.raises(UserError, match=r"global_step6: is damaged .*, as are the 1 before it; none is left"):
        opened(tmp_path, str(run), exp_name="a")
    assert len(list(run.glob("epoch*"))) == 2


def test_the_next_start_removes_what_saves_and_removals_that_were_cut_off_have_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = opened(tmp_path, exp_name="a").path
    old, whole = saved(run, 3), saved(run, 6)
    (old / "COMPLETE").unlink()
    (run / "epoch0-global_step9.partial").mkdir()
    assert opened(tmp_path, str(run), exp_name="a").checkpoint == whole
    assert [path.name for path in run.glob("epoch*")] == [whole.name]
    assert "step3: removed" in caplog.text
    assert "step9.partial: removed" in caplog.text


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
    with open_folder(config, ALONE, "tiny.py") as place:
        save_config(place.path, config)
        assert read_run(str(place.path)).value == config
        changed = read_run(str(place.path), ["--lr", "0.5", "--start-epoch", "0"]).value
        save_config(place.path, changed)
    assert read_run(str(place.path)).value == config.model_copy(update={"lr": 0.5})
    assert sorted(path.name for path in place.path.glob("*.py")) == ["config.before-1.py", "config.py"]


def test_a_config_that_is_no_text_is_kept_and_one_without_end_refused(tmp_path: Path) -> None:
    config = read_run(str(write_config(tmp_path, tmp_path / "clips.parquet"))).value
    with open_folder(config, ALONE, "tiny.py") as place:
        (place.path / "config.py").write_bytes(b"\xff\x00")
        save_config(place.path, config)
        assert (place.path / "config.before-1.py").read_bytes() == b"\xff\x00"
        (place.path / "config.py").unlink()
        (place.path / "config.py").symlink_to("/dev/zero")
        with pytest.raises(UserError, match=r"config.py: cannot be kept .*no regular file"):
            save_config(place.path, config)


@pytest.mark.parametrize("moment", range(4))
def test_a_run_whose_settings_change_has_a_config_whatever_ends_it(
    tmp_path: Path, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = opened(tmp_path, exp_name="a")
    steps = iter(range(10))

    def full(call: Callable[..., Any]) -> Callable[..., Any]:
        def fails(*args: Any) -> Any:
            if next(steps) == moment:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args)

        return fails

    monkeypatch.setattr("os.replace", full(os.replace))
    monkeypatch.setattr("os.fsync", full(os.fsync))
    with pytest.raises(OSError, match=r"No space left on device .*make room"):
        opened(tmp_path, str(place.path), exp_name="a", lr=0.5)
    monkeypatch.undo()
    assert read_run(str(place.path)).value.lr in (1e-5, 0.5)


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
