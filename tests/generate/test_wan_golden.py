"""Whole sampling runs of the authors' code and of diffusers on golden models: Wan's T2V and TI2V.

`runs.safetensors.xz` holds the texts, every 13th number of the results, and the settings; noise is drawn by its seed.
"""

from __future__ import annotations

import json
import lzma
from typing import Any

import pytest
import torch
from safetensors.torch import load
from torch import Tensor

from longtake.contracts import Conditions
from longtake.diffusion.config import ShiftedFlowConfig
from longtake.diffusion.flow_shifted import ShiftedFlow
from longtake.diffusion.guidance import NEGATIVE, PROMPT, GuidanceScales, Guided
from tests.models.golden_wan import FOLDER, golden_model

DATA = lzma.decompress((FOLDER / "sampling" / "runs.safetensors.xz").read_bytes())
TENSORS = load(DATA)
RUNS = json.loads(json.loads(DATA[8 : 8 + int.from_bytes(DATA[:8], "little")])["__metadata__"]["runs"])
STEPS, TEXT_ROWS, STRIDE = 6, 512, 13
TOLERANCE = 5e-4  # of golden/wan for whole runs
SOLVERS = {"unipc": "unipc", "dpm++": "dpmpp_2m", "euler": "euler"}


def text(name: str) -> Conditions:
    rows = TENSORS[name].float()
    return Conditions(text=torch.nn.functional.pad(rows, (0, 0, 0, TEXT_ROWS - len(rows)))[None])


@pytest.mark.parametrize("run", RUNS)
def test_a_whole_run_ends_at_the_latents_of_the_reference(run: str) -> None:
    settings: dict[str, Any] = RUNS[run]
    noise = torch.randn(settings["shape"], generator=torch.Generator().manual_seed(settings["noise_seed"]))[None]
    torch.testing.assert_close(noise.flatten()[:3], torch.tensor(settings["first_of_noise"]))
    model, known = golden_model(settings["model"], text_len=TEXT_ROWS), TENSORS.get(f"{run}.known")
    objective = ShiftedFlow(ShiftedFlowConfig(shift=settings["shift"]), patch_size=2)
    solver = objective.solver(SOLVERS[settings["solver"]], STEPS)
    grid = objective.solver_grid(solver, STEPS, tuple(settings["shape"]))
    if "sigmas" in settings:  # diffusers shifts Euler's times twice
        grid = objective.noise_time * torch.tensor(settings["sigmas"])

    def velocity(x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        if known is not None:
            made = torch.arange(x.shape[2]) > 0
            conditions = conditions.updated(x_mask=made.repeat(len(x), 1))
        return objective.velocity(model(x, t, conditions), x, t)

    def hold(x: Tensor, t: Tensor) -> Tensor:
        return torch.cat([known, x[:, :, 1:]], dim=2)

    branches = {PROMPT: text(f"{settings['model']}.positive"), NEGATIVE: text(f"{settings['model']}.negative")}
    guided = Guided(velocity, branches, GuidanceScales(settings["guidance"]), STEPS)
    latents = solver.sample(guided, noise, grid, hold=None if known is None else hold)
    expected = TENSORS[f"{run}.final"]
    torch.testing.assert_close(latents.flatten()[::STRIDE], expected, rtol=0, atol=TOLERANCE)
