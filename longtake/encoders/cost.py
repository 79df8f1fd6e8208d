"""What it costs to encode a micro-batch: FLOPs, and activations at the worst moment, seen by tracing the real encoders.

An encoder on the meta device runs one piece (a tile, a frame, a few captions); FLOPs of other pieces follow by the law
of their sizes. Weights are not counted, nor what kernels take as scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import ceil, prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from longtake.contracts import UserError
from longtake.encoders.autoencoder import Autoencoder
from longtake.encoders.text import LearnedTextEncoder, TextEncoder
from longtake.models import Law, Trace, fit
from longtake.parallel import Tile, deal

Shape = tuple[int, int, int]  # frames, rows, columns
_TRACED = ((33, 128, 128), (1, 256, 256), (129, 256, 256), (17, 192, 192), (65, 256, 128), (1, 64, 64), (9, 128, 256))


@dataclass(frozen=True)
class EncodeCost:
    """Of one micro-batch on the ranks that share it."""

    piece_flops: tuple[int, ...] = ()  # of the pieces that ranks can share: tiles, captions
    bytes_of: Callable[[int], int] = lambda pieces: 0  # on a rank that computes so many of them
    input_bytes: int = 0  # of what is encoded, which every rank holds meanwhile

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

    def rank_bytes(self, ranks: int = 1) -> int:
        """Of that rank."""
        return self.input_bytes + self.bytes_of(ceil(len(self.piece_flops) / ranks))


def autoencoder_cost(autoencoder: Autoencoder, shape: Shape, batch: int) -> EncodeCost:
    """The cost of encoding `batch` samples of (T, H, W) pixels, in pieces as they will run, by an autoencoder on the
    meta device. The frames are there as bytes, and as float32 before and after; one that learned nothing takes no
    more."""
    frames = (1 + 2 * torch.float32.itemsize) * batch * 3 * prod(shape)
    if not autoencoder.encoding:
        return EncodeCost(input_bytes=frames)
    pieces = _shapes(autoencoder, shape, 1) * batch
    if batch > 1 and _shapes(autoencoder, shape, 2) != pieces[: 2 * len(pieces) // batch]:  # several samples in a piece
        pieces = _shapes(autoencoder, shape, batch)
    law = _law_of_pieces(autoencoder)
    flops = {piece: piece[0] * round(law(_sizes(piece))["flops"]) for piece in dict.fromkeys(pieces)}
    results = autoencoder.dtype.itemsize * sum(map(prod, pieces))
    together = max(piece[0] for piece in pieces)

    def num_bytes(_: int) -> int:
        prepared, most = _bytes_of_a_sample(autoencoder, shape)
        return batch * prepared + results + max(together * most, results)

    return EncodeCost(tuple(flops[piece] for piece in pieces), num_bytes, frames)


def text_cost(encoder: TextEncoder, batch: int) -> EncodeCost:
    """The cost of `batch` captions of an encoder on the meta device. One that learned nothing takes nothing."""
    if not isinstance(encoder, LearnedTextEncoder):
        return EncodeCost()
    law, dtype = _law_of_captions(encoder), encoder.module.dtype
    results = batch * round(law((1,))["result"]) * (dtype.itemsize + torch.float32.itemsize) // dtype.itemsize
    return EncodeCost(
        (round(law((1,))["flops"]),) * batch,
        lambda captions: max(round(law((captions,))["bytes"]), results),  # which every rank has in the end
    )


@lru_cache(maxsize=4096)
def _shapes(autoencoder: Any, shape: Shape, batch: int) -> tuple[tuple[int, ...], ...]:
    """Of the results of the pieces."""
    return tuple(piece.shape for piece in _cut(autoencoder, torch.empty(batch, 3, *shape, device="meta")))


class _Reached(Exception):
    """Ends an encoding before any piece of it is computed."""


def _cut(autoencoder: Any, video: Tensor) -> list[Tile]:
    """The pieces of an encoding; all of it, where the autoencoder computes none."""
    if autoencoder.compute is None:
        latents = len(video), *autoencoder.latent(*video.shape[2:])
        return [Tile(partial(autoencoder.posterior, video), latents)]
    found: list[Tile] = []

    def see(pieces: Sequence[Tile]) -> NoReturn:
        found.extend(pieces)
        raise _Reached

    before, autoencoder.compute = autoencoder.compute, see
    try:
        autoencoder.posterior(video)
    except _Reached:
        pass
    finally:
        autoencoder.compute = before
    return found


def _sizes(piece: Sequence[int]) -> tuple[int, int]:
    """Frames of a piece's result, and cells of each: `[B, C, f, h, w]`, or `[B, C, h, w]` of a frame."""
    *_, height, width = piece
    return prod(piece[2:-2]), height * width


@lru_cache(maxsize=8)
def _law_of_pieces(autoencoder: Any) -> Law:
    """FLOPs of a piece of one sample by the sizes of its result."""
    pieces: dict[tuple[int, ...], Tile] = {}
    for frames, *sides in _TRACED:
        has_length = autoencoder.config.has_length(frames)
        shape = (frames if has_length else frames + 7, *sides)  # 4k+1 frames, or whole blocks of 4 or 8
        try:
            autoencoder.check(*shape)
        except UserError:
            continue
        pieces |= {
            _sizes(piece.shape): piece for piece in _cut(autoencoder, torch.empty(1, 3, *shape, device="meta"))[:1]
        }

    def measure(sizes: tuple[int, ...]) -> dict[str, int]:
        with torch.no_grad(), Trace(*autoencoder.encoding.values()) as trace:
            pieces[sizes].run()
        return {"flops": trace.flops}

    def terms(sizes: tuple[int, ...]) -> tuple[int, ...]:
        frames, cells = sizes
        return frames * cells, cells, frames * cells**2, (frames * cells) ** 2, cells**2

    return fit(tuple(pieces), measure, terms, tolerance=1e-9)


@lru_cache(maxsize=4096)
def _bytes_of_a_sample(autoencoder: Any, shape: Shape) -> tuple[int, int]:
    """Bytes that are made before the first piece of one sample runs, and at the worst moment of the largest."""
    video = torch.empty(1, 3, *shape, device="meta")
    with torch.no_grad(), Trace(*autoencoder.encoding.values(), video) as trace:
        largest = max(_cut(autoencoder, video), key=lambda piece: prod(piece.shape))
        prepared = trace.peak = trace.live
        peaks = _peaks(autoencoder)
        if largest.shape not in peaks:
            largest.run()
            peaks[largest.shape] = trace.peak - prepared
    return prepared, peaks[largest.shape]


@lru_cache(maxsize=8)
def _peaks(autoencoder: Any) -> dict[tuple[int, ...], int]:
    """Bytes at the worst moment of pieces, by the shapes of their results: filled as they are asked for."""
    return {}


@lru_cache(maxsize=8)
def _law_of_captions(encoder: LearnedTextEncoder) -> Law:
    """FLOPs, bytes at the worst moment and bytes of the embeddings by the number of captions."""

    def measure(sizes: tuple[int, ...]) -> dict[str, int]:
        ids = torch.zeros(*sizes, encoder.max_length, dtype=torch.long, device="meta")
        with torch.no_grad(), Trace(encoder, ids) as trace:
            out = encoder.embed_ids(ids, torch.ones_like(ids))
        return {"flops": trace.flops, "bytes": trace.peak, "result": out.nbytes}

    return fit(((2,), (4,)), measure, lambda sizes: (sizes[0], 1), tolerance=1e-9)
