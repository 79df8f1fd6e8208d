"""Tiles of a video: where they lie, and how overlapping results are blended into one.

A video is cut in time, then each piece into rows and columns. Sizes and strides are in cells of the tensor at hand:
pixels on one side of an autoencoder, latent cells on the other. Tiles are independent: in whatever order and on however
many devices they are computed, the result is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

Box = tuple[slice, slice, slice]  # of frames, rows and columns
Boxes = list[list[list[Box]]]  # pieces in time x rows x columns


@dataclass(frozen=True)
class Tiling:
    """Sizes of tiles and the way from one to the next, (rows, columns) of frames; None: that dim is not cut."""

    frames: int | None
    frame_stride: int
    sides: tuple[int, int] | None
    side_strides: tuple[int, int]
    equal: int | None = None  # each side in as few tiles as `sides` allows, alike, in whole units of so many cells
    least: tuple[int, int] | None = None  # frames are cut where a side is longer than this; None: than `sides`

    def cut(self, shape: tuple[int, int, int]) -> Boxes:
        """Return the tiles of a tensor of (frames, rows, columns).

        Pieces in time have one frame more than `frames`, which is the first of the next or lies before it; a side is
        cut where either is longer than a tile. Equal tiles overlap as far as the others, and no tile lies within its
        neighbour.
        """
        frames, height, width = shape
        spans, rows, columns = [slice(0, frames)], [slice(0, height)], [slice(0, width)]
        if self.frames is not None and frames > self.frames:
            starts = [i for i in range(0, frames, self.frame_stride) if i == 0 or i + 1 < frames]
            spans = [slice(i, min(frames, i + self.frames + 1)) for i in starts]
        if self.sides is not None and self.equal is not None:
            rows, columns = (
                self._equal(*axis) for axis in zip((height, width), self.sides, self.side_strides, strict=True)
            )
        elif self.sides is not None and _is_larger((height, width), self.least or self.sides):
            rows, columns = (
                [slice(i, min(length, i + side)) for i in range(0, length, stride)]
                for length, side, stride in zip((height, width), self.sides, self.side_strides, strict=True)
            )
        return [[[(span, row, column) for column in columns] for row in rows] for span in spans]

    def _equal(self, length: int, side: int, stride: int) -> list[slice]:
        """Return the tiles of a side; the last may be a little shorter."""
        overlap = side - stride
        count = max(1, ceil((length - overlap) / stride))
        if count == 1:  # it may be no longer than an overlap
            return [slice(0, length)]
        side = ceil((length + (count - 1) * overlap) / (count * self.equal)) * self.equal
        return [slice(start, min(length, start + side)) for start in range(0, count * (side - overlap), side - overlap)]

    def join(self, tiles: Sequence[Sequence[Sequence[Tensor]]]) -> Tensor:
        """Results `[B, C, f, h, w]` of the tiles that the counterpart of this tiling has cut -> the whole.

        Neighbours fade into each other where they overlap, upper into lower, left into right, earlier into later, as in
        Open-Sora's and diffusers' autoencoders. Writes into the tiles.
        """
        planes = [self._join_plane(plane) for plane in tiles]
        if len(planes) == 1 or self.frames is None:
            return planes[0]
        kept = []
        for i, plane in enumerate(planes):
            if i > 0:  # its first frame was encoded without what comes before it
                plane = planes[i] = plane[:, :, 1:]
                blend(planes[i - 1], plane, 2, self.frames - self.frame_stride)
            kept.append(plane[:, :, : self.frame_stride + (i == 0)])
        return torch.cat(kept, dim=2)

    def _join_plane(self, rows: Sequence[Sequence[Tensor]]) -> Tensor:
        if self.sides is None or (len(rows) == 1 and len(rows[0]) == 1):
            return rows[0][0]
        down, across = (side - stride for side, stride in zip(self.sides, self.side_strides, strict=True))
        joined = []
        for i, row in enumerate(rows):
            for j, tile in enumerate(row):
                if i > 0:
                    blend(rows[i - 1][j], tile, 3, down)
                if j > 0:
                    blend(row[j - 1], tile, 4, across)
            joined.append(torch.cat([*(self._own(tile, 4) for tile in row[:-1]), row[-1]], dim=4))
        return torch.cat([*(self._own(band, 3) for band in joined[:-1]), joined[-1]], dim=3)

    def _own(self, tile: Tensor, dim: int) -> Tensor:
        """Return a tile up to where the next begins."""
        side, stride = self.sides[dim - 3], self.side_strides[dim - 3]
        return tile.narrow(dim, 0, stride if self.equal is None else tile.shape[dim] - (side - stride))


def _is_larger(frame: tuple[int, int], sides: tuple[int, int]) -> bool:
    return frame[0] > sides[0] or frame[1] > sides[1]


def blend(before: Tensor, after: Tensor, dim: int, extent: int) -> None:
    """Fades the end of `before` into the beginning of `after` along `dim`, over at most `extent` cells, in place.

    Weights are linear, from 0 for the first cell of `after`; computed in float32 or more.
    """
    extent = min(before.shape[dim], after.shape[dim], extent)
    if extent <= 0:
        return
    rising = torch.arange(extent, dtype=torch.float64, device=after.device) / extent
    shape = [1] * after.ndim
    shape[dim] = extent
    new, old = ((weights.float()).view(shape) for weights in (rising, 1 - rising))
    head = after.narrow(dim, 0, extent)
    tail = before.narrow(dim, before.shape[dim] - extent, extent)
    head.copy_(tail * old + head * new)
