"""A learned autoencoder is one file: modules of any name, which the system fills, counts and tells apart."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from longtake.config.load import resolve
from longtake.contracts import LatentShape, UserError
from longtake.encode.fit import encoder_digests
from longtake.encoders import cost
from longtake.encoders.autoencoder import Autoencoder
from longtake.encoders.autoencoder_config import AutoencoderSection
from longtake.encoders.cost import autoencoder_cost
from longtake.parallel.shared_work import Tile, TileShare
from longtake.system.config import SystemConfig
from longtake.system.encoders import build_encoders, encoder_bytes

CPU = torch.device("cpu")
MODEL = {"in_channels": 16, "patch_size": 2, "context_in_dim": 128, "vec_in_dim": 128}


@pytest.fixture
def section() -> Iterator[type[AutoencoderSection]]:
    """Known only while a test runs: others list all kinds."""

    class TwoStageConfig(AutoencoderSection):
        AUTOENCODER: ClassVar[str] = f"{__name__}:TwoStage"
        type: Literal["two_stage"] = Field("two_stage", description="the autoencoder")
        from_pretrained: str = Field(description="its file")
        cache_dir: str | None = Field(None, description="not used")
        placement: Literal["resident", "offloaded"] = Field("resident", description="where weights are")
        latent = property(lambda self: LatentShape(4, 4, 8, causal=False))

        def check(self, num_frames: int, height: int, width: int) -> None:
            if num_frames % 4 or height % 8 or width % 8:
                raise UserError(f"{num_frames} frames of {height}x{width} pixels are not whole cells of 4x8x8")

    yield TwoStageConfig
    del AutoencoderSection.KINDS["two_stage"]


def stages() -> dict[str, nn.Module]:
    """A spatial autoencoder inside a temporal one."""
    side, length = (1, 8, 8), (4, 1, 1)
    return {
        "spatial": nn.Sequential(nn.Conv3d(3, 5, side, side), nn.Tanh()),
        "temporal": nn.Sequential(nn.Conv3d(5, 4, length, length)),
        "temporal_back": nn.Sequential(nn.ConvTranspose3d(4, 5, length, length)),
        "spatial_back": nn.Sequential(nn.ConvTranspose3d(5, 3, side, side), nn.Tanh()),
    }


class TwoStage(Autoencoder):
    is_random = False

    def __init__(self, config: AutoencoderSection, dtype: torch.dtype) -> None:
        self.config, self.dtype = config, dtype
        self.compute = lambda tiles: [tile.run() for tile in tiles]
        with torch.device("meta"):
            parts = stages()
        self.encoding = {name: parts[name] for name in ("spatial", "temporal")}
        self.decoding = {name: parts[name] for name in ("temporal_back", "spatial_back")}

    def names(self, files: Collection[str]) -> dict[str, str]:
        return {name.removeprefix("published."): name for name in files}

    @torch.no_grad()
    def posterior(self, video: Tensor) -> dict[str, Tensor]:
        def run() -> Tensor:
            return self.encoding["temporal"](self.encoding["spatial"](video.to(self.dtype)))

        if self.compute is None:
            return {"mean": run()}
        (mean,) = self.compute([Tile(run, (len(video), *self.latent(*video.shape[2:])))])
        return {"mean": mean}

    @torch.no_grad()
    def decode(self, latents: Tensor, num_frames: int) -> Tensor:
        self.load_decoder()
        frames = self.decoding["temporal_back"](latents.to(self.dtype))
        return self.decoding["spatial_back"](frames)[:, :, :num_frames]


def saved(file: Path, seed: int) -> dict[str, nn.Module]:
    """Writes weights of such an autoencoder; the modules that have them."""
    torch.manual_seed(seed)
    parts = stages()
    save_file({f"published.{name}": tensor for name, tensor in nn.ModuleDict(parts).state_dict().items()}, file)
    return parts


@pytest.mark.parametrize("placement", ["resident", "offloaded"])
def test_modules_of_any_name_are_filled_used_counted_and_told_apart(
    section: Any, placement: str, tmp_path: Path
) -> None:
    def config(file: Path) -> SystemConfig:
        ae = {"type": "two_stage", "from_pretrained": str(file), "placement": placement}
        return resolve({"ae": ae, "model": MODEL}, [], SystemConfig).value

    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    parts = saved(first, 1)
    saved(second, 2)
    encoders, other = (build_encoders(config(file), CPU) for file in (first, second))

    video = torch.rand(2, 3, 8, 16, 24) * 2 - 1
    with torch.no_grad():
        mean = parts["temporal"](parts["spatial"](video))
        pixels = parts["spatial_back"](parts["temporal_back"](mean))
    digests = encoder_digests(encoders)
    for _ in range(2):
        assert torch.equal(encoders.posterior(video)["mean"], mean)
        assert torch.equal(encoders.autoencoder.decode(mean, 8), pixels)
    assert digests["autoencoder"] is not None
    assert encoder_digests(encoders) == digests  # the decoder, which is there now, is no part of it
    assert encoder_digests(other)["autoencoder"] != digests["autoencoder"]

    sizes = {name: sum(p.nbytes for p in part.parameters()) for name, part in parts.items()}
    together = sum if placement == "resident" else max  # offloaded: one of them is on the device at a time
    wanted = [together((sizes["spatial"], sizes["temporal"])), together(sizes.values())]
    assert [encoder_bytes(config(first), decodes=decodes)["ae"] for decodes in (False, True)] == wanted

    in_space, in_time = 2 * 8 * 2 * 3 * 5 * 3 * 8 * 8, 2 * 2 * 2 * 3 * 4 * 5 * 4
    section = config(first).ae
    for _ in ("in tiles", "whole"):
        assert autoencoder_cost(section, (8, 16, 24), 2).flops == 2 * (in_space + in_time)
        cost.on_meta(section).compute = None
        for cached in (cost.seen, cost._shapes, cost._flops, cost._bytes_of_a_sample):
            cached.cache_clear()
    cost.on_meta.cache_clear()
    encoders.share(lambda: None)
    assert isinstance(encoders.autoencoder.compute, TileShare)
    assert torch.equal(encoders.posterior(video)["mean"], mean)
