"""v-prediction, its schedule, weights and solvers: diffusers' and VideoX-Fun's numbers, and closed forms."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from longtake.contracts import Noised, UserError
from longtake.diffusion.config import VPredictionConfig
from longtake.diffusion.guidance import GuidanceScales, dynamic
from longtake.diffusion.objective import micro_batch_loss
from longtake.diffusion.v_prediction import VPrediction
from tests.precision import rounding

GOLDEN = Path(__file__).parents[1] / "golden" / "cogvideox"
SETTINGS = json.loads((GOLDEN / "sampling" / "settings.json").read_text())


def v_prediction(**keys: Any) -> VPrediction:
    return VPrediction(VPredictionConfig(**keys), patch_size=2)


def frames_second(tensor: Tensor) -> Tensor:
    """[..., F, C, h, w] <-> [..., C, F, h, w]."""
    return tensor.float().transpose(-4, -3)


@pytest.mark.parametrize(("name", "shift"), [("ddpm", 1), ("cog_ddim_shift1", 1), ("cog_ddim_shift3", 3)])
def test_the_schedule_noised_latents_and_targets_are_diffusers_own(name: str, shift: float) -> None:
    golden, objective = load_file(GOLDEN / "scheduler" / "schedules.safetensors"), v_prediction(snr_shift=shift)
    alphas = objective.schedule.alpha(torch.arange(-1, 1000))
    expected = golden[f"{name}.alphas_cumprod"]
    # A product of 1000 factors in float32, whose roundings add up as a random walk does.
    tolerance = 1e-12 if expected.dtype == torch.float64 else rounding(1.0, steps=math.isqrt(1000))
    torch.testing.assert_close(alphas[1:].to(expected.dtype), expected, rtol=0, atol=tolerance)
    assert alphas[[0, -1]].tolist() == [1, 0]
    latents, noise = (frames_second(golden[key]) for key in ("latents", "noise"))
    noised = objective.noise(latents, {"noise": noise, "timestep": golden["timesteps"]})
    assert torch.equal(noised.t, golden["timesteps"].float())
    torch.testing.assert_close(noised.x, frames_second(golden[f"{name}.add_noise"]), rtol=0, atol=1e-5)
    torch.testing.assert_close(noised.target, frames_second(golden[f"{name}.get_velocity"]), rtol=0, atol=1e-5)


def test_solvers_take_diffusers_timesteps() -> None:
    cases = json.loads((GOLDEN / "scheduler" / "timesteps.json").read_text())["set_timesteps"]
    for case in cases:
        grid = v_prediction(spacing=case["spacing"]).grid(case["steps"], (16, 2, 2, 6))
        assert grid.tolist() == [*case["timesteps"], -1], case
    assert {case["spacing"] for case in cases} == {"trailing", "linspace", "leading"}


@pytest.mark.parametrize("run", ["diffusers_ddim", "diffusers_dpm", "fun_inpaint_start"])
def test_a_sampling_run_along_the_published_predictions_ends_where_theirs_does(run: str) -> None:
    golden, settings = load_file(GOLDEN / "sampling" / f"{run}.safetensors"), SETTINGS[run]
    objective = v_prediction(snr_shift=settings["scheduler_config"].get("snr_shift_scale", 1.0))
    predictions, steps = frames_second(golden["guided_model_output"]), frames_second(golden["latents"])
    noise = frames_second(golden["noise_drawn"])[settings["noise_used"]] if settings["noise_used"] else None
    solver = objective.solver("ddim" if noise is None else "dpmpp_2m_sde", 6)
    grid, made = objective.grid(6, (16, 2, 2, 6)), []
    solver.sample(
        lambda x, t, step: predictions[step],
        frames_second(golden["initial_latents"]),
        grid,
        lambda done, of, x: made.append(x),
        None if noise is None else noise.__getitem__,
    )
    assert grid[:-1].tolist() == golden["timesteps"].tolist()
    torch.testing.assert_close(torch.stack(made), steps, rtol=0, atol=1e-5)


def test_dynamic_guidance_is_diffusers_own() -> None:
    settings = SETTINGS["diffusers_dpm"]
    times = load_file(GOLDEN / "sampling" / "diffusers_dpm.safetensors")["timesteps"]
    scales = GuidanceScales(settings["guidance_scale"], rule=dynamic)
    found = [scales.text(step, 6, t.float()[None]) for step, t in enumerate(times)]
    assert found == pytest.approx(settings["guidance_scale_per_step"], rel=1e-6)


def spread(name: str, num_steps: int) -> float:
    """The standard deviation that a solver gives to standard normal data, whose best prediction of v is 0."""
    objective = v_prediction()

    def noise(step: int) -> Tensor:
        x = torch.randn(1, 1, 1, 200, 200, generator=torch.Generator().manual_seed(step))
        return x / x.std()

    grid = objective.grid(num_steps, (1, 1, 1, 1))
    solver = objective.solver(name, num_steps)
    return solver.sample(lambda x, t, step: torch.zeros_like(x), noise(1000), grid, None, noise).std().item()


def test_more_steps_and_the_second_order_come_closer_to_the_data() -> None:
    error = {name: [abs(spread(name, n) - 1) for n in (10, 50)] for name in VPredictionConfig.SOLVERS}
    assert 0.1 < error["ddim"][0] < 0.2
    assert error["ddim"][1] < error["ddim"][0] / 4
    for name in ("dpmpp_2m", "dpmpp_2m_sde"):
        assert error[name][0] < error["ddim"][0] / 2, name
        assert error[name][1] < error["ddim"][1] / 3, name


@pytest.mark.filterwarnings("ignore:__array__ implementation")
@pytest.mark.parametrize(("name", "algorithm"), [("dpmpp_2m", "dpmsolver++"), ("dpmpp_2m_sde", "sde-dpmsolver++")])
def test_dpm_solvers_walk_as_diffusers_general_one_does(name: str, algorithm: str) -> None:
    from diffusers import DPMSolverMultistepScheduler

    settings = SETTINGS["fun_inpaint_start"]["scheduler_config"]
    keys = ("beta_start", "beta_end", "beta_schedule", "prediction_type", "rescale_betas_zero_snr", "timestep_spacing")
    theirs = DPMSolverMultistepScheduler(**{key: settings[key] for key in keys}, algorithm_type=algorithm)
    theirs.set_timesteps(20)
    start, *noises = torch.randn(21, 1, 1, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def v(x: Tensor, t: Tensor) -> Tensor:
        return torch.tanh(x.roll(1, -1)) * (0.5 + float(t) / 2000)

    x = start
    for t, noise in zip(theirs.timesteps, noises, strict=True):
        x = theirs.step(v(x, t), t, x, variance_noise=noise).prev_sample
    objective = v_prediction()
    ours = objective.solver(name, 20).sample(
        lambda x, t, step: v(x, t[0]), start, objective.grid(20, (1, 1, 1, 1)), noise=noises.__getitem__
    )
    assert x.abs().max() > 2
    torch.testing.assert_close(ours, x, rtol=0, atol=3e-3)  # it begins a hair before pure noise


def test_losses_with_and_without_motion_are_the_published_ones() -> None:
    golden = load_file(GOLDEN / "loss" / "plain.safetensors")
    cases = json.loads((GOLDEN / "loss" / "plain.json").read_text())["losses"]
    for case in cases:
        prediction, target = (frames_second(golden[f"case{case['case']}.{key}"]) for key in ("pred", "target"))
        objective = v_prediction(motion_loss=case["ratio"] if case["motion_sub_loss"] else 0.0)
        ones = torch.ones(len(target))
        noised = Noised(target, ones, target, ones)
        loss = micro_batch_loss(objective.loss, prediction, noised, ones, len(target))
        assert loss.item() == pytest.approx(case["loss"], rel=1e-6), case


def test_places_that_do_not_count_have_no_part_in_the_motion() -> None:
    objective, target, ones = v_prediction(motion_loss=0.5), torch.zeros(1, 1, 4, 1, 1), torch.ones(1)
    prediction = torch.tensor([9.0, 1.0, 3.0, 6.0]).reshape(1, 1, 4, 1, 1)
    counted = torch.tensor([0.0, 1.0, 1.0, 1.0]).reshape(1, 1, 4, 1, 1)
    loss = objective.loss(prediction, Noised(target, ones, target, ones, counted))
    assert loss.item() == pytest.approx(0.5 * (1 + 9 + 36) / 3 + 0.5 * (4 + 9) / 2)


def test_min_snr_weights_are_those_of_the_paper_and_finite_at_both_ends() -> None:
    objective = v_prediction(min_snr_gamma=5)
    t = torch.tensor([0.0, 100.0, 400.0, 800.0, 999.0])
    alphas = objective.schedule.alpha(t).tolist()
    expected = [min(a / (1 - a), 5) / (a / (1 - a) + 1) for a in alphas]
    assert objective.weight(t).tolist() == pytest.approx(expected, rel=1e-6)
    assert v_prediction().weight(t).tolist() == [1.0] * 5


def test_uniform_sampling_draws_by_the_slot_of_the_step() -> None:
    assert v_prediction().timestep.stratified is False
    drawn = v_prediction(uniform_sampling=True, num_timesteps=500).timestep
    assert (drawn.law, drawn.below, drawn.stratified) == ("integer", 500, True)


def test_a_video_begins_at_a_timestep_of_the_grid() -> None:
    objective = v_prediction()
    grid = objective.grid(50, (1, 1, 1, 1))
    assert objective.grid_from(grid, 0.7).tolist() == grid[15:].tolist()
    assert objective.grid_from(grid, 1.0).tolist() == grid.tolist()
    assert objective.grid_from(grid, 0.0).tolist() == [-1]
    clean = torch.randn(1, 1, 1, 2, 2)
    assert torch.equal(objective.noised_at(clean, torch.randn(1, 1, 1, 2, 2), grid[-1:]), clean)


def test_what_solvers_cannot_do_is_refused_in_a_sentence() -> None:
    with pytest.raises(UserError, match=r"flow_shift = 3\.0: is for rectified flow"):
        v_prediction().grid(10, (1, 1, 1, 1), shift=3.0)
    with pytest.raises(UserError, match="num_steps = 1001: there are 1,000 timesteps"):
        v_prediction().grid(1001, (1, 1, 1, 1))


def published(folder: Path, **changes: Any) -> str:
    facts = SETTINGS["diffusers_ddim"]["scheduler_config"] | {"_class_name": "CogVideoXDDIMScheduler"} | changes
    (folder / "scheduler_config.json").write_text(json.dumps(facts))
    return str(folder)


def test_a_published_folder_says_the_schedule_and_a_written_key_outranks_it(tmp_path: Path) -> None:
    folder = published(tmp_path)
    found = VPredictionConfig(from_pretrained=folder)
    assert (found.snr_shift, found.spacing, found.beta_end) == (3.0, "trailing", 0.012)
    assert VPredictionConfig(from_pretrained=folder, snr_shift=1).snr_shift == 1.0
    published(tmp_path, clip_sample=True)  # which CogVideoXDDIMScheduler does not look at
    assert VPredictionConfig(from_pretrained=folder) == found
    published(tmp_path, _class_name="DDIMScheduler")  # which knows no shift
    assert VPredictionConfig(from_pretrained=folder).snr_shift == 1.0
    (tmp_path / "scheduler_config.json").unlink()  # a run's own config says it all, wherever it is read
    assert VPredictionConfig(**found.model_dump()) == found
    with pytest.raises(ValueError, match=r"has no scheduler_config\.json; name the `scheduler` folder"):
        VPredictionConfig(from_pretrained=folder)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prediction_type": "epsilon"}, "prediction_type is 'epsilon' there, and only 'v_prediction'"),
        ({"rescale_betas_zero_snr": False}, "rescale_betas_zero_snr is False there, and only True"),
        ({"beta_schedule": "linear"}, "beta_schedule is 'linear' there"),
        ({"set_alpha_to_one": False}, "set_alpha_to_one is False there, and only True is sampled with here"),
        ({"_class_name": "DDIMScheduler", "clip_sample": True}, "clip_sample is True there, and only False is sampled"),
    ],
)
def test_a_schedule_of_another_kind_is_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        VPredictionConfig(from_pretrained=published(tmp_path, **change))


def test_the_last_timestep_has_nothing_of_the_clean_latents() -> None:
    clean, noise = torch.randn(2, 1, 1, 1, 4, 4)
    assert torch.equal(v_prediction(snr_shift=3).noised_at(clean, noise, torch.tensor(999.0)), noise)
    assert math.isclose(v_prediction().schedule.alpha(torch.tensor(500)).item(), 0.24102, rel_tol=1e-4)
