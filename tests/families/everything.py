"""A family with everything: two captions a clip, times per frame, a spatial mask, a control video, chunked latents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from longtake.contracts import Conditions
from longtake.data.rules import Companion, SampleRules
from longtake.families import Family, Text
from longtake.models import ModelSection
from longtake.models.initial import linear_uniform
from longtake.models.layers import timestep_features, unpatchify
from longtake.models.plans import ANY, check_conditions
from longtake.weights.format import Format, Naming, WeightLayout
from longtake.weights.lora import PEFT
from tests.buckets.own_law import TokenBudget
from tests.families.everything_parts import KINDS, FlowOf1000

MODULE, PARTS = "tests.families.everything", "tests.families.everything_parts"


class EverythingConfig(ModelSection):
    """Sizes of the denoiser."""

    DENOISER: ClassVar[str] = f"{MODULE}:Everything"
    WIDTHS: ClassVar[Mapping[str, str]] = MappingProxyType({"text": "text_dim"})
    type: Literal["everything"] = Field("everything", description="the denoiser")
    text_dim: int = Field(16, description="width of a text token")
    text_tokens: int = Field(8, description="tokens of the tensor that stands for no text")
    width: int = Field(16, description="width of the model")
    layers: int = Field(2, description="blocks")
    head_dim, latent_channels = property(lambda self: self.width), property(lambda self: 3)
    patch = property(lambda self: (1, 1, 1))
    conditions = property(lambda self: ("text", "mask", "control", "fps"))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.text_kv, self.out = (nn.Linear(width, n * width) for n in (3, 2, 1))

    def forward(self, x: Tensor, text: Tensor, seen: Tensor) -> Tensor:
        """x [B, F, S, D]; text [B, N, L, D]: each part of the frames attends to all tokens and to its own caption."""
        parts = []
        q, k, v = self.qkv(x).chunk(3, -1)
        for i, own in enumerate(q.chunk(text.shape[1], dim=1)):
            text_k, text_v = self.text_kv(text[:, i]).chunk(2, -1)
            keys, values = torch.cat([text_k, k.flatten(1, 2)], 1), torch.cat([text_v, v.flatten(1, 2)], 1)
            mask = F.pad(seen[:, i], (0, k.shape[1] * k.shape[2]), value=True)[:, None]
            parts.append(F.scaled_dot_product_attention(own.flatten(1, 2), keys, values, mask).view_as(own))
        return x + self.out(torch.cat(parts, dim=1))


class Everything(nn.Module):
    """Predicts the velocity x0 - noise at times of frames, 1000 is noise."""

    blocks: ClassVar[Mapping[str, str]] = MappingProxyType({"layers": "layers"})
    varying_dims: ClassVar[Mapping[str, Any]] = MappingProxyType({"layers": ((0, 1, 2), (0, 1), (0, 1))})
    tensor_plan = sequence_plan = None

    def __init__(self, config: EverythingConfig) -> None:
        super().__init__()
        self.config, width = config, config.width
        self.x_in, self.text_in, self.time_in = (nn.Linear(n, width) for n in (7, config.text_dim, 17))
        self.layers, self.x_out = nn.ModuleList(Block(width) for _ in range(config.layers)), nn.Linear(width, 3)
        self.null_text = nn.Parameter(torch.zeros(config.text_tokens, config.text_dim))
        self._fan_in = {name: layer.in_features for name, layer in self.named_modules() if isinstance(layer, nn.Linear)}

    def forward(self, x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        needs = self.needs(self.config, tuple(x.shape[1:]), ANY)
        check_conditions("everything", needs, conditions, len(x), dict.fromkeys(needs, "pass it"))
        dtype = self.x_in.weight.dtype
        conditions = Conditions({name: one.to(dtype) for name, one in conditions.items()}, conditions.masks)
        x = x.to(dtype)
        t = t if t.dim() == 2 else t[:, None].expand(-1, x.shape[2])
        fps = conditions["fps"][:, None, None].expand(*t.shape, 1) / 24
        facts = torch.cat([timestep_features(t.flatten() / 1000, 16).unflatten(0, t.shape), fps], -1).to(dtype)
        control = conditions.get("control", torch.zeros_like(x))
        joined = torch.cat([x, conditions["mask"], control], dim=1)
        tokens = self.x_in(joined.movedim(1, -1).flatten(2, 3)) + self.time_in(facts)[:, :, None]
        text = self.text_in(conditions["text"])
        for block in self.layers:
            tokens = block(tokens, text, conditions.masks["text"])
        return unpatchify(self.x_out(tokens).flatten(1, 2), x.shape[2:], 1)

    @staticmethod
    def needs(config: EverythingConfig, latent: tuple[int, ...], text_tokens: int) -> dict[str, tuple[int, ...]]:
        size = latent[1:]
        text = (ANY if text_tokens == ANY else segments_of(size[0]), text_tokens, config.text_dim)
        return {"text": text, "mask": (1, *size), "fps": ()}

    tokens = staticmethod(lambda config, latent: math.prod(latent[1:]))
    heads = staticmethod(lambda config: 1)

    @staticmethod
    def forward_flops(config: EverythingConfig, latent: tuple[int, ...], text_tokens: int) -> int:
        tokens, width = math.prod(latent[1:]), config.width
        return config.layers * (8 * width**2 * (tokens + text_tokens) + 4 * tokens * (tokens + text_tokens) * width)

    def initial_value(self, name: str, shape: Sequence[int], seed: int) -> Tensor:
        fan_in = self._fan_in.get(name.rpartition(".")[0], 1)
        return linear_uniform(name, shape, fan_in, seed)


def segments_of(frames: int) -> int:
    """Captions of a clip of so many frames, of pixels or latents: a still has one, any other clip two."""
    return 1 if frames == 1 else 2


FORMAT = Format(
    name="everything",
    sources="a file of it",
    namings={"everything": Naming({}, signs=("x_in.weight",))},
    own=lambda config: WeightLayout("everything"),
    keys="model.layers",
    lora_targets=("layers.*.qkv",),
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
    rules=lambda config: SampleRules(caption="plain"),
    bucket_rule=lambda config: TokenBudget((16, 32), 17 * 32**2, stride=1),
    companions=lambda model: (Companion("control", "control", "video", "control"),),
    sources={"*.jsonl": "tests.families.foreign:open_list"},
    sampling={"solver": "noisy", "guidance": 2.0, "guidance_rule": "fading"},
    tiny=lambda model: {"model": {"width": 8, "layers": 1}},
)
