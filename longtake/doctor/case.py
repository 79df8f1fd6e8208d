"""The run that is examined: its config, a few of its clips, and its model at chosen times, captions and latents."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longtake.checkpoint.state import Clock, RunState
from longtake.contracts import Batch, Conditions, Noised, Slot, UserError
from longtake.data.loading.dataset import SlotDataset
from longtake.data.tables.mix import open_clips
from longtake.diffusion.dropout import drop_text
from longtake.doctor.measures import Line, errors, quantile
from longtake.parallel.mesh import Mesh
from longtake.parallel.world import World
from longtake.system.build import System, build_system, with_low_noise
from longtake.system.examples import CleanExample, KnownDraw, clean_example, kinds_apart
from longtake.train.config import RunConfig
from longtake.train.inputs import RunData, Table, open_latents, open_stream

QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the law of training times: the noise levels that are looked at
FEW = QUANTILES[1], QUANTILES[3]  # where many alternatives are tried
ChangeConditions = Callable[[Conditions], Conditions]


@dataclass(frozen=True)
class Shot:
    """What the denoiser saw and said, and the truth."""

    prediction: Tensor
    noised: Noised
    line: Line
    clean: Tensor

    @property
    def cleaned(self) -> Tensor:
        """The clean latents as the model sees them."""
        return self.line.clean(self.prediction, self.noised.x.float())

    def skill(self, line: Line | None = None) -> Tensor:
        """Return the error of the clean latents over that of the guess from mean and spread, of each clip [B]: below
        1 the model knows more than these. `line`: of another kind of prediction."""
        x, clean = self.noised.x.float(), self.clean
        own = errors((line or self.line).clean(self.prediction, x), clean)
        return own / errors(self.line.guess(clean, x), clean).clamp_min(1e-12)


@dataclass
class Case:
    """The run's parts. `batch`: some clips of one bucket; `trained`: there are weights that have learned something."""

    config: RunConfig
    system: System
    world: World
    table: Table
    dataset: SlotDataset
    slot: Slot
    batch: Batch
    size: int  # samples that the denoiser is given at once, as in training
    trained: bool

    @property
    def count(self) -> int:
        return len(self.slot.rows)

    @cached_property
    def nothing(self) -> Conditions:
        """The conditions that stand for no text."""
        return self.system.embed_nothing()

    @cached_property
    def clean(self) -> CleanExample:
        """The clips' latents and conditions."""
        return self.knowing(self.kinds)

    def knowing(self, kinds: Mapping[str, float] | None) -> CleanExample:
        """Return the same where places are known by these kinds."""
        weights = torch.ones(self.count, device=self.system.device)
        draw = KnownDraw.create(self.system.law, kinds, self.system.latent)
        known = {} if draw is None else draw(self.batch.choices, self.batch.bucket.shape)
        return clean_example(self.system, replace(self.batch, known=known), self.nothing, weights)

    @property
    def latents(self) -> Tensor:
        """float32 [B, C, F, h, w]."""
        return self.clean.latents

    @property
    def text(self) -> Conditions:
        """Conditions of the clips' captions."""
        names = {text.condition for text in self.config.family.texts}
        found = self.clean.conditions
        return Conditions({name: found[name] for name in names}, {n: m for n, m in found.masks.items() if n in names})

    @property
    def no_text(self) -> Conditions:
        """The same of no caption."""
        always = {name: torch.zeros(self.count) for name in self.text}
        return drop_text(self.text, self.nothing, always, dict.fromkeys(always, 1.0))

    def scale_times(self, factor: float) -> str:
        """Return the assignment that makes latents so many times as large, as a user writes it."""
        for key in ("scale_factor", "scaling_factor"):
            if (scale := getattr(self.config.ae, key, None)) is not None:
                return f"ae.{key} = {scale * factor:.3g}"
        return f"{factor:.3g} times today's"

    @property
    def kinds(self) -> Mapping[str, float] | None:
        """Kinds of known places to train on, where clips without any are none of the run's."""
        kinds = self.config.condition_config
        if kinds is None or kinds.get(self.config.family.kind_of_nothing) or not self.batch.choices:
            return None
        return None if kinds_apart(self.config, kinds, self.system.latent) else kinds

    def level(self, share: float) -> float:
        """Return the noise level below which a share of those in training lie, for clips of this bucket."""
        objective = self.system.whole_objective
        drawn = torch.tensor([quantile(objective.timestep, share)])
        times = objective.times(drawn, tuple(self.latents.shape[1:]), self.batch.bucket.shape)
        return float(times) / objective.noise_time

    @torch.no_grad()
    def shot(
        self,
        level: float,
        latents: Tensor | None = None,
        text: Conditions | None = None,
        told: float | None = None,
        changed: ChangeConditions | None = None,
        clean: CleanExample | None = None,
    ) -> Shot:
        """Return the denoiser's word at a noise level, with the samples' own noise. `told`: the time that it is told
        instead; `changed`: other conditions; `clean`: another example of the clips."""
        clean = self.clean if clean is None else clean
        latents, text = clean.latents if latents is None else latents, self.text if text is None else text
        given = clean.conditions.updated(text.masks, **text)
        clean = replace(clean, latents=latents, conditions=given if changed is None else changed(given))
        noised, conditions = clean.noised(self.system, level=level)
        times = noised.t if told is None else torch.full_like(noised.t, told)
        denoiser = self.system.at(noised.t).denoiser
        found = [
            denoiser(noised.x[part], times[part], conditions.map(lambda tensor, part=part: tensor[part]))
            for part in self.parts()
        ]
        return Shot(torch.cat(found).float(), noised, Line.at(self.system.objective, float(noised.t[0])), latents)

    def parts(self) -> Iterator[slice]:
        """Return the clips in turns of as many as a micro-batch has."""
        return (slice(start, start + self.size) for start in range(0, self.count, self.size))

    def losses(self) -> list[float]:
        """Return the objective's loss at each noise level, the mean over the clips."""
        shots = (self.shot(self.level(share)) for share in QUANTILES)
        return [float(self.system.objective.loss(shot.prediction, shot.noised).mean()) for shot in shots]


def open_case(config: RunConfig, world: World, mesh: Mesh, clips: int, trained: bool) -> Case:
    """Build the system of a run as it starts and read some clips of the bucket that most of its clips are in, of
    videos where there are any. Raises `UserError`."""
    table = open_clips(config.dataset, config.sample_rules.columns)
    data = RunData(table, open_latents(config, table, world))
    system = build_system(config, mesh, world, None if data.latents is None else data.latents.facts)
    if config.low_noise is not None:
        system = with_low_noise(system, world, trained=True)
    with tempfile.TemporaryDirectory() as folder:
        stream = open_stream(config, system, data, RunState(Clock()), world, Path(folder), lambda line: None)
        order = stream.plan(0, None)
        slot = _some_clips([slot for number in range(min(order.num_steps, 400)) for slot in order.step(number)], clips)
        size = slot.bucket.batch_size
        dataset = stream.loader.source
        stream.loader.close()
    slot = replace(slot, bucket=replace(slot.bucket, batch_size=len(slot.rows)))
    batch = dataset[slot]
    if not (good := np.flatnonzero(batch.weights.numpy())).size:
        raise UserError(f"{batch.faults[0].path}: cannot be loaded ({batch.faults[0].reason}), as none of the clips")
    if batch.faults:
        slot = replace(slot, **{name: getattr(slot, name)[good] for name in ("rows", "samples", "keys", "weights")})
        slot = replace(slot, bucket=replace(slot.bucket, batch_size=len(good)))
        batch = replace(dataset[slot], faults=batch.faults)
    return Case(config, system, world, table, dataset, slot, batch, size, trained)


def _some_clips(slots: list[Slot], count: int) -> Slot:
    """So many samples of one bucket."""
    by_bucket: dict[str, list[Slot]] = {}
    for slot in slots:
        by_bucket.setdefault(slot.bucket.name, []).append(slot)
    most = max(by_bucket.values(), key=lambda of: (of[0].bucket.num_frames > 1, len(of)))
    names = "rows", "samples", "keys", "weights"
    columns = {name: np.concatenate([getattr(slot, name)[slot.weights > 0] for slot in most]) for name in names}
    return replace(most[0], **{name: values[:count] for name, values in columns.items()}, number=0, num_slots=1)
