"""Compiling a model's repeated blocks: one graph per kind of block for all bucket shapes.

All blocks of a list share a graph. Dims that differ between buckets (`model.varying_dims`: samples and tokens) are
marked dynamic; a size of one and sampling without gradients get graphs of their own. The number of shapes that may
trigger compilation is bounded: beyond it, blocks run eagerly, and a warning is printed. A mode (`BlockMode`) names the
micro-batches whose shapes have graphs of their own.

An exchange between peers is an operator in the graph (`exchange`). All peers make the exchanges of a micro-batch in one
order, though each compiles for its own share: what is recomputed follows from the graph and not from sizes, the
scheduler keeps the order of the graph, and whether a new shape is compiled is decided together. Where a peer's share is
empty none compiles, for its graph would lose exchanges.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from longtake.contracts import UserError
from longtake.parallel.exchange import EXCHANGES, sum_of_all
from longtake.parallel.offload import BlockStore
from longtake.parallel.remat import BlockMode, ByBudget, keeps_outputs, offload_inputs, remat_blocks
from longtake.parallel.tokens import TokenCut

STATIC_SHAPES = 16  # of a kind of block, which may have graphs of their own beside the one for all others


@dataclass
class BlockCompiler:
    """Compiles the blocks of one model and counts the variants."""

    dynamic: bool = True  # False: a graph for every shape
    limit: int = 16  # shapes that may be compiled, for each kind of block
    backend: str | Callable[..., Any] = "inductor"
    warn: Callable[[str], None] = print  # called once for each kind of block that reaches the limit
    mode: BlockMode = field(default_factory=BlockMode)  # says when a shape gets a graph of its own
    variants: dict[str, int] = field(default_factory=dict)  # list of blocks -> shapes that made new graphs
    static: dict[str, int] = field(default_factory=dict)  # list of blocks -> shapes that have graphs of their own

    def compile(self, model: nn.Module, cut: TokenCut | None = None) -> None:
        """Compiles `forward` of every block in `model.blocks`, in place, when it first runs.

        `remat_and_compile` calls it at its time among what else is done to blocks.
        """
        if cut is not None:
            # What tensor peers gather once for several layers is no side effect that recomputation is to repeat.
            torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
            keep_exchanges_in_order()
        layers = sum(1 for name in model.blocks for _ in model.get_submodule(name).modules())
        prepare_compiler((self.limit + STATIC_SHAPES) * layers)  # all layers of tensor peers run one function
        for name in model.blocks:
            varying = tuple(model.varying_dims[name]) if self.dynamic else ()
            kinds: dict[int, _BlockKind] = {}  # by the place of a way among those of a block
            self.variants[name] = self.static[name] = 0
            for block in model.get_submodule(name):
                ways = block.forward.distinct if isinstance(block.forward, ByBudget) else [block.forward]
                compiled = {}
                for i, way in enumerate(ways):
                    kind = kinds.setdefault(i, _BlockKind(self, name, varying, cut))
                    compiled[way] = kind.compile(way, self.dynamic)
                block.forward = (
                    block.forward.exchanged(compiled) if isinstance(block.forward, ByBudget) else compiled[ways[0]]
                )


class _BlockKind:
    """The blocks of one list: their graphs, and the shapes they have been called with."""

    def __init__(
        self, compiler: BlockCompiler, name: str, varying: tuple[tuple[int, ...], ...], cut: TokenCut | None
    ) -> None:
        self.compiler, self.name, self.varying, self._cut = compiler, name, varying, cut
        # objects of their own: graphs are shared by all blocks where backends are the same, and nowhere else
        self.backend, self.static_backend = partial(self._compile_graph), partial(self._compile_graph)
        self._lower = torch._dynamo.lookup_backend(compiler.backend)
        self._graphs = 0
        self._ways: dict[Any, Literal["eager", "static", "dynamic"]] = {}  # by shapes that were seen
        self._warned = False

    def compile(self, forward: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
        """A block's forward that runs `forward` compiled."""
        compiled = torch.compile(forward, backend=self.backend, dynamic=None if dynamic else False)
        static = torch.compile(forward, backend=self.static_backend, dynamic=False)
        return partial(self.run, forward, compiled, static)

    def run(
        self, eager: Callable[..., Any], compiled: Callable[..., Any], static: Callable[..., Any], *args: Any
    ) -> Any:
        """A block's forward: compiled, or eager where the shape is new and the limit is reached."""
        shapes = (torch.is_grad_enabled(), *(tuple(x.shape) if isinstance(x, Tensor) else None for x in args))
        shapes += (None if self._cut is None else self._cut.whole_lengths,)
        if new := shapes not in self._ways:  # known by itself afterwards, for recomputation
            self._ways[shapes] = self._choose_way(args[0].device)
        way = self._ways[shapes]
        if way != "dynamic":
            return (static if way == "static" else eager)(*args)
        before = self._graphs
        out = compiled(*self._marked(args))
        self.compiler.variants[self.name] += new and self._graphs > before
        return out

    def _choose_way(self, device: torch.device) -> Literal["eager", "static", "dynamic"]:
        """How a new shape is run, which all peers say alike: they may have met different ones before, as other peers
        of other ranks."""
        compiler, name, learns = self.compiler, self.name, torch.is_grad_enabled()
        most = STATIC_SHAPES if compiler.dynamic else max(STATIC_SHAPES, compiler.limit)
        others = compiler.dynamic or not compiler.mode.static_sizes or not learns  # whether these are compiled at all
        filled = [list(self._ways.values()).count("static") >= most, compiler.variants[name] >= compiler.limit]
        if self._cut is not None and (group := self._cut.peers.everyone) is not None:
            if self._cut.has_empty_shares:
                return "eager"
            filled = sum_of_all(torch.tensor(filled, dtype=torch.float32, device=device), group).tolist()
        if compiler.mode.static and learns and not filled[0]:
            compiler.static[name] += 1
            return "static"
        if others and not filled[1]:
            return "dynamic"
        self._warn_of_limit()
        return "eager"

    def _marked(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        for x, dims in zip(args, self.varying, strict=False):
            if dims:
                torch._dynamo.maybe_mark_dynamic(x, list(dims))
        return args

    def _compile_graph(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._graphs += 1
        return self._lower(graph, inputs)

    def _warn_of_limit(self) -> None:
        if self._warned:
            return
        self._warned = True
        limit, other = self.compiler.limit, "" if self.compiler.dynamic else " or --compile-dynamic True"
        self.compiler.warn(
            f"compile_limit = {limit}: {self.name} are compiled for at most so many shapes; this one and further ones "
            f"run uncompiled, slower; write --compile-limit {2 * limit}{other}"
        )


def remat_and_compile(
    model: nn.Module,
    counts: Sequence[int],
    cut: TokenCut | None = None,
    mode: BlockMode | None = None,
    compiler: BlockCompiler | None = None,
    store: BlockStore | None = None,
) -> None:
    """Recomputes, compiles and offloads the blocks of a model, in the one order in which these go together: what is
    kept beside inputs must be known to the compiler, and around a compiled block selective recomputation would keep
    buffers that the compiler reuses. Call it after `cut_model`, whose result is `cut`, and before `shard_model`.

    counts: first blocks of each list that are recomputed; mode: what these keep; store: where they offload it, and
    their inputs.
    """
    mode = BlockMode() if mode is None else mode
    keeps = keeps_outputs(model, mode.levels[-1], 1 if cut is None else cut.peers.tensor)
    if keeps:
        remat_blocks(model, counts, cut, store=store if compiler is None else None, mode=mode)
    if compiler is not None:
        compiler.compile(model, cut)
    if not keeps:
        remat_blocks(model, counts, cut)
    if store is not None:
        offload_inputs(model, counts, store, compiled=compiler is not None and keeps)


def keep_exchanges_in_order() -> None:
    """Lets Inductor start exchanges between peers in the order of the graph, whatever it fuses: what it does follows
    from sizes, which differ between peers by a token."""
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
    """Compiles layers of one class, in place, when they first run: alike for all sizes but for one sample or more, one
    frame or more, square or not."""
    prepare_compiler(8 * len(layers))
    for layer in layers:
        layer.compile(dynamic=True)


def prepare_compiler(variants: int = 0) -> None:
    """Sets Dynamo and Inductor up for this process; call it before anything is compiled.

    variants: how often one function, which layers of one class share, may be compiled anew; beyond Dynamo's own limit
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
    """What the compiler's backend lacks on this machine, and what to do: a C++ compiler for a CPU, Triton and a C
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
    """Makes `folder` the cache of compiled code. Returns its absolute path.

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
