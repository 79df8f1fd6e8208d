"""The Triton kernels of attention over time against the formula in float64."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.models.triton_cases import assert_kernels_agree

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: pip install triton")


@pytest.mark.gpu
def test_kernels_agree_with_the_formula() -> None:
    """Interpreted in float32 and float16, on a GPU in float32 and bfloat16; results and all gradients."""
    assert_kernels_agree("interpreted_temporal", 8, {"float32": 2e-6, "float16": 5e-3, "bfloat16": 4e-2})


@pytest.mark.slow
@pytest.mark.parametrize("frames", [15, 60, 120])
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_a_gpu_that_is_not_here(capability: int, frames: int) -> None:
    """Heads of 72, and in what a multiprocessor has of shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget

    from longtake.models import temporal_kernels as kernels

    sizes = kernels.blocks_of(frames, 72)
    assert (sizes["MOST"], sizes["REST"]) == (64, 16)
    tensors = dict.fromkeys(("q", "k", "v", "out", "grad", "dq", "dk", "dv"), "*bf16")
    kinds = dict.fromkeys(sizes, "constexpr") | tensors | {"scale": "fp32"}
    for kernel in (kernels.attend, kernels.attend_backward):
        signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
        constants = {(kernel.arg_names.index(name),): value for name, value in sizes.items()}
        source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
        options = {"num_warps": min(8, max(2, sizes["ROWS"] // 8))}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert compiled.asm["cubin"]
        assert compiled.metadata.shared <= 163 * 1024
