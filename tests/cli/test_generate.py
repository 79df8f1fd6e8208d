from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from longtake.data.clips.video import write_image, write_video
from longtake.train.run import Outcome

RED = "a red circle [moves] left, slowly"
CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = CONFIGS / "opensora_v2" / "inference"


def test_a_run_makes_videos_and_says_where_they_are(longtake, run: Outcome, tmp_path: Path):
    code, out, err = longtake("generate", run.folder, "--prompt", RED, "--save-dir", tmp_path, "--grid")
    folder = tmp_path / "video_32px"
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"weights: averaged (ema), from {run.checkpoint}",
        f"1 video in {folder}",
        f"contact sheet: {folder / 'grid.png'}",
        f"{folder / 'prompt_0000.mp4'}  seed 7  {RED}",
    ]
    assert {path.name for path in folder.iterdir()} == {"grid.png", "prompt_0000.mp4", "prompt_0000.txt"}


def test_prompts_stay_text_whatever_they_look_like(longtake, run: Outcome, tmp_path: Path):
    for number, prompt in enumerate(("123", "true", "a: b = c", "-1", "un été")):
        code, out, err = longtake("generate", run.folder, "--prompt", prompt, "--save-dir", tmp_path / str(number))
        assert (code, err) == (0, "")
        assert out.endswith(f"  {prompt}\n")


def test_an_exported_file_makes_videos_by_itself(longtake, run: Outcome, tmp_path: Path):
    file = tmp_path / "weights.safetensors"
    assert longtake("checkpoint", "export", run.folder, file)[0] == 0
    code, out, _ = longtake("generate", file, "--prompt", RED, "--save-dir", tmp_path / "made")
    assert code == 0
    assert out.startswith(f"weights: from {file}\n")
    assert (tmp_path / "made" / "video_32px" / "prompt_0000.mp4").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "nothing to generate"),
        (("--prompts", "gone.txt"), "prompts = 'gone.txt': cannot be read (No such file or directory)"),
        (("--prompt", RED, "--sampling_option.aspect_ratio", "wide"), "aspect ratio 'wide'"),
        (("--prompt", RED, "--sampling_option.num_frames", "12"), "12 frames do not divide into whole blocks"),
        (("--prompt", RED, "--sampling-option.num-frame", "8"), "did you mean sampling_option.num_frames?"),
        (("--prompt", RED, "--batch-size", "0"), "batch_size = 0 (--batch_size)"),
        (("--prompt", RED, "--lora-scale", "0.8"), "lora.strength = 0.8 (--lora.strength): there are no adapters"),
    ],
)
def test_mistakes_are_one_sentence(mistake, run: Outcome, tmp_path: Path, flags: tuple[str, ...], said: str):
    assert said in mistake("generate", run.folder, "--save-dir", tmp_path / "made", *flags)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["opensora_v2/train/stage1", "opensora_v2/train/curriculum", "custom"])
def test_a_run_file_of_training_is_told_from_one_of_generation(mistake, name: str):
    key = "stages" if name.endswith("curriculum") else "bucket_config"
    for flags in ((), ("--tiny",)):
        said = mistake("generate", CONFIGS / f"{name}.py", "--prompt", RED, *flags)
        assert said.startswith(f"{CONFIGS / f'{name}.py'}: has {key}, so it is a run file of training; give the folder")
        assert f"such as outputs/{'custom' if name == 'custom' else 'NAME'}, " in said


def test_the_saved_config_of_a_run_leads_to_its_folder(mistake, run: Outcome):
    said = mistake("generate", run.folder / "config.py", "--prompt", RED)
    assert f"give the folder of the run that it trained, such as {run.folder}, a file" in said


def test_sigterm_in_the_middle_of_a_file_leaves_none(longtake, run: Outcome, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("longtake.durable.os.replace", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody listens"))
    try:
        code, _, err = longtake("generate", run.folder, "--prompt", RED, "--save-dir", tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (code, err) == (130, "longtake: interrupted\n")
    assert list((tmp_path / "video_32px").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(mistake, run: Outcome, tmp_path: Path):
    (tmp_path / "taken").write_text("a file")
    said = mistake("generate", run.folder, "--prompt", RED, "--save-dir", tmp_path / "taken")
    assert str(tmp_path / "taken") in said


def test_a_preset_makes_tiny_videos_from_images_and_from_text(longtake, tmp_path: Path):
    write_image(tmp_path / "a.png", np.zeros((40, 64, 3), np.uint8))
    (tmp_path / "t.csv").write_text("text,ref,name\nrain,a.png,one\nsea,,two\n")
    flags = ("--tiny", "--num-frames", "5", "--num-steps", "2", "--save-dir", tmp_path / "made", "--seed", "0")
    i2v = ("--prompts", tmp_path / "t.csv", "--cond-type", "i2v_head")
    code, out, err = longtake("generate", PRESETS / "256px.py", *flags, *i2v)
    folder = tmp_path / "made" / "video_32px"
    assert (code, err) == (0, "")
    assert out.splitlines()[1:] == [
        f"2 videos in {folder}; 1 of them without a ref, made as t2v",
        f"{folder / 'one.mp4'}  seed 0  rain",
        f"{folder / 'two.mp4'}  seed 1  sea",
    ]
    code, out, err = longtake("generate", PRESETS / "t2i2v_256px.py", *flags, "--prompt", "raining, sea")
    assert (code, err) == (0, "")
    assert f"1 image in {tmp_path / 'made' / 'generated_condition'}" in out


def test_faults_of_references_are_named_at_once_before_a_model_is_built(mistake, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("longtake.generate.run.build_system", lambda *_: pytest.fail("a model was built"))
    write_video(tmp_path / "short.mp4", np.zeros((5, 32, 32, 3), np.uint8), 24)
    (tmp_path / "t.csv").write_text("text,ref\na,gone.png\nb,\nc,short.mp4\n,\n")
    flags = (
        "generate",
        PRESETS / "256px.py",
        "--tiny",
        "--save-dir",
        tmp_path / "made",
        "--prompts",
        tmp_path / "t.csv",
    )
    said = mistake(*flags, "--cond-type", "v2v_head")
    assert "text is empty in row 4; ref 'gone.png': no such file in row 1; ref " in said
    assert "has 5 frames at 24 FPS" in said
    assert said.endswith("in row 3; mend these rows, or take them out")
    (tmp_path / "t.csv").write_text("text\na\n")
    assert 'cond_type = "v2v_head": no prompt has a reference' in mistake(*flags, "--cond-type", "v2v_head")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("key", ["model", "ae", "t5", "clip"])
def test_weights_that_are_not_there_are_named_before_a_model_is_built(mistake, monkeypatch, key: str, tmp_path: Path):
    monkeypatch.setattr("longtake.generate.run.build_system", lambda *_: pytest.fail("a model was built"))
    section = {
        "model": ("--model.patch-size", "2"),
        "ae": ("--ae", '{"_delete_": True, "type": "autoencoder_2d", "z_channels": 192}'),
        "t5": ("--t5.type", "text_embedder", "--t5.dim", "64"),
        "clip": ("--clip.type", "text_embedder", "--clip.dim", "64"),
    }[key]
    file = f"--{key}.from-pretrained", tmp_path / "gone.safetensors"
    said = mistake("generate", PRESETS / "256px.py", "--tiny", "--prompt", "x", *section, *file)
    assert "gone.safetensors" in said


def test_a_run_without_known_frames_says_how_one_gets_them(mistake, longtake, run: Outcome, tmp_path: Path):
    frames = ("--ref", "a.png", "--prompt", RED)
    for flags in (frames, (*frames, "--cond-type", "i2v_head")):
        said = mistake("generate", run.folder, *flags)
        assert (
            "model.cond_embed is False, so the model takes no known frames; write model.cond_embed = True in the"
            in said
        )
        assert "condition_config (docs/generate.md: " in said
    said = mistake("generate", run.folder, "--model.cond-embed", "True", "--prompt", RED, "--save-dir", tmp_path)
    assert "has no cond_in.bias, which the model asked for has" in said
