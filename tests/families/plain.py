"""A plain family: cross-attention to a masked text, one list of blocks, integer timesteps, v-prediction, DDIM."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from longtake.contracts import Conditions, Draw
from longtake.data.rules import SampleRules
from longtake.diffusion.config import ObjectiveSection
from longtake.diffusion.objective import Objective
from longtake.diffusion.solvers import Solver
from longtake.families.record import Family, Text
from longtake.models.attention import Attention
from longtake.models.config import ModelSection
from longtake.models.initial import linear_uniform
from longtake.models.layers import patchify, timestep_features, token_grid, unpatchify
from longtake.models.plans import ANY, Exchange, SequencePlan, TensorSplit, check_conditions
from longtake.random import Purpose
from longtake.weights.format import Format, Naming, WeightLayout
from longtake.weights.lora import PEFT

MODULE = "tests.families.plain"


class PlainConfig(ModelSection):
    """Sizes of the plain denoiser."""

    DENOISER: ClassVar[str] = f"{MODULE}:Plain"
    WIDTHS: ClassVar[Mapping[str, str]] = MappingProxyType({"text": "text_dim"})
    type: Literal["plain"] = Field("plain", description="the denoiser")
    channels: int = Field(16, description="of the latents")
    text_dim: int = Field(16, description="width of a text token")
    width: int = Field(24, description="width of the model")
    heads: int = Field(2, description="attention heads")
    layers: int = Field(2, description="blocks")
    head_dim = property(lambda self: self.width // self.heads)
    latent_channels = property(lambda self: self.channels)
    patch = property(lambda self: (1, 1, 1))
    inputs = property(lambda self: self.channels)
    facts: ClassVar[int] = 16  # numbers that tell the time
    by_frame: ClassVar[bool] = False  # attention over time, each frame with its own time and text
    conditions = property(lambda self: ("text",))


class Block(nn.Module):
    """Self-attention, cross-attention to the text, an MLP."""

    def __init__(self, config: PlainConfig, attention: nn.Module) -> None:
        super().__init__()
        width, self.head_dim, self.attention = config.width, config.head_dim, attention
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.to_text, self.from_text, self.of_text = (nn.Linear(width, n * width) for n in (1, 1, 2))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        """x [B, L, D], text [B, Lt, D], mask [B, Lt]; a dim of frames, each with its own text, may stand behind B."""
        heads = [part(x).unflatten(-1, (-1, self.head_dim)) for part in (self.q, self.k, self.v)]
        x = x + self.out(self.attention(*heads).flatten(-2))
        pairs = self.to_text(x), *self.of_text(text).chunk(2, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2) for part in pairs)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[..., None, None, :])
        x = x + self.from_text(seen.transpose(-3, -2).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


class Plain(nn.Module):
    """Predicts v at integer timesteps below 1,000, given as float32."""

    blocks: ClassVar[Mapping[str, str]] = MappingProxyType({"layers": "layers"})
    varying_dims: ClassVar[Mapping[str, Any]] = MappingProxyType({"layers": ((0, 1), (0,), (0,))})
    attention: ClassVar[type[nn.Module]] = Attention
    tensor_plan: ClassVar[Mapping[str, TensorSplit] | None] = None
    sequence_plan: ClassVar[SequencePlan | None] = SequencePlan(
        split={"x_in": 1}, gather={"x_out": "x_in"}, exchanges={"layers.*.attention": Exchange(("x_in",))}
    )

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.config = config
        sizes = config.inputs, config.text_dim, config.facts
        self.x_in, self.text_in, self.time_in = (nn.Linear(size, config.width) for size in sizes)
        self.layers = nn.ModuleList(Block(config, self.attention(config.attention)) for _ in range(config.layers))
        self.x_out = nn.Linear(config.width, config.channels)
        self._fan_in = {name: layer.in_features for name, layer in self.named_modules() if isinstance(layer, nn.Linear)}

    def forward(self, x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        needs = self.needs(self.config, tuple(x.shape[1:]), ANY)
        check_conditions(self.config.type, needs, conditions, len(x), dict.fromkeys(needs, "pass it"))
        tokens, text, mask = self.embedded(x, t, conditions, self.x_in.weight.dtype)
        for block in self.layers:
            tokens = block(tokens, text, mask)
        return unpatchify(self.x_out(tokens.flatten(1, -2)), x.shape[2:], 1)

    def embedded(self, x: Tensor, t: Tensor, conditions: Conditions, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Tokens with their time, the text, and which of its tokens there are."""
        time = self.time_in(timestep_features(t / 1000, 16).to(dtype))[:, None]
        text = self.text_in(conditions["text"].to(dtype))
        return self.x_in(patchify(x.to(dtype), 1)) + time, text, conditions.masks["text"]

    @staticmethod
    def needs(config: PlainConfig, latent: tuple[int, ...], text_tokens: int) -> dict[str, tuple[int, ...]]:
        return {"text": (text_tokens, config.text_dim)}

    tokens = staticmethod(lambda config, latent: math.prod(token_grid(latent[1:], 1)))
    heads = staticmethod(lambda config: config.heads)

    @staticmethod
    def forward_flops(config: PlainConfig, latent: tuple[int, ...], text_tokens: int) -> int:
        tokens, width = Plain.tokens(config, latent), config.width
        copies, seen = (latent[1], latent[1]) if config.by_frame else (1, tokens)
        ends = (config.inputs + config.channels) * tokens + copies * (config.text_dim * text_tokens + config.facts)
        layer = 2 * width**2 * (10 * tokens + 2 * copies * text_tokens) + 4 * tokens * (seen + text_tokens) * width
        return 2 * width * ends + config.layers * layer

    def initial_value(self, name: str, shape: Sequence[int], seed: int) -> Tensor:
        return linear_uniform(name, shape, self._fan_in.get(name.rpartition(".")[0], 1), seed)


class VConfig(ObjectiveSection):
    """v-prediction on a cosine schedule of 1,000 indices."""

    OBJECTIVE: ClassVar[str] = f"{MODULE}:VPrediction"
    SOLVERS: ClassVar[tuple[str, ...]] = ("ddim",)
    type: Literal["v"] = Field("v", description="the objective")


class VPrediction(Objective):
    """x(t) = cos a x0 + sin a noise, v = cos a noise - sin a x0, a = (t + 1) pi / 2000; t an index below 1,000."""

    noise_time: ClassVar[float] = 999.0
    timestep: ClassVar[Draw] = Draw(Purpose.TIMESTEP, "integer", below=1000, stratified=True)
    solver = staticmethod(lambda name, num_steps: DDIM())

    def times(self, drawn: Tensor, latent_shape: Any, shape: Any) -> Tensor:
        return drawn.float()

    def noised_at(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        angle = (t + 1) * (math.pi / 2000)
        return angle.cos() * clean + angle.sin() * noise

    def target(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        return self.noised_at(noise, -clean, t)

    def grid(self, num_steps: int, latent_shape: Any, shift: Any = "training", shape: Any = None) -> Tensor:
        return torch.linspace(999, -1, num_steps + 1).round()


class DDIM(Solver):
    """Along the circle that x0 and the noise span; without noise of its own."""

    def step(self, denoise: Any, x: Tensor, t: Tensor, t_next: Tensor, index: int, past: Any, noise: Any) -> Tensor:
        v = denoise(x, t.expand(len(x)), index)
        turn = (t_next - t) * (math.pi / 2000)
        return turn.cos() * x + turn.sin() * v


FORMAT = Format(
    name="plain",
    sources="a file of it",
    namings={"plain": Naming({}, signs=("x_in.weight",))},
    own=lambda config: WeightLayout("plain"),
    keys="model.layers",
    lora_targets=("layers.*.q", "layers.*.v"),
    lora_styles={"peft": PEFT},
)

PLAIN = Family(
    name="plain",
    model=PlainConfig,
    objectives=(VConfig,),
    texts=(Text("t5", "text", masked=True),),
    weights=f"{MODULE}:FORMAT",
    rules=lambda config: SampleRules(caption="plain"),
    sampling={"solver": "ddim", "guidance": 2.0},
    tiny=lambda model: {"model": {"width": 16, "heads": 2, "layers": 1}},
)
