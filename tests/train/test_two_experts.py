"""Two denoisers in one run: the one of a step is drawn by its number, and each trains as it would alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from longtake.checkpoint.state import RunState
from longtake.config.faults import ConfigError
from longtake.data.clips.video import read_frames
from longtake.evaluate.config import LOSSES_FILE
from longtake.families.wan_folders import root
from longtake.system.build import System
from longtake.train.experts import ExpertDraw
from longtake.train.run_file import read_run
from tests.cli.conftest import longtake
from tests.families.test_wan import write_run
from tests.train.conftest import clips  # a fixture
from tests.train.runs import exact, metrics, start, tensors, train_here

__all__ = ["clips", "longtake"]

BOUNDARY = 0.7
PAIR = {"low_noise": {"boundary": BOUNDARY, "share": 0.5}, "max_steps": 6, "ema_decay": 0.9}
HELD_OUT = {"heldout": 0.3, "levels": (0.2, 0.9)}


def experts(folder: Path) -> list[str]:
    """The denoiser of each step."""
    return [line["expert"] for line in metrics(folder)]


def parts(checkpoint: Path, part: str) -> dict[str, Tensor]:
    """Tensors of a checkpoint whose names begin with a part, without it."""
    found = {name: value for name, value in tensors(checkpoint).items() if name.startswith(part + ".")}
    return {name.removeprefix(part + "."): value for name, value in found.items()}


def write_base(longtake: Any, clips: Path, folder: Path) -> Path:
    """A file of weights whose head is not zero, as fresh ones have it."""
    base, _ = train_here(write_run(folder / "base", clips, max_steps=2, lr=0.1, ema_decay=None))
    weights = folder / "base.safetensors"
    assert longtake("checkpoint", "export", base.folder, weights)[0] == 0
    return weights


def both_from(weights: Path) -> dict[str, Any]:
    """Sections of a run whose two denoisers start from the same weights."""
    source = {"from_pretrained": str(weights)}
    return {"model": source, "low_noise": PAIR["low_noise"] | source}


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_cut_run_goes_on_bit_by_bit_with_both(clips: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path, clips, **PAIR)
    whole, said = train_here(run, "--exp_name", "whole")
    assert "50.0% of steps train the one for low noise" in said
    cut, _ = train_here(run, "--exp_name", "cut", "--max_steps", "3")
    train_here(cut.folder, "--max_steps", "6")
    assert exact(cut.folder) == exact(whole.folder)
    assert experts(cut.folder) == experts(whole.folder)
    assert set(experts(whole.folder)) == {"high_noise", "low_noise"}
    last = cut.folder / whole.checkpoint.name
    assert_equal(tensors(last), tensors(whole.checkpoint))
    made = experts(whole.folder).count("low_noise")
    assert RunState.read(last).low_noise_updates == made
    draw = ExpertDraw(read_run(str(run)).value.seed, 0, 0.5)
    assert [draw(step) for step in range(6)] == [name == "low_noise" for name in experts(whole.folder)]


@pytest.mark.parametrize(
    ("share", "times", "prefix"), [(0.0, (BOUNDARY, 1.0), ""), (1.0, (0.0, BOUNDARY), "low_noise_")]
)
def test_a_run_of_one_side_is_that_of_one_model_bit_for_bit(
    clips: Path, tmp_path: Path, share: float, times: tuple[float, float], prefix: str
) -> None:
    both = write_run(tmp_path / "both", clips, **PAIR | {"low_noise": {"boundary": BOUNDARY, "share": share}})
    objective = {"law": "logit_normal", "shift": 3.0, "time_range": times}
    alone = write_run(tmp_path / "alone", clips, **PAIR | {"low_noise": None, "objective": objective})
    (pair, _), (one, _) = train_here(both), train_here(alone)
    assert exact(pair.folder) == exact(one.folder)
    for part in ("model", "ema", "optim"):
        assert_equal(parts(pair.checkpoint, prefix + part), parts(one.checkpoint, part))


def test_one_expert_twice_has_the_losses_of_one_model_on_each_side(longtake: Any, clips: Path, tmp_path: Path) -> None:
    weights = write_base(longtake, clips, tmp_path)
    still = {"lr": 1e-30, "warmup_steps": 0}  # nothing moves
    pair, _ = train_here(write_run(tmp_path / "both", clips, **PAIR | still | both_from(weights)))
    of_sides = {}
    for name, times in (("high_noise", (BOUNDARY, 1.0)), ("low_noise", (0.0, BOUNDARY))):
        objective = {"law": "logit_normal", "shift": 3.0, "time_range": times}
        alone = {"model": {"from_pretrained": str(weights)}, "low_noise": None, "objective": objective}
        run = write_run(tmp_path / name, clips, **PAIR | still | alone)
        of_sides[name] = exact(train_here(run)[0].folder)
    chosen = [of_sides[name][number] for number, name in enumerate(experts(pair.folder))]
    assert exact(pair.folder) == chosen


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(), ("--parallel.sequence", "2"), ("--parallel.tensor", "2")], ids=str)
def test_two_ranks_train_the_same_experts_to_the_same_losses(
    clips: Path, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    run = write_run(tmp_path, clips, **PAIR | {"eps": 1e-4})
    one, _ = train_here(run, "--exp_name", "one")
    process = start("train", run, "--exp_name", "two", *layout, processes=2)
    assert process.wait(150) == 0
    two = one.folder.parent / "two"
    assert experts(two) == experts(one.folder)
    for ours, theirs in zip(metrics(two), metrics(one.folder), strict=True):
        assert ours["digest"] == theirs["digest"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def test_adapters_of_both_are_exported_and_sampled(longtake: Any, clips: Path, tmp_path: Path) -> None:
    base, _ = train_here(write_run(tmp_path / "base", clips, max_steps=2, ema_decay=None))
    files = [tmp_path / f"{name}.safetensors" for name in ("high", "low")]
    for file in files:
        assert longtake("checkpoint", "export", base.folder, file)[0] == 0
    sections = {"model": {"from_pretrained": str(files[0])}, "lora": {"rank": 2, "alpha": 4.0}}
    low_noise = {"boundary": BOUNDARY, "share": 0.5, "from_pretrained": str(files[1])}
    keys = {"ema_decay": None, "max_steps": 4, "lr": 0.1, "low_noise": low_noise}
    outcome, _ = train_here(write_run(tmp_path / "adapted", clips, **sections, **keys))
    cut, _ = train_here(tmp_path / "adapted" / "tiny.py", "--exp_name", "cut", "--max_steps", "2")
    train_here(cut.folder, "--max_steps", "4")
    assert exact(cut.folder) == exact(outcome.folder)
    written = []
    for number, flag in enumerate([(), ("--low-noise",)]):
        target = tmp_path / f"adapters_{number}.safetensors"
        code, _, err = longtake("checkpoint", "export", outcome.folder, target, "--lora", "comfy", *flag)
        assert code == 0, err
        with safe_open(target, "pt") as file:
            written.append(file.get_tensor("diffusion_model.blocks.0.self_attn.q.lora_up.weight"))
        folder = tmp_path / f"merged_{number}"
        code, _, err = longtake("checkpoint", "export", outcome.folder, folder, "--as", "diffusers", *flag)
        assert code == 0, err
        assert json.loads((folder / "config.json").read_text())["num_layers"] == 1
    whole = tmp_path / "whole"
    whole.mkdir()
    for name, flag in (("high_noise_model", ()), ("low_noise_model", ("--low-noise",))):
        code, _, err = longtake("checkpoint", "export", outcome.folder, whole / name, "--as", "official", *flag)
        assert code == 0, err
    assert root(str(whole))["low_noise"]["from_pretrained"] == str(whole / "low_noise_model")
    assert not torch.equal(*written)
    assert all(one.abs().max() > 0 for one in written)
    words = ["--prompt", "a red circle", "--num-steps", "2", "--num-frames", "8", "--resolution", "32px"]
    words += ["--aspect-ratio", "1:1", "--sampling-option.guidance-low", "2", "--save-dir", tmp_path / "videos"]
    code, _, err = longtake("generate", outcome.folder, *words)
    assert code == 0, err
    (video,) = (tmp_path / "videos").rglob("*.mp4")
    assert len(read_frames(video)) == 8


@pytest.mark.parametrize("lora", [None, {"rank": 2, "alpha": 4.0}], ids=["full", "lora"])
def test_a_run_of_both_starts_from_both_of_another(
    longtake: Any, clips: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    base = write_base(longtake, clips, tmp_path)
    keys = PAIR | {"ema_decay": None, "lora": lora, "warmup_steps": 0}
    first, _ = train_here(write_run(tmp_path / "first", clips, **keys | {"lr": 0.1} | both_from(base)))
    still = {"lr": 1e-30, "max_steps": 1}
    second, _ = train_here(write_run(tmp_path / "second", clips, **keys | still | both_from(first.folder)))
    for part in ("model", "low_noise_model"):
        assert_equal(parts(first.checkpoint, part), parts(second.checkpoint, part))
    high, low = (parts(first.checkpoint, part) for part in ("model", "low_noise_model"))
    assert not any(torch.equal(high[name], low[name]) for name in high if name.endswith(("o.weight", "lora_b")))


def test_a_run_of_one_denoiser_is_sampled_with_a_second_from_a_file(longtake: Any, clips: Path, tmp_path: Path) -> None:
    base = write_base(longtake, clips, tmp_path)
    words = ["--prompt", "a red circle", "--num-steps", "4", "--num-frames", "8", "--resolution", "32px"]
    words += ["--aspect-ratio", "1:1", "--ema", "False"]
    run, videos = tmp_path / "base" / "outputs" / "tiny", []
    for name, more in (("one", ()), ("two", ("--low-noise.from-pretrained", base, "--low-noise.boundary", "0.6"))):
        code, _, err = longtake("generate", run, *words, *more, "--save-dir", tmp_path / name)
        assert code == 0, err
        videos.append(next((tmp_path / name).rglob("*.mp4")).read_bytes())
    assert videos[0] == videos[1]


def test_an_export_of_a_second_denoiser_needs_one(longtake: Any, clips: Path, tmp_path: Path) -> None:
    outcome, _ = train_here(write_run(tmp_path, clips, max_steps=1))
    code, _, err = longtake("checkpoint", "export", outcome.folder, tmp_path / "low.safetensors", "--low-noise")
    assert code != 0
    assert "trained one denoiser" in err


@pytest.mark.parametrize("offload", [False, True])
def test_validations_use_the_denoiser_of_each_level_and_leave_the_run_as_it_is(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload: bool
) -> None:
    plain, _ = train_here(write_run(tmp_path / "plain", clips, **PAIR, validation=HELD_OUT, validate_every=6))
    used: list[bool] = []
    at = System.at

    def noted(system: System, t: Tensor) -> System:
        expert = at(system, t)
        used.append(expert is system)
        return expert

    monkeypatch.setattr(System, "at", noted)
    sampled = {"resolution": "32px", "aspect_ratio": "1:1", "num_frames": 8, "num_steps": 4}
    section = HELD_OUT | {"prompts": ["a red circle"], "sampling_option": sampled, "offload": offload}
    outcome, _ = train_here(write_run(tmp_path / "watched", clips, **PAIR, validation=section, validate_every=3))
    assert exact(outcome.folder) == exact(plain.folder)
    assert_equal(tensors(outcome.checkpoint), tensors(plain.checkpoint))
    assert set(used) == {True, False}
    assert len(list((outcome.folder / "validation").rglob("*.mp4"))) == 3
    lines = [json.loads(line) for line in (outcome.folder / LOSSES_FILE).read_text().splitlines()]
    assert len(lines) == 3
    assert all(line["experts"] == {"0.2": "low_noise", "0.9": "high_noise"} for line in lines)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"objective": {"time_range": (0.8, 1.0)}}, "has no times on one side of it"),
        ({"low_noise": {"boundary": 1.0}}, "expected a number between 0 and 1"),
        ({"low_noise": {"share": 1.5}}, "low_noise.share = 1.5"),
        ({"lora": {"rank": 2}, "lora_files": {"comfy": "a-{step}.safetensors"}}, "are for one denoiser"),
    ],
)
def test_what_two_denoisers_cannot_do_is_one_sentence(
    clips: Path, tmp_path: Path, changes: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(ConfigError, match=wrong):
        read_run(str(write_run(tmp_path, clips, **PAIR | changes)))
