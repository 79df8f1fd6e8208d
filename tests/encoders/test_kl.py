"""The learned autoencoders: what diffusers' own compute, in files as people have them, in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from longtake.contracts import UserError
from longtake.encoders.autoencoder_config import Autoencoder2DConfig, HunyuanVAEConfig
from longtake.encoders.causal_layers import attend_by_frame
from longtake.encoders.kl import HunyuanAutoencoder, ImageAutoencoder, samples_at_once
from longtake.system.encoders import _build_autoencoder
from tests.encoders.tiny_weights import FLUX, HUNYUAN, tiny_flux, tiny_hunyuan
from tests.precision import apart, autoencoder_in_float64, within

SCALE = 0.476986


def hunyuan(folder: Path, **changes: Any) -> HunyuanAutoencoder:
    file = {"from_pretrained": str(folder / "hunyuan_vae.safetensors"), "dtype": "fp32"}
    autoencoder = _build_autoencoder(HunyuanVAEConfig(**{**file, **HUNYUAN, **changes}), torch.device("cpu"))
    assert isinstance(autoencoder, HunyuanAutoencoder)
    return autoencoder


def flux(file: Path, **changes: Any) -> ImageAutoencoder:
    config = Autoencoder2DConfig(**{"from_pretrained": str(file), "dtype": "fp32", **FLUX, **changes})
    autoencoder = _build_autoencoder(config, torch.device("cpu"))
    assert isinstance(autoencoder, ImageAutoencoder)
    return autoencoder


def theirs(tmp_path: Path, tile: int | None = None, frames: int | None = None) -> Any:
    """diffusers' own model with the same weights; tiles as told."""
    model = tiny_hunyuan(tmp_path / "again.safetensors")
    model.use_framewise_encoding = model.use_framewise_decoding = frames is not None
    if tile is not None:
        model.enable_tiling(tile, tile, frames, tile // 2, tile // 2, frames and frames // 2)
    return model


def pixels(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("tiles", [(None, None), (16, None), (16, 8)], ids=["whole", "in space", "in space and time"])
@torch.no_grad()
def test_latents_and_pixels_are_diffusers_own(weights: Path, tmp_path: Path, tiles: tuple[int, int]) -> None:
    tile, frames = tiles
    options: dict[str, Any] = {"use_spatial_tiling": tile is not None, "use_temporal_tiling": frames is not None}
    options |= {"sample_size": tile or 256, "sample_tsize": frames or 64}
    ours, model = hunyuan(weights, tile_overlap_factor=0.5, **options), theirs(tmp_path, tile, frames)
    video = pixels(1, 3, 9, 16, 24)
    wanted, posterior = model.encode(video).latent_dist, ours.posterior(video)
    assert posterior["mean"].shape == (1, 4, 3, 2, 3)
    torch.testing.assert_close(posterior["mean"], wanted.mean * SCALE, rtol=0, atol=2e-6)
    torch.testing.assert_close(posterior["std"], wanted.std * SCALE, rtol=0, atol=2e-6)
    decoded = model.decode(wanted.mean).sample[:, :, :9].clamp(-1, 1)
    pixels_again = ours.decode(posterior["mean"], 9)
    with autoencoder_in_float64(ours):
        exact = ours.decode(ours.posterior(video)["mean"], 9)
    torch.testing.assert_close(pixels_again, decoded, rtol=0, atol=apart(exact, decoded))


@torch.no_grad()
def test_equal_tiles_are_those_of_their_size(weights: Path) -> None:
    video = pixels(1, 3, 5, 16, 408)  # 240 and 232 columns, which share 64
    ours, whole = hunyuan(weights, sample_size="auto"), hunyuan(weights, use_spatial_tiling=False)
    left, right = (whole.posterior(part)["mean"] for part in (video[..., :240], video[..., 176:]))
    mean = ours.posterior(video)["mean"]
    assert torch.equal(mean[..., :22], left[..., :22])
    rising = torch.arange(8) / 8
    torch.testing.assert_close(mean[..., 22:30], left[..., 22:] * (1 - rising) + right[..., :8] * rising)
    assert torch.equal(mean[..., 30:], right[..., 8:])
    decoded = ours.decode(mean, 5)
    assert torch.equal(decoded[..., :176], whole.decode(mean[..., :30], 5)[..., :176])
    assert torch.equal(decoded[..., 240:], whole.decode(mean[..., 22:], 5)[..., 64:])
    for small in (video[..., :384], video[..., :64]):  # 64: as long as neighbours overlap
        assert torch.equal(ours.posterior(small)["mean"], whole.posterior(small)["mean"])


@torch.no_grad()
def test_pieces_change_nothing(weights: Path) -> None:
    video = pixels(2, 3, 5, 16, 16)
    whole, pieces = hunyuan(weights), hunyuan(weights, piece_elements=5000)
    assert samples_at_once(whole.config, 5, 16, 16) >= 2
    assert samples_at_once(pieces.config, 5, 16, 16) == 1
    mean = whole.posterior(video)["mean"]
    decoded = whole.decode(mean, 5)
    with autoencoder_in_float64(whole):
        exact_mean, exact = whole.posterior(video)["mean"], whole.decode(mean, 5)
    torch.testing.assert_close(pieces.posterior(video)["mean"], mean, rtol=0, atol=apart(exact_mean, mean))
    torch.testing.assert_close(pieces.decode(mean, 5), decoded, rtol=0, atol=apart(exact, decoded))


@torch.no_grad()
def test_a_frame_attends_to_no_later_one(weights: Path) -> None:
    attention = hunyuan(weights).model.encoder.mid_block.attentions[0]
    attention.group_norm = torch.nn.Identity()  # its means are over all frames
    x = pixels(1, 8, 4, 3, 2)
    later = torch.cat([x[:, :, :2], x[:, :, 2:] + 1], dim=2)
    difference = (attend_by_frame(attention, later) - attend_by_frame(attention, x)).abs()
    assert difference[:, :, :2].max() == 0
    assert difference[:, :, 2:].max() > 0


def test_the_mode_has_no_std_and_is_the_mean(weights: Path) -> None:
    video = pixels(1, 3, 5, 16, 16)
    mode, sample = hunyuan(weights, posterior="mode"), hunyuan(weights)
    assert set(mode.posterior(video)) == {"mean"}
    assert torch.equal(mode.posterior(video)["mean"], sample.posterior(video)["mean"])
    assert (mode.is_random, sample.is_random) == (False, True)


def test_original_names_under_vae_are_read_too(weights: Path, tmp_path: Path) -> None:
    tiny_hunyuan(tmp_path / "hunyuan_vae.safetensors", prefix="vae.")
    video = pixels(1, 3, 5, 16, 16)
    assert torch.equal(hunyuan(tmp_path).posterior(video)["mean"], hunyuan(weights).posterior(video)["mean"])


def test_the_decoder_is_read_when_it_is_first_needed(weights: Path) -> None:
    autoencoder = hunyuan(weights)
    assert {p.device.type for p in autoencoder.model.encoder.parameters()} == {"cpu"}
    assert {p.device.type for p in autoencoder.model.decoder.parameters()} == {"meta"}
    autoencoder.decode(torch.zeros(1, 4, 2, 2, 2), 5)
    assert {p.device.type for p in autoencoder.parameters()} == {"cpu"}


def test_offloaded_is_the_same(weights: Path) -> None:
    video = pixels(1, 3, 5, 16, 16)
    away, here = hunyuan(weights, placement="offloaded"), hunyuan(weights)
    for _ in range(2):
        mean = here.posterior(video)["mean"]
        assert torch.equal(away.posterior(video)["mean"], mean)
        assert torch.equal(away.decode(mean, 5), here.decode(mean, 5))


@pytest.mark.slow
@torch.no_grad()
def test_compiled_layers_give_the_same(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph.code)
        return graph.forward

    compile_layer = nn.Module.compile
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    monkeypatch.setattr(nn.Module, "compile", lambda layer, **options: compile_layer(layer, **options, backend=backend))
    eager, compiled = hunyuan(weights), hunyuan(weights, compile=True)
    known: list[int] = []
    for shape in ((2, 3, 5, 16, 16), (1, 3, 9, 24, 16), (1, 3, 17, 16, 32)):
        video = pixels(*shape)
        mean = eager.posterior(video)["mean"]
        torch.testing.assert_close(compiled.posterior(video)["mean"], mean, rtol=0, atol=1e-6)
        decoded = eager.decode(mean, shape[2])
        torch.testing.assert_close(compiled.decode(mean, shape[2]), decoded, rtol=0, atol=1e-5)
        known.append(len(graphs))
    assert 0 < known[0] <= known[1] == known[2]  # graphs are for clips of any size


@torch.no_grad()
def test_fluxs_file_in_its_own_names_gives_diffusers_latents(weights: Path, tmp_path: Path) -> None:
    ours, model = flux(weights / "flux_ae.safetensors"), tiny_flux(tmp_path / "again.safetensors")
    stills = pixels(2, 3, 1, 24, 16)
    mean = model.encode(stills[:, :, 0]).latent_dist.mean
    latents = ours.posterior(stills)["mean"]
    assert latents.shape == (2, 4, 1, 3, 2)
    torch.testing.assert_close(latents[:, :, 0], (mean - 0.1159) * 0.3611, rtol=0, atol=2e-6)
    decoded = ours.decode(latents, 1)
    with autoencoder_in_float64(ours):
        exact = ours.decode(latents, 1)
    wanted = model.decode(mean).sample.clamp(-1, 1)
    torch.testing.assert_close(decoded[:, :, 0], wanted, rtol=0, atol=apart(exact, decoded))


@torch.no_grad()
def test_flux_takes_the_frames_of_a_video_one_by_one(weights: Path) -> None:
    ours, video = flux(weights / "flux_ae.safetensors"), pixels(2, 3, 3, 16, 16)
    latents = ours.posterior(video)["mean"]
    torch.testing.assert_close(latents[:, :, 1:2], ours.posterior(video[:, :, 1:2])["mean"], rtol=0, atol=1e-6)


def test_every_tensor_of_fluxs_autoencoder_has_one_original_name(weights: Path) -> None:
    original = set(load_file(weights / "flux_ae.safetensors"))
    assert {"encoder.down.2.block.0.nin_shortcut.weight", "decoder.up.3.upsample.conv.bias"} <= original
    assert {
        "encoder.mid.attn_1.proj_out.weight",
        "decoder.mid.block_2.norm1.bias",
        "decoder.norm_out.weight",
    } <= original
    assert not any("resnets" in name or "attentions" in name for name in original)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda state: state.pop("encoder.conv_in.conv.weight"), "lacks encoder.conv_in.conv.weight"),
        (lambda state: state.update(extra=torch.zeros(1)), "has unknown extra"),
        (
            lambda state: state["encoder.conv_in.conv.weight"].view(-1)[0].fill_(torch.nan),
            "holds 1 values that are NaN",
        ),
        (
            lambda state: state.update({"quant_conv.bias": torch.zeros(3)}),
            r"quant_conv.bias is \[3\] where ae describes \[8\]",
        ),
    ],
)
def test_a_file_of_something_else_is_named(weights: Path, tmp_path: Path, damage: Any, sentence: str) -> None:
    state = load_file(weights / "hunyuan_vae.safetensors")
    damage(state)
    save_file(state, tmp_path / "hunyuan_vae.safetensors")
    with pytest.raises(UserError, match=sentence):
        hunyuan(tmp_path)


def test_frames_and_sides_that_do_not_fit_are_refused(weights: Path) -> None:
    autoencoder = hunyuan(weights)
    autoencoder.check(33, 192, 336)
    with pytest.raises(UserError, match=r"32 frames are not 4k\+1; choose 29 or 33"):
        autoencoder.check(32, 192, 336)
    with pytest.raises(UserError, match="192x340 pixels do not divide into cells of 8"):
        autoencoder.check(33, 192, 340)


def test_tiles_are_whole_latent_cells() -> None:
    with pytest.raises(ValueError, match=r"ae\.sample_size = 250"):
        HunyuanVAEConfig(sample_size=250)
    with pytest.raises(ValueError, match="sample_size"):
        HunyuanVAEConfig(sample_size=-256)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("placement", ["resident", "offloaded"])
def test_a_gpu_encodes_and_decodes_what_a_cpu_does(
    weights: Path, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # as `build_system` sets it
    file = {"from_pretrained": str(weights / "hunyuan_vae.safetensors"), "placement": placement}
    video = pixels(2, 3, 9, 16, 16)
    exact = hunyuan(weights)
    mean = exact.posterior(video)["mean"]
    for dtype, limit in (("fp32", 1e-3), ("bf16", 5e-2)):
        config = HunyuanVAEConfig(**{**file, **HUNYUAN, "dtype": dtype})
        ours = _build_autoencoder(config, torch.device("cuda"))
        assert within((ours.posterior(video.cuda())["mean"].cpu() - mean).abs().max(), limit * mean.abs().max())
        decoded = ours.decode(mean.cuda(), 9).cpu()
        assert within((decoded - exact.decode(mean, 9)).abs().mean(), limit)
