from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from tests.generate.runs import CONFIG

CONFIGS = Path(__file__).parents[2] / "configs"


def write(folder: Path) -> Path:
    text = CONFIG.format(table="", outputs="outputs").replace("lr = 1e-2", "lr = 1e-3\noptim = dict(lr=lr)")
    (folder / "base.py").write_text("\n".join(line for line in text.splitlines() if not line.startswith("dataset")))
    run = folder / "run.py"
    run.write_text('_base_ = "base.py"\n\ndataset = dict(data_path="clips [1].csv")\n')
    return run


def test_every_value_is_shown_with_where_it_comes_from(longtake, tmp_path: Path):
    code, out, _ = longtake("config", "show", write(tmp_path), "--seed", "3", "--wandb")
    lines = dict(line.split(" = ", 1) for line in out.splitlines())
    assert code == 0
    assert lines["dataset.data_path"] == f"'clips [1].csv'  # {tmp_path}/run.py:3"
    assert lines["lr"].startswith(f"0.001  # {tmp_path}/base.py:")
    assert lines["seed"] == "3  # --seed"
    assert lines["wandb"] == "True  # --wandb"
    assert lines["load"] == "None  # default"


def test_a_flag_shows_what_follows_from_it(longtake, tmp_path: Path):
    _, out, _ = longtake("config", "show", write(tmp_path), "--lr", "0.5")
    (line,) = (line for line in out.splitlines() if line.startswith("optim.lr"))
    assert line.startswith("optim.lr = 0.5")
    assert "--lr" in line


def test_rate_that_a_schedule_replaces_is_not_shown(longtake) -> None:
    for stage, is_shown in (("lambda_3", True), ("lambda_4", False)):
        _, out, _ = longtake("config", "show", f"opensora_v1_2/{stage}", "--dataset.data-path", "x.csv")
        assert any(line.startswith("lr = ") for line in out.splitlines()) == is_shown


def test_a_terminal_shows_the_same_as_a_table(longtake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    screen = io.StringIO()
    monkeypatch.setattr(
        "longtake.track.progress.make_console", lambda: Console(file=screen, force_terminal=True, width=60)
    )
    code, _, _ = longtake("config", "show", write(tmp_path), "--optim.betas", "(0.5, 0.75)")
    assert code == 0
    assert "data_path" in screen.getvalue()
    assert "(0.5, 0.75)" in screen.getvalue()
    assert "'clips [1].csv'" in screen.getvalue()
    assert "default" in screen.getvalue()


def test_the_config_of_a_finished_run_can_be_shown(longtake, run):
    code, out, _ = longtake("config", "show", run.folder)
    assert code == 0
    assert f"max_steps = 3  # {run.folder}/config.py:" in out


def test_all_faults_come_at_once_each_in_its_line(longtake, tmp_path: Path):
    code, _, err = longtake("config", "show", write(tmp_path), "--lrr", "1", "--seed", "-4")
    assert code == 2
    assert "did you mean lr?" in err
    assert "seed = -4 (--seed)" in err
    assert "Traceback" not in err


def test_a_missing_file_and_a_folder_that_is_no_run_are_named(mistake, tmp_path: Path):
    assert "gone.py" in mistake("config", "show", tmp_path / "gone.py")
    assert "no config.py in it" in mistake("config", "show", tmp_path)


def test_a_run_file_of_generation_is_shown_as_what_it_is(longtake, mistake, tmp_path: Path):
    preset = CONFIGS / "opensora_v2" / "inference" / "768px.py"
    code, out, err = longtake(
        "config", "show", preset, "--num-frames", "33", "--prompt", "rain", "--lora", "a.safetensors"
    )
    lines = dict(line.split(" = ", 1) for line in out.splitlines())
    assert (code, err) == (0, "")
    assert re.fullmatch(r"'768px'  # .*inference/768px\.py:6", lines["sampling_option.resolution"])
    assert lines["sampling_option.num_frames"] == "33  # --sampling_option.num_frames"
    assert lines["lora.from_pretrained"] == "'a.safetensors'  # --lora.from_pretrained"
    assert lines["prompt"] == "'rain'  # --prompt"
    assert re.fullmatch(r"'samples'  # .*inference/256px\.py:\d+", lines["save_dir"])
    assert lines["grid"] == "False  # default"
    _, out, _ = longtake("config", "show", preset, "--tiny")
    assert "sampling_option.num_frames = 17  # --tiny\n" in out
    assert "save_dirr" in mistake("config", "show", preset, "--save-dirr", tmp_path)


@pytest.mark.parametrize("name", ["opensora_v2/train/stage1", "custom"])
def test_a_run_file_of_training_is_shown_as_what_it_is(longtake, name: str):
    _, out, _ = longtake("config", "show", CONFIGS / f"{name}.py", "--dataset.data-path", "clips.csv")
    assert "dataset.data_path = 'clips.csv'  # --dataset.data_path\n" in out
    assert "save_dir" not in out
