"""Wan from a config file: trained, resumed, sampled, adapted and exported, with and without a given first frame."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from longtake.config.faults import ConfigError
from longtake.data.clips.video import read_frames
from longtake.diffusion.flow_shifted import ShiftedFlow
from longtake.train.run_file import read_run
from longtake.weights.lora import read_adapters
from longtake.weights.wan import FORMAT
from tests.cli.conftest import longtake
from tests.train.conftest import clips  # a fixture
from tests.train.runs import exact, metrics, train_here, write_config

__all__ = ["clips", "longtake"]

SIZES = {
    "type": "wan",
    "num_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "ffn_dim": 40,
    "in_channels": 192,
    "out_channels": 192,
    "text_dim": 16,
    "text_len": 8,
    "freq_dim": 32,
}


def write_run(folder: Path, clips: Path, **changes: Any) -> Path:
    """The config file of a tiny run of Wan."""
    path = write_config(folder, clips)
    keys = {
        "model": {**SIZES, **changes.pop("model", {})},
        "ae": {"type": "pixel", "temporal": 1, "spatial": 8},
        "objective": {"law": "logit_normal", "shift": 3.0},
        "dropout_ratio": {"t5": 0.1},
        "max_steps": 4,
        **changes,
    }
    path.write_text(path.read_text() + "".join(f"{key} = {value!r}\n" for key, value in keys.items()))
    return path


@pytest.mark.parametrize("kind", ["t2v", "ti2v", "i2v"])
def test_it_trains_resumes_and_makes_videos(longtake: Any, clips: Path, tmp_path: Path, kind: str) -> None:
    more: dict[str, Any] = {}
    if given := kind != "t2v":
        model = {"known_frames": True} if kind == "ti2v" else {"in_channels": 2 * 192 + 4}
        more = {"model": model, "condition_config": {"t2v": 1.0, "i2v_head": 2.0}}
    run = write_run(tmp_path, clips, **more)
    whole, _ = train_here(run, "--exp_name", "whole")
    cut, _ = train_here(run, "--exp_name", "cut", "--max_steps", "2")
    train_here(cut.folder, "--max_steps", "4")
    assert exact(cut.folder) == exact(whole.folder)
    assert all(line["loss"] > 0 for line in metrics(whole.folder))
    words = [
        "generate",
        whole.folder,
        "--prompt",
        "a red circle",
        "--num-steps",
        "2",
        "--save-dir",
        tmp_path / "videos",
    ]
    words += ["--num-frames", "8", "--resolution", "32px", "--aspect-ratio", "1:1"]
    if given:
        first = sorted(clips.parent.rglob("*.png"))[0]
        words += ["--cond-type", "i2v_head", "--ref", first]
    code, _, err = longtake(*words)
    assert code == 0, err
    (video,) = (tmp_path / "videos").rglob("*.mp4")
    assert len(read_frames(video)) == 8


def test_i2v_run_from_stored_grey_videos_is_the_run_that_encodes(longtake: Any, clips: Path, tmp_path: Path) -> None:
    more = {"model": {"in_channels": 2 * 192 + 4}, "condition_config": {"t2v": 1.0, "i2v_head": 2.0}}
    run, store = write_run(tmp_path, clips, **more), tmp_path / "store"
    code, _, err = longtake("data", "encode", run, "--dataset.views", 2, "-o", store)
    assert code == 0, err
    online, _ = train_here(run, "--exp_name", "online", "--dataset.views", "2")
    stored, _ = train_here(run, "--exp_name", "stored", "--dataset.views", "2", "--dataset.latents", str(store))
    assert exact(stored.folder) == exact(online.folder)
    text, _ = train_here(
        run, "--exp_name", "text", "--dataset.views", "2", "--condition_config", "{'_delete_': True, 't2v': 1.0}"
    )
    assert exact(text.folder) != exact(online.folder)


def test_adapters_train_and_are_exported_for_every_program(longtake: Any, clips: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path, clips, lora={"rank": 2, "alpha": 4.0}, ema_decay=None, max_steps=2)
    outcome, _ = train_here(run)
    config = read_run(str(run)).value.model
    for style in FORMAT.lora_styles:
        target = tmp_path / (style if style == "peft" else f"{style}.safetensors")
        code, _, err = longtake("checkpoint", "export", outcome.folder, target, "--lora", style)
        assert code == 0, err
        adapters = read_adapters(FORMAT, target, config)
        assert len(adapters) == 10
    with safe_open(tmp_path / "comfy.safetensors", "pt") as file:
        assert file.get_tensor("diffusion_model.blocks.0.self_attn.q.alpha").item() == 4.0
    for names in FORMAT.folders:
        code, _, err = longtake(
            "checkpoint", "export", outcome.folder, tmp_path / f"as_{names}", "--merge", "--as", names
        )
        assert code == 0, err
        assert (tmp_path / f"as_{names}" / "config.json").is_file()
        assert (tmp_path / f"as_{names}" / "diffusion_pytorch_model.safetensors").is_file()


def test_objective_and_sampling_are_wans_by_default(clips: Path, tmp_path: Path) -> None:
    config = read_run(str(write_run(tmp_path, clips, objective={}))).value
    assert (config.objective.type, config.objective.shift, config.objective.law) == ("shifted_flow", 5.0, "uniform")
    assert config.sampling_option.guidance == 5.0
    assert ShiftedFlow.noise_time == 1000.0


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        (
            {"model": {"in_channels": 388, "image_dim": 20}},
            "model.image_dim = 20: runs of Wan 2.1's image-to-video models",
        ),
        ({"model": {"in_channels": 200}}, "expected out_channels = 192, or 388"),
        ({"condition_config": {"i2v_head": 1.0}}, "this model takes text alone"),
        ({"model": {"known_frames": True}, "condition_config": {"i2v_tail": 1.0}}, "i2v_tail"),
        ({"objective": {"time_range": (0.9, 1.2)}}, "the lower first"),
    ],
)
def test_what_a_run_cannot_do_is_one_sentence(clips: Path, tmp_path: Path, changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        read_run(str(write_run(tmp_path, clips, **changes)))
