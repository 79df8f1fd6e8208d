"""What is new in the family with everything: an autoencoder in chunks, a noisy solver, a law of masks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from longtake.contracts import Draw, Known, LatentShape, Noised
from longtake.diffusion.config import ObjectiveSection
from longtake.diffusion.known import Places, Window
from longtake.diffusion.objective import NoisePath, sample_loss
from longtake.diffusion.solvers import Solver
from longtake.encoders.autoencoder import Autoencoder
from longtake.encoders.config import AutoencoderSection
from longtake.random import Purpose

MODULE = "tests.families.everything_parts"
KINDS = MappingProxyType(
    {
        "none": "nothing is known",
        "box": "a quarter of the picture",
        "first": "the first frame",
        "edit": "all of it, until the noise is down to a share",
        "inpaint": "pixels that a mask leaves",
    }
)


class ChunkConfig(AutoencoderSection):
    """Means of 4 x 8 x 8 pixels; 17 frames, encoded apart from the others, become 5."""

    AUTOENCODER: ClassVar[str] = f"{MODULE}:Chunks"
    type: Literal["chunks"] = Field("chunks", description="the autoencoder")
    latent = property(lambda self: LatentShape(3, 4, 8, causal=True, chunk=17, whole_cells=True))

    def check(self, num_frames: int, height: int, width: int) -> None:
        """Any shape will do."""


class Chunks(Autoencoder):
    is_random, stream_frames = False, 17

    def __init__(self, config: ChunkConfig, dtype: torch.dtype) -> None:
        self.config = config

    def posterior(self, video: Tensor) -> dict[str, Tensor]:
        return {"mean": pooled(video)}

    def decode(self, latents: Tensor, num_frames: int) -> Tensor:
        video = F.interpolate(latents, scale_factor=(4, 8, 8)).split(20, dim=2)
        return torch.cat([part[:, :, 3 if num_frames % 4 else 0 :] for part in video], dim=2)[:, :, :num_frames]

    def posterior_of_stream(self, video: Any) -> Any:
        return map(self.posterior, video)

    def decode_stream(self, latents: Tensor, num_frames: int) -> Any:
        for i, part in enumerate(latents.split(5, dim=2)):
            yield self.decode(part, min(17, num_frames - 17 * i))


def pooled(video: Tensor) -> Tensor:
    """Means of the pixels that a latent is made of."""
    parts = [F.pad(part, (0, 0, 0, 0, -part.shape[2] % 4, 0)) for part in video.split(17, dim=2)]
    return torch.cat([F.avg_pool3d(part, (4, 8, 8)) for part in parts], dim=2)


def fading(scale: float, step: int, num_steps: int, t: float, power: float = 1.0) -> float:
    """Guidance that fades with the noise."""
    return 1 + (scale - 1) * (t / 1000) ** power


class FlowOf1000(ObjectiveSection):
    """Flow on times 0 to 1000, shifted by the pixels of the bucket."""

    OBJECTIVE: ClassVar[str] = f"{MODULE}:Flow"
    SOLVERS: ClassVar[tuple[str, ...]] = ("noisy",)
    type: Literal["flow_1000"] = Field("flow_1000", description="the objective")


class Flow(NoisePath):
    """x(t) = (1 - t / 1000) x0 + t / 1000 noise; neighbouring frames count in the loss beside each by itself."""

    noise_time: ClassVar[float] = 1000.0
    timestep: ClassVar[Draw] = Draw(Purpose.TIMESTEP, "uniform", stratified=True)
    solver = staticmethod(lambda name: Noisy())

    def times(self, drawn: Tensor, latent_shape: Any, shape: tuple[int, int, int]) -> Tensor:
        ratio = math.sqrt(math.prod(shape)) / 64
        return 1000 * ratio * drawn / (1 + (ratio - 1) * drawn)

    def noised_at(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return (1 - t / 1000) * clean + t / 1000 * noise

    def target(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return clean - noise

    def loss(self, prediction: Tensor, noised: Noised) -> Tensor:
        of_motion = (prediction - noised.target).diff(dim=2).square().flatten(1)
        motion = of_motion.mean(1) if of_motion.shape[1] else 0.0
        return sample_loss(prediction, noised) + 0.25 * motion

    def grid(self, num_steps: int, latent_shape: Any, shift: Any = "training", shape: Any = None) -> Tensor:
        return self.times(torch.linspace(1, 0, num_steps + 1), latent_shape, shape)


class Noisy(Solver):
    """Euler's rule with a little noise at every step but the last."""

    def step(self, denoise: Any, x: Tensor, t: Tensor, t_next: Tensor, index: int, past: Any, noise: Any) -> Tensor:
        x = x + (t - t_next) / 1000 * denoise(x, t.expand(len(x)), index)
        return x + 0.05 * (t_next / 1000) * noise(index).to(x) if t_next > 0 else x


class Boxes:
    """Known places: a quarter of the picture, of latents or of pixels, the first frame, or all of it for a while."""

    kinds = KINDS
    draws = MappingProxyType(
        {
            name: Draw(Purpose.MASK, "uniform", shape, of_view=True, is_choice=True)
            for name, shape in (("mask", ()), ("box", (3,)))
        }
    )

    def __init__(self, model: Any) -> None:
        self.model = model

    def drawn(self, choices: Any, weights: Mapping[str, float], latent: LatentShape, shape: Any) -> list[Places]:
        kinds = [kind for kind in KINDS if weights.get(kind, 0) > 0]
        pairs = zip(choices["mask"].tolist(), choices["box"].tolist(), strict=True)
        return [self._places(kinds[int(u * len(kinds))], latent, shape, None, *box) for u, *box in pairs]

    def given(self, kind: str, latent: LatentShape, shape: Any, mask: Tensor | None = None) -> Places:
        return self._places(kind, latent, shape, mask, [0.0, 0.0, 0.0])

    def windows(self, kind: str, latent: LatentShape, num_frames: int) -> tuple[Window, ...]:
        if kind == "first":
            return (Window(range(1), range(1), "head1"),) if num_frames > 1 else ()
        every = range(latent(num_frames, 1, 1)[1]), range(num_frames)
        masked = kind == "inpaint"
        return () if kind == "none" else (Window(*every, "masked" if masked else "", masked),)

    def _places(self, kind: str, latent: LatentShape, shape: Any, mask: Tensor | None, box: list[float]) -> Places:
        found = Places(self.windows(kind, latent, shape[0]))
        if kind == "box":
            return replace(found, released=with_box(latent(*shape)[1:], box))
        if kind == "edit":
            return replace(found, released=torch.full((1, latent(*shape)[1], 1, 1), box[0]))
        if kind == "inpaint":
            mask = with_box(shape, box) if mask is None else mask
            return replace(found, released=(pooled(mask[None])[0] > 0).float(), mask=mask)
        return found

    def conditions(self, known: Known) -> dict[str, Tensor]:
        seen = 1 + known.latents.mean(1, keepdim=True) / 2  # of a place in which a mask leaves some pixels
        return {"mask": torch.where(known.released == 1, seen, known.released)}


def with_box(shape: tuple[int, int, int], box: list[float]) -> Tensor:
    """[1, *shape]: 0 in a quarter of the picture, 1 elsewhere."""
    mask = torch.ones(1, *shape)
    top, left = (int(u * (size // 2 + 1)) for u, size in zip(box[1:], shape[1:], strict=True))
    mask[..., top : top + shape[1] // 2, left : left + shape[2] // 2] = 0
    return mask
