"""How a family makes samples of clips, where families differ; datasets are handed these rules and ask for no name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Literal

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
    by_mean: bool = False  # in generation its latents are the posterior's mean, even where those of training are drawn

    def shapes(self, shape: tuple[int, int, int]) -> dict[str, tuple[int, ...]]:
        """Return the tensors that it is for a sample of (T, H, W) pixels; stills have a mask of those that
        are there."""
        frames, height, width = shape
        if self.kind == "video":
            return {self.name: (3, frames, height, width)}
        if self.kind == "numbers":
            return {self.name: (frames, self.width)}
        return {self.name: (self.most, 3, 1, height, width), self.name + MASK: (self.most,)}


@dataclass(frozen=True)
class SampleRules:
    """The laws by which a clip's frames and caption become a sample's.

    The first three are names: of `data.clips.captions.FORMS`, and of `WINDOWS` and `PIXELS` in `data.clips.transforms`,
    or of functions of a family that are called as those are, "module:name".
    """

    caption: str = "rate"
    window: str = "even"
    pixels: str = "bytes"  # any but `bytes` and `whole` gives float32 in [-1, 1]
    facts: tuple[str, ...] = ()  # columns of the clip table that the caption's form gets
    # The same in generation, by name, where a run's `caption_facts` says nothing else.
    prompt_facts: Mapping[str, str] = field(default_factory=dict)
    stride: int | None = None  # every n-th source frame, whatever the rate; None: by the frame-rate rule
    still_fps: float = 0  # the rate that is given for a still; 0: what its table says
    segments: Callable[[int], int] | None = None  # frames of a sample -> captions it must have; None: one, as a text
    companions: tuple[Companion, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the clip table that are read beside captions and numbers."""
        return *self.facts, *self.companion_columns

    @property
    def companion_columns(self) -> tuple[str, ...]:
        """Columns of the clip table that name files of auxiliary inputs."""
        return tuple(companion.column for companion in self.companions)

    @property
    def pixel_bytes(self) -> int:
        """Bytes of one colour of one pixel."""
        return 1 if self.pixels in ("bytes", "whole") else 4

    def content(self) -> dict[str, Any]:
        """What decides the pixels and captions of a sample, fit for JSON."""
        return {name: getattr(self, name) for name in ("caption", "window", "pixels", "facts", "stride", "still_fps")}


def named(name: str, ours: Mapping[str, Any]) -> Any:
    """One of our functions by its name, or one of a family, "module:name"."""
    return ours[name] if name in ours else resolve_name(name)


OWN = SampleRules()
