from __future__ import annotations

import math

import pytest
import torch

from longtake.diffusion import Euler, FlowConfig, RectifiedFlow, make_grid

NOISE = torch.randn(2, 3, 2, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("predict", ["velocity", "clean"])
@pytest.mark.parametrize("num_steps", [1, 7])
def test_a_network_that_knows_the_answer_is_sampled_exactly(predict: str, num_steps: int) -> None:
    clean = torch.randn(NOISE.shape, generator=torch.Generator().manual_seed(1))
    flow = RectifiedFlow(FlowConfig(predict=predict, sigma_min=0.0), patch_size=1)
    answer = {"velocity": NOISE - clean, "clean": clean}[predict]
    result = Euler().sample(lambda x, t, _: flow.velocity(answer, x, t), NOISE, flow.grid(num_steps, clean.shape[1:]))
    torch.testing.assert_close(result, clean, rtol=1e-5, atol=1e-5)


def test_euler_is_of_first_order() -> None:
    def error(num_steps: int) -> float:
        x = Euler().sample(lambda x, t, _: x, torch.ones(1, 1, 1, 1, 1), make_grid(num_steps))  # x(0) = x(1) / e
        return abs(x.item() - math.exp(-1))

    assert error(40) / error(80) == pytest.approx(2.0, rel=0.05)


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
