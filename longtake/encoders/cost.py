"""What it costs to encode a micro-batch: FLOPs, and activations at the worst moment, from the config alone.

FLOPs are those of convolutions, linear layers and attention, 2 for each multiplication and addition. Bytes are those of
the tensors that live at once in the forward of one piece (a group of samples, a tile, a frame), its results included;
not what kernels take as scratch, nor weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

from longtake.encoders.config import (
    Autoencoder2DConfig,
    AutoencoderConfig,
    HunyuanVAEConfig,
    PixelConfig,
)
from longtake.encoders.kl import MOST_ELEMENTS, hunyuan_tilings, samples_at_once
from longtake.parallel import deal

Shape = tuple[int, int, int]  # frames, rows, columns
_FLOAT32 = 4  # bytes


@dataclass(frozen=True)
class EncodeCost:
    """Of one micro-batch on the ranks that share it."""

    piece_flops: tuple[int, ...] = ()  # of the pieces that ranks can share: tiles, captions
    num_bytes: int = 0  # on a rank alone
    dealt_bytes: int = 0  # of these, what is for all pieces at once and less on a rank that is dealt less of them
    result_bytes: int = 0  # which every rank holds in the end, with its copy in float32

    @property
    def flops(self) -> int:
        """Of all ranks together."""
        return sum(self.piece_flops)

    def rank_flops(self, ranks: int) -> int:
        """Of the rank that has most to do, where pieces are dealt out over so many."""
        load = [0] * ranks
        for flops, owner in zip(self.piece_flops, deal(self.piece_flops, ranks), strict=True):
            load[owner] += flops
        return max(load)

    def rank_bytes(self, ranks: int) -> int:
        """Of that rank."""
        count = len(self.piece_flops)
        less = 0 if count == 0 else self.dealt_bytes * (count - ceil(count / ranks)) // count
        return max(self.num_bytes - less, self.result_bytes)


def autoencoder_cost(config: AutoencoderConfig, shape: Shape, batch: int, itemsize: int = 2) -> EncodeCost:
    """The cost of encoding `batch` samples of (T, H, W) pixels, in pieces as they will run; `itemsize`: bytes of one
    number of the compute dtype. Folding pixels costs nothing here."""
    if isinstance(config, PixelConfig):
        return EncodeCost()
    if isinstance(config, Autoencoder2DConfig):
        network = _image_network(config)
        flops, elements = _encode(network, 1, (1, *shape[1:]))
        results = batch * shape[0] * 2 * config.latent.channels * prod(config.latent(1, *shape[1:])[2:])
        pixels = batch * 3 * prod(shape)
        return EncodeCost((flops,) * (batch * shape[0]), itemsize * (elements + pixels + 2 * results))
    network, flops, most, results = _video_network(config), [], 0, 0
    cuts, _ = hunyuan_tilings(config)
    size = samples_at_once(config, *shape)
    groups = [min(size, batch - first) for first in range(0, batch, size)]
    known: dict[tuple[int, Shape], tuple[int, int]] = {}
    for group in groups:
        for tile in _tile_shapes(cuts.cut(shape)):
            if (group, tile) not in known:
                known[group, tile] = _encode(network, group, tile)
            tile_flops, elements = known[group, tile]
            flops.append(tile_flops)
            most = max(most, elements)
            results += group * 2 * prod(config.latent(*tile))
    return EncodeCost(tuple(flops), itemsize * (most + results))


def text_cost(facts: Mapping[str, Any], section: str, tokens: int, batch: int, itemsize: int = 2) -> EncodeCost:
    """The cost of `batch` captions of so many tokens; `facts`: the encoder's `config.json`, `section`: "t5" or "clip".

    At the worst moment an MLP runs: four tensors of the width and, while GELU is computed, four (CLIP: three) of its
    hidden layer. T5 holds a bias for each pair of tokens and head. Attention is taken to be fused.
    """
    L = tokens
    if section == "t5":
        D, H, N, layers = (facts[key] for key in ("d_model", "d_ff", "num_heads", "num_layers"))
        inner = N * facts["d_kv"]
        gated = 2 if "gated" in facts["feed_forward_proj"] else 1
        layer = 2 * L * (4 * D * inner + (1 + gated) * D * H) + 4 * L * L * inner
        dealt, rest, results = batch * L * (4 * D + 4 * H), N * L * L, batch * L * D
    else:
        D, H = facts["hidden_size"], facts["intermediate_size"]
        layers = facts["num_hidden_layers"]
        layer = 2 * L * (4 * D * D + 2 * D * H) + 4 * L * L * D
        dealt, rest, results = batch * L * (4 * D + 3 * H), 0, batch * D
    return EncodeCost(
        (layers * layer,) * batch, itemsize * (dealt + rest), itemsize * dealt, (itemsize + _FLOAT32) * results
    )


@dataclass(frozen=True)
class _Network:
    """The encoder of either autoencoder, as far as it costs."""

    channels: tuple[int, ...]  # of the levels
    depth: int  # residual blocks of a level
    kernel: int  # cells along one side of a convolution; in time too where `causal`
    causal: bool
    strides: tuple[Shape | None, ...]  # at the end of each level
    latent: int
    quant: bool  # a last convolution of one cell
    most: int  # elements of a convolution above which it runs piece by piece


def _video_network(config: HunyuanVAEConfig) -> _Network:
    strides = ((1, 2, 2), (2, 2, 2), (2, 2, 2), None)
    most = min(config.piece_elements, MOST_ELEMENTS)
    depth, channels = config.layers_per_block, config.block_out_channels
    return _Network(channels, depth, 3, True, strides, config.latent_channels, True, most)


def _image_network(config: Autoencoder2DConfig) -> _Network:
    channels = tuple(config.ch * factor for factor in config.ch_mult)
    strides = (*((1, 2, 2) for _ in channels[1:]), None)
    return _Network(channels, config.num_res_blocks, 3, False, strides, config.z_channels, False, MOST_ELEMENTS)


def _tile_shapes(boxes: Any) -> Iterator[Shape]:
    for rows in boxes:
        for row in rows:
            for box in row:
                yield tuple(part.stop - part.start for part in box)


def _encode(network: _Network, batch: int, shape: Shape) -> tuple[int, int]:
    """FLOPs of one piece `[batch, 3, *shape]`, and the elements that live at its worst moment, its input among them."""
    walk = _Walk(network, batch, shape)
    channels = network.channels
    entering = batch * 3 * prod(shape)
    walk.conv(3, channels[0], held=0)
    before = channels[0]
    for after, stride in zip(channels, network.strides, strict=True):
        level = walk.size(before)
        for _ in range(network.depth):
            walk.residual(before, after)
            before, walk.held = after, level
        if stride is not None:
            walk.conv(after, after, held=0, stride=stride)
        walk.held = 0
    level = walk.size(before)
    walk.residual(before, before)
    walk.held = level
    walk.attention(before)
    walk.residual(before, before)
    walk.held = 0
    walk.elementwise(before, 3)  # norm and what it came from
    walk.conv(before, 2 * network.latent, held=0)
    if network.quant:
        walk.conv(2 * network.latent, 2 * network.latent, held=0, kernel=1)
    return walk.flops, walk.most + entering


class _Walk:
    """Goes through the layers; holds the shape it has come to, the FLOPs so far and the most elements at once."""

    def __init__(self, network: _Network, batch: int, shape: Shape) -> None:
        self.network, self.batch, self.shape = network, batch, shape
        self.flops = self.most = 0
        self.held = 0  # elements that whoever runs the layers holds all along: the input of a level

    def size(self, channels: int) -> int:
        """Elements of a tensor of the shape it has come to."""
        return self.batch * channels * prod(self.shape)

    def _peak(self, elements: int) -> None:
        self.most = max(self.most, self.held + elements)

    def elementwise(self, channels: int, tensors: int) -> None:
        """So many tensors at once."""
        self._peak(tensors * self.size(channels))

    def conv(self, before: int, after: int, held: int, stride: Shape = (1, 1, 1), kernel: int | None = None) -> None:
        """A convolution, with `held` elements beside its input and output."""
        kernel = self.network.kernel if kernel is None else kernel
        entering, plane = self.size(before), prod(self.shape[1:])
        edge = kernel - 1 if max(stride) == 1 or self.network.causal else 1
        padded = (self.shape[1] + edge) * (self.shape[2] + edge)
        self.shape = tuple(ceil(n / s) for n, s in zip(self.shape, stride, strict=True))
        leaving = self.size(after)
        self.flops += 2 * leaving * before * kernel ** (3 if self.network.causal else 2)
        if not self.network.causal:
            copy = 0 if max(stride) == 1 else self.batch * before * padded
            self._peak(held + entering + leaving + copy)
            return
        step = max(1, self.network.most // (self.batch * plane * max(before, after) * stride[0]))
        count = self.shape[0]
        last = count - (ceil(count / step) - 1) * step  # frames of the result that the last piece makes

        def copy(frames: int) -> int:
            return self.batch * before * (frames * stride[0] + kernel - 1) * padded

        if last == count:
            self._peak(held + entering + leaving + copy(count))
        else:  # two copies, the old one and the new, beside the pieces so far; in the end pieces and their whole
            pieces = leaving * (count - last) // count
            self._peak(held + entering + max(pieces + copy(step) + copy(last), 2 * leaving + copy(last)))

    def residual(self, before: int, after: int) -> None:
        """Two norms, activations and convolutions, and the way round them."""
        start = self.size(before)
        self.elementwise(before, 3)
        self.conv(before, after, held=start)
        self._peak(start + 2 * self.size(after))
        self.conv(after, after, held=start)
        if before != after:
            self.conv(before, after, held=self.size(after), kernel=1)
        self.elementwise(after, 3 if self.network.causal else 4)

    def attention(self, channels: int) -> None:
        """Each frame to itself and those before it."""
        frames, plane = self.shape[0], prod(self.shape[1:])
        self.flops += self.batch * (
            8 * frames * plane * channels**2 + 4 * channels * plane * plane * frames * (frames + 1) // 2
        )
        self.elementwise(channels, 7)
