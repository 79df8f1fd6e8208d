"""Layers that denoisers share: norms, embedders, rotary positions, patches.

Shapes: B batch, C channels, F latent frames, h w latent grid, L tokens, D width, N heads, K head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.transfer import to_device

EPS = 1e-6


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + 1e-6) * scale over the last dim; statistics in fp32, result in x's dtype."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.scale, EPS)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """(1 + scale) * LayerNorm(x) + shift. x [..., L, D]; shift, scale [..., 1, D]; the norm has no parameters."""
    return torch.addcmul(shift, F.layer_norm(x, (x.shape[-1],), eps=EPS), 1 + scale)


def add_gated(x: Tensor, gate: Tensor, y: Tensor) -> Tensor:
    """Return x + gate * y. x, y [..., L, D]; gate [..., 1, D]."""
    return torch.addcmul(x, gate, y)


class MLPEmbedder(nn.Module):
    """Linear, SiLU, Linear: features [B, in_dim] -> [B, D]. The input is cast to the weights' dtype first."""

    def __init__(self, in_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.in_layer = nn.Linear(in_dim, hidden_size)
        self.out_layer = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_layer(F.silu(self.in_layer(x.to(self.in_layer.weight.dtype))))


def mlp(width: int, hidden: int, out: int | None = None) -> nn.Sequential:
    """Linear, GELU (tanh form), Linear, to `out` features (None: as many as the input has)."""
    return nn.Sequential(
        nn.Linear(width, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, width if out is None else out)
    )


def timestep_features(t: Tensor, dim: int = 256, max_period: float = 10000.0, factor: float = 1000.0) -> Tensor:
    """Sinusoids of factor * t: fp32 [B, dim], cosines first, frequencies exp(-ln(max_period) * k / (dim / 2)).

    t: float [B]. Everything after the product is fp32; in bf16 the product alone is off by up to 2 at t = 1.
    """
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    angles = (factor * t).float()[:, None] * freqs
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class RotaryPositions(nn.Module):
    """Tables of rotary position embeddings on a video grid (Su et al., RoFormer, 2021, once per axis).

    `positions(grid, device)` with grid (F, h, w) in tokens -> fp32 [2, F*h*w, K/2]: cosines, then sines, of
    position * theta^(-2j / dim) for the channels of axis t, then y, then x; tokens in (t, y, x) order. Angles are
    formed in fp64 from integer positions, so they are exact for any length. No parameters: one small table
    per axis and device is kept, and grown to the next power of two when a longer axis comes.
    """

    def __init__(self, axes_dim: Sequence[int], theta: float) -> None:
        super().__init__()
        self.axes_dim, self.theta = tuple(axes_dim), theta
        self._axis_tables: dict[tuple[int, torch.device], Tensor] = {}

    def forward(self, grid: Sequence[int], device: torch.device) -> Tensor:
        axes = []
        for axis, length in enumerate(grid):
            shape = [2, 1, 1, 1, -1]
            shape[1 + axis] = length
            axes.append(self._axis_table(axis, length, device).view(shape).expand(2, *grid, -1))
        return torch.cat(axes, dim=-1).flatten(1, 3)

    def _axis_table(self, axis: int, length: int, device: torch.device) -> Tensor:
        """fp32 [2, length, axes_dim[axis] / 2] for positions 0 .. length - 1."""
        if torch.compiler.is_compiling():
            return rotary_table(places(length, device), self.axes_dim[axis], self.theta)
        key = axis, device
        table = self._axis_tables.get(key)
        if table is None or table.shape[1] < length:
            with torch.inference_mode(False):  # a table made while sampling must serve training too
                padded = 1 << (length - 1).bit_length()
                table = rotary_table(places(padded, torch.device("cpu")), self.axes_dim[axis], self.theta)
                table = to_device(table, device)
            if type(table) is Tensor:  # not a stand-in of a tracing or shape-only mode
                self._axis_tables[key] = table
        return table[:, :length]


def places(length: int, device: torch.device) -> Tensor:
    """0 .. length - 1 in fp64."""
    return torch.arange(length, dtype=torch.float64, device=device)


def rotary_table(positions: Tensor, dim: int, theta: float) -> Tensor:
    """Return cos and sin of position * theta^(-2j / dim), positions fp64 [length]: fp32 [2, length, dim / 2], angles in
    fp64."""
    freqs = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device) / dim)
    angles = positions[:, None] * freqs
    return torch.stack([angles.cos(), angles.sin()]).float()


def join_positions(text_tokens: int, video: Tensor) -> Tensor:
    """Rotary tables of the joined sequence: fp32 [2, S, 1, K/2]. All text tokens sit at the origin: cos 1, sin 0."""
    origin = video.new_zeros(2, text_tokens, video.shape[-1])
    origin[0] = 1
    return torch.cat([origin, video], dim=1).unsqueeze(2)


def rotate_half(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate channels (j, K/2 + j) of each head by angle j. x [B, L, ..., K], rope fp32 [2, L, ..., K/2]."""
    return _rotate(x, rope, (2, -1), -2)


def rotate_interleaved(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate channels (2j, 2j + 1) of each head by angle j. x [B, L, ..., K], rope fp32 [2, L, ..., K/2]."""
    return _rotate(x, rope, (-1, 2), -1)


def _rotate(x: Tensor, rope: Tensor, pairs: tuple[int, int], dim: int) -> Tensor:
    """Rotary position embedding (Su et al., RoFormer, 2021): (a, b) -> (a cos - b sin, b cos + a sin), in fp32."""
    a, b = x.float().unflatten(-1, pairs).movedim(dim, 0)
    cos, sin = rope
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim).flatten(-2).to(x.dtype)


def patchify(x: Tensor, patch: int) -> Tensor:
    """[B, C, F, h, w] -> tokens [B, F * ceil(h/p) * ceil(w/p), C * p * p], in (t, y, x) order.

    The features of a token are in (c, ph, pw) order. A height or width that p does not divide is filled up with
    zeros at the bottom and right; `unpatchify` cuts them off again.
    """
    height, width = x.shape[-2:]
    if height % patch or width % patch:
        x = F.pad(x, (0, -width % patch, 0, -height % patch))
    if patch == 1:
        return x.flatten(2).transpose(1, 2)
    x = x.unflatten(4, (-1, patch)).unflatten(3, (-1, patch))  # [B, C, F, rows, p, columns, p]
    return x.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)


def unpatchify(tokens: Tensor, size: Sequence[int], patch: int) -> Tensor:
    """Return the inverse of `patchify`: tokens [B, L, C * p * p], size (F, h, w) of the latent -> [B, C, F, h, w].

    The result is contiguous and has memory of its own, for FSDP2 warns of model outputs that are views.
    """
    _, height, width = size
    frames, rows, columns = token_grid(size, patch)
    x = tokens.unflatten(2, (-1, patch, patch)).unflatten(1, (frames, rows, columns))
    x = x.permute(0, 4, 1, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4)
    return x[..., :height, :width].clone(memory_format=torch.contiguous_format)


def linear_sizes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Name of each linear layer of a model -> its numbers of inputs and outputs."""
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    return {name: (layer.in_features, layer.out_features) for name, layer in linear.items()}


def token_grid(size: Sequence[int], patch: int) -> tuple[int, int, int]:
    """(F, h, w) of a latent -> (F, rows, columns) in tokens."""
    frames, height, width = size
    return frames, -(-height // patch), -(-width // patch)
