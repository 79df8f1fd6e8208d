"""The bucket tables that the order of a pass is measured with, and made-up clip tables; shared by the benchmarks."""

from __future__ import annotations

from typing import Any

import numpy as np

from longtake.buckets.assignment import BucketRule


def _bands(*bands: tuple[int, int, int]) -> dict[int, tuple[float, int]]:
    """`(first, last, batch size)` of lengths in steps of 4, all kept."""
    return {length: (1.0, size) for first, last, size in bands for length in range(first, last + 1, 4)}


_B1_144P = {1: (1.0, 475), 51: (1.0, 51), 102: ((1.0, 0.33), 27), 204: ((1.0, 0.1), 13), 408: ((1.0, 0.1), 6)}


def _ladder(still: float, keeps: tuple[Any, ...], sizes: tuple[int, ...]) -> dict[int, tuple[Any, int]]:
    """Lengths 1, 51, 102, 204 and 408 of Open-Sora 1.2."""
    return dict(zip((1, 51, 102, 204, 408), zip((still, *keeps), sizes, strict=True), strict=False))


_S256, _S360 = (297, 20, 10, 5, 2), (141, 8, 4, 2, 1)

# Open-Sora 2.0, stages 1 and 2 (configs/diffusion/train); Open-Sora 1.2 as Lambda ran it, tables of stages 1 to 3.
CONFIGS: dict[str, dict[str, dict[int, Any]]] = {
    "stage1": {
        "256px": {1: (1.0, 45)} | _bands((5, 33, 12), (37, 65, 6), (69, 97, 4), (101, 129, 3)),
        "768px": {1: (0.5, 13)},
        "1024px": {1: (0.5, 7)},
    },
    "stage2": {
        "256px": {1: (1.0, 130)} | _bands((5, 33, 14), (37, 65, 10), (73, 97, 7), (101, 129, 6)),
        "768px": {1: (1.0, 38)} | _bands((5, 33, 6), (37, 65, 4), (69, 97, 3), (101, 129, 2)),
    },
    "B1": {
        "144p": _B1_144P,
        "256": _ladder(0.4, (0.5, (0.5, 0.33), (0.5, 0.1), (0.5, 0.1)), _S256),
        "240p": _ladder(0.3, (0.4, (0.4, 0.33), (0.4, 0.1), (0.4, 0.1)), _S256),
        "360p": _ladder(0.2, (0.15, (0.15, 0.33), (0.15, 0.1), (0.15, 0.1)), _S360),
        "512": {1: (0.1, 141)},
        "480p": {1: (0.1, 89)},
        "720p": {1: (0.05, 36)},
        "1024": {1: (0.05, 36)},
        "1080p": {1: (0.1, 5)},
        "2048": {1: (0.1, 5)},
    },
    "B2": {
        "144p": _B1_144P,
        "256": _ladder(0.4, (0.5, (0.5, 0.33), (0.5, 1.0), (0.5, 1.0)), _S256),
        "240p": _ladder(0.3, (0.4, (0.4, 0.33), (0.4, 1.0), (0.4, 1.0)), _S256),
        "360p": _ladder(0.5, (0.15, (0.3, 0.5), (0.3, 1.0), (0.5, 0.5)), _S360),
        "512": _ladder(0.4, (0.15, (0.2, 0.4), (0.2, 1.0), (0.4, 0.5)), _S360),
        "480p": {1: (0.5, 89), 51: (0.2, 5), 102: (0.2, 2), 204: (0.1, 1)},
        "720p": {1: (0.1, 36), 51: (0.03, 1)},
        "1024": {1: (0.1, 36), 51: (0.02, 1)},
        "1080p": {1: (0.01, 5)},
        "2048": {1: (0.01, 5)},
    },
    "B3": {
        "144p": _ladder(1.0, (1.0, 1.0, 1.0, 1.0), (475, 51, 27, 13, 6)),
        "256": _ladder(1.0, (0.5, 0.5, 0.5, (0.5, 0.5)), _S256),
        "240p": _ladder(1.0, (0.5, 0.5, 0.5, (0.5, 0.4)), _S256),
        "360p": _ladder(1.0, (0.5, 0.5, 0.5, (0.5, 0.3)), _S360),
        "512": _ladder(1.0, (0.5, 0.5, 0.5, (0.5, 0.2)), _S360),
        "480p": {1: (1.0, 89), 51: (0.5, 5), 102: (0.5, 3), 204: ((0.5, 0.5), 1), 408: (0.0, None)},
        "720p": {1: (0.3, 36), 51: (0.2, 2), 102: (0.1, 1), 204: (0.0, None)},
        "1024": {1: (0.3, 36), 51: (0.1, 2), 102: (0.1, 1), 204: (0.0, None)},
        "1080p": {1: (0.1, 5)},
        "2048": {1: (0.05, 5)},
    },
}


def bucket_rule(name: str, compat: bool = False) -> BucketRule:
    """The rule of a table; with `compat` that of Open-Sora 2.0 itself for its two tables."""
    if name.startswith("B"):
        return BucketRule.from_config(CONFIGS[name], 16, law="opensora_v1_2")
    return BucketRule.from_config(CONFIGS[name], 16, law="opensora_v2" if compat else None)


def clip_columns(num_clips: int, stills: float = 0.1, seed: int = 0) -> dict[str, np.ndarray]:
    """A made-up table of web clips: lengths spread over 1 s to 30 s, usual frame rates and sizes; some stills.

    int32 `num_frames`, `height`, `width`, float32 `fps`, uint64 `clip_ids`: 24 bytes a clip.
    """
    rng = np.random.default_rng(seed)
    sizes = np.array(
        [(360, 640), (480, 854), (720, 1280), (1080, 1920), (2160, 3840), (1280, 720), (1920, 1080), (480, 480),
         (480, 640), (1080, 1350), (1216, 2160), (800, 1920)], np.int32
    )  # fmt: skip
    place = rng.choice(len(sizes), num_clips, p=np.array([5, 10, 25, 30, 5, 5, 8, 2, 4, 2, 2, 2]) / 100).astype(np.int8)
    rates = np.array([23.976, 24, 25, 29.97, 30, 50, 60], np.float32)
    fps = rates[rng.choice(len(rates), num_clips, p=np.array([10, 15, 15, 25, 25, 3, 7]) / 100).astype(np.int8)]
    seconds = np.exp(rng.random(num_clips, np.float32) * np.float32(np.log(30)))
    num_frames = np.maximum(fps * seconds, 2).astype(np.int32)
    num_frames[rng.random(num_clips, np.float32) < stills] = 1
    clip_ids = rng.integers(0, 1 << 63, num_clips, dtype=np.uint64)
    return {
        "num_frames": num_frames,
        "height": sizes[place, 0],
        "width": sizes[place, 1],
        "fps": fps,
        "clip_ids": clip_ids,
    }
