from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
import typer

from longtake import __version__
from longtake.cli import main
from longtake.cli.app import app
from longtake.cli.options import finite
from longtake.contracts import UserError

VERBS = (
    "train",
    "generate",
    "demo",
    "data",
    "data probe",
    "config",
    "config show",
    "checkpoint",
    "checkpoint list",
    "checkpoint inspect",
    "checkpoint verify",
    "checkpoint export",
)


def test_the_version_is_printed(longtake):
    assert longtake("--version") == (0, f"longtake {__version__}\n", "")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(longtake, verb: str):
    code, out, err = longtake(*verb.split(), "--help")
    assert (code, err) == (0, "")
    assert f"Usage: longtake {verb}" in out


def test_help_may_follow_run_and_overrides(longtake):
    code, out, _ = longtake("train", "run.py", "--lr", "1", "--help")
    assert code == 0
    assert "Usage: longtake train" in out


@pytest.mark.parametrize("group", [(), ("data",), ("config",), ("checkpoint",)])
def test_a_group_without_a_verb_prints_its_help(longtake, group: tuple[str, ...]):
    code, out, _ = longtake(*group)
    assert code == 0
    assert "Usage: longtake" in out
    assert "Commands" in out


def test_an_unknown_verb_is_answered_with_the_nearest_one(mistake):
    said = mistake("trian")
    assert "'trian'" in said
    assert "'train'" in said
    assert "longtake --help" in said


@pytest.mark.parametrize("verb", ["train", "generate", "config show"])
@pytest.mark.parametrize(("words", "found"), [((), "nothing"), (("--lr", "1"), "--lr")])
def test_a_missing_run_is_named(mistake, verb: str, words: tuple[str, ...], found: str):
    assert (
        mistake(*verb.split(), *words)
        == f"{verb}: found {found} where RUN is expected; write `longtake {verb} RUN --key value`"
    )


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("longtake.train.curriculum.train_all", fail)


def test_a_mistake_is_one_sentence_and_status_2(mistake, monkeypatch: pytest.MonkeyPatch):
    fail_with(monkeypatch, UserError("lr = 0: must be above 0"))
    assert mistake("train", "x.py") == "lr = 0: must be above 0"


def test_the_system_saying_no_is_one_sentence_too(mistake, monkeypatch: pytest.MonkeyPatch):
    fail_with(monkeypatch, PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/data/run"))
    assert mistake("train", "x.py").startswith("/data/run: Permission denied; ")
    fail_with(monkeypatch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert mistake("train", "x.py") == "No space left on device"


def test_a_file_in_the_place_of_a_folder_is_named(mistake, home: Path, tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    said = f"{file}: is a file, and a folder is wanted there; give another name, or move the file away"
    table = tmp_path / "clips.csv"
    table.write_text("path,text,num_frames,height,width,fps\na.mp4,x,9,32,32,8\n")
    assert mistake("train", home / "tiny.py", "--outputs", file) == said
    assert mistake("data", "shard", table, "-o", file / "deep" / "shards") == said
    assert mistake("data", "filter", table, "-o", file / "some.csv", "--where", "true") == said
    assert mistake("preset", "copy", "opensora_v2/image", file / "mine.py") == said
    assert mistake("data", "stats", table, "--frames", "0", "--html", tmp_path) == (
        f"{tmp_path}: is a folder, and a file is wanted there; give another name"
    )


def test_an_interrupt_is_status_130_and_says_so(longtake, monkeypatch: pytest.MonkeyPatch):
    fail_with(monkeypatch, KeyboardInterrupt())
    assert longtake("train", "x.py") == (130, "", "longtake: interrupted\n")


def test_what_nobody_foresaw_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch):
    fail_with(monkeypatch, ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        main(["train", "x.py"])


def test_under_torchrun_a_mistake_names_the_rank(longtake, monkeypatch: pytest.MonkeyPatch):
    fail_with(monkeypatch, UserError("no"))
    monkeypatch.setenv("RANK", "3")
    assert longtake("train", "x.py")[2] == "longtake (rank 3): no\n"


def test_torchrun_reports_a_mistake_of_all_ranks_once(longtake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fail_with(monkeypatch, UserError("no"))
    for rank in "01":
        (tmp_path / rank).mkdir()
        for name, value in {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "TORCHELASTIC_ERROR_FILE": f"{tmp_path}/{rank}/error.json",
        }.items():
            monkeypatch.setenv(name, value)
        if rank == "0":
            assert longtake("train", "x.py") == (2, "", "longtake: no\n")
    slept: list[float] = []

    def ended_by_torchrun(seconds: float) -> None:
        slept.append(seconds)
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", ended_by_torchrun)
    assert longtake("train", "x.py") == (0, "", ""), "it would list any other status"
    fail_with(monkeypatch, UserError("something else"))
    assert longtake("train", "x.py")[2].startswith("longtake (rank 1): something else")


def test_python_dash_m_is_the_same_command_and_a_closed_pipe_is_no_fault():
    shown = subprocess.run(
        f"{sys.executable} -m longtake --help | head -c 10", shell=True, capture_output=True, text=True, timeout=600
    )
    assert shown.stderr == ""
    wrong = subprocess.run(
        [sys.executable, "-m", "longtake", "train", "gone.py"], capture_output=True, text=True, timeout=600
    )
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("longtake: ")
    assert "Traceback" not in wrong.stderr


@pytest.mark.parametrize(("words", "answer"), [("longtake tr", "train"), ("longtake data st", "stats")])
def test_the_shell_is_told_how_a_word_goes_on(longtake, monkeypatch: pytest.MonkeyPatch, words: str, answer: str):
    for name, value in {"": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}.items():
        monkeypatch.setenv(name or "_LONGTAKE_COMPLETE", value)
    assert longtake() == (0, f"{answer}\n", "")
    monkeypatch.undo()
    assert "--install-completion" in longtake("--help")[1]


def test_what_steers_a_terminal_is_written_out_and_the_length_of_a_complaint_is_bounded(
    longtake, mistake, run, tmp_path
):
    words = "a \x1b[31mred\x1b]0;x\x07 cat\r\u202e"
    code, out, _ = longtake("generate", run.folder, "--prompt", words, "--num-steps", 1, "--save-dir", tmp_path)
    assert code == 0
    assert r"a \x1b[31mred\x1b]0;x\x07 cat\r\u202e" in out
    assert r"x\x1b[31m: " in mistake("generate", "x\x1b[31m")
    for verb in ("train", "generate", "checkpoint", ""):
        said = longtake(verb, "list" * (verb == "checkpoint") or "a" * 100_000, "b" * 100_000)[2]
        assert len(said) < 3000


def test_captions_steer_no_terminal_either(longtake, tmp_path: Path):
    table = tmp_path / "x.csv"
    table.write_text("path,text\n\x1b[31mx.mp4,\x1b[31mA red clip\n", encoding="utf-8")
    for words in (("stats", table), ("probe", table, "-o", tmp_path / "y.csv")):
        assert "\x1b" not in "".join(map(str, longtake("data", *words)))


def test_no_option_takes_a_number_that_is_none(mistake):
    """Bounds of a command line's options let nan pass, and inf where there is none."""

    def callbacks(group: typer.Typer) -> Iterator[Callable[..., object]]:
        yield from (command.callback for command in group.registered_commands)
        for inner in group.registered_groups:
            yield from callbacks(inner.typer_instance)

    hints = [hint for verb in callbacks(app) for hint in get_type_hints(verb, include_extras=True).values()]
    floats = [get_args(hint) for hint in hints if get_origin(hint) is Annotated]
    found = [info for kind, info in floats if float in (kind, *get_args(kind))]
    assert len(found) > 8
    assert all(info.callback is finite for info in found)
    for word in ("nan", "inf", "1e300"):
        said = mistake("checkpoint", "export", "run", "x.safetensors", "--max-file-gb", word)
        assert "is no number that can be used" in said
