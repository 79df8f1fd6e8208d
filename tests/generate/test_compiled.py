"""Compiled blocks make the video of eager ones; without a compiler they stay eager."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.generate.run import open_system
from longtake.generate.source import resolve_source
from longtake.parallel.compile import BlockCompiler
from longtake.parallel.world import World
from tests.encoders.conftest import described
from tests.generate.on_peers import make, tiny_system

__all__ = ["described"]
PRESET = Path(__file__).parents[2] / "configs" / "opensora_v2" / "inference" / "256px.py"


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
def test_compiled_blocks_make_the_video_of_eager_ones(
    described: dict[str, Any], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = []

    def counted(graph: torch.fx.GraphModule, inputs: Any) -> Any:  # which is not lowered to code, to save time
        graphs.append(graph)
        return graph

    monkeypatch.setattr("longtake.system.build.BlockCompiler", partial(BlockCompiler, backend=counted))
    options = {"text_osci": True, "num_steps": 12}  # steps of two branches, and of one
    eager = make(tiny_system(described, world), "still", **options)
    assert not graphs
    compiled = make(tiny_system(described, world, "--compile", "True"), "still", **options)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-5)
    assert len(graphs) == 4  # of each of the two kinds of block, one for two branches and more, one for one


def test_without_a_compiler_blocks_stay_eager_with_a_line(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def none_there() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", none_there)
    said: list[str] = []
    flags = ["--tiny", "--device", "cpu", "--compile", "--model.recompute", "0.5"]
    system = open_system(resolve_source(str(PRESET), flags), world, said.append)
    assert (system.config.compile, system.config.model.recompute) == (False, "none")
    assert not any(line.startswith("compiled") for line in system.kernels)
    assert said[0].startswith("not compiled: no C++ compiler was found; apt-get install g++")
