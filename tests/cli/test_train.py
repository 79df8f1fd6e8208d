from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from longtake.train.run import Outcome


def test_training_ends_with_a_checkpoint_and_status_0(longtake, home: Path, tmp_path: Path):
    code, out, err = longtake("train", home / "tiny.py", "--outputs", tmp_path, "--max-steps=1")
    assert (code, err) == (0, "")
    assert f"run folder: {tmp_path / 'run'}" in out
    assert "20 of 20 clips used" in out
    assert f"done at step 1; checkpoint: {tmp_path / 'run' / 'epoch0-global_step1'}\n" in out


def test_a_stopped_run_is_status_130(longtake, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def stopped(run: str, overrides: list[str], console: None, dialect: None) -> SimpleNamespace:
        asked.append((run, overrides))
        return SimpleNamespace(stopped=True)

    monkeypatch.setattr("longtake.train.curriculum.train_run", stopped)
    assert longtake("train", "run.py", "--a.b-c", "-1", "--wandb")[0] == 130
    assert asked == [("run.py", ["--a.b-c", "-1", "--wandb"])]


def test_mistakes_are_one_sentence(mistake, home: Path, tmp_path: Path):
    assert "did you mean max_steps?" in mistake("train", home / "tiny.py", "--max-step", "2")
    assert "gone.parquet" in mistake(
        "train", home / "tiny.py", "--dataset.data_path", "gone.parquet", "--outputs", tmp_path
    )
    assert "no config.py in it" in mistake("train", tmp_path)


def test_the_library_can_be_imported_without_the_command_line():
    code = "import longtake.models.mmdit, sys; sys.exit('typer' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600).returncode == 0


def test_the_demo_config_is_a_module_that_does_nothing_when_it_is_imported():
    found = importlib.util.find_spec("longtake.presets.demo.shapes")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert module.bucket_config


def test_weights_of_another_size_than_tiny_are_told_so(longtake, mistake, run: Outcome, home: Path, tmp_path: Path):
    full = tmp_path / "full.safetensors"
    assert longtake("checkpoint", "export", run.folder, full)[0] == 0
    words = ("train", home / "tiny.py", "--model.from-pretrained", full, "--outputs", tmp_path / "outputs")
    assert mistake(*words, "--tiny").endswith("--tiny has made the model small: leave it out, or the weights")
    assert "--tiny" not in mistake(*words, "--model.depth", "2")


def test_clips_in_the_place_of_a_run_are_told_where_they_belong(mistake, tmp_path: Path):
    table = tmp_path / "clips.parquet"
    table.touch()
    for run in (table, tmp_path):
        assert f"`longtake train custom --dataset.data-path {run}`" in mistake("train", run)


def test_a_misspelt_run_folder_gets_the_nearest(mistake, run: Outcome):
    near = str(run.folder)[:-1] + "m"
    for verb in ("train", "generate", "plan"):
        assert f"{near}: there is no such file, folder or preset; did you mean {run.folder}?" == mistake(verb, near)
