"""Training steps and sampling runs of Open-Sora 1.2, repeated with our denoiser, objective, solver and masks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from longtake.contracts import Conditions, Known, LatentShape
from longtake.diffusion.config import Flow1000Config
from longtake.diffusion.flow_1000 import Flow1000
from longtake.diffusion.guidance import NEGATIVE, PROMPT, GuidanceScales, Guided
from longtake.diffusion.known import frames_to_make, known_holder, read_known
from longtake.diffusion.solvers import Euler
from longtake.families.opensora_v1_2 import OPENSORA_V1_2
from longtake.families.opensora_v1_2_known import FrameMasks
from tests.models.golden_stdit3 import golden_model, read_golden
from tests.precision import apart, in_float64, rounding

TRAINING, TENSORS = read_golden("flow_training")
RUNS = (
    *("video", "image", "no_transform", "discrete", "guidance_1"),
    *("cond_none", "cond_head", "cond_connect", "cond_edit", "cond_edit_no_transform"),
    *("cond_extend", "cond_loop"),
)


def objective(scheduler: dict[str, Any]) -> Flow1000:
    method = scheduler.get("sample_method", "uniform")
    own = {key: scheduler.get(key, False) for key in ("use_timestep_transform", "use_discrete_timesteps")}
    return Flow1000(Flow1000Config(sample_method=method, **own), 2)


def facts_of(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"fps": given["fps"], "size": torch.stack([given["height"], given["width"]], dim=1)}


@pytest.mark.parametrize("case", TRAINING["cases"], ids=lambda case: case["name"])
def test_a_training_step_equals_the_published_one_in_loss_and_gradients(case: dict[str, Any]) -> None:
    name = case["name"]
    given = {key.removeprefix(f"{name}."): value for key, value in TENSORS.items() if key.startswith(f"{name}.")}
    flow, clean = objective({}), given["x_start"]  # the times stored are moved already
    noised = flow.noise(clean, {"noise": given["noise"], "timestep": given["t"] / 1000})
    conditions = Conditions({"text": given["y"][:, 0], **facts_of(given)}, {"text": given["mask"].bool()})
    if "x_mask" in given:
        known = Known(given["x_mask"].float()[:, None, :, None, None], clean)
        noised, conditions = read_known(noised, conditions, known, OPENSORA_V1_2.readers(None), flow.noise_time)
    torch.testing.assert_close(noised.x, given["x_t"], rtol=0, atol=rounding(float(given["x_t"].abs().max())))
    model = golden_model("base")
    loss = flow.loss(model(noised.x, noised.t, conditions), noised)
    torch.testing.assert_close(loss, given["loss"], rtol=0, atol=1e-5)
    loss.mean().backward()
    gradients = {key.removeprefix("grad."): value for key, value in given.items() if key.startswith("grad.")}
    found = dict(model.named_parameters())
    for key, gradient in gradients.items():
        torch.testing.assert_close(found[key].grad, gradient, rtol=0, atol=float(5e-5 * gradient.abs().max()))


def known_of(mask: Tensor, clean: Tensor, steps: Tensor, grid: Tensor) -> tuple[Known, Tensor]:
    """What is known, and as one noise that of the steps at which frames are released."""
    released = mask[:, None, :, None, None]
    noise = torch.zeros_like(clean)
    for time, drawn in zip(reversed(grid[:-1]), reversed(steps), strict=True):
        noise = torch.where(released >= time / 1000, drawn, noise)
    return Known(released, clean), noise


EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("name", RUNS)
@torch.no_grad()
def test_a_sampling_run_equals_the_published_one(name: str) -> None:
    info, tensors = read_golden(f"sampling_{name}")
    for clip in range(info["case"].get("loop", 1)):
        prefix = f"loop{clip}."
        of_clip = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        check_run(info["case"], tensors | of_clip)


def check_run(case: dict[str, Any], given: dict[str, Tensor]) -> None:
    latent = tuple(given["latents"].shape[1:])
    shift = "training" if case["scheduler"].get("use_timestep_transform") else None
    flow, model = objective(case["scheduler"]), golden_model("base")
    grid = flow.grid(case["steps"], latent, shift, (case["frames"], *case["size"]))
    torch.testing.assert_close(grid[:-1], given["timesteps"][:, 0], rtol=1e-6, atol=1e-3)
    x, known, hold = given["z_in"], None, None
    if "mask" in given:
        if "align" not in case:  # by which that program moves places to multiples of 5
            check_places(case, given["mask"], latent)
        known, noise = known_of(given["mask"], given["z_conditioned"], given["step_noise"], grid)
        x, hold = given["z_conditioned"], known_holder(known, noise, flow.noised_at, flow.noise_time)

    def velocity(x: Tensor, t: Tensor, conditions: Conditions, ulps: int = 0) -> Tensor:
        if known is not None:
            made = frames_to_make(known.held_at(t[0] / flow.noise_time))
            conditions = conditions.updated(x_mask=made.repeat(len(x) // len(made), 1))
        return flow.velocity(model(x, t * (1 + ulps * EPS), conditions), x, t)

    mask = {"text": given["text_mask"].bool()}
    branches = {
        PROMPT: Conditions({"text": given["y"][:, 0], **facts_of(given)}, mask),
        NEGATIVE: Conditions({"text": given["y_null"][:, 0], **facts_of(given)}, mask),
    }
    scales = GuidanceScales(case.get("guidance_scale", case["cfg"]))

    def sampled(ulps: int = 0) -> Tensor:
        guided = Guided(partial(velocity, ulps=ulps), branches, scales, case["steps"])
        return Euler().sample(guided, x, grid, hold=hold)

    latents = sampled()
    with in_float64(model):
        exact, late = sampled(), sampled(ulps=1)
    bound = apart(exact, latents) + apart(exact, late)  # the published program rounds its times otherwise
    torch.testing.assert_close(latents, given["latents"], rtol=0, atol=bound)


def check_places(case: dict[str, Any], mask: Tensor, latent: tuple[int, ...]) -> None:
    """A request with the same strategy holds the same frames."""
    frames = LatentShape(4, 1, 8, causal=True)  # as many frames as latents
    for strategy, row in zip(case["strategies"], mask, strict=True):
        places = FrameMasks().given(strategy or "identity", frames, (latent[1], 32, 48))
        own = torch.ones(latent[1]) if places.released is None else places.released.flatten()
        torch.testing.assert_close(own, row)
