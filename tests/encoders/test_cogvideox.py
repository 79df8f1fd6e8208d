"""CogVideoX's autoencoder: diffusers' and VideoX-Fun's numbers, in tiles, in batches, at any number of frames."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from longtake.encoders.autoencoder_config import CogVideoXVAEConfig
from longtake.encoders.cogvideox import CogVideoXAutoencoder, Downsample, chunks
from longtake.parallel.shared_work import Tile, deal
from longtake.system.encoders import _build_autoencoder
from tests.precision import apart, autoencoder_in_float64

FOLDER = Path(__file__).parents[1] / "golden" / "cogvideox" / "vae"
SCALE = 1.15258426
GOLDEN = load_file(FOLDER / "io.safetensors")


def autoencoder(**keys: Any) -> CogVideoXAutoencoder:
    config = CogVideoXVAEConfig(**{"from_pretrained": str(FOLDER), "dtype": "fp32", **keys})
    found = _build_autoencoder(config, torch.device("cpu"))
    assert isinstance(found, CogVideoXAutoencoder)
    found.load_decoder()
    return found


def numbers(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize("frames", [1, 9, 17])
@torch.no_grad()
def test_latents_and_pixels_are_the_published_ones(frames: int) -> None:
    ours, golden = autoencoder(), {name: GOLDEN[f"f{frames}.{name}"] for name in ("clip_u8", "mode", "sample", "z")}
    posterior = ours.posterior((golden["clip_u8"].float() - 128) / 128)
    drawn = posterior["mean"] + posterior["std"] * GOLDEN[f"f{frames}.sample_normal"]
    torch.testing.assert_close(posterior["mean"], golden["mode"] * SCALE, rtol=0, atol=1e-4)
    torch.testing.assert_close(drawn, golden["sample"] * SCALE, rtol=0, atol=1e-4)
    decoded = GOLDEN[f"f{frames}.decoded"]
    torch.testing.assert_close(ours._decoded(golden["z"]), decoded, rtol=0, atol=1e-4)
    torch.testing.assert_close(ours.decode(golden["z"] * SCALE, frames), decoded.clamp(-1, 1), rtol=0, atol=1e-4)
    by_fun = autoencoder(first_latent_alone=True)._decoded(golden["z"])
    torch.testing.assert_close(by_fun, GOLDEN.get(f"f{frames}.decoded_fun", by_fun), rtol=0, atol=1e-4)


@torch.no_grad()
def test_tiles_and_batches_are_diffusers_own() -> None:
    from diffusers import AutoencoderKLCogVideoX

    model = AutoencoderKLCogVideoX.from_pretrained(FOLDER).eval()
    model.enable_tiling(32, 48, 1 / 4, 1 / 3)
    tile = {"tile_height": 32, "tile_width": 48, "tile_overlap_height": 1 / 4, "tile_overlap_width": 1 / 3}
    ours, video = autoencoder(use_tiling=True, mini_batch=2, **tile), numbers(3, 3, 5, 40, 64)
    wanted, mean = model.encode(video).latent_dist.mean, ours.posterior(video)["mean"]
    assert (autoencoder().posterior(video)["mean"] - mean).abs().max() > 1e-2
    z = numbers(3, 4, 3, 5, 8)
    decoded = ours._decoded(z)
    with autoencoder_in_float64(ours):
        exact_mean, exact = ours.posterior(video)["mean"], ours._decoded(z.double())
    torch.testing.assert_close(mean, wanted * SCALE, rtol=0, atol=apart(exact_mean, mean))
    torch.testing.assert_close(decoded, model.decode(z).sample, rtol=0, atol=apart(exact, decoded))


@torch.no_grad()
def test_samples_come_out_alike_in_any_batch() -> None:
    one, all_at_once, video = autoencoder(), autoencoder(mini_batch=3), numbers(3, 3, 13, 16, 8)
    mean = one.posterior(video)["mean"]
    decoded = one.decode(mean, 13)
    with autoencoder_in_float64(one):
        exact_mean, exact = one.posterior(video)["mean"], one.decode(mean, 13)
    torch.testing.assert_close(all_at_once.posterior(video)["mean"], mean, rtol=0, atol=apart(exact_mean, mean))
    torch.testing.assert_close(all_at_once.decode(mean, 13), decoded, rtol=0, atol=apart(exact, decoded))


@torch.no_grad()
def test_each_tile_is_of_the_shape_that_peers_are_told() -> None:
    ours, told = autoencoder(use_tiling=True, tile_height=32, tile_overlap_height=0.25, tile_width=40), []

    def compute(tiles: Sequence[Tile]) -> list[Tensor]:
        results = [tile.run() for tile in tiles]
        told.extend((tile.shape, tuple(result.shape)) for tile, result in zip(tiles, results, strict=True))
        return results

    ours.compute = compute
    ours.decode(ours.posterior(numbers(1, 3, 13, 40, 64))["mean"], 13)
    assert len(told) > 4
    assert all(said == found for said, found in told)


@pytest.mark.parametrize(("alone", "known"), [(False, 2), (True, 3)])
@torch.no_grad()
def test_an_even_number_of_latents_gives_as_many_frames_as_were_encoded(alone: bool, known: int) -> None:
    """As CogVideoX 1.5 has them; diffusers' own gives three more, of which the first come from no first frame."""
    ours, video = autoencoder(first_latent_alone=alone), numbers(1, 3, 13, 16, 8)
    z = ours.posterior(video)["mean"]
    assert z.shape[2] == 4
    decoded = ours._decoded(z)
    assert decoded.shape == video.shape
    frames = 4 * known - 3
    torch.testing.assert_close(decoded[:, :, :frames], ours._decoded(z[:, :, :known]), rtol=0, atol=1e-5)
    assert ours.latent(85, 8, 8)[1] == 22


@pytest.mark.parametrize(("frames", "encoded"), [(97, None), (93, None), (105, 48), (13, None)])
@torch.no_grad()
def test_a_stream_of_chunks_is_the_whole_video(frames: int, encoded: int | None) -> None:
    ours, video = autoencoder(encode_frames=encoded), numbers(2, 3, frames, 16, 8)
    lengths = ours.stream_lengths(frames)
    assert (sum(lengths), len(lengths)) == (frames, {13: 1, 93: 1}.get(frames, 2))
    found = list(ours.posterior_of_stream(video.split(lengths, dim=2)))
    whole = ours.posterior(video)
    for name, expected in whole.items():
        assert torch.equal(torch.cat([part[name] for part in found], dim=2), expected)
    parts = list(ours.decode_stream(whole["mean"], frames))
    assert len(parts) == whole["mean"].shape[2] // 2
    assert torch.equal(torch.cat(parts, dim=2), ours.decode(whole["mean"], frames))


@torch.no_grad()
def test_ranks_that_share_groups_stream_too() -> None:
    """Each with the caches of its own groups."""
    ours, video = autoencoder(mini_batch=1), numbers(3, 3, 97, 16, 8)
    whole = ours.posterior(video)["mean"]
    chunks = video.split(ours.stream_lengths(97), dim=2)
    made: list[list[torch.Tensor]] = []  # by the second rank, a list a chunk

    def run(rank: int, tiles: Sequence[Tile]) -> list[torch.Tensor]:
        owners = deal([math.prod(tile.shape) for tile in tiles], 2)
        theirs = made.pop(0) if rank == 0 else [torch.zeros(tile.shape) for tile in tiles]
        done = [
            tile.run() if owner == rank else other for tile, owner, other in zip(tiles, owners, theirs, strict=True)
        ]
        assert [tuple(one.shape) for one in done] == [tuple(tile.shape) for tile in tiles]
        if rank == 1:
            made.append(done)
        return done

    for rank in (1, 0):
        ours.compute = partial(run, rank)
        found = torch.cat([part["mean"] for part in ours.posterior_of_stream(chunks)], dim=2)
    assert torch.equal(found, whole)
    z = whole[:, :, :5]
    for rank in (1, 0):
        ours.compute = partial(run, rank)
        parts = list(ours.decode_stream(z, 17))
    assert len(parts) == 2
    assert torch.equal(torch.cat(parts, dim=2), autoencoder().decode(z, 17))


@torch.no_grad()
def test_frames_encoded_together_share_the_means_of_the_normalisation() -> None:
    video = numbers(1, 3, 97, 16, 8)
    apart, together = (autoencoder(encode_frames=count).posterior(video)["mean"] for count in (None, 48))
    assert (apart - together).abs().max() > 1e-3
    assert torch.equal(autoencoder(encode_frames=8).posterior(video)["mean"], apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("frames", [1, 4, 9])
@torch.no_grad()
def test_downsample_gives_bitwise_what_diffusers_gives(dtype: torch.dtype, frames: int) -> None:
    from diffusers.models.downsampling import CogVideoXDownsample3D

    x = numbers(2, 6, frames, 8, 10).to(dtype)
    for halves_time in (True, False):
        theirs = CogVideoXDownsample3D(6, 8, compress_time=halves_time).to(dtype)
        assert torch.equal(Downsample(theirs)(x), theirs(x))


def test_chunks_are_those_that_the_weights_were_trained_on() -> None:
    def lengths(*given: int) -> list[int]:
        return [span.stop - span.start for span in chunks(*given)]

    assert lengths(49, 8) == [9, 8, 8, 8, 8, 8]
    assert lengths(85, 8) == [13] + [8] * 9
    assert lengths(5, 8) == [5]
    assert lengths(13, 2) == [3, 2, 2, 2, 2, 2]
    assert lengths(22, 2) == [2] * 11
    assert lengths(13, 2, 1) == [1] + [2] * 6


def test_a_published_folder_says_the_sizes_and_the_scale(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER, tmp_path / "vae")
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(facts | {"scaling_factor": 0.7, "invert_scale_latents": True}))
    found = CogVideoXVAEConfig(from_pretrained=str(folder))
    assert (found.latent_channels, found.block_out_channels, found.scale_factor) == (4, (4, 8, 8, 8), 0.7)
    assert found.known_scale * found.scale_factor == pytest.approx(1 / 0.7)
    as_fun = CogVideoXVAEConfig(from_pretrained=str(folder), invert_scale_latents=False)
    assert as_fun.known_scale == 1
    of_file = CogVideoXVAEConfig(from_pretrained=str(folder / "diffusion_pytorch_model.safetensors"))
    assert of_file.scale_factor == 0.7
    shutil.rmtree(folder)
    assert CogVideoXVAEConfig(**found.model_dump()) == found


def test_what_would_be_scaled_wrongly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json with the scaling_factor.*write ae\.scale_factor"):
        CogVideoXVAEConfig(from_pretrained="THUDM/CogVideoX-5b/vae/diffusion_pytorch_model.safetensors")
    (tmp_path / "config.json").write_text('{"_class_name": "AutoencoderKL"}')
    with pytest.raises(ValueError, match="holds a AutoencoderKL; name the `vae` folder"):
        CogVideoXVAEConfig(from_pretrained=str(tmp_path))
    (tmp_path / "config.json").write_text((FOLDER / "config.json").read_text().replace("1e-06", "1e-05"))
    with pytest.raises(ValueError, match="norm_eps is 1e-05 there, and only 1e-06 is computed here"):
        CogVideoXVAEConfig(from_pretrained=str(tmp_path))
    with pytest.raises(ValueError, match=r"ae\.tile_width = 100: a tile and its overlap \(20\) must be whole"):
        CogVideoXVAEConfig(use_tiling=True, tile_width=100)
