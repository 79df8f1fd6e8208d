"""The Triton kernels of TTT layers against the formulas in float64."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.models.triton_cases import assert_kernels_agree

TOKENS = ("q", "k", "target", "grad", "out", "grad_q", "grad_k", "grad_target", "nets")  # in bfloat16
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: pip install triton")


@pytest.mark.gpu
@pytest.mark.slow
def test_kernels_agree_with_the_formulas() -> None:
    """Interpreted in float32 and float16, on a GPU in float32 and bfloat16; results and all gradients."""
    assert_kernels_agree("interpreted_ttt", 5, {"float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2})


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [0, 256])
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_a_gpu_that_is_not_here(capability: int, hidden: int) -> None:
    """At the published sizes, heads of 64 and mini-batches of 64, and in what a multiprocessor has of shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget

    from longtake.models import ttt_kernels as kernels

    sizes = {"MINI_BATCH": 64, "ROWS": 64, "K": 64, "M": hidden, "TILE": 64, "TILES": (hidden or 64) // 64}
    scalars = dict.fromkeys(("first", "steps", "tokens", "heads"), "i32") | {"eps": "fp32"}
    halves = dict.fromkeys(TOKENS, "*bf16")
    for kernel in (kernels.learn, kernels.read, kernels.read_backward, kernels.learn_backward):
        kinds = dict.fromkeys(sizes, "constexpr") | scalars | halves
        signature = {name: kinds.get(name, "*fp32") for name in kernel.arg_names}
        constants = {(kernel.arg_names.index(name),): value for name, value in sizes.items()}
        source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
        options = {"num_warps": 8, "num_stages": 1}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= 163 * 1024
