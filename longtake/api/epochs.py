"""`batches`: an epoch of a run, in the order and with the random numbers of its training."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from longtake.api.models import one_device, one_process
from longtake.api.runs import Run
from longtake.checkpoint.state import Clock, RunState
from longtake.contracts import Batch, UserError
from longtake.data.latents.source import EncoderFacts
from longtake.diffusion.objective import Objective, build_objective
from longtake.models.build import build_denoiser
from longtake.parallel.mesh import Mesh
from longtake.parallel.world import World
from longtake.system.build import System
from longtake.system.encoders import device_dtype
from longtake.track.progress import make_console
from longtake.train.config import RunConfig
from longtake.train.inputs import RunData, open_latents, open_stream, open_tables
from longtake.train.stream import StepInput, StepStream


class Epoch:
    """The batches of one epoch, and the optimizer steps that training would group them into.

        for step in longtake.batches(run).steps():
            for batch in step.batches:
                (model.loss(batch) / step.loss_divisor).backward()

    Iterating starts the epoch from its first batch each time. Made by `longtake.batches`.
    """

    def __init__(self, run: Run, epoch: int, objective: type[Objective] | None) -> None:
        self.run = run
        self.epoch = epoch
        self._objective = objective

    def __iter__(self) -> Iterator[Batch]:
        """Yield the micro-batches, on the run's device."""
        for step in self.steps():
            yield from step.batches

    def steps(self) -> Iterator[StepInput]:
        """Yield the steps: `slots` with the sample keys, `loss_divisor`, and `batches`, an iterator to be used up."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="longtake-epoch-")))
            config = self.run.config
            with one_process(config, "longtake.batches") as world:
                stream = _open_stream(config, world, folder, self._objective)
            stack.callback(stream.loader.close)
            yield from stream.steps(stream.plan(self.epoch, None), 0, self.epoch + 1)


def batches(run: Run, epoch: int = 0, objective: type[Objective] | None = None) -> Epoch:
    """Return the batches of an epoch exactly as `run.train()` would see them on one process: order, buckets and random
    draws.

        for batch in longtake.batches(run):
            print(batch.bucket.name, batch.text)

    No model is built. Clips that cannot be read have weight 0, as in training. `objective`: as for `Run.train`, whose
    random draws the batches then have. Raises `Error` for a mistake in the run when the iteration begins, for an epoch
    that the run does not have, and for `dataset.latents = "auto"`.
    """
    if epoch < 0:
        raise UserError(f"epoch = {epoch}: expected 0 or more; epochs count from 0")
    return Epoch(run, epoch, objective)


def _open_stream(config: RunConfig, world: World, folder: Path, objective: type[Objective] | None) -> StepStream:
    """Return the steps of a run from its start on; `folder` takes the list of clips that cannot be read."""
    if config.dataset.latents == "auto":
        raise UserError(
            'dataset.latents = "auto": expected a folder or None; write the store with `longtake data encode` and name '
            "its folder"
        )
    config = one_device(config)
    table, held_out = open_tables(config)
    data = RunData(table, open_latents(config, table, world), held_out)
    system = _without_weights(config, world, data, objective)
    console = make_console()
    state = RunState(Clock())
    return open_stream(config, system, data, state, world, folder, lambda line: console.print(line, markup=False))


def _without_weights(config: RunConfig, world: World, data: RunData, objective: type[Objective] | None) -> System:
    """Return a system that knows shapes, draws and costs, and can compute nothing: its denoiser is on the
    meta device."""
    if config.dataset.cost == "measure":
        raise UserError(
            'dataset.cost = "measure": the order of each launch follows from its own times; leave it out, for costs by '
            "FLOPs, or give three numbers"
        )
    with torch.device("meta"):
        denoiser = build_denoiser(config.model)
    facts = None if data.latents is None else data.latents.facts
    if facts is None:
        facts = EncoderFacts(config.ae.latent, config.text_length, {}, config.ae.is_random)
    section = config.objective
    kind = build_objective if objective is None else objective
    return System(
        config=config,
        mesh=Mesh.create(config.parallel, world),
        device=world.device,
        dtype=device_dtype(config.dtype, world.device),
        denoiser=denoiser,
        encoders=None,
        facts=facts,
        objective=kind(section, config.model.patch[1], config.quirks),
        law=config.known_law,
    )
