"""Figures of videos: each moves with what it is about, and not with what it is not about."""

from __future__ import annotations

import numpy as np
import pytest

from longtake.evaluate.metrics import SeenVideo, figures, video_figures
from tests.precision import within


def moving(
    speed: float = 1.0, flicker: float = 0.0, drift: float = 0.0, noise: float = 0.0, seed: int = 0
) -> np.ndarray:
    """A soft disc that moves to the right over 24 frames."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:48, :64]
    frames = []
    for t in range(24):
        light = 200 * np.exp(-((x - 16 - speed * t) ** 2 + (y - 24) ** 2) / 60) + 30
        light = light * (1 + flicker * (-1) ** t)
        colour = np.stack([light + drift * t, light, light], axis=-1)
        frames.append(np.clip(colour + noise * rng.normal(size=colour.shape), 0, 255).astype(np.uint8))
    return np.stack(frames)


def test_each_figure_moves_with_its_own_fault() -> None:
    plain, fast = video_figures(moving()), video_figures(moving(speed=2))
    assert fast["motion"] == pytest.approx(2 * plain["motion"], rel=0.2)
    assert video_figures(moving(speed=0))["motion"] == 0
    assert video_figures(moving(flicker=0.2))["flicker"] > 10 * plain["flicker"]
    assert plain["flicker"] < 0.3 * plain["motion"]
    assert video_figures(moving(drift=4))["drift"] == pytest.approx(18 * 4 / 255, rel=0.05)
    assert within(plain["drift"], 0.005)
    assert video_figures(moving(noise=20))["sharpness"] > 2 * plain["sharpness"]


def test_diversity_is_of_one_prompt_and_variety_of_different_ones() -> None:
    same, other = moving(), moving(speed=-0.5)
    alike = figures([SeenVideo("a", same), SeenVideo("a", same), SeenVideo("b", other)])
    assert alike["diversity"] == 0
    assert alike["variety"] > 0.01
    noisy = figures([SeenVideo("a", moving(noise=25, seed=seed)) for seed in range(2)])
    assert noisy["diversity"] < 0.03  # noise is averaged out
    assert "diversity" not in figures([SeenVideo("a", same)])


def test_a_given_first_frame_and_the_motion_of_the_data_are_compared() -> None:
    frames = moving()
    found = figures([SeenVideo("a", frames, first=frames[0])], {"motion": video_figures(moving(speed=2))["motion"]})
    assert found["first_frame"] == 99
    assert found["motion_of_data"] == pytest.approx(0.5, rel=0.2)
    assert figures([SeenVideo("a", frames, first=255 - frames[0])])["first_frame"] < 12
    assert video_figures(frames[:1]).keys() == {"sharpness"}
