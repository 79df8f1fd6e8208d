"""`sizes`: the data modes of CogVideoX-Fun, under the names of its flags; `cogvideox_buckets.FunLaw` follows them."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from longtake.buckets.assignment import register_law
from longtake.buckets.section import SizesSection

KIND_OF_LAW = "cogvideox_fun"
COLLATE = "frames_of_collate"  # the quirk by which the published program's loader rounds lengths
_LAWS = "longtake.families.cogvideox_buckets"
_TINY, _TINY_LENGTH = 16, 17  # sizes are divided by the former, but for 32 at least


class FunSizes(SizesSection):
    """Which sizes and lengths clips are trained at."""

    LAW: ClassVar[str] = f"{_LAWS}:fun_law"

    type: Literal["cogvideox_fun"] = Field(KIND_OF_LAW, description="the data modes of CogVideoX-Fun")
    enable_bucket: bool = Field(True, description="the aspect ratio nearest to the clip's own; False: a square cut out")
    video_sample_size: int = Field(512, ge=16, le=4096, description="side of a square video, of equal area otherwise")
    image_sample_size: int = Field(
        512, ge=16, le=4096, description="the same for stills; with lengths by token count the largest for videos too"
    )
    token_sample_size: int = Field(
        512, ge=16, le=4096, description="a video of this size has video_sample_n_frames, larger ones have fewer"
    )
    video_sample_n_frames: int = Field(17, ge=1, le=1 << 12, description="most frames of a video; 4k + 1 of them train")
    video_sample_stride: int = Field(4, ge=1, le=1 << 12, description="every n-th frame of the source is read")
    video_sample_fps: float | None = Field(
        None, gt=0, description="frames a second in place of a stride, which then counts where a clip's rate is unknown"
    )
    video_length_drop_start: float = Field(0.0, ge=0, lt=1, description="share of a video at its start that is unused")
    video_length_drop_end: float = Field(1.0, gt=0, le=1, description="where the part of a video that is used ends")
    random_hw_adapt: bool = Field(False, description="each clip draws its size anew in every pass")
    training_with_video_token_length: bool = Field(
        False, description="videos of video_sample_size to image_sample_size, of lengths that keep their tokens equal"
    )
    random_frame_crop: bool = Field(False, description="one video in ten is cut to a shorter length drawn at random")
    random_ratio_crop: bool = Field(False, description="each clip draws its aspect ratio, and is cut to it")
    keep_all_node_same_token_length: bool = Field(
        False, description="each clip draws a budget of tokens; slots of nearly equal tokens stand side by side"
    )
    auto_tile_batch_size: bool = Field(
        False, description="buckets of a fourth of the tokens have twice the batch size, of a sixteenth four times"
    )
    token_budget: int | None = Field(None, ge=1, description="most video tokens of any sample; None: no bound")
    crop: Literal["cover", "none"] = Field(
        "cover", description="`cover`: scaled to cover the bucket, the overhang cut; `none`: scaled to it, nothing cut"
    )
    batch_size: int = Field(1, ge=1, le=1 << 16, description="samples of a micro-batch")

    @model_validator(mode="after")
    def _modes_go_together(self) -> FunSizes:
        needs = {
            "random_hw_adapt": ("enable_bucket",),
            "random_ratio_crop": ("enable_bucket",),
            "training_with_video_token_length": ("enable_bucket", "random_hw_adapt"),
            "auto_tile_batch_size": ("training_with_video_token_length",),
        }
        for mode, others in needs.items():
            for other in others:
                if getattr(self, mode) and not getattr(self, other):
                    raise ValueError(f"{mode} = True: acts with {other} = True only; write that too")
        if self.training_with_video_token_length and self.image_sample_size < self.video_sample_size:
            raise ValueError(
                f"image_sample_size = {self.image_sample_size}: with training_with_video_token_length it is the "
                f"largest size of videos too, and video_sample_size = {self.video_sample_size} the smallest; write "
                f"{self.video_sample_size} or more"
            )
        if self.video_length_drop_start >= self.video_length_drop_end:
            raise ValueError(
                f"video_length_drop_start = {self.video_length_drop_start}: is not below video_length_drop_end = "
                f"{self.video_length_drop_end}, so no frame is left; lower it"
            )
        if self.crop == "none" and (self.random_ratio_crop or not self.enable_bucket):
            mode = "random_ratio_crop = True" if self.random_ratio_crop else "enable_bucket = False"
            raise ValueError(f'crop = "none": {mode} cuts pictures to another shape; write crop = "cover"')
        return self

    def sampled(self, config: Any) -> dict[str, Any]:
        """Videos of `video_sample_size`, the longest that are trained there."""
        name = f"{self.video_sample_size}px"
        longest = max(num_frames for resolution, num_frames in self.law(config).entries if resolution == name)
        return {"resolution": name, "num_frames": longest}

    @classmethod
    def tiny(cls, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Sizes of 32 and more, at most 17 frames, small micro-batches."""
        layer: dict[str, Any] = {}
        for name in ("video_sample_size", "image_sample_size", "token_sample_size"):
            size = tree.get(name, cls.model_fields[name].default)
            if isinstance(size, int):
                layer[name] = max(32, size // _TINY)
        for name, most in (("video_sample_n_frames", _TINY_LENGTH), ("batch_size", 2)):
            if isinstance(number := tree.get(name, cls.model_fields[name].default), int):
                layer[name] = min(number, most)
        if tree.get("token_budget") is not None:
            layer["token_budget"] = None
        return layer


register_law(KIND_OF_LAW, lambda data: resolve_name(f"{_LAWS}:read_law")(data))  # without it, in every process
