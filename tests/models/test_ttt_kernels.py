"""The Triton kernels of TTT layers against the formulas in float64."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

from longtake.models.scratch import SCRATCH
from longtake.models.trace import Trace
from longtake.models.ttt_scan import segment_length
from tests.models.test_trace import meta
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


@pytest.mark.parametrize("hidden", [0, 256])
@pytest.mark.parametrize(("tokens", "mini_batch"), [(10_000, 64), (500, 20)])
def test_scratch_that_a_forecast_counts_is_what_the_kernels_launcher_allocates(
    hidden: int, tokens: int, mini_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = import_module("longtake.models.ttt_triton")
    monkeypatch.setattr(bodies._SegmentLauncher, "__call__", lambda *given, **options: None)
    heads, width = 4, 64
    numbers = 2 * width * hidden + hidden + width if hidden else width * width + width
    whole, of_norm = meta(2, tokens, heads, width), meta(heads, width, dtype=torch.float32)
    rate, state = meta(2, tokens, heads, dtype=torch.float32), meta(heads, numbers, dtype=torch.float32)
    segment = segment_length(tokens, width, hidden, mini_batch)
    inputs = [whole] * 3 + [rate, of_norm, of_norm]
    forward = (*inputs, state, hidden, mini_batch, segment, True, 1e-8)
    with Trace(*inputs, state) as trace:
        _, kept = results = bodies.forward(*forward)
    scratch = SCRATCH[torch.ops.longtake.ttt_scan.default](*forward, "triton")
    assert trace.peak == scratch + sum(tensor.nbytes for tensor in results)
    backward = (whole, *inputs, kept, hidden, mini_batch, segment, 1e-8)
    with Trace(*inputs, kept) as trace:
        results = bodies.backward(*backward)
    scratch = SCRATCH[torch.ops.longtake.ttt_scan_backward.default](*backward, "triton")
    late = sum(tensor.nbytes for tensor in results[4:])  # made when one network is freed
    assert trace.peak == scratch + sum(tensor.nbytes for tensor in results) - late
