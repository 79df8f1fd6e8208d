from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from longtake.contracts import Bucket, Draw, LatentShape, Slot
from longtake.data.loading.draws import draw, window_draws
from longtake.random import Purpose, normals, uniforms
from tests.data.made_clips import DRAWS

LATENT = LatentShape(channels=4, temporal=4, spatial=8, causal=True)


def _slot(samples: list[int], pass_index: int = 0) -> Slot:
    ids = np.array(samples, dtype=np.uint64)
    bucket = Bucket("16px", 5, "1:1", (5, 16, 24), len(ids))
    return Slot(bucket, pass_index, np.arange(len(ids)), ids, ids, np.ones(len(ids), np.float32))


def test_shapes_and_types_are_as_documented() -> None:
    numbers = draw(_slot([1, 2, 3]), seed=1, stage=0, latent=LATENT, wanted=DRAWS)
    assert {name: tuple(value.shape) for name, value in numbers.items()} == {
        "noise": (3, 4, 2, 2, 3),
        "timestep": (3,),
        "dropout": (3, 2),
        "mask": (3,),
        "posterior": (3, 4, 2, 2, 3),
    }
    assert all(value.dtype == torch.float32 for value in numbers.values())


def test_a_sample_draws_the_same_whoever_its_neighbours_are() -> None:
    together = draw(_slot([1, 2, 3]), 1, 0, LATENT, DRAWS)
    alone = draw(_slot([3]), 1, 0, LATENT, DRAWS)
    for name, value in alone.items():
        assert torch.equal(value[0], together[name][2]), name


def test_the_noise_is_the_samples_own_stream() -> None:
    expected = normals(9, 2, Purpose.NOISE, 4, 77, 48).reshape(4, 2, 2, 3)
    np.testing.assert_array_equal(draw(_slot([77], pass_index=4), 9, 2, LATENT, DRAWS)["noise"][0], expected)


@pytest.mark.parametrize("change", [{"seed": 2}, {"stage": 1}, {"pass_index": 1}])
def test_every_draw_changes_with_seed_stage_and_pass(change: dict[str, int]) -> None:
    slot, seed, stage = _slot([1, 2]), 1, 0
    other = replace(slot, pass_index=change.get("pass_index", 0))
    before = draw(slot, seed, stage, LATENT, DRAWS)
    after = draw(other, change.get("seed", seed), change.get("stage", stage), LATENT, DRAWS)
    assert not [name for name in before if torch.equal(before[name], after[name])]


def test_views_repeat_what_is_in_the_pixels_and_nothing_else() -> None:
    first, again = (draw(_slot([1, 2], pass_index), 1, 0, LATENT, DRAWS, views=2) for pass_index in (1, 3))
    assert torch.equal(first["mask"], again["mask"])
    assert not any(torch.equal(first[name], again[name]) for name in ("noise", "timestep", "dropout"))
    places = [window_draws(_slot([1, 2], pass_index), 1, 0, views=2).tolist() for pass_index in range(4)]
    assert places[0] == places[2] != places[1] == places[3]
    assert window_draws(_slot([1], 0), 1, 0).tolist() != window_draws(_slot([1], 2), 1, 0).tolist()


def test_integers_cover_their_range_evenly_and_belong_to_the_sample() -> None:
    wanted = {"t": Draw(Purpose.TIMESTEP, "integer", below=7)}
    slot = _slot(list(range(7000)))
    found = draw(slot, 1, 0, LATENT, wanted)["t"]
    assert found.dtype == torch.int64
    assert torch.bincount(found, minlength=7).sub(1000).abs().max() < 120
    assert draw(_slot([4711]), 1, 0, LATENT, wanted)["t"].item() == found[4711]


@pytest.mark.parametrize("law", ["uniform", "integer"])
def test_strata_are_the_slots_of_a_step_and_the_place_within_is_the_samples_own(law: str) -> None:
    wanted = {"t": Draw(Purpose.TIMESTEP, law, below=1000, stratified=True)}
    own = uniforms(1, 0, Purpose.TIMESTEP, 0, np.arange(50, dtype=np.uint64), 1)[:, 0].astype(np.float64)
    for number in range(8):
        slot = replace(_slot(list(range(50))), number=number, num_slots=8)
        found = draw(slot, 1, 0, LATENT, wanted)["t"].double().numpy() / (1000 if law == "integer" else 1)
        np.testing.assert_allclose(found, (number + own) / 8, rtol=0, atol=1e-3)
        assert (found >= number / 8).all()
        assert (found < (number + 1) / 8).all()
