"""Wan's autoencoders: diffusers' numbers part by part, in tiles, from the official files, in bounded memory."""

from __future__ import annotations

import json
import lzma
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from longtake.contracts import UserError
from longtake.encoders.autoencoder import build_autoencoder
from longtake.encoders.wan import WanAutoencoder
from longtake.encoders.wan_config import WanVAEConfig
from longtake.models.trace import Trace
from longtake.system.encoders import _build_autoencoder
from tests.encoders.tiny_weights import tiny_wan
from tests.precision import apart, autoencoder_in_float64

NAMES = json.loads(lzma.decompress((Path(__file__).parents[1] / "golden" / "wan" / "vae_names.json.xz").read_bytes()))
VERSIONS = pytest.mark.parametrize("version", ["2.1", "2.2"])
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of tiny weights in diffusers' layout, by version."""
    folder = tmp_path_factory.mktemp("wan")
    for version in ("2.1", "2.2"):
        tiny_wan(folder / version, version)
    return {version: folder / version for version in ("2.1", "2.2")}


def autoencoder(folder: Path, **keys: Any) -> WanAutoencoder:
    result = _build_autoencoder(WanVAEConfig(**{"from_pretrained": str(folder), "dtype": "fp32", **keys}), CPU)
    assert isinstance(result, WanAutoencoder)
    result.load_decoder()
    return result


def diffusers(folder: Path) -> Any:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan.from_pretrained(folder).eval()


def numbers(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


@VERSIONS
@pytest.mark.parametrize("frames", [1, 5, 7, 17])
@torch.no_grad()
def test_wan_latents_and_pixels_are_those_of_diffusers(folders: dict[str, Path], version: str, frames: int) -> None:
    ours, theirs = autoencoder(folders[version], posterior="sample"), diffusers(folders[version])
    assert ours.config.version == version
    video = numbers(2, 3, frames, 32, 48)
    expected = theirs.encode(video).latent_dist
    mean, std = (
        torch.tensor(numbers)[:, None, None, None] for numbers in (ours.config.latents_mean, ours.config.latents_std)
    )
    posterior = ours.posterior(video)
    assert tuple(posterior["mean"].shape) == (2, *ours.latent(frames, 32, 48))
    with autoencoder_in_float64(ours):
        exact = ours.posterior(video)
    bound = apart(exact["mean"], posterior["mean"])
    torch.testing.assert_close(posterior["mean"], (expected.mean - mean) / std, rtol=0, atol=bound)
    bound = apart(exact["std"], posterior["std"])
    torch.testing.assert_close(posterior["std"], expected.std / std, rtol=0, atol=bound)

    z, whole = numbers(1, *ours.latent(frames, 32, 48)), frames - (frames - 1) % 4
    pixels = ours.decode((z - mean) / std, whole)
    with autoencoder_in_float64(ours):
        exact_pixels = ours.decode((z.double() - mean) / std, whole)
    torch.testing.assert_close(pixels, theirs.decode(z).sample, rtol=0, atol=apart(exact_pixels, pixels))


@VERSIONS
@torch.no_grad()
def test_wan_stream_is_bitwise_the_whole_video(folders: dict[str, Path], version: str) -> None:
    ours, video = autoencoder(folders[version]), numbers(2, 3, 37, 16, 32)
    lengths = ours.stream_lengths(37)
    assert lengths == [17, 16, 4]
    chunks = list(ours.posterior_of_stream(video.split(lengths, dim=2)))
    mean = ours.posterior(video)["mean"]
    assert [set(chunk) for chunk in chunks] == [{"mean"}] * 3
    assert torch.equal(torch.cat([chunk["mean"] for chunk in chunks], dim=2), mean)
    parts = list(ours.decode_stream(mean, 37))
    assert [part.shape[2] for part in parts] == [1] + [4] * 9
    assert torch.equal(torch.cat(parts, dim=2), ours.decode(mean, 37))


@VERSIONS
@torch.no_grad()
def test_wan_tiles_are_cut_and_blended_as_in_diffusers(folders: dict[str, Path], version: str) -> None:
    tile, stride, shape = (32, 16, (40, 56)) if version == "2.1" else (64, 32, (64, 96))
    theirs = diffusers(folders[version])
    theirs.enable_tiling(tile, tile, stride, stride)
    keys = {"tile_height": tile, "tile_width": tile, "tile_overlap_height": 0.5, "tile_overlap_width": 0.5}
    ours, plain = autoencoder(folders[version], use_tiling=True, **keys), autoencoder(folders[version])
    video = numbers(1, 3, 5, *shape)
    mean, expected = ours.posterior(video)["mean"], theirs.encode(video).latent_dist.mean
    assert (plain.posterior(video)["mean"] - mean).abs().max() > 1e-3
    shift, scale = ours.scaling(video)
    z = numbers(1, *ours.latent(5, *shape))
    decoded = ours.decode((z - shift) * scale, 5)
    with autoencoder_in_float64(ours):
        exact, exact_decoded = ours.posterior(video)["mean"], ours.decode((z.double() - shift) * scale, 5)
    torch.testing.assert_close(mean, (expected - shift) * scale, rtol=0, atol=apart(exact, mean))
    torch.testing.assert_close(decoded, theirs.decode(z).sample, rtol=0, atol=apart(exact_decoded, decoded))


@VERSIONS
def test_wan_names_and_sizes_are_those_of_the_official_file(version: str) -> None:
    ours, listed = build_autoencoder(WanVAEConfig(version=version)), NAMES[version]
    assert isinstance(ours, WanAutoencoder)
    state = ours.model.state_dict()
    assert {name: [ours.original_name(name), list(tensor.shape)] for name, tensor in state.items()} == listed["tensors"]
    assert sum(tensor.numel() for tensor in state.values()) == listed["parameters"]


@VERSIONS
@torch.no_grad()
def test_wan_official_pth_gives_the_same_latents(folders: dict[str, Path], tmp_path: Path, version: str) -> None:
    expected, file = autoencoder(folders[version]), tmp_path / f"Wan{version}_VAE.pth"
    state = {expected.original_name(name): tensor for name, tensor in expected.model.state_dict().items()}
    torch.save(state, file)
    (tmp_path / "config.json").write_text('{"_class_name": "WanModel"}')  # of the denoiser, next to it as published
    sizes = {"base_dim": 3 + (version == "2.1"), "decoder_base_dim": 4, "num_res_blocks": 1}
    ours = autoencoder(file, **sizes)
    assert ours.config.version == version
    video = numbers(1, 3, 5, 16, 16)
    mean = ours.posterior(video)["mean"]
    assert torch.equal(mean, expected.posterior(video)["mean"])
    assert torch.equal(ours.decode(mean, 5), expected.decode(mean, 5))
    save_file(state, tmp_path / "wan.safetensors")  # as ComfyUI has it
    again = autoencoder(tmp_path / "wan.safetensors", version=version, **sizes)
    assert torch.equal(again.posterior(video)["mean"], mean)


def test_wan_pth_with_more_than_tensors_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    state = autoencoder(folders["2.1"]).model.state_dict()
    torch.save(state | {"lr": Namespace(value=1)}, tmp_path / "Wan2.1_VAE.pth")
    with pytest.raises(UserError, match=r"holds lr, a argparse\.Namespace, expected tensors alone"):
        autoencoder(tmp_path / "Wan2.1_VAE.pth", base_dim=4, num_res_blocks=1)


@VERSIONS
def test_wan_memory_does_not_grow_with_frames(version: str) -> None:
    config = WanVAEConfig(version=version, base_dim=8, decoder_base_dim=8, num_res_blocks=1, dtype="fp32")
    ours = build_autoencoder(config)
    assert isinstance(ours, WanAutoencoder)

    def peak(run: Callable[[], Any]) -> int:
        with torch.no_grad(), Trace(ours) as trace:
            run()
        return trace.peak

    def encode(frames: int) -> None:
        chunks = (torch.empty(1, 3, length, 32, 64, device="meta") for length in ours.stream_lengths(frames))
        for _ in ours.posterior_of_stream(chunks):
            pass

    def decode(frames: int) -> None:
        for _ in ours.decode_stream(latents[frames], frames):
            pass

    latents = {frames: torch.empty(1, *ours.latent(frames, 32, 64), device="meta") for frames in (17, 33)}
    assert peak(lambda: encode(49)) == peak(lambda: encode(33))
    grown = peak(lambda: decode(33)) - peak(lambda: decode(17))
    assert grown <= 3 * (latents[33].nbytes - latents[17].nbytes)  # as given, unscaled, and in between


@torch.no_grad()
def test_wan_compiled_norms_give_the_same(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **options: compiled.append(type(layer).__name__))
    autoencoder(folders["2.1"], compile=True)
    assert set(compiled) == {"WanRMS_norm"}


def test_wan_length_that_is_not_4k_plus_1_is_refused_with_its_neighbours() -> None:
    with pytest.raises(UserError, match=r"82 frames are not 4k\+1; choose 81 or 85"):
        WanVAEConfig().check(82, 480, 832)
    WanVAEConfig(version="2.2").check(121, 704, 1280)
    with pytest.raises(UserError, match="multiples of 16"):
        WanVAEConfig(version="2.2").check(121, 720, 1288)


def test_wan_section_takes_sizes_from_config_or_version(folders: dict[str, Path]) -> None:
    large = WanVAEConfig(from_pretrained="Wan2.2-TI2V-5B/Wan2.2_VAE.pth")
    assert (large.version, large.latent_channels, large.base_dim, large.decoder_base_dim) == ("2.2", 48, 160, 256)
    assert large.latents_std[41] == 1.06
    assert WanVAEConfig.model_validate({"version": 2.2}).from_pretrained == "Wan-AI/Wan2.2-TI2V-5B/Wan2.2_VAE.pth"
    small = WanVAEConfig(from_pretrained=str(folders["2.2"]))
    assert (small.version, small.base_dim, small.num_res_blocks, small.latent.spatial) == ("2.2", 3, 1, 16)
    assert WanVAEConfig(**small.model_dump()) == small
    assert WanVAEConfig().content() == WanVAEConfig(mini_batch=2, placement="offloaded").content()


def test_wan_section_refuses_what_would_be_decoded_wrongly(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds the autoencoder of Wan 2\.2, expected 2\.1"):
        WanVAEConfig(from_pretrained=str(folders["2.2"]), version="2.1")
    facts = json.loads((folders["2.1"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(facts | {"temperal_downsample": [True, True, True]}))
    with pytest.raises(ValueError, match=r"temperal_downsample is .* there, and only"):
        WanVAEConfig(from_pretrained=str(tmp_path))
    (tmp_path / "config.json").write_text('{"_class_name": "WanTransformer3DModel"}')
    with pytest.raises(ValueError, match="holds a WanTransformer3DModel; name the `vae` folder"):
        WanVAEConfig(from_pretrained=str(tmp_path))
    with pytest.raises(ValueError, match=r"ae\.latents_std: has 48 numbers, expected one for each of 16"):
        WanVAEConfig(latents_std=(1.0,) * 48)
    with pytest.raises(ValueError, match=r"ae\.tile_width = 100: a tile and its overlap \(25\) must be whole"):
        WanVAEConfig(use_tiling=True, tile_width=100)
    keys = WanVAEConfig().model_dump() | {"from_pretrained": str(folders["2.2"]), "dtype": "fp32"}
    with pytest.raises(UserError, match=r"lacks .*describe them in ae"):
        _build_autoencoder(WanVAEConfig(**keys), CPU)
