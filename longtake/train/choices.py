"""What a launch chooses by free memory or by FLOPs: rank 0 chooses, all ranks take it, and `run.json` keeps it."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from longtake.buckets import PassOrder
from longtake.contracts import Bucket
from longtake.models import block_counts
from longtake.parallel import (
    Budget,
    EntryKey,
    World,
    budget_json,
    budgets_words,
    read_budget,
    used_levels,
)
from longtake.parallel.compile import STATIC_SHAPES
from longtake.plan.machine import Machine
from longtake.plan.memory import recomputed
from longtake.plan.work import read_layout, read_work
from longtake.system import System, compiles
from longtake.train.config import RunConfig
from longtake.train.cost import run_dummy
from longtake.train.stream import StepStream

Found = Mapping[str, Any]
_CHANGED = "the run's dtype, compile, mesh, model, encoders or buckets have changed"


class Choices:
    """Each choice by its name; `kept`: those of the launch before this one.

    A choice holds on GPUs of one kind with one set of versions; elsewhere it is made again, and a line says so.
    """

    def __init__(self, world: World, kept: Mapping[str, Found], say: Callable[[str], None]) -> None:
        self.made: dict[str, Found] = dict(kept)
        self._world, self._kept, self._say = world, kept, say
        self._machine = world.on_main(lambda: machine_facts(world.device))

    def take(self, name: str, choose: Callable[[], Found], basis: str = "") -> Found:
        """What `choose` finds on rank 0, unless it was found before; `basis`: what it follows from in the run itself.
        Collective."""
        before = self._kept.get(name) or None
        if before is not None and not isinstance(before.get("machine"), dict):
            before = None  # a record that no launch has written
        if before is not None and (before["machine"], before.get("basis", basis)) == (self._machine, basis):
            found = before
        else:
            found = {**self._world.on_main(choose), "machine": self._machine, **({"basis": basis} if basis else {})}
            if before is not None and self._world.is_main and before["machine"] == self._machine:
                self._say(f"{name}: chosen anew: {_CHANGED}")
            elif before is not None and self._world.is_main:
                then, now = (", ".join(f"{key} {of[key]}" for key in of) for of in (before["machine"], self._machine))
                self._say(f"{name}: chosen anew on {now}; before it was {then}")
        self.made[name] = found
        return found


def machine_facts(device: torch.device) -> dict[str, str]:
    """The device and the versions for which a choice holds."""
    facts = {"device": device.type, "torch": torch.__version__}
    if device.type == "cuda":
        facts |= {"device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    return facts


def settle_blocks(
    config: RunConfig, world: World, choices: Choices, say: Callable[[str], None]
) -> tuple[RunConfig, dict[EntryKey, Budget]]:
    """The run with `compile` decided, and the budgets of its entries. Collective."""
    compiled, why = compiles(config, world)
    if why is not None:
        say(why)
    config = config.model_copy(update={"compile": compiled})
    return config, choose_budgets(config, world, choices, say)


def choose_budgets(
    config: RunConfig, world: World, choices: Choices, say: Callable[[str], None]
) -> dict[EntryKey, Budget]:
    """Where `model.grad_ckpt_budget` is "auto", on CUDA: the largest budget of each entry of the bucket table with
    which a step fits the memory that is free on every GPU now, one for all blocks, or a larger one for the last ones.
    What compiled blocks keep changes how they round: with `deterministic` they fill the memory that a GPU has, whatever
    of it is free. Collective."""
    if config.model.grad_ckpt_budget != "auto" or not config.model.grad_ckpt_settings or world.device.type != "cuda":
        return {}
    node = world.node_size if world.size % world.node_size == 0 else world.size
    layout = read_layout(config, world.size, node)
    free, whole = map(min, zip(*world.gather(torch.cuda.mem_get_info(world.device)), strict=True))
    repeats = config.compile and config.deterministic
    room = int((whole if repeats else free) * (1 - Machine.headroom))

    def choose() -> Found:
        work, budgets = read_work(config, node), {}
        for bucket in work.entries:
            budget = work.budget(bucket, replace(layout, room=room))
            budgets.setdefault(bucket.resolution, {})[str(bucket.num_frames)] = budget_json(budget)
        return {"budgets": budgets, "room": room}

    encoders = [getattr(config, name) for name in ("ae", *(text.section for text in config.family.texts))]
    sources = config.dataset.stored, config.dataset.latents_missing  # which decide whether there are encoders
    basis = _basis(layout, config.model, config.bucket_rule.buckets, encoders, sources)
    found = choices.take("kept outputs", choose, basis)
    budgets = {(name, int(t)): read_budget(of) for name, own in found["budgets"].items() for t, of in own.items()}
    said = budgets_words({f"{name}/{t}f": of for (name, t), of in budgets.items()}, [*block_counts(config.model)])
    say(f"{said}, as {found['room'] / 2**30:.1f} GiB allow")
    if repeats and free < room:
        say(f"kept outputs: for all a GPU has, as deterministic = True asks, though {free / 2**30:.1f} GiB are free")
    return budgets


def choose_graphs(
    system: System, stream: StepStream, order: PassOrder, choices: Choices, say: Callable[[str], None]
) -> None:
    """Which shapes get static graphs. With `compile_dynamic = "auto"` the `STATIC_SHAPES` pairs of (samples, tokens)
    that take most FLOPs of a pass; all others share a dynamic graph, which runs once on zeros at its largest shape
    here, for Inductor tunes it for the first sizes it sees. So do the graphs of single samples, of stills and of other
    sequence degrees. With False and more than `compile_limit` pairs: the costliest ones, and others run uncompiled,
    whichever come first in a launch. Collective."""
    dynamic, limit = system.config.compile_dynamic, system.config.compile_limit
    peers, rule = stream.peers, stream.inputs.rule
    pair = {bucket: (bucket.batch_size, system.tokens(bucket.shape)) for bucket in rule.buckets}
    few = len(set(pair.values())) <= limit
    if not system.config.compile or dynamic is True or (not dynamic and few):
        return

    def choose() -> Found:
        flops: Counter[tuple[int, int]] = Counter()
        for line in order.report.buckets:
            flops[pair[line.bucket]] += line.micro_batches * line.bucket.batch_size * system.flops(line.bucket.shape)
        if not dynamic:  # behind them those that may come in a later pass
            flops.update(dict.fromkeys(pair.values(), 0))
        static = flops.most_common(STATIC_SHAPES if dynamic else limit)
        share = sum(of for _, of in static) / max(1, flops.total())
        return {"static": [list(one) for one, _ in static], "share": share}

    found = choices.take("graphs", choose, _basis(system.config.model, rule.buckets, *(() if dynamic else (limit,))))
    system.mode.static_sizes = frozenset(map(tuple, found["static"]))
    largest: dict[Any, Bucket] = {}  # by what has a graph of its own: a budget, a degree, sizes of one
    again = recomputed(system.config.model, system.config.model.grad_ckpt_settings)
    counted = [line.bucket for line in order.report.buckets if dynamic]
    for bucket in sorted(counted, key=lambda bucket: -math.prod(pair[bucket])):
        if pair[bucket] not in system.mode.static_sizes:
            system.use(bucket)
            alike = peers.degree(bucket), bucket.batch_size == 1, system.latent(*bucket.shape)[1] == 1
            for level in (None, *sorted(used_levels(system.mode.budget, again))):
                largest.setdefault((level, *alike), bucket)
    count, share = len(found["static"]), found["share"]
    rest = "; others run uncompiled" if not dynamic else ", one for all others" if largest else ""
    say(f"graphs of their own for {count} pairs of samples and tokens, {share:.0%} of a pass's FLOPs{rest}")
    for bucket in dict.fromkeys(largest.values()):
        peers.use(peers.degree(bucket))
        system.use(bucket)
        run_dummy(system, bucket.shape, bucket.batch_size)


def _basis(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
