"""TTT-Video's levels, guidance and solver: the published numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longtake.contracts import Conditions, UserError
from longtake.diffusion.config import VPredictionConfig
from longtake.diffusion.guidance import NEGATIVE, PROMPT, GuidanceScales, Guided, dynamic, dynamic_by_step
from longtake.diffusion.objective import micro_batch_loss
from longtake.diffusion.v_prediction import VPrediction
from longtake.weights.ttt_video import FORMAT
from tests.models.golden_ttt_video import golden, golden_model

GOLDEN = Path(__file__).parents[1] / "golden" / "ttt_video"
RUNS = json.loads((GOLDEN / "sampling_steps.json").read_text())


def rescaled(shift: float = 1.0, **keys: float) -> VPrediction:
    return VPrediction(VPredictionConfig(spacing="rescaled", snr_shift=shift, **keys), patch_size=2)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_levels_of_training_and_of_solvers_are_the_published_ones(shift: float) -> None:
    golden, objective, prefix = load_file(GOLDEN / "schedules.safetensors"), rescaled(shift), f"shift{shift:g}"
    every = objective.schedule.alpha(torch.arange(1000)).sqrt().float()
    torch.testing.assert_close(every, golden[f"{prefix}.training"], rtol=0, atol=1e-6)
    for steps in (5, 7, 10, 25, 50):
        times = objective.grid(steps, (16, 2, 2, 2))[:-1]
        assert times.flip(0).tolist() == golden[f"{prefix}.{steps}.timesteps"].tolist()
        solver = objective.solver("dpmpp_2m_sde", steps)
        levels = solver.schedule.alpha(times).sqrt().float()
        torch.testing.assert_close(levels, golden[f"{prefix}.{steps}.levels"], rtol=0, atol=1e-6)
        if shift == 1:
            read = solver.read.alpha(times).sqrt().float()
            torch.testing.assert_close(read, golden[f"{prefix}.{steps}.snapped"], rtol=0, atol=1e-6)


def test_timesteps_are_cut_down_as_numpy_does() -> None:
    assert rescaled().grid(3, (16, 2, 2, 2)).tolist() == [999, 666, 333, -1]


def test_guidance_swings_as_published_and_rises_as_meant() -> None:
    for case in json.loads((GOLDEN / "guidance.json").read_text())["schedules"]:
        steps, numbers = case["num_steps"], {"exp": float(case["exp"])}
        swings = GuidanceScales(case["scale"], rule=lambda *of, numbers=numbers: dynamic(*of, **numbers))
        found = [swings.text(step, steps, torch.tensor([float(t)])) for step, t in enumerate(case["timesteps"])]
        assert found == pytest.approx(case["as_shipped"], abs=1e-6)
        rises = [dynamic_by_step(case["scale"], step, steps, -1.0, **numbers) for step in range(steps + 1)]
        assert rises == pytest.approx(case["with_step_number"], abs=1e-6)
    with pytest.raises(UserError, match=r"guidance_numbers\.exp = 2\.5: must be a whole number"):
        dynamic(6.0, 0, 5, 999.0, exp=2.5)


@pytest.mark.parametrize("run", sorted(RUNS))
def test_a_sampling_run_along_the_published_predictions_ends_where_theirs_does(run: str) -> None:
    golden, settings = load_file(GOLDEN / "sampling.safetensors"), RUNS[run]
    golden = {name: value.transpose(-4, -3) for name, value in golden.items() if value.dim() > 4}
    objective, steps = rescaled(solver_snr_shift=settings["shift_scale"]), settings["num_steps"]
    solver, grid = objective.solver("dpmpp_2m_sde", steps), objective.grid(steps, (4, 3, 4, 6))

    def velocity(x: torch.Tensor, t: torch.Tensor, step: int) -> torch.Tensor:
        if (name := f"{run}.step{step}.x") in golden:
            torch.testing.assert_close(x, golden[name], rtol=0, atol=1e-4)
        signal, level = solver.read.factors(t[0])
        return (signal * x - golden[f"{run}.step{step}.denoised"]) / level

    noises = [*golden[f"{run}.noises"], torch.zeros_like(golden[f"{run}.initial"])]  # the last one is times 0
    found = solver.sample(velocity, golden[f"{run}.initial"], grid, noise=noises.__getitem__)
    assert grid[:-1].tolist() == [step["timestep"] for step in settings["steps"]]
    torch.testing.assert_close(found, golden[f"{run}.result"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("run", sorted(RUNS))
def test_a_sampling_run_of_the_model_ends_where_the_published_one_does(run: str) -> None:
    tensors, settings = golden("sampling"), RUNS[run]
    model, objective = (
        golden_model(settings["weights"].split("_")[1]),
        rescaled(solver_snr_shift=settings["shift_scale"]),
    )
    texts = {NEGATIVE: tensors[f"{run}.negative_text"], PROMPT: tensors[f"{run}.text"]}
    branches = {name: Conditions(text=text) for name, text in texts.items()}
    scales, steps = GuidanceScales(settings["guider"]["scale"], rule=dynamic), settings["num_steps"]
    initial = tensors[f"{run}.initial"].transpose(1, 2)
    noises = [*tensors[f"{run}.noises"].transpose(2, 3), torch.zeros_like(initial)]
    with torch.no_grad():
        found = objective.solver("dpmpp_2m_sde", steps).sample(
            Guided(model, branches, scales, steps),
            initial,
            objective.grid(steps, (4, 3, 4, 6)),
            noise=noises.__getitem__,
        )
    expected = tensors[f"{run}.result"].transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("case", ["linear.one", "linear.one.drawn", "mlp.one.bf16", "mlp.three.aligned"])
def test_a_training_step_equals_the_published_one_in_loss_and_gradients(case: str) -> None:
    tensors, shared = golden("training_loss"), case.removesuffix(".aligned")
    model, objective = golden_model(case.split(".")[0]), rescaled()
    clean, noise = (tensors[f"{shared}.{name}"].transpose(1, 2) for name in ("video", "noise"))
    noised = objective.noise(clean, {"noise": noise, "timestep": tensors[f"{shared}.idx"].long()})
    prediction = model(noised.x, noised.t, Conditions(text=tensors[f"{shared}.text"]))
    torch.testing.assert_close(prediction.transpose(1, 2), tensors[f"{case}.prediction"], rtol=0, atol=1e-4)
    losses = objective.loss(prediction, noised)
    torch.testing.assert_close(losses, tensors[f"{case}.loss"], rtol=2e-5, atol=0)
    loss = micro_batch_loss(objective.loss, prediction, noised, torch.ones(len(clean)), len(clean))
    assert loss.item() == pytest.approx(tensors[f"{case}.mean_loss"].item(), rel=2e-5)
    loss.backward()
    total = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
    assert total.item() == pytest.approx(tensors[f"{case}.grad_norm"].item(), rel=2e-4)
    naming, parameters = FORMAT.namings["published"], dict(model.named_parameters())
    for name in (name for name in tensors if name.startswith(f"{case}.grad.")):
        (own,) = naming.parts_of(name.removeprefix(f"{case}.grad.dit."))
        expected = tensors[name]
        found = parameters[own].grad.view(expected.shape)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4 * float(expected.abs().max()))
