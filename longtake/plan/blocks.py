"""Memory, compute and communication of a denoiser's blocks in a micro-batch: traced on real ones, fitted for other
sizes.

One block of each kind runs forward and backward on meta tensors, cut for peers as in the run, at a few sizes; every
number that is seen follows for other sizes by a polynomial in samples, video tokens and the way they lie in frames.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from longtake.models.build import LatentSize, denoiser_class
from longtake.models.law import Law, fit
from longtake.parallel.recomputation import Level, Saved, saved_by_list
from longtake.plan.block_traces import LAUNCH, Point, TracedBlocks, first_of, one_of_each_kind
from longtake.plan.compiled import compiled_bytes, multiply_in_float8
from longtake.plan.layout import PLAIN, Layout, MicroBatch, Upkeep
from longtake.plan.parameters import meta_model
from longtake.plan.trace_cache import traced_before

# Points at which blocks are traced, by whether there is more than one sample and more than one frame: PyTorch takes
# other ways where a size is one. The later ones are for models with more terms than full attention has.
_POINTS: dict[tuple[bool, bool], tuple[Point, ...]] = {
    (True, True): (
        *((2, 4, 16, 16), (2, 8, 32, 32), (3, 8, 16, 16), (2, 16, 16, 16), (4, 4, 32, 32), (3, 12, 16, 32)),
        *((2, 16, 32, 16), (3, 6, 24, 24), (2, 12, 48, 16), (2, 24, 16, 32), (4, 8, 16, 48), (3, 16, 24, 32)),
        *((4, 12, 24, 24), (3, 4, 48, 16)),
    ),
    (True, False): ((2, 1, 32, 32), (2, 1, 16, 16), (3, 1, 48, 48), (2, 1, 64, 64), (4, 1, 32, 64), (3, 1, 32, 32)),
    (False, True): (
        *((1, 4, 16, 16), (1, 8, 32, 32), (1, 16, 16, 16), (1, 4, 32, 32)),
        *((1, 16, 32, 16), (1, 6, 24, 24), (1, 12, 48, 16), (1, 24, 16, 32), (1, 8, 16, 48), (1, 12, 32, 16)),
    ),
    (False, False): ((1, 1, 32, 32), (1, 1, 16, 16), (1, 1, 48, 48), (1, 1, 64, 64)),
}
_SUFFICE = {True: 6, False: 4}  # points, where attention is full
_EAGER = 1.0, 0.0, 1.0, 1.0, 0.0, 0.0  # as `_compiled_shares`


class Pass(NamedTuple):
    """Device work of a forward or a backward."""

    products: float  # FLOPs of matrix products
    attention: float  # FLOPs of attention's kernels
    moved: float  # bytes that all else reads and writes
    launches: float  # kernels that the host starts

    def plus(self, other: Pass, times: float = 1) -> Pass:
        """Return the sum of both, the other so many times."""
        return Pass(*(one + times * more for one, more in zip(self, other, strict=True)))

    @property
    def flops(self) -> float:
        return self.products + self.attention


@dataclass(frozen=True)
class Block:
    """Cost of one block on one rank: bytes, except for FLOPs."""

    saved: float  # kept from forward to backward, the block's input among it
    input: float  # its input alone: what is kept where the block is computed again
    working: float  # activations at the worst moment of its backward, or forward, what it has saved among them
    fused: float  # bytes that it does not save, as it is compiled, but would if it were not; `working` has them
    made: float  # gradients of its weights that exist then
    differentiated: bool  # False: neither it nor what comes before it trains
    forward: Pass
    backward: Pass
    sent: Mapping[str, tuple[float, float]]  # between "sequence" and "tensor" peers, in forward and in backward
    products: Mapping[Any, tuple[float, float]]  # outputs that `Saved` names: bytes, and FLOPs spared
    again: Pass  # that its backward repeats of its forward, as the compiler chooses for a budget

    def selective(self, saved: Saved) -> tuple[float, Pass]:
        """Bytes of outputs that it saves where it is recomputed, and what is left to compute."""
        own = {key: of for key, of in self.products.items() if saved.has(key)}
        spared = sum(flops for _, flops in own.values())
        of_attention = min(own.get("attention", (0, 0))[1], self.forward.attention)  # other mixers make products
        left = self.forward.products - spared + of_attention, self.forward.attention - of_attention
        return sum(num_bytes for num_bytes, _ in own.values()), Pass(*left, *self.forward[2:])


@dataclass(frozen=True)
class Blocks:
    """Cost of a denoiser on one rank."""

    blocks: tuple[Block, ...]  # in the order of the forward; those alike are one object
    given: float  # bytes beside them in forward: noised latents, their target and conditions, what they share
    final: float  # bytes beside them at the end of forward, behind them
    entry: float  # bytes beside them in backward: what they share, what is kept before them, gradients behind them
    beside: Pass  # a forward of what lies beside the blocks; its backward takes twice as much

    @property
    def forward(self) -> Pass:
        """The whole one."""
        return reduce(Pass.plus, (block.forward for block in self.blocks), self.beside)


def count_blocks(config: Any, batch: MicroBatch, layout: Layout) -> Blocks:
    """Return the cost of the denoiser of `config` for such a micro-batch. The first call for a layout traces it."""
    upkeep = layout.upkeep.lora, layout.upkeep.freeze, layout.upkeep.train_only
    peers = layout.sequence, layout.tensor, layout.sequence_attention
    sizes = batch.batch, batch.latent, batch.text_tokens
    budget = layout.level if isinstance(layout.level, float) else 1.0
    return _count_blocks(config, sizes, upkeep, layout.compute_bytes, layout.float8, peers, layout.compiled, budget)


@lru_cache(maxsize=4096)
def _count_blocks(
    config: Any,
    sizes: tuple[int, LatentSize, int],
    upkeep: Any,
    compute_bytes: int,
    float8: bool,
    peers: Any,
    compiled: bool,
    budget: float,
) -> Blocks:
    batch, latent, text_tokens = sizes
    bare = {"from_pretrained": None, "grad_ckpt_settings": None, "grad_ckpt_buffer_size": 0}
    config = config.without_recomputation().model_copy(update=bare)
    run = _traced_blocks(config, Upkeep(*upkeep), compute_bytes, float8, peers, text_tokens)
    frames = latent[1] / config.patch[0]
    tokens = denoiser_class(config).tokens(config, latent)
    law = _law(run, batch > 1, frames > 1, int(frames) % run.frame_peers)
    if law.holds and not 1 < frames <= run.frame_peers:  # with one frame a peer there are other ways again
        numbers = law((batch, frames, tokens / frames, 1))
    else:
        grid = (ceil(size / patch) for size, patch in zip(latent[1:], config.patch, strict=True))
        numbers = {name: np.array(of, float) if np.ndim(of) else of for name, of in run.numbers((batch, *grid)).items()}
    facts = config, upkeep, compute_bytes, float8, peers, text_tokens
    shares = _compiled_shares(run, budget, *facts) if compiled else {}
    of_kind = {kind: _block(kind, numbers, *shares.get(kind, _EAGER)) for kind in dict.fromkeys(run.kinds)}
    blocks = [of_kind[kind] for kind in run.kinds]
    first = next((i for i, block in enumerate(blocks) if block.differentiated), 0)
    if (kind := first_of(run.kinds[first])) in {name[0] for name in numbers}:
        blocks[first] = _block(kind, numbers, *shares.get(run.kinds[first], _EAGER))
    return Blocks(
        tuple(blocks), numbers["given"], numbers["final"].max(), numbers["entry"], _as_pass(numbers["beside"])
    )


def _as_pass(numbers: Sequence[float], share: float = 1.0) -> Pass:
    products, attention, moved, launches = map(float, numbers)
    return Pass(products, attention, share * moved, launches / LAUNCH)


def _block(
    kind: str,
    numbers: Mapping[Any, Any],
    share: float,
    fixed: float,
    forward: float,
    backward: float,
    matmuls: float,
    attention: float,
) -> Block:
    """One whose forward saves `share` of what an eager one does, and `fixed` bytes more; `forward`, `backward`: the
    shares of an eager one's bytes that these move; `matmuls`, `attention`: the shares of their FLOPs in forward that
    its backward repeats."""
    own = {name[1:]: of for name, of in numbers.items() if name[0] == kind}
    worst = (own["working",] + own["made",]).argmax()  # what follows are Python's numbers, quicker than NumPy's
    saved = share * own["saved",] + fixed
    first = _as_pass(own["forward",], forward)
    return Block(
        saved=saved,
        input=own["input",],
        working=float(own["working",][worst]),
        fused=own["saved",] - saved,
        made=float(own["made",][worst]),
        differentiated=bool(own["differentiated",]),
        forward=first,
        backward=_as_pass(own["backward",], backward),
        sent={axis: tuple(map(float, own["sent", axis])) for axis in ("sequence", "tensor")},
        products={name[1]: tuple(map(float, of)) for name, of in own.items() if name[0] == "product"},
        again=Pass(matmuls * first.products, attention * first.attention, 0.0, 0.0),
    )


@lru_cache(maxsize=64)
def saved_outputs(config: Any, level: Level, tensor: int) -> Mapping[str, Saved]:
    """Return the outputs that selective blocks save, by list."""
    return saved_by_list(meta_model(config, PLAIN, 2), level, tensor)


@lru_cache(maxsize=64)
def _traced_blocks(
    config: Any,
    upkeep: Upkeep,
    compute_bytes: int,
    float8: bool,
    peers: Any,
    text_tokens: int,
) -> TracedBlocks:
    """Blocks that are ready to be traced."""
    kinds, model = one_of_each_kind(config, upkeep, compute_bytes)
    if float8:
        multiply_in_float8(model)
    return TracedBlocks(config, kinds, model, peers, text_tokens)


@lru_cache(maxsize=64)
def _compiled_shares(run: TracedBlocks, budget: float, *facts: Any) -> Mapping[str, Sequence[float]]:
    """Return the share of an eager block's bytes that a compiled one saves, and how many next to it; the shares that
    forward and backward move, and the shares of matmuls and of attention that backward repeats for a budget. By
    kind; they are nearly the same at all sizes, because all grow with the tokens, so they are traced at one. facts:
    all that this depends on."""

    def look() -> dict[str, Sequence[float]]:
        batch, frames, *grid = _POINTS[True, True][1]
        found = run.numbers((batch, run.frames[frames], *grid), partial(compiled_bytes, budget=budget))
        shares = {}
        for kind in dict.fromkeys(run.kinds):
            grows, fixed, moved, again = found[kind, "compiled"]
            if moved:
                eager = {name: found[kind, name] for name in ("forward", "backward")}
                moves = (moved[name] / eager[name][2] for name in eager)
                repeats = (flops / max(1.0, eager["forward"][i]) for i, flops in enumerate(again))
                shares[kind] = grows / found[kind, "saved"], fixed, *moves, *repeats
        return shares

    return traced_before("compiled_blocks", look, budget, *facts)


@lru_cache(maxsize=256)
def _law(run: TracedBlocks, many: bool, moving: bool, left: int) -> Law:
    """Return the law of one or several samples, of one or several frames, of which so many are left over where peers
    share them: what the first peer has follows by a polynomial only where as many are."""
    points = _POINTS[many, moving]
    if moving:
        peers = run.frame_peers
        points = tuple((batch, run.frames[frames] * peers + left, *grid) for batch, frames, *grid in points)
        return fit(points, run.numbers, _terms, _SUFFICE[many], tolerance=1e-6)
    law = _law(run, many, True, left)
    return law if law.predicts(points[0], run.numbers(points[0])) else fit(points, run.numbers, _terms)


def _terms(sizes: tuple[Any, ...]) -> tuple[Any, ...]:
    batch, frames, rows, columns = sizes
    place = rows * columns  # tokens of one frame
    tokens = batch * frames * place
    return (
        *(tokens, batch, 1, tokens * frames * place),  # full attention's scores are the square of the tokens
        *(frames * place, place, frames),  # positions are those of all samples
        *(batch * frames, batch * place, tokens * frames, tokens * place, batch * place**2),
    )
