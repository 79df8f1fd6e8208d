"""Choices of a launch by free memory: rank 0 chooses, all ranks take it, and `run.json` records it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from longtake.contracts import Bucket, UserError
from longtake.models.build import denoiser_class
from longtake.parallel.compile import STATIC_SHAPES
from longtake.parallel.degrees import EntryKey
from longtake.parallel.recomputation import NAMED_LEVELS, Level, level_and_counts, levels_text
from longtake.parallel.world import World
from longtake.plan.machine import Machine
from longtake.plan.work import read_layout, read_work
from longtake.system.build import compiles
from longtake.train.config import RunConfig

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
        """Return the result of `choose` on rank 0, or the earlier one if it still holds; `basis`: the facts of the run
        that it depends on. Collective."""
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
    """Return the device and the versions for which a choice holds."""
    facts = {"device": device.type, "torch": torch.__version__}
    if device.type == "cuda":
        facts |= {"device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    return facts


def settle_blocks(
    config: RunConfig, world: World, choices: Choices, say: Callable[[str], None]
) -> tuple[RunConfig, dict[EntryKey, Level]]:
    """Return the run with `compile` and `compile_dynamic` decided, and the levels of its entries. Collective."""
    compiled, why = compiles(config, world)
    if why is not None:
        say(why)
    dynamic = config.compile_dynamic
    if compiled and dynamic is None:
        dynamic, line = has_dynamic_sizes(config)
        say(line)
    config = config.model_copy(update={"compile": compiled, "compile_dynamic": dynamic})
    return config, choose_levels(config, world, choices, say)


def has_dynamic_sizes(config: RunConfig) -> tuple[bool, str]:
    """Return the default of `compile_dynamic` for a run's bucket table, and a line on it."""
    kind = denoiser_class(config.model)

    def shape(bucket: Bucket) -> tuple[int, int]:
        return bucket.batch_size, kind.tokens(config.model, config.ae.latent(*bucket.shape))

    count = len(set(map(shape, config.bucket_rule.buckets)))
    dynamic = count > STATIC_SHAPES
    rule = f"above {STATIC_SHAPES}" if dynamic else f"at most {STATIC_SHAPES}"
    return dynamic, f"compile_dynamic = {dynamic}: {count} shapes (batch x tokens) of the bucket table, {rule}"


def choose_levels(
    config: RunConfig, world: World, choices: Choices, say: Callable[[str], None]
) -> dict[EntryKey, Level]:
    """Choose the recomputation level where it is "auto", on CUDA: for each entry of the bucket table the cheapest with
    which a step fits the memory that is free on every GPU now. The level of compiled blocks changes how they round:
    with `deterministic` they may fill the memory that a GPU has, whatever of it is free. Collective."""
    if level_and_counts(config.model)[0] != "auto" or world.device.type != "cuda":
        return {}
    node = world.node_size if world.size % world.node_size == 0 else world.size
    layout = read_layout(config, world.size, node)
    free, whole = map(min, zip(*world.gather(torch.cuda.mem_get_info(world.device)), strict=True))
    repeats = config.compile and config.deterministic
    room = int((whole if repeats else free) * (1 - Machine.headroom))

    def choose() -> Found:
        work, levels = read_work(config, node), {}
        for bucket in work.entries:
            level = work.level(bucket, replace(layout, room=room))
            levels.setdefault(bucket.resolution, {})[str(bucket.num_frames)] = level
        return {"levels": levels, "room": room}

    encoders = [getattr(config, name) for name in ("ae", *(text.section for text in config.family.texts))]
    sources = config.dataset.stored, config.dataset.latents_missing  # which decide whether there are encoders
    basis = _basis(layout, config.model, config.bucket_rule.buckets, encoders, sources)
    found = choices.take("levels", choose, basis)
    levels, allowed = read_levels(found)
    text = levels_text({f"{name}/{frames}f": level for (name, frames), level in levels.items()})
    say(f"{text}, as {allowed / 2**30:.1f} GiB allow")
    if repeats and free < room:
        say(f"levels: for all a GPU has, as deterministic = True asks, though {free / 2**30:.1f} GiB are free")
    return levels


def read_levels(record: Found) -> tuple[dict[EntryKey, Level], int]:
    """Return the levels of a record by entry of the bucket table, and the bytes they were chosen for. Raises
    `UserError` for a record of run.json that no launch has written."""
    try:
        pairs = [(name, *pair) for name, by_frames in record["levels"].items() for pair in by_frames.items()]
        levels: dict[EntryKey, Level] = {(name, int(frames)): level for name, frames, level in pairs}
        if not set(levels.values()) <= set(NAMED_LEVELS):
            raise ValueError(f"a level is one of {', '.join(NAMED_LEVELS)}")
        return levels, int(record["room"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"run.json: the record levels cannot be read ({error}); remove it, and the levels are chosen again"
        ) from None


def _basis(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
