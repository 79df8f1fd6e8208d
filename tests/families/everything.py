"""A family with everything: two captions a clip, times per frame, a spatial mask, a control video, chunked latents."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from longtake.contracts import Conditions
from longtake.data.rules import Companion, SampleRules
from longtake.families import Family, Text
from longtake.models import Attention, SequencePlan, Switch
from longtake.models.layers import patchify, timestep_features, unpatchify
from longtake.models.plans import ANY, check_conditions
from longtake.weights.format import Format, Naming, WeightLayout
from longtake.weights.lora import PEFT
from tests.buckets.own_law import TokenBudget
from tests.families.everything_parts import KINDS, FlowOf1000
from tests.families.plain import Plain, PlainConfig

MODULE, PARTS = "tests.families.everything", "tests.families.everything_parts"


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


FORMAT = Format(
    name="everything",
    sources="a file of it",
    namings={"everything": Naming({}, signs=("x_in.weight",))},
    own=lambda config: WeightLayout("everything"),
    keys="model.layers",
    lora_targets=("layers.*.q",),
    lora_styles={"peft": PEFT},
)

EVERYTHING = Family(
    name="everything",
    model=EverythingConfig,
    objectives=(FlowOf1000,),
    texts=(Text("t5", "text", masked=True, empty="null_text"),),
    weights=f"{MODULE}:FORMAT",
    known=f"{PARTS}:Boxes",
    kinds=KINDS,
    readers=frozenset({"input", "times", "loss"}),
    segments=segments_of,
    guidance={"fading": f"{PARTS}:fading"},
    rules=lambda config: SampleRules(caption="plain", still_fps=120),
    bucket_rule=lambda config: TokenBudget((16, 32), 17 * 32**2, stride=1),
    companions=lambda model: (Companion("control", "control", "video", "control"),),
    sources={"*.jsonl": "tests.families.foreign:open_list"},
    sampling={"solver": "noisy", "guidance": 2.0, "guidance_rule": "fading"},
    tiny=lambda model: {"model": {"width": 8, "layers": 1}},
)
