"""The few frozen dataclasses that travel between packages, and the error type for a user's mistake.

Shapes: B batch, C channels, T frames (pixels), F latent frames, H W pixels, h w latent grid, L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor


class UserError(ValueError):
    """A mistake the user can mend. Its text is one sentence: place, value found, what would be right.

    The command line prints the sentence and exits with a non-zero status; nothing else is shown.
    """


def in_one_line(error: BaseException) -> str:
    """What a library says of its error, short enough for a sentence of ours."""
    return " ".join(str(error).split())[:160]


@dataclass(frozen=True)
class Bucket:
    """One shape that a run trains on: `(resolution name, frames key, aspect ratio) -> (T, H, W), batch size`."""

    resolution: str  # "256px", "720p" ... as written in bucket_config
    num_frames: int  # the frames key of bucket_config; 1 is a still
    ratio: str  # "16:9", width to height, as in the aspect table
    shape: tuple[int, int, int]  # (T, H, W) in pixels
    batch_size: int  # samples in one micro-batch

    @property
    def name(self) -> str:
        """A short unique name, such as `256px/33f/16:9`: the key under which order state and losses are kept."""
        return f"{self.resolution}/{self.num_frames}f/{self.ratio}"


@dataclass(frozen=True)
class Slot:
    """One micro-batch of one bucket: a slot, or one of the S / d parts of a slot whose bucket runs at sequence degree
    d < S (DESIGN §4).

    All arrays have length B = `bucket.batch_size`; fillers repeat a real sample at weight 0.
    """

    bucket: Bucket
    pass_index: int
    rows: np.ndarray  # int64 [B], rows of the clip table
    samples: np.ndarray  # uint64 [B], sample ids (clip and copy)
    keys: np.ndarray  # uint64 [B], the order keys
    weights: np.ndarray  # float32 [B], 1 trains, 0 is present for its shape only

    @property
    def is_real(self) -> bool:
        """Whether any sample of the slot trains; a slot of weight 0 only keeps ranks in step."""
        return bool(self.weights.any())


@dataclass(frozen=True)
class LatentShape:
    """How a video autoencoder maps pixels to latents, as data: what loaders need to draw noise of the right shape.

    `causal`: T = 4k+1 frames become k+1 latent frames (ratio 4); otherwise T becomes ceil(T / temporal).
    """

    channels: int
    temporal: int
    spatial: int
    causal: bool

    def __call__(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """`(T, H, W)` in pixels -> `(C, F, h, w)`."""
        if self.causal:
            frames = (num_frames - 1) // self.temporal + 1
        else:
            frames = -(-num_frames // self.temporal)
        return self.channels, frames, -(-height // self.spatial), -(-width // self.spatial)


@dataclass(frozen=True)
class Batch:
    """What the data plane hands to the trainer for one slot. Loaders make it on the CPU; the trainer gets it on its
    device (see data.DeviceFeed)."""

    bucket: Bucket
    video: Tensor  # [B, C, T, H, W], uint8 0..255, or float32 in [-1, 1]; [0] where `encoded` has the latents
    text: tuple[str, ...]  # B captions, suffix included
    fps: Tensor  # float32 [B], frames per second after the frame-rate rule, 0 where unknown
    size: Tensor  # int64 [B, 2], height and width of the source
    keys: np.ndarray  # uint64 [B]
    weights: Tensor  # float32 [B], 0 = present for its shape only
    draws: Mapping[str, Tensor]  # the sample's random numbers, by purpose (see data.loading.draws)
    faults: tuple[Fault, ...] = ()  # samples of this slot that failed to load
    fetch_seconds: float = 0.0  # worker time spent on this batch
    # What a latent store knows of the samples: "mean" and, for a random posterior, "std" [B, C, F, h, w],
    # "text" [B, L, Dt], "vector" [B, Dv], of the dtype stored. Empty where the encoders run in the trainer.
    encoded: Mapping[str, Tensor] = field(default_factory=dict)
    # float32 [B], uniform: which frames are known. It decides what is computed, so it never goes to the device.
    kind_draws: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))


@dataclass(frozen=True)
class Fault:
    """A sample that could not be loaded: it keeps its place at weight 0 and is written to `quarantine.jsonl`."""

    path: str
    sample: int  # sample id
    pass_index: int
    reason: str


@dataclass(frozen=True)
class Conditions:
    """Everything a denoiser may be conditioned on. A denoiser that misses one says which."""

    text: Tensor | None = None  # [B, L, Dt] token embeddings
    vector: Tensor | None = None  # [B, Dv] pooled embedding
    guidance: Tensor | None = None  # [B] distilled guidance scale
    visual: Tensor | None = None  # [B, 1 + C, F, h, w] mask then latent of the known frames
    fps: Tensor | None = None  # [B]
    extra: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Noised:
    """A training example of the objective: the denoiser sees `x` at time `t` and is asked for `target`."""

    x: Tensor  # [B, C, F, h, w]
    t: Tensor  # float32 [B]; the unit is the objective's and stated there
    target: Tensor  # [B, C, F, h, w], float32
    weight: Tensor  # float32 [B], loss weight of each sample
