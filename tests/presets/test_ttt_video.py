"""TTT-Video's presets say what was published: sizes, meshes, groups of parameters, what trains, and rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.generate.source import resolve_source
from longtake.models.build import build_denoiser
from longtake.presets import find_preset
from longtake.system.lora import choose_trained
from longtake.train.config import RunConfig, RunWithoutTable
from longtake.train.optimizer.groups import groups_of
from longtake.train.optimizer.schedule import rate_between
from longtake.train.run_file import read_curriculum, read_run
from longtake.weights.ttt_video import FORMAT

GOLDEN = Path(__file__).parents[1] / "golden" / "ttt_video"
PUBLISHED = json.loads((GOLDEN / "presets.json").read_text())
STAGES = {"3s": 49, "9s": 145, "18s": 289, "30s": 481, "63s": 1009}
KINDS = ("mlp", "linear")


def preset(kind: str, stage: str, *words: str) -> RunConfig:
    return read_run(str(find_preset(f"ttt_video/ttt_{kind}/{stage}")), list(words), RunWithoutTable).value


def published(folder: str, kind: str, stage: str) -> dict[str, Any]:
    """The sections of a shipped file over their defaults."""
    changed = PUBLISHED[f"configs/{folder}/ttt-{kind}/{stage}.toml"]["changed"]
    return {name: {**keys, **changed.get(name, {})} for name, keys in PUBLISHED["defaults"].items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_the_published_one(kind: str, stage: str) -> None:
    run, theirs = preset(kind, stage), published("train", kind, stage)
    model, mesh, optimizer = theirs["model"], theirs["parallelism"], theirs["optimizer"]
    assert (run.model.mixer, run.model.mini_batch_size, run.model.ttt_base_lr) == (
        model["ssm_layer"],
        model["mini_batch_size"],
        model["ttt_base_lr"],
    )
    assert (run.parallel.replicate, run.parallel.shard, run.parallel.tensor) == (
        mesh["dp_replicate"],
        mesh["dp_sharding"],
        mesh["tp_sharding"],
    )
    training = theirs["training"]
    assert (run.slots_per_step, run.max_steps, run.ckpt_every, run.gc_every, run.grad_clip, run.seed) == (
        training["global_batch_size"],
        training["steps"],
        theirs["checkpoint"]["interval"],
        training["gc_freq"],
        optimizer["gradient_clipping_norm"],
        theirs["job"]["seed"],
    )
    sizes = PUBLISHED[f"configs/train/ttt-{kind}/{stage}.toml"]["model"]
    blocks = run.compile, run.model.recompute
    assert (*blocks, run.parallel.zero) == ("auto", "auto", 3)
    assert run.bucket_config == {"480x720": {STAGES[stage]: (1.0, 1)}}
    assert run.ae.latent(STAGES[stage], 480, 720)[1] == sizes["compressed_num_frames"]
    assert run.sample_rules.segments(STAGES[stage]) == (STAGES[stage] - 1) // 48
    assert (run.train_only is None) == (training["adapter_method"] == "sft")
    rates = {"ttt_no_wd": "lr_ssm", "ttt_wd": "lr_ssm", "other_no_wd": "lr", "other_wd": "lr"}
    for group in run.optim.groups:
        schedule = group.schedule or run.optim.schedule
        assert rate_between(schedule, training["warmup_steps"]) == optimizer[rates[group.name]]
        assert rate_between(schedule, 0) == pytest.approx(optimizer[rates[group.name]] / training["warmup_steps"])
        assert rate_between(schedule, run.max_steps) == optimizer["lr_end"]
    assert preset(kind, stage, "--tiny").model.segment_frames == 8


@pytest.mark.parametrize("kind", KINDS)
def test_the_curriculum_has_the_stages_in_turn(kind: str) -> None:
    curriculum = read_curriculum(str(find_preset(f"ttt_video/ttt_{kind}/curriculum")))
    assert [stage.name for stage in curriculum.stages] == list(STAGES)
    assert [stage.run for stage in curriculum.stages] == [find_preset(f"ttt_video/ttt_{kind}/{one}") for one in STAGES]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_preset_for_generation_is_the_published_one(kind: str, stage: str) -> None:
    run = resolve_source(str(find_preset(f"ttt_video/ttt_{kind}_{stage}", "inference")), []).config
    theirs = published("eval", kind, stage)
    option, evaluation = run.sampling_option, theirs["eval"]
    assert run.ae.latent(option.num_frames, 480, 720)[1] == evaluation["sampling_num_frames"]
    assert (run.t5.max_length, run.fps_save) == (evaluation["txt_maxlen"], evaluation["sampling_fps"])
    assert (option.num_steps, option.guidance) == (evaluation["num_denoising_steps"], theirs["guider"]["scale"])
    # theirs says 16 for TTT-MLP too, which was trained with 64
    assert run.model.mini_batch_size == published("train", kind, stage)["model"]["mini_batch_size"]


@pytest.mark.parametrize(("kind", "stage"), [("mlp", "3s"), ("mlp", "9s"), ("linear", "3s")])
def test_groups_of_parameters_are_the_published_ones(kind: str, stage: str) -> None:
    sizes = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16, "text_embed_dim": 32}
    run = preset(kind, stage, *(f"--model.{name}={size}" for name, size in sizes.items()), "--t5.dim=32")
    with torch.device("meta"):
        denoiser = build_denoiser(run.model)
    choose_trained(denoiser, run, torch.float32)
    golden = json.loads((GOLDEN / "optimizer_groups.json").read_text())
    method = f"ttt_{kind}.{'sft' if run.train_only is None else 'qkvo'}"

    def theirs(name: str) -> str:
        part, *_ = FORMAT.namings["own"].parts_of(name)
        return f"dit.{FORMAT.namings['published'].place_of(part)[0]}"

    groups = {group.name: group for group in groups_of(denoiser, run) if group.names}
    assert list(groups) == [group["name"] for group in golden[f"{method}.groups"]]
    for group in golden[f"{method}.groups"]:
        own = groups[group["name"]]
        assert {theirs(name) for name in own.names} == set(group["parameters"])
        assert (own.weight_decay, list(run.optim.betas), run.optim.eps) == (
            group["weight_decay"],
            group["betas"],
            group["eps"],
        )
    frozen = {theirs(name) for name, p in denoiser.named_parameters() if not p.requires_grad}
    assert frozen == set(golden[f"{method}.frozen"])


def schedule(peak: float, end: float, warmup: int, steps: int, shape: str) -> list[tuple]:
    """As the presets write it, where there is a warm-up of several steps."""
    return ([(0, peak / warmup), (warmup - 1, peak)] if warmup > 1 else []) + [(warmup, peak, shape), (steps, end)]


def test_rates_are_the_published_ones_up_to_the_end() -> None:
    for plan in json.loads((GOLDEN / "learning_rates.json").read_text())["plans"]:
        ends = plan["lr_end"], plan["warmup"], plan["steps"]
        for name, peak, shape in (("ttt", "lr_ssm", "lr_ssm_schedule"), ("other", "lr", "lr_schedule")):
            points = schedule(plan[peak], *ends, plan[shape])
            for step, rate in zip(plan["step"], plan[name], strict=True):
                if step <= plan["steps"]:  # their cosine rises again behind it
                    assert rate_between(points, step) == pytest.approx(rate, rel=1e-9, abs=1e-18), (plan, step)
