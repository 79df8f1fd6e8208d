from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longtake.config.faults import ConfigError
from longtake.config.load import Heights, load_config
from longtake.config.tree import Branch
from longtake.dialects.table import UNSET, KeyRow, apply_rows, lay_defaults
from longtake.dialects.translation import Report, Translation

ROWS = (
    KeyRow("x", ours="a.b"),
    KeyRow("y", ours="a.b", convert=lambda value: value * 2),
    KeyRow("z", only=(1,), note="only one", reason="leave it out"),
    KeyRow("w.v", note="w.v is not needed"),
    KeyRow("s", ours="switched", on=7),
    KeyRow("k", ours="kind", values={"there": "here", "nothing": UNSET}),
    KeyRow("n", ours="count", least=2, ignored=(None,)),
    KeyRow("f", ours="c", beats_ours=True),
    KeyRow("d", ours="e", default=5, note="given"),
    KeyRow("read_by_code", docs="code converts it"),
)


class Renamed:
    """A dialect with one row of each kind."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def find(self, path: Path) -> Path | None:
        return path.with_name("root.py") if path.name == "old_root.py" else None

    def translate(self, tree: Branch, heights: Heights, report: Report) -> Branch:
        work = Translation(tree, heights, report, self.said.append)
        if work.get("defaults") is not None:
            lay_defaults(work, ROWS)
        apply_rows(work, ROWS)
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
    assert [line.split("): ")[1] for line in dialect.said] == ["only one", "w.v is not needed"]


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


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("s = True", {"switched": 7}),
        ("s = False\nc = 0", {"c": 0}),
        ("k = 'there'", {"kind": "here"}),
        ("k = 'nothing'\nc = 0", {"c": 0}),
        ("n = 2", {"count": 2}),
        ("n = None\nc = 0", {"c": 0}),
        ("f = 1\nc = 2", {"c": 1}),
        ("read_by_code = 3", {"read_by_code": 3}),
    ],
)
def test_row_of_each_kind_gives_its_value(text: str, tree: dict[str, Any], tmp_path: Path) -> None:
    assert speak(tmp_path, Renamed(), run=text) == tree


@pytest.mark.parametrize(
    ("text", "key", "rule"),
    [("k = 'else'", "k", "there, nothing"), ("n = 1", "n", "2 or more"), ("z = 2", "z", "must be 1")],
)
def test_value_that_a_row_does_not_have_is_refused(text: str, key: str, rule: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        speak(tmp_path, Renamed(), run=text)
    (fault,) = refused.value.faults
    assert fault.key == key
    assert rule in fault.rule


def test_default_is_used_unless_either_system_s_key_is_written(tmp_path: Path) -> None:
    dialect = Renamed()
    assert speak(tmp_path, dialect, run="defaults = 1") == {"defaults": 1, "e": 5}
    assert dialect.said == []  # a default is not announced
    assert speak(tmp_path, dialect, run="defaults = 1\nd = 6")["e"] == 6
    assert speak(tmp_path, dialect, run="defaults = 1\ne = 8")["e"] == 8
    assert [line.split(" (")[0] for line in dialect.said] == ["d = 6"]
