"""Peak memory per GPU during a training step, in bytes, part by part.

Of the master weights and their gradients (`Upkeep.master_bytes` a number), AdamW's two moments (`moments_bytes` for
both) and the EMA (float32) a rank holds the share that `parameters` counts. On top come, at the worst moment of the
step: weights gathered in the compute dtype and the buffers of their communication, and the activations, which `blocks`
counts. The moments are followed block by block, last to first, as backward does: when block i runs backward, the
activations of the blocks before it are still there (of a recomputed block its input and what its level saves, less
what is offloaded); gradients of the blocks behind it exist already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from longtake.models.build import block_counts
from longtake.plan.blocks import Block, Pass, count_blocks, saved_outputs
from longtake.plan.layout import FP32, Layout, MicroBatch
from longtake.plan.parameters import Weights, weights_of


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest GPU at the worst moment of a step."""

    weights: int  # masters of those that train, and those that do not
    gradients: int
    optimizer: int  # both moments of AdamW
    ema: int
    encoders: int  # frozen autoencoder and text encoders
    gathered: int  # weights in the compute dtype, and buffers that gather them and reduce gradients
    activations: int  # saved for backward or computed again, working space of backward, and the batch itself

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def parts(self) -> dict[str, int]:
        """Return the parts by name, in order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def forecast_memory(
    config: Any, batch: MicroBatch, layout: Layout, encoder_bytes: int = 0, error: float = 0.0
) -> Memory:
    """Bytes on the fullest GPU at the worst moment of a training step of micro-batches like `batch`.

    error: share by which `gathered` and `activations` are to be taken as more than forecast; what the others hold
    follows from shapes and is exact.
    """
    upkeep = layout.upkeep
    weights = weights_of(config, layout)
    owned = 0 if layout.offload else upkeep.master_bytes * weights.owned
    moments = [(0, 0, batch.encoding_bytes + batch.latent_bytes)]
    moments += [
        (gradients, gathered, activations + batch.waiting_bytes)
        for gradients, gathered, activations in (*_forward_and_backward(config, weights, batch, layout), (owned, 0, 0))
    ]
    if layout.micro_batches > 1:  # from the second micro-batch on all gradients of the first are there
        moments = [(owned, gathered, activations) for _, gathered, activations in moments]
    moments = [(exact, (1 + error) * gathered, (1 + error) * held) for exact, gathered, held in moments]
    gradients, gathered, activations = max(moments, key=sum)
    held = 0 if layout.offload else layout.denoisers
    moments_bytes = 0 if upkeep.moments_offloaded else int(upkeep.moments_bytes * weights.owned)
    average_bytes = FP32 * weights.owned if layout.ema and not upkeep.ema_offloaded else 0
    return Memory(
        weights=held * (owned + weights.frozen),
        gradients=gradients,
        optimizer=held * moments_bytes,
        ema=held * average_bytes,
        encoders=encoder_bytes,
        gathered=int(gathered),
        activations=int(activations + (1 + error) * batch.beside_bytes),
    )


NOTHING_AGAIN = Pass(0.0, 0.0, 0.0, 0.0)
_Moment = tuple[int, float, float]  # bytes of gradients, of gathered weights and buffers, of activations


def _forward_and_backward(config: Any, weights: Weights, batch: MicroBatch, layout: Layout) -> Iterator[_Moment]:
    """Yield the moments of one micro-batch that may be the worst: the end of forward, and two in backward of each
    block and of the rest: that of most activations, and that in which gradients are summed."""
    compute, alone = layout.compute_bytes, layout.weight_shards == 1
    gradient_bytes = 0 if layout.offload else layout.upkeep.master_bytes
    cast = layout.upkeep.master_bytes if layout.upkeep.master_bytes != layout.reduce_bytes else 0
    summed = layout.reduce_bytes + cast  # bytes of one number of a gradient that is added up over the shards
    counted = count_blocks(config, batch, layout)
    whole = [compute * unit.gathered + unit.codes for unit in weights.blocks]
    placed = placed_blocks(config, batch, layout)
    kept = sum(whole) if layout.zero == 2 else 0  # until their backward
    rest = compute * weights.rest.gathered + weights.rest.codes
    last = whole[-1] if whole else 0
    yield (
        0,
        rest + (kept or last * (1 if alone else 2)),
        sum(one.held for one in placed) + counted.final,
    )

    gradients, reducing, saved = 0, 0, sum(one.held for one in placed)
    for i in range(len(whole) - 1, -1, -1):
        unit, block = weights.blocks[i], placed[i].block
        before = 0 if alone or kept else sum(whole[max(0, i - layout.prefetch) : i])
        unsharded = kept or whole[i]
        coming = placed[i].host_bytes  # of the block before
        # worst: what the block has saved is there, and some of its gradients
        saved -= placed[i].held
        if not block.differentiated:
            yield 0, rest + unsharded + before, counted.given + saved + placed[i].working
            continue
        beside = counted.entry + saved
        yield gradients, rest + unsharded + before + reducing + block.made, beside + placed[i].working + coming
        # reduce: gradients are copied into a buffer and freed, then it is added up over the shards into another
        kept -= whole[i] if kept else 0
        reducing = layout.reduce_bytes * unit.trained
        buffers = reducing + max(compute * unit.trained, summed * unit.owned)
        yield gradients, rest + kept + before + buffers, beside + block.input
        gradients += gradient_bytes * unit.owned
    unit = weights.rest
    yield gradients, rest + reducing + compute * unit.trained, counted.entry
    buffers = layout.reduce_bytes * unit.trained + max(compute * unit.trained, summed * unit.owned)
    yield gradients, rest + buffers, counted.entry


@dataclass(frozen=True)
class Placed:
    """A block as a layout runs it."""

    block: Block
    recomputed: bool  # all of it but what it saves, so that the compiler has no choice
    saved: float  # bytes from forward to backward
    again: Pass  # that backward repeats of its forward
    host_bytes: float  # of what it saves, offloaded to the host

    @property
    def held(self) -> float:
        """Bytes on the GPU from forward to backward."""
        return self.saved - self.host_bytes

    @property
    def working(self) -> float:
        """Bytes at the worst moment of its backward: all that an eager block saves is there where it is recomputed."""
        return self.block.working - (0.0 if self.recomputed else self.block.fused)


def placed_blocks(config: Any, batch: MicroBatch, layout: Layout) -> list[Placed]:
    """Return the blocks of a micro-batch, in the order of the forward; those alike are one object."""
    counts, level, room = block_counts(config), layout.level, layout.buffer_bytes
    first = layout.remat or (0,) * len(counts)
    outputs = {} if level in ("none", "full") else saved_outputs(config, level, layout.tensor)
    counted = [count_blocks(config, batch, layout.unrecomputed), count_blocks(config, batch, layout)]
    both, placed = zip(*(of.blocks for of in counted), strict=True), []
    alike: dict[tuple[Any, ...], Placed] = {}
    for blocks, count, num in zip(counts, counts.values(), first, strict=True):
        for place, pair in zip(range(count), both, strict=False):
            has_level = place < num and level != "none"
            block, host_bytes = pair[has_level], 0.0
            if not has_level:
                pieces, again = [block.saved], NOTHING_AGAIN
            elif isinstance(level, float):
                pieces, again = [block.saved], block.again
            elif level == "full":
                pieces, again = [block.input], block.forward
            else:
                num_bytes, again = block.selective(outputs[blocks])
                pieces = [block.input, num_bytes]
            for piece in pieces if has_level else ():
                host_bytes += piece if host_bytes + piece <= room else 0
            room -= host_bytes
            key = id(block), has_level, host_bytes
            if key not in alike:
                recomputed = has_level and not isinstance(level, float)
                alike[key] = Placed(block, recomputed, sum(pieces), again, host_bytes)
            placed.append(alike[key])
    return placed
