"""One block of each kind of a denoiser, run forward and backward on meta tensors, sharded as in a run: memory, compute
and communication at one size.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from longtake.contracts import Conditions, Noised
from longtake.diffusion.objective import micro_batch_loss, sample_loss
from longtake.models.build import block_counts, denoiser_class
from longtake.models.trace import Trace, as_on_cuda, meta_conditions
from longtake.parallel.mesh import TokenPeers
from longtake.parallel.recomputation import saved_as
from longtake.parallel.shard import cut_among
from longtake.plan.layout import Upkeep
from longtake.plan.parameters import block_names, compute_dtype, meta_model

Point = tuple[int, ...]  # samples; frames, rows and columns of tokens of each
FRAMES = (4, 6, 8, 12, 16, 24)  # that are traced; a denoiser that takes only some lengths has its own in their place
LAUNCH = 1 << 20  # launches are counted in so many parts, so that a fit does not take a few for a rounding error


def one_of_each_kind(config: Any, upkeep: Upkeep, compute_bytes: int) -> tuple[list[str], nn.Module]:
    """Return the kind of each block, by the name of the first alike; and the model with one block of each kind in
    its lists, twice, in the compute dtype."""
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
    return kinds, as_on_cuda(model, compute_dtype(compute_bytes))


def _made(trace: Trace) -> np.ndarray:
    """Return the counts of a trace so far, in the order of `Pass`; launches in parts."""
    return np.array((trace.flops - trace.attention, trace.attention, trace.moved, trace.launches * LAUNCH), float)


class _BlockTrace(Trace):
    """Also counts the outputs that selective recomputation could save."""

    def __init__(self, *known: nn.Module | Tensor) -> None:
        super().__init__(*known)
        self.savable: Counter[Any] = Counter()
        self.spared: Counter[Any] = Counter()

    def saw(self, operation: Any, args: Sequence[Any], out: Any, flops: int) -> None:
        key = saved_as(operation, args)
        if key is not None:
            self.savable[key] += _bytes(out)
            self.spared[key] += flops


def _edge(tensor: Tensor) -> GradientEdge | None:
    """Return the edge at which the tensor's gradient will be computed, which keeps the graph before it alive; a node
    alone does not where a custom operator made the tensor. None without a gradient."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None


def _weights_in_graph(edges: Iterable[GradientEdge | None]) -> dict[Any, nn.Parameter]:
    """Return the weights behind these places of autograd's graph, by nodes of their own."""
    left = [edge.node for edge in edges if edge is not None]
    seen = {None, *left}
    while left:
        new = {node for node, _ in getattr(left.pop(), "next_functions", ())} - seen
        seen |= new
        left += new
    found = {node: getattr(node, "variable", None) for node in seen}
    return {node: weight for node, weight in found.items() if isinstance(weight, nn.Parameter)}


def first_of(kind: str) -> str:
    """Return the key of the numbers of the first block that trains, where all before it is frozen; `kind`: its kind."""
    return f"{kind}, the first to train"


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _bytes(tree: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(tree))


class TracedBlocks:
    """Runs micro-batches through a model that has one block of each kind, twice, and through these by themselves."""

    def __init__(
        self, config: Any, kinds: Sequence[str], model: nn.Module, peers: tuple[int, int, Any], text_tokens: int
    ) -> None:
        self.kinds = kinds  # of each block, in the order of the forward
        self._config, self._model, self._text_tokens = config, model, text_tokens
        kind = denoiser_class(config)
        traced = getattr(kind, "traced_frames", lambda config: FRAMES)
        self.frames = dict(zip(FRAMES, traced(config), strict=True))
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

    def _inputs(self, point: Point) -> tuple[Noised, Conditions]:
        batch, *grid = point
        config = self._config
        latent = (config.latent_channels, *(n * patch for n, patch in zip(grid, config.patch, strict=True)))
        x, target = (torch.empty(batch, *latent, device="meta") for _ in range(2))
        t, weight = (torch.empty(batch, device="meta") for _ in range(2))
        return Noised(x, t, target, weight), meta_conditions(config, latent, self._text_tokens, batch)

    def _find_handed(self) -> dict[str, set[int]]:
        """Return the inputs of each kind of block, by position, that come from the previous block; all blocks share the
        others."""
        seen: dict[str, list[list[int]]] = {kind: [] for kind in self._blocks}

        def see(kind: str, *args: Any, **named: Any) -> Any:
            seen[kind].append([trace.number(tensor) for tensor in _tensors((args, named))])
            return self._forwards[kind](*args, **named)

        for kind, block in self._blocks.items():
            block.forward = partial(see, kind)
        with torch.no_grad(), Trace(self._model) as trace:
            noised, conditions = self._inputs((1, self.frames[FRAMES[-1]], 64, 64))  # tables of positions only grow
            self._model(noised.x, noised.t, conditions)
        return {
            kind: {place for place, (one, other) in enumerate(zip(*calls, strict=True)) if one != other}
            for kind, calls in seen.items()
        }

    def numbers(self, point: Point, of_compiled: Callable[..., Any] | None = None) -> dict[Any, Any]:
        """Return the traced numbers, by name; of_compiled: returns what a compiled block saves, if that is to be traced
        too."""
        found: dict[Any, Any] = {}

        def count(kind: str, *args: Any, **named: Any) -> Any:
            given = _tensors((args, named))
            handed = [tensor for i, tensor in enumerate(given) if i in self._handed[kind]]
            found.setdefault("given", trace.live - _bytes(handed))
            with trace.paused():
                needed.extend(_edge(one) if i in self._handed[kind] else one for i, one in enumerate(given))
                own = set(map(id, handed))
                numbers, out = self._alone(kind, (args, named), own)
                if numbers["differentiated",] and not any(one.requires_grad for one in handed):
                    of_first, _ = self._alone(kind, (args, named), own, is_first=True)
                    found.update({(first_of(kind), *name): number for name, number in of_first.items()})
                if of_compiled is not None:
                    block, eager = self._blocks[kind], self._forwards[kind]
                    with self._cut.as_compiled() if self._cut else nullcontext():
                        numbers["compiled",] = of_compiled(block, eager, (args, named), own)
            found.update({(kind, *name): number for name, number in numbers.items()})
            out = tree_map_only(_Like, _Like.made, out)
            ends[:] = [get_gradient_edge(end) for end in _tensors(out) if end.requires_grad]
            start[0] = len(trace.changes)
            return out

        def micro_batch() -> Tensor:
            """Return the loss, as a run makes it: of the latents and conditions then is left what backward needs."""
            noised, conditions = self._inputs(point)
            prediction = self._model(noised.x, noised.t, conditions)
            found["beside"] = _made(trace)
            return micro_batch_loss(sample_loss, prediction, noised, noised.weight, point[0])

        # what blocks keep that is not their own, what the backward before them takes, and gradients of weights behind
        # them, which are not summed over the shards before the end
        needed: list[Any] = []
        ends: list[Any] = []
        start = [0]
        for kind, block in self._blocks.items():
            block.forward = partial(count, kind)
        with Trace(self._model) as trace:
            loss = micro_batch()
            before = _weights_in_graph(_edge(one) if isinstance(one, Tensor) else one for one in needed)
            behind = [p for node, p in _weights_in_graph([_edge(loss)]).items() if node not in before]
            if ends or behind:
                needed += torch.autograd.grad(loss, [*ends, *behind], allow_unused=True)[len(ends) :]
            del loss
            found["entry"] = trace.live
            found["final"] = [live for _, live in trace.moments(start=start[0])]
        return found

    def _alone(self, kind: str, called: Any, handed: set[int], *, is_first: bool = False) -> tuple[dict[Any, Any], Any]:
        """Return the numbers of one block by itself, called with tensors like these, and what its outputs are like;
        `handed`: ids of those that come from the block before; is_first: nothing of what they come from trains."""

        def own(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                needs_grad = tensor.requires_grad or (trains and not is_first)
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
            if not is_first:  # whose input is kept where it is computed again, though its backward may not take it
                del args, named
            numbers["forward",] = _made(trace)
            numbers |= {("product", key): (num_bytes, trace.spared[key]) for key, num_bytes in trace.savable.items()}
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
    """Shape, dtype and gradient flag of a tensor whose memory is not saved."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Like:
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad)

    def made(self) -> Tensor:
        """Return a tensor like it that comes from nowhere, and is gone when nothing needs it any more."""
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
    """Stand-in for the layers after a block: takes its outputs, gives gradients of their sizes."""

    @staticmethod
    def forward(ctx: Any, *outs: Tensor) -> Tensor:
        ctx.likes = [_Like.of(out) for out in outs]
        return torch.empty((), device="meta")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty(like.shape, dtype=like.dtype, device="meta") for like in ctx.likes)
