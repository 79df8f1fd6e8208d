from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from longtake.contracts import Noised
from longtake.diffusion.config import FlowConfig
from longtake.diffusion.flow import RectifiedFlow, StraightFlow
from longtake.diffusion.objective import micro_batch_loss, sample_loss
from tests.diffusion.golden import read_tensors

SHAPE = (4, 3, 2, 4, 6)  # B, C, F, h, w
PREDICTIONS = ("velocity", "clean", "noise")


def make_flow(patch_size: int = 2, quirks: tuple[str, ...] = (), **settings: object) -> RectifiedFlow:
    return RectifiedFlow(FlowConfig(**settings), patch_size, frozenset(quirks))


def make_inputs(seed: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    latents, noise = torch.randn(2, *SHAPE, generator=generator)
    return latents, {"noise": noise, "timestep": torch.randn(SHAPE[0], generator=generator)}


def true_velocity(latents: Tensor, noise: Tensor, sigma_min: float) -> Tensor:
    return (1 - sigma_min) * noise - latents


def test_the_path_ends_at_noise_and_begins_at_barely_noised_latents() -> None:
    latents, draws = make_inputs()
    flow = make_flow(sigma_min=0.1, shift=None)
    end = flow.noise(latents, {**draws, "timestep": torch.full((4,), 1e3)})
    begin = flow.noise(latents, {**draws, "timestep": torch.full((4,), -1e3)})
    torch.testing.assert_close(end.x, draws["noise"])
    torch.testing.assert_close(begin.x, latents + 0.1 * draws["noise"])


def test_the_velocity_target_is_the_derivative_of_the_path() -> None:
    latents, draws = make_inputs()
    flow = make_flow(sigma_min=0.05, shift=None)
    low, high = (flow.noise(latents.double(), {**draws, "timestep": torch.full((4,), z)}) for z in (0.0, 0.4))
    slope = (high.x - low.x) / (high.t - low.t)[:, None, None, None, None]
    torch.testing.assert_close(slope, low.target, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("predict", PREDICTIONS)
def test_a_perfect_prediction_of_any_kind_is_the_true_velocity(predict: str) -> None:
    latents, draws = make_inputs()
    draws["timestep"] = torch.tensor([-2.0, -0.5, 0.5, 2.0])
    flow = make_flow(predict=predict, sigma_min=0.01)
    noised = flow.noise(latents, draws)
    velocity = flow.velocity(noised.target, noised.x, noised.t)
    torch.testing.assert_close(velocity, true_velocity(latents, draws["noise"], 0.01), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("predict", PREDICTIONS)
@pytest.mark.parametrize("sigma_min", [0.0, 1e-5, 0.1])
def test_the_weighted_loss_of_any_prediction_is_the_loss_of_the_velocity_it_stands_for(
    predict: str, sigma_min: float
) -> None:
    latents, draws = make_inputs(1)
    draws["timestep"] = torch.tensor([-2.5, -0.5, 0.5, 2.5])  # t in 0.08..0.92: outside the clamp
    flow = make_flow(predict=predict, sigma_min=sigma_min, shift=None)
    noised = flow.noise(latents, draws)
    prediction = noised.target + 0.3 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    error = flow.velocity(prediction, noised.x, noised.t) - true_velocity(latents, draws["noise"], sigma_min)
    torch.testing.assert_close(sample_loss(prediction, noised), error.square().mean((1, 2, 3, 4)), rtol=1e-4, atol=0)


@pytest.mark.parametrize("predict", ["clean", "noise"])
def test_weights_are_bounded_by_min_t(predict: str) -> None:
    latents, draws = make_inputs()
    draws["timestep"] = torch.tensor([-30.0, -1.0, 1.0, 30.0])
    weight = make_flow(predict=predict, min_t=0.2).noise(latents, draws).weight
    assert weight.max() == pytest.approx(25.0)
    assert weight.min() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize(("predict", "time", "divisor"), [("clean", 0.0, 1e-5), ("noise", 1.0, 0.05)])
def test_the_divisor_of_the_velocity_has_a_floor_where_it_would_be_zero(
    predict: str, time: float, divisor: float
) -> None:
    prediction, x = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0))
    flow = make_flow(predict=predict, sigma_min=0.0, min_t=0.05)
    velocity = flow.velocity(prediction, x, torch.full((4,), time))
    difference = x - prediction if predict == "clean" else prediction - x
    torch.testing.assert_close(velocity, difference / divisor)


def test_low_precision_predictions_and_latents_are_worked_on_in_float32() -> None:
    latents, draws = make_inputs()
    flow = make_flow(predict="clean")
    noised = flow.noise(latents.bfloat16(), draws)
    assert {noised.x.dtype, noised.t.dtype, noised.target.dtype, noised.weight.dtype} == {torch.float32}
    assert flow.velocity(latents.bfloat16(), noised.x, noised.t).dtype == torch.float32
    assert sample_loss(latents.bfloat16(), noised).dtype == torch.float32


def test_times_shift_by_the_tokens_of_the_real_patch_and_by_a_patch_of_two_by_a_quirk() -> None:
    latents, draws = torch.zeros(1, 3, 2, 4, 6), {"noise": torch.zeros(1, 3, 2, 4, 6), "timestep": torch.zeros(1)}
    by_real_patch = make_flow(patch_size=1).noise(latents, draws).t.item()
    by_two = make_flow(patch_size=1, quirks=("shift_of_patch_2",)).noise(latents, draws).t.item()
    alpha = lambda tokens: (1 + (tokens - 256) / 1920) * 2**0.5  # noqa: E731
    assert by_real_patch == pytest.approx(alpha(24) / (1 + alpha(24)))
    assert by_two == pytest.approx(alpha(6) / (1 + alpha(6)))


def test_a_patch_that_is_not_whole_counts_as_one() -> None:
    flow = make_flow(patch_size=2, shift="resolution")
    assert flow.grid(5, (4, 3, 5, 7)).tolist() == flow.grid(5, (4, 3, 6, 8)).tolist()


def test_the_grid_takes_the_shift_of_training_unless_told_otherwise() -> None:
    flow, shape = make_flow(shift=3.0), (4, 3, 6, 8)
    assert flow.grid(2, shape).tolist() == [1.0, 0.75, 0.0]
    assert flow.grid(2, shape, shift=None).tolist() == [1.0, 0.5, 0.0]
    resolution = flow.grid(5, shape, shift="resolution")
    torch.testing.assert_close(
        resolution, torch.tensor(read_tensors("sampling_t2v")[1]["timesteps"]), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("case", ["0", "1", "2"])
def test_the_loss_of_a_full_micro_batch_is_the_mean_over_all_elements(case: str) -> None:
    golden, _ = read_tensors("losses")
    prediction, target = (golden[f"{case}.{name}"][:, :, :, None, None] for name in ("pred", "target"))
    ones = torch.ones(len(target))
    loss = micro_batch_loss(sample_loss, prediction, Noised(target, ones, target, ones), ones, len(target))
    torch.testing.assert_close(loss, golden[f"{case}.loss"], rtol=0, atol=1e-5)


def test_fillers_add_nothing_and_the_bucket_batch_size_divides() -> None:
    latents, draws = make_inputs()
    noised = make_flow(predict="clean").noise(latents, draws)
    prediction = latents + 1.0
    loss = micro_batch_loss(sample_loss, prediction, noised, torch.tensor([1.0, 0.0, 1.0, 0.0]), 4)
    assert loss.item() == pytest.approx(((noised.weight[0] + noised.weight[2]) / 4).item())


def test_a_filler_that_is_not_finite_poisons_neither_loss_nor_gradient() -> None:
    latents, draws = make_inputs()
    latents[1], weights = float("nan"), torch.tensor([1.0, 0.0, 1.0, 1.0])
    unguarded = make_flow().noise(latents, draws)
    noised = make_flow().noise(latents, draws, weights)
    assert noised.x.isfinite().all()
    scale = torch.tensor(0.5, requires_grad=True)
    micro_batch_loss(sample_loss, scale * noised.x, noised, weights, 4).backward()
    assert scale.grad.isfinite()
    prediction = torch.full(SHAPE, 2.0)
    prediction[1] = float("inf")
    prediction.requires_grad_()
    loss = micro_batch_loss(sample_loss, prediction, unguarded, weights, 4)
    loss.backward()
    assert loss.isfinite()
    assert prediction.grad.isfinite().all()
    assert (prediction.grad[1] == 0).all()
    assert (prediction.grad[0] != 0).all()


def test_noise_of_another_shape_than_the_latents_is_refused() -> None:
    latents, draws = make_inputs()
    with pytest.raises(
        ValueError, match=r"draws\['noise'\] has shape \(4, 3, 2, 4, 5\), the latents \(4, 3, 2, 4, 6\)"
    ):
        make_flow().noise(latents, {**draws, "noise": draws["noise"][..., :5]})


@pytest.mark.parametrize("settings", [{"shift": 0.0}, {"shift": "width"}, {"predict": "score"}, {"sigma_min": 1.0}])
def test_settings_without_meaning_are_refused(settings: dict) -> None:
    with pytest.raises(ValidationError):
        FlowConfig(**settings)


def test_a_straight_flow_in_a_unit_of_its_own_is_solved_exactly() -> None:
    class Thousand(StraightFlow):
        noise_time = 1000.0

        def times(self, drawn: torch.Tensor, latent_shape: tuple, shape: object) -> torch.Tensor:
            return 1000 * drawn**2

    flow = Thousand(FlowConfig(), 1)
    clean, noise = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(0)).double().unbind()
    noised = flow.noise(clean, {"noise": noise, "timestep": torch.full((len(clean),), 0.5)})
    assert noised.t.tolist() == [250.0] * len(clean)
    torch.testing.assert_close(noised.x, (0.75 * clean + 0.25 * noise).float())
    grid = flow.grid(3, SHAPE[1:])
    assert (grid[0], grid[-1]) == (1000, 0)

    def denoise(x: torch.Tensor, t: torch.Tensor, step: int) -> torch.Tensor:
        return flow.velocity(flow.target(clean, noise, t), x, t)

    torch.testing.assert_close(flow.solver("euler", len(grid) - 1).sample(denoise, noise, grid), clean.float())
