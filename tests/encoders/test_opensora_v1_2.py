"""Open-Sora 1.2's autoencoder, against what that program computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from longtake.encoders.config import T5EncoderConfig
from longtake.encoders.files import t5_names
from longtake.encoders.opensora_v1_2 import OpenSoraAutoencoder, build
from longtake.encoders.opensora_v1_2_config import OpenSoraVAEConfig
from longtake.encoders.text import T5Encoder, t5_module
from longtake.system.encoders import _build_autoencoder

FOLDER = Path(__file__).parents[1] / "golden" / "opensora_v1_2"
SIZES = {
    "block_out_channels": (4, 4, 8, 8), "layers_per_block": 1, "norm_num_groups": 2,
    "filters": 4, "num_res_blocks": 1, "num_groups": 2,
}  # fmt: skip


OF_THE_WHOLE: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("image", "clip5", "clip17", "clip20", "clip34", "clip40", "odd")},
    "clip34_whole": {"micro_frame_size": 1000},
    "whole2d": {"micro_batch_size": 1000},
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The published layout: one file with every part."""
    parts = [load_file(FOLDER / f"vae_{name}_weights.safetensors") for name in ("spatial", "temporal")]
    path = tmp_path_factory.mktemp("vae") / "model.safetensors"
    save_file({name: tensor.float() for part in parts for name, tensor in part.items()}, path)
    return str(path)


def autoencoder(weights: str, **keys: Any) -> OpenSoraAutoencoder:
    config = OpenSoraVAEConfig(from_pretrained=weights, dtype="fp32", **SIZES, **keys)
    found = _build_autoencoder(config, torch.device("cpu"))
    assert isinstance(found, OpenSoraAutoencoder)
    found.load_decoder()
    return found


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize("name", [*OF_THE_WHOLE])
@torch.no_grad()
def test_latents_and_pixels_are_the_published_ones(weights: str, name: str) -> None:
    golden = load_file(FOLDER / f"vae_{name}.safetensors")
    ours = autoencoder(weights, **OF_THE_WHOLE[name])
    video = golden["video_u8"].float() / 127.5 - 1
    frames = video.shape[2]
    assert ours.latent(*video.shape[2:])[1:] == tuple(golden["z"].shape[2:])

    posterior = ours.posterior(video)
    close(posterior["mean"], golden["z_mode"])
    mean, logvar = ours.frame_moments(video).chunk(2, dim=1)
    noise = golden["noise_spatial"].unflatten(0, (len(video), frames)).transpose(1, 2)
    scale = ours.config.spatial_scale
    close(mean * scale, golden["spatial_mode"])
    of_frames = (mean + torch.exp(0.5 * logvar.clamp(-30, 20)) * noise) * scale
    moments = torch.cat([ours.moments(chunk) for chunk in of_frames.split(ours.stream_frames, dim=2)], dim=2)
    shift, factor = ours._constants(moments)
    mean, logvar = moments.chunk(2, dim=1)
    z = (mean + torch.exp(0.5 * logvar.clamp(-30, 20)) * golden["noise_temporal"] - shift) / factor
    close(z, golden["z"])
    close(ours.decode(golden["z"], frames), golden["decoded"].clamp(-1, 1))


@pytest.mark.parametrize("alone", [False, True])
@torch.no_grad()
def test_the_spatial_part_alone_gives_pixarts_latents(weights: str, alone: bool, tmp_path: Path) -> None:
    """Of the file of all parts, and of SDXL's own."""
    golden = load_file(FOLDER / "vae_clip5.safetensors")
    video, before = golden["video_u8"].float() / 127.5 - 1, "spatial_vae.module."
    if alone:
        parts = {name.removeprefix(before): of for name, of in load_file(weights).items() if name.startswith(before)}
        save_file(parts, weights := str(tmp_path / "sdxl.safetensors"))
    ours = autoencoder(weights, spatial_only=True, spatial_scale=0.13025)
    posterior = ours.posterior(video)
    close(posterior["mean"], golden["spatial_mode"] / 0.18215 * 0.13025)
    logvar = ours.frame_moments(video).chunk(2, dim=1)[1]
    close(posterior["std"], torch.exp(0.5 * logvar) * 0.13025)
    assert ours.latent(*video.shape[2:]) == tuple(posterior["mean"].shape[1:])
    flat = (posterior["mean"] / 0.13025).transpose(1, 2).flatten(0, 1)
    pixels = ours.parts.spatial_decoder(ours.parts.spatial_post_quant(flat)).unflatten(0, (len(video), -1))
    close(ours.decode(posterior["mean"], video.shape[2]), pixels.transpose(1, 2).clamp(-1, 1))


@torch.no_grad()
def test_the_part_in_time_gives_the_published_moments_and_frames(weights: str) -> None:
    golden, ours = load_file(FOLDER / "vae_temporal_cases.safetensors"), autoencoder(weights)
    for case in range(7):
        x, moments = golden[f"{case}.x"], golden[f"{case}.moments"]
        close(ours.moments(x), moments)
        mean, logvar = moments.chunk(2, dim=1)
        close(mean + torch.exp(0.5 * logvar.clamp(-30, 20)) * golden[f"{case}.noise"], golden[f"{case}.sample"])
        close(ours.latents_of_frames(mean, x.shape[2]), golden[f"{case}.decoded"])


def test_the_sizes_of_latents_are_the_published_ones() -> None:
    for chunk, pixels, latent in json.loads((FOLDER / "latent_size.json").read_text())["rows"]:
        config = OpenSoraVAEConfig(micro_frame_size=chunk or 10**6)
        assert None in pixels or config.latent(*pixels)[1:] == tuple(latent)


@torch.no_grad()
def test_blended_chunks_meet_in_what_the_autoencoder_makes_of_their_border(weights: str) -> None:
    golden = load_file(FOLDER / "vae_clip34.safetensors")
    plain = autoencoder(weights).decode(golden["z"], 34)
    ours = autoencoder(weights, blend_chunks=True)
    blended, again = ours.decode(golden["z"], 34), ours.decode(ours.posterior(plain[:, :, 9:26])["mean"], 17)
    assert torch.equal(blended[:, :, :9], plain[:, :, :9])
    assert torch.equal(blended[:, :, 26:], plain[:, :, 26:])
    share = (torch.arange(8) + 0.5)[:, None, None] / 8
    close(blended[:, :, 9:17], plain[:, :, 9:17] * (1 - share) + share * again[:, :, :8])
    (short,) = ours.decode_stream(golden["z"][:, :, :5], 17)
    assert torch.equal(short, plain[:, :, :17])


def test_the_parameters_of_the_published_weights_are_all_there() -> None:
    golden = json.loads((FOLDER / "state_keys.json").read_text())["VAE_Temporal_SD"]
    config = OpenSoraVAEConfig()
    shapes = {
        name: list(tensor.shape)
        for parts in (build(config, torch.float32),)
        for name, tensor in nn.ModuleDict({**parts.encoding, **parts.decoding}).state_dict().items()
    }
    own = build(config, torch.float32).names(
        {f"temporal_vae.{name}" for name in golden["tensors"]} | {"scale", "shift"}
    )
    assert {own_name: golden["tensors"][name.removeprefix("temporal_vae.")] for own_name, name in own.items()} == {
        name: shape for name, shape in shapes.items() if name.startswith("temporal")
    }


@torch.no_grad()
def test_t5_gives_what_it_gives_there_where_there_are_words() -> None:
    sizes = {"vocab_size": 64, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 3}
    module = t5_module({**sizes, "feed_forward_proj": "gated-gelu"}).eval()
    weights = {name: tensor.float() for name, tensor in load_file(FOLDER / "t5_weights.safetensors").items()}
    names = t5_names(weights)
    module.load_state_dict({name: weights[of_file] for name, of_file in names.items()})
    encoder = T5Encoder(T5EncoderConfig(dim=24, max_length=20, mask=True), module, None, torch.device("cpu"))
    golden = load_file(FOLDER / "t5_cases.safetensors")
    mask = golden["attention_mask"]
    ours = encoder.embed_ids(golden["input_ids"].long(), mask.long())
    close(ours, golden["y"][:, 0] * mask[..., None])
