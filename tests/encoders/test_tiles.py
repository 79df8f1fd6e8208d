"""Where tiles lie and how they fade into each other. (That videos are diffusers' own: `test_kl.py`.)"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from longtake.encoders.tiles import Tiling, blend

PIXELS = Tiling(frames=16, frame_stride=12, sides=(32, 48), side_strides=(24, 40))
CELLS = Tiling(frames=4, frame_stride=3, sides=(4, 6), side_strides=(3, 5))


@pytest.mark.parametrize("shape", [(1, 32, 32), (17, 48, 112), (33, 40, 32), (5, 24, 200), (13, 32, 32)])
def test_tiles_cover_a_video_and_lie_alike_on_both_sides(shape: tuple[int, int, int]) -> None:
    frames, height, width = shape
    cells = (frames - 1) // 4 + 1, height // 8, width // 8
    seen = torch.zeros(shape)
    pixels, latents = PIXELS.cut(shape), CELLS.cut(cells)
    assert len(pixels) == len(latents)
    for planes, own in zip(pixels, latents, strict=True):
        assert [len(row) for row in planes] == [len(row) for row in own]
        for box, cell in zip((b for row in planes for b in row), (c for row in own for c in row), strict=True):
            seen[box] += 1
            assert [s.start for s in cell] == [box[0].start // 4, box[1].start // 8, box[2].start // 8]
            assert [s.stop for s in cell] == [(box[0].stop - 1) // 4 + 1, box[1].stop // 8, box[2].stop // 8]
    assert seen.min() > 0


@pytest.mark.parametrize("shape", [(1, 32, 32), (17, 48, 112), (33, 40, 32), (5, 24, 200)])
def test_tiles_that_agree_make_the_whole(shape: tuple[int, int, int]) -> None:
    whole = torch.rand(2, 3, *shape)
    tiles = [[[whole[:, :, *box].clone() for box in row] for row in rows] for rows in PIXELS.cut(shape)]
    torch.testing.assert_close(PIXELS.join(tiles), whole, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((129, 192, 336), ([192], [336])),  # within a tile
        ((1, 384, 392), ([384], [232, 224])),
        ((129, 576, 1024), ([320, 320], [384] * 3)),
        ((33, 480, 1216), ([272, 272], [352] * 4)),
        ((5, 768, 2000), ([304, 304, 288], [344] * 6 + [320])),
    ],
)
def test_equal_tiles_cover_a_side_with_one_overlap(
    shape: tuple[int, int, int], sizes: tuple[list[int], list[int]]
) -> None:
    frames, *sides = shape
    latent = (frames - 1) // 4 + 1, *(side // 8 for side in sides)
    pixels = Tiling(None, 1, (384, 384), (320, 320), equal=8)
    cells = Tiling(None, 1, (48, 48), (40, 40), equal=1)
    (rows,), (of_cells,) = pixels.cut(shape), cells.cut(latent)
    for lie, length, found in zip(
        ([row[0][1] for row in rows], [box[2] for box in rows[0]]), sides, sizes, strict=True
    ):
        assert [part.stop - part.start for part in lie] == found
        assert (lie[0].start, lie[-1].stop) == (0, length)
        assert all(one.stop - two.start == 64 for one, two in pairwise(lie))
    for box, cell in zip((b for row in rows for b in row), (c for row in of_cells for c in row), strict=True):
        assert [(s.start, s.stop) for s in box[1:]] == [(8 * s.start, 8 * s.stop) for s in cell[1:]]
    whole = torch.rand(1, 2, *latent)
    tiles = [[[whole[:, :, *box].clone() for box in row] for row in of_cells]]
    torch.testing.assert_close(cells.join(tiles), whole, rtol=0, atol=1e-6)


def test_what_is_not_to_be_tiled_stays_whole() -> None:
    whole = Tiling(None, 12, None, (24, 24)).cut((99, 640, 480))
    assert whole == [[[(slice(0, 99), slice(0, 640), slice(0, 480))]]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fade_is_linear_and_begins_with_the_earlier(dtype: torch.dtype) -> None:
    before, after = torch.zeros(1, 1, 1, 1, 6, dtype=dtype), torch.ones(1, 1, 1, 1, 5, dtype=dtype)
    blend(before, after, 4, 4)
    assert after.flatten().tolist() == [0, 0.25, 0.5, 0.75, 1]
    blend(before[..., :0], after, 4, 4)
    assert after.flatten().tolist() == [0, 0.25, 0.5, 0.75, 1]
