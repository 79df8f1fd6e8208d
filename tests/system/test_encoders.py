"""Learned encoders in a system: what they cost, where they are missing, and whole runs with them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from longtake.config.load import resolve
from longtake.contracts import UserError
from longtake.encode.fit import differences, encoder_digests
from longtake.encoders.config import T5EncoderConfig, WordsConfig
from longtake.families.opensora_v2 import OPENSORA_V2
from longtake.generate.run import generate, open_system, read_video
from longtake.generate.source import resolve_source
from longtake.parallel.world import start_world
from longtake.system.config import SystemConfig
from longtake.system.encoders import Encoders, build_encoders, encoder_bytes, refuse_sharded_text
from tests.encode.stores import contents, make_store
from tests.encoders.conftest import described, weights
from tests.encoders.tiny_weights import CLIP_DIM, T5_DIM
from tests.train.runs import finish, metrics, start, train_here, write_config

__all__ = ["described", "weights"]
CPU = torch.device("cpu")
MODEL = {"in_channels": 16, "patch_size": 2, "context_in_dim": T5_DIM, "vec_in_dim": CLIP_DIM}
PUBLISHED = {"ae": {"type": "hunyuan_vae"}, "t5": {"type": "text_embedder"}, "clip": {"type": "text_embedder"}}
BUCKETS = {"32px": {1: (1.0, 4), 5: (1.0, 3)}}


def tiny(described: dict[str, Any], *overrides: str) -> SystemConfig:
    sizes = {"hidden_size": 36, "num_heads": 2, "axes_dim": (6, 6, 6), "depth": 1, "depth_single_blocks": 1}
    return resolve({**described, "model": {**MODEL, **sizes}}, overrides, SystemConfig).value


def held(encoders: Encoders) -> dict[str, int]:
    """Bytes of the weights that are there."""
    parts = {"ae": encoders.autoencoder, "t5": encoders.of_captions["text"], "clip": encoders.of_captions["vector"]}
    return {
        name: sum(p.nbytes for p in part.parameters() if not p.is_meta)
        for name, part in parts.items()
        if isinstance(part, nn.Module)
    }


def test_bytes_are_counted_without_building(described: dict[str, Any]) -> None:
    config = tiny(described)
    encoders = build_encoders(config, CPU)
    assert encoder_bytes(config) == held(encoders)
    encoders.autoencoder.decode(torch.zeros(1, 4, 1, 2, 2), 1)
    assert encoder_bytes(config, decodes=True) == held(encoders)


def test_the_published_encoders_are_counted_where_no_file_is_at_hand() -> None:
    config = resolve(PUBLISHED, [], SystemConfig).value
    found = encoder_bytes(config, decodes=True)
    # 4.76 G parameters of T5 XXL's encoder, 123 M of CLIP-L's text half, 100 M + 146 M of the autoencoder; bf16
    assert {name: round(size / 2e6) for name, size in found.items()} == {"ae": 246, "t5": 4762, "clip": 123}
    shared = encoder_bytes(resolve(PUBLISHED, ["--t5.placement", "sharded"], SystemConfig).value, 8)
    away = encoder_bytes(resolve(PUBLISHED, ["--t5.placement", "offloaded"], SystemConfig).value, 8)
    page = (Path(__file__).parents[2] / "docs" / "encoders.md").read_text(encoding="utf-8")
    resident, cut, visiting, clip = (
        f"{n / 1e9:.2f} GB" for n in (found["t5"], shared["t5"], away["t5"], found["clip"])
    )
    assert f"| T5 v1.1 XXL | {resident} | {cut} | {visiting} |" in page
    assert f"| CLIP-L's text half | {clip} |" in page
    encoder, both = (f"{n / 1e9:.2f} GB" for n in (shared["ae"], found["ae"]))
    assert f"and with the decoder | {encoder}, {both} |" in page


def test_the_sections_of_opensora_are_taken_as_they_are_written() -> None:
    ae = {"type": "hunyuan_vae", "from_pretrained": "./ckpts/hunyuan_vae.safetensors", "in_channels": 3}
    ae |= {"out_channels": 3, "layers_per_block": 2, "latent_channels": 16}
    ae |= {"use_spatial_tiling": True, "use_temporal_tiling": False}
    text = {"type": "text_embedder"}
    t5 = {**text, "from_pretrained": "./ckpts/google/t5-v1_1-xxl", "max_length": 512, "shardformer": True}
    clip = {**text, "from_pretrained": "./ckpts/openai/clip-vit-large-patch14", "max_length": 77}
    config = resolve({"ae": ae, "t5": t5, "clip": clip}, [], SystemConfig).value
    assert config.ae.latent(129, 192, 336) == (16, 33, 24, 42)
    assert (config.size_divisor, config.t5.dim, config.clip.dim) == (16, 4096, 768)
    with pytest.raises(UserError, match=r"ae\.from_pretrained = './ckpts/hunyuan_vae\.safetensors': no such file"):
        build_encoders(config, CPU)


def test_with_hub_access_off_a_missing_file_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for key, name in (
        ("ae", "hpcai-tech/Open-Sora-v2 hunyuan_vae.safetensors"),
        ("t5", "google/t5-v1_1-xxl"),
        ("clip", "openai/clip-vit-large-patch14"),
    ):
        config = resolve(
            {key: {**PUBLISHED[key], "cache_dir": str(tmp_path)}, "model": _fitting(key)}, [], SystemConfig
        )
        with pytest.raises(UserError) as refusal:
            build_encoders(config.value, CPU)
        sentence = str(refusal.value)
        assert "\n" not in sentence
        assert sentence.startswith(f"{key}.from_pretrained = ")
        assert f"in the Hugging Face cache ({tmp_path}), and hub access is off (HF_HUB_OFFLINE)" in sentence
        assert f"run `hf download {name}`" in sentence


def _fitting(key: str) -> dict[str, int]:
    text = {"context_in_dim": 4096 if key == "t5" else 128, "vec_in_dim": 768 if key == "clip" else 128}
    return {**text, "in_channels": 64 if key == "ae" else 4 * 1536}


def test_digests_tell_weights_apart_and_do_not_ask_for_the_decoder(described: dict[str, Any]) -> None:
    plain, away = (
        build_encoders(tiny(described), CPU),
        build_encoders(tiny(described, "--t5.placement", "offloaded"), CPU),
    )
    known = encoder_digests(plain)
    plain.autoencoder.decode(torch.zeros(1, 4, 1, 2, 2), 1)
    assert all(known.values())
    assert encoder_digests(plain) == encoder_digests(away) == known
    with torch.no_grad():
        next(plain.of_captions["text"].parameters()).add_(1)
    (difference,) = differences(encoder_digests(plain), known, "weights")
    assert difference.startswith("weights.text is ")


def test_text_encoders_serve_another_system_that_asks_for_the_same(described: dict[str, Any]) -> None:
    first = build_encoders(tiny(described), CPU)
    again = build_encoders(tiny(described), CPU, kept=first.of_captions)
    assert again.of_captions == first.of_captions
    assert again.autoencoder is not first.autoencoder
    masked = build_encoders(tiny(described, "--t5.mask", "True"), CPU, kept=first.of_captions)
    assert masked.of_captions["text"] is not first.of_captions["text"]
    assert masked.of_captions["text"].config.mask
    assert masked.of_captions["vector"] is first.of_captions["vector"]


def test_a_sharded_encoder_needs_captions_on_every_rank() -> None:
    sharded = SimpleNamespace(t5=T5EncoderConfig(placement="sharded"), clip=WordsConfig(), family=OPENSORA_V2)
    refuse_sharded_text(sharded, missing=0)
    refuse_sharded_text(SimpleNamespace(**{**vars(sharded), "t5": T5EncoderConfig(placement="offloaded")}), missing=3)
    with pytest.raises(UserError, match=r"3 samples are missing in dataset\.latents") as refusal:
        refuse_sharded_text(sharded, missing=3)
    assert str(refusal.value).endswith(
        'write t5.placement = "offloaded", or complete the store by `longtake data encode RUN -o FOLDER`'
    )


@pytest.mark.slow
def test_peers_that_share_an_encoding_train_the_same_run(
    tmp_path: Path, clips: Path, described: dict[str, Any]
) -> None:
    described = {**described, "ae": {**described["ae"], "sample_size": 16, "tile_overlap_factor": 0.5}}  # tiles
    run = run_file(tmp_path, clips, described)
    assert_two_processes_train_the_same(run, "--parallel.sequence", "2")


@pytest.mark.slow
def test_a_text_encoder_cut_over_ranks_makes_the_same_store(
    tmp_path: Path, clips: Path, described: dict[str, Any]
) -> None:
    run = run_file(tmp_path, clips, described)
    make_store(run, tmp_path / "alone", views=1)
    words = ("data", "encode", run, "--dataset.views", 1, "--shard-mb", 0.1, "--t5.placement", "sharded")
    code, out, error = finish(start(*words, "-o", tmp_path / "two", processes=2))
    assert code == 0, out + error
    stores = [
        {name: value for name, value in contents(tmp_path / name).items() if not name.startswith("latents")}
        for name in ("alone", "two")
    ]
    assert any(name.startswith("texts") for name in stores[0])
    assert stores[0] == stores[1]


def assert_two_processes_train_the_same(run: Path, *words: str) -> None:
    """Two processes with these flags, and one without them, have the same losses."""
    alone, _ = train_here(run, "--exp-name", "alone")
    code, out, error = finish(start("train", run, "--exp-name", "two", *words, processes=2))
    assert code == 0, out + error
    losses = [[line["loss"] for line in metrics(f)] for f in (alone.folder, alone.folder.with_name("two"))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def run_file(folder: Path, clips: Path, described: dict[str, Any], **changes: Any) -> Path:
    model = {**MODEL, "hidden_size": 36, "num_heads": 2, "axes_dim": (6, 6, 6), "depth": 1, "depth_single_blocks": 1}
    objective = {"predict": "velocity"}
    return write_config(
        folder, clips, **described, model=model, objective=objective, bucket_config=BUCKETS, max_steps=3, **changes
    )


@pytest.mark.slow
def test_a_run_trains_samples_and_trains_from_stored_latents(
    tmp_path: Path, clips: Path, described: dict[str, Any]
) -> None:
    run = run_file(tmp_path, clips, described)
    outcome, _ = train_here(run, "--dataset.views", "2", "--exp-name", "online")
    store = tmp_path / "store"
    assert make_store(run, store).bad == 0
    stored, said = train_here(run, "--dataset.views", "2", "--dataset.latents", str(store), "--exp-name", "stored")
    assert "no encoder is loaded" in said
    losses = [[line["loss"] for line in metrics(folder.folder)] for folder in (outcome, stored)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # batched otherwise, so rounded otherwise
    flags = ["--sampling-option.resolution", "32px", "--sampling-option.num-frames", "5"]
    flags += ["--sampling-option.aspect-ratio", "1:1", "--sampling-option.num-steps", "2"]
    flags += ["--save-dir", str(tmp_path / "made"), "--prompt", "a red circle"]
    source = resolve_source(str(outcome.folder), flags)
    with start_world("cpu") as world:
        system = open_system(source, world, lambda text: None)
        (video,) = generate(system, source.config, world, lambda text: None)
    assert read_video(video.path).shape == (5, 32, 32, 3)


@pytest.mark.slow
def test_a_text_encoder_cut_over_ranks_trains_the_same_run(
    tmp_path: Path, clips: Path, described: dict[str, Any]
) -> None:
    run = run_file(tmp_path, clips, described)
    assert_two_processes_train_the_same(run, "--t5.placement", "sharded")
