"""Compiling a model's repeated blocks: all blocks of a list share their graphs.

With dynamic sizes one graph serves all bucket shapes: dims that differ between buckets (`model.varying_dims`: samples
and tokens) are marked dynamic; a size of one and sampling without gradients get graphs of their own. With static sizes
each shape gets a graph, up to a limit; a further shape runs uncompiled, and a warning names it.

A collective between sequence-parallel or tensor-parallel ranks is an operator in the graph (`exchange`). All these
ranks run the collectives of a micro-batch in one order, though each compiles for its own shard: what is recomputed
follows from the graph and not from sizes, the scheduler keeps the order of the graph, and which shapes are compiled
follows from facts that are the same on all of them (batch size, whole token counts). Where a rank's shard is empty none
compiles, because its graph would lose collectives.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longtake.contracts import UserError
from longtake.parallel.exchange import EXCHANGES
from longtake.parallel.offload import BlockStore, offloaded_block
from longtake.parallel.recomputation import (
    CurrentLevel,
    Forward,
    Level,
    Switched,
    compiler_budget,
    full,
    none,
    saved_by_list,
    selective,
    selective_contexts,
)
from longtake.parallel.tokens import TokenCut

STATIC_SHAPES = 16  # of a bucket table (batch x tokens), up to which each gets a graph by default
_MANY_GRAPHS = 1 << 20  # recompilations that Dynamo allows, so that it never falls back to eager without a warning


@dataclass
class BlockCompiler:
    """Compiles the blocks of one model and counts their graphs."""

    dynamic: bool = True  # False: a graph for every shape
    limit: int = STATIC_SHAPES  # shapes with graphs of their own, for each kind of block; graphs that need no warning
    backend: str | Callable[..., Any] = "inductor"
    warn: Callable[[str], None] = print  # called once for each kind of block that reaches the limit
    variants: dict[str, int] = field(default_factory=dict)  # list of blocks -> shapes that made new graphs
    _varying: Mapping[str, Sequence[tuple[int, ...]]] = field(default_factory=dict, repr=False)
    _cut: TokenCut | None = field(default=None, repr=False)
    _kinds: dict[tuple[str, Level], _BlockKind] = field(default_factory=dict, repr=False)  # by list of blocks and level

    def prepare(self, model: nn.Module, cut: TokenCut | None = None) -> None:
        """Set the compiler up for the blocks of a model, whose tokens are cut by `cut`."""
        if cut is not None:
            # What tensor peers gather once for several layers is no side effect that recomputation is to repeat.
            torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
            keep_exchanges_in_order()
        prepare_compiler(_MANY_GRAPHS)
        self._varying, self._cut = model.varying_dims, cut
        self._kinds.clear()
        self.variants.update(dict.fromkeys(model.blocks, 0))

    def compile(self, forward: Forward, blocks: str, level: Level = "none") -> Forward:
        """Return a block's forward compiled when it first runs. blocks: its list; level: that it runs at, if that is
        part of its graphs."""
        kind = self._kinds.get((blocks, level))
        if kind is None:
            kind = self._kinds[blocks, level] = _BlockKind(self, blocks, self._varying[blocks], self._cut, level)
        return kind.compile(forward)


class _BlockKind:
    """The blocks of one list at one level: their graphs, and the shapes they have been called with."""

    def __init__(
        self,
        compiler: BlockCompiler,
        name: str,
        varying: Sequence[tuple[int, ...]],
        cut: TokenCut | None,
        level: Level,
    ) -> None:
        self.compiler, self.name, self.varying, self._cut = compiler, name, varying, cut
        self._budget = level if isinstance(level, float) else None
        self._backend = partial(self._compile_graph)  # one object: blocks with the same backend share graphs
        self._lower = torch._dynamo.lookup_backend(compiler.backend)
        self._graphs = 0
        self._is_compiled: dict[Any, bool] = {}  # by shapes that were seen
        self._has_warned = False

    def compile(self, forward: Forward) -> Forward:
        """Return a block's forward that runs `forward` compiled."""
        dynamic = None if self.compiler.dynamic else False
        return partial(self.run, forward, torch.compile(forward, backend=self._backend, dynamic=dynamic))

    def run(self, eager: Forward, compiled: Forward, *args: Any) -> Any:
        """Return a block's forward: compiled, or eager where the shape is new and the limit is reached."""
        shape = self._shape_of(args)
        is_new = shape not in self._is_compiled
        if is_new:
            self._is_compiled[shape] = self._may_compile(shape)
        if not self._is_compiled[shape]:
            return eager(*args)
        before = self._graphs
        out = compiled(*(self._marked(args) if self.compiler.dynamic else args))
        if self._graphs > before:
            self.compiler.variants[self.name] += is_new
            if self.compiler.dynamic and self._graphs > self.compiler.limit:
                self._warn(shape, "has another graph, which takes minutes; write --compile-dynamic False")
        return out

    def _shape_of(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the facts by which a shape is known, the first whether it learns: the same on all ranks that share
        tokens."""
        learns = torch.is_grad_enabled()
        if self._cut is not None:
            return learns, args[0].shape[0], *self._cut.whole_lengths
        return learns, *(tuple(x.shape) if isinstance(x, Tensor) else None for x in args)

    def _may_compile(self, shape: tuple[Any, ...]) -> bool:
        if self._cut is not None and self._cut.peers.everyone is not None and self._cut.has_empty_shares:
            return False
        alike = sum(is_compiled for other, is_compiled in self._is_compiled.items() if other[0] == shape[0])
        if self.compiler.dynamic or alike < self.compiler.limit:
            return True
        more = f"--compile-limit {2 * self.compiler.limit} or --compile-dynamic True"
        self._warn(shape, f"and further ones run uncompiled, slower; write {more}")
        return False

    def _marked(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        for x, dims in zip(args, self.varying, strict=False):
            if dims:
                torch._dynamo.maybe_mark_dynamic(x, list(dims))
        return args

    def _compile_graph(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Forward:
        self._graphs += 1
        with nullcontext() if self._budget is None else compiler_budget(self._budget):
            return self._lower(graph, inputs)

    def _warn(self, shape: tuple[Any, ...], effect: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        sizes = "; ".join(str(part) for part in shape[1:] if part is not None)
        self.compiler.warn(f"compile_limit = {self.compiler.limit}: {self.name} of shape {sizes} {effect}")


def recompute_and_compile(
    model: nn.Module,
    counts: Sequence[int],
    current: CurrentLevel,
    cut: TokenCut | None = None,
    compiler: BlockCompiler | None = None,
    store: BlockStore | None = None,
) -> None:
    """Compile all blocks of a model, recompute the first `counts[i]` of its i-th list at the current level, and offload
    what these save to `store`. Call it after `cut_model`, whose result is `cut`, and before `shard_model`."""
    if compiler is not None:
        compiler.prepare(model, cut)
    tensor = 1 if cut is None else cut.peers.tensor
    offloaded = store if compiler is None else None  # compiled blocks hand over what they save as a whole
    contexts = {
        (level, blocks): selective_contexts(saved, cut, offloaded)
        for level in current.all
        for blocks, saved in saved_by_list(model, level, tensor).items()
    }

    def at_level(level: Level, block: nn.Module, blocks: str, eager: Forward, plain: Forward) -> Forward:
        """Return a block's forward at a level; `plain`: `eager`, compiled if blocks are."""
        if level == "none":
            return none(plain)
        if level == "full":  # around a compiled block, which has the graph of "none"
            forward = full(plain, cut)
        elif isinstance(level, float):
            forward = compiler.compile(eager, blocks, level)
        elif compiler is None:
            forward = selective(eager, contexts[level, blocks])
        else:  # in the graph: around a compiled block it would save buffers that the compiler reuses
            forward = compiler.compile(selective(eager, contexts[level, blocks]), blocks, level)
        if store is None:
            return forward
        compiler_saves = compiler is not None and level != "full"
        return offloaded_block(forward, store, block if compiler_saves else None)

    for blocks, count in zip(model.blocks, counts, strict=True):
        for place, block in enumerate(model.get_submodule(blocks)):
            eager = block.forward
            block.forward = plain = eager if compiler is None else compiler.compile(eager, blocks)
            if place < count and current.all != ("none",):
                by_level = {level: at_level(level, block, blocks, eager, plain) for level in current.all}
                block.forward = Switched(plain, by_level, current)


def keep_exchanges_in_order() -> None:
    """Make Inductor start collectives between ranks in the order of the graph, whatever it fuses: fusion depends on
    sizes, which differ between ranks by a token."""
    from torch._inductor import config, custom_graph_pass
    from torch._inductor.dependencies import WeakDep

    # what the cache of compiled code asks of such a pass; PyTorch 2.11 has no class of its own for it
    kind = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)

    class KeepOrder(kind):
        def __call__(self, nodes: list[Any]) -> list[Any]:
            exchanges = [node for node in nodes if str(getattr(node.node, "op_overload", None)) in EXCHANGES]
            for before, after in pairwise(exchanges):
                first, then = (next(iter(node.get_buffer_names())) for node in (before, after))
                after.add_fake_dep(WeakDep(first, mutating_buf=then, is_fake=True))
            if exchanges:
                exchanges[0].scheduler.compute_ancestors()  # which say what may be fused
            return nodes

        def uuid(self) -> bytes:
            return custom_graph_pass.get_hash_for_files((__file__,))

    config._pre_fusion_custom_pass = KeepOrder()


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Compile layers of one class, in place, when they first run: alike for all sizes but for one sample or more, one
    frame or more, square or not."""
    prepare_compiler(8 * len(layers))
    for layer in layers:
        layer.compile(dynamic=True)


def prepare_compiler(variants: int = 0) -> None:
    """Set Dynamo and Inductor up for this process; call it before anything is compiled.

    variants: how often one function, which layers of one class share, may be recompiled; beyond Dynamo's own limit
    it gives the function up for good.

    Reductions are not autotuned and products not padded, so that a restart rounds as the launch before it did
    (pytorch#189121): each process would take times of its own. The key of Inductor's cache gets a digest of our code,
    for it knows our operators by name alone and keeps their backwards with the graphs; with that, autograd functions
    such as the layers of tensor peers may be cached too.
    """
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    dynamo = torch._dynamo.config
    dynamo.recompile_limit = max(dynamo.recompile_limit, variants)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, dynamo.recompile_limit)
    # PyTorch made the first to measure what its deterministic mode costs reductions; it is in 2.11 to 2.13
    inductor.test_configs.force_filter_reduction_configs = True
    inductor.dynamic_scale_rblock = inductor.shape_padding = False
    tag = os.environ.get("TORCH_COMPILE_CACHE_KEY_TAG", "")
    torch.compiler.config.cache_key_tag = f"{tag} longtake {_digest_of_our_code()}".strip()
    functorch.autograd_cache_allow_custom_autograd_functions = True


def _digest_of_our_code() -> str:
    """Of what may be in a compiled block: our operators and layers, and torchao's."""
    ours = hashlib.sha256()
    for folder in ("models", "parallel"):
        for file in sorted((Path(__file__).parents[1] / folder).glob("*.py")):
            ours.update(file.read_bytes())
    with suppress(PackageNotFoundError):
        ours.update(version("torchao").encode())
    return ours.hexdigest()


def missing_compiler(device: torch.device) -> str | None:
    """Return what the compiler's backend lacks on this machine, and the fix: a C++ compiler for a CPU, Triton and a C
    compiler, which it calls, for a GPU. None where nothing is missing."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton, has_triton_package

        if not has_triton_package():
            return "Triton cannot be imported; pip install triton"
        if not has_triton():
            return "Triton does not run on this GPU; it needs compute capability 7.0 or higher"
        if not any(map(shutil.which, (os.environ.get("CC", ""), "gcc", "clang", "cc"))):
            return "Triton finds no C compiler; apt-get install gcc, or let CC name one"
        return None
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler was found; apt-get install g++"
    return None


def use_compile_cache(folder: str | Path) -> Path:
    """Make `folder` the cache of compiled code. Returns its absolute path.

    Code is run from the cache, so a folder that others can write to is refused. Raises `UserError` for that, and where
    the folder cannot be made.
    """
    path = Path(folder).expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = path.stat()
    except OSError as error:
        raise UserError(
            f"compile_cache = {str(folder)!r}: {error.strerror}; choose a folder you can write to"
        ) from None
    fault = None
    if found.st_uid != os.getuid():
        fault = "belongs to another user", "choose a folder of your own"
    elif found.st_mode & 0o022:
        fault = "others can write to it", f"chmod go-w {path}"
    if fault is not None:
        raise UserError(f"compile_cache = {str(folder)!r}: {fault[0]}, and compiled code is run from there; {fault[1]}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(path)
    os.environ["TRITON_CACHE_DIR"] = str(path / "triton")
    return path
