"""Resolution names and their tables of aspect ratios.

A resolution name is a budget of pixels: `Npx` stands for N² pixels, `Np` for N² · 16/9 (the area of a 16:9 picture of
height N). A suffix narrows its table: `_arW:H` keeps one ratio, `_max` the one of the largest area. `HxW` is one shape,
as it is, under every law.

Ratios are named width to height, as in `16:9`; shapes are (H, W) in pixels, both multiples of a divisor D, the spatial
compression of the video autoencoder times the patch size of the denoiser. The tables are those of Open-Sora 2.0.

Other systems have tables of their own, with ratios named by their H/W, as in `0.56`: literal ones for names of their
own, or one for 512 times N/512 for `Npx`, and for `Npx_crop` ratios that are drawn at random. `law` says whose ways are
followed: a key of `laws.LAWS`, None for the above.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from longtake.buckets.laws import LAWS, Shape, SizeTable, WalkLaw
from longtake.contracts import UserError

_BASE_RATIOS = ("2.39:1", "2:1", "16:9", "1.85:1", "9:16", "5:8", "3:2", "4:3", "1:1")
_LARGEST_SIDE = 1 << 14
_NAME = re.compile(r"(?P<side>[1-9]\d*)(?P<unit>px|p)(?:_ar(?P<ratio>[^_]+)|_(?P<max>max))?")
_EXACT = re.compile(r"([1-9]\d{0,4})x([1-9]\d{0,4})")
_SCALED = re.compile(r"(?P<side>[1-9]\d*)px(?P<suffix>_crop)?")


def num_pixels(name: str, law: str | None = None) -> int:
    """Return the pixel budget of a resolution name: 65,536 for `256px`, 230,400 for `360p`. Raises UserError."""
    written = _written_table(name, law)
    if written is not None:
        return written.num_pixels
    match = _match(name)
    side = int(match["side"])
    return side * side if match["unit"] == "px" else side * side * 16 // 9


def lists_sizes(law: str | None) -> bool:
    """Whether a law lists its resolutions; elsewhere a name may say any size."""
    return _walk(law).tables is not None


def aspect_table(name: str, divisor: int, training: bool = True, law: str | None = None) -> dict[str, Shape]:
    """Return the shapes of a resolution: ratio name -> (H, W), both multiples of `divisor`. The order decides ties.

    From the ratio r = W/H and the budget P: W = ⌊√(P·r) / D⌋·D, then H = ⌊(P/W) / D⌋·D. For training, the
    shape is moved one D along one side where that brings its area strictly nearer to P, and a ratio whose shape has
    occurred is left out; sampling (`training=False`) does neither. Each ratio has a transposed twin.

    Under a `law` with tables of its own: that table; scaled sides are cut down to multiples of D, literal ones are
    as they are. Raises UserError where the name is not one, or D is too coarse for it.
    """
    written = _written_table(name, law, divisor)
    if written is not None:
        return dict(written.shapes)
    match = _match(name)
    pixels = num_pixels(name)
    if match["ratio"]:
        return {match["ratio"]: _one_shape(name, pixels, match["ratio"], divisor, training)}
    shapes = _all_shapes(name, pixels, divisor, training, unique=training)
    if match["max"]:
        largest = max(shapes, key=lambda ratio: shapes[ratio][0] * shapes[ratio][1])
        return {largest: shapes[largest]}
    return shapes


def ratio_weights(name: str, law: str | None = None) -> np.ndarray | None:
    """Probabilities with which the ratios of a resolution are drawn: float64 [ratios]; None: the nearest is taken."""
    written = _written_table(name, law)
    if written is None or written.weights is None:
        return None
    weights = np.array(list(written.weights.values()), np.float64)
    return weights / weights.sum()


def frame_size(name: str, ratio: str, divisor: int, law: str | None = None) -> Shape:
    """(H, W) of a picture to be sampled: a resolution name without suffix, and any ratio such as `16:9`.

    Under a `law` with tables of its own, `ratio` is a key of the table, or one of that system's words for it; where
    that system scales its table, any other `W:H` is the nearest key.
    """
    written = _written_table(name, law, divisor)
    if isinstance(name, str) and _EXACT.fullmatch(name):
        (shape,) = written.shapes.values()
        return shape
    if written is not None:
        walk = _walk(law)
        key = (walk.words or {}).get(ratio, ratio)
        if key not in written.shapes and walk.scaled is not None and ":" in str(ratio):
            nearest = closest_ratio([1.0], [_ratio_value(ratio, name)], written.shapes, law)
            key = list(written.shapes)[int(nearest[0])]
        if key not in written.shapes:
            raise UserError(f"aspect ratio {ratio!r} of {name!r}: choose one of {', '.join(written.shapes)}")
        return written.shapes[key]
    return _one_shape(name, num_pixels(name), ratio, divisor, training=False)


def closest_ratio(
    height: ArrayLike, width: ArrayLike, table: Mapping[str, Shape], law: str | None = None
) -> np.ndarray:
    """Return the ratio of `table` nearest to each picture, as its position in the table: int64 [N].

    `height`, `width`: pixels, [N], above 0. The default takes the shape that loses the least of the picture when it
    covers the shape and is cropped: the smallest |log(H/W) - log(h/w)| over the shapes (h, w) themselves. Under a
    `law` whose nearest is "named": the smallest |H/W - h/w| over the *names*, which favours flat ratios of wide
    pictures; "key": the smallest |H/W - key| over the keys of the table. Among equals the first of the table wins.
    """
    ratio = np.asarray(height, np.float64) / np.asarray(width, np.float64)
    nearest = _walk(law).nearest
    if nearest == "named":
        return _nearest(ratio, np.array([1.0 / _ratio_value(key, key) for key in table]))
    if nearest == "key":
        return _nearest(ratio, np.array([float(key) for key in table]))
    return _nearest(np.log(ratio), np.log([h / w for h, w in table.values()]))


def _nearest(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Position in `values` of the entry nearest to each x, the first one among equals: int64 of the shape of x."""
    # np.unique sorts and keeps the first position of each value; the nearest is one of the two neighbours of x.
    points, first = np.unique(values, return_index=True)
    right = np.clip(np.searchsorted(points, x), 0, len(points) - 1)
    left = np.maximum(right - 1, 0)
    to_left, to_right = np.abs(x - points[left]), np.abs(x - points[right])
    take_left = (to_left < to_right) | ((to_left == to_right) & (first[left] < first[right]))
    return np.where(take_left, first[left], first[right])


def _walk(law: str | None) -> WalkLaw:
    if law not in LAWS:
        raise UserError(f"law = {law!r}: choose one of {', '.join(filter(None, LAWS))}, or none")
    return LAWS[law]


def _written_table(name: str, law: str | None, divisor: int = 1) -> SizeTable | None:
    """Return the table of a system that wrote its own down; None where tables are computed. Raises UserError."""
    walk = _walk(law)
    if isinstance(name, str) and (exact := _EXACT.fullmatch(name)):
        return _one_size(name, int(exact[1]), int(exact[2]), divisor, by_height=walk.nearest == "key")
    if walk.tables is not None:
        if name not in walk.tables:
            raise UserError(f"resolution {name!r}: choose one of {', '.join(walk.tables)}")
        return walk.tables[name]
    if walk.scaled is None:
        return None
    match = _SCALED.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise UserError(f"resolution {name!r}: a name such as 512px, 512px_crop or 480x720 is expected")
    _match(f"{match['side']}px")
    base, side = walk.scaled[match["suffix"] or ""], int(match["side"])
    shapes = {
        r: (h * side // 512 // divisor * divisor, w * side // 512 // divisor * divisor)
        for r, (h, w) in base.shapes.items()
    }
    if not all(min(shape) for shape in shapes.values()):
        raise UserError(
            f"resolution {name!r}: some shape is thinner than the size divisor {divisor}; choose a larger one"
        )
    return SizeTable(side * side, shapes, base.weights)


def _one_size(name: str, height: int, width: int, divisor: int, by_height: bool) -> SizeTable:
    if height % divisor or width % divisor or max(height, width) > _LARGEST_SIDE:
        sides = (min(max(1, round(side / divisor)) * divisor, _LARGEST_SIDE) for side in (height, width))
        raise UserError(
            f"resolution {name!r}: height and width are multiples of {divisor}, up to {_LARGEST_SIDE}; write "
            f"{'x'.join(map(str, sides))}"
        )
    return SizeTable(height * width, {f"{height / width:.2f}" if by_height else f"{width}:{height}": (height, width)})


def _match(name: str) -> re.Match[str]:
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise UserError(
            f"resolution {name!r}: a name such as 256px, 720p, 256px_ar16:9, 768px_max or 480x720 is expected"
            " (Npx: N² pixels; Np: the area of a 16:9 picture of height N)"
        )
    if len(match["side"]) > 5 or int(match["side"]) > _LARGEST_SIDE:
        raise UserError(f"resolution {name!r}: is too large; {_LARGEST_SIDE}px is the largest")
    if match["ratio"]:
        _ratio_value(match["ratio"], name)
    return match


def _ratio_value(ratio: str, place: str) -> float:
    """Width over height of a ratio name."""
    width, _, height = ratio.partition(":")
    try:
        value = float(width) / float(height)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UserError(
            f"aspect ratio {ratio!r} of {place!r}: two positive numbers, width:height, are expected, as in 16:9"
        )
    return value


def _twin(ratio: str) -> str:
    width, _, height = ratio.partition(":")
    return f"{height}:{width}"


def _all_shapes(name: str, pixels: int, divisor: int, training: bool, unique: bool) -> dict[str, Shape]:
    """Return the base ratios, then their twins; with `unique`, base ratios that repeat a shape are left out, twin
    included."""
    shapes: dict[str, Shape] = {}
    for ratio in _BASE_RATIOS:
        shape = _shape(name, pixels, ratio, divisor, training)
        if not (unique and shape in shapes.values()):
            shapes[ratio] = shape
    return shapes | {_twin(ratio): (w, h) for ratio, (h, w) in shapes.items()}


def _one_shape(name: str, pixels: int, ratio: str, divisor: int, training: bool) -> Shape:
    """Return the shape of one ratio, also of one that is not in the base list; a portrait one is the twin of a
    landscape."""
    known = {*_BASE_RATIOS, *map(_twin, _BASE_RATIOS)}
    if ratio in known:
        try:
            return _all_shapes(name, pixels, divisor, training, unique=False)[ratio]
        except UserError:
            pass  # another ratio of the table is too thin for this divisor; this one may fit by itself
    if _ratio_value(ratio, name) < 1:
        height, width = _shape(name, pixels, _twin(ratio), divisor, training)
        return width, height
    return _shape(name, pixels, ratio, divisor, training)


def _shape(name: str, pixels: int, ratio: str, divisor: int, training: bool) -> Shape:
    width = int(math.sqrt(pixels * _ratio_value(ratio, name)) / divisor) * divisor
    height = int(pixels / width / divisor) * divisor if width else 0
    if not (width and height):
        raise UserError(
            f"resolution {name!r}: its {ratio} shape is thinner than the size divisor {divisor}; choose a larger"
            f" resolution or one ratio, as in {name.split('_')[0]}_ar1:1"
        )
    if not training:
        return height, width
    moved = [(height + divisor, width), (height - divisor, width), (height, width + divisor), (height, width - divisor)]
    moved = [shape for shape in moved if min(shape) > 0]
    return min([(height, width), *moved], key=lambda shape: abs(shape[0] * shape[1] - pixels))
