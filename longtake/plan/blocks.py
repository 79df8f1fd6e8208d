"""What a denoiser's blocks hold, compute and send in a micro-batch: traced on real ones, fitted for other sizes.

One block of each kind runs forward and backward on meta tensors, cut for peers as in the run, at a few sizes; every
number that is seen follows for other sizes by a polynomial in samples, video tokens and the way they lie in frames.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from longtake.models import Law, Trace, as_on_cuda, block_counts, denoiser_class, fit, fused, meta_conditions
from longtake.models.build import LatentSize
from longtake.parallel import Kept, TokenPeers, choose_kept, cut_among, has_whole_graphs, kept_as
from longtake.plan.compiled import compiled_bytes, multiply_in_float8, remembered
from longtake.plan.layout import PLAIN, Layout, MicroBatch, Upkeep
from longtake.plan.parameters import block_names, meta_model

Point = tuple[int, ...]  # samples; frames, rows and columns of tokens of each

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
_FRAMES = (4, 6, 8, 12, 16, 24)  # at the points; a denoiser that takes only some lengths has its own in their place
_SUFFICE = {True: 6, False: 4}  # points, where attention is full
_EAGER = 1.0, 0.0, 1.0, 1.0  # as `_compiled_shares`
_MANY = 1 << 20  # launches are counted in so many parts, so that a fit does not take a few for a rounding error


class Pass(NamedTuple):
    """What a forward or a backward makes the device do."""

    products: float  # FLOPs of matrix products
    attention: float  # FLOPs of attention's kernels
    moved: float  # bytes that all else reads and writes
    launches: float  # kernels that the host starts

    def plus(self, other: Pass, times: float = 1) -> Pass:
        """Both, the other so many times."""
        return Pass(*(one + times * more for one, more in zip(self, other, strict=True)))

    @property
    def flops(self) -> float:
        return self.products + self.attention


@dataclass(frozen=True)
class Block:
    """What one block takes on one rank: bytes, but for FLOPs."""

    saved: float  # kept from forward to backward, the block's input among it
    input: float  # its input alone: what is kept where the block is computed again
    working: float  # activations at the worst moment of its backward, or forward, what it has saved among them
    fused: float  # bytes that it does not save, as it is compiled, but would if it were not; `working` has them
    made: float  # gradients of its weights that exist then
    differentiated: bool  # False: neither it nor what comes before it trains
    forward: Pass
    backward: Pass
    sent: Mapping[str, tuple[float, float]]  # between "sequence" and "tensor" peers, in forward and in backward
    products: Mapping[Any, tuple[float, float]]  # what a budget could keep, see `Kept`: bytes, and FLOPs spared

    def keeps(self, kept: Kept) -> tuple[float, Pass]:
        """Bytes of outputs that it keeps where it is computed again, and what is left to compute."""
        own = {key: of for key, of in self.products.items() if kept.takes(key)}
        spared = sum(flops for _, flops in own.values())
        of_attention = min(own.get("attention", (0, 0))[1], self.forward.attention)  # other mixers make products
        left = self.forward.products - spared + of_attention, self.forward.attention - of_attention
        return sum(num_bytes for num_bytes, _ in own.values()), Pass(*left, *self.forward[2:])


@dataclass(frozen=True)
class Blocks:
    """What a denoiser takes on one rank."""

    blocks: tuple[Block, ...]  # in the order of the forward; those alike are one object
    entry: float  # bytes beside them until the end of backward: latents, conditions, what comes before the blocks
    final: float  # bytes more at the end of forward, behind the blocks
    beside: Pass  # a forward of what lies beside the blocks; its backward takes twice as much

    @property
    def forward(self) -> Pass:
        """The whole one."""
        return reduce(Pass.plus, (block.forward for block in self.blocks), self.beside)


def count_blocks(config: Any, batch: MicroBatch, layout: Layout) -> Blocks:
    """What the denoiser of `config` takes for such a micro-batch. The first call for a layout traces it."""
    upkeep = layout.upkeep.lora, layout.upkeep.freeze, layout.upkeep.train_only
    peers = layout.sequence, layout.tensor, layout.sequence_attention
    compiled = layout.compiled and (layout.peers == 1 or has_whole_graphs(denoiser_class(config)))
    sizes = batch.batch, batch.latent, batch.text_tokens
    return _count_blocks(config, sizes, upkeep, layout.compute_bytes, layout.float8, peers, compiled, fused.used())


@lru_cache(maxsize=4096)
def _count_blocks(
    config: Any,
    sizes: tuple[int, LatentSize, int],
    upkeep: Any,
    compute_bytes: int,
    float8: bool,
    peers: Any,
    compiled: bool,
    operators: tuple[str, ...],
) -> Blocks:
    batch, latent, text_tokens = sizes
    bare = {"from_pretrained": None, "grad_ckpt_settings": None, "grad_ckpt_budget": 0.0, "grad_ckpt_buffer_size": 0}
    config = config.model_copy(update=bare)
    run = _run(config, Upkeep(*upkeep), compute_bytes, float8, peers, text_tokens, operators)
    frames = latent[1] / config.patch[0]
    tokens = denoiser_class(config).tokens(config, latent)
    law = _law(run, batch > 1, frames > 1, int(frames) % run.frame_peers)
    if law.holds and not 1 < frames <= run.frame_peers:  # with one frame a peer there are other ways again
        numbers = law((batch, frames, tokens / frames, 1))
    else:
        grid = (ceil(size / patch) for size, patch in zip(latent[1:], config.patch, strict=True))
        numbers = {name: np.array(of, float) if np.ndim(of) else of for name, of in run.numbers((batch, *grid)).items()}
    facts = config, upkeep, compute_bytes, float8, peers, text_tokens, operators
    shares = _compiled_shares(run, *facts) if compiled else {}
    of_kind = {kind: _block(kind, numbers, *shares.get(kind, _EAGER)) for kind in dict.fromkeys(run.kinds)}
    blocks = tuple(of_kind[kind] for kind in run.kinds)
    return Blocks(blocks, numbers["entry"], numbers["final"].max(), _as_pass(numbers["beside"]))


def _as_pass(numbers: Sequence[float], share: float = 1.0) -> Pass:
    products, attention, moved, launches = numbers
    return Pass(products, attention, share * moved, launches / _MANY)


def _block(kind: str, numbers: Mapping[Any, Any], share: float, fixed: float, forward: float, backward: float) -> Block:
    """One whose forward saves `share` of what an eager one does, and `fixed` bytes more; `forward`, `backward`: the
    shares of an eager one's bytes that these move."""
    own = {name[1:]: of for name, of in numbers.items() if name[0] == kind}
    worst = (own["working",] + own["made",]).argmax()
    saved = share * own["saved",] + fixed
    return Block(
        saved=saved,
        input=own["input",],
        working=own["working",][worst],
        fused=own["saved",] - saved,
        made=own["made",][worst],
        differentiated=bool(own["differentiated",]),
        forward=_as_pass(own["forward",], forward),
        backward=_as_pass(own["backward",], backward),
        sent={axis: tuple(own["sent", axis]) for axis in ("sequence", "tensor")},
        products={name[1]: tuple(of) for name, of in own.items() if name[0] == "product"},
    )


@lru_cache(maxsize=256)
def kept_by_lists(config: Any, budget: float, tensor: int) -> Mapping[str, Kept]:
    """What recomputed blocks keep with a budget, by list: see `choose_kept`."""
    model = meta_model(config, PLAIN, 2)
    return {blocks: choose_kept(model, blocks, budget, tensor) for blocks in block_counts(config)}


@lru_cache(maxsize=64)
def budget_levels(config: Any, tensor: int) -> tuple[float, ...]:
    """Budgets, the largest first, of which each keeps more than the next: the smallest, in hundredths, that does."""
    found: dict[str, float] = {}
    for hundredths in range(101):
        kept = kept_by_lists(config, hundredths / 100, tensor)
        found.setdefault(str(kept), hundredths / 100)
    return tuple(sorted(found.values(), reverse=True))


@lru_cache(maxsize=64)
def _run(
    config: Any, upkeep: Upkeep, compute_bytes: int, float8: bool, peers: Any, text_tokens: int, _: tuple[str, ...]
) -> _Run:
    kinds, model = one_of_each_kind(config, upkeep, compute_bytes)
    if float8:
        multiply_in_float8(model)
    return _Run(config, kinds, model, peers, text_tokens)


@lru_cache(maxsize=64)
def _compiled_shares(run: _Run, *facts: Any) -> Mapping[str, Sequence[float]]:
    """The share of an eager block's bytes that a compiled one saves, and how many beside it; the shares that forward
    and backward move. By kind; they are nearly the same at all sizes, for all grow with the tokens, so they are seen at
    one. facts: all that this depends on."""

    def look() -> dict[str, Sequence[float]]:
        batch, frames, *grid = _POINTS[True, True][1]
        found = run.numbers((batch, run.frames[frames], *grid), compiled_bytes)
        return {
            kind: (grows / found[kind, "saved"], fixed, *(to / found[kind, of][2] for of, to in moved.items()))
            for kind in dict.fromkeys(run.kinds)
            for grows, fixed, moved in (found[kind, "compiled"],)
            if moved
        }

    return remembered(look, *facts)


@lru_cache(maxsize=256)
def _law(run: _Run, many: bool, moving: bool, left: int) -> Law:
    """The law of one or several samples, of one or several frames, of which so many are left over where peers share
    them: what the first peer has follows by a polynomial only where as many are."""
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


def one_of_each_kind(config: Any, upkeep: Upkeep, compute_bytes: int) -> tuple[list[str], nn.Module]:
    """The kind of each block, by the name of the first alike; and the model with one block of each kind in its lists,
    twice, in the compute dtype."""
    whole = meta_model(config, upkeep, compute_bytes)
    first: dict[Any, str] = {}
    kinds = []
    for name in block_names(config):
        parameters = whole.get_submodule(name).named_parameters()
        facts = tuple((part, tuple(p.shape), p.dtype, p.requires_grad) for part, p in parameters)
        kinds.append(first.setdefault((name.rpartition(".")[0], facts), name))
    lists = {}
    for blocks in block_counts(config):
        own = [copy.deepcopy(whole.get_submodule(name)) for name in first.values() if name.startswith(f"{blocks}.")]
        lists[id(whole.get_submodule(blocks))] = nn.ModuleList(block for block in own for _ in range(2))
    model = copy.deepcopy(whole, memo=lists)
    return kinds, as_on_cuda(model, torch.bfloat16 if compute_bytes == 2 else torch.float32)


def _made(trace: Trace) -> np.ndarray:
    """What a trace has counted so far, in the order of `Pass`; launches in parts."""
    return np.array((trace.flops - trace.attention, trace.attention, trace.moved, trace.launches * _MANY), float)


class _BlockTrace(Trace):
    """Also counts what a budget could keep of the operations."""

    def __init__(self, *known: nn.Module | Tensor) -> None:
        super().__init__(*known)
        self.kept: Counter[Any] = Counter()
        self.spared: Counter[Any] = Counter()

    def saw(self, operation: Any, args: Sequence[Any], out: Any, flops: int) -> None:
        if (key := kept_as(operation, args)) is not None:
            self.kept[key] += _bytes(out)
            self.spared[key] += flops


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(tree))


class _Run:
    """Runs micro-batches through a model that has one block of each kind, twice, and through these by themselves."""

    def __init__(
        self, config: Any, kinds: Sequence[str], model: nn.Module, peers: tuple[int, int, Any], text_tokens: int
    ) -> None:
        self.kinds = kinds  # of each block, in the order of the forward
        self._config, self._model, self._text_tokens = config, model, text_tokens
        kind = denoiser_class(config)
        traced = getattr(kind, "traced_frames", lambda config: _FRAMES)
        self.frames = dict(zip(_FRAMES, traced(config), strict=True))
        self._peers = TokenPeers.counted(*peers, kind.heads(config))
        by_frame = "frame" in (kind.sequence_plan.units.values() if kind.sequence_plan else ())
        self.frame_peers = self._peers.count if by_frame else 1  # that cut a video between frames alone
        self._cut = cut_among(model, self._peers) if self._peers.count > 1 else None
        blocks = [block for name in block_counts(config) for block in model.get_submodule(name)]
        self._blocks = dict(zip(dict.fromkeys(kinds), dict.fromkeys(blocks), strict=True))
        self._forwards = {kind: block.forward for kind, block in self._blocks.items()}
        self._handed = self._find_handed()
        for name in block_counts(config):
            model.set_submodule(name, nn.ModuleList(dict.fromkeys(model.get_submodule(name))))

    def _inputs(self, point: Point) -> tuple[Tensor, Tensor, Any, Tensor, Tensor]:
        """Noised latents, timesteps and conditions; clean latents and target."""
        batch, *grid = point
        config = self._config
        latent = (config.latent_channels, *(n * patch for n, patch in zip(grid, config.patch, strict=True)))
        noised, clean, target = (torch.empty(batch, *latent, device="meta") for _ in range(3))
        conditions = meta_conditions(config, latent, self._text_tokens, batch)
        return noised, torch.empty(batch, device="meta"), conditions, clean, target

    def _find_handed(self) -> dict[str, set[int]]:
        """Which inputs of each kind of block, by their place, come from the block before; the others all share."""
        seen: dict[str, list[list[int]]] = {kind: [] for kind in self._blocks}

        def see(kind: str, *args: Any, **named: Any) -> Any:
            seen[kind].append([trace.number(tensor) for tensor in _tensors((args, named))])
            return self._forwards[kind](*args, **named)

        for kind, block in self._blocks.items():
            block.forward = partial(see, kind)
        with torch.no_grad(), Trace(self._model) as trace:
            self._model(*self._inputs((1, self.frames[_FRAMES[-1]], 64, 64))[:3])  # tables of positions only grow
        return {
            kind: {place for place, (one, other) in enumerate(zip(*calls, strict=True)) if one != other}
            for kind, calls in seen.items()
        }

    def numbers(self, point: Point, of_compiled: Callable[..., Any] | None = None) -> dict[Any, Any]:
        """What was seen, by name; of_compiled: says what a compiled block saves, if that is to be seen too."""
        found: dict[Any, Any] = {}

        def count(kind: str, *args: Any, **named: Any) -> Any:
            handed = [tensor for i, tensor in enumerate(_tensors((args, named))) if i in self._handed[kind]]
            found.setdefault("entry", trace.live - _bytes(handed))
            with trace.paused():
                numbers, out = self._alone(kind, (args, named), set(map(id, handed)))
                if of_compiled is not None:
                    block, eager = self._blocks[kind], self._forwards[kind]
                    with self._cut.as_compiled() if self._cut else nullcontext():
                        numbers["compiled",] = of_compiled(block, eager, (args, named), set(map(id, handed)))
            found.update({(kind, *name): number for name, number in numbers.items()})
            out = tree_map_only(_Like, _Like.made, out)
            ends[:] = [end for end in _tensors(out) if end.requires_grad]
            start[0] = len(trace.changes)
            return out

        ends: list[Tensor] = []
        start = [0]
        for kind, block in self._blocks.items():
            block.forward = partial(count, kind)
        with Trace(self._model) as trace:
            noised, t, conditions, _clean, target = self._inputs(point)
            prediction = self._model(noised, t, conditions)
            found["beside"] = _made(trace)
            loss = (prediction.float() - target).square().mean()
            if ends:
                torch.autograd.grad(loss, ends, allow_unused=True)
            found["final"] = [live - found["entry"] for _, live in trace.moments(start=start[0])]
        return found

    def _alone(self, kind: str, called: Any, handed: set[int]) -> tuple[dict[Any, Any], Any]:
        """The numbers of one block by itself, called with tensors like these, and what its outputs are like; `handed`:
        ids of those that come from the block before."""

        def own(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                needs_grad = tensor.requires_grad or trains  # only the first has none that trains before it
                known[id(tensor)] = _Like(tensor.shape, tensor.dtype, needs_grad).made()
            return known[id(tensor)]

        block = self._blocks[kind]
        trains = any(p.requires_grad for p in block.parameters())
        shared = [one for one in _tensors(called) if id(one) not in handed]
        known = {id(one): one.detach().requires_grad_(one.requires_grad) for one in shared}
        shared = list(known.values())
        with _BlockTrace(block, *shared) as trace:
            args, named = tree_map_only(Tensor, own, called)
            known.clear()
            numbers: dict[Any, Any] = {("input",): trace.live}
            sent = [self._sent()]
            out = self._forwards[kind](*args, **named)
            del args, named
            numbers["forward",] = _made(trace)
            numbers |= {("product", key): (num_bytes, trace.spared[key]) for key, num_bytes in trace.kept.items()}
            sent.append(self._sent())
            end = _End.apply(*_tensors(out))
            out = tree_map_only(Tensor, _Like.of, out)
            numbers["saved",], numbers["differentiated",] = trace.live, int(end.requires_grad)
            if end.requires_grad:
                end.backward()
            sent.append(self._sent())
            numbers["backward",] = _made(trace) - numbers["forward",]
            gradients = {trace.number(p.grad) for p in block.parameters() if p.grad is not None}
            moments = trace.moments(gradients)
        for axis, (before, between, after) in zip(("sequence", "tensor"), zip(*sent, strict=True), strict=True):
            numbers["sent", axis] = between - before, after - between
        numbers["made",], numbers["working",] = zip(*moments, strict=True)
        for p in (*block.parameters(), *shared):
            p.grad = None
        return numbers, out

    def _sent(self) -> tuple[int, int]:
        """Bytes that this rank has sent to sequence peers and to tensor peers so far."""
        peers = self._peers
        groups = (peers.ulysses_group, peers.ring_group, peers.sequence_group), (peers.tensor_group,)
        sequence, tensor = (sum(group.sent for group in of if group is not None) for of in groups)
        return sequence, tensor


@dataclass(frozen=True)
class _Like:
    """What a tensor is like that is not kept for it."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Like:
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad)

    def made(self) -> Tensor:
        """A tensor like it that comes from nowhere, and is gone when nothing needs it any more."""
        anchor = torch.empty((), device="meta", requires_grad=self.requires_grad)
        return _FromNowhere.apply(anchor, self.shape, self.dtype)


class _FromNowhere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return torch.empty((), device="meta"), None, None


class _End(torch.autograd.Function):
    """What comes behind a block: takes its outputs, gives gradients of their sizes."""

    @staticmethod
    def forward(ctx: Any, *outs: Tensor) -> Tensor:
        ctx.likes = [_Like.of(out) for out in outs]
        return torch.empty((), device="meta")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty(like.shape, dtype=like.dtype, device="meta") for like in ctx.likes)
