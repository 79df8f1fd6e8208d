"""No file and no flag makes the reader execute, hang or crash: only ConfigError comes out, and soon."""

from __future__ import annotations

import contextlib
import cProfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longtake.config.faults import ConfigError
from longtake.config.load import load_config, resolve
from tests.config.schemas import AnyTree, Run

CALLS = 200_000_000  # of functions; the files below take 32 million at most, one that never ends takes billions
VALID = """_base_ = []
lr: float = 1e-5
_frames = {5: (1.0, 12), 9: (1.0, 12)}
optim = dict(cls="adamw", lr=lr * 2, betas=(0.9, 0.95))
bucket_config = {"256px": {1: (1.0, 50), **_frames}, "768px": dict(_delete_=True)}
model = dict(type="mmdit", depth=19, grad_ckpt_settings=(8, 100))
"""
VALID_TOML = """lr = 1e-5
[model]
depth = 19
grad_ckpt_settings = [8, 100]
[bucket_config.256px]
33 = [1.0, 12]
"""
PIECES = [
    "**",
    "_base_",
    "_delete_",
    "__import__('os')",
    "9**9",
    "*10**10",
    "lambda:",
    ".x",
    "for i in range(9)",
    "dict(",
]
PIECES += [*"[](){}:=-#'\\\n\0é\ufeff", '"""', "lr", "1e999"]
NASTY = {
    "import": "x = __import__('os').system('touch executed')",
    "power": "x = 9**9**9",
    "powers": "x = 2\n" + "x = x * x * x\n" * 50,
    "text": "x = 'a' * 10**10",
    "brackets": "x = " + "[" * 5000,
    "closed brackets": "x = " + "[" * 190 + "]" * 190,
    "dicts": "x = " + "{1:" * 190,
    "signs": "x = " + "-" * 400_000 + "1",
    "sum": "x = " + "1+" * 200_000 + "1",
    "attributes": "x = a" + ".a" * 200_000,
    "lambdas": "x = " + "lambda:" * 50_000 + "1",
    "laughs": "a = [1] * 20000\nb = [a] * 20000\nc = [b] * 20000\nd = [c, c]",
    "dict laughs": "a0 = dict(x=1, y=2)\n" + "".join(f"a{i + 1} = dict(x=a{i}, y=a{i})\n" for i in range(60)),
    "tower": "a0 = [1]\n" + "".join(f"a{i + 1} = [a{i}]\n" for i in range(3000)),
    "chain": "a0 = 1\n" + "".join(f"a{i + 1} = a{i} + 1\n" for i in range(4900)),
    "lines": "import x;" * 40_000,
    "targets": "a = " * 100_000 + "1",
    "numbers": "x = [" + "1," * 200_000 + "]",
    "own base": "_base_ = 'run.py'",
    "device": "_base_ = '/dev/zero'",
    "long base": f"_base_ = '{'a' * 5000}.py'",
    "null base": "_base_ = 'a\\0.py'",
    "big number": "x = 0x" + "f" * 400_000,
    "null byte": "x = 1\0",
    "surrogate": "'\\ud800'.x = 1",
}
NASTY_TOML = {
    "brackets": "x = " + "[" * 5000,
    "tables": "x = " + "{a=" * 5000,
    "number": "x = 0x" + "f" * 100_000,
    "own base": '_base_ = "run.toml"',
}


def read(path: Path, schema: type = AnyTree) -> ConfigError | None:
    """Read a file with a bounded number of calls; the error that came, which must be readable."""
    profile, error = cProfile.Profile(), None
    with profile:
        try:
            load_config(path, [], schema)
        except ConfigError as caught:
            error = caught
    assert sum(entry.callcount for entry in profile.getstats()) < CALLS
    if error is not None:
        assert all(str(fault) and "\n" not in str(fault) for fault in error.faults)
        assert len(str(error)) < 200_000
    return error


@pytest.mark.parametrize("name", NASTY)
def test_a_nasty_file_is_a_clear_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.py").write_text(NASTY[name], encoding="utf-8")
    assert read(Path("run.py"), Run) is not None
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.py"]


@pytest.mark.parametrize("name", NASTY_TOML)
def test_a_nasty_toml_file_is_a_clear_error(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(NASTY_TOML[name], encoding="utf-8")
    assert read(path) is not None


@st.composite
def mutated(draw: st.DrawFn, text: str) -> str:
    """A valid file with a few places cut out, doubled or filled with something else."""
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 20)))
        filling = draw(st.sampled_from([*PIECES, text[start:end] * 2, ""]) | st.text(max_size=4))
        text = text[:start] + filling + text[end:]
    return text


FUZZ = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(text=mutated(VALID) | st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
def test_no_python_text_brings_the_reader_down(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    read(path, Run)


@FUZZ
@given(text=mutated(VALID_TOML) | st.text())
def test_no_toml_text_brings_the_reader_down(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    read(path, Run)


@FUZZ
@given(data=st.binary(max_size=200))
def test_no_bytes_bring_the_reader_down(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.py"
    path.write_bytes(data)
    read(path)


FLAGS = ["--model", "--model.depth", "--bucket_config.256px.33", "--lr", "--optim.", '--tags."a', "--a=\\"]
FLAGS += ["[[[[", "{'_delete_': 1}", "9" * 5000, "['a' * 10**10]", "{1: {2: [3]}}", "(" * 5000, "\ud800"]
WORDS = st.text(max_size=20) | st.text(max_size=20).map("--".__add__) | st.sampled_from(FLAGS)


@settings(max_examples=300)
@given(words=st.lists(WORDS, max_size=6))
def test_no_flags_bring_the_reader_down(words: list[str]) -> None:
    for schema in (Run, AnyTree):
        with contextlib.suppress(ConfigError):
            resolve({"lr": 1, "model": {"depth": 2}}, words, schema)


def test_the_files_that_are_mutated_are_valid(tmp_path: Path) -> None:
    for name, text in (("run.py", VALID), ("run.toml", VALID_TOML)):
        (tmp_path / name).write_text(text)
        assert read(tmp_path / name, Run) is None
