from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from longtake.contracts import Conditions, Known
from longtake.diffusion.config import FlowConfig
from longtake.diffusion.flow import RectifiedFlow
from longtake.diffusion.guidance import GuidanceScales, Guided
from longtake.diffusion.known import known_holder
from longtake.diffusion.solvers import AdamsBashforth2, Euler, Solver
from longtake.diffusion.timesteps import make_grid

NOISE = torch.randn(2, 3, 2, 4, 4, generator=torch.Generator().manual_seed(0))


SOLVERS = (Euler(), AdamsBashforth2())


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: type(solver).__name__)
@pytest.mark.parametrize("predict", ["velocity", "clean"])
@pytest.mark.parametrize("num_steps", [1, 7])
def test_a_network_that_knows_the_answer_is_sampled_exactly(predict: str, num_steps: int, solver: Solver) -> None:
    clean = torch.randn(NOISE.shape, generator=torch.Generator().manual_seed(1))
    flow = RectifiedFlow(FlowConfig(predict=predict, sigma_min=0.0), patch_size=1)
    answer = {"velocity": NOISE - clean, "clean": clean}[predict]
    result = solver.sample(lambda x, t, _: flow.velocity(answer, x, t), NOISE, flow.grid(num_steps, clean.shape[1:]))
    torch.testing.assert_close(result, clean, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize(("solver", "order"), [(Euler(), 1), (AdamsBashforth2(), 2)])
def test_the_error_falls_with_the_order_of_the_solver_on_uneven_grids_too(
    solver: Solver, order: int, shift: float
) -> None:
    def error(num_steps: int) -> float:
        x = solver.sample(lambda x, t, _: x, torch.ones(1, 1, 1, 1, 1), make_grid(num_steps, shift))  # x(0) = x(1) / e
        return abs(x.item() - math.exp(-1))

    assert error(20) / error(40) == pytest.approx(2.0**order, rel=0.2)


def test_two_steps_follow_the_written_rule() -> None:
    times = []

    def velocity(x: torch.Tensor, t: torch.Tensor, step: int) -> torch.Tensor:
        times.append(t.item())
        return torch.full_like(x, (2.0, 5.0)[step])

    x = AdamsBashforth2().sample(velocity, torch.zeros(1, 1, 1, 1, 1), torch.tensor([1.0, 0.8, 0.2]))
    h, before = -0.6, -0.2
    assert x.item() == pytest.approx(-0.2 * 2.0 + h * (5.0 + h / 2 * (5.0 - 2.0) / before))
    assert times == pytest.approx([1.0, 0.8]), "one call of the network in a step"


def test_a_place_that_is_released_forgets_the_slope_it_had_while_it_was_held() -> None:
    solver, grid, flow = AdamsBashforth2(), make_grid(8), RectifiedFlow(FlowConfig(sigma_min=0.0), patch_size=1)
    clean, released = torch.full_like(NOISE, 3.0), torch.ones(2, 1, 2, 1, 1)
    released[:, :, 0] = 0.55
    hold = known_holder(Known(released, clean), NOISE, flow.noised_at, 1.0)
    found = solver.sample(lambda x, *_: x, NOISE, grid, hold=hold)
    first = next(i for i, t in enumerate(grid) if t <= 0.55)
    anew = solver.sample(lambda x, *_: x, flow.noised_at(clean, NOISE, grid[first]), grid[first:])
    assert torch.equal(found[:, :, 0], anew[:, :, 0])
    assert torch.equal(found[:, :, 1], solver.sample(lambda x, *_: x, NOISE, grid)[:, :, 1])


def test_nothing_is_remembered_from_one_sample_to_the_next() -> None:
    solver, grid = AdamsBashforth2(), make_grid(3)
    first, again = (solver.sample(lambda x, *_: x * x, NOISE, grid) for _ in range(2))
    assert torch.equal(first, again)


class Oscillating:
    """A velocity in two branches that do not depend on x: their integrals are known exactly."""

    scales = GuidanceScales(5.0, text_osci=True)

    def denoiser(self, num_steps: int):
        """Prompt: 3 t^2; negative: 2 t."""
        branches = {
            name: Conditions(vector=torch.tensor([[power]])) for name, power in (("prompt", 2.0), ("negative", 1.0))
        }

        def velocity(x: torch.Tensor, t: torch.Tensor, conditions: Conditions) -> torch.Tensor:
            power = conditions["vector"][:, 0]
            return ((power + 1) * t**power)[:, None, None, None, None].expand_as(x)

        return Guided(velocity, branches, self.scales, num_steps)

    def exact(self, grid: torch.Tensor) -> float:
        """What x loses on the way from 1 to 0, with each step's own scales."""
        total = 0.0
        for step, (t, s) in enumerate(zip(grid.double().tolist(), grid.double().tolist()[1:], strict=False)):
            scale = self.scales.text(step)
            total += scale * (s**3 - t**3) + (1 - scale) * (s**2 - t**2)
        return total


def test_branches_of_oscillating_guidance_keep_the_second_order() -> None:
    flow = Oscillating()

    def error(solver: Solver, num_steps: int) -> float:
        grid = make_grid(num_steps, 2.0)
        x = solver.sample(flow.denoiser(num_steps), torch.zeros(1, 1, 1, 1, 1), grid)
        return abs(x.item() - flow.exact(grid))

    assert error(AdamsBashforth2(), 40) / error(AdamsBashforth2(), 80) == pytest.approx(4.0, rel=0.3)
    assert error(AdamsBashforth2(), 40) < error(Euler(), 40) / 10


def test_a_sum_of_branches_is_continued_as_a_whole_where_the_scales_stay() -> None:
    branches = {name: Conditions(vector=torch.ones(2, 1) * i) for i, name in enumerate(("prompt", "negative"), 1)}

    def velocity(x: Tensor, t: Tensor, c: Conditions) -> Tensor:
        return torch.sin(x * c["vector"][:, :, None, None, None])

    denoise = Guided(velocity, branches, GuidanceScales(3.0), 6)
    by_branches = AdamsBashforth2().sample(denoise, NOISE, make_grid(6))
    by_sum = AdamsBashforth2().sample(lambda *inputs: denoise(*inputs), NOISE, make_grid(6))
    torch.testing.assert_close(by_branches, by_sum, rtol=1e-4, atol=1e-4)


def test_solvers_are_chosen_by_name() -> None:
    flow = RectifiedFlow(FlowConfig(), patch_size=1)
    assert isinstance(flow.solver("euler", 2), Euler)
    assert isinstance(flow.solver("ab2", 2), AdamsBashforth2)


def test_the_denoiser_sees_one_float32_time_for_each_sample_and_the_number_of_the_step() -> None:
    seen = []

    def denoise(x: torch.Tensor, t: torch.Tensor, step: int) -> torch.Tensor:
        seen.append((t.tolist(), t.dtype, step))
        return torch.zeros_like(x, dtype=torch.bfloat16)

    result = Euler().sample(denoise, NOISE.bfloat16(), make_grid(2))
    assert seen == [([1.0, 1.0], torch.float32, 0), ([0.5, 0.5], torch.float32, 1)]
    assert result.dtype == torch.float32


def test_progress_is_told_after_every_step() -> None:
    told = []
    Euler().sample(
        lambda x, *_: x, NOISE, make_grid(3), on_step=lambda done, total, x: told.append((done, total, x.shape))
    )
    assert told == [(i, 3, NOISE.shape) for i in (1, 2, 3)]


def test_no_graph_is_kept_while_sampling() -> None:
    weight = torch.ones((), requires_grad=True)
    assert not Euler().sample(lambda x, *_: weight * x, NOISE, make_grid(2)).requires_grad
