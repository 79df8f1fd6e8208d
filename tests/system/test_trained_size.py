"""The size of videos that a run's buckets decide where its file leaves it open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longtake.config.load import load_config
from longtake.contracts import UserError
from longtake.system.export import trained_size

CONFIGS = Path(__file__).parents[2] / "configs"
_TEXT = {"context_in_dim": 128, "vec_in_dim": 128}
VAE: dict[str, Any] = {  # 4k+1 frames
    "ae": {"type": "hunyuan_vae"},
    "model": {"in_channels": 64, "patch_size": 2, **_TEXT},
}
PIXEL: dict[str, Any] = {  # 8k frames
    "ae": {"type": "pixel", "temporal": 8, "spatial": 8},
    "model": {"in_channels": 1536, "patch_size": 1, **_TEXT},
}


def size(buckets: Any, **parts: Any) -> tuple[Any, ...]:
    """(resolution, num_frames), and the aspect ratio where one is decided."""
    return tuple(trained_size({"bucket_config": buckets, **parts}).values())


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("image", ("1024px", 1)),
        ("stage1", ("256px", 129)),
        ("stage2_i2v", ("768px", 129)),
        ("demo", ("256px", 129)),
    ],
)
def test_a_preset_is_sampled_at_its_largest_clips(preset: str, expected: tuple[str, int]):
    tree = load_config(CONFIGS / "opensora_v2" / "train" / f"{preset}.py", [], dict[str, Any]).tree
    assert tuple(trained_size(tree).values()) == expected


def test_clips_come_before_larger_stills_and_a_larger_picture_before_a_longer_clip():
    assert size({"256px": {1: (1.0, 1), 33: (1.0, 1)}, "1024px": {1: (1.0, 1)}}, **VAE) == ("256px", 33)
    assert size({"256px": {129: (1.0, 1)}, "360p": {5: (1.0, 1), 9: (1.0, 1)}}, **VAE) == ("360p", 9)
    assert size({"768px": {1: (1.0, 1)}, "256px": {1: (1.0, 1)}}, **VAE) == ("768px", 1)


def test_what_never_trains_or_cannot_be_decoded_does_not_count():
    never = {65: (0.0, 1), 97: ((1.0, 1.0), 1)}
    assert size({"256px": {33: (1.0, 1), **never}, "768px": never}, **VAE) == ("256px", 33)
    assert size({"256px": {33: (1.0, 1), 64: (1.0, 1)}}, **VAE) == ("256px", 33)
    assert size({"32px": {16: (1.0, 1), 17: (1.0, 1)}}, **PIXEL) == ("32px", 16)
    assert size({"32px": {17: (1.0, 1)}}, **PIXEL) == ()


def test_a_name_that_keeps_one_ratio_decides_it():
    assert size({"256px_ar1:1": {33: (1.0, 1)}}, **VAE) == ("256px", 33, "1:1")
    assert size({"256px_max": {33: (1.0, 1)}}, **VAE)[:2] == ("256px", 33)


def test_what_the_run_says_stays():
    option = {"resolution": "128px", "aspect_ratio": None, "num_frames": None, "seed": None}
    buckets = {"256px_ar1:1": {33: (1.0, 1)}}
    assert trained_size({"bucket_config": buckets, "sampling_option": option, **VAE}) == {
        "num_frames": 33,
        "aspect_ratio": "1:1",
    }


def test_without_buckets_nothing_is_decided_and_damaged_ones_are_named():
    assert trained_size({"model": {}}) == {}
    with pytest.raises(UserError, match=r"bucket_config\.256px\.33"):
        size({"256px": {33: 5}}, **VAE)
