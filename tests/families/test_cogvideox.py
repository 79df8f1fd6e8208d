"""CogVideoX from a config file: trained, resumed, sampled, planned, encoded ahead, adapted and exported."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from longtake.contracts import Batch
from longtake.data.clips.video import write_video
from longtake.data.loading import workers
from longtake.data.loading.loader import SlotLoader
from longtake.data.loading.parcel import Parcel
from longtake.families.cogvideox_known import MaskedVideo
from longtake.families.registry import read_model
from longtake.models.build import build_denoiser
from longtake.models.cogvideox_config import section_of
from longtake.plan.blocks import count_blocks
from longtake.plan.layout import Layout, MicroBatch
from longtake.plan.machine import Machine
from longtake.plan.memory import forecast_memory
from longtake.plan.run import plan_run
from longtake.presets import run_file
from longtake.track.devices import gpu_named
from longtake.train.run_file import read_run
from longtake.weights.cogvideox import FORMAT
from longtake.weights.model import ModelWeights
from tests.cli.conftest import longtake
from tests.models.golden_cogvideox import FOLDER, VARIANTS
from tests.plan.trace import inputs, step_bytes
from tests.train.conftest import clips  # a fixture
from tests.train.runs import exact, metrics, train_here, write_config

__all__ = ["clips", "longtake"]

SIZES = {
    "type": "cogvideox",
    "num_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "out_channels": 1536,
    "text_embed_dim": 16,
    "max_text_seq_length": 8,
    "time_embed_dim": 16,
    "patch_size": 1,
    "sample_height": 4,
    "sample_width": 4,
    "sample_frames": 5,
}
RUNS = (*(pytest.param(name, marks=pytest.mark.slow) for name in ("2b", "5b_i2v")), "fun_inp_5b", "fun_control")


def write_run(folder: Path, clips: Path, variant: str, **changes: Any) -> Path:
    """The config file of a tiny run; a control model's clips are their own control videos."""
    model = SIZES | VARIANTS[variant]
    own: dict[str, Any] = {"objective": {"motion_loss": 0.25}, "dropout_ratio": {"t5": 0.2}}
    if model.get("visual") == "image":
        own["condition_config"] = {"t2v": 1.0, "i2v_head": 2.0}
    if model.get("visual") == "inpaint":
        own["condition_config"] = {"inpaint": 3.0, "i2v_head": 1.0}
        own["model"] = model | {"add_noise_in_inpaint_model": True}
    if model.get("visual") == "control":
        clips = with_control(clips, folder)
    path = write_config(folder, clips)
    text = path.read_text().replace("model = dict(", "_unused = dict(").replace("objective = dict(", "_too = dict(")
    path.write_text(text + "".join(f"{key} = {value!r}\n" for key, value in ({"model": model} | own | changes).items()))
    return path


def with_control(clips: Path, folder: Path) -> Path:
    import pyarrow.parquet as pq

    table = pq.read_table(clips)
    paths = [str(clips.parent / path) for path in table["path"].to_pylist()]
    table = table.set_column(table.column_names.index("path"), "path", [paths])
    pq.write_table(table.append_column("control", [paths]), folder / "control.parquet")
    return folder / "control.parquet"


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp(request.param), clips, request.param)


@pytest.fixture(scope="module")
def whole(run: Path) -> Path:
    return train_here(run, "--exp_name", "whole", "--max_steps", "4")[0].folder


def test_it_trains_and_resumes_as_if_it_had_not_stopped(run: Path, whole: Path) -> None:
    cut, _ = train_here(run, "--exp_name", "cut", "--max_steps", "2")
    train_here(cut.folder, "--max_steps", "4")
    assert exact(cut.folder) == exact(whole)
    assert all(line["loss"] > 0 for line in metrics(whole))


def test_it_generates_from_a_run_and_from_an_export(longtake: Any, run: Path, whole: Path, tmp_path: Path) -> None:
    words = ["--prompt", "a red circle", "--num-steps", 2, "--sampling-option.guidance-rule", "dynamic"]
    if "fun_control" in str(run):
        fault = " ".join(longtake("generate", whole, *words, "--save-dir", tmp_path)[2].split())
        assert "needs the condition `control`, which was not given; give a control video" in fault
        write_video(tmp_path / "c.mp4", np.zeros((16, 32, 32, 3), np.uint8), 24)
        (tmp_path / "poses.txt").write_text("0 0.5 0.8 0.5 0.5\n")
        poses = ("--companions.control", tmp_path / "poses.txt", "--save-dir", tmp_path)
        assert "is text, not a video or a picture" in longtake("generate", whole, *words, *poses)[2]
        words += ["--companions.control", tmp_path / "c.mp4"]
    assert longtake("checkpoint", "export", whole, tmp_path / "w.safetensors")[0] == 0
    made = []
    for name, source in (("of_run", whole), ("of_file", tmp_path / "w.safetensors")):
        code, _, err = longtake("generate", source, *words, "--save-dir", tmp_path / name)
        assert code == 0, err
        made.append([path.read_bytes() for path in (tmp_path / name).rglob("*.mp4")])
    assert len(made[0]) == 1
    assert made[0] == made[1]


def test_a_run_from_a_store_is_the_run_that_encodes(longtake: Any, run: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    code, _, err = longtake("data", "encode", run, "--dataset.views", 2, "-o", store)
    assert code == 0, err
    words = ("--max_steps", "2", "--dataset.views", "2", "--outputs", str(tmp_path))
    online, _ = train_here(run, "--exp_name", "online", *words)
    stored, _ = train_here(run, "--exp_name", "stored", *words, "--dataset.latents", str(store))
    assert exact(stored.folder) == exact(online.folder)


def test_adapters_train_alone_and_are_exported_under_names_of_diffusers(
    longtake: Any, run: Path, whole: Path, tmp_path: Path
) -> None:
    words = ("--lora.rank", "2", "--max_steps", "2", "--outputs", str(tmp_path), "--exp_name", "adapted")
    words += ("--lora.targets", "('to_q', 'to_out.0', 'ff.0', 'ff.net.2')", "--model.from_pretrained", str(whole))
    adapted, _ = train_here(run, *words)
    for style, name, first in (
        ("peft", "peft", "base_model.model.transformer_blocks.0.attn1.to_out.0.lora_A.weight"),
        ("diffusers", "d.safetensors", "transformer.transformer_blocks.0.ff.net.0.proj.lora_B.weight"),
        ("comfy", "c.safetensors", "lora_unet_blocks_0_ff_out.lora_down.weight"),
    ):
        assert longtake("checkpoint", "export", adapted.folder, tmp_path / name, "--lora", style)[0] == 0
        file = tmp_path / name if style != "peft" else tmp_path / name / "adapter_model.safetensors"
        with safe_open(file, "pt") as tensors:
            assert first in tensors.keys()  # noqa: SIM118
    assert longtake("checkpoint", "export", adapted.folder, tmp_path / "merged", "--merge")[0] == 0
    for folder, source in (("with_adapters", adapted.folder), ("alone", whole)):
        code, _, err = longtake("checkpoint", "export", source, tmp_path / folder, "--as", "diffusers")
        assert code == 0, err
    config = read_model({"model": {"type": "cogvideox", "from_pretrained": str(tmp_path / "with_adapters")}})
    found, expected = (ModelWeights(tmp_path / name, config, FORMAT) for name in ("with_adapters", "merged"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert "choose diffusers" in longtake("checkpoint", "export", whole, tmp_path / "x", "--as", "kohya")[2]


def test_it_is_made_tiny(run: Path) -> None:
    train_here(run, "--exp_name", "tiny", "--max_steps", "1", "--tiny")


@pytest.mark.parametrize(
    "name",
    [
        "lora_5b",
        "lora_2b_inp",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("lora_2b", "lora_5b_inp", "full_5b", "control")),
    ],
)
def test_presets_train_at_a_tiny_size(name: str, clips: Path, tmp_path: Path) -> None:
    table = with_control(clips, tmp_path) if name == "control" else clips
    words = ("--tiny", "--max_steps", "1", "--device", "cpu", "--outputs", str(tmp_path))
    preset = run_file(f"cogvideox_fun/{name}")
    outcome, _ = train_here(preset, *words, "--dataset.data-path", str(table))
    assert len(metrics(outcome.folder)) == 1


def test_it_is_planned(longtake: Any, run: Path) -> None:
    code, out, err = longtake("plan", run, "--gpus", 1, "--gpu", "h100", "--model.grad_ckpt_settings=(1,)")
    assert code == 0, err
    assert "recomputed 1 transformer blocks" in out
    config = read_run(str(run), ()).value
    plan = plan_run(config, 1, Machine(replace(gpu_named("h100"), memory_gib=1e-4), headroom=0))
    assert plan.num_parameters == sum(p.numel() for p in build_denoiser(config.model).parameters())


@pytest.mark.parametrize("variant", ["2b", pytest.param("5b_i2v", marks=pytest.mark.slow), "1.5_i2v", "fun_inp_5b"])
def test_what_a_step_takes_is_foretold_by_its_own_blocks(variant: str) -> None:
    sizes = {"num_attention_heads": 4, "attention_head_dim": 64, "out_channels": 16, "patch_size": 2, "num_layers": 3}
    of_text = {"max_text_seq_length": 64, "ofs_embed_dim": 16 if variant == "1.5_i2v" else None}
    model = read_model({"model": SIZES | VARIANTS[variant] | sizes | of_text})
    latent, text, batch = (16, 10, 64, 64), 64, 4
    counted = step_bytes(model, latent[1:], text, batch=batch, remat=(1,))
    micro, layout = MicroBatch(batch, latent, text), Layout(remat=(1,))
    said = forecast_memory(model, micro, layout)
    assert said.total - said.optimizer == pytest.approx(counted["peak"], rel=0.02)
    fused = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)
    }
    with FakeTensorMode(), FlopCounterMode(display=False, custom_mapping=fused) as counter:
        x, conditions = inputs(model, latent[1:], text, batch)
        build_denoiser(model)(x, torch.empty(batch), conditions)
    assert count_blocks(model, micro, layout).forward.flops == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_a_folder_of_published_weights_says_what_the_model_is(tmp_path: Path) -> None:
    folder = FOLDER / "transformer" / "fun_inp_5b"
    model = read_model({"model": {"type": "cogvideox", "from_pretrained": str(folder), "sample_frames": 9}})
    found = (model.visual, model.positions, model.num_layers, model.in_channels, model.sample_frames)
    assert found == ("inpaint", "fun", 1, 33, 9), "what is written goes before"
    (tmp_path / "transformer").symlink_to(folder)
    (tmp_path / "model_index.json").write_text("{}")
    whole = read_model({"model": {"type": "cogvideox", "from_pretrained": str(tmp_path)}})
    assert (whole.visual, whole.num_layers) == ("inpaint", 1), "of a whole pipeline"
    assert len(ModelWeights(tmp_path, whole, FORMAT)) > 0
    with pytest.raises(ValueError, match="is the config of FluxTransformer"):
        section_of({"_class_name": "FluxTransformer2DModel"}, "config.json")


def test_masks_are_drawn_in_data_workers_and_travel_as_bool_within_the_announced_bytes(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, pack, planned = MaskedVideo.drawn, workers.plan_parcel, SlotLoader._made

    def drawn_in_worker(*arguments: Any) -> Any:
        assert multiprocessing.current_process().daemon
        return drawn(*arguments)

    def packed(batch: Batch) -> Any:
        assert {places.mask.dtype for places in batch.known.values()} <= {torch.bool}
        return pack(batch)

    def made(loader: SlotLoader, task: Any, parcel: Parcel) -> None:
        masked.append(len(parcel.plan.known))
        bucket = parcel.plan.bucket
        assert len(parcel.data) < loader.source.batch_bytes(bucket) + 16_384, "but for padding and single numbers"
        planned(loader, task, parcel)

    masked: list[int] = []
    monkeypatch.setattr(MaskedVideo, "drawn", drawn_in_worker)
    monkeypatch.setattr(workers, "plan_parcel", packed)
    monkeypatch.setattr(SlotLoader, "_made", made)
    path = write_run(tmp_path, clips, "fun_inp_5b", bucket_config={"32px": {16: (1.0, 2)}})
    train_here(path, "--max_steps", "1", "--num_workers", "1")
    assert sum(masked) > 0
