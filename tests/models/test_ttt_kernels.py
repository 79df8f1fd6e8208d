"""The Triton kernels of TTT layers against the formulas in float64."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest

from tests.models.triton_cases import ROOT, assert_kernels_agree

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: pip install triton")


@pytest.mark.gpu
@pytest.mark.slow
def test_kernels_agree_with_the_formulas() -> None:
    """Interpreted in float32 and float16, on a GPU in float32 and bfloat16; results and all gradients."""
    assert_kernels_agree("interpreted_ttt", 5, {"float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2})


@pytest.mark.parametrize("layer", ["TTT-MLP", "TTT-Linear"])
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
def test_kernels_at_published_sizes_fit_a_multiprocessor(
    layer: str, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kernel that the scan launches: at most 64 bytes of stack on Hopper, and the shared memory of an A100."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    registers = import_module("kernel_registers")
    launches = registers.launches(*registers.PUBLISHED[layer])
    assert {"learn", "read", "read_backward", "learn_backward"} <= set(launches)
    for name, launch in launches.items():
        resources = registers.resources(launch, capability)
        assert resources.shared <= 163 * 1024, name
        assert resources.stack <= 64 or capability < 90, name
