"""What a plan says that compiled blocks keep, and what blocks keep that PyTorch has compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longtake.models.build import build_denoiser, denoiser_class, example_conditions
from longtake.models.config import LoraConfig
from longtake.parallel.compile import BlockCompiler
from longtake.parallel.config import ParallelConfig
from longtake.parallel.mesh import Mesh
from longtake.parallel.offload import tensors_in
from longtake.parallel.recomputation import Level
from longtake.parallel.shard import cut_model
from longtake.parallel.tokens import TokenCut
from longtake.parallel.world import World
from longtake.plan import trace_cache
from longtake.plan.layout import Layout, MicroBatch, Upkeep
from longtake.plan.memory import placed_blocks
from longtake.plan.parameters import block_names
from longtake.plan.trace_cache import traced_before
from longtake.system.config import SystemConfig
from longtake.system.lora import choose_trained
from tests.parallel.blocks import set_blocks
from tests.plan.test_blocks import FAMILIES
from tests.plan.trace import saved_bytes
from tests.ranks import on_ranks

TEXT = 16
LORA = {"adapters": LoraConfig(rank=4)} | {
    f"adapters on {bits} bits": LoraConfig(rank=4, base=base) for bits, base in ((8, "int8"), (4, "nf4"))
}


def kept_by_compiled_blocks(
    model: nn.Module, run: Callable[[], object], backend: str, cut: TokenCut | None = None, level: Level = "none"
) -> dict[str, int]:
    """Bytes that each block keeps beside its weights and what it is called with but the output of the one before."""
    blocks = {f"{name}.{i}": block for name in model.blocks for i, block in enumerate(model.get_submodule(name))}
    set_blocks(model, level, cut=cut, compiler=BlockCompiler(dynamic=backend != CUT, backend=backend))
    handed: list[Tensor] = []
    found = {}

    def see(name: str, forward: Callable[..., Any], *args: Any) -> Any:
        made = {id(one) for one in handed}
        shared = [one for one in tensors_in(args) if id(one) not in made]
        out: list[Any] = []
        found[name] = saved_bytes(lambda: out.append(forward(*args)), [*model.parameters(), *model.buffers(), *shared])
        handed[:] = tensors_in(out)
        return out[0]

    for name, block in blocks.items():
        block.forward = partial(see, name, block.forward)
    run()
    return found


CUT = "aot_eager_decomp_partition"  # Inductor's partition, without its code
CASES = [*((name, None, "none", CUT) for name in FAMILIES), *(("mmdit", name, "none", CUT) for name in LORA)]
CASES += [(name, None, "selective", CUT) for name in FAMILIES]
CASES += [("mmdit", None, level, CUT) for level in (("linear2", "img_mlp.2"), "full", 0.3, 0.6)]
CASES += [("cogvideox", None, "none", "inductor")]


@pytest.mark.parametrize(
    ("family", "lora", "level", "backend"),
    [pytest.param(*case, marks=() if case == CASES[0] else pytest.mark.slow) for case in CASES],
)
def test_compiled_blocks_keep_what_is_foretold(
    family: str, lora: str | None, level: Level, backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch.compiler.reset()
    # on a CPU, attention over few tokens would be matrix products, which keep their scores
    facts = {"attention": "sdpa"} | dict.fromkeys(denoiser_class(FAMILIES[family]).blocks.values(), 2)
    if lora == "adapters on 4 bits":  # whose blocks are of 64 inputs
        facts |= {key: 2 * getattr(FAMILIES[family], key) for key in ("hidden_size", "num_heads")}
    config = FAMILIES[family].model_copy(update=facts)
    batch = MicroBatch(2, (config.latent_channels, 13, 16, 24), TEXT)
    torch.manual_seed(0)
    model = build_denoiser(config)
    for p in model.parameters():
        nn.init.normal_(p, std=0.02)
    if lora is not None:
        run = SystemConfig.model_construct(model=config, lora=LORA[lora], freeze=(), train_only=None)
        choose_trained(model, run, torch.float32)
    x, conditions = torch.randn(2, *batch.latent), example_conditions(config, batch.latent, TEXT, 2)
    found = kept_by_compiled_blocks(model, lambda: model(x, torch.full((2,), 0.5), conditions), backend, level=level)
    upkeep = Upkeep(lora=LORA.get(lora))
    # in bf16, norms keep less on a CPU than on a GPU
    layout = Layout(compiled=True, compute_bytes=4, upkeep=upkeep, remat=(2,) * len(model.blocks), level=level)
    said = dict(zip(block_names(config), placed_blocks(config, batch, layout), strict=True))
    behind = [name for name in found if name.endswith(".1")]  # what the first are called with comes from elsewhere
    assert {name: said[name].held / found[name] for name in behind} == pytest.approx(dict.fromkeys(behind, 1), rel=0.03)


OF_PEERS = FAMILIES["mmdit"].model_copy(update={"attention": "sdpa", "depth": 0, "depth_single_blocks": 2})
LATENT = (OF_PEERS.latent_channels, 13, 16, 24)


def kept_by_peers(world: World) -> dict[str, int]:
    model = build_denoiser(OF_PEERS)
    cut = cut_model(model, Mesh.create(ParallelConfig(sequence=2), world))
    x, conditions = torch.randn(2, *LATENT), example_conditions(OF_PEERS, LATENT, TEXT, 2)
    return kept_by_compiled_blocks(model, lambda: model(x, torch.full((2,), 0.5), conditions), CUT, cut)


@pytest.mark.slow
def test_compiled_blocks_of_peers_keep_what_is_foretold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, _ = on_ranks(2, tmp_path, {"kept": kept_by_peers})
    layout = Layout(compiled=True, compute_bytes=4, sequence=2)
    _, said = placed_blocks(OF_PEERS, MicroBatch(2, LATENT, TEXT), layout)
    assert said.held == pytest.approx(first["kept"]["single_blocks.1"], rel=0.03)


def test_what_was_seen_of_compiled_blocks_is_kept_apart_by_what_it_depends_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = iter(range(9))

    def look(*facts: Any) -> int:
        return traced_before("compiled_blocks", lambda: next(seen), *facts)

    assert [look("mmdit", 2), look("mmdit", 4), look("mmdit", 2)] == [0, 1, 0]
    monkeypatch.setattr(torch, "__version__", "another")
    assert look("mmdit", 2) == 2
    for file in tmp_path.rglob("*.json"):
        file.write_text("{", encoding="utf-8")
    assert look("mmdit", 2) == 3  # what cannot be read is looked at again
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert [look("mmdit", 2), look("mmdit", 2)] == [4, 5]  # nowhere to keep it


def test_what_is_kept_of_a_trace_depends_on_the_code_that_traces() -> None:
    folder = Path(trace_cache.__file__).parent
    users = {f"plan/{file.name}" for file in folder.glob("*.py") if " import traced_before" in file.read_text()}
    assert {"plan/blocks.py", "plan/video.py"} <= users <= set(trace_cache._TRACING)
