"""How a family makes samples of clips, where families differ; datasets are handed these rules and ask for no name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

# `rate`: the caption, then its frame rate and motion score; `rate_as_published`: the same in the two forms of Open-Sora
# 2.0's program, one for training and one for inference; `plain`: the caption as it is.
CaptionForm = Literal["plain", "rate", "rate_as_published"]
# `even`: the stride is exact and every window is as likely as any other; `spread`: Open-Sora 2.0's even spacing over
# the span, with fractions cut off.
WindowLaw = Literal["even", "spread"]
# `bytes`: frames are scaled as bytes, bicubic; `float32`: Open-Sora 2.0's scaling in float32, and stills by Pillow.
PixelLaw = Literal["bytes", "float32"]
MASK = ".mask"  # after a tensor's name: what of it is there


@dataclass(frozen=True)
class Companion:
    """What a clip brings along beside its own pixels, in files that columns of its table name.

    `video`: a control video of the clip's length, cut by the clip's own window and crop; `numbers`: a text with a line
    of numbers for each frame, such as camera poses, of which the window's lines are taken; `stills`: one picture, or a
    JSON array of them, each fitted to the bucket.
    """

    name: str  # in batches and stores
    column: str  # of the clip table: paths, which start where those of the clips do
    kind: Literal["video", "numbers", "stills"]
    condition: str  # the denoiser's condition that it becomes
    width: int = 0  # of numbers: how many a line has
    header: int = 0  # of numbers: lines before the first frame's
    most: int = 1  # of stills: of more, so many are drawn, the same in all passes of a view
    required: bool = True  # of stills: a clip must have one

    def shapes(self, shape: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
        """The tensors that it is for a sample of (T, H, W) pixels; stills have a mask of those that are there."""
        frames, height, width = shape
        if self.kind == "video":
            return {self.name: (3, frames, height, width)}
        if self.kind == "numbers":
            return {self.name: (frames, self.width)}
        return {self.name: (self.most, 3, 1, height, width), self.name + MASK: (self.most,)}


@dataclass(frozen=True)
class SampleRules:
    """The laws by which a clip's frames and caption become a sample's."""

    caption: CaptionForm = "rate"
    window: WindowLaw = "even"
    pixels: PixelLaw = "bytes"
    stride: int | None = None  # every n-th source frame, whatever the rate; None: by the frame-rate rule
    still_fps: float = 0  # the rate that is given for a still; 0: what its table says
    segments: Callable[[int], int] | None = None  # frames of a sample -> captions it must have; None: one, as a text
    companions: tuple[Companion, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the clip table that name what clips bring along."""
        return tuple(companion.column for companion in self.companions)

    @property
    def pixel_bytes(self) -> int:
        """Bytes of one colour of one pixel."""
        return 4 if self.pixels == "float32" else 1


OWN = SampleRules()
