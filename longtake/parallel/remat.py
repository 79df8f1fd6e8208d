"""Activation recomputation (rematerialisation): which outputs of a block are kept for backward.

A recomputed block keeps its input, and what attention gives with the log-sum-exp of its scores, so that attention runs
once. With a budget it also keeps outputs of linear layers, those that save the most FLOPs per byte first (selective
recomputation, Korthikanti et al. 2022); at the level `INPUTS` its input alone. All may be offloaded to host memory
(`offload`). Gradients are unchanged, bit for bit where kernels are deterministic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from longtake.contracts import Bucket
from longtake.models.attention import MIXERS, Attention
from longtake.parallel.budgets import INPUTS, Budget, budget_of, levels_of
from longtake.parallel.degrees import EntryKey
from longtake.parallel.offload import BlockStore, back
from longtake.parallel.sequence import matching
from longtake.parallel.tokens import TokenCut

_ATTENTION = frozenset(
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
)
_ALWAYS_AGAIN = ("math", "flex")  # backends of attention that are none of these operators: always recomputed
# product -> which argument is its input; emulated float8 (on a CPU) multiplies by `mm` too
_PRODUCTS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1, torch.ops.aten._scaled_mm.default: 0}

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Kept:
    """What a recomputed block keeps beside its input."""

    attention: bool  # what attention gives, and the log-sum-exp of its scores
    products: frozenset[tuple[int, int]]  # (inputs, outputs) of the linear layers whose outputs are kept, on this rank
    layers: tuple[str, ...] = ()  # their names in one stream, in the order of their worth

    def __bool__(self) -> bool:
        return self.attention or bool(self.products)

    def takes(self, name: Literal["attention"] | tuple[int, int] | None) -> bool:
        """Whether an output that `kept_as` calls so is kept. Compared by ==: under the compiler a size may be a SymInt,
        which has no hash, where one process has compiled models of several sizes."""
        return self.attention if name == "attention" else any(name == size for size in self.products)

    def __str__(self) -> str:
        return ", ".join(("attention", *self.layers) if self.attention else self.layers)


NOTHING = Kept(False, frozenset())


@dataclass
class BlockMode:
    """How blocks run in the next forwards, and in their backwards: set for each micro-batch."""

    budgets: Mapping[EntryKey, Budget] = field(default_factory=dict)  # by entry of the bucket table
    budget: Budget = INPUTS  # of the current micro-batch; of all until `use` is called

    def use(self, bucket: Bucket) -> None:
        """Prepares for a micro-batch of `bucket`."""
        least = levels_of(self.budgets.values())[:1]
        self.budget = self.budgets.get(bucket.entry, least[0] if least else self.budget)

    @property
    def levels(self) -> list[float]:
        """The budgets that blocks may have, in order."""
        return levels_of([self.budget, *self.budgets.values()])


@dataclass(frozen=True)
class ByBudget:
    """A block's forward that runs as the budget of its mode says."""

    ways: Mapping[float, Callable[..., Any]]
    mode: BlockMode
    place: tuple[int, int]  # as of `budget_of`

    def __call__(self, *args: Any) -> Any:
        keeps = torch.is_grad_enabled()  # without gradients nothing is kept
        return self.ways[budget_of(self.mode.budget, *self.place) if keeps else min(self.ways)](*args)

    @property
    def distinct(self) -> list[Callable[..., Any]]:
        """Its ways, each once."""
        return list(dict.fromkeys(self.ways.values()))

    def exchanged(self, others: Mapping[Callable[..., Any], Callable[..., Any]]) -> ByBudget:
        """The same with another in the place of each way."""
        return ByBudget({budget: others[way] for budget, way in self.ways.items()}, self.mode, self.place)


@dataclass(frozen=True)
class Keepable:
    """What the recomputed blocks of one list could keep, on this rank."""

    attention: int = 0  # numbers a token that attention gives
    has_kernel: bool = True  # False: attention by `math` or `flex`, which is always recomputed
    layers: Mapping[tuple[int, int], Sequence[str]] = field(default_factory=dict)  # names by (inputs, outputs)
    streams: int = 1  # of tokens; each has its own layers

    def within(self, budget: float) -> Kept:
        """What is kept with a budget: share (0 ... 1) of the outputs of attention and `layers`.

        What attention gives is kept with any of them, be it more than that share, since its FLOPs grow with the tokens;
        then linear layers with most inputs, since an output of k inputs saves 2k FLOPs; of equal ones the narrower.
        Layers of one size are kept together or not at all. At the level `INPUTS` nothing is.
        """
        if budget == INPUTS or not self.attention:
            return NOTHING
        widths = {size: size[1] * len(names) // self.streams for size, names in self.layers.items()}  # numbers a token
        left = budget * (self.attention + sum(widths.values())) * (1 + 1e-9)
        left -= self.attention if self.has_kernel else 0
        kept: list[tuple[int, int]] = []
        for size in sorted(widths, key=lambda size: (-size[0], size[1])):
            if widths[size] > left:
                break
            left -= widths[size]
            kept.append(size)
        in_one = {size: names[: len(names) // self.streams] for size, names in self.layers.items()}
        layers = tuple(name for size in kept for name in in_one[size])
        return Kept(attention=self.has_kernel, products=frozenset(kept), layers=layers)


def find_keepable(model: nn.Module, blocks: str, tensor: int = 1) -> Keepable:
    """What the blocks of the list `blocks` of a model could keep at a tensor degree: what attention gives, and outputs
    of linear layers over tokens (those in `model.tensor_plan`)."""
    if not len(model.get_submodule(blocks)):
        return Keepable()
    layers: dict[tuple[int, int], list[str]] = {}
    streams = set()
    for pattern, split in (model.tensor_plan or {}).items():
        for name, layer in matching(model, pattern):
            if split.tokens and name.startswith(f"{blocks}.0."):
                inputs, outputs = (tensor if split.kind == kind else 1 for kind in ("row", "column"))
                size = layer.in_features // inputs, layer.out_features // outputs
                layers.setdefault(size, []).append(name.removeprefix(f"{blocks}.0."))
                streams.add(split.tokens)
    width = type(model).heads(model.config) * model.config.head_dim
    attention = getattr(type(model), "mixed_width", lambda config: width)(model.config) // tensor
    has_kernel = all(one.backend not in _ALWAYS_AGAIN for one in model.modules() if isinstance(one, Attention))
    return Keepable(attention, has_kernel, layers, len(streams))


def choose_kept(model: nn.Module, blocks: str, budget: float, tensor: int = 1) -> Kept:
    """What the blocks of the list `blocks` of a model keep with a budget, at a tensor degree."""
    return find_keepable(model, blocks, tensor).within(budget)


def keeps_outputs(model: nn.Module, budget: float, tensor: int = 1) -> bool:
    """Whether recomputed blocks of a model keep anything beside their inputs with a budget, at a tensor degree."""
    return any(choose_kept(model, blocks, budget, tensor) for blocks in model.blocks)


def remat_blocks(
    model: nn.Module,
    counts: Sequence[int],
    cut: TokenCut | None = None,
    budget: Budget = INPUTS,
    store: BlockStore | None = None,
    mode: BlockMode | None = None,
) -> dict[str, Kept]:
    """Applies recomputation to the first `counts[i]` blocks of the model's i-th list; returns the most that is kept,
    by list. `store`: where outputs wait that uncompiled blocks keep; those of compiled ones `offload_inputs` stores.
    `mode`: says for each forward which of its budgets holds, in the place of `budget`.

    `remat_and_compile` calls it at its time among what else is done to blocks.
    """
    mode = BlockMode(budget=budget) if mode is None else mode
    levels, found = mode.levels, {}
    for i, (name, count) in enumerate(zip(model.blocks, counts, strict=True)):
        kept = {one: choose_kept(model, name, one, 1 if cut is None else cut.peers.tensor) for one in levels}
        found[name] = kept[levels[-1]]
        contexts = {of: _contexts(cut, of, store) for of in kept.values()}
        blocks = list(model.get_submodule(name))[:count]
        for behind, block in enumerate(reversed(blocks)):
            ways = {of: partial(_remat, block.forward, way) for of, way in contexts.items()}
            by_budget = ByBudget({one: ways[of] for one, of in kept.items()}, mode, (i, behind))
            block.forward = by_budget if len(ways) > 1 else next(iter(ways.values()))
    return found


def offload_inputs(model: nn.Module, counts: Sequence[int], store: BlockStore, compiled: bool = False) -> None:
    """Offloads the inputs of the recomputed blocks to `store` until backward, and what they keep beside these where
    they are `compiled`. Call it after compilation."""
    for name, count in zip(model.blocks, counts, strict=True):
        for block in list(model.get_submodule(name))[:count]:
            block.forward = partial(_with_inputs_stored, block.forward, store, block if compiled else None)


def _with_inputs_stored(forward: Callable[..., Any], store: BlockStore, block: nn.Module | None, *args: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args)
    given = None if block is None else [*tensors_in(args), *block.parameters(), *block.buffers()]
    with store.takes(args, given):
        return forward(*args)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Those that a block is called with, in tuples and dataclasses too."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        yield from tensors_in([getattr(value, field.name) for field in fields(value)])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)


def _remat(forward: Callable[..., Any], contexts: Callable[[], Contexts] | None, *args: Any) -> Any:
    options = {} if contexts is None else {"context_fn": contexts}
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)


def _contexts(cut: TokenCut | None, kept: Kept, store: BlockStore | None) -> Callable[[], Contexts] | None:
    """In which a forward and its recomputation run; None: in none. By `cache_hash`, which is the same in every process,
    the compiler finds in its cache what it made of a block; without it, it would trace the block in every launch."""
    if cut is None and not kept:
        return None
    found = (
        partial(_selective, kept, store) if cut is None else partial(_contexts_of_peers, _UncachedCut(cut), kept, store)
    )
    found.cache_hash = repr((kept.attention, sorted(kept.products)))
    return found


def _selective(kept: Kept, store: BlockStore | None) -> Contexts:
    if store is None:
        return create_selective_checkpoint_contexts(partial(_policy, kept))
    outputs: deque[Any] = deque()
    return _Storing(kept, outputs, store), _Restoring(kept, outputs)


@dataclass(frozen=True, eq=False)
class _UncachedCut:
    """A cut that the compiler's cache does not look into: groups of ranks are other objects in each process, and all
    that compiled code has of them are the names that its exchanges are called with."""

    cut: TokenCut

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ("a cut",)


def _contexts_of_peers(of: _UncachedCut, kept: Kept, store: BlockStore | None) -> Contexts:
    """Recomputation runs with the lengths of this forward, see `TokenCut.captured`; compiled code keeps them."""
    # `checkpoint` goes by this mode; PyTorch 2.11 sets no other sign while a backend traces
    proxies = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if proxies is not None or torch.compiler.is_compiling():
        return _selective(kept, None)
    if not kept:
        return nullcontext(), of.cut.captured()
    forward, again = _selective(kept, store)
    return forward, of.cut.captured(again)


class _Storing(TorchDispatchMode):
    """Keeps outputs of a forward, in `store` as far as there is room."""

    def __init__(self, kept: Kept, outputs: deque[Any], store: BlockStore) -> None:
        super().__init__()
        self._kept, self._outputs, self._store = kept, outputs, store

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        if self._kept.takes(kept_as(operation, args)):
            self._outputs.append(tree_map_only(Tensor, self._store.keep, out))
        return out


class _Restoring(TorchDispatchMode):
    """Gives these outputs in the same order, in place of computing them."""

    def __init__(self, kept: Kept, outputs: deque[Any]) -> None:
        super().__init__()
        self._kept, self._outputs = kept, outputs

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._kept.takes(kept_as(operation, args)):
            return tree_map(back, self._outputs.popleft())
        return operation(*args, **(kwargs or {}))


def kept_as(operation: Any, args: Sequence[Any]) -> Literal["attention"] | tuple[int, int] | None:
    """What `Kept` calls the output of an operation, by its kind and sizes alone, so that forward and recomputation
    agree; None where the output is of no kind that is ever kept."""
    if isinstance(operation, torch._ops.OpOverload) and operation.name() in MIXERS:
        return "attention"
    if operation in _ATTENTION:  # where gradients are off it is a part of something else
        return "attention" if torch.is_grad_enabled() else None
    if operation in _PRODUCTS:
        first = _PRODUCTS[operation]
        return args[first].shape[1], args[first + 1].shape[1]
    return None


def _policy(kept: Kept, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keeps = kept.takes(kept_as(operation, args))
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
