"""Positions of CogVideoX's tokens: rotations, sines or a learned table, at grids of any size.

At sizes other than the model's own, diffusers and CogVideoX-Fun differ (`CogVideoXConfig.positions`): CogVideoX-Fun
interpolates the sines and the learned table of the model's own grid; diffusers makes sines anew, at other lengths also
in place of the learned table, and refuses one at other heights and widths; and rotations end at different places
wherever the cropped grid does not start at 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.models.cogvideox_config import CogVideoXConfig
from longtake.models.layers import rotary_table

THETA = 10_000.0


class GridRotations(nn.Module):
    """`rotations(grid, device)` with grid (F, h, w) in tokens -> fp32 [2, F*h*w, K/2], as `layers.RotaryPositions`.

    A quarter of the head turns with the frame, three eighths each with row and column. CogVideoX 1.5 counts rows and
    columns; 1.0 resizes the grid to fit into its own, at the middle, and says where each token comes to lie.
    """

    def __init__(self, config: CogVideoXConfig) -> None:
        super().__init__()
        self.base = None if config.patch_size_t else config.base_grid[1:]
        self.law = config.positions
        self.axes_dim = (config.head_dim // 4, config.head_dim * 3 // 8, config.head_dim * 3 // 8)

    def forward(self, grid: Sequence[int], device: torch.device) -> Tensor:
        starts = [(0, size) for size in grid]
        if self.base is not None:
            starts[1:] = region_in(self.base, grid[1:])
        axes = []
        for axis, (size, (start, stop)) in enumerate(zip(grid, starts, strict=True)):
            shape = [2, 1, 1, 1, -1]
            shape[1 + axis] = size
            table = rotary_table(self._places(start, stop, size, device), self.axes_dim[axis], THETA)
            axes.append(table.view(shape).expand(2, *grid, -1))
        return torch.cat(axes, dim=-1).flatten(1, 3)

    def _places(self, start: int, stop: int, size: int, device: torch.device) -> Tensor:
        step = (stop - start) / size
        last = start + step * (size - 1) if self.law == "fun" else stop * (size - 1) / size
        return torch.linspace(start, last, size, dtype=torch.float64, device=device)


def region_in(base: Sequence[int], grid: Sequence[int]) -> list[tuple[int, int]]:
    """(start, stop) of the rows, and of the columns, of a grid that is resized to fit into another, at its middle."""
    (base_rows, base_columns), (rows, columns) = base, grid
    if rows / columns > base_rows / base_columns:
        fitted = base_rows, round(base_rows / rows * columns)
    else:
        fitted = round(base_columns / columns * rows), base_columns
    starts = [round((whole - part) / 2) for whole, part in zip(base, fitted, strict=True)]
    return [(start, start + part) for start, part in zip(starts, fitted, strict=True)]


class SinePositions(nn.Module):
    """`positions(grid, device)` -> fp32 [1, F*h*w, D]: sines and cosines of frame (a quarter), column and row."""

    def __init__(self, config: CogVideoXConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.dims = width // 4, width * 3 // 8, width * 3 // 8
        self.scales = config.temporal_interpolation_scale, *[config.spatial_interpolation_scale] * 2
        self.base = config.base_grid
        self.law = config.positions

    def forward(self, grid: Sequence[int], device: torch.device) -> Tensor:
        frames, columns, rows = (self._axis(axis, size, device) for axis, size in enumerate((grid[0], *grid[:0:-1])))
        parts = frames[:, None, None], columns[None, None], rows[None, :, None]
        return torch.cat([part.expand(*grid, -1) for part in parts], dim=-1).flatten(0, 2)[None]

    def _axis(self, axis: int, size: int, device: torch.device) -> Tensor:
        """Of frames, columns or rows: [size, dim]. Interpolating the whole table is interpolating along each axis."""
        base = (self.base[0], *self.base[:0:-1])[axis]
        given = base if axis and self.law == "fun" else size
        places = torch.arange(given, dtype=torch.float64, device=device) / self.scales[axis]
        cosines, sines = rotary_table(places, self.dims[axis], THETA)
        table = torch.cat([sines, cosines], dim=-1)
        return table if given == size else F.interpolate(table.T[None], size, mode="linear")[0].T


class LearnedPositions(nn.Module):
    """`positions(grid, device)` -> [1, tokens, D]: a trained table of the model's own grid.

    At other heights and widths it is interpolated; shorter videos take its beginning, longer ones stretch it.
    """

    def __init__(self, width: int, base: Sequence[int]) -> None:
        super().__init__()
        self.base = tuple(base)
        self.table = nn.Parameter(torch.empty(math.prod(base), width))

    def forward(self, grid: Sequence[int], device: torch.device, instead: Tensor | None = None) -> Tensor:
        """`instead` [1, tokens, D]: what to give in place of the table, whose gradient is then zero on every rank."""
        if instead is not None:
            return instead + 0 * self.table[:1]
        if tuple(grid) == self.base:
            return self.table[None]
        return resized(self.table.unflatten(0, self.base)[: grid[0]], grid).flatten(0, 2)[None]


def resized(table: Tensor, grid: Sequence[int]) -> Tensor:
    """[F, h, w, D] -> [*grid, D], trilinear as `F.interpolate`, by matmuls: the gradient of that function has no
    deterministic form on CUDA."""
    whole = table.float()
    for axis, size in enumerate(grid):
        if (given := whole.shape[axis]) != size:
            place = (torch.arange(size, device=table.device) + 0.5) * (given / size) - 0.5
            distance = place.clamp(0, given - 1)[:, None] - torch.arange(given, device=table.device)
            weights = (1 - distance.abs()).clamp_min(0)
            whole = torch.tensordot(weights, whole, dims=([1], [axis])).movedim(0, axis)
    return whole.to(table.dtype)
