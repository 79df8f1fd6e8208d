from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longtake.config import ConfigError, Heights, load_config
from longtake.config.tree import Branch, plain
from longtake.dialects.translation import Fixed, Report, Translation


class Renamed:
    """A dialect that calls `a.b` `x`, takes `y` for `a.b` doubled, and knows `z` with the value 1 only."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def find(self, path: Path) -> Path | None:
        return path.with_name("root.py") if path.name == "old_root.py" else None

    def translate(self, tree: Branch, heights: Heights, report: Report) -> Branch:
        work = Translation(tree, heights, report, self.said.append)
        work.move({"x": "a.b"})
        if (node := work.take("y")) is not None:
            work.put("a.b", plain(node) * 2, node, "y")
        work.fix({"z": Fixed((1,), "one is what there is", "leave it out")})
        work.leave({"w.v": "w.v is not needed"})
        return work.tree


def speak(folder: Path, dialect: Renamed, *flags: str, **files: str) -> dict[str, Any]:
    """The tree of the last file."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return load_config(folder / f"{name}.py", flags, dict[str, Any], dialect=dialect).tree


def test_a_word_gets_its_place(tmp_path: Path) -> None:
    assert speak(tmp_path, Renamed(), run="x = 3\nc = 1") == {"a": {"b": 3}, "c": 1}
    assert speak(tmp_path, Renamed(), run="a = dict(d=1)\ny = 3") == {"a": {"d": 1, "b": 6}}


def test_a_child_counts_upon_its_base_and_a_flag_upon_both(tmp_path: Path) -> None:
    base, child = "a = dict(b=1)", "_base_ = 'base.py'\nx = 2"
    assert speak(tmp_path, Renamed(), base=base, run=child) == {"a": {"b": 2}}
    assert speak(tmp_path, Renamed(), base="x = 2", run="_base_ = 'base.py'\na = dict(b=1)") == {"a": {"b": 1}}
    assert speak(tmp_path, Renamed(), "--a.b", "5", base=base, run=child) == {"a": {"b": 5}}
    assert speak(tmp_path, Renamed(), "--x", "5", base="x = 2", run="_base_ = 'base.py'\na = dict(b=1)") == {
        "a": {"b": 5}
    }
    assert speak(tmp_path, Renamed(), "--x", "5", "--a.b", "5", base=base, run=child) == {"a": {"b": 5}}


def test_two_words_of_one_file_that_differ_are_a_fault(tmp_path: Path) -> None:
    assert speak(tmp_path, Renamed(), run="x = 4\ny = 2") == {"a": {"b": 4}}
    with pytest.raises(ConfigError) as refused:
        speak(tmp_path, Renamed(), run="x = 4\ny = 3")
    (fault,) = refused.value.faults
    assert (fault.key, fault.value, fault.fix) == ("y", "3", "keep one of the two")  # as written, not as translated
    assert fault.place.endswith("run.py:2")


def test_what_is_not_needed_goes_with_a_word_and_an_empty_section_with_it(tmp_path: Path) -> None:
    dialect = Renamed()
    assert speak(tmp_path, dialect, run="z = 1\nw = dict(v=2)\nc = 0") == {"c": 0}
    assert [line.split(" (")[0] for line in dialect.said] == ["z = 1", "w.v = 2"]
    assert [line.split("): ")[1] for line in dialect.said] == ["one is what there is", "w.v is not needed"]


def test_a_base_that_is_not_there_may_be_elsewhere(tmp_path: Path) -> None:
    files = {"root": "x = 1\nc = 2", "run": "_base_ = 'old_root.py'\ny = 3"}
    assert speak(tmp_path, Renamed(), **files) == {"a": {"b": 6}, "c": 2}
    with pytest.raises(ConfigError, match=r"names the base .*, which does not exist"):
        speak(tmp_path, Renamed(), run="_base_ = 'no_root.py'")


def test_true_is_not_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"z = True .*: must be 1 here; leave it out"):
        speak(tmp_path, Renamed(), run="z = True")


def test_a_base_that_two_files_share_stands_below_both(tmp_path: Path) -> None:
    files = {"root": "x = 1", "left": "_base_ = 'root.py'\na = dict(b=2)", "run": "_base_ = ['left.py']\nx = 3"}
    assert speak(tmp_path, Renamed(), **files) == {"a": {"b": 3}}
