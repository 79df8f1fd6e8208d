"""Blocks recomputed and compiled, in as few words as tests need."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from longtake.parallel.compile import BlockCompiler, recompute_and_compile
from longtake.parallel.offload import BlockStore
from longtake.parallel.recomputation import CurrentLevel, Level
from longtake.parallel.tokens import TokenCut


def set_blocks(
    model: nn.Module,
    level: Level | CurrentLevel = "none",
    counts: Sequence[int] | None = None,
    cut: TokenCut | None = None,
    compiler: BlockCompiler | None = None,
    store: BlockStore | None = None,
) -> None:
    """Recomputes the first `counts[i]` blocks of each list at a level, all where none are given, and compiles all."""
    counts = [len(model.get_submodule(name)) for name in model.blocks] if counts is None else counts
    current = level if isinstance(level, CurrentLevel) else CurrentLevel(level)
    recompute_and_compile(model, counts, current, cut, compiler, store)
