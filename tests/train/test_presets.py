"""Open-Sora 2.0's presets say what was published, fit where they say, and train."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from longtake.presets import run_file
from longtake.train.config import RunConfig
from longtake.train.run_file import read_run
from tests.train.runs import train_here

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "opensora_v2" / "train"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "curriculum")
VIDEO_BANDS = (range(5, 34, 4), range(37, 66, 4), range(69, 98, 4), range(101, 130, 4))
ONE_OF_EACH_FAMILY = (
    "opensora_v2/train/lora.py",
    "opensora_v1_2/train/stage1.py",
    "cogvideox_fun/train/lora_2b.py",
    "ttt_video/train/ttt_linear/3s.py",
    "wan/train/lora_1_3b.py",
)
CONDITIONS = {"t2v": 1, "i2v_head": 5, "i2v_loop": 1, "i2v_tail": 1}


def preset(name: str, *overrides: str) -> RunConfig:
    return read_run(str(FOLDER / f"{name}.py"), ["--dataset.data-path", "clips.parquet", *overrides]).value


def bands(keep: float, still: int, *sizes: int) -> dict[int, Any]:
    """A resolution with stills and four bands of lengths, each with its batch size."""
    lengths = {frames: (keep, size) for band, size in zip(VIDEO_BANDS, sizes, strict=True) for frames in band}
    return {1: (keep, still), **lengths}


def test_the_root_is_the_published_one():
    run = preset("image")
    assert (run.lr, run.eps, run.optim.weight_decay, run.optim.betas) == (1e-5, 1e-15, 0, (0.9, 0.999))
    assert (run.optim.lr, run.optim.eps) == (run.lr, run.eps)
    assert (run.warmup_steps, run.grad_clip, run.accumulation_steps, run.ema_decay) == (0, 1.0, 1, None)
    assert run.text_dropout == {"text": 0.31622777, "vector": 0.31622777}
    assert (run.seed, run.epochs, run.log_every, run.ckpt_every, run.keep_n_latest) == (42, 1000, 10, 100, 20)
    assert (run.num_workers, run.prefetch_factor, run.dtype) == (12, 2, "bf16")
    assert (run.async_io, run.wandb_project, run.objective.sigma_min) == (False, "mmdit", 1e-5)
    assert run.bucket_config == {"256px": {1: (1.0, 50)}, "768px": {1: (0.5, 11)}, "1024px": {1: (0.5, 7)}}
    model = run.model
    assert (model.hidden_size, model.num_heads, model.depth, model.depth_single_blocks) == (3072, 24, 19, 38)
    assert (model.axes_dim, model.theta, model.in_channels, model.patch_size) == ((16, 56, 56), 10_000, 64, 2)
    assert (model.vec_in_dim, model.context_in_dim, model.mlp_ratio, model.qkv_bias) == (768, 4096, 4.0, True)
    assert (model.guidance_embed, model.cond_embed, model.fused_qkv, model.use_liger_rope) == (
        False,
        False,
        False,
        True,
    )
    assert not model.strict_load
    assert (run.ae.type, run.ae.latent_channels, run.ae.layers_per_block) == ("hunyuan_vae", 16, 2)
    assert (run.ae.use_spatial_tiling, run.ae.use_temporal_tiling, run.ae.latent.causal) == (True, False, True)
    assert (run.t5.from_pretrained, run.t5.max_length, run.t5.mask) == ("google/t5-v1_1-xxl", 512, False)
    assert (run.clip.from_pretrained, run.clip.max_length) == ("openai/clip-vit-large-patch14", 77)


def test_stage_1_is_the_published_one():
    run = preset("stage1")
    small = bands(1.0, 45, 12, 6, 4, 3)
    assert run.bucket_config == {"256px": small, "768px": {1: (0.5, 13)}, "1024px": {1: (0.5, 7)}}
    assert (run.lr, run.optim.lr, run.ckpt_every) == (5e-5, 5e-5, 2000)
    assert not run.dataset.memory_efficient
    assert preset("demo").bucket_config == {"256px": dict.fromkeys((1, 33, 97, 129), (1.0, 1))}


def test_stage_2_is_the_published_one():
    run = preset("stage2")
    small = bands(1.0, 130, 14, 10, 7, 6)
    del small[69]
    assert run.bucket_config == {"256px": small, "768px": bands(1.0, 38, 6, 4, 3, 2)}
    assert (run.lr, run.optim.lr, run.ckpt_every) == (5e-5, 5e-5, 200)
    # published with a ring; heads that are dealt to peers give the same in less time
    assert (run.parallel.sequence, run.parallel.tensor, run.parallel.sequence_attention) == (4, 1, "auto")


@pytest.mark.parametrize("name", PRESETS)
def test_blocks_run_the_fast_way_and_on_a_cpu_the_plain_one(name: str):
    """Published: eager, zero 2 and no outputs kept. None of it changes what is computed."""
    run, tiny = preset(name), preset(name, "--tiny")
    assert (run.compile, run.parallel.zero) == ("auto", 3)
    assert run.model.recompute == "auto"
    assert not tiny.compile


@pytest.mark.parametrize("name", ["stage1_i2v", "stage2_i2v"])
def test_stages_with_known_frames_differ_from_their_base_as_published(name: str):
    run, base = preset(name), preset(name.removesuffix("_i2v"))
    assert run.model.cond_embed
    assert run.model.grow_cond_in
    found = run.condition_config
    assert found is not None
    assert {kind: weight for kind, weight in found.items() if weight} == CONDITIONS
    changed = {key for key in RunConfig.model_fields if getattr(run, key) != getattr(base, key)}
    if name == "stage1_i2v":
        assert changed == {"model", "condition_config", "lr", "optim"}
        assert run.lr == 1e-5
    else:
        assert changed == {"model", "condition_config", "bucket_config"}
        assert run.bucket_config == {"256px": bands(1.0, 195, 80, 40, 28, 23), "768px": bands(0.5, 38, 10, 5, 3, 2)}
        assert run.model.grad_ckpt_buffer_size == 25 * 2**30 * 2


@pytest.mark.parametrize(
    ("name", "count"), [("image", 41), ("stage1", 393), ("stage2", 847), ("stage2_i2v", 858), ("demo", 44)]
)
def test_presets_make_as_many_buckets_as_published(name: str, count: int):
    assert len(preset(name, "--compat", "opensora_v2").bucket_rule.buckets) == count


def test_a_table_of_buckets_on_the_command_line_is_made_tiny_too():
    assert preset("image", "--tiny", "--bucket-config.1024px.9", "(0.5, 7)").bucket_config["64px"][9] == (0.5, 2)
    whole = ("--tiny", "--bucket_config", "dict(_delete_=True, **{'768px': {129: (1.0, 3)}})", "--lr", "1e-3")
    run = preset("image", *whole)
    assert (run.bucket_config, run.lr) == ({"64px": {17: (1.0, 2)}}, 1e-3)


def test_fine_tuning_starts_from_the_released_weights_and_loses_none():
    for name in ("finetune", "finetune_1gpu", "lora", "lora_24gb"):
        model = preset(name).model
        assert model.from_pretrained == "ckpts/Open_Sora_v2.safetensors"
        assert model.cond_embed
        assert model.strict_load
    assert preset("lora_24gb").lora.base == "nf4"
    assert preset("finetune").lora is None


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_when_it_is_tiny(name: str, clips: Path, tmp_path: Path):
    words = ["--tiny", "--dataset.data-path", str(clips), "--outputs", str(tmp_path), "--max-steps", "2"]
    outcome, said = train_here(FOLDER / f"{name}.py", *words)
    assert outcome.clock.global_step == 2
    assert "done at step 2" in said


def test_a_preset_of_each_kind_trains_when_it_is_tiny(clips: Path, tmp_path: Path):
    for name in ("stage2_i2v", "lora_24gb"):
        test_every_preset_trains_when_it_is_tiny(name, clips, tmp_path)


def check_forecasts(*presets: str) -> None:
    files = [ROOT / "longtake" / "presets" / preset for preset in presets]
    check = [sys.executable, ROOT / "tools" / "preset_forecasts.py", "--check", *files]
    done = subprocess.run(check, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_preset_of_each_family_opens_with_what_the_plan_says_of_it():
    check_forecasts(*ONE_OF_EACH_FAMILY)


@pytest.mark.weekly
@pytest.mark.timeout(1800)
def test_every_preset_and_page_shows_what_the_plan_says_of_it():
    check_forecasts()


def commands() -> list[str]:
    """The command lines that presets open with, and those of the walk-through, as they are read by a shell."""
    texts = [path.read_text(encoding="utf-8").replace("#   ", "") for path in FOLDER.glob("*.py")]
    texts.append((ROOT / "docs" / "opensora_v2.md").read_text(encoding="utf-8"))
    lines = [line for text in texts for line in re.sub(r"\\\n#?\s*", "", text).splitlines()]
    return sorted({line for line in lines if re.match(r"(torchrun .*-m )?longtake (train|plan) opensora_v2/", line)})


@pytest.mark.parametrize("command", commands())
def test_commands_name_keys_and_files_that_there_are(command: str):
    words = shlex.split(command.split("longtake ")[1])[1:]
    for option in ("--gpus", "--gpu"):  # of the plan, no keys
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
    if words[0].endswith("curriculum") and "--stage" not in words:
        words += ["--stage", "stage2_i2v"]
    assert read_run(run_file(words[0]), words[1:]).value.dataset.data_path == "clips.parquet"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_fit_the_gpus_that_they_name(name: str):
    """By the forecast that a preset opens with; that the plan still says so is a slow test's."""
    text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    usable = float(re.search(r"([\d.]+) GiB of \d+ GiB each to be used", text)[1])
    head, *rows = (line.strip("# ") for line in re.findall(r"^#     .*(?:  fits|/\d+f  .*)$", text, re.MULTILINE))
    columns = re.split(r"\s{2,}", head)
    buckets = preset(name).bucket_config
    assert {row.split("/")[0] for row in rows} == set(buckets)
    for row in rows:
        entry = dict(zip(columns, re.split(r"\s{2,}", row), strict=True))
        resolution, frames = entry["bucket"].removesuffix("f").split("/")
        assert int(entry["batch"]) == buckets[resolution][int(frames)][1], "the batch that is trained"
        assert int(entry["batch"]) <= int(entry["fits"])
        assert float(entry["GiB a GPU"]) <= usable
