"""The few frozen dataclasses that travel between packages, and the error type for a user's mistake.

Shapes: B batch, C channels, T frames (pixels), F latent frames, H W pixels, h w latent grid, L tokens, D width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # whoever makes these has them; a config has `LatentShape` alone
    import numpy as np
    from torch import Tensor

EXIT_INTERRUPTED = 130  # stopped by Ctrl-C, SIGTERM or SIGUSR1; a training run has written a checkpoint


class UserError(ValueError):
    """A mistake the user can mend. Its text is one sentence: place, value found, what would be right.

    The command line prints the sentence and exits with a non-zero status; nothing else is shown. It is
    `longtake.Error`: `place`, `found`, `expected` and `fix` are the parts of the sentence, `place = found: expected;
    fix`; a part that the sentence lacks is empty.

        try:
            longtake.Run.preset("demo/shapes").set({"lr": "fast"}).config
        except longtake.Error as error:
            print(error.place, error.expected)
    """

    @property
    def place(self) -> str:
        """The key, file or flag that is wrong."""
        return self._head.partition(" = ")[0]

    @property
    def found(self) -> str:
        """The value found there."""
        return self._head.partition(" = ")[2]

    @property
    def expected(self) -> str:
        """The rule that the value breaks."""
        return self._rest.partition("; ")[0]

    @property
    def fix(self) -> str:
        """The fix: what to write instead."""
        return self._rest.partition("; ")[2]

    @property
    def _head(self) -> str:
        return str(self).partition(": ")[0]

    @property
    def _rest(self) -> str:
        return str(self).partition(": ")[2]


class WeightsMisfit(UserError):
    """Weights that were made for a model of another size or kind."""


_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Text for a terminal: what would steer it (all control characters but tab and line break) is written out."""
    return _UNSEEN.sub(lambda found: repr(found[0])[1:-1], text)


def in_one_line(error: BaseException) -> str:
    """Return a library's error message on one line, at most 160 characters, to be quoted in a sentence."""
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
    def entry(self) -> tuple[str, int]:
        """The entry of bucket_config that it belongs to."""
        return self.resolution, self.num_frames

    @property
    def name(self) -> str:
        """A short unique name, such as `256px/33f/16:9`: the key under which order state and losses are kept."""
        return f"{self.resolution}/{self.num_frames}f/{self.ratio}"


Caption = str | tuple[str, ...]  # of one clip; several for a family whose clips have one for each segment


@dataclass(frozen=True)
class Draw:
    """Random numbers that training wants of each sample: made from (seed, stage, pass, sample, purpose) alone."""

    purpose: int  # a `random.Purpose`
    law: Literal["normal", "uniform", "integer"]
    shape: Literal["latent", "pixels"] | tuple[int, ...] = ()  # of one sample's; (): one number
    below: int = 0  # integers are 0 .. below - 1, equally likely
    # The place of the slot in its step is the stratum, one of as many as the step has slots; the number drawn is the
    # place within it. Uniform and integer laws only.
    stratified: bool = False
    of_view: bool = False  # about pixels: the same in all passes of one view
    is_choice: bool = False  # decides what is computed, so it stays on the CPU


@dataclass(frozen=True)
class Slot:
    """One micro-batch of one bucket: a slot, or one of the S / d parts of a slot whose bucket runs at sequence degree
    d < S.

    All arrays have length B = `bucket.batch_size`; fillers repeat a real sample at weight 0.
    """

    bucket: Bucket
    pass_index: int
    rows: np.ndarray  # int64 [B], rows of the clip table
    samples: np.ndarray  # uint64 [B], sample ids (clip and copy)
    keys: np.ndarray  # uint64 [B], the order keys
    weights: np.ndarray  # float32 [B], 1 trains, 0 is present for its shape only
    number: int = 0  # its place among the slots of its step, the same on every rank
    num_slots: int = 1  # slots of its step

    @property
    def is_real(self) -> bool:
        """True if any sample of the slot trains; a slot of weight 0 only keeps ranks in step."""
        return bool(self.weights.any())

    @property
    def num_samples(self) -> int:
        """Planned samples that train; fillers are not counted."""
        return int((self.weights > 0).sum())


@dataclass(frozen=True)
class LatentShape:
    """Mapping of pixels to latents by a video autoencoder, as data: what loaders need to draw noise of the right shape.

    `causal`: the first latent frame is made of one frame, so that T = 4k+1 frames become k+1 (ratio 4); otherwise T
    becomes ceil(T / temporal). `chunk`: so many frames are encoded apart from the others, each chunk as a clip of its
    own (17 frames become 5, 51 become 15). `whole_cells`: sides are cut down to whole cells, not filled up.
    """

    channels: int
    temporal: int
    spatial: int
    causal: bool
    chunk: int | None = None
    whole_cells: bool = False

    def __call__(self, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """`(T, H, W)` in pixels -> `(C, F, h, w)`."""
        chunks, rest = divmod(num_frames, self.chunk or num_frames or 1)
        frames = chunks * self._frames(self.chunk or num_frames) + (self._frames(rest) if rest else 0)
        up = 0 if self.whole_cells else self.spatial - 1
        return self.channels, frames, (height + up) // self.spatial, (width + up) // self.spatial

    def _frames(self, num_frames: int) -> int:
        """Latent frames of a clip, or a chunk, by itself."""
        return (num_frames - 1) // self.temporal + 1 if self.causal else -(-num_frames // self.temporal)

    def pixel_frames(self, num_latents: int) -> int:
        """Return the most frames that a clip of so many latent frames has; of a causal one the only length
        that fits."""
        if self.chunk is None:
            return (num_latents - 1) * self.temporal + 1 if self.causal else num_latents * self.temporal
        chunks, rest = divmod(num_latents, self._frames(self.chunk))
        whole = LatentShape(self.channels, self.temporal, self.spatial, self.causal)
        return chunks * self.chunk + (whole.pixel_frames(rest) if rest else 0)


@dataclass(frozen=True)
class Window:
    """Frames of a clip that follow each other, and of which something is known."""

    frames: range  # of the clip's latents
    pixels: range  # frames of the clip that they are encoded from
    # What a store calls it, where it is encoded as a clip of its own; "": the clip's own latents are the same, and are
    # taken.
    name: str = ""
    masked: bool = False  # its pixels are blacked out by the sample's mask before they are encoded
    fill: float = -1.0  # value in [-1, 1] of masked pixels: -1 is black, 0 grey
    skip: int = 0  # latents of a request's reference that lie before those of `frames`
    reference: int | None = None  # which of a request's references; None: the last for one frame at the tail, or first
    from_end: bool | None = None  # of the reference are its last frames taken; None: where it ends the clip
    shown: tuple[range, ...] | None = (
        None  # frames of the clip that references of a request give; None: all of `pixels`
    )
    by_mean: bool = False  # a request's latents are the posterior's mean, even where those of training are drawn

    @property
    def taken(self) -> tuple[range, ...]:
        """The frames of the clip that references of a request give."""
        return (self.pixels,) if self.shown is None else self.shown

    @property
    def is_head(self) -> bool:
        """True where it begins with the clip; otherwise it ends with it."""
        return self.frames.start == 0

    @property
    def takes_end(self) -> bool:
        """True where it takes the last frames of its reference, not the first."""
        return not self.is_head if self.from_end is None else self.from_end


@dataclass(frozen=True)
class Places:
    """Conditioning frames of one sample, or of a video to be made."""

    windows: tuple[Window, ...] = ()  # where the clean latents come from
    released: Tensor | None = None  # [1, F, h or 1, w or 1], as in `Known`; None: 0 in the windows, 1 elsewhere
    mask: Tensor | None = None  # bool [1, T, H, W], as `Known.pixels`; None: nothing is blacked out
    noise: Tensor | None = None  # float32 [3, T, H, W]: added to pixels of a masked window that are not black
    noise_level: float = 0.0  # its standard deviation, where it is still to be drawn (`noise_on_known`)


@dataclass(frozen=True)
class Batch:
    """One slot's samples as the loaders hand them to the trainer. Loaders build it on the CPU; the trainer gets it on
    its device (see train.feed.DeviceFeed)."""

    bucket: Bucket
    video: Tensor  # [B, C, T, H, W], uint8 0..255, or float32 in [-1, 1]; [0] where `encoded` has the latents
    text: tuple[Caption, ...]  # B captions, suffix included
    fps: Tensor  # float32 [B], frames per second after the frame-rate rule, 0 where unknown
    size: Tensor  # int64 [B, 2], height and width of the source
    keys: np.ndarray  # uint64 [B]
    weights: Tensor  # float32 [B], 0 = present for its shape only
    draws: Mapping[str, Tensor]  # the sample's random numbers, by purpose (see data.loading.draws)
    faults: tuple[ClipFault, ...] = ()  # samples of this slot that failed to load
    # What a latent store knows of the samples: "mean" and, for a random posterior, "std" [B, C, F, h, w], and the
    # conditions made of text by name, of the dtype stored. Empty where the encoders run in the trainer.
    encoded: Mapping[str, Tensor] = field(default_factory=dict)
    # Draws that decide what is computed, by purpose: they stay on the CPU, so that no device is waited for.
    choices: Mapping[str, np.ndarray] = field(default_factory=dict)
    known: Mapping[int, Places] = field(default_factory=dict)  # what the choices make known, of samples by their rows
    companions: Mapping[str, Tensor] = field(default_factory=dict)  # what clips bring along, by name; dim 0 is B


@dataclass(frozen=True)
class ClipFault:
    """A sample that could not be loaded: it keeps its place at weight 0 and is written to `quarantine.jsonl`."""

    path: str
    sample: int  # sample id
    pass_index: int
    reason: str


class Conditions(Mapping[str, "Tensor"]):
    """Conditions of a denoiser: named tensors, the first dim of each B, some with a mask. Not to be changed.

    A denoiser says by `needs` which ones it takes, and of what shapes: `text` [B, L, Dt] (several captions for one clip
    [B, N, L, Dt]), `vector` [B, Dv] pooled text, `guidance` [B] a scale that is embedded, `fps` [B] and the like.

    `masks`: condition -> bool, True where its tensor counts; of the tensor's shape without the last dim.
    """

    __slots__ = ("_tensors", "masks")

    def __init__(
        self,
        tensors: Mapping[str, Tensor | None] = MappingProxyType({}),
        masks: Mapping[str, Tensor] = MappingProxyType({}),
        **named: Tensor | None,
    ) -> None:
        """Collect tensors by name, in either way; None: there is no such condition."""
        self._tensors = {name: tensor for name, tensor in {**tensors, **named}.items() if tensor is not None}
        self.masks = dict(masks)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def updated(self, masks: Mapping[str, Tensor] = MappingProxyType({}), **named: Tensor | None) -> Conditions:
        """Return these conditions with others added or put in their place; one that becomes None is gone, with its
        mask."""
        kept = {name: mask for name, mask in {**self.masks, **masks}.items() if named.get(name, mask) is not None}
        return Conditions({**self._tensors, **named}, kept)

    def map(self, change: Callable[[Tensor], Tensor]) -> Conditions:
        """Every tensor and every mask changed in the same way."""
        return Conditions(
            {name: change(tensor) for name, tensor in self.items()},
            {name: change(mask) for name, mask in self.masks.items()},
        )


@dataclass(frozen=True)
class Known:
    """Values of samples that are known beforehand. The family states which of the input, the conditions and the loss
    read them."""

    # float32 [B, 1, F, h or 1, w or 1]: the time, as a share of the whole way from noise to data, up to which a place
    # is held at its clean value. 1: it is free from the start; 0: it is known to the end; between: it is edited.
    released: Tensor
    latents: Tensor  # [B, C, F, h, w]: clean values, 0 where nothing is known
    pixels: Tensor | None = None  # bool [B, 1, T, H, W]: True where pixels are to be made, False where they are given

    @property
    def held(self) -> Tensor:
        """bool, of the shape of `released`: the places known to the end."""
        return self.released == 0

    def held_at(self, share: Tensor) -> Tensor:
        """bool, of the shape of `released`: the places that are held at a share of the way from data to noise."""
        return (self.released < share) | self.held


@dataclass(frozen=True)
class Noised:
    """A training example of the objective: the denoiser sees `x` at time `t` and is asked for `target`."""

    x: Tensor  # [B, C, F, h, w]
    t: Tensor  # float32 [B]; the unit is the objective's
    target: Tensor  # [B, C, F, h, w], float32
    weight: Tensor  # float32 [B], loss weight of each sample
    counted: Tensor | None = None  # float32 [B, 1, F, h or 1, w or 1]: 1 where the loss counts; None: everywhere
