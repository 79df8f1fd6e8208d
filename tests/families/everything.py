"""A family with everything: two captions a clip, times per frame, a spatial mask, a control video, chunked latents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from longtake.contracts import Conditions, Known, LatentShape, Noised
from longtake.data.latents.source import EncoderFacts, FileOf, ListedLatents, load_tensors, open_listed
from longtake.data.rules import Companion, SampleRules
from longtake.diffusion.config import ObjectiveSection
from longtake.diffusion.flow import StraightFlow
from longtake.diffusion.known import ByKind, Places, Window, with_box
from longtake.diffusion.objective import sample_loss
from longtake.diffusion.solvers import Euler
from longtake.encoders.autoencoder import ChunkedAutoencoder
from longtake.encoders.autoencoder_config import AutoencoderSection
from longtake.families.record import Text
from longtake.models.attention import TemporalAttention
from longtake.models.layers import patchify, timestep_features
from longtake.models.plans import ANY, SequencePlan, Switch
from tests.buckets.own_law import TokenBudget
from tests.families.plain import PLAIN, Plain, PlainConfig

MODULE = "tests.families.everything"
KINDS = {"none": "nothing is known", "box": "a quarter of the picture", "first": "the first frame"}
KINDS |= {"edit": "all of it, until the noise is down to a share", "inpaint": "pixels that a mask leaves"}


class EverythingConfig(PlainConfig):
    """Sizes of the denoiser."""

    DENOISER: ClassVar[str] = f"{MODULE}:Everything"
    type: Literal["everything"] = Field("everything", description="the denoiser")
    channels: int = Field(3, description="of the latents")
    text_tokens: int = Field(8, description="tokens of the tensor that stands for no text")
    inputs = property(lambda self: 2 * self.channels + 1)
    facts: ClassVar[int] = 17
    by_frame: ClassVar[bool] = True
    conditions = property(lambda self: ("text", "mask", "control", "fps"))


class Everything(Plain):
    """Predicts the velocity x0 - noise at times of frames, 1000 is noise; each part of them is told its own caption."""

    attention = TemporalAttention
    varying_dims: ClassVar[Mapping[str, Any]] = {"layers": ((0, 1, 2),) * 3}
    sequence_plan = SequencePlan(
        dict.fromkeys(("x_in", "text_in", "time_in", "seen"), 1), {"x_out": "x_in"},
        {"layers.*.attention": Switch("x_in")}, units={"x_in": "frame"},
    )  # fmt: skip

    def __init__(self, config: EverythingConfig) -> None:
        super().__init__(config)
        self.null_text = nn.Parameter(torch.zeros(config.text_tokens, config.text_dim))
        self.seen = nn.Identity()

    def embedded(self, x: Tensor, t: Tensor, conditions: Conditions, dtype: torch.dtype) -> tuple[Tensor, ...]:
        frames, control = x.shape[2], conditions.get("control", torch.zeros_like(x))
        t = t[:, None].expand(-1, frames)
        t = t.where(conditions["x_mask"], 0.0) if "x_mask" in conditions else t
        fps = conditions["fps"][:, None, None].expand(*t.shape, 1) / 24
        facts = torch.cat([timestep_features(t.flatten() / 1000, 16).unflatten(0, t.shape), fps], -1)
        joined = patchify(torch.cat([x, conditions["mask"], control], dim=1).to(dtype), 1)
        tokens = (
            self.x_in(joined).unflatten(1, (-1, math.prod(x.shape[3:]))) + self.time_in(facts.to(dtype))[:, :, None]
        )
        part = torch.arange(frames, device=x.device) * segments_of(frames) // frames
        return tokens, self.text_in(conditions["text"].to(dtype)[:, part]), self.seen(conditions.masks["text"][:, part])

    @staticmethod
    def needs(config: EverythingConfig, latent: tuple[int, ...], text_tokens: int) -> dict[str, tuple[int, ...]]:
        text = (ANY if text_tokens == ANY else segments_of(latent[1]), text_tokens, config.text_dim)
        return {"text": text, "mask": (1, *latent[1:]), "fps": ()}

    units = staticmethod(lambda config, latent, text_tokens: {"frame": math.prod(latent[2:])})


def segments_of(frames: int) -> int:
    """Captions of a clip of so many frames, of pixels or latents: a still has one, any other clip two."""
    return 1 if frames == 1 else 2


class ChunkConfig(AutoencoderSection):
    """Means of 4 x 8 x 8 pixels; 17 frames, encoded apart from the others, become 5."""

    AUTOENCODER: ClassVar[str] = f"{MODULE}:Chunks"
    type: Literal["chunks"] = Field("chunks", description="the autoencoder")
    latent = property(lambda self: LatentShape(3, 4, 8, causal=True, chunk=17, whole_cells=True))
    check = staticmethod(lambda *shape: None)


class Chunks(ChunkedAutoencoder):
    is_random = False

    def posterior_of_chunk(self, video: Tensor) -> dict[str, Tensor]:
        return {"mean": F.avg_pool3d(F.pad(video, (0, 0, 0, 0, -video.shape[2] % 4, 0)), (4, 8, 8))}

    def decode_chunk(self, latents: Tensor, num_frames: int) -> Tensor:
        return F.interpolate(latents, scale_factor=(4, 8, 8))[:, :, -num_frames:]


def fading(scale: float, step: int, num_steps: int, t: float, power: float = 1.0) -> float:
    """Guidance that fades with the noise."""
    return 1 + (scale - 1) * (t / 1000) ** power


class FlowOf1000(ObjectiveSection):
    """Flow on times 0 to 1000, shifted by the pixels of the bucket."""

    OBJECTIVE: ClassVar[str] = f"{MODULE}:Flow"
    SOLVERS: ClassVar[tuple[str, ...]] = ("noisy",)
    type: Literal["flow_everything"] = Field("flow_everything", description="the objective")


class Flow(StraightFlow):
    """Neighbouring frames count in the loss beside each by itself."""

    noise_time: ClassVar[float] = 1000.0
    solver = staticmethod(lambda name, num_steps: Noisy())

    def times(self, drawn: Tensor, latent_shape: Any, shape: tuple[int, int, int]) -> Tensor:
        ratio = math.sqrt(math.prod(shape)) / 64
        return 1000 * ratio * drawn / (1 + (ratio - 1) * drawn)

    def loss(self, prediction: Tensor, noised: Noised) -> Tensor:
        of_motion = (prediction - noised.target).diff(dim=2).square().flatten(1)
        motion = of_motion.mean(1) if of_motion.shape[1] else 0.0
        return sample_loss(prediction, noised) + 0.25 * motion


class Noisy(Euler):
    """Euler's rule with a little noise at every step but the last."""

    def step(self, denoise: Any, x: Tensor, t: Tensor, t_next: Tensor, index: int, past: Any, noise: Any) -> Tensor:
        x = super().step(denoise, x, t, t_next, index, past, noise)
        return x + 0.05 * (t_next / 1000) * noise(index).to(x) if t_next > 0 else x


class Boxes(ByKind):
    """Known places: a quarter of the picture, of latents or of pixels, the first frame, or all of it for a while."""

    kinds, numbers = KINDS, 3

    def windows(self, kind: str, latent: LatentShape, num_frames: int, refs: Any = None) -> tuple[Window, ...]:
        if kind == "first":
            return (Window(range(1), range(1), "head1"),) if num_frames > 1 else ()
        every, masked = (range(latent(num_frames, 1, 1)[1]), range(num_frames)), kind == "inpaint"
        return () if kind == "none" else (Window(*every, "masked" if masked else "", masked),)

    def places(self, kind: str, latent: LatentShape, shape: Any, mask: Tensor | None, numbers: Any) -> Places:
        found, size = super().places(kind, latent, shape, mask, numbers), latent(*shape)[1:]
        if kind == "box":
            return replace(found, released=with_box(size, numbers[1:]))
        if kind == "edit":
            return replace(found, released=torch.full((1, size[0], 1, 1), numbers[0]))
        if kind == "inpaint":
            mask = with_box(shape, numbers[1:]).bool() if mask is None else mask
            to_make = Chunks(ChunkConfig()).posterior(mask[None].float())["mean"][0] > 0
            return replace(found, released=to_make.float(), mask=mask)
        return found

    def conditions(self, known: Known) -> dict[str, Tensor]:
        seen = 1 + known.latents.mean(1, keepdim=True) / 2  # of a place in which a mask leaves some pixels
        return {"mask": torch.where(known.released == 1, seen, known.released)}


def open_list(config: Any, table: Any) -> ListedLatents:
    """Another program's files: a JSONL with a line for each clip, latents with frames first."""
    path = Path(config.dataset.latents)
    facts = EncoderFacts(config.ae.latent, config.text_length, load_tensors(path.parent / "empty.pt"))
    names = [Path(table.written_path(row)).name for row in range(len(table))]
    return open_listed(path, "clip", names, facts, read_latents, FileOf("text_emb"), bool(config.family.segments))


def read_latents(line: Mapping[str, Any], load: Any) -> dict[str, Tensor]:
    return {name: moment.transpose(0, 1).contiguous() for name, moment in load(line["vid_emb"]).items()}


EVERYTHING = replace(
    PLAIN,
    name="everything",
    model=EverythingConfig,
    objectives=(FlowOf1000,),
    texts=(Text("t5", "text", masked=True, empty="null_text"),),
    known=f"{MODULE}:Boxes",
    kinds=KINDS,
    readers=lambda model: frozenset({"input", "x_mask", "loss"}),
    segments=lambda config: segments_of,
    guidance={"fading": f"{MODULE}:fading"},
    rules=lambda config: SampleRules(caption="plain", still_fps=120),
    bucket_rule=lambda config: TokenBudget((16, 32), 17 * 32**2, stride=1),
    companions=lambda model: (Companion("control", "control", "video", "control"),),
    sources={"*.jsonl": f"{MODULE}:open_list"},
    sampling={"solver": "noisy", "guidance": 2.0, "guidance_rule": "fading"},
    tiny=lambda model: {"model": {"width": 8, "layers": 1}},
)
