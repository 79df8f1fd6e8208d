"""The pixel autoencoder: nothing is lost, and its geometry is what it says."""

from __future__ import annotations

import pytest
import torch

from longtake.contracts import UserError
from longtake.encoders.autoencoder import build_autoencoder
from longtake.encoders.autoencoder_config import PixelConfig
from longtake.encoders.pixel import PixelAutoencoder
from tests.precision import rounding


def pixel(temporal: int = 8, spatial: int = 8, **keys: float | bool) -> PixelAutoencoder:
    return PixelAutoencoder(PixelConfig(temporal=temporal, spatial=spatial, **keys))


def video(frames: int, height: int = 16, width: int = 24) -> torch.Tensor:
    return torch.rand(2, 3, frames, height, width, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize(("temporal", "spatial", "frames"), [(8, 8, 16), (4, 8, 12), (1, 4, 5), (8, 1, 8)])
def test_a_round_trip_is_exact(temporal: int, spatial: int, frames: int) -> None:
    autoencoder = pixel(temporal, spatial)
    pixels = video(frames)
    assert torch.equal(autoencoder.decode(autoencoder.posterior(pixels)["mean"], frames), pixels)


@pytest.mark.parametrize("frames", [1, 3, 8, 15, 16, 32])
@pytest.mark.parametrize("spatial", [1, 4, 8])
def test_clips_shorter_than_a_block_and_overlapping_blocks_lose_nothing(frames: int, spatial: int) -> None:
    autoencoder = pixel(16, spatial, overlap=True)
    pixels = video(frames).double()
    latents = autoencoder.posterior(pixels)["mean"]
    bound = rounding(1.0, steps=2 * (16 + 2 * spatial), dtype=torch.float64)  # two sums over frames, rows and columns
    torch.testing.assert_close(autoencoder.decode(latents, frames), pixels, rtol=0, atol=bound)
    if frames >= 16:  # an orthogonal transform: noise stays as it is
        torch.testing.assert_close(latents.square().sum(), pixels.square().sum())


def test_a_short_clip_is_the_same_motion_slowed_down() -> None:
    slow, fast = (torch.linspace(-1, 1, frames).view(1, 1, -1, 1, 1).expand(1, 3, -1, 8, 8) for frames in (16, 8))
    torch.testing.assert_close(pixel(16).posterior(fast)["mean"], pixel(16).posterior(slow)["mean"])


def test_an_error_in_one_block_that_overlaps_fades_out_into_its_neighbours() -> None:
    """At the first frequency: no edge at the border, nothing beyond half a block outside it."""
    latents = torch.zeros(1, 3 * 8 * 8, 1, 3, 3)
    latents[:, 0, 0, 1, 1] = 1.0
    line = pixel(1, 8, overlap=True).decode(latents, 1)[0, 0, 0, 12]
    assert line[[*range(4), *range(20, 24)]].eq(0).all()
    assert line[5] != 0
    assert line.diff().abs().max() < 0.5 * line.max()


@pytest.mark.parametrize("frames", [1, 8, 24])
def test_latents_have_the_shape_that_is_promised(frames: int) -> None:
    autoencoder = pixel(8, 4)
    assert autoencoder.posterior(video(frames))["mean"].shape[1:] == autoencoder.latent(frames, 16, 24)


def test_a_still_repeats_to_one_block_and_comes_back() -> None:
    autoencoder = pixel()
    pixels = video(1)
    latents = autoencoder.posterior(pixels)["mean"]
    assert torch.equal(latents, autoencoder.posterior(pixels.expand(-1, -1, 8, -1, -1))["mean"])
    torch.testing.assert_close(autoencoder.decode(latents, 1), pixels, rtol=0, atol=1e-6)


def test_each_token_holds_one_block_of_pixels() -> None:
    """Channels run over colour, frame, row, column of the block at (0, 1, 2)."""
    pixels = video(8)
    latents = pixel().posterior(pixels)["mean"]
    assert torch.equal(latents[:, :, 0, 1, 2], pixels[:, :, :, 8:16, 16:24].flatten(1))


def test_latents_are_scaled_and_scaled_back() -> None:
    plain, scaled = pixel(), pixel(scaling_factor=2.0)
    pixels = video(8)
    assert torch.equal(scaled.posterior(pixels)["mean"], 2 * plain.posterior(pixels)["mean"])
    assert torch.equal(scaled.decode(scaled.posterior(pixels)["mean"], 8), pixels)


def test_decoded_pixels_stay_in_range() -> None:
    autoencoder = pixel()
    assert autoencoder.decode(10 * autoencoder.posterior(video(8))["mean"], 8).abs().max() == 1


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((12, 16, 16), "ae.temporal = 8: 12 frames.*at most 8 or a multiple"),
        ((8, 17, 16), "17x16 pixels"),
        ((1, 16, 20), "16x20 pixels"),
    ],
)
def test_shapes_that_do_not_divide_are_named(shape: tuple[int, int, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        pixel().check(*shape)


def test_what_is_no_longer_than_a_block_always_fits_in_time() -> None:
    pixel().check(1, 16, 16)
    pixel().check(7, 16, 16)


def test_the_config_section_builds_it() -> None:
    autoencoder = build_autoencoder(PixelConfig(temporal=4, spatial=16, scaling_factor=0.5))
    assert autoencoder.latent(8, 32, 32) == (3 * 4 * 16 * 16, 2, 2, 2)
    assert autoencoder.config.scaling_factor == 0.5
