"""Fixes that make a run fit: each change that can be written into its config, and its cost in time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from operator import mul

from longtake.contracts import UserError
from longtake.models.build import block_counts
from longtake.parallel.config import divisors
from longtake.parallel.recomputation import NAMED_LEVELS, counts_setting, level_setting
from longtake.plan.blocks import count_blocks
from longtake.plan.layout import EIGHT_BIT_BYTES, Layout, Upkeep
from longtake.plan.machine import Machine
from longtake.plan.memory import placed_blocks
from longtake.plan.parameters import block_names
from longtake.plan.run import EntryPlan, RunPlan
from longtake.plan.speed import update_seconds
from longtake.plan.work import Work

_GIB = 2**30


@dataclass(frozen=True)
class Remedy:
    """A change under which every bucket fits."""

    words: str  # as it is written down
    slower: float  # GPU-seconds for a sample, over those of the run as it is, less 1; below 0: faster
    same_steps: bool  # whether the run makes the same steps as before, sample for sample


@lru_cache(maxsize=4)
def find_remedies(plan: RunPlan) -> list[Remedy]:
    """Return the changes that make a run fit, the cheapest first; those that leave its steps as they are come first.

    One change at a time; where none is enough, those that need several.
    """
    work, machine = plan.work, plan.machine
    offenders = plan.misfits
    if not offenders:
        return []
    before = _cost(plan, plan.layout)
    found = []
    for words, layout in _changes(plan):
        if _fits(work, layout, machine, offenders):
            same = layout.data_ranks == plan.layout.data_ranks or plan.work.config.slots_per_step is not None
            same = same and layout.upkeep.moments_bytes == plan.layout.upkeep.moments_bytes
            same = same and _slot_sizes(work, layout) == _slot_sizes(work, plan.layout)
            found.append(Remedy(words, _cost(plan, layout) / before - 1, same))
    found.sort(key=lambda remedy: (not remedy.same_steps, remedy.slower))
    smaller = _smaller_batches(offenders, work.rule.place)
    if smaller is not None:
        found.append(Remedy(smaller, 0.0, same_steps=False))
    return found


def refuse_misfits(plan: RunPlan) -> None:
    """Raise `UserError` for a run that cannot fit: where, how much it needs, and the cheapest change that would do."""
    if not plan.misfits:
        return
    worst = plan.misfits[0]
    said = (
        f"{plan.work.rule.place}.{worst.bucket.resolution}.{worst.bucket.num_frames}: a micro-batch of "
        f"{worst.bucket.batch_size} needs {gib(worst.memory.total)} a GPU, and one {plan.machine.gpu.name} has "
        f"{gib(plan.machine.usable_bytes)} for it"
    )
    remedies = find_remedies(plan)
    if not remedies:
        raise UserError(
            f"{said}; no change of remat, sharding, offload or batch size makes it fit on these GPUs: choose others by "
            f"--gpu, or leave this entry out of {plan.work.rule.place}"
        )
    best = remedies[0]
    said += f"; the cheapest change that fits: {best.words} ({pace(best.slower)})"
    other = next((remedy for remedy in remedies[1:] if not remedy.same_steps), None)
    if best.same_steps and other is not None:
        said += f", or {other.words}"
    raise UserError(said)


def gib(number: float) -> str:
    """Bytes as GiB, one decimal."""
    return f"{number / 2**30:.1f} GiB"


def pace(slower: float) -> str:
    """Describe how much slower it is."""
    share = round(100 * slower)
    return "as fast" if share == 0 else f"{abs(share)} % {'slower' if share > 0 else 'faster'} a GPU"


def _changes(plan: RunPlan) -> Iterator[tuple[str, Layout]]:
    """Yield changes of the config, in words and as the layout they make."""
    layout, worst = plan.layout, plan.misfits
    single = list(_single_changes(plan, worst))
    yield from single
    if any(_fits(plan.work, changed, plan.machine, worst) for _, changed in single):
        return
    everything = _all_blocks(plan)
    most = replace(layout, remat=everything, level="full", zero=3, shard=layout.data_ranks, replicate=1)
    words = f"model.grad_ckpt_settings = {everything}"
    if layout.level not in ("full", "auto"):
        words += f" with {level_setting('full')}"
    if layout.zero == 2:
        words += " with parallel.zero = 3"
    if layout.replicate > 1:
        words += f" with parallel.replicate = 1 and parallel.shard = {most.shard}"
    yield words, most
    for name, changed in _fewer_data_ranks(plan, most):
        yield f"{words} with {name}", changed
    yield from _stored_inputs(plan, most, f"{words} with ")
    for name, upkeep in _lighter_upkeep(most):
        yield f"{words} with {name}", replace(most, upkeep=upkeep)
    yield f"{words} with parallel.cpu_offload = True", replace(most, offload=True)
    for name, changed in _more_gpus(plan, most):
        yield f"{words} with {name}", changed


def _single_changes(plan: RunPlan, worst: tuple[EntryPlan, ...]) -> Iterator[tuple[str, Layout]]:
    layout = plan.layout
    for counts in _remat_counts(plan):
        changed = replace(layout, remat=counts, level="selective" if layout.level == "none" else layout.level)
        if _fits(plan.work, changed, plan.machine, worst):
            yield counts_setting(plan.work.model, counts), changed
            break
    yield from _levels(plan)
    yield from _stored_inputs(plan, layout, "")
    for name, upkeep in _lighter_upkeep(layout):
        yield name, replace(layout, upkeep=upkeep)
    if layout.zero == 2:
        yield "parallel.zero = 3", replace(layout, zero=3)
    for times in divisors(layout.replicate)[1:]:
        changed = replace(layout, replicate=layout.replicate // times, shard=layout.shard * times)
        yield f"parallel.replicate = {changed.replicate} and parallel.shard = {changed.shard}", changed
    yield from _fewer_data_ranks(plan, layout)
    yield from _raised_degrees(plan)
    if not layout.offload:
        yield "parallel.cpu_offload = True", replace(layout, offload=True)
    yield from _more_gpus(plan, layout)


def _levels(plan: RunPlan) -> Iterator[tuple[str, Layout]]:
    """All blocks recomputed, at the cheapest level that fits."""
    everything = _all_blocks(plan)
    has_all = _recomputed(plan) == everything
    for level in NAMED_LEVELS[1:]:
        changed = replace(plan.layout, remat=everything, level=level)
        if changed != plan.layout and _fits(plan.work, changed, plan.machine, plan.misfits):
            words = level_setting(level)
            yield words if has_all else f"model.grad_ckpt_settings = {everything} with {words}", changed
            return


def _stored_inputs(plan: RunPlan, layout: Layout, words: str) -> Iterator[tuple[str, Layout]]:
    """Yield the fix that offloads the inputs of recomputed blocks to CPU: the fewest GiB, in quarters of all, that
    suffice."""
    most = 0
    for entry in plan.misfits:
        own = layout.at_degree(plan.work.degree(entry.bucket, layout))
        endless = replace(own.least, buffer_bytes=1 << 60)
        placed = placed_blocks(plan.work.model, plan.work.micro_batch(entry.bucket), endless)
        most = max(most, int(sum(one.host_bytes for one in placed)))
    for num_bytes in sorted({-(-most * part // (4 * _GIB)) * _GIB for part in (1, 2, 3, 4)}):
        changed = replace(layout, buffer_bytes=num_bytes)
        if num_bytes > layout.buffer_bytes and _fits(plan.work, changed, plan.machine, plan.misfits):
            yield f"{words}model.grad_ckpt_buffer_size = {num_bytes // _GIB} * 2**30", changed
            return


def _lighter_upkeep(layout: Layout) -> Iterator[tuple[str, Upkeep]]:
    """Optimizer and average in less memory, or in the host's."""
    upkeep = layout.upkeep
    if layout.offload:
        return
    if layout.ema and not upkeep.ema_offloaded:
        yield "ema_offload = True", replace(upkeep, ema_offloaded=True)
    if not upkeep.moments_offloaded:
        if upkeep.moments_bytes > EIGHT_BIT_BYTES:
            yield 'optim.states = "8bit"', replace(upkeep, moments_bytes=EIGHT_BIT_BYTES)
        yield "optim.offload = True", replace(upkeep, moments_offloaded=True)


def _all_blocks(plan: RunPlan) -> tuple[int, ...]:
    return tuple(block_counts(plan.work.model).values())


def _recomputed(plan: RunPlan) -> tuple[int, ...]:
    """Blocks of each list that are computed again as it is."""
    return plan.layout.remat or (0,) * len(_all_blocks(plan))


def _remat_counts(plan: RunPlan) -> list[tuple[int, ...]]:
    """More blocks to compute again than now, the cheapest first."""
    work, longest = plan.work, max(plan.entries, key=lambda entry: entry.tokens)
    counted = count_blocks(work.model, work.micro_batch(longest.bucket), plan.layout.at_degree(longest.sequence))
    names = block_names(work.model)
    flops = {name.rpartition(".")[0]: block.forward.flops for name, block in zip(names, counted.blocks, strict=True)}
    costs = [flops.get(name, 0.0) for name in block_counts(work.model)]
    ranges = (range(least, most + 1) for least, most in zip(_recomputed(plan), _all_blocks(plan), strict=True))
    return sorted(product(*ranges), key=lambda counts: sum(map(mul, counts, costs)))[1:]


def _fewer_data_ranks(plan: RunPlan, layout: Layout) -> Iterator[tuple[str, Layout]]:
    """Sequence peers in the place of data ranks: each has fewer tokens of a micro-batch."""
    slots = layout.micro_batches * layout.data_ranks
    for times in divisors(layout.shard)[1:]:
        sequence = layout.sequence * times
        if sequence * layout.tensor > plan.machine.gpus_per_node:
            break
        changed = replace(layout, sequence=sequence, shard=layout.shard // times)
        if plan.work.config.slots_per_step is not None:
            changed = replace(changed, micro_batches=-(-slots // changed.data_ranks))
        yield f"parallel.sequence = {sequence}", changed
        if layout.bucket_sequence is None and len(plan.entries) > 1:
            words = f'parallel.sequence = {sequence} with parallel.bucket_sequence = "auto"'
            yield words, replace(changed, bucket_sequence="auto")


def _raised_degrees(plan: RunPlan) -> Iterator[tuple[str, Layout]]:
    """More of the sequence peers for the entries that do not fit: the fewest that suffice."""
    layout = plan.layout
    if layout.bucket_sequence == "auto":
        yield "parallel.bucket_sequence = None", replace(layout, bucket_sequence=None)
    if not isinstance(layout.bucket_sequence, Mapping):
        return
    words, given = [], {name: dict(lengths) for name, lengths in layout.bucket_sequence.items()}
    for entry in plan.misfits:
        name, num_frames = entry.bucket.resolution, entry.bucket.num_frames
        for degree in divisors(layout.sequence):
            given.setdefault(name, {})[num_frames] = degree
            changed = replace(layout, bucket_sequence=given)
            if degree > entry.sequence and _fits(plan.work, changed, plan.machine, (entry,)):
                words.append(f"parallel.bucket_sequence.{name}.{num_frames} = {degree}")
                break
    yield " and ".join(words), replace(layout, bucket_sequence=given)


def _more_gpus(plan: RunPlan, layout: Layout) -> Iterator[tuple[str, Layout]]:
    for doublings in range(1, 8):
        changed = replace(layout, shard=layout.shard << doublings)
        if changed.gpus > plan.machine.gpus_per_node and changed.gpus % plan.machine.gpus_per_node:
            continue
        if _fits(plan.work, changed, plan.machine, plan.misfits):
            yield f"--gpus {changed.gpus}", changed
            return


def _smaller_batches(offenders: tuple[EntryPlan, ...], place: str) -> str | None:
    """Return the batch sizes that fit, or None where not even one sample does."""
    if not all(entry.largest_batch for entry in offenders):
        return None
    places = [f"{entry.bucket.resolution}.{entry.bucket.num_frames} to {entry.largest_batch}" for entry in offenders]
    return f"batch sizes in {place} lowered (" + ", ".join(places) + ")"


def _fits(work: Work, layout: Layout, machine: Machine, entries: tuple[EntryPlan, ...]) -> bool:
    return all(work.memory(entry.bucket, layout).total <= machine.usable_bytes for entry in entries)


def _cost(plan: RunPlan, layout: Layout) -> float:
    """GPU-seconds for a sample: over the micro-batches of a pass where they are known, else the entries alike.

    Micro-batches that run side by side share the time of one.
    """
    if plan.report is not None and plan.report.buckets:
        lines = [(line.bucket, line.micro_batches) for line in plan.report.buckets]
    else:
        lines = [(entry.bucket, 1) for entry in plan.entries]
    update = update_seconds(plan.work.model, layout, plan.machine) / layout.micro_batches
    seconds = sum(
        count / plan.work.slot_size(bucket, layout) * (plan.work.time(bucket, layout, plan.machine).seconds + update)
        for bucket, count in lines
    )
    samples = sum(count * bucket.batch_size for bucket, count in lines)
    return seconds / samples * layout.sequence * layout.tensor


def _slot_sizes(work: Work, layout: Layout) -> list[int]:
    return [work.slot_size(bucket, layout) for bucket in work.entries]
