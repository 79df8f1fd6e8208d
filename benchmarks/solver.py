"""Solvers: the error of a sample against the steps taken, one call of the network a step.

python benchmarks/solver.py                 a mixture of Gaussians, whose velocity is known exactly
python benchmarks/solver.py --run FOLDER    also a trained model: the `run` folder of a finished `longtake demo`
python benchmarks/solver.py --tiny          a few steps, to see that it runs

Errors are root mean squares against the same flow in fine steps, over the root mean square of that. Where guidance
oscillates its schedule belongs to the number of steps, and the fine steps follow the same one. "euler steps" is the
least number tried with which Euler's error is no larger than that of ab2.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from machine import print_table, write_json
from torch import Tensor

from longtake.contracts import Conditions
from longtake.diffusion.guidance import NEGATIVE, PROMPT, GuidanceScales, Guided
from longtake.diffusion.solvers import AdamsBashforth2, Euler, Solver
from longtake.diffusion.timesteps import make_grid
from longtake.generate.run import open_system
from longtake.generate.sample import Request, pixel_shape, seeded_noise
from longtake.generate.source import resolve_source
from longtake.parallel.world import start_world

STEPS = (10, 15, 20, 30, 50, 75, 100, 150, 200, 300)
SHOWN = (10, 20, 30, 50)
FINE = 600  # steps of the reference
SOLVERS: dict[str, Solver] = {"euler": Euler(), "ab2": AdamsBashforth2()}
Velocity = Callable[[Tensor, Tensor, Conditions], Tensor]


@dataclass(frozen=True)
class Flow:
    """A model, its prompts and the noise to begin with."""

    name: str
    velocity: Velocity
    branches: dict[str, Conditions]
    noise: Tensor  # [B, C, F, h, w]


def mixture(count: int, width: int = 16, components: int = 8) -> Flow:
    """A mixture of Gaussians under the straight path; the prompt knows of two components, the negative of all."""
    draw = torch.Generator().manual_seed(0)
    means, std = 1.5 * torch.randn(components, width, generator=draw), 0.25

    def velocity(x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        flat, t = x.flatten(1)[:, None], t[:, None, None]
        away = flat - (1 - t) * means
        variance = (1 - t) ** 2 * std**2 + t**2
        odds = -away.square().sum(-1) / (2 * variance[..., 0]) + conditions["vector"].log()
        clean = means + (1 - t) * std**2 / variance * away
        noise = t / variance * away
        return ((noise - clean) * odds.softmax(1)[..., None]).sum(1).view_as(x)

    some = torch.tensor([1.0, 1.0] + [0.0] * (components - 2))
    branches = {
        PROMPT: Conditions(vector=some.expand(count, -1)),
        NEGATIVE: Conditions(vector=torch.ones(count, components)),
    }
    return Flow("mixture", velocity, branches, torch.randn(count, width, 1, 1, 1, generator=draw))


def demo(run: str, prompts: Sequence[str]) -> tuple[Flow, float]:
    """The trained model of a run, and its own shift."""
    source = resolve_source(run, [])
    option = source.config.sampling_option
    with start_world("cpu") as world:
        system = open_system(source, world, say=lambda line: None)
    shape = system.autoencoder.latent(*pixel_shape(system, option))
    x = torch.stack([seeded_noise(Request(text, seed).seed, shape) for seed, text in enumerate(prompts)])
    texts = {PROMPT: list(prompts), NEGATIVE: [""] * len(prompts)}
    branches = {name: system.embed(lines) for name, lines in texts.items()}

    def velocity(x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        return system.objective.velocity(system.denoiser(x, t, conditions), x, t)

    shift = option.flow_shift if isinstance(option.flow_shift, float) else 1.0
    return Flow("demo", velocity, branches, x), shift


def fine(flow: Flow, scales: GuidanceScales, grid: Tensor, num_fine: int) -> Tensor:
    """The flow in fine steps of the midpoint rule, each with its coarse step's scales.

    The rule never looks at t = 0, where a network that predicts the clean sample says nothing of the velocity.
    """
    num_steps = len(grid) - 1
    denoise = Guided(flow.velocity, flow.branches, scales, num_steps)
    x = flow.noise
    each = -(-num_fine // num_steps)
    for step in range(num_steps):

        def slope(x: Tensor, t: Tensor, step: int = step) -> Tensor:
            return denoise(x, t.expand(len(x)), step)

        h = (grid[step + 1] - grid[step]) / each
        for i in range(each):
            t = grid[step] + i * h
            x = x + h * slope(x + h / 2 * slope(x, t), t + h / 2)
    return x


@torch.no_grad()
def measure(flow: Flow, scales: GuidanceScales, shift: float, steps: Sequence[int], num_fine: int) -> dict[str, Any]:
    """Errors of each solver at each number of steps."""
    errors: dict[str, dict[int, float]] = {name: {} for name in SOLVERS}
    target = None
    for num_steps in steps:
        if target is None or scales.text_osci:
            dense = make_grid(num_steps if scales.text_osci else num_fine, shift)
            target = fine(flow, scales, dense, num_fine)
        denoise = Guided(flow.velocity, flow.branches, scales, num_steps)
        for name, solver in SOLVERS.items():
            found = solver.sample(denoise, flow.noise, make_grid(num_steps, shift))
            errors[name][num_steps] = ((found - target).square().mean() / target.square().mean()).sqrt().item()
    return {
        "model": flow.name,
        "guidance": scales.guidance,
        "oscillating": scales.text_osci,
        "shift": shift,
        "errors": errors,
    }


def rows_of(case: dict[str, Any]) -> list[tuple[str, ...]]:
    """The lines of the table for one case."""
    euler, ab2 = case["errors"]["euler"], case["errors"]["ab2"]
    rows = []
    for num_steps in [n for n in SHOWN if n in ab2]:
        enough = next((str(n) for n in euler if euler[n] <= ab2[num_steps]), f"> {max(euler)}")
        scale = f"{case['guidance']:g}" + (", oscillating" if case["oscillating"] else "")
        errors = (f"{euler[num_steps]:.2%}", f"{ab2[num_steps]:.2%}")
        rows.append((case["model"], scale, f"{case['shift']:g}", str(num_steps), *errors, enough))
    return rows


def main() -> None:
    """Measures every case and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="folder of a trained run of the demo")
    parser.add_argument("--tiny", action="store_true", help="few steps and samples")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    steps, num_fine = (STEPS[:4], 60) if arguments.tiny else (STEPS, FINE)
    flow = mixture(8 if arguments.tiny else 64)
    cases = []
    for guidance in (1.0, 3.0, 7.5):
        for shift in (1.0, 3.0, 6.0):
            cases.append(measure(flow, GuidanceScales(guidance), shift, steps, num_fine))
    cases.append(measure(flow, GuidanceScales(7.5, text_osci=True), 3.0, steps, num_fine))
    if arguments.run:
        prompts = ("a red circle moves left", "a blue square moves up")
        flow, shift = demo(arguments.run, prompts)
        for guidance in (1.0, 2.0, 5.0):
            cases.append(measure(flow, GuidanceScales(guidance), shift, [n for n in steps if n <= 100], num_fine // 4))
    head = ("model", "guidance", "shift", "steps", "error euler", "error ab2", "euler steps")
    print_table(head, [row for case in cases for row in rows_of(case)])
    write_json(arguments.json, "solver", {"tiny": arguments.tiny, "cases": cases})


if __name__ == "__main__":
    main()
