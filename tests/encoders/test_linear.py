"""The linear autoencoder: its blocks lose nothing, its components are those of the clips, its file says its ceiling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from longtake.contracts import UserError
from longtake.encoders.autoencoder_config import AUTOENCODER_FILE, LinearConfig, fitted_layer
from longtake.encoders.linear import (
    BlockStatistics,
    LinearAutoencoder,
    join_blocks,
    principal_components,
    psnr_of_round_trip,
    split_blocks,
)
from tests.precision import rounding


def videos(frames: int, count: int = 6, height: int = 8, width: int = 12) -> torch.Tensor:
    """Waves that move: smooth in space and time, as clips are."""
    draws = torch.rand(count, 3, 4, 1, 1, 1, generator=torch.Generator().manual_seed(1))
    t, y, x = (torch.arange(size).float() for size in (frames, height, width))
    phase = draws[:, :, 0] + 0.2 * t[:, None, None] * draws[:, :, 1]
    return torch.sin(6 * phase + 0.5 * y[:, None] * draws[:, :, 2] + 0.5 * x * draws[:, :, 3])


def fitted(config: LinearConfig, clips: torch.Tensor) -> LinearAutoencoder:
    autoencoder = LinearAutoencoder(config)
    for name, blocks in split_blocks(config, clips).items():
        statistics = BlockStatistics(blocks.shape[-1])
        statistics.add(blocks.flatten(0, 3))
        part = autoencoder.encoding[name].to_empty(device="cpu")
        part.load_state_dict(principal_components(statistics, config))
    return autoencoder


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("first_alone", "frames"), [(False, 2), (False, 4), (False, 8), (True, 1), (True, 5), (True, 9)]
)
def test_blocks_split_and_joined_give_the_video_back(overlap: bool, first_alone: bool, frames: int) -> None:
    config = LinearConfig(channels=4, temporal=4, spatial=4, overlap=overlap, first_alone=first_alone)
    pixels = videos(frames).double()
    blocks = split_blocks(config, pixels)
    bound = rounding(2.0, steps=32, dtype=torch.float64)
    torch.testing.assert_close(join_blocks(config, blocks, frames), pixels, rtol=0, atol=bound)
    cells = torch.cat([value[..., :4] for value in blocks.values()], dim=1).movedim(-1, 1)
    assert tuple(cells.shape[1:]) == config.latent(frames, 8, 12)
    if frames > 4 or first_alone:  # rotations: noise in latents is as large in pixels
        energy = sum(value.square().sum() for value in blocks.values())
        torch.testing.assert_close(energy, pixels.square().sum())


def test_all_components_give_every_clip_back() -> None:
    config = LinearConfig(channels=96, temporal=2, spatial=4)
    clips = videos(4, count=40) * 0.9
    (worst,) = [min(psnr_of_round_trip(fitted(config, clips), [clips]))]
    assert worst > 80


def test_more_components_keep_more_of_clips_that_were_not_seen() -> None:
    seen, unseen = videos(4, count=40), videos(4, count=50)[40:]
    found = [
        sum(psnr_of_round_trip(fitted(LinearConfig(channels=count, temporal=4, spatial=4), seen), [unseen]))
        for count in (2, 8, 32)
    ]
    assert found == sorted(found)
    assert found[2] - found[0] > 10 * 10  # 10 dB for each of 10 clips


@pytest.mark.parametrize("whitening", [0.0, 0.5, 1.0])
def test_latents_have_unit_variance_and_components_the_power_that_is_asked_for(whitening: float) -> None:
    config = LinearConfig(channels=6, temporal=4, spatial=4, whitening=whitening)
    clips = videos(4, count=40)
    latents = fitted(config, clips).posterior(clips)["mean"].double()
    variance = latents.var(dim=(0, 2, 3, 4), unbiased=False)
    plain = fitted(config.model_copy(update={"whitening": 0.0}), clips).posterior(clips)["mean"].double()
    spread = plain.std(dim=(0, 2, 3, 4), unbiased=False)
    torch.testing.assert_close(variance.mean(), torch.tensor(1.0, dtype=torch.float64), rtol=1e-5, atol=0)
    torch.testing.assert_close(latents.mean(dim=(0, 2, 3, 4)), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-5)
    wanted = spread ** (1 - whitening)
    torch.testing.assert_close(variance.sqrt() / variance.sqrt()[0], wanted / wanted[0], rtol=1e-4, atol=0)


def test_few_components_of_large_blocks_are_those_of_all_eigenvectors() -> None:
    """The subspace iteration, which large blocks take, against the whole decomposition."""
    generator = torch.Generator().manual_seed(2)
    spectrum = 0.9 ** torch.arange(300).double()
    statistics = BlockStatistics(300)
    statistics.add(torch.randn(2000, 300, generator=generator, dtype=torch.float64) * spectrum)
    found = principal_components(statistics, LinearConfig(channels=12, temporal=4, spatial=5, whitening=0.0))
    values, vectors = torch.linalg.eigh(statistics.covariance)
    overlap = found["basis"].double() @ vectors.flip(1)[:, :12]
    torch.testing.assert_close(overlap.abs(), torch.eye(12, dtype=torch.float64), rtol=0, atol=1e-5)
    kept = (found["basis"].double() @ statistics.covariance * found["basis"]).sum()
    torch.testing.assert_close(kept, values[-12:].sum(), rtol=1e-6, atol=0)


def test_components_of_fewer_blocks_than_channels_stay_bounded() -> None:
    config = LinearConfig(channels=64, temporal=4, spatial=4)
    few, unseen = videos(4, count=6)[:2], videos(4, count=6)[2:]
    latents = fitted(config, few).posterior(unseen)["mean"]
    assert latents.abs().max() < 40  # were 1e6 times the noise of rounding


@pytest.mark.parametrize(
    ("keys", "shape", "said"),
    [
        ({"temporal": 8}, (12, 16, 16), "ae.temporal = 8: 12 frames.*at most 8 or a multiple"),
        ({"temporal": 4, "first_alone": True}, (8, 16, 16), "8 frames are not 4k.1; choose 5 or 9"),
        ({"temporal": 8}, (8, 17, 16), "17x16 pixels"),
    ],
)
def test_shapes_that_do_not_divide_are_named(keys: dict, shape: tuple[int, int, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        LinearConfig(**keys).check(*shape)


def test_more_channels_than_a_block_has_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ae\.channels = 49: a block has 48 numbers"):
        LinearConfig(channels=49, temporal=4, spatial=4, first_alone=True)


def test_the_file_says_the_ceiling_and_a_folder_fills_the_key_in(tmp_path: Path) -> None:
    facts = {"psnr": 34.25, "worst_psnr": 30.0, "clips": 7, "held_out": 1}
    file = tmp_path / AUTOENCODER_FILE
    tree = {"ae": {"type": "linear", "from_pretrained": None}}
    assert fitted_layer(tree, tmp_path) == {}
    save_file({"x": torch.zeros(1)}, file, {"fit": json.dumps(facts)})
    assert LinearConfig(from_pretrained=str(file)).fitted() == facts
    assert "34.2 dB" in LinearConfig(from_pretrained=str(file)).ceiling
    assert LinearConfig().fitted() is None
    assert fitted_layer(tree, tmp_path) == {"ae": {"from_pretrained": str(file)}}
    assert fitted_layer({"ae": {"type": "pixel"}}, tmp_path) == {}
