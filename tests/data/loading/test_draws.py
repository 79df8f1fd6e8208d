from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from longtake.contracts import Bucket, LatentShape, Slot
from longtake.data.loading.draws import draw, window_draws
from longtake.random import Purpose, normals

LATENT = LatentShape(channels=4, temporal=4, spatial=8, causal=True)


def _slot(samples: list[int], pass_index: int = 0) -> Slot:
    ids = np.array(samples, dtype=np.uint64)
    bucket = Bucket("16px", 5, "1:1", (5, 16, 24), len(ids))
    return Slot(bucket, pass_index, np.arange(len(ids)), ids, ids, np.ones(len(ids), np.float32))


def test_shapes_and_types_are_as_documented() -> None:
    numbers = draw(_slot([1, 2, 3]), seed=1, stage=0, latent=LATENT)
    assert {name: tuple(value.shape) for name, value in numbers.items()} == {
        "noise": (3, 4, 2, 2, 3),
        "timestep": (3,),
        "dropout": (3, 2),
        "mask": (3,),
    }
    assert all(value.dtype == torch.float32 for value in numbers.values())
    assert draw(_slot([1]), 1, 0, LATENT, posterior=True)["posterior"].shape == (1, 4, 2, 2, 3)


def test_a_sample_draws_the_same_whoever_its_neighbours_are() -> None:
    together = draw(_slot([1, 2, 3]), 1, 0, LATENT, posterior=True)
    alone = draw(_slot([3]), 1, 0, LATENT, posterior=True)
    for name, value in alone.items():
        assert torch.equal(value[0], together[name][2]), name


def test_the_noise_is_the_samples_own_stream() -> None:
    expected = normals(9, 2, Purpose.NOISE, 4, 77, 48).reshape(4, 2, 2, 3)
    np.testing.assert_array_equal(draw(_slot([77], pass_index=4), 9, 2, LATENT)["noise"][0], expected)


@pytest.mark.parametrize("change", [{"seed": 2}, {"stage": 1}, {"pass_index": 1}])
def test_every_draw_changes_with_seed_stage_and_pass(change: dict[str, int]) -> None:
    slot, seed, stage = _slot([1, 2]), 1, 0
    other = replace(slot, pass_index=change.get("pass_index", 0))
    before = draw(slot, seed, stage, LATENT, posterior=True)
    after = draw(other, change.get("seed", seed), change.get("stage", stage), LATENT, posterior=True)
    assert not [name for name in before if torch.equal(before[name], after[name])]


def test_views_repeat_what_is_in_the_pixels_and_nothing_else() -> None:
    first, again = (draw(_slot([1, 2], pass_index), 1, 0, LATENT, views=2) for pass_index in (1, 3))
    assert torch.equal(first["mask"], again["mask"])
    assert not any(torch.equal(first[name], again[name]) for name in ("noise", "timestep", "dropout"))
    places = [window_draws(_slot([1, 2], pass_index), 1, 0, views=2).tolist() for pass_index in range(4)]
    assert places[0] == places[2] != places[1] == places[3]
    assert window_draws(_slot([1], 0), 1, 0).tolist() != window_draws(_slot([1], 2), 1, 0).tolist()
