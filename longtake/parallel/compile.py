"""Compiling a model's repeated blocks: one graph for a kind of block, whatever the shape of a bucket.

All blocks of a list run the same code, so a graph is made for the first and serves the others. The dims that differ
from bucket to bucket (`model.varying_dims`: samples and tokens) are marked, so that the graph takes any size; a size of
one gets a graph of its own, and so does sampling, which needs no gradients. Shapes that have graphs made for them are
bounded in number: one beyond the bound runs without compilation, and the run says so.

An exchange between peers is left out of graphs and cuts them in pieces. What comes out of one piece is not marked: the
next piece takes the sizes it first sees, and any size in a dim once that has changed. Hence among peers there are more
variants, at most one for each varying dim beside the first, however many buckets there are. With tensor peers there are
more pieces, one or more for each layer of a block, which all blocks of the kind share as well.
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
    """Compiles the blocks of one model and counts what that took."""

    dynamic: bool = True  # False: a graph for every shape
    limit: int = 16  # shapes for which graphs of one kind of block are made
    backend: str = "inductor"
    tell: Callable[[str], None] = print  # gets a sentence, once for each kind of block that reaches the limit
    variants: dict[str, int] = field(default_factory=dict)  # list of blocks -> shapes that made new graphs

    def compile(self, model: nn.Module) -> None:
        """Compiles `forward` of every block in `model.blocks`, in place; the work is done when a block first runs.

        Call it after `cut_model` and before `remat_blocks` and `shard_model`. What must stay out of graphs, such as
        exchanges between peers, breaks them.
        """
        self._lift_limits(model)
        for name in model.blocks:
            kind = _Kind(self, name, tuple(model.varying_dims[name]) if self.dynamic else ())
            self.variants[name] = 0
            for block in model.get_submodule(name):
                compiled = torch.compile(block.forward, backend=kind.backend, dynamic=None if self.dynamic else False)
                block.forward = partial(kind.run, block.forward, compiled)

    def _lift_limits(self, model: nn.Module) -> None:
        """Keeps the compiler's own limits, which count by function, from biting before ours, which counts by shape.

        Beyond them it gives a function up for good. Tensor peers' layers all run one function, a graph for each width.
        """
        layers = sum(1 for name in model.blocks for _ in model.get_submodule(name).modules())
        config = torch._dynamo.config
        config.recompile_limit = max(config.recompile_limit, self.limit * layers)
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)


class _Kind:
    """The blocks of one list: their graphs, and the shapes they have been called with."""

    def __init__(self, compiler: BlockCompiler, name: str, varying: tuple[tuple[int, ...], ...]) -> None:
        self.compiler, self.name, self.varying = compiler, name, varying
        self.backend = self._compile_graph  # one object for all blocks: graphs are shared where backends are the same
        self._lower = torch._dynamo.lookup_backend(compiler.backend)
        self._graphs = 0
        self._seen: set[Any] = set()
        self._told = False

    def run(self, eager: Callable[..., Any], compiled: Callable[..., Any], *args: Any) -> Any:
        """A block's forward; without its graph where the shape is new and there are as many graphs as there may be."""
        shapes = (torch.is_grad_enabled(), *(tuple(x.shape) if isinstance(x, Tensor) else None for x in args))
        if shapes in self._seen:
            return compiled(*self._marked(args))
        variants = self.compiler.variants
        if variants[self.name] >= self.compiler.limit:
            self._tell_limit()
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

    def _tell_limit(self) -> None:
        if self._told:
            return
        self._told = True
        remedy = (
            "raise compile_limit" if self.compiler.dynamic else "set compile_dynamic to True or raise compile_limit"
        )
        self.compiler.tell(
            f"compile_limit = {self.compiler.limit}: {self.name} were compiled for as many shapes; further shapes run "
            f"without compilation, slower; {remedy}"
        )


def check_compiler(device: torch.device) -> None:
    """Raises `UserError` where there is nothing to compile with: a C++ compiler for a CPU, Triton for a GPU."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise UserError("compile = True: Triton is not there for this GPU; install it or write compile = False")
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UserError("compile = True: no C++ compiler was found; install g++ or write compile = False") from None


def use_compile_cache(folder: str | Path) -> Path:
    """Lets compiled code be kept in `folder` and found there by later launches. Returns its absolute path.

    The compiler trusts what it finds there, so the folder must be one that only its user can write to; one that others
    can write to is refused. Raises `UserError` for that, and where the folder cannot be made.
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
