"""Training steps and sampling runs of diffusers and VideoX-Fun, repeated with our denoiser, objective and solvers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from longtake.contracts import Conditions
from longtake.diffusion.config import VPredictionConfig
from longtake.diffusion.guidance import NEGATIVE, PROMPT, GuidanceScales, Guided, dynamic
from longtake.diffusion.objective import micro_batch_loss
from longtake.diffusion.v_prediction import VPrediction
from tests.models.golden_cogvideox import FOLDER, golden_model

SETTINGS = json.loads((FOLDER / "sampling" / "settings.json").read_text())
STEPS = json.loads((FOLDER / "loss" / "step.json").read_text())["losses"]


def frames_second(tensor: Tensor) -> Tensor:
    """[..., F, C, h, w] <-> [..., C, F, h, w]."""
    return tensor.float().transpose(-4, -3)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step['model']}-{step['motion_sub_loss']}")
def test_a_training_step_equals_the_published_one_in_loss_and_gradients(step: dict[str, Any]) -> None:
    kind = step["model"]
    golden = {
        name.removeprefix(f"{kind}."): value
        for name, value in load_file(FOLDER / "loss" / "step.safetensors").items()
        if name.startswith(kind)
    }
    model, ratio = golden_model(kind), step["ratio"] if step["motion_sub_loss"] else 0.0
    objective = VPrediction(VPredictionConfig(motion_loss=ratio), patch_size=2)
    latents, noise, visual = (frames_second(golden[name]) for name in ("latents", "noise", "inpaint_latents"))
    noised = objective.noise(latents, {"noise": noise, "timestep": golden["timesteps"]})
    conditions = Conditions(text=golden["prompt_embeds"].float(), visual=visual)
    prediction = model(noised.x, noised.t, conditions)
    torch.testing.assert_close(prediction, frames_second(golden["noise_pred"]), rtol=0, atol=2e-5)
    loss = micro_batch_loss(objective.loss, prediction, noised, torch.ones(len(latents)), len(latents))
    assert loss.item() == pytest.approx(step["loss"], rel=1e-6)
    loss.backward()
    total = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]))
    assert total.item() == pytest.approx(step["total_grad_norm"], rel=1e-4)
    prefix = "motion.grad." if ratio else "plain.grad."
    parameters, gradients = dict(model.named_parameters()), [name for name in golden if name.startswith(prefix)]
    assert len(gradients) == 2
    for name in gradients:
        own = parameters[name.removeprefix(prefix).replace("ff.net.", "ff.")].grad
        tolerance = 1e-4 * golden[name].abs().max().item()
        torch.testing.assert_close(own, golden[name], rtol=0, atol=tolerance)


@pytest.mark.parametrize("run", sorted(SETTINGS))
def test_a_sampling_run_equals_the_published_one(run: str) -> None:
    golden, settings = load_file(FOLDER / "sampling" / f"{run}.safetensors"), SETTINGS[run]
    shift = settings["scheduler_config"].get("snr_shift_scale", 1.0)
    model, objective = golden_model(settings["model"]), VPrediction(VPredictionConfig(snr_shift=shift), patch_size=2)
    scales = GuidanceScales(settings["guidance_scale"], rule=dynamic if settings["use_dynamic_cfg"] else None)
    visuals = golden["inpaint_latents"].float().transpose(1, 2).chunk(2) if "inpaint_latents" in golden else (None,) * 2
    texts = golden["negative_prompt_embeds"].float(), golden["prompt_embeds"].float()
    branches = {
        name: Conditions(text=text, visual=visual)
        for name, text, visual in zip((NEGATIVE, PROMPT), texts, visuals, strict=True)
    }
    noise = frames_second(golden["noise_drawn"])[settings["noise_used"]] if settings["noise_used"] else None
    with torch.no_grad():
        latents = objective.solver("ddim" if noise is None else "dpmpp_2m_sde", 6).sample(
            Guided(model, branches, scales, 6),
            frames_second(golden["initial_latents"]),
            objective.grid(6, (16, 2, 2, 6)),
            noise=None if noise is None else noise.__getitem__,
        )
    torch.testing.assert_close(latents, frames_second(golden["latents"])[-1], rtol=0, atol=2e-4)
