"""What files may say, and that they are never executed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from longtake.config.load import load_config
from longtake.config.section import Section
from tests.config.schemas import Run, faults, load, write

READ = {
    "x = 1": 1,
    "x: int = 0x10": 16,
    "x = -1.5e-3": -0.0015,
    "x = 25 * 2**30": 25 * 2**30,
    "x = 7 // 2 + 7 % 4 - 8 / 4": 4.0,
    "x = 'a' 'b' + \"c\"": "abc",
    "x = 'ab' * 2": "abab",
    "x = 2 * [1]": [1, 1],
    "x = True": True,
    "x = None": None,
    "x = [1, (2,), [3]]": [1, (2,), [3]],
    "x = [1] + [2] * 2": [1, 2, 2],
    "x = dict(a=1, b={'c': 2, 3: 4})": {"a": 1, "b": {"c": 2, 3: 4}},
    "y = dict(a=1)\nx = dict(y, b=2)": {"a": 1, "b": 2},
    "_y = dict(a=1, b=0)\nx = {**_y, 'b': 2}": {"a": 1, "b": 2},
    "a = x = 3": 3,
    '"""A text that stands alone is a comment."""\nx = 1': 1,
    "\ufeffx = 1\r\n": 1,
}

# Text of the file -> what the fault must say.
REFUSED = {
    "import os": "is not an assignment",
    "__import__('os').system('true')": "is not an assignment",
    "x = __import__('os')": "never executed",
    "x = open('/etc/passwd')": "never executed",
    "x = dict.__class__": "cannot stand",
    "x = (lambda: 1)()": "never executed",
    "x = lambda: 1": "cannot stand",
    "x = (y := 1)": "cannot stand",
    "x = 1 if True else 2": "cannot stand",
    "x = f'{1}'": "cannot stand",
    "x = {1, 2}": "cannot stand",
    "x = 1 < 2": "cannot stand",
    "x = b'a'": "is not a value",
    "x = ...": "is not a value",
    "x = 1j": "is not a value",
    "x = not True": "is not arithmetic",
    "x = 1 | 2": "is not arithmetic",
    "x = '%9999999999d' % 1": "cannot be computed",
    "x = 'a' + 1": "cannot be computed",
    "x = True + 1": "cannot be computed",
    "x = 1 / 0": "divides by zero",
    "x = 9**9**9": "too large",
    "x = 2**-1e400": "finite",
    "x = (-8) ** 0.5": "is not a value",
    "x = 'a' * 10**10": "too large",
    "x = [1] * 10**10": "too large",
    "x = 'ab' * 10**300": "too large",
    "x = [1, 2][0]": "cannot stand",
    "x = [i for i in (1, 2)]": "cannot stand",
    "x = {i: 1 for i in (1, 2)}": "cannot stand",
    "x = [*(1, 2)]": "cannot stand",
    "x = list((1, 2))": "never executed",
    "y = [1] * 1000\nx = [y] * 1000": "too large",
    "x = [] * 10**300": "too large",
    "x = [1] * -10**300": "too large",
    "x = {1: 1, '1': 2}": "same entry",
    "x = {1.5: 1}": "cannot be a key",
    "x = dict(_delete_=3)": "_delete_ must be True or False",
    "_delete_ = True": "stands alone",
    "a, b = 1, 2": "is not an assignment",
    "x += 1": "is not an assignment",
    "for x in []: pass": "is not an assignment",
    "def x(): pass": "is not an assignment",
    "lr = 1\nx = lrr": "did you mean lr?",
    "x = y\ny = 1": "is not defined above",
    "x = dict": "is not defined above",
    "x = ": "is not Python syntax",
    "x = 1\0": "null byte",
    "_base_ = 3": "_base_ is not a path",
}


@pytest.mark.parametrize("text", READ)
def test_literals_names_and_arithmetic_mean_what_they_mean_in_python(tmp_path: Path, text: str) -> None:
    value = load(write(tmp_path, run=text))["x"]
    assert repr(value) == repr(READ[text])


@pytest.mark.parametrize("text", REFUSED)
def test_everything_else_is_a_fault_with_file_and_line(tmp_path: Path, text: str) -> None:
    found = faults(write(tmp_path, run=text))
    assert len(found) == 1
    assert REFUSED[text] in str(found[0])
    assert found[0].place == f"{tmp_path}/run.py:{text.rstrip().count(chr(10)) + 1 if 'y = 1' not in text else 1}"


def test_names_that_start_with_an_underscore_are_no_keys(tmp_path: Path) -> None:
    assert load(write(tmp_path, run="_half = 0.5\nx = _half * 3")) == {"x": 1.5}


def test_every_faulty_line_and_entry_is_reported_at_once(tmp_path: Path) -> None:
    found = faults(write(tmp_path, run="import os\nx = dict(a=foo, b=open('f'), c=1)\ny = 1 / 0\nz = y"))
    assert [fault.place.rpartition(":")[2] for fault in found] == ["1", "2", "2", "3"]


def test_toml_says_the_same_as_python(tmp_path: Path) -> None:
    text = "lr = 1e-3\n[model]\ndepth = 3\ngrad_ckpt_settings = [8, 100]\n[bucket_config.256px]\n33 = [1.0, 12]\n"
    resolved = load_config(write(tmp_path, run_toml=text), [], Run)
    python = "lr = 1e-3\nmodel = dict(depth=3, grad_ckpt_settings=[8, 100])\nbucket_config = {'256px': {33: [1.0, 12]}}"
    assert resolved.value == load_config(write(tmp_path, run=python), [], Run).value
    assert resolved.tree["bucket_config"] == {"256px": {33: [1.0, 12]}}
    assert str(resolved.origins["model.depth"]) == f"{tmp_path}/run.toml"
    assert str(resolved.origins["bucket_config.256px.33"]) == f"{tmp_path}/run.toml"


def test_toml_and_python_files_inherit_from_each_other(tmp_path: Path) -> None:
    base = "lr = 1\noptim = dict(lr=lr)\nbucket = {33: 1, 65: 2}"
    top = write(tmp_path, base=base, run_toml='_base_ = "base.py"\nlr = 2\n[bucket]\n33 = 5\n')
    assert load(top) == {"lr": 2, "optim": {"lr": 2}, "bucket": {33: 5, 65: 2}}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("x = 2020-01-01", "write dates and the like as text"),
        ("x = [nan]", "is not a finite number"),
        ("x = 1\nx = 2", "is not TOML"),
        ("x = 1\ny = red", "y = red (PLACE:2): is not TOML"),
        ("x = 1\n[a.b]\nc-d = TODO # set", "a.b.c-d = TODO (PLACE:3): is a placeholder"),
        ("x = " + "[" * 3000, "is not TOML"),
        ("_x = 1", "is no key"),
        ("x = 0x" + "f" * 5000, "too large"),
    ],
)
def test_toml_beyond_the_values_of_a_configuration_is_a_fault(tmp_path: Path, text: str, rule: str) -> None:
    file = write(tmp_path, run_toml=text)
    assert rule.replace("PLACE", str(file)) in str(faults(file)[0])


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(b"x = 1\ny = '\xe9'\n")
    (tmp_path / "big.py").write_text("#" * 2_000_000)
    (tmp_path / "folder.py").mkdir()
    reasons = {"none.py": "No such file", "latin.py": "UTF-8", "big.py": "too large", "folder.py": "directory"}
    os.mkfifo(tmp_path / "pipe.py")
    reasons["pipe.py"] = "no regular file"
    for name, reason in reasons.items():
        found = faults(tmp_path / name)
        assert reason in found[0].rule
        assert found[0].place.startswith(str(tmp_path / name))
    assert "must end in .py or .toml" in str(faults(tmp_path / "run.yaml")[0])


def test_bad_flags_are_reported_beside_an_unreadable_file(tmp_path: Path) -> None:
    assert len(faults(tmp_path / "none.py", "stray")) == 2


def test_places_below_the_working_directory_are_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert faults(write(tmp_path, run="x = foo"))[0].place == "run.py:1"


def test_a_section_is_frozen_and_checks_its_own_defaults() -> None:
    class Wrong(Section):
        depth: int = "deep"  # type: ignore[assignment]

    with pytest.raises(ValueError, match="depth"):
        Wrong()
    with pytest.raises(ValueError, match="frozen"):
        Run().lr = 2.0
