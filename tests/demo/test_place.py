from __future__ import annotations

from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.demo.place import Note, choose_folder, find_run, free_folder, read_note


def unfinished(folder: Path) -> Path:
    Note([], 6, 2).save(folder)
    return folder


def finished(folder: Path) -> Path:
    (unfinished(folder) / "report.html").write_text("done")
    return folder


def test_a_demo_begins_in_a_new_or_empty_folder(tmp_path: Path):
    assert choose_folder(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    assert choose_folder(tmp_path / "demo") == tmp_path / "demo"


def test_an_unfinished_demo_goes_on(tmp_path: Path):
    assert choose_folder(unfinished(tmp_path / "demo")) == tmp_path / "demo"


def test_beside_a_finished_demo_a_new_one_is_made_or_goes_on(tmp_path: Path):
    finished(tmp_path / "demo")
    assert choose_folder(tmp_path / "demo") == tmp_path / "demo-2"
    unfinished(tmp_path / "demo-2")
    assert choose_folder(tmp_path / "demo") == tmp_path / "demo-2"
    finished(tmp_path / "demo-2")
    assert choose_folder(tmp_path / "demo") == tmp_path / "demo-3"


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "clips.csv").write_text("precious")
    assert choose_folder(tmp_path / "mine") == tmp_path / "mine-2"
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        choose_folder(tmp_path / "file")


def test_a_note_remembers_what_was_asked_for_and_how_long_it_took(tmp_path: Path):
    note = read_note(tmp_path, ["--lr", "1"], 60, 12)
    note.seconds["train"] = 2.5
    note.save(tmp_path)
    assert read_note(tmp_path, ["--seed", "3"], 1440, 180) == Note(["--lr", "1", "--seed", "3"], 60, 12, {"train": 2.5})


def test_a_damaged_note_is_named(tmp_path: Path):
    (tmp_path / "demo.json").write_text('{"overrides": [], "num_clips": "many"}')
    with pytest.raises(UserError, match=r"demo\.json: is damaged"):
        read_note(tmp_path, [], 60, 12)


def test_only_a_run_with_a_config_is_continued(tmp_path: Path):
    (tmp_path / "run").mkdir()  # killed before its config was written
    assert find_run(tmp_path) is None
    (tmp_path / "run-2").mkdir()
    (tmp_path / "run-2" / "config.py").write_text("")
    assert find_run(tmp_path) == tmp_path / "run-2"


def test_a_taken_folder_gets_a_number(tmp_path: Path):
    assert free_folder(tmp_path / "samples") == tmp_path / "samples"
    (tmp_path / "samples").mkdir()
    assert free_folder(tmp_path / "samples") == tmp_path / "samples-2"
