"""The STDiT3 of Open-Sora 1.2: blocks in which tokens meet within a frame, each followed by one in which they meet over
time at a place; every block reads the text by cross-attention.

The timestep and the frame rate shift, scale and gate every block by numbers that all share, to which each adds a table
of its own. Frames that are known beforehand come at time 0. Parameter names are those of the published files.

Shapes: B batch, C latent channels, F latent frames, h w latent grid, S tokens of a frame, M = F S video tokens, L text
tokens, D width, N heads, K = D / N head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from longtake.contracts import Conditions, UserError
from longtake.models import layers
from longtake.models.attention import Attention, MaskedAttention, SpatialAttention, TemporalAttention
from longtake.models.initial import linear_uniform, normal
from longtake.models.plans import ANY, SequencePlan, Switch, TensorSplit, check_conditions
from longtake.models.stdit3_config import STDiT3Config
from longtake.models.stdit3_inputs import (
    MLP,
    TIME_FEATURES,
    CaptionEmbedder,
    FramePositions,
    PatchEmbedder,
    TimeEmbedder,
    place_positions,
)

_LISTS = ("spatial_blocks", "temporal_blocks")
_VIDEO, _FRAMES = "x_embedder", "by_frame"
_LAYERS = {  # of a block -> how peers cut them; the text's keys and values run over what every peer has whole
    "attn.qkv": ("column", ("hidden_size",) * 3, (_VIDEO,)),
    "attn.proj": ("row", (), (_VIDEO,)),
    "cross_attn.q_linear": ("column", (), (_VIDEO,)),
    "cross_attn.kv_linear": ("column", ("hidden_size",) * 2, ()),
    "cross_attn.proj": ("row", (), (_VIDEO,)),
    "mlp.fc1": ("column", (), (_VIDEO,)),
    "mlp.fc2": ("row", (), (_VIDEO,)),
}


class STDiT3(nn.Module):
    """Predicts x0 - noise from noised latents at times 0 to 1000, given as float32; 1000 is noise.

    Computes in the dtype of its weights and casts its inputs itself; the timestep is cast only after its sinusoids.
    """

    blocks: ClassVar[Mapping[str, str]] = MappingProxyType(dict.fromkeys(_LISTS, "depth"))
    in_turn: ClassVar[bool] = True
    varying_dims: ClassVar[Mapping[str, tuple[tuple[int, ...], ...]]] = MappingProxyType(
        dict.fromkeys(_LISTS, ((0, 1), (0, 1), (0, 1), (0, 3), (), (1,)))
    )  # of each argument of a block, the dims that differ from bucket to bucket
    tensor_plan: ClassVar[Mapping[str, TensorSplit]] = MappingProxyType(
        {f"{blocks}.*.{layer}": TensorSplit(*how) for blocks in _LISTS for layer, how in _LAYERS.items()}
    )
    sequence_plan: ClassVar[SequencePlan] = SequencePlan(
        split=MappingProxyType({_VIDEO: 1, _FRAMES: 1, "frame_positions": 1}),
        gather=MappingProxyType({"final_layer": _VIDEO}),
        exchanges=MappingProxyType({"temporal_blocks.*.attn.attention": Switch(_VIDEO)}),
        entry=MappingProxyType({"enter": (_VIDEO, *(_FRAMES,) * 4)}),
        units=MappingProxyType({_VIDEO: "frame"}),
        tensor_units=True,
    )

    def __init__(self, config: STDiT3Config) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.x_embedder = PatchEmbedder(config)
        self.t_embedder, self.fps_embedder = TimeEmbedder(width), TimeEmbedder(width)
        self.t_block = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.y_embedder = CaptionEmbedder(config)
        self.by_frame = nn.Identity()
        self.frame_positions = FramePositions(config.head_dim)
        self.enter = EnterFrames()
        self.spatial_blocks = nn.ModuleList(
            CaptionedBlock(config, SpatialAttention(config.attention)) for _ in range(config.depth)
        )
        self.temporal_blocks = nn.ModuleList(
            CaptionedBlock(config, TemporalAttention(config.attention)) for _ in range(config.depth)
        )
        self.final_layer = FrameFinalLayer(config)
        self._linear = layers.linear_sizes(self)

    def forward(self, x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        """Predict [B, C, F, h, w] in the weights' dtype from x [B, C, F, h, w] and t float32 [B].

        Any F, h, w: a grid that the patch does not divide is filled up with zeros inside and cut afterwards.
        Conditions: `text` [B, L, caption_channels], whose mask [B, L] says which tokens there are (none: all), `fps`
        [B], and `size` [B, 2], height and width in pixels, of which those of the first sample count for all; optional:
        `x_mask` bool [B, F], False where a frame is known. Raises `UserError` for a missing or misshapen condition.
        """
        return self.all_channels(x, t, conditions)[:, : self.config.in_channels].contiguous()

    def all_channels(self, x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        """Return the same with every channel that the last layer gives: [B, out_channels, F, h, w]."""
        config, patch = self.config, self.config.patch_size[1]
        self._check_inputs(x, t, conditions)
        grid = layers.token_grid(x.shape[2:], patch)
        places = grid[1] * grid[2]
        rate = self.fps_embedder(conditions["fps"][:, None])
        times, made = t[:, None].expand(-1, grid[0]), conditions.get("x_mask")
        vec = self.t_embedder(times if made is None else times.where(made, 0.0)) + rate
        numbers = self.t_block(vec).unflatten(-1, (6, -1))
        of_frames = [numbers, vec]
        if made is not None:
            known = ~made[:, :, None]
            of_frames += [known, (self.t_embedder(t[:, None]) + rate).where(known, vec)]
        numbers, *of_frames = (self.by_frame(one) for one in of_frames)
        rope = self.frame_positions(grid[0], x.device)
        text, mask = conditions["text"], conditions.masks.get("text")
        mask = torch.ones(text.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        text, mask = self.y_embedder(text), mask[:, None, None]

        tokens = self.x_embedder(x)
        positions = place_positions(grid[1:], conditions["size"][0], config)
        tokens = (tokens.unflatten(1, (-1, places)) + positions.to(tokens.dtype)).flatten(1, 2)
        tokens, numbers, *of_frames = self.enter(tokens, numbers, *of_frames)
        for spatial, temporal in zip(self.spatial_blocks, self.temporal_blocks, strict=True):
            tokens = spatial(tokens, numbers, text, mask, places)
            tokens = temporal(tokens, numbers, text, mask, places, rope)
        out = self.final_layer(tokens, places, *of_frames)
        out = out.unflatten(-1, (patch**2, -1)).transpose(-1, -2).flatten(-2)  # channels are last in the files
        return layers.unpatchify(out, x.shape[2:], patch)

    def _check_inputs(self, x: Tensor, t: Tensor, conditions: Conditions) -> None:
        config = self.config
        assert t.dtype == torch.float32, f"timesteps must be float32, found {t.dtype}: bf16 cannot tell them apart"
        batch, channels, *size = x.shape
        if channels != config.in_channels:
            raise UserError(
                f"model.in_channels = {config.in_channels}: the latents have {channels} channels; write "
                f"in_channels = {channels}, or choose another ae"
            )
        check_conditions("STDiT3", self.needs(config, (channels, *size), ANY), conditions, batch, _REMEDIES)

    @staticmethod
    def needs(config: STDiT3Config, latent: tuple[int, int, int, int], text_tokens: int) -> dict[str, tuple[int, ...]]:
        return {"text": (text_tokens, config.caption_channels), "fps": (), "size": (2,)}

    @staticmethod
    def units(config: STDiT3Config, latent: tuple[int, int, int, int], text_tokens: int) -> dict[str, int]:
        return {"frame": math.prod(layers.token_grid(latent[1:], config.patch_size[1])[1:])}

    @staticmethod
    def tokens(config: STDiT3Config, latent: tuple[int, int, int, int]) -> int:
        return math.prod(layers.token_grid(latent[1:], config.patch_size[1]))

    @staticmethod
    def heads(config: STDiT3Config) -> int:
        return config.num_heads

    def initial_value(self, name: str, shape: Sequence[int], seed: int) -> Tensor:
        """Return the initial value of the parameter `name`, whole, in fp32 on the default device: a function of (seed,
        name).

        As published: linear layers Xavier-uniform without bias, tables normal; the last layers of temporal blocks and
        of the frame rate's embedder zero, so that each temporal block starts as the identity.
        """
        layer, _, kind = name.rpartition(".")
        if kind == "scale_shift_table":
            return normal(name, shape, self.config.hidden_size**-0.5, seed)
        if kind == "y_embedding":
            return normal(name, shape, self.config.caption_channels**-0.5, seed)
        if layer == "x_embedder.proj":
            return linear_uniform(name, shape, self.x_embedder.proj.weight[0].numel(), seed)
        if layer not in self._linear:
            return torch.ones(*shape)
        fan_in, fan_out = self._linear[layer]
        is_last = layer.startswith("temporal_blocks.") and layer.endswith(("proj", "mlp.fc2"))
        if kind == "bias" or is_last or layer == "fps_embedder.mlp.2":
            return torch.zeros(*shape)
        if layer == "fps_embedder.mlp.0":
            return normal(name, shape, 0.02, seed)
        return linear_uniform(name, shape, (fan_in + fan_out) / 6, seed)

    @staticmethod
    def forward_flops(config: STDiT3Config, latent: tuple[int, int, int, int], text_tokens: int) -> int:
        """Floating-point operations of one forward pass of one sample, counted as `MMDiT.forward_flops` counts."""
        D, hidden, frames = config.hidden_size, config.mlp_size, latent[1]
        video = STDiT3.tokens(config, latent)
        linear = 2 * D * (video * (6 * D + 2 * hidden) + text_tokens * 2 * D)
        attended = 2 * text_tokens + frames + video // frames  # of both blocks of a pair
        pair = 2 * linear + 4 * video * attended * D
        vectors = 2 * D * (frames * (TIME_FEATURES + 7 * D) + TIME_FEATURES + D)
        cells = config.patch_size[1] ** 2
        ends = video * (config.in_channels + config.out_channels) * cells + text_tokens * (config.caption_channels + D)
        return config.depth * pair + vectors + 2 * D * ends


_REMEDIES = {
    "text": "pass the token embeddings of the prompt",
    "fps": "pass the frames a second of each sample, 120 for stills",
    "size": "pass height and width of each sample in pixels",
}


class EnterFrames(nn.Module):
    """Entry of the blocks, where tensor-parallel ranks split the frames of a sequence-parallel rank."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors


class SelfAttention(nn.Module):
    """Attention within frames or over time, as `attention` does it on [B, F, S, N, K]."""

    def __init__(self, config: STDiT3Config, attention: Attention) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(config.head_dim, eps=layers.EPS) if config.qk_norm else None for _ in range(2)
        )
        self.attention = attention
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, places: int, rope: Tensor | None) -> Tensor:
        """Map x [B, M, D] to [B, M, D], with as many heads as the available weights hold."""
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).unflatten(1, (-1, places))
        q, k, v = qkv.unbind(-3)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = layers.rotate_interleaved(q, rope), layers.rotate_interleaved(k, rope)
        return self.proj(self.attention(q, k, v).flatten(-2).flatten(1, 2))


class CrossAttention(nn.Module):
    """Cross-attention of tokens to the text, where its mask is True."""

    def __init__(self, config: STDiT3Config) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        self.q_linear, self.kv_linear = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.attention = MaskedAttention(config.attention)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        """Map x [B, M, D] to [B, M, D] by text [B, L, D] and mask bool [B, 1, 1, L]."""
        q = self.q_linear(x).unflatten(-1, (-1, self.head_dim))
        k, v = self.kv_linear(text).unflatten(-1, (2, -1, self.head_dim)).unbind(2)
        return self.proj(self.attention(q, k, v, mask).flatten(2))


class CaptionedBlock(nn.Module):
    """Self-attention and MLP, each behind a modulation and before a gate; between them cross-attention with neither."""

    def __init__(self, config: STDiT3Config, attention: Attention) -> None:
        super().__init__()
        width = config.hidden_size
        self.scale_shift_table = nn.Parameter(torch.empty(6, width))
        self.attn = SelfAttention(config, attention)
        self.cross_attn = CrossAttention(config)
        self.mlp = MLP(width, config.mlp_size, width)

    def forward(
        self, x: Tensor, numbers: Tensor, text: Tensor, mask: Tensor, places: int, rope: Tensor | None = None
    ) -> Tensor:
        """Return the new x for x [B, M, D], numbers [B, F, 6, D], text [B, L, D], mask bool [B, 1, 1, L], rope [2, F,
        1, 1, K/2]; `places`: tokens of a frame."""
        numbers = (self.scale_shift_table + numbers).unsqueeze(2)
        shift1, scale1, gate1, shift2, scale2, gate2 = numbers.unbind(3)
        x = add_gated(x, gate1, self.attn(modulate(x, shift1, scale1, places), places, rope), places)
        x = x + self.cross_attn(x, text, mask)
        return add_gated(x, gate2, self.mlp(modulate(x, shift2, scale2, places)), places)


class FrameFinalLayer(nn.Module):
    """A modulation, then a linear layer from tokens [B, M, D] to patches [B, M, patch^2 * out_channels]."""

    def __init__(self, config: STDiT3Config) -> None:
        super().__init__()
        width = config.hidden_size
        self.scale_shift_table = nn.Parameter(torch.empty(2, width))
        self.linear = nn.Linear(width, config.patch_size[1] ** 2 * config.out_channels)

    def forward(
        self, x: Tensor, places: int, vec: Tensor, known: Tensor | None = None, before: Tensor | None = None
    ) -> Tensor:
        """Return the output of x [B, M, D], vec [B, F, D]; known frames, bool [B, F, 1], are as published modulated by
        `before` first."""
        if known is None or before is None:
            return self.linear(modulate(x, *self._numbers(vec), places))
        x = modulate(x, *self._numbers(before), places)
        again = modulate(x, *self._numbers(vec), places)
        return self.linear(choose(known, again, x, places))

    def _numbers(self, vec: Tensor) -> tuple[Tensor, ...]:
        return (self.scale_shift_table + vec.unsqueeze(2)).unsqueeze(2).unbind(3)


def modulate(x: Tensor, shift: Tensor, scale: Tensor, places: int) -> Tensor:
    """(1 + scale) * LayerNorm(x) + shift. x [B, M, D]; shift, scale [B, F, 1, D]; the norm has no parameters.
    F is taken from these: a quotient of open sizes keeps the compiler busy."""
    return layers.modulate(x.unflatten(1, (shift.shape[1], places)), shift, scale).flatten(1, 2)


def choose(known: Tensor, one: Tensor, other: Tensor, places: int) -> Tensor:
    """Tokens of `one` in known frames, of `other` elsewhere."""
    one, other = (x.unflatten(1, (known.shape[1], places)) for x in (one, other))
    return one.where(known[..., None], other).flatten(1, 2)


def add_gated(x: Tensor, gate: Tensor, out: Tensor, places: int) -> Tensor:
    """Return x + gate * out. x, out [B, M, D]; gate [B, F, 1, D]. Not a view, of which FSDP2 warns where a block ends
    with it."""
    frames = gate.shape[1]
    added = layers.add_gated(x.unflatten(1, (frames, places)), gate, out.unflatten(1, (frames, places)))
    return torch.ops.aten._unsafe_view(added, x.shape)
