"""Whole training steps and whole sampling runs of the reference, repeated with our denoiser, objective and solver."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longtake.contracts import Conditions
from longtake.diffusion.config import FlowConfig
from longtake.diffusion.dropout import drop_text
from longtake.diffusion.flow import RectifiedFlow
from longtake.diffusion.guidance import NEGATIVE, NOTHING, PROMPT, GuidanceScales, Guided
from longtake.diffusion.objective import micro_batch_loss
from longtake.diffusion.solvers import Euler
from longtake.families.opensora_v2 import OPENSORA_V2
from longtake.models.config import MMDiTConfig
from longtake.models.mmdit import MMDiT
from tests.diffusion.golden import read_tensors
from tests.models.golden import rounding

QUIRKS = frozenset(OPENSORA_V2.quirks)


def load_model(info: dict[str, Any]) -> MMDiT:
    """The denoiser of a golden run with its weights, which may hold more than this variant needs."""
    model = MMDiT(MMDiTConfig(**info["config"]))
    weights, _ = read_weights(info["weights"])
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model


def read_weights(file: str) -> tuple[dict[str, Tensor], object]:
    tensors, info = read_tensors(file.removesuffix(".safetensors"))
    return {name: tensor.float() for name, tensor in tensors.items()}, info


def pack(latents: Tensor, patch: int) -> Tensor:
    """[B, C, F, h, w] -> tokens [B, N, C p p], in the reference's order (features c, ph, pw)."""
    batch, channels, frames, height, width = latents.shape
    cut = latents.reshape(batch, channels, frames, height // patch, patch, width // patch, patch)
    return cut.permute(0, 2, 3, 5, 1, 4, 6).reshape(batch, -1, channels * patch**2)


def unpack(tokens: Tensor, size: tuple[int, int, int], patch: int) -> Tensor:
    """The inverse of `pack` for latents of F, h, w = `size`."""
    frames, height, width = size
    cut = tokens.reshape(len(tokens), frames, height // patch, width // patch, -1, patch, patch)
    return cut.permute(0, 4, 1, 2, 5, 3, 6).reshape(len(tokens), -1, frames, height, width)


def check_gradients(model: nn.Module, golden: dict[str, Tensor]) -> None:
    """Gradients within 5e-5 of the largest entry of each stored tensor."""
    gradients = {key.removeprefix("grad."): value for key, value in golden.items() if key.startswith("grad.")}
    assert gradients
    parameters = dict(model.named_parameters())
    for name, expected in gradients.items():
        tolerance = 5e-5 * expected.abs().max().item()
        torch.testing.assert_close(
            parameters[name].grad, expected, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("run", ["train_step_t2v", "train_step_i2v", "train_step_patch1"])
def test_a_training_step_equals_the_reference_in_loss_and_gradients(run: str) -> None:
    golden, info = read_tensors(run)
    model, patch = load_model(info), info["config"]["patch_size"]
    frames, height, width = info["video"]
    frames = (frames - 1) // 4 + 1 if info["causal"] else frames // 4
    size = (frames, height // info["spatial"], width // info["spatial"])
    flow = RectifiedFlow(FlowConfig(sigma_min=info["sigma_min"]), patch, QUIRKS)

    draws = {"noise": unpack(golden["x1"], size, patch), "timestep": golden["timestep_normal"]}
    noised = flow.noise(unpack(golden["x0"], size, patch), draws)
    torch.testing.assert_close(noised.t, golden["inp.timesteps"], rtol=1e-6, atol=0)
    torch.testing.assert_close(pack(noised.x, patch), golden["inp.img"], rtol=0, atol=1e-5)

    visual = unpack(golden["inp.cond"], size, patch) if "inp.cond" in golden else None
    rows = [info["prompt_table"].index(prompt) for prompt in info["prompts"]]
    full = Conditions(text=golden["t5"][rows], vector=golden["clip"][rows], visual=visual)
    empty = Conditions(text=golden["t5"][:1], vector=golden["clip"][:1])
    was_dropped = [
        (golden["inp.txt"] == golden["t5"][:1]).all((1, 2)),
        (golden["inp.y_vec"] == golden["clip"][:1]).all(1),
    ]
    uniforms = {name: 1.0 - rows.float() for name, rows in zip(("text", "vector"), was_dropped, strict=True)}
    ratios = dict(zip(uniforms, info["dropout_ratio"].values(), strict=True))
    conditions = drop_text(full, empty, uniforms, ratios)
    assert torch.equal(conditions["text"], golden["inp.txt"])
    assert torch.equal(conditions["vector"], golden["inp.y_vec"])

    prediction = model(noised.x, noised.t, conditions)
    torch.testing.assert_close(pack(prediction, patch), golden["pred"], rtol=0, atol=5e-5)
    loss = micro_batch_loss(flow.loss, prediction, noised, torch.ones(len(rows)), len(rows))
    torch.testing.assert_close(loss, golden["loss"], rtol=0, atol=1e-5)
    loss.backward()
    check_gradients(model, golden)


def sampling_conditions(golden: dict[str, Tensor], info: dict[str, Any]) -> dict[str, Conditions]:
    """The branches of a golden run; the reference stacks prompt, negative, negative."""
    if info["guidance_img"] is None:
        scale = torch.full((len(golden["txt"]),), info["guidance"])
        return {PROMPT: Conditions(text=golden["txt"], vector=golden["y_vec"], guidance=scale)}
    known = torch.cat([golden["masks"], golden["masked_ref"]], 1)
    visuals = (known, known, torch.zeros_like(known))
    return {
        name: Conditions(text=text, vector=vector, visual=visual)
        for name, text, vector, visual in zip(
            (PROMPT, NEGATIVE, NOTHING), golden["txt"].chunk(3), golden["y_vec"].chunk(3), visuals, strict=True
        )
    }


SAMPLING = (  # run, whether image guidance is computed where it changes nothing, `rounding` elsewhere
    ("sampling_t2v", True, 2e-4),
    ("sampling_t2v", False, 2e-4),
    ("sampling_t2v_image", True, 2e-4),
    ("sampling_t2v_image", False, 2e-4),
    ("sampling_t2v_flow_shift", True, 2e-4),
    ("sampling_t2v_patch1", True, 2e-4),
    ("sampling_distill_image", False, 5e-4),
    ("sampling_i2v_head_long", True, 2e-4),  # image guidance oscillates over steps and grows over frames
)


@pytest.mark.parametrize(("run", "by_image", "elsewhere"), SAMPLING)
def test_a_sampling_run_equals_the_reference(run: str, by_image: bool, elsewhere: float) -> None:
    golden, info = read_tensors(run)
    tolerance = rounding(elsewhere) * golden["tokens"].abs().max().item()
    model, option = load_model(info), info["option"]
    flow = RectifiedFlow(FlowConfig(), info["config"]["patch_size"], QUIRKS)
    grid = flow.grid(option["num_steps"], golden["noise"].shape[1:], option.get("flow_shift", "resolution"))
    torch.testing.assert_close(grid, torch.tensor(info["timesteps"]), rtol=1e-6, atol=0)
    if option["method"] == "distill":
        scales = GuidanceScales(1.0)  # the scale goes into the network
    else:
        image = info["guidance_img"] if by_image else None  # without known frames two branches are the same
        osci = (info["text_osci"], info["image_osci"], info["scale_temporal_osci"])
        scales = GuidanceScales(info["guidance"], image, *osci)

    def velocity(x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        return flow.velocity(model(x, t, conditions), x, t)

    denoise = Guided(velocity, sampling_conditions(golden, info), scales, option["num_steps"])
    latents = Euler().sample(denoise, golden["noise"], grid)
    torch.testing.assert_close(pack(latents, flow.patch_size), golden["tokens"], rtol=0, atol=tolerance)
    if info["cond_type"] == "t2v":
        torch.testing.assert_close(latents, golden["latents"], rtol=0, atol=tolerance)
