"""Recomputation of activations (rematerialisation): `model.recompute`, a level for each entry of the bucket table.

| level         | a block saves for backward                     | and computes twice             |
|---------------|------------------------------------------------|--------------------------------|
| `"none"`      | everything that its backward reads             | nothing                        |
| `"selective"` | its input and the output of attention          | all but attention              |
| layer names   | as well the outputs of these linear layers     | all but attention and these    |
| `"full"`      | its input                                      | the whole block                |
| 0 to 1        | a share that the compiler chooses              | what is cheapest for its bytes |

The levels are applied by `none`, `selective`, `full` and `compiler_budget`, whose docstrings say when to use them.
Gradients are unchanged, bit for bit where kernels are deterministic. Saved tensors may be offloaded (`offload`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from longtake.contracts import Bucket, UserError
from longtake.models.attention import MIXERS, Attention
from longtake.models.build import block_counts
from longtake.parallel.degrees import EntryKey
from longtake.parallel.offload import BlockStore, back
from longtake.parallel.sequence import matching
from longtake.parallel.tokens import TokenCut

Level = str | float | tuple[str, ...]
NAMED_LEVELS = ("none", "selective", "full")  # in the order of what they compute twice, the least first

_ATTENTION = frozenset(
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    for name in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
)
_NEVER_SAVED = ("math", "flex")  # backends that are none of these operators
# matmul -> which argument is its input; emulated float8 (on a CPU) multiplies by `mm` too
_MATMULS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1, torch.ops.aten._scaled_mm.default: 0}

Forward = Callable[..., Any]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def level_and_counts(model: Any) -> tuple[Level, tuple[int, ...]]:
    """Return the level that a model section asks for, which may be "auto", and how many first blocks of each list have
    it.

    Left out, it is "selective" for the blocks that `grad_ckpt_settings` names; given alone it is for all blocks.
    """
    counts, first = tuple(block_counts(model).values()), model.grad_ckpt_settings
    level = model.recompute or ("none" if first is None else "selective")
    if level == "none":
        return level, (0,) * len(counts)
    return level, counts if first is None else tuple(map(min, first, counts))


def check_level(level: Level, compiled: bool, ranks: int) -> None:
    """Raise `UserError` for a level that the blocks of a run cannot have. ranks: that share a micro-batch."""
    if not isinstance(level, float):
        return
    if not compiled:
        raise UserError(
            f"model.recompute = {level:g}: a number is a budget of compiled blocks, and these are not compiled; write "
            'compile = True, or "selective" or "full"'
        )
    if ranks > 1:
        raise UserError(
            f"model.recompute = {level:g}: the compiler chooses by sizes, which differ between the {ranks} ranks that "
            'share a micro-batch; write "selective" or "full", or parallel.sequence = 1 and parallel.tensor = 1'
        )


def level_setting(level: Level) -> str:
    """Return a level as a setting of a run file."""
    return f"model.recompute = {level_text(level)}"


def counts_setting(model: Any, counts: Sequence[int]) -> str:
    """Return the settings by which so many first blocks of each list are recomputed, where a model section is
    as it is."""
    setting = f"model.grad_ckpt_settings = {tuple(counts)}"
    return f"{setting} with {level_setting('selective')}" if model.recompute == "none" else setting


def level_text(level: Level) -> str:
    """Return the value of such a setting."""
    return f"{level:g}" if isinstance(level, float) else f'"{level}"' if isinstance(level, str) else str(list(level))


def levels_text(levels: Mapping[str, Level]) -> str:
    """Return the level of each entry of a bucket table, by name, in one line."""
    by_level: dict[Level, list[str]] = {}
    for name, level in levels.items():
        by_level.setdefault(level, []).append(name)
    parts = (f"{level_text(level)} for {', '.join(names)}" for level, names in by_level.items())
    return f"model.recompute: {'; '.join(parts)}"


@dataclass
class CurrentLevel:
    """The level of the next forwards and of their backwards, switched for each micro-batch."""

    level: Level = "none"
    levels: Mapping[EntryKey, Level] = field(default_factory=dict)  # by entry of the bucket table, where they differ

    def use(self, bucket: Bucket) -> None:
        """Prepare for a micro-batch of `bucket`; one of no entry has the level that saves least."""
        if self.levels:
            least = max(self.levels.values(), key=NAMED_LEVELS.index)
            self.level = self.levels.get(bucket.entry, least)

    @property
    def all(self) -> tuple[Level, ...]:
        """The levels that a micro-batch may have."""
        return tuple(dict.fromkeys([self.level, *self.levels.values()]))


@dataclass(frozen=True)
class Switched:
    """A block's forward that runs at the current level; without gradients nothing is saved, at any level."""

    plain: Forward
    by_level: Mapping[Level, Forward]
    current: CurrentLevel

    def __call__(self, *args: Any) -> Any:
        forward = self.by_level[self.current.level] if torch.is_grad_enabled() else self.plain
        return forward(*args)


def none(forward: Forward) -> Forward:
    """Save everything that backward reads, and compute nothing twice.

    Use it where memory suffices: it is the fastest level, and takes several times the memory of the others.
    """
    return forward


def selective(forward: Forward, contexts: Callable[[], Contexts]) -> Forward:
    """Save a block's input, the output of attention with the log-sum-exp of its scores, and outputs of the layers that
    are named; compute all else again in backward.

    Use it first when memory is short: attention's FLOPs grow with the square of the tokens and its output only with the
    tokens, so it saves the most computation for its bytes. Layer names are the finer step up from it, where there
    is room for some outputs more. contexts: of `selective_contexts`.
    """
    return partial(_checkpointed, forward, contexts)


def selective_contexts(saved: Saved, cut: TokenCut | None = None, store: BlockStore | None = None) -> Any:
    """Return the contexts in which selective blocks run and are recomputed: one object for all blocks of a list,
    because blocks share a compiled graph only where this is the same. `store`: offloads what is saved, from blocks
    that are not compiled."""
    contexts = partial(_selective_contexts, saved, None if cut is None else _UncachedCut(cut), store)
    # by this hash, equal in every process, the compiler finds in its cache what it made of a block
    contexts.cache_hash = repr((saved.attention, sorted(saved.sizes)))
    return contexts


def full(forward: Forward, cut: TokenCut | None = None) -> Forward:
    """Save a block's input alone, and compute the whole block again in backward.

    Use it where "selective" does not fit: it takes the least memory, and a step computes a third more.
    """
    return partial(_checkpointed, forward, None if cut is None else partial(_full_contexts, cut))


def compiler_budget(budget: float) -> AbstractContextManager[Any]:
    """Let the compiler save as much as `budget`, a share between that of "full" (0) and that of "none" (1), and choose
    what: PyTorch's `activation_memory_budget`. Blocks that are compiled inside have it.

    Use it for compiled blocks where "none" does not fit and "selective" leaves memory unused; no blocks of ranks that
    share tokens have it, because the choice follows from sizes.
    """
    from torch._functorch import config

    return config.patch(activation_memory_budget=budget)


@dataclass(frozen=True)
class Saved:
    """Outputs that selective blocks save next to their inputs: those of attention, and of some linear layers.

    A layer is known by its sizes, as operators are in forward and recomputation alike, so layers of equal sizes in a
    block are saved together.
    """

    sizes: frozenset[tuple[int, int]] = frozenset()  # (inputs, outputs) of the layers on this rank
    attention: bool = True  # False: its kernel is none of the operators that can be saved

    def has(self, name: Literal["attention"] | tuple[int, int] | None) -> bool:
        """Return True for an output of this `saved_as` name that is saved. Compared by ==: under the compiler a size
        may be a SymInt, which has no hash, where one process has compiled models of several sizes."""
        return self.attention if name == "attention" else any(name == size for size in self.sizes)


def saved_by_list(model: nn.Module, level: Level, tensor: int = 1) -> dict[str, Saved]:
    """Return the outputs that selective blocks of each list of a model save, at a tensor degree. Raises `UserError`
    for names of no linear layer over tokens (`model.tensor_plan`)."""
    names = level if isinstance(level, tuple) else ()
    sizes: dict[str, dict[str, tuple[int, int]]] = {blocks: {} for blocks in model.blocks}
    for pattern, split in (model.tensor_plan or {}).items() if names else ():
        for name, layer in matching(model, pattern):
            blocks, _, place = name.partition(".")
            number, _, layer_name = place.partition(".")
            if split.tokens and number == "0":
                inputs, outputs = (tensor if split.kind == kind else 1 for kind in ("row", "column"))
                sizes[blocks][layer_name] = layer.in_features // inputs, layer.out_features // outputs
    known = {name for layers in sizes.values() for name in layers}
    if unknown := [name for name in names if name not in known]:
        raise UserError(
            f"model.recompute: {', '.join(unknown)}: not a linear layer of the blocks; use {', '.join(sorted(known))}"
        )
    attention = all(part.backend not in _NEVER_SAVED for part in model.modules() if isinstance(part, Attention))
    return {
        blocks: Saved(frozenset(layers[name] for name in names if name in layers), attention)
        for blocks, layers in sizes.items()
    }


def saved_as(operation: Any, args: Sequence[Any]) -> Literal["attention"] | tuple[int, int] | None:
    """Return the name by which `Saved` knows the output of an operation, by its kind and sizes alone, so that
    forward and recomputation agree; None where the output is never saved."""
    if isinstance(operation, torch._ops.OpOverload) and operation.name() in MIXERS:
        return "attention"
    if operation in _ATTENTION:  # where gradients are off it is a part of something else
        return "attention" if torch.is_grad_enabled() else None
    if operation in _MATMULS:
        first = _MATMULS[operation]
        return args[first].shape[1], args[first + 1].shape[1]
    return None


def _checkpointed(forward: Forward, contexts: Callable[[], Contexts] | None, *args: Any) -> Any:
    options = {} if contexts is None else {"context_fn": contexts}
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)


@dataclass(frozen=True, eq=False)
class _UncachedCut:
    """A cut that the compiler's cache does not look into: groups of ranks are other objects in each process, and
    compiled code has only the names that its collectives are called with."""

    cut: TokenCut

    def __reduce__(self) -> tuple[Any, ...]:
        return str, ("a cut",)


def _full_contexts(cut: TokenCut) -> Contexts:
    """Recomputation runs with the lengths of this forward, see `TokenCut.captured`."""
    return nullcontext(), cut.captured()


def _selective_contexts(saved: Saved, uncached: _UncachedCut | None, store: BlockStore | None) -> Contexts:
    # `checkpoint` goes by this mode; PyTorch 2.11 sets no other sign while a backend traces
    proxies = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    is_traced = proxies is not None or torch.compiler.is_compiling()
    if store is None or is_traced:
        forward, again = create_selective_checkpoint_contexts(partial(_policy, saved))
    else:
        outputs: deque[Any] = deque()
        forward, again = _Storing(saved, outputs, store), _Restoring(saved, outputs)
    if uncached is None or is_traced:  # compiled code keeps the lengths of its forward
        return forward, again
    return forward, uncached.cut.captured(again)


def _policy(saved: Saved, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if saved.has(saved_as(operation, args)) else CheckpointPolicy.PREFER_RECOMPUTE


class _Storing(TorchDispatchMode):
    """Saves outputs of a forward, in `store` as far as there is room."""

    def __init__(self, saved: Saved, outputs: deque[Any], store: BlockStore) -> None:
        super().__init__()
        self._saved, self._outputs, self._store = saved, outputs, store

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        if self._saved.has(saved_as(operation, args)):
            self._outputs.append(tree_map_only(Tensor, self._store.keep, out))
        return out


class _Restoring(TorchDispatchMode):
    """Gives these outputs in the same order, in place of computing them."""

    def __init__(self, saved: Saved, outputs: deque[Any]) -> None:
        super().__init__()
        self._saved, self._outputs = saved, outputs

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._saved.has(saved_as(operation, args)):
            return tree_map(back, self._outputs.popleft())
        return operation(*args, **(kwargs or {}))
