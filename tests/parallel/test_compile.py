"""Compiled blocks compute what eager ones do, with few graphs for many shapes, and find their code again."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longtake.contracts import Bucket, UserError
from longtake.models.config import MMDiTConfig
from longtake.models.mmdit import MMDiT
from longtake.parallel.compile import BlockCompiler, keep_exchanges_in_order, use_compile_cache
from longtake.parallel.config import ParallelConfig
from longtake.parallel.exchange import EXCHANGES, CountedGroup, Lengths, gather_tokens
from longtake.parallel.mesh import Mesh
from longtake.parallel.recomputation import CurrentLevel, Level
from longtake.parallel.shard import cut_model, initialise_sharded, shard_model
from longtake.parallel.world import World
from tests.models.golden import random_inputs, tiny_config
from tests.models.initialised import initialise
from tests.parallel.blocks import set_blocks
from tests.parallel.one_step import whole
from tests.precision import within
from tests.ranks import Facts, on_ranks

compile_module = importlib.import_module("longtake.parallel.compile")
CONFIG = tiny_config(depth=3, depth_single_blocks=3, cond_embed=True)
SINGLE_BLOCKS = tiny_config(depth=0, depth_single_blocks=2)
pytestmark = pytest.mark.usefixtures("fresh_compiler")
# (frames, height, width) of latents, samples, text tokens
BUCKETS = (((2, 6, 6), 2, 5), ((3, 4, 4), 3, 4), ((1, 10, 2), 4, 7))


def built(
    compiler: BlockCompiler | None = None,
    remat: tuple[int, int] | None = None,
    config: MMDiTConfig = CONFIG,
    level: Level | CurrentLevel = "none",
) -> MMDiT:
    model = MMDiT(config)
    initialise(model, 3)
    set_blocks(model, level, remat, compiler=compiler)
    return model


def loss_and_gradients(model: nn.Module, bucket: tuple) -> tuple[float, dict[str, torch.Tensor]]:
    size, samples, text_tokens = bucket
    model.zero_grad()
    loss = model(*random_inputs(CONFIG, size, batch=samples, text_tokens=text_tokens)).square().mean()
    loss.backward()
    return loss.item(), {name: whole(p.grad) for name, p in model.named_parameters()}


def distance(ours: nn.Module, theirs: nn.Module, bucket: tuple) -> float:
    """Law 1: the farthest of loss (relative) and gradients (over the largest of all)."""
    (loss, gradients), (expected_loss, expected) = (loss_and_gradients(model, bucket) for model in (ours, theirs))
    assert gradients.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    farthest = max(float((g - expected[name]).abs().max()) for name, g in gradients.items()) / largest
    return max(farthest, abs(loss / expected_loss - 1))


@pytest.mark.parametrize("remat", [None, (3, 1)])
def test_one_graph_serves_all_blocks_of_a_kind_and_all_buckets(remat: tuple[int, int] | None) -> None:
    compiler = BlockCompiler(backend="eager")
    compiled, eager = built(compiler, remat, level="none" if remat is None else "full"), built()
    for bucket in BUCKETS:
        assert within(distance(compiled, eager, bucket), 1e-5)
    assert compiler.variants == {"double_blocks": 1, "single_blocks": 1}


@pytest.mark.slow
def test_sampling_and_single_samples_have_graphs_of_their_own() -> None:
    compiler = BlockCompiler(backend="eager")
    model = built(compiler)
    loss_and_gradients(model, BUCKETS[0])
    loss_and_gradients(model, ((2, 6, 6), 1, 5))
    for size in ((2, 6, 6), (3, 4, 4)):
        with torch.no_grad():
            model(*random_inputs(CONFIG, size, batch=2, text_tokens=5))
    assert compiler.variants == {"double_blocks": 3, "single_blocks": 3}


def test_shapes_beyond_the_limit_run_uncompiled_with_a_warning_that_names_the_first() -> None:
    told: list[str] = []
    compiler = BlockCompiler(dynamic=False, limit=2, backend="eager", warn=told.append)
    compiled, eager = built(compiler), built()
    for bucket in (*BUCKETS, BUCKETS[0]):
        assert within(distance(compiled, eager, bucket), 1e-5)
    assert compiler.variants == {"double_blocks": 2, "single_blocks": 2}
    assert [sentence.split("; ")[:2] for sentence in told] == [
        ["compile_limit = 2: double_blocks of shape (4, 5, 32)", "(4, 7, 32)"],
        ["compile_limit = 2: single_blocks of shape (4, 12, 32)", "(4, 32)"],
    ]
    assert all(sentence.endswith("; write --compile-limit 4 or --compile-dynamic True") for sentence in told)


def test_graphs_beyond_the_limit_of_dynamic_sizes_are_compiled_with_a_warning() -> None:
    told: list[str] = []
    compiler = BlockCompiler(limit=1, backend="eager", warn=told.append)
    compiled, eager = built(compiler, config=SINGLE_BLOCKS), built(config=SINGLE_BLOCKS)
    for bucket in (BUCKETS[0], BUCKETS[1], ((2, 6, 6), 1, 5)):
        assert within(distance(compiled, eager, bucket), 1e-5)
    assert compiler.variants == {"double_blocks": 0, "single_blocks": 2}
    assert [sentence.split("; ")[0] for sentence in told] == ["compile_limit = 1: single_blocks of shape (1, 23, 32)"]


def use(current: CurrentLevel, bucket: tuple) -> tuple:
    size, samples, _ = bucket
    current.use(Bucket("", size[0], "", size, samples))
    return bucket


@pytest.mark.slow
def test_each_level_has_a_graph_and_full_that_of_none() -> None:
    current = CurrentLevel("none", {("", 2): "selective", ("", 3): "full", ("", 1): "none"})
    compiler = BlockCompiler(backend="aot_eager")
    model, eager = built(compiler, config=SINGLE_BLOCKS, level=current), built(config=SINGLE_BLOCKS)
    for bucket in BUCKETS:
        assert within(distance(model, eager, use(current, bucket)), 1e-5)
    assert compiler.variants["single_blocks"] == 2
    with torch.no_grad():  # one for all levels
        for size, samples, tokens in map(partial(use, current), BUCKETS):
            model(*random_inputs(CONFIG, size, batch=samples, text_tokens=tokens))
    assert compiler.variants["single_blocks"] == 3


def see(ran: list[Any], what: Any, forward: Callable[..., Any], *args: Any) -> Any:
    ran.append(what)
    return forward(*args)


def findable(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backend that runs a graph as it is. Raises where the cache of compiled code would pass it over."""
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCachePickler, check_cacheable

    check_cacheable(graph)
    AOTAutogradCachePickler(graph).dumps(graph)
    return graph.forward


def on_peers(world: World, degrees: Mapping[str, int]) -> Facts:
    """Compiled blocks of peers beside one process without any of it, over buckets with uneven shares."""
    compiler = BlockCompiler(backend=findable)
    mesh = Mesh.create(ParallelConfig(**degrees), world)
    with torch.device("meta"):
        model = MMDiT(CONFIG)
    cut = cut_model(model, mesh)
    set_blocks(model, "full", (1, 1), cut, compiler)
    shard_model(model, mesh, torch.float32)
    initialise_sharded(model, torch.device("cpu"), 3)
    alone, alike = built(), ((4, 4, 4), 3, 8)
    farthest = max(distance(model, alone, bucket) for bucket in (*BUCKETS, alike))
    before = dict(compiler.variants)
    farthest = max(farthest, distance(model, alone, ((2, 6, 10), 5, 9)))
    return {"distance": farthest, "before": before, "after": compiler.variants}


@pytest.mark.slow
def test_one_graph_serves_all_blocks_of_a_kind_and_all_buckets_of_peers(tmp_path: Path) -> None:
    plays = {way: partial(on_peers, degrees={way: 2}) for way in ("sequence", "tensor")}
    for facts in on_ranks(2, tmp_path, plays):
        for way in plays:
            assert within(facts[way]["distance"], 1e-5)
            assert facts[way]["before"] == facts[way]["after"] == {"double_blocks": 1, "single_blocks": 1}


def choices_on_peers(world: World) -> Facts:
    """Which shapes ranks compile that share a sequence: one of which a rank has no tokens, and two of which a rank has
    the same shard, where one shape may be compiled."""
    found = {}
    for why, limit, sizes in (("empty", 16, [(1, 2, 2)]), ("limit", 1, [(1, 2, 10), (1, 2, 12)])):
        compiler = BlockCompiler(dynamic=False, limit=limit, backend="eager", warn=lambda sentence: None)
        with torch.device("meta"):
            model = MMDiT(SINGLE_BLOCKS)
        mesh = Mesh.create(ParallelConfig(sequence=2), world)
        set_blocks(model, cut=cut_model(model, mesh), compiler=compiler)
        initialise_sharded(model, torch.device("cpu"), 3)
        ran: list[str] = []
        for block in model.single_blocks[:1]:
            ways = block.forward.args
            seen = [partial(see, ran, kind, way) for kind, way in zip(("eager", "compiled"), ways, strict=True)]
            block.forward = partial(block.forward.func, *seen)
        for size in sizes:
            loss_and_gradients(model, (size, 2, 5))
        found[why] = ran
    return found


def test_ranks_that_share_a_sequence_compile_the_same_shapes(tmp_path: Path) -> None:
    ran = {"empty": ["eager"], "limit": ["compiled", "eager"]}
    assert on_ranks(2, tmp_path, {"choices": choices_on_peers}) == [{"choices": ran}] * 2


def exchanges_in(code: Callable[..., Any], *args: Tensor) -> list[str]:
    """The operations that Inductor would run, in order."""
    found: list[str] = []

    def see(nodes: list[Any]) -> None:
        found.extend(str(getattr(node.node, "op_overload", "")) + node.get_name() for node in nodes)
        raise InterruptedError

    with torch._inductor.config.patch(_post_fusion_custom_pass=see), pytest.raises(Exception, match="Interrupted"):
        torch.compile(code)(*args)
    return [name.removeprefix(EXCHANGES[0]) for name in found if name.startswith(EXCHANGES[0])]


def test_inductor_keeps_the_order_of_exchanges_whatever_it_fuses() -> None:
    """The first product is fused with the last, which takes what the second exchange gives."""
    group, sizes = CountedGroup(), Lengths([torch.tensor([2, 2])], 2, 4)

    def code(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        product = 2 * z
        first, second = (gather_tokens(each, sizes, group) for each in (x, y))
        return product, first + 1, second * z

    args = torch.ones(1, 2, 8), torch.ones(1, 2, 8), torch.ones(1, 4, 8)
    with torch._inductor.config.patch(_pre_fusion_custom_pass=None):
        without = exchanges_in(code, *args)
        keep_exchanges_in_order()
        torch._dynamo.reset()
        assert exchanges_in(code, *args) == without[::-1] == sorted(without)


def launched(cache: Path, again: int) -> list[int]:
    """Compiles single blocks with the real compiler in a process of its own, and holds them to law 1; `again`: how many
    are recomputed, with some outputs saved.

    Returns how many forwards with their backwards it compiled, how many it found, and how many graphs it compiled.
    """
    code = (
        "import torch\n"
        "from longtake.parallel.compile import BlockCompiler, use_compile_cache\n"
        "from tests.parallel.test_compile import BUCKETS, SINGLE_BLOCKS, built, distance\n"
        f"use_compile_cache({str(cache)!r})\n"
        f"model = built(BlockCompiler(), (0, {again}), SINGLE_BLOCKS, ('linear2',))\n"
        "eager = built(config=SINGLE_BLOCKS)\n"
        "assert max(distance(model, eager, bucket) for bucket in BUCKETS[:2]) <= 1e-5\n"
        "pairs, graphs = (torch._dynamo.utils.counters[kind] for kind in ('aot_autograd', 'inductor'))\n"
        "print(pairs['autograd_cache_miss'], pairs['autograd_cache_hit'], graphs['fxgraph_cache_miss'])\n"
    )
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    variables.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], env=variables
    )
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()[-3:]]


@pytest.mark.slow
@pytest.mark.parametrize("again", [0, 2])
def test_the_second_launch_finds_compiled_code_in_the_cache(tmp_path: Path, again: int) -> None:
    assert launched(tmp_path, again) == [1, 0, 2]
    assert launched(tmp_path, again) == [0, 1, 0]


def test_code_that_was_compiled_beside_another_version_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler keeps the backward of our operators, whose names stay."""
    tags = []
    (tmp_path / "models").mkdir()
    monkeypatch.setattr(compile_module, "__file__", str(tmp_path / "parallel" / "compile.py"))
    with torch.compiler.config.patch(cache_key_tag=""):
        for backward in ("2 * grad", "3 * grad", "2 * grad"):
            (tmp_path / "models" / "operator.py").write_text(backward)
            set_blocks(MMDiT(SINGLE_BLOCKS), compiler=BlockCompiler(backend="eager"))
            tags.append(torch.compiler.config.cache_key_tag)
    assert tags[0] == tags[2] != tags[1]


def contexts_of(level: Level, cut: Any = None) -> Any:
    """The graph that selective recomputation of a single block hands to the compiler."""
    set_blocks(model := MMDiT(tiny_config(depth=0, depth_single_blocks=1)), level, cut=cut)
    return model.single_blocks[0].forward.by_level[level].args[1]


def test_the_compiler_knows_what_selective_blocks_save_by_the_same_words_in_every_process() -> None:
    """Without such words it keeps nothing of a block whose outputs are saved, and traces it in every launch."""
    hashes = [contexts_of(level).cache_hash for level in (("linear2",), "selective", ("linear2",))]
    assert hashes[0] == hashes[2] != hashes[1]
    assert " at 0x" not in "".join(hashes)


def test_the_compiler_knows_blocks_of_peers_by_the_same_words_whatever_their_groups_are() -> None:
    """Else each launch of peers would trace them again: a group of ranks is written with its place in memory."""
    cuts = [SimpleNamespace(peers=SimpleNamespace(tensor=1), group=group) for group in (object(), lambda: None)]
    assert len({pickle.dumps(contexts_of("selective", cut).args) for cut in cuts}) == 1


def test_the_cache_folder_is_made_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "elsewhere")
    folder = use_compile_cache(tmp_path / "a" / "cache")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_cache_that_cannot_be_made_or_that_others_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"compile_cache = .*: Not a directory; choose a folder you can write to"):
        use_compile_cache(tmp_path / "file" / "cache")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    with pytest.raises(UserError, match=rf"others can write to it, .*; chmod go-w {shared}$"):
        use_compile_cache(shared)
    monkeypatch.setattr(os, "getuid", lambda: shared.stat().st_uid + 1)
    with pytest.raises(UserError, match=r"belongs to another user, .*; choose a folder of your own"):
        use_compile_cache(shared)
