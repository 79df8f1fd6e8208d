"""Malformed adapter files: each is refused in one sentence, whatever is wrong with it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from longtake.contracts import UserError
from longtake.weights.cogvideox import FORMAT
from longtake.weights.lora import count_text_encoder_tensors, read_adapters
from longtake.weights.lora_config import match_patterns
from tests.models.golden_cogvideox import golden_config

LAYER = "transformer_blocks.0.attn1.to_q"
A, B = f"base_model.model.{LAYER}.lora_A.weight", f"base_model.model.{LAYER}.lora_B.weight"
FLAT = "lora_unet__transformer_blocks_0_attn1_to_q"
NAN, INF = float("nan"), float("inf")


def peft() -> dict[str, Tensor]:
    return {A: torch.ones(4, 32), B: torch.ones(32, 4)}


def kohya() -> dict[str, Tensor]:
    return {f"{FLAT}.lora_down.weight": torch.ones(4, 32), f"{FLAT}.lora_up.weight": torch.ones(32, 4)}


def holding(value: float, shape: tuple[int, ...] = (4, 32)) -> Tensor:
    tensor = torch.ones(shape)
    tensor.view(-1)[-1] = value
    return tensor


def again(prefix: str) -> dict[str, Tensor]:
    return {name.replace("base_model.model.", prefix): 2 * value for name, value in peft().items()}


TENSORS: dict[str, Callable[[], dict[str, Tensor]]] = {
    "alpha_vector": lambda: kohya() | {f"{FLAT}.alpha": torch.ones(3)},
    "alpha_matrix": lambda: kohya() | {f"{FLAT}.alpha": torch.ones(1, 1)},
    "alpha_empty": lambda: kohya() | {f"{FLAT}.alpha": torch.ones(0)},
    "alpha_nan": lambda: kohya() | {f"{FLAT}.alpha": torch.tensor(NAN)},
    "alpha_infinite": lambda: kohya() | {f"{FLAT}.alpha": torch.tensor(INF)},
    "alpha_zero": lambda: kohya() | {f"{FLAT}.alpha": torch.tensor(0.0)},
    "alpha_negative": lambda: kohya() | {f"{FLAT}.alpha": torch.tensor(-4)},
    "alpha_bool": lambda: kohya() | {f"{FLAT}.alpha": torch.tensor(True)},
    "alpha_complex": lambda: kohya() | {f"{FLAT}.alpha": torch.tensor(1j)},
    "alpha_huge": lambda: kohya() | {f"{FLAT}.alpha": torch.tensor(1e300, dtype=torch.float64)},
    "rank_zero": lambda: {A: torch.ones(0, 32), B: torch.ones(32, 0)},
    "ranks_differ": lambda: peft() | {A: torch.ones(3, 32)},
    "a_scalar": lambda: peft() | {A: torch.tensor(1.0)},
    "a_vector": lambda: peft() | {A: torch.ones(32)},
    "a_cube": lambda: peft() | {A: torch.ones(4, 32, 1)},
    "b_scalar": lambda: peft() | {B: torch.tensor(1.0)},
    "b_vector": lambda: peft() | {B: torch.ones(32)},
    "b_cube": lambda: peft() | {B: torch.ones(32, 4, 1)},
    "b_kernel": lambda: peft() | {B: torch.ones(32, 4, 2, 2)},
    "a_nan": lambda: peft() | {A: holding(NAN)},
    "b_infinite": lambda: peft() | {B: holding(INF, (32, 4))},
    "a_beyond_float32": lambda: peft() | {A: holding(1).double() * 1e300},
    "magnitude_nan": lambda: peft() | {f"{LAYER}.lora_magnitude_vector": holding(NAN, (32,))},
    "magnitude_scalar": lambda: peft() | {f"{LAYER}.lora_magnitude_vector": torch.tensor(1.0)},
    "integers": lambda: {name: value.long() for name, value in peft().items()},
    "bytes": lambda: {name: value.to(torch.uint8) for name, value in peft().items()},
    "bool": lambda: {name: value.bool() for name, value in peft().items()},
    "complex": lambda: {name: value.to(torch.complex64) for name, value in peft().items()},
    "float8": lambda: {name: value.to(torch.float8_e4m3fn) for name, value in peft().items()},
    "twice": lambda: peft() | again("diffusion_model."),
    "twice_flat": lambda: peft() | kohya(),
    "two_adapters": lambda: again("").copy() | {n.replace("weight", "b.weight"): v for n, v in again("").items()},
    "up_alone": lambda: {B: torch.ones(32, 4)},
    "down_alone": lambda: {A: torch.ones(4, 32)},
    "alpha_alone": lambda: {f"{FLAT}.alpha": torch.tensor(1.0)},
    "text_encoder_alone": lambda: {f"text_encoder.{LAYER}.lora_A.weight": torch.ones(4, 32)},
    "nothing_in_name": lambda: {".lora_A.weight": torch.ones(4, 32), ".lora_B.weight": torch.ones(32, 4)},
}


def of_dtype(name: str, bits: int) -> bytes:
    """A file whose header states a dtype that PyTorch may not have."""
    size = 4 * 32 * bits // 8
    shapes = {A: ([4, 32], [0, size]), B: ([32, 4], [size, 2 * size])}
    head = {key: {"dtype": name, "shape": shape, "data_offsets": ends} for key, (shape, ends) in shapes.items()}
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + bytes(2 * size)


CONFIGS = {
    "null": "null",
    "list": "[1]",
    "text": '"x"',
    "not_json": "{",
    "not_unicode": "\ud800",
    "deep": "[" * 100_000,
    "alpha_text": '{"lora_alpha": "x"}',
    "alpha_numeric_text": '{"lora_alpha": "4"}',
    "alpha_list": '{"lora_alpha": [4]}',
    "alpha_null": '{"lora_alpha": null}',
    "alpha_true": '{"lora_alpha": true}',
    "alpha_1e999": '{"lora_alpha": 1e999}',
    "alpha_nan": '{"lora_alpha": NaN}',
    "alpha_zero": '{"lora_alpha": 0}',
    "alpha_negative": '{"lora_alpha": -1}',
    "alpha_integer_beyond_float": '{"lora_alpha": 1' + "0" * 400 + "}",
    "alpha_integer_of_10000_digits": '{"lora_alpha": 1' + "0" * 10_000 + "}",
    "rslora_text": '{"use_rslora": "no"}',
    "pattern_list": '{"alpha_pattern": [1]}',
    "pattern_text_value": '{"alpha_pattern": {"to_q": "x"}}',
    "pattern_invalid": '{"alpha_pattern": {"(": 1}}',
    "pattern_lookahead": '{"alpha_pattern": {"(?=t)to_q": 1}}',
    "pattern_long": json.dumps({"alpha_pattern": {"a|" * 100_000: 1}}),
    "pattern_many": json.dumps({"alpha_pattern": {f"to_{n}|": 1 for n in range(100_000)}}),
    "pattern_of_big_states": json.dumps({"alpha_pattern": {"((a{1000}){1000}){1000}": 1}}),
    "rank_pattern_list": '{"rank_pattern": [1]}',
    "rank_pattern_invalid": '{"rank_pattern": {"[": 1}}',
    "other_kind": '{"peft_type": "LOHA"}',
}


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read_adapters(FORMAT, path, golden_config("t2v_2b"))
    message = str(caught.value)
    assert message.startswith(str(path.parent if path.suffix else path))
    assert len(message.splitlines()) == 1
    return message


@pytest.mark.parametrize("fault", TENSORS)
def test_adapter_with_malformed_tensors_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    save_file(TENSORS[fault](), tmp_path / "a.safetensors")
    message = refused(tmp_path / "a.safetensors")
    if fault in ("a_nan", "integers", "complex", "float8"):
        assert A in message


@pytest.mark.parametrize(("dtype", "bits"), [("F4", 4), ("F6_E2M3", 6), ("F8_E8M0", 8), ("U64", 64)])
def test_adapter_of_a_foreign_dtype_is_refused(dtype: str, bits: int, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(of_dtype(dtype, bits))
    assert A in refused(tmp_path / "a.safetensors")


@pytest.mark.parametrize("fault", CONFIGS)
def test_adapter_with_malformed_config_is_refused(fault: str, tmp_path: Path) -> None:
    save_file(peft(), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(CONFIGS[fault], encoding="utf-8", errors="surrogatepass")
    refused(tmp_path)
    if fault != "not_unicode":
        save_file(peft(), tmp_path / "a.safetensors", {"lora_adapter_metadata": CONFIGS[fault]})
        refused(tmp_path / "a.safetensors")


@pytest.mark.parametrize("alpha", ["x", "", "nan", "inf", "1e999", "0", "-1", "[4]"])
def test_adapter_with_malformed_kohya_alpha_is_refused(alpha: str, tmp_path: Path) -> None:
    save_file(kohya(), tmp_path / "a.safetensors", {"ss_network_alpha": alpha})
    assert "alpha" in refused(tmp_path / "a.safetensors")


OTHER_KINDS = {
    "LoHa": "hada_w1_a",
    "LoKr": "lokr_w1",
    "full difference of a weight": "diff",
    "full difference of a bias": "diff_b",
    "GLoRA": "a1.weight",
    "OFT": "oft_blocks",
    "with a bias": "lora_B.bias",
    "float8": "scale_weight",
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
@pytest.mark.parametrize("layer", [f"diffusion_model.{LAYER}", FLAT])
def test_other_kinds_of_adapters_are_named(kind: str, layer: str, tmp_path: Path) -> None:
    save_file({f"{layer}.{OTHER_KINDS[kind]}": torch.ones(2, 2)}, tmp_path / "a.safetensors")
    assert kind in refused(tmp_path / "a.safetensors")


TEXT_ENCODER = (
    "lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight",
    "lora_te1_text_model_encoder_layers_0_mlp_fc1.hada_w1_a",
    "lora_te3_encoder_block_0_layer_0_SelfAttention_q.alpha",
    "lora_t5xxl_encoder_block_0_layer_0_SelfAttention_q.lora_up.weight",
    "text_encoder.encoder.block.0.layer.0.SelfAttention.q.lora_A.weight",
    "text_encoder_2.encoder.block.0.layer.0.SelfAttention.q.lora_A.weight",
    "base_model.model.text_encoder.encoder.block.0.layer.0.SelfAttention.q.lora_A.weight",
)


def test_tensors_for_text_encoders_are_counted_and_left_out(tmp_path: Path) -> None:
    save_file(peft() | {name: torch.full((2, 2), NAN) for name in TEXT_ENCODER}, tmp_path / "a.safetensors")
    assert count_text_encoder_tensors(tmp_path / "a.safetensors") == len(TEXT_ENCODER)
    assert list(read_adapters(FORMAT, tmp_path / "a.safetensors", golden_config("t2v_2b"))) == [LAYER]


def test_patterns_match_as_peft_matches_them() -> None:
    layers = ["blocks.0.to_q", "blocks.1.to_q", "blocks.10.to_q", "to_q", "blocks.0.proj"]
    peft_rule = pytest.importorskip("peft.utils.other").get_pattern_key
    tables: list[dict[str, float]] = [
        {"to_q": 1.0},
        {"^to_q": 1.0, "to_q": 2.0},
        {"0.to_q": 1.0, "blocks.0.to_q": 2.0},
        {r"blocks\.1\.to_q": 1.0, r"blocks\.\d+\..*": 2.0},
        {"^blocks.0.proj$": 3.0, "(a+)+x": 1.0, "0.(to_q|proj)": 2.0},
    ]
    for table in tables:
        expected = {layer: table[key] for layer in layers if (key := peft_rule(list(table), layer)) in table}
        assert match_patterns(table, layers, "a") == expected


def test_patterns_that_run_for_ever_in_python_end(tmp_path: Path) -> None:
    names = {f"blocks.{number}.to_q": 2.0 for number in range(100_000)}
    config: dict[str, Any] = {"alpha_pattern": {"((t|to|_)+)+x": 3, **names, "(.*)*q": 8}}
    save_file(peft(), tmp_path / "a.safetensors", {"lora_adapter_metadata": json.dumps(config)})
    (adapter,) = read_adapters(FORMAT, tmp_path / "a.safetensors", golden_config("t2v_2b")).values()
    assert adapter.alpha == 8


def test_config_counts_for_its_own_file_and_headers_go_first(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 1, "alpha_pattern": {"to_q": 1}}')
    save_file(peft(), tmp_path / "other.safetensors")
    header = {"lora_adapter_metadata": '{"transformer.lora_alpha": 2}'}
    alphas = {}
    for name, metadata in (("other", None), ("adapter_model", None), ("adapter_model", header)):
        save_file(peft(), tmp_path / f"{name}.safetensors", metadata)
        found = read_adapters(FORMAT, tmp_path / f"{name}.safetensors", golden_config("t2v_2b"))
        alphas[name, metadata is None] = found[LAYER].alpha
    assert alphas == {("other", True): 4, ("adapter_model", True): 1, ("adapter_model", False): 2}
    assert read_adapters(FORMAT, tmp_path, golden_config("t2v_2b"))[LAYER].alpha == 2
