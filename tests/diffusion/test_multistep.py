"""UniPC and DPM-Solver++ of flows: Wan's own steps and times, and diffusers' times."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from longtake.diffusion.config import FlowConfig, ShiftedFlowConfig
from longtake.diffusion.flow import RectifiedFlow
from longtake.diffusion.flow_shifted import ShiftedFlow
from longtake.diffusion.objective import Objective
from longtake.diffusion.timesteps import shift_time

FOLDER = Path(__file__).parents[1] / "golden" / "wan" / "sampling"
GOLDEN = load(lzma.decompress((FOLDER / "solvers.safetensors.xz").read_bytes()))
SCHEDULES = json.loads((FOLDER / "schedules.json").read_text())["schedules"]
NAMES = {
    "unipc (official)": "unipc",
    "unipc (diffusers UniPCMultistepScheduler)": "unipc_diffusers",
    "dpm++ (official)": "dpmpp_2m",
}
SHAPE = (4, 2, 3, 3)


def flow(unit: float, shift: float = 1.0) -> Objective:
    """Rectified flow on times up to `unit`."""
    if unit == 1:
        return RectifiedFlow(FlowConfig(shift=shift, sigma_min=0.0), patch_size=1)
    return ShiftedFlow(ShiftedFlowConfig(shift=shift), patch_size=1)


@pytest.mark.parametrize("unit", [1.0, 1000.0])
@pytest.mark.parametrize("row", SCHEDULES, ids=lambda row: f"{NAMES[row['schedule']]}-{row['steps']}-{row['shift']:g}")
def test_solver_times_are_those_of_the_reference(row: dict, unit: float) -> None:
    objective, times = flow(unit), []
    solver = objective.solver(NAMES[row["schedule"]], row["steps"])
    grid = objective.solver_grid(solver, row["steps"], SHAPE, row["shift"], (5, 64, 64))
    torch.testing.assert_close(grid / unit, torch.tensor(row["sigmas"]), rtol=0, atol=1e-6)

    def denoise(x: Tensor, t: Tensor, step: int) -> Tensor:
        times.append(round(t.item() * 1000 / unit))
        return x

    solver.sample(denoise, torch.zeros(1, *SHAPE), grid)
    assert times == row["timesteps"]


@pytest.mark.parametrize("unit", [1.0, 1000.0])
@pytest.mark.parametrize(("name", "theirs"), [("unipc", "unipc"), ("dpmpp_2m", "dpm")])
@pytest.mark.parametrize("case", ["n1_shift5", "n2_shift3", "n3_shift5", "n6_shift12", "n16_shift5"])
def test_solver_steps_are_those_of_wan(case: str, name: str, theirs: str, unit: float) -> None:
    objective, velocities, expected = flow(unit), GOLDEN[f"{case}.outputs"], GOLDEN[f"{case}.{theirs}"]
    steps, shift = (int(part) for part in case.removeprefix("n").split("_shift"))
    solver, made = objective.solver(name, steps), []
    grid = objective.solver_grid(solver, steps, SHAPE, float(shift), (5, 64, 64))
    solver.sample(
        lambda x, t, step: velocities[step] / unit, GOLDEN[f"{case}.start"], grid, lambda done, of, x: made.append(x)
    )
    torch.testing.assert_close(torch.stack(made), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["n1_shift5", "n2_shift3", "n3_shift5", "n6_shift12", "n16_shift5"])
def test_euler_steps_are_those_of_diffusers_on_its_times(case: str) -> None:
    """diffusers shifts the lowest time of its scheduler twice."""
    steps, shift = (int(part) for part in case.removeprefix("n").split("_shift"))
    lowest = shift_time(torch.tensor(0.001, dtype=torch.float64), shift).item()
    shares = shift_time(torch.linspace(1, lowest, steps, dtype=torch.float64), shift)
    grid, made, velocities = torch.cat([shares, torch.zeros(1)]).float(), [], GOLDEN[f"{case}.outputs"]
    solver = flow(1.0).solver("euler", steps)
    solver.sample(lambda x, t, step: velocities[step], GOLDEN[f"{case}.start"], grid, lambda _, of, x: made.append(x))
    torch.testing.assert_close(torch.stack(made), GOLDEN[f"{case}.euler"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["unipc", "unipc_diffusers", "dpmpp_2m"])
def test_known_places_leave_the_other_places_as_they_are(name: str) -> None:
    objective, noise = flow(1.0, 3.0), torch.randn(1, *SHAPE, generator=torch.Generator().manual_seed(0))
    solver = objective.solver(name, 6)
    grid = objective.solver_grid(solver, 6, SHAPE)
    mask = torch.zeros(1, 1, 2, 1, 1)
    mask[:, :, 0] = 1
    clean = torch.full_like(noise, 3.0)

    def hold(x: Tensor, t: Tensor) -> Tensor:
        return torch.where(mask.bool(), clean, x)

    def velocity(x: Tensor, t: Tensor, step: int) -> Tensor:
        return x * (1 + step)

    held, free = solver.sample(velocity, noise, grid, hold=hold), solver.sample(velocity, noise, grid)
    assert torch.equal(held[:, :, 0], clean[:, :, 0])
    torch.testing.assert_close(held[:, :, 1], free[:, :, 1], rtol=0, atol=0)
