"""The loss of held-out clips in the course of a run: by bucket and noise level, with the same noise at all steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from longtake.buckets.order import PassOrder
from longtake.evaluate.heldout import level_losses
from longtake.parallel.world import World
from longtake.system.build import System
from longtake.train.config import RunConfig
from longtake.train.experts import EXPERTS
from longtake.train.stream import StepStream

Sums = dict[str, np.ndarray]  # bucket -> float64 [1 + levels]: clips, and the sums of their losses


@dataclass(frozen=True)
class HeldOut:
    """The held-out clips of a run, and how their loss is measured."""

    config: RunConfig
    system: System
    stream: StepStream
    order: PassOrder
    world: World

    def losses(self, beat: Callable[[float], None], stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Return the losses under the weights of the moment, as `summary` gives them, and `measured`, which is
        another where other clips or levels are measured; None where `stop` says so on some rank. Every rank makes as
        many forwards; `beat` gets the share that is done after each of its steps. Collective."""
        section, config, peers = self.config.validation, self.config, self.stream.peers
        assert section is not None, "a run without validations"
        sums: Sums = {}
        keys = set[int]()
        nothing = self.system.embed_nothing()
        try:
            for number, step in enumerate(self.stream.steps(self.order, 0, epochs=1), 1):
                for turn, batch in zip(step.turns, step.batches, strict=True):
                    peers.use(peers.degree(batch.bucket))
                    found = level_losses(self.system, batch, nothing, section.levels, config.no_i2v_ref_loss)
                    if turn.number is not None:
                        own = [float(batch.weights.count_nonzero()), *found.double().sum(1).tolist()]
                        sums[batch.bucket.name] = sums.get(batch.bucket.name, 0.0) + np.array(own)
                        keys.update(batch.keys[batch.weights.cpu().numpy() > 0].tolist())
                beat(number / self.order.num_steps)
                if any(self.world.gather(stop())):
                    return None
        finally:
            self.stream.loader.close()
        every = sorted(set().union(*self.world.gather(keys)))
        measured = hashlib.sha256(repr((every, section.levels)).encode()).hexdigest()[:16]
        found = summary(self.world.gather(sums), section.levels)
        if self.system.low_noise is not None:
            found["experts"] = {f"{level:g}": self._expert(level) for level in section.levels}
        return {"measured": measured, **found}

    def _expert(self, level: float) -> str:
        """Return the name of the denoiser that works at a noise level."""
        return EXPERTS[0 if self.system.is_high(self.system.objective.time_at(level)) else 1]


def summary(of_ranks: Sequence[Sums], levels: Sequence[float]) -> dict[str, Any]:
    """Return the mean loss over all clips and levels, that of each level, and the same of each bucket."""
    buckets: Sums = {}
    for sums in of_ranks:
        for name, own in sums.items():
            buckets[name] = buckets.get(name, 0.0) + own
    buckets = {name: own for name, own in sorted(buckets.items()) if own[0] > 0}
    whole = sum(buckets.values(), np.zeros(1 + len(levels)))
    return {**_means(whole, levels), "buckets": {name: _means(own, levels) for name, own in buckets.items()}}


def _means(sums: np.ndarray, levels: Sequence[float]) -> dict[str, Any]:
    means = (sums[1:] / max(sums[0], 1.0)).tolist()
    of_levels = {f"{level:g}": mean for level, mean in zip(levels, means, strict=True)}
    return {"clips": int(sums[0]), "loss": float(np.mean(means)), "levels": of_levels}


def curves(found: Mapping[str, Any], prefix: str = "validation/") -> Iterator[tuple[str, float]]:
    """Yield the figures of a summary by the names of their curves."""
    yield f"{prefix}loss", found["loss"]
    names = found.get("experts", {})
    for level, value in found["levels"].items():
        yield f"{prefix}loss/level {level}" + (f" {names[level]}" if level in names else ""), value
    yield from ((f"{prefix}loss/{name}", of["loss"]) for name, of in found["buckets"].items())
