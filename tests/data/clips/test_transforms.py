from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from longtake.data.clips.transforms import cover_size, from_unit, resize_crop, to_unit

GOLDEN = Path(__file__).parents[2] / "golden" / "opensora_v2" / "transforms.safetensors"


def _golden_cases() -> list[tuple[str, tuple[int, int], np.ndarray, np.ndarray]]:
    cases = []
    with safe_open(GOLDEN, "np") as file:
        for name, case in json.loads(file.metadata()["info"])["cases"].items():
            if name.startswith("video"):
                source = file.get_tensor(f"{name}.u8_TCHW").transpose(0, 2, 3, 1)
                expected = file.get_tensor(f"{name}.out_TCHW").transpose(1, 0, 2, 3)
            else:
                source, expected = file.get_tensor(f"{name}.u8_HWC")[None], file.get_tensor(f"{name}.out_CHW")[:, None]
            cases.append((name, tuple(case["target"]), source, expected))
    return cases


@pytest.mark.parametrize(
    ("name", "size", "source", "expected"), _golden_cases(), ids=lambda v: v if type(v) is str else ""
)
def test_float32_pixels_equal_the_reference(
    name: str, size: tuple[int, int], source: np.ndarray, expected: np.ndarray
) -> None:
    result = resize_crop(source, size, "float32", still=name.startswith("image"))
    assert result.dtype == torch.float32
    np.testing.assert_allclose(result.numpy(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("source", "size", "digest"),
    [
        ((156, 69), (48, 48), "40faab0a84b45913"),
        ((131, 63), (112, 32), "b97d29e1f5135180"),
        ((128, 42), (48, 32), "73a03c9f5d2d97ea"),
    ],
)
def test_float32_images_are_those_of_pillow_12_in_later_releases(
    source: tuple[int, int], size: tuple[int, int], digest: str
) -> None:
    """Tall images made smaller, which Pillow 13 scales in the other order of directions."""
    y, x = np.mgrid[: source[0], : source[1]]
    pixels = np.stack([(x * 37 + y * 59 + channel * 71 + x * y) % 256 for channel in range(3)], -1).astype(np.uint8)
    result = resize_crop(pixels[None], size, "float32", still=True)
    assert hashlib.sha256(result.numpy().tobytes()).hexdigest()[:16] == digest


SIZES = [(20, 36), (17, 23), (31, 20), (9, 12), (64, 48), (16, 24), (5, 100)]


@pytest.mark.parametrize("source", SIZES)
def test_a_single_colour_stays_that_colour(source: tuple[int, int]) -> None:
    frames = np.empty((3, *source, 3), np.uint8)
    frames[:] = (7, 200, 99)
    result = resize_crop(frames, (16, 24))
    assert result.shape == (3, 3, 16, 24)
    assert result.dtype == torch.uint8
    assert result.is_contiguous()
    assert [channel.unique().tolist() for channel in result] == [[7], [200], [99]]


def test_frames_of_the_right_size_are_untouched() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (4, 16, 24, 3), dtype=np.uint8)
    np.testing.assert_array_equal(resize_crop(frames, (16, 24)).numpy(), frames.transpose(3, 0, 1, 2))


@pytest.mark.parametrize(("source", "top", "left"), [((16, 31), 0, 3), ((21, 24), 2, 0), ((16, 26), 0, 1)])
def test_only_the_overhang_is_cut_and_evenly(source: tuple[int, int], top: int, left: int) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (2, *source, 3), dtype=np.uint8)
    kept = frames[:, top : top + 16, left : left + 24]
    np.testing.assert_array_equal(resize_crop(frames, (16, 24)).numpy(), kept.transpose(3, 0, 1, 2))


def test_shrinking_averages_instead_of_skipping_lines() -> None:
    stripes = np.zeros((1, 64, 64, 3), np.uint8)
    stripes[:, :, ::2] = 255
    shrunk = resize_crop(stripes, (16, 16)).float()
    assert shrunk[..., 2:-2].sub(127.5).abs().max() < 10


def test_a_half_turn_before_or_after_makes_no_difference() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (1, 42, 56, 3), dtype=np.uint8)
    there = resize_crop(frames, (16, 24)).numpy()[..., ::-1, ::-1].astype(int)
    back = resize_crop(np.ascontiguousarray(frames[:, ::-1, ::-1]), (16, 24)).numpy().astype(int)
    assert np.abs(there - back).max() <= 1, "the cut is centred"


@pytest.mark.parametrize("source", SIZES)
@pytest.mark.parametrize("target", [(16, 16), (16, 24), (24, 16), (33, 47)])
def test_the_covering_size_covers_and_touches_on_one_side(source: tuple[int, int], target: tuple[int, int]) -> None:
    height, width = cover_size(source, target)
    assert height >= target[0]
    assert width >= target[1]
    assert height == target[0] or width == target[1]
    assert abs(height / source[0] - width / source[1]) * min(source) <= 1, "the aspect is kept up to rounding"


def test_bytes_and_units_are_inverse() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    unit = to_unit(every)
    assert unit[0] == -1
    assert unit[255] == 1
    assert unit.dtype == torch.float32
    assert torch.equal(from_unit(unit), every)
    assert torch.equal(to_unit(unit), unit)
    assert from_unit(torch.tensor([-3.0, 3.0])).tolist() == [0, 255]
