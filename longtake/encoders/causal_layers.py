"""Layers of HunyuanVideo's autoencoder that give what diffusers' give, in less memory.

They take over the parameters of the layers they replace, under the same names. What they avoid: a dense mask of
(frames x positions)^2 for each attention, a padded copy of a whole tensor for each convolution, and tensors of more
than 2^31 elements in kernels that count in 32 bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FrameCausalMidBlock(nn.Module):
    """Residual blocks with an attention between them that sees its own and earlier frames.

    The frames attend one after the other to all keys up to their own: no mask is made, and half the products.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.resnets, self.attentions = block.resnets, block.attentions

    def forward(self, x: Tensor) -> Tensor:
        """`[B, C, F, h, w]` -> the same."""
        x = self.resnets[0](x)
        for attention, resnet in zip(self.attentions, self.resnets[1:], strict=True):
            if attention is not None:
                x = x + attend_by_frame(attention, x)
            x = resnet(x)
        return x


def attend_by_frame(attention: nn.Module, x: Tensor) -> Tensor:
    """`[B, C, F, h, w]` -> the attention's output of that shape, without the residual."""
    b, c, f, h, w = x.shape
    tokens = attention.group_norm(x.reshape(b, c, -1)).transpose(1, 2)  # [B, F h w, C]
    q, k, v = (
        layer(tokens).unflatten(2, (attention.heads, -1)).transpose(1, 2)
        for layer in (attention.to_q, attention.to_k, attention.to_v)
    )  # [B, N, F h w, K]
    size = h * w
    frames = [
        F.scaled_dot_product_attention(
            q[:, :, i * size : (i + 1) * size], k[:, :, : (i + 1) * size], v[:, :, : (i + 1) * size]
        )
        for i in range(f)
    ]
    out = torch.cat(frames, dim=2).transpose(1, 2).flatten(2)
    return attention.to_out[0](out).transpose(1, 2).reshape(b, c, f, h, w)


class FramewiseCausalConv(nn.Module):
    """A causal convolution `[B, C, T, H, W]`, over a few frames at a time where the whole is too large.

    Each piece is given the earlier frames that its kernel reaches, so the result is the same.
    """

    def __init__(self, layer: nn.Module, most_elements: int) -> None:
        super().__init__()
        self.conv, self.mode, self.most_elements = layer.conv, layer.pad_mode, most_elements
        left, right, top, bottom, front, _ = layer.time_causal_padding
        self.sides, self.front = (left, right, top, bottom), front
        # the number of pieces follows from the shape: a graph would be good for one shape only
        self.forward = torch.compiler.disable(self.forward)  # here, for it imports the compiler

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride = self.conv.kernel_size[0], self.conv.stride[0]
        frames = x.shape[2]
        count = (frames + self.front - kernel) // stride + 1
        per_frame = max(x[:, :, 0].numel(), x[:, 0, 0].numel() * self.conv.out_channels)
        step = max(1, self.most_elements // (per_frame * stride))
        pieces = []
        for first in range(0, count, step):
            last = min(first + step, count) - 1
            start, stop = first * stride - self.front, last * stride - self.front + kernel
            piece = F.pad(x[:, :, max(0, start) : stop], (*self.sides, max(0, -start), 0), mode=self.mode)
            pieces.append(self.conv(piece))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


class NearestUpsample(nn.Module):
    """Each cell repeated, the first frame not in time; then a convolution."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.conv = layer.conv
        self.factors = tuple(int(factor) for factor in layer.upsample_factor)

    def forward(self, x: Tensor) -> Tensor:
        time, rows, columns = self.factors
        first, rest = x[:, :, :1], x[:, :, 1:]
        parts = [repeated(first, (1, rows, columns))]
        if rest.shape[2]:
            parts.append(repeated(rest, (time, rows, columns)))
        return self.conv(torch.cat(parts, dim=2))


def repeated(x: Tensor, factors: tuple[int, int, int]) -> Tensor:
    """Each cell of `[B, C, T, H, W]` as a block of factors' size; a plain copy, of any number of elements."""
    b, c, *sizes = x.shape
    spread = x[:, :, :, None, :, None, :, None].expand(
        b, c, sizes[0], factors[0], sizes[1], factors[1], sizes[2], factors[2]
    )
    return spread.reshape(b, c, *(size * factor for size, factor in zip(sizes, factors, strict=True)))


def lighten(part: nn.Module, most_elements: int) -> None:
    """Put these layers in place of diffusers', in an encoder or decoder of `AutoencoderKLHunyuanVideo`."""
    for name, layer in list(part.named_modules()):
        kind = type(layer).__name__
        if kind == "HunyuanVideoCausalConv3d":
            part.set_submodule(name, FramewiseCausalConv(layer, most_elements))
        elif kind == "HunyuanVideoMidBlock3D":
            part.set_submodule(name, FrameCausalMidBlock(layer))
    for name, layer in list(part.named_modules()):
        if type(layer).__name__ == "HunyuanVideoUpsampleCausal3D":
            part.set_submodule(name, NearestUpsample(layer))
