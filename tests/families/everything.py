"""A family with everything: two captions a clip, times per frame, a spatial mask, a control video, chunked latents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from longtake.contracts import Conditions, Draw, Known, LatentShape, Noised
from longtake.data.rules import Companion, SampleRules
from longtake.diffusion import Objective, ObjectiveSection, Places, Solver, Window, kinds_by_weight, sample_loss
from longtake.encoders import ChunkedAutoencoder
from longtake.encoders.config import AutoencoderSection
from longtake.families import Text
from longtake.models import Attention, SequencePlan, Switch
from longtake.models.layers import patchify, timestep_features, unpatchify
from longtake.models.plans import ANY, check_conditions
from longtake.random import Purpose
from longtake.weights.format import Naming, WeightLayout
from tests.buckets.own_law import TokenBudget
from tests.families import plain
from tests.families.plain import PLAIN, Plain, PlainConfig

MODULE = "tests.families.everything"
KINDS = MappingProxyType(
    {
        "none": "nothing is known",
        "box": "a quarter of the picture",
        "first": "the first frame",
        "edit": "all of it, until the noise is down to a share",
        "inpaint": "pixels that a mask leaves",
    }
)


class EverythingConfig(PlainConfig):
    """Sizes of the denoiser."""

    DENOISER: ClassVar[str] = f"{MODULE}:Everything"
    type: Literal["everything"] = Field("everything", description="the denoiser")
    channels: int = Field(3, description="of the latents")
    text_tokens: int = Field(8, description="tokens of the tensor that stands for no text")
    inputs = property(lambda self: 2 * self.channels + 1)
    facts: ClassVar[int] = 17
    conditions = property(lambda self: ("text", "mask", "control", "fps"))


class OverTime(Attention):
    """Attention over the frames at each place, of tensors [B, F, S, N, K]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().forward(*(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)))
        return out.unflatten(0, (len(q), -1)).transpose(1, 2)


class Everything(Plain):
    """Predicts the velocity x0 - noise at times of frames, 1000 is noise; each part of them is told its own caption."""

    attention = OverTime
    varying_dims: ClassVar[Mapping[str, Any]] = MappingProxyType({"layers": ((0, 1, 2), (0, 1, 2), (0, 1, 2))})
    sequence_plan = SequencePlan(
        split=dict.fromkeys(("x_in", "text_in", "time_in", "seen"), 1),
        gather={"x_out": "x_in"},
        exchanges={"layers.*.attention": Switch("x_in")},
        units={"x_in": "frame"},
    )

    def __init__(self, config: EverythingConfig) -> None:
        super().__init__(config)
        self.null_text = nn.Parameter(torch.zeros(config.text_tokens, config.text_dim))
        self.seen = nn.Identity()

    def forward(self, x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        needs = self.needs(self.config, tuple(x.shape[1:]), ANY)
        check_conditions("everything", needs, conditions, len(x), dict.fromkeys(needs, "pass it"))
        frames, dtype = x.shape[2], self.x_in.weight.dtype
        t = t if t.dim() == 2 else t[:, None].expand(-1, frames)
        fps = conditions["fps"][:, None, None].expand(*t.shape, 1) / 24
        facts = torch.cat([timestep_features(t.flatten() / 1000, 16).unflatten(0, t.shape), fps], -1)
        joined = torch.cat([x, conditions["mask"], conditions.get("control", torch.zeros_like(x))], dim=1)
        tokens = self.x_in(patchify(joined.to(dtype), 1)).unflatten(1, (-1, math.prod(x.shape[3:])))
        tokens = tokens + self.time_in(facts.to(dtype))[:, :, None]
        part = torch.arange(frames, device=x.device) * segments_of(frames) // frames
        text = self.text_in(conditions["text"].to(dtype)[:, part])
        seen = self.seen(conditions.masks["text"][:, part])
        for block in self.layers:
            tokens = block(tokens, text, seen)
        return unpatchify(self.x_out(tokens.flatten(1, 2)), x.shape[2:], 1)

    @staticmethod
    def needs(config: EverythingConfig, latent: tuple[int, ...], text_tokens: int) -> dict[str, tuple[int, ...]]:
        text = (ANY if text_tokens == ANY else segments_of(latent[1]), text_tokens, config.text_dim)
        return {"text": text, "mask": (1, *latent[1:]), "fps": ()}

    units = staticmethod(lambda config, latent: {"frame": math.prod(latent[2:])})

    @staticmethod
    def forward_flops(config: EverythingConfig, latent: tuple[int, ...], text_tokens: int) -> int:
        frames, tokens, width = latent[1], math.prod(latent[1:]), config.width
        ends = (config.inputs + config.channels) * tokens + frames * (config.text_dim * text_tokens + config.facts)
        layer = width**2 * (10 * tokens + 2 * text_tokens * frames) + 2 * tokens * (frames + text_tokens) * width
        return 2 * (width * ends + config.layers * layer)


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
    type: Literal["flow_1000"] = Field("flow_1000", description="the objective")


class Flow(Objective):
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
        kinds = kinds_by_weight(choices["mask"], {kind: weights[kind] for kind in KINDS if weights.get(kind)})
        pairs = zip(kinds, choices["box"].tolist(), strict=True)
        return [self._places(kind, latent, shape, None, box) for kind, box in pairs]

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
            to_make = Chunks(ChunkConfig()).posterior(mask[None])["mean"][0] > 0
            return replace(found, released=to_make.float(), mask=mask)
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


FORMAT = replace(
    plain.FORMAT,
    name="everything",
    namings={"everything": Naming({}, signs=("x_in.weight",))},
    own=lambda config: WeightLayout("everything"),
    lora_targets=("layers.*.q",),
)

EVERYTHING = replace(
    PLAIN,
    name="everything",
    model=EverythingConfig,
    objectives=(FlowOf1000,),
    texts=(Text("t5", "text", masked=True, empty="null_text"),),
    weights=f"{MODULE}:FORMAT",
    known=f"{MODULE}:Boxes",
    kinds=KINDS,
    readers=frozenset({"input", "times", "loss"}),
    segments=segments_of,
    guidance={"fading": f"{MODULE}:fading"},
    rules=lambda config: SampleRules(caption="plain", still_fps=120),
    bucket_rule=lambda config: TokenBudget((16, 32), 17 * 32**2, stride=1),
    companions=lambda model: (Companion("control", "control", "video", "control"),),
    sources={"*.jsonl": "tests.families.foreign:open_list"},
    sampling={"solver": "noisy", "guidance": 2.0, "guidance_rule": "fading"},
    tiny=lambda model: {"model": {"width": 8, "layers": 1}},
)
