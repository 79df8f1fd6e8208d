"""Frozen weights in fewer bits: what they lose, and that torchao codes them alike."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from longtake.contracts import UserError
from longtake.models import quantized
from tests.precision import within

KINDS = ("int8", "fp8", "nf4")
LOST = {"int8": 0.01, "fp8": 0.03, "nf4": 0.1}  # root of the mean square over that of the weight


def weight(rows: int = 24, columns: int = 128) -> torch.Tensor:
    made = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    made[3] = 0
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_coded_weight_is_nearly_the_weight(kind: quantized.Kind, dtype: torch.dtype) -> None:
    codes, scale = quantized.quantize(weight(), kind, dtype)
    empty = quantized.empty(weight().to(dtype), kind)
    assert [(x.shape, x.dtype) for x in (codes, scale)] == [(x.shape, x.dtype) for x in empty]
    assert scale.dtype == dtype
    found = quantized.dequantize(codes, scale, kind, torch.float32)
    assert (found - weight()).square().mean().sqrt() < LOST[kind] * weight().square().mean().sqrt()
    assert not found[3].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_of_rows_is_quantized_alone(kind: quantized.Kind) -> None:
    whole, part = (
        quantized.quantize(weight(), kind, torch.float32),
        quantized.quantize(weight()[5:9], kind, torch.float32),
    )
    assert all(torch.equal(w[5:9], p) for w, p in zip(whole, part, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_products_and_their_gradients_are_those_of_the_decoded_weight(kind: quantized.Kind) -> None:
    codes, scale = quantized.quantize(weight(), kind, torch.float32)
    x = torch.randn(2, 5, 128, requires_grad=True)
    quantized.linear(x, codes, scale, kind).square().sum().backward()
    found, x.grad = x.grad, None
    F.linear(x, quantized.dequantize(codes, scale, kind, torch.float32)).square().sum().backward()
    torch.testing.assert_close(found, x.grad)


def test_int8_is_that_of_torchao() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    layer = torch.nn.Linear(128, 24, bias=False)
    layer.weight.data.copy_(weight())
    torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
    codes, scale = quantized.quantize(weight(), "int8", torch.float32)
    ours = quantized.dequantize(codes, scale, "int8", torch.float32)
    # torchao divides by 127.5: its steps are 0.4 % finer, and the largest value of a row is cut off by half a step
    assert within((ours - layer.weight.dequantize()).abs().max(), 0.6 * scale.max())


def test_nf4_is_that_of_torchao() -> None:
    nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    theirs = nf4.to_nf4(weight()[4:], block_size=64, scaler_block_size=4).get_original_weight()
    ours = quantized.dequantize(*quantized.quantize(weight()[4:], "nf4", torch.float32), "nf4", torch.float32)
    # torchao codes the scales in 8 bits as well
    assert within((ours - theirs).square().mean().sqrt(), 0.01 * weight().square().mean().sqrt())


def test_a_traced_nf4_weight_takes_no_table_from_the_host() -> None:
    codes, scale = quantized.quantize(weight(), "nf4", torch.bfloat16)
    quantized._nf4.cache_clear()
    traced = make_fx(lambda *of: quantized.dequantize(*of, "nf4", torch.bfloat16))(codes, scale)
    quantized._nf4.cache_clear()
    assert [node for node in traced.graph.nodes if node.op == "get_attr" or "lift" in str(node.target)] == []


def test_nf4_wants_whole_blocks() -> None:
    with pytest.raises(UserError, match=r'lora.base = "nf4": the 100 inputs of double_blocks.0.img_attn.proj'):
        quantized.check_width("nf4", "double_blocks.0.img_attn.proj", 100)
