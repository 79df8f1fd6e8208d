"""What a command imports before it answers, counted in modules: seconds would be the machine's.

`benchmarks/startup.py` measures the seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from longtake.cli.app import app
from tests.train.runs import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "numpy", "pyarrow", "duckdb", "av", "PIL", "safetensors", "tensorboard", "transformers", "diffusers"}
MOST_MODULES = 430  # typer and rich alone take 330; torch takes 1,500

# Runs command lines one after the other in one interpreter, and says of each which modules it brought in.
COUNTED = """
import json, sys
from longtake.cli import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as done:
        print("\\n" + json.dumps([words, done.code, list(sys.modules)]), file=sys.stderr)
"""


def verbs(command: object, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from verbs(inner, (*words, name))


def modules_after(*lines: tuple[str, ...]) -> dict[tuple[str, ...], set[str]]:
    """Command line -> the modules in memory after it and those before it; all of them end well."""

    words = [sys.executable, "-c", COUNTED, json.dumps(lines)]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    told = [json.loads(line) for line in done.stderr.splitlines() if line]
    assert len(told) == len(lines), done.stderr
    assert {code for _, code, _ in told} == {0}, done.stderr
    return {tuple(line): set(modules) for line, _, modules in told}


def test_help_imports_the_command_line_and_nothing_else() -> None:
    lines = [(*words, "--help") for words in verbs(typer.main.get_command(app))]
    assert len(lines) > 15
    for line, modules in modules_after(*lines).items():
        assert modules & (HEAVY | {"pydantic"}) == set(), f"longtake {' '.join(line)}"
        assert len(modules) < MOST_MODULES, f"longtake {' '.join(line)}"


def test_what_only_reads_imports_no_tensors(home: Path) -> None:
    """The run file, the table and the folder are those of a finished run."""
    lines = (
        ("checkpoint", "list", str(home / "outputs")),
        ("config", "show", str(home / "tiny.py")),
        ("config", "show", str(ROOT / "configs/opensora_v2/inference/t2i2v_256px.py")),
        ("data", "stats", str(home / "clips/clips.parquet")),
    )
    after = modules_after(*lines)
    assert after[lines[0]] & HEAVY == set()
    assert after[lines[2]] & HEAVY == {"numpy"}
    assert after[lines[3]] & HEAVY <= {"numpy", "pyarrow", "av", "PIL"}


def interrupted(folder: Path, module: str, text: str) -> tuple[int, str]:
    """Exit status and standard error of `longtake train`, where importing `module` does what `text` says."""
    (folder / f"{module}.py").write_text(text, encoding="utf-8")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    words = [sys.executable, "-m", "longtake", "train", "run.py"]
    done = subprocess.run(words, env=variables, cwd=folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    return done.returncode, done.stderr


CTRL_C = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(1e6)\n"
SWALLOWED = (
    "import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(1e6)\nexcept:\n    pass\n"
)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        pytest.param("typer", CTRL_C, id="of the command itself"),
        pytest.param("torch", CTRL_C, id="of the verb"),
        pytest.param("typer", CTRL_C.replace("SIGINT", "SIGTERM"), id="SIGTERM"),
        pytest.param("torch", CTRL_C.replace("SIGINT", "SIGUSR1"), id="SIGUSR1"),
        pytest.param("torch", SWALLOWED, id="swallowed, so that names are missing"),
        pytest.param("torch", "exec('raise KeyboardInterrupt')", id="inside code made from text, as dataclasses make"),
    ],
)
def test_an_interrupt_during_imports_is_status_130_and_no_traceback(tmp_path: Path, module: str, text: str) -> None:
    assert interrupted(tmp_path, module, text) == (130, "longtake: interrupted\n")


@pytest.mark.parametrize(("name", "is_last"), [("SIGINT", True), ("SIGTERM", True), ("SIGTERM", False)])
def test_a_signal_that_comes_when_the_work_is_done_does_not_change_its_status(name: str, is_last: bool):
    code = f"""
import atexit, os, signal
def end():  # of a library: when the interpreter ends, or before
    atexit.register(os.kill, os.getpid(), signal.{name})
if {is_last}: end()
from longtake.cli import app, main
run = app.run
app.run = lambda *words: ({is_last} or end(), run(*words))[1]
main(["--version"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert (done.returncode, done.stderr) == (0, "")
