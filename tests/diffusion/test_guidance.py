from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longtake.contracts import Conditions
from longtake.diffusion.guidance import NEGATIVE, NOTHING, PROMPT, GuidanceScales, Guided, join_conditions, oscillate
from longtake.diffusion.solvers import Euler
from longtake.diffusion.timesteps import make_grid
from tests.diffusion.golden import read_json

GOLDEN = read_json("guidance")
OSCILLATING = GuidanceScales(7.5, 3.0, text_osci=True, image_osci=True, scale_temporal_osci=True)


@pytest.mark.parametrize("case", GOLDEN["get_oscillation_gs"], ids=lambda case: str(case["guidance_scale"]))
def test_oscillating_scales_equal_the_reference(case: dict) -> None:
    values = [oscillate(case["guidance_scale"], i, case["force_num"]) for i in range(len(case["values"]))]
    assert values == case["values"]


@pytest.mark.parametrize("case", GOLDEN["denoise"], ids=lambda case: f"{case['num_steps']}x{case['latent_frames']}")
def test_scales_of_every_step_and_frame_equal_the_reference(case: dict) -> None:
    scales = GuidanceScales(
        case["guidance"], case["guidance_img"], case["text_osci"], case["image_osci"], case["scale_temporal_osci"]
    )
    steps, frames = case["num_steps"], case["latent_frames"]
    assert [scales.text(i) for i in range(steps)] == case["text"]
    image = torch.stack([scales.image(i, steps, frames) for i in range(steps)])
    torch.testing.assert_close(image, torch.tensor(case["image"]), rtol=1e-6, atol=0)


def test_coefficients_are_those_of_the_written_rules() -> None:
    branches = torch.randn(3, 2, 4, 3, 6, 8, generator=torch.Generator().manual_seed(0))
    outputs = dict(zip(("prompt", "negative", "nothing"), branches, strict=True))
    for step in range(14):
        text, image = OSCILLATING.text(step), OSCILLATING.image(step, 14, 3)
        terms = OSCILLATING.coefficients(step, 14, 3)
        total = sum(torch.as_tensor(terms[name]).view(-1, 1, 1) * outputs[name] for name in terms)
        prompt, negative, nothing = outputs.values()
        by_image = image[:, None, None] * (negative - nothing)
        torch.testing.assert_close(total, nothing + by_image + text * (prompt - negative), rtol=1e-4, atol=1e-4)
        pair = GuidanceScales(text).coefficients(step, 14, 3)
        total = sum(pair[name] * outputs[name] for name in pair)
        torch.testing.assert_close(total, negative + text * (prompt - negative), rtol=1e-4, atol=1e-4)


def test_branches_that_do_not_count_are_not_run() -> None:
    assert set(GuidanceScales(1.0).coefficients(0, 5, 3)) == {"prompt"}
    assert set(GuidanceScales(0.0).coefficients(0, 5, 3)) == {"negative"}
    assert set(GuidanceScales(2.0).coefficients(0, 5, 3)) == {"prompt", "negative"}
    assert set(GuidanceScales(2.0, 1.0).coefficients(0, 5, 3)) == {"prompt", "negative"}
    assert set(GuidanceScales(2.0, 2.0).coefficients(0, 5, 3)) == {"prompt", "nothing"}
    assert set(GuidanceScales(2.0, 3.0).coefficients(0, 5, 3)) == {"prompt", "negative", "nothing"}
    with_frames = sum(len(OSCILLATING.coefficients(i, 50, 33)) for i in range(50))
    text_only = sum(len(GuidanceScales(7.5, text_osci=True).coefficients(i, 50, 33)) for i in range(50))
    assert (with_frames, text_only) == (110, 80)  # of 150 in Open-Sora 2.0


def test_a_guided_denoiser_feeds_each_branch_its_own_conditions() -> None:
    def velocity(x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        return conditions["vector"][:, :1, None, None, None] + 0 * x

    branches = {
        "prompt": Conditions(vector=torch.tensor([[1.0], [2.0]])),
        "negative": Conditions(vector=torch.zeros(2, 1)),
    }
    denoise = Guided(velocity, branches, GuidanceScales(3.0), num_steps=4)
    out = denoise(torch.zeros(2, 1, 1, 1, 1), torch.ones(2), 0)
    assert out.flatten().tolist() == [3.0, 6.0]
    with pytest.raises(KeyError, match="nothing"):
        Guided(velocity, branches, GuidanceScales(3.0, 2.0), 4)(torch.zeros(2, 1, 1, 1, 1), torch.ones(2), 0)


def test_guidance_reads_the_step_from_the_solver() -> None:
    sizes = []

    def velocity(x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        sizes.append(len(x))
        return x

    branches = {name: Conditions(vector=torch.zeros(1, 1)) for name in ("prompt", "negative", "nothing")}
    Euler().sample(Guided(velocity, branches, OSCILLATING, 14), torch.ones(1, 1, 2, 2, 2), make_grid(14))
    assert sizes == [3] * 11 + [1, 3, 1]


def test_branches_in_turn_are_those_of_one_batch() -> None:
    sizes = []

    def velocity(x: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        sizes.append(len(x))
        return torch.sin(x * conditions["vector"][:, :, None, None, None]) + t[:, None, None, None, None]

    branches = {name: Conditions(vector=torch.rand(2, 3)) for name in (PROMPT, NEGATIVE, NOTHING)}
    x, t = torch.rand(2, 3, 4, 1, 1), torch.tensor([0.3, 0.7])
    for scales in (GuidanceScales(7.5), GuidanceScales(7.5, 3.0, scale_temporal_osci=True), GuidanceScales(1.0)):
        together, in_turn = (Guided(velocity, branches, scales, 4, batched)(x, t, 0) for batched in (True, False))
        torch.testing.assert_close(in_turn, together, rtol=0, atol=1e-6)
    assert sizes == [4, 2, 2, 6, 2, 2, 2, 2, 2]


def test_branches_in_turn_are_as_many_calls_as_of_other_ranks() -> None:
    calls = []

    def velocity(x: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        calls.append(1)
        return x

    branches = {name: Conditions(vector=torch.zeros(1, 1)) for name in (PROMPT, NEGATIVE, NOTHING)}
    scales = GuidanceScales(7.5), GuidanceScales(7.5, 3.0)
    x, t = torch.ones(1, 1, 1, 1, 1), torch.ones(1)
    for own in scales:
        calls.clear()
        assert torch.allclose(Guided(velocity, branches, own, 4, False, scales)(x, t, 0), x)
        assert len(calls) == 3


def test_conditions_are_joined_field_by_field() -> None:
    part = Conditions(text=torch.ones(2, 3, 4), pose=torch.ones(2, 1), masks={"text": torch.ones(2, 3) > 0})
    joined = join_conditions([part, part, part])
    assert joined["text"].shape == (6, 3, 4)
    assert joined["pose"].shape == (6, 1)
    assert joined.masks["text"].shape == (6, 3)
    assert "vector" not in joined
    with pytest.raises(ValueError, match="'text' is given for some branches"):
        join_conditions([part, Conditions(pose=part["pose"])])


def test_a_rule_of_the_family_sees_the_step_and_its_time() -> None:
    scales = GuidanceScales(3.0, rule=lambda scale, step, num_steps, t: 1 + (scale - 1) * t / 1000 * step / num_steps)
    terms = scales.coefficients(2, 4, 3, torch.tensor([500.0, 500.0]))
    assert terms == {"prompt": 1.5, "negative": -0.5}
    assert scales.coefficients(0, 4, 3, torch.tensor([1000.0])) == {"prompt": 1.0}
