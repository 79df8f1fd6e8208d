"""The scan of a TTT layer: the reference's numbers, the hand-derived gradient against autograd's, and the operator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from longtake.models import ttt_chunked
from longtake.models.ttt_scan import _scan, oracle, segment_length, ttt_scan
from tests.precision import within

GOLDEN = Path(__file__).parents[1] / "golden" / "ttt_video"
STATE = {"linear": ("W1", "b1"), "mlp": ("W1", "b1", "W2", "b2")}
CORES = [("linear", case) for case in (*"abc", "dense")] + [("mlp", case) for case in (*"abcd", "dense")]


def golden_core(kind: str, case: str) -> dict[str, Tensor]:
    with safe_open(GOLDEN / f"core_{kind}.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if name.startswith(f"{case}.")]  # noqa: SIM118
        return {name.removeprefix(f"{case}."): file.get_tensor(name).float() for name in names}


def in_order(tensor: Tensor) -> Tensor:
    """[B, N, C, b, K], as the reference has it, -> [B, S, N, K]."""
    return tensor.permute(0, 2, 3, 1, 4).flatten(1, 2)


def off(ours: Tensor, theirs: Tensor) -> float:
    """The golden data's measure: largest difference over largest value."""
    return float((ours - theirs).detach().abs().max() / theirs.detach().abs().max())


def inputs(kind: str, b: int = 2, s: int = 11, n: int = 2, k: int = 4, m: int = 6, seed: int = 0) -> list[Tensor]:
    """q, k, target, rate, norm weight and bias, then the state: leaves in float64."""
    random = torch.Generator().manual_seed(seed)
    shapes = [(b, s, n, k)] * 3 + [(b, s, n)] + [(n, k)] * 2
    shapes += [(n, k, m), (n, 1, m), (n, m, k), (n, 1, k)] if kind == "mlp" else [(n, k, k), (n, 1, k)]
    tensors = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]
    tensors[3] = 0.2 * tensors[3].sigmoid()
    return [(0.5 * tensor if i > 5 else tensor).requires_grad_() for i, tensor in enumerate(tensors)]


def run(tensors: list[Tensor], mini_batch: int, body: str) -> Tensor:
    return ttt_scan(*tensors[:6], tuple(tensors[6:]), mini_batch, body=body)


def with_grads(tensors: list[Tensor], mini_batch: int, body: str) -> list[Tensor]:
    out = run(tensors, mini_batch, body)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), tensors)]


@pytest.mark.parametrize("body", ["oracle", "chunked"])
@pytest.mark.parametrize(("kind", "case"), CORES)
def test_golden_inner_loops(kind: str, case: str, body: str) -> None:
    """Results, last states and gradients of the reference; in `dense`, each query reads by rates of its own."""
    golden = golden_core(kind, case)
    names = ("XQ", "XK", "XV", "eta", "ttt_norm_weight", "ttt_norm_bias", *STATE[kind])
    leaves = {name: golden[name].clone().requires_grad_() for name in names}
    mini_batches, mini_batch = golden["XQ"].shape[2:4]
    outs = []
    for sample in range(len(golden["XQ"])):  # there each sample begins with a state of its own
        one = {name: leaf[sample : sample + 1] for name, leaf in leaves.items() if "norm" not in name}
        tokens = (in_order(one["XQ"]), in_order(one["XK"]), in_order(one["XV"] - one["XK"]))
        state = tuple(one[name][0] for name in STATE[kind])
        rate = in_order(one["eta"]) if case == "dense" else in_order(one["eta"].mT)[..., 0]
        rest = (rate, leaves["ttt_norm_weight"], leaves["ttt_norm_bias"], state, mini_batch)
        outs.append(ttt_scan(*tokens, *rest, body=body))
        for name, last in zip(STATE[kind], oracle(*tokens, *rest)[1], strict=True):
            assert within(off(last[0], golden[f"last.{name}"][sample]), 2e-5)
    out = torch.cat(outs).unflatten(1, (mini_batches, mini_batch))
    assert within(off(out, golden["out"]), 2e-5)
    for name, grad in zip(names, torch.autograd.grad(out.square().mean(), list(leaves.values())), strict=True):
        assert within(off(grad, golden[f"grad.{name}"]), 2e-4), name


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_the_gradient_is_the_numerical_one(kind: str) -> None:
    """Two samples, two heads, two segments of two mini-batches, the last of two tokens where three would fit."""
    assert segment_length(11, 4, 6, 3) == 2
    assert torch.autograd.gradcheck(lambda *tensors: run(list(tensors), 3, "chunked"), inputs(kind), fast_mode=False)


@pytest.mark.parametrize("mini_batch", [1, 4, 16, 40, 64])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_any_mini_batch_and_groups_of_heads_agree_with_the_formulas(
    kind: str, mini_batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From single tokens to one mini-batch for all, the larger ones with a network kept for each."""
    tensors = inputs(kind, s=40, n=3)
    monkeypatch.setattr(ttt_chunked, "_GROUP_NUMBERS", 2000)
    for ours, theirs in zip(
        with_grads(tensors, mini_batch, "chunked"), with_grads(tensors, mini_batch, "oracle"), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_what_fills_the_last_mini_batch_changes_nothing() -> None:
    tensors = inputs("mlp", s=5)
    torch.testing.assert_close(run(tensors, 64, "chunked"), run(tensors, 5, "chunked"))


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_half_precision_in_and_out(kind: str) -> None:
    tensors = [tensor.detach().float() for tensor in inputs(kind)]
    half = [tensor.bfloat16() for tensor in tensors[:3]] + tensors[3:]
    rounded = [tensor.float() for tensor in half]
    out = run(half, 4, "chunked")
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), run(rounded, 4, "oracle"), rtol=2**-8, atol=1e-5)
    grads = with_grads([tensor.requires_grad_() for tensor in half], 4, "chunked")[1:]
    assert [grad.dtype for grad in grads] == [tensor.dtype for tensor in half]


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_factors_of_products_in_bfloat16_as_on_a_gpu(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = ttt_chunked._rule
    monkeypatch.setattr(ttt_chunked, "_rule", lambda *given: replace(rule(*given), factors=torch.bfloat16))
    tensors = inputs(kind, s=40, k=16, m=32)
    for ours, theirs in zip(with_grads(tensors, 16, "chunked"), with_grads(tensors, 16, "oracle"), strict=True):
        assert ours.dtype == torch.float64
        far = off(ours, theirs)
        assert far > 1e-9
        assert within(far, 5e-2)


def test_the_operator_keeps_its_promises_to_the_compiler() -> None:
    tensors = inputs("mlp", s=7)
    state = torch.cat([part.detach().flatten(1) for part in tensors[6:]], 1).requires_grad_()
    torch.library.opcheck(_scan, (*tensors[:6], state, 6, 3, 2, True, 1e-8, "chunked"))


def test_compiled_it_is_one_graph_with_the_same_gradients() -> None:
    tensors = inputs("mlp", s=7)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    out = compiled(tensors, 3, "auto")
    theirs = run(tensors, 3, "oracle")
    torch.testing.assert_close(out, theirs)
    for ours, other in zip(
        torch.autograd.grad(out.square().sum(), tensors),
        torch.autograd.grad(theirs.square().sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(ours, other)


def test_without_gradients_nothing_is_kept_and_what_is_kept_has_none() -> None:
    tensors = [tensor.detach() for tensor in inputs("linear")]
    state = torch.cat([part.flatten(1) for part in tensors[6:]], 1)
    for keep, segments in ((False, 0), (True, 2)):
        kept = _scan(*tensors[:6], state, 0, 3, 2, keep, 1e-8, "chunked")[1]
        assert kept.shape == (segments, 2, *state.shape)
    kept = _scan(*inputs("linear")[:6], state, 0, 3, 2, True, 1e-8, "chunked")[1]
    assert not kept.requires_grad
