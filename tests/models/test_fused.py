"""Fused norms, rotations and gates: hand-derived gradients, kernels, whole models, traces and the compiler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longtake.models import build_denoiser, example_conditions, fused, layers
from longtake.models.segments import Segments, Share
from longtake.parallel import INPUTS, BlockCompiler, BlockMode, remat_and_compile
from longtake.plan import Layout, MicroBatch
from longtake.plan.blocks import count_blocks
from tests.models.triton_cases import assert_kernels_agree
from tests.plan.test_blocks import FAMILIES
from tests.plan.trace import block_saved_bytes

RUNS = (3, 2, 1, 2)  # of two kinds in turn
Case = tuple[Callable[..., tuple[Tensor, ...]], Callable[..., tuple[Tensor, ...]], list[tuple[int, ...]]]


@pytest.fixture
def all_fused() -> Iterator[None]:
    fused.use(fused.NAMES)
    yield
    fused.use(())


def rotations(tokens: int, width: int, places: int = 0) -> Tensor:
    angles = torch.arange(tokens * width / 2).view(tokens, *[1] * (1 + bool(places)), -1) / 3
    return torch.stack([angles.cos(), angles.sin()])


def joined(norm: str, pairs: bool, turned: bool, streams: int, places: int = 0, heads: int = 3, width: int = 8) -> Case:
    """Streams of 5, 3, ... tokens."""
    rope = rotations(8 if streams == 2 else 5, width, places) if turned else None
    kinds = {"none": 0, "rms": 1, "layer": 2}[norm]

    def normed(x: Tensor, *numbers: Tensor) -> Tensor:
        if not numbers:
            return x
        plain = F.layer_norm if kinds == 2 else F.rms_norm
        return plain(x, x.shape[-1:], *numbers, eps=1e-5)

    def parts_of(tensors: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
        return zip(*[iter(tensors)] * (1 + kinds), strict=True)

    def by_operator(*tensors: Tensor) -> tuple[Tensor, ...]:
        parts = [part for part, *_ in parts_of(tensors)]
        norms = [(of[0], of[1] if kinds == 2 else None, 1e-5) for _, *of in parts_of(tensors) if of]
        return (fused.join_heads(parts, norms, None if rope is None else rope.to(parts[0].device), pairs),)

    def by_formula(*tensors: Tensor) -> tuple[Tensor, ...]:
        out = torch.cat([normed(*part) for part in parts_of(tensors)], 1)
        return (out if rope is None else rotated(out, rope.to(out.device, out.dtype), pairs),)

    own = [(2, length, *((places,) if places else ()), heads, width) for length in (5, 3)[:streams]]
    return by_operator, by_formula, [shape for part in own for shape in (part, *[(width,)] * kinds)]


def rotated(x: Tensor, rope: Tensor, pairs: bool) -> Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1) if pairs else x.chunk(2, -1)
    turned = a * rope[0] - b * rope[1], b * rope[0] + a * rope[1]
    return torch.stack(turned, -1).flatten(-2) if pairs else torch.cat(turned, -1)


def gated(gate: bool, norm: bool, runs: tuple[int, ...], width: int = 12) -> Case:
    kinds, tokens = (2, sum(runs)) if len(runs) > 1 else (1, 8)

    def of_rows(numbers: tuple[Tensor, ...]) -> Tensor:
        return torch.cat([numbers[i % kinds].expand(-1, run, -1) for i, run in enumerate(runs or (tokens,))], 1)

    def split(tensors: tuple[Tensor, ...]) -> tuple[Tensor | None, tuple[Tensor, ...], tuple[Tensor, ...]]:
        y, gates = (tensors[0], tensors[1 : 1 + kinds]) if gate else (None, ())
        return y, gates, tensors[len(tensors) - 2 * kinds :] if norm else ()

    def by_operator(x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        y, gates, numbers = split(tensors)
        pairs = list(zip(numbers[:kinds], numbers[kinds:], strict=True))
        found = fused.gate_norm(x, None if y is None else (y, gates), pairs, runs)
        return tuple(one for one, asked in zip(found, (gate, norm), strict=True) if asked)

    def by_formula(x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        y, gates, numbers = split(tensors)
        x = x if y is None else x + of_rows(gates) * y
        out = (
            F.layer_norm(x, x.shape[-1:], eps=1e-6) * of_rows(numbers[:kinds]) + of_rows(numbers[kinds:]) if norm else x
        )
        return (*((x,) if gate else ()), *((out,) if norm else ()))

    rows, numbers = (2, tokens, width), [(2, 1, width)] * kinds
    return by_operator, by_formula, [rows, *((rows, *numbers) if gate else ()), *(2 * numbers if norm else ())]


CASES: dict[str, Case] = {
    "two streams, RMSNorm, halves": joined("rms", False, True, 2),
    "one, LayerNorm, pairs": joined("layer", True, True, 1),
    "places, RMSNorm, pairs": joined("rms", True, True, 1, places=2, width=12),
    "two streams as they are": joined("none", False, False, 2),
    "turned only": joined("none", True, True, 1, width=6),
    "normed only": joined("layer", False, False, 2, heads=1, width=12),
    "norm": gated(False, True, ()),
    "gate": gated(True, False, RUNS),
    "gate and norm": gated(True, True, ()),
    "gate and norm of runs": gated(True, True, RUNS, width=20),
}


def outcome(
    case: Case, which: int, dtype: torch.dtype, device: str = "cpu", of: torch.dtype | None = None
) -> list[Tensor]:
    """Results and gradients of all inputs, by the operator (0) or the formula (1), at inputs rounded to `of`."""
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in case[2]]
    inputs = [x.to(of or dtype).to(device, dtype).requires_grad_() for x in inputs]
    out = case[which](*inputs)
    grads = [torch.randn(one.shape, generator=draw, dtype=torch.float64).to(of or dtype).to(one) for one in out]
    return [*out, *torch.autograd.grad(out, inputs, grads)]


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_the_formula(name: str) -> None:
    for ours, theirs in zip(*(outcome(CASES[name], which, torch.float64) for which in (0, 1)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: pip install triton")
def test_kernels_agree_with_the_formulas() -> None:
    """Interpreted in float32 and float16, on a GPU in float32 and bfloat16."""
    most = {"float32": 2e-6, "float16": 4e-3, "bfloat16": 3e-2}
    assert_kernels_agree("interpreted_fused", 2 * len(CASES), most)


class Seen(TorchDispatchMode):
    """Names of the operations inside, with the sizes of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, torch.Size]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operation(*args, **(kwargs or {}))
        self.found += [(operation.name(), one.shape) for one in tree_leaves(out) if isinstance(one, Tensor)]
        return out


def computed(family: str, compiled: bool = False, budget: float | None = None) -> list[Tensor]:
    """Prediction and gradients of a small model; budget: of blocks that are all computed again."""
    config = FAMILIES[family]
    torch.manual_seed(0)
    model = build_denoiser(config)
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    counts = [len(model.get_submodule(name)) * (budget is not None) for name in model.blocks]
    mode = BlockMode(budget=INPUTS if budget is None else budget)
    remat_and_compile(model, counts, mode=mode, compiler=BlockCompiler(backend="aot_eager") if compiled else None)
    latent = (config.latent_channels, 13, 4, 4)
    conditions = example_conditions(config, latent, 6, 2)
    if "size" in conditions:
        conditions["size"].fill_(64.0)
    out = model(torch.randn(2, *latent), torch.full((2,), 0.5), conditions)
    out.square().mean().backward()
    return [out, *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    largest = max(float(one.detach().abs().max()) for one in theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6 * largest)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_the_same(family: str, request: pytest.FixtureRequest) -> None:
    """And no block gives a view, of which FSDP2 warns."""
    views: list[str] = []

    def note(block: nn.Module, args: Any, out: Any) -> None:
        if type(block) in kinds:
            views.extend(type(block).__name__ for one in tree_leaves(out) if one._base is not None)

    model = build_denoiser(FAMILIES[family])
    kinds = {type(block) for name in model.blocks for block in model.get_submodule(name)}
    with torch.nn.modules.module.register_module_forward_hook(note):
        plain = computed(family)
        request.getfixturevalue("all_fused")
        assert_same(computed(family), plain)
    assert views == []


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_compiler_and_recomputation_take_them(compiled: bool, all_fused: None) -> None:
    assert_same(computed("mmdit", compiled, budget=0.5), computed("mmdit"))


COPIES = tuple(f"aten::{name}" for name in ("cat", "stack", "clone", "copy_", "_to_copy", "_reshape_copy"))


def copies_in(block: nn.Module, *args: Any) -> dict[int, int]:
    """Numbers that are copied, by the dims of what holds them: heads have 4, or 5 with places, rows 3."""
    with Seen() as seen:
        block(*args)
    found: Counter[int] = Counter()
    for name, shape in seen.found:
        if name in COPIES:
            found[len(shape)] += shape.numel()
    return dict(found)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("names", [(), fused.NAMES], ids=["plain", "fused"])
def test_heads_are_copied_neither_to_be_joined_nor_behind_attention(names: tuple[str, ...], batch: int) -> None:
    """Turned queries and keys are written where attention reads them, of which the output is projected as it is."""
    models = {name: build_denoiser(FAMILIES[name].model_copy(update={"attention": "sdpa"})) for name in FAMILIES}
    img, txt, vec, rope = (
        torch.randn(batch, 8, 96),
        torch.randn(batch, 3, 96),
        torch.randn(batch, 96),
        rotations(11, 24),
    )
    joint, frames = models["cogvideox"].transformer_blocks[0].attn1, models["stdit3"].spatial_blocks[0].attn
    of_segment = models["ttt_video"].transformer_blocks[0].attn1
    fused.use(names)
    try:
        found = [copies_in(models["mmdit"].double_blocks[0], img, txt, vec, rope)]
        found += [copies_in(models["mmdit"].single_blocks[0], torch.cat([txt, img], 1), vec, rope)]
        found += [copies_in(joint, torch.randn(batch, 11, 64), rotations(11, 16))]
        found += [copies_in(frames, torch.randn(batch, 12, 96), 4, rotations(3, 24, 1))]
        found += [
            copies_in(of_segment, torch.randn(batch, 11, 64), Share(Segments(2, 3, 2), rotations(11, 16), True, True))
        ]
    finally:
        fused.use(())
    rows, number = batch * 11 * 96, batch * 96  # the latter of shifts, scales and gates
    of_streams = {3: 12 * number} if names else {4: rows, 3: rows * (batch > 1)}  # the values; on the way out
    assert found[0] == +Counter(of_streams)
    assert found[1] == {3: rows + (3 * number if names else 0)}  # attention beside the MLP
    assert found[2:] == [{}, {}, {}]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_are_turned_in_place_to_the_bits_of_the_formula(dtype: torch.dtype, pairs: bool) -> None:
    rope, rotate = rotations(8, 12, 2), layers.rotate_interleaved if pairs else layers.rotate_half
    inputs = [torch.randn(2, length, 2, 3, 12).to(dtype).requires_grad_() for length in (5, 3)]
    grad = torch.randn(2, 8, 2, 3, 12).to(dtype)

    def by_formula(*parts: Tensor) -> Tensor:
        return rotated(torch.cat(parts, 1).float(), rope, pairs).to(dtype)

    def ours(*parts: Tensor) -> Tensor:
        return layers.join_heads([(part, None) for part in parts], rope, rotate)

    found = []
    for way in (by_formula, ours, torch.compile(ours, backend="aot_eager", fullgraph=True)):
        out = way(*inputs)
        found.append([out, *torch.autograd.grad(out, inputs, grad)])
    for one in found[1:]:
        assert all(torch.equal(each, of) for each, of in zip(one, found[0], strict=True))


def test_a_plan_counts_what_they_keep(all_fused: None) -> None:
    config = FAMILIES["mmdit"].model_copy(update={"attention": "sdpa"})
    batch = MicroBatch(2, (config.latent_channels, 5, 16, 24), 16)
    said = [block.saved for block in count_blocks(config, batch, Layout()).blocks]
    kept = [block_saved_bytes(config, kind, 2, 5 * 8 * 12, 16, torch.bfloat16) for kind in ("double", "single")]
    assert said == pytest.approx(kept, rel=0.01)
    fused.use(())
    assert said != [block.saved for block in count_blocks(config, batch, Layout()).blocks]


def test_a_compiled_block_moves_what_they_read_and_write(all_fused: None, tmp_path: Path, monkeypatch: Any) -> None:
    """Nothing between a product and an operator is fused: its bytes are there, and there are fewer uncompiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = FAMILIES["mmdit"].model_copy(update={"attention": "sdpa"})
    batch = MicroBatch(2, (config.latent_channels, 5, 16, 24), 16)
    found = {}
    for names in ((), fused.NAMES):
        fused.use(names)
        for compiled in (False, True):
            single = count_blocks(config, batch, Layout(compiled=compiled)).blocks[-1]
            found[bool(names), compiled] = single.forward.moved / (batch.batch * (5 * 8 * 12 + 16) * 96 * 2)
    assert found[True, False] < 0.6 * found[False, False]
    values = 1  # in one memory with the hidden layer, which for a compiled block is counted as a whole
    assert found[False, True] < found[True, True] < (found[True, False] + values) * 1.01


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: pip install triton")
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_a_gpu_that_is_not_here(capability: int) -> None:
    """At the widths of the models: 24 heads of 128, 48 of 64, 16 of 72; rows of 3072 and 1152."""
    import triton
    from triton.backends.compiler import GPUTarget

    from longtake.models import fused_kernels as kernels

    tensors = "x weight bias out grad dx y added of_added of_out dy"
    kinds = dict.fromkeys(tensors.split(), "*bf16") | dict.fromkeys(
        ("table", "gate", "scale", "shift", "sums"), "*fp32"
    )
    learned = {"LEARNED": True, "TOKENS": 8, "PASSED": True}
    cases = []
    for heads, width, pairs, centred in ((24, 128, False, False), (48, 64, True, True), (16, 72, True, False)):
        x = torch.empty(1, 1, 1, heads, width)
        sizes = kernels._sizes(x, True, centred, torch.empty(0), pairs) | learned
        cases += [(kernel, sizes) for kernel in (kernels.join_heads, kernels.join_heads_backward)]
    for width in (3072, 1152):
        x = torch.empty(1, 1, width)
        cases += [
            (kernel, kernels._width(x, x, x, numbers) | learned)
            for kernel, numbers in ((kernels.gate_norm, 512), (kernels.gate_norm_backward, 256))
        ]
    for kernel, sizes in cases:
        constants = {name: value for name, value in sizes.items() if name in kernel.arg_names}
        signature = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names}
        signature["eps"] = "fp32"
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=places)
        options = {"num_warps": sizes["num_warps"]}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= 48 * 1024
