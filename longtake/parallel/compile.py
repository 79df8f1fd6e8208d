"""Compiling a model's repeated blocks: one graph per kind of block for all bucket shapes.

All blocks of a list share a graph. Dims that differ between buckets (`model.varying_dims`: samples and tokens) are
marked dynamic; a size of one and sampling without gradients get graphs of their own. The number of shapes that may
trigger compilation is bounded: beyond it, blocks run eagerly, and a warning is printed.

Exchanges between peers break graphs. The outputs of a part are not marked dynamic: the next part specialises on the
sizes it first sees and becomes dynamic once a size changes. Among peers there are thus more variants, at most one for
each varying dim beside the first. With tensor peers each layer of a block is a part or more of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longtake.contracts import UserError

Backend = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


@dataclass
class BlockCompiler:
    """Compiles the blocks of one model and counts the variants."""

    dynamic: bool = True  # False: a graph for every shape
    limit: int = 16  # shapes that may be compiled, for each kind of block
    backend: str = "inductor"
    warn: Callable[[str], None] = print  # called once for each kind of block that reaches the limit
    variants: dict[str, int] = field(default_factory=dict)  # list of blocks -> shapes that made new graphs

    def compile(self, model: nn.Module) -> None:
        """Compiles `forward` of every block in `model.blocks`, in place, when it first runs.

        Call it after `cut_model` and before `remat_blocks` and `shard_model`.
        """
        layers = sum(1 for name in model.blocks for _ in model.get_submodule(name).modules())
        lift_compile_limits(self.limit * layers)  # all layers of tensor peers run one function
        for name in model.blocks:
            kind = _BlockKind(self, name, tuple(model.varying_dims[name]) if self.dynamic else ())
            self.variants[name] = 0
            for block in model.get_submodule(name):
                compiled = torch.compile(block.forward, backend=kind.backend, dynamic=None if self.dynamic else False)
                block.forward = partial(kind.run, block.forward, compiled)


class _BlockKind:
    """The blocks of one list: their graphs, and the shapes they have been called with."""

    def __init__(self, compiler: BlockCompiler, name: str, varying: tuple[tuple[int, ...], ...]) -> None:
        self.compiler, self.name, self.varying = compiler, name, varying
        self.backend = self._compile_graph  # one object for all blocks: graphs are shared where backends are the same
        self._lower = torch._dynamo.lookup_backend(compiler.backend)
        self._graphs = 0
        self._seen: set[Any] = set()
        self._warned = False

    def run(self, eager: Callable[..., Any], compiled: Callable[..., Any], *args: Any) -> Any:
        """A block's forward: compiled, or eager where the shape is new and the limit is reached."""
        shapes = (torch.is_grad_enabled(), *(tuple(x.shape) if isinstance(x, Tensor) else None for x in args))
        if shapes in self._seen:
            return compiled(*self._marked(args))
        variants = self.compiler.variants
        if variants[self.name] >= self.compiler.limit:
            self._warn_of_limit()
            return eager(*args)
        before = self._graphs
        out = compiled(*self._marked(args))
        self._seen.add(shapes)
        variants[self.name] += self._graphs > before
        return out

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
        remedy = (
            "raise compile_limit" if self.compiler.dynamic else "set compile_dynamic to True or raise compile_limit"
        )
        self.compiler.warn(
            f"compile_limit = {self.compiler.limit}: {self.name} were compiled for as many shapes; further shapes run "
            f"without compilation, slower; {remedy}"
        )


def lift_compile_limits(variants: int) -> None:
    """Lets the compiler make so many variants of one function, which layers of one class share; beyond its own limit
    it stops compiling the function for good."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, variants)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)


def check_compiler(device: torch.device) -> None:
    """Raises `UserError` where the compiler's backend is missing: a C++ compiler for a CPU, Triton for a GPU."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise UserError("compile = True: Triton is missing for this GPU; install it or write compile = False")
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UserError("compile = True: no C++ compiler was found; install g++ or write compile = False") from None


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
    if found.st_mode & 0o022 or found.st_uid != os.getuid():
        raise UserError(
            f"compile_cache = {str(folder)!r}: others can write to it, and compiled code is run from there; "
            "choose a folder of your own"
        )
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(path)
    os.environ["TRITON_CACHE_DIR"] = str(path / "triton")
    return path
