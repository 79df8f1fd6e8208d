"""The constants by which slots are balanced: given, taken from the model's FLOPs, or measured before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from longtake.buckets.mix import CostModel, fit_cost
from longtake.contracts import Bucket, UserError
from longtake.parallel.degrees import BucketPeers
from longtake.parallel.world import World
from longtake.plan.timing import clock
from longtake.system.build import System
from longtake.train.config import RunConfig

MOST_BUCKETS = 5  # measured: the smallest, the largest and those between them
_REPEATS = 2  # timed runs of each, after one that is not; the faster counts


def cost_model(
    config: RunConfig, system: System, slots_per_step: int, position: dict | None, world: World, peers: BucketPeers
) -> CostModel:
    """Given constants, else those the run began with (`position`: of its checkpoint), else new ones.

    All slots of a step count as side by side, so that the order is the same on any number of ranks. Raises `UserError`
    where a run that is to repeat itself would go by what it measures.
    """
    wanted, kept = config.dataset.cost, (position or {}).get("cost")
    if isinstance(wanted, tuple):
        constants = wanted
    elif kept is not None:
        try:
            return replace(CostModel.from_json(kept), side_by_side=slots_per_step)
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(
                "run.json of the checkpoint: data.cost: expected the cost model of a run, got "
                f"{repr(kept)[:60]}; the checkpoint is damaged, choose another one"
            ) from error
    else:
        if wanted is None:
            stills = _stills(config.size_divisor, (8, 32, 128))
            fitted = fit_cost([system.tokens(still) for still in stills], [system.flops(still) for still in stills])
        elif config.deterministic:
            raise UserError(
                'dataset.cost = "measure": the order would follow from times, and deterministic = True times nothing; '
                "leave it out, for costs by FLOPs, or give three numbers"
            )
        else:
            fitted = measure_cost(system, config.bucket_rule.buckets, world, peers)
        constants = tuple(float(f"{constant:.6g}") for constant in fitted)
    return CostModel(*constants, system.latent, config.model.patch[1], slots_per_step)


def measure_cost(
    system: System, buckets: Sequence[Bucket], world: World, peers: BucketPeers
) -> tuple[float, float, float]:
    """Measure `(a, b, c)` of a + b L + c L² seconds for a sample of L video tokens, from a few buckets run forward and
    back.

    Each is encoded (where the encoders are here), predicted and differentiated as in training, on dummy pixels; the
    slowest rank counts, so all have the same constants. Stills join in where the buckets have fewer than three sizes.
    Weights stay as they are, gradients are freed. A bucket runs at its own sequence degree (`peers`); where n of its
    micro-batches run side by side, one of them costs 1/n of the time.
    """
    whole = peers.mesh.sequence
    by_tokens = {system.tokens(one.shape): (one.shape, one.batch_size, peers.degree(one)) for one in buckets}
    if len(by_tokens) < 3:
        for still in _stills(system.config.size_divisor, (2, 4, 8)):
            by_tokens.setdefault(system.tokens(still), (still, 1, whole))
    sizes, seconds = sorted(by_tokens), []
    count = min(MOST_BUCKETS, len(sizes))
    sizes = [sizes[place * (len(sizes) - 1) // (count - 1)] for place in range(count)]
    for size in sizes:
        shape, batch_size, degree = by_tokens[size]
        peers.use(degree)
        seconds.append(_seconds(system, shape, batch_size) * degree / whole / batch_size)
    slowest = [max(of_ranks) for of_ranks in zip(*world.gather(seconds), strict=True)]
    return fit_cost(sizes, slowest)


def _stills(divisor: int, sides: Sequence[int]) -> list[tuple[int, int, int]]:
    return [(1, side * divisor, side * divisor) for side in sides]


def _seconds(system: System, shape: tuple[int, int, int], batch_size: int) -> float:
    """Return the time of one micro-batch forward and backward on this rank."""
    video = torch.zeros(batch_size, 3, *shape, dtype=torch.uint8)
    times = []
    for _ in range(1 + _REPEATS):
        start = clock(system.device)
        if system.encoders is not None:
            with torch.no_grad():
                system.encoders.posterior(video)
        run_dummy(system, shape, batch_size)
        times.append(clock(system.device) - start)
    return min(times[1:])


def run_dummy(system: System, shape: tuple[int, int, int], batch_size: int) -> None:
    """Forward and backward of a micro-batch of zeros; its gradients are freed."""
    latents = torch.zeros(batch_size, *system.latent(*shape), device=system.device)
    t = torch.full((batch_size,), 0.5, device=system.device)
    system.denoiser(latents, t, system.example_conditions(shape, batch_size)).float().square().mean().backward()
    system.denoiser.zero_grad(set_to_none=True)
