"""TTT-Video against the published program, and what it promises about lengths, directions, chunks and cost."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch
from torch import Tensor

from longtake.contracts import Conditions, UserError
from longtake.models import TTTVideo, TTTVideoConfig
from longtake.models.layers import RotaryPositions, join_positions
from longtake.models.segments import SegmentAttention, Segments, Share, TokenRows
from longtake.weights.conversion import ConvertedWeights
from longtake.weights.ttt_video import FORMAT, PUBLISHED
from tests.models.golden_ttt_video import (
    FOLDER,
    SEGMENTS,
    golden,
    golden_inputs,
    golden_layer,
    golden_model,
    joined,
    order_of,
    parted,
    published_gradients,
    random_inputs,
    rules,
    tiny_config,
)

OUTPUTS, GRADIENTS = 2e-5, 2e-4  # of the largest value, as the golden data's README suggests


def assert_close(found: Tensor, expected: Tensor, far: float, name: str = "") -> None:
    """Within a share of the largest value."""
    torch.testing.assert_close(
        found.reshape(expected.shape), expected, rtol=0, atol=far * float(expected.abs().max()), msg=name or None
    )


CASES = [(kind, case, rule) for kind, case in product(("linear", "mlp"), SEGMENTS) for rule in rules(case)]


@pytest.mark.parametrize(("kind", "case", "rule"), CASES)
def test_the_layer_equals_the_published_one(kind: str, case: str, rule: str) -> None:
    # Not the rule `shipped`: there each query of a mini-batch reads a network of its own, which neither the published
    # kernels nor ours make.
    tensors, count, place = golden(f"layer_{kind}"), SEGMENTS[case], rules(case)[rule]
    weights = {f"ssm.{name.removeprefix('weight.')}": value for name, value in tensors.items() if "weight.ttt" in name}
    layer = golden_layer(weights, kind, rates=rule)
    x = tensors[f"{case}.x"].requires_grad_()
    segments = Segments({"one": 6, "three": 2}[case], 6, 2)
    order = order_of(TTTVideoConfig(**{"attention_head_dim": 16, "mini_batch_size": 8, "rates": rule}), segments, count)
    out = parted(layer.one_way(joined(x, segments, count), order, "forward"), segments)
    assert_close(out, tensors[f"{place}.out"], OUTPUTS)
    gradients = {
        name.removeprefix(f"{place}.grad."): value for name, value in tensors.items() if f"{place}.grad." in name
    }
    if not gradients:
        return
    out.square().mean().backward()
    found = {**published_gradients(layer, "ttt."), "ssm.x": x.grad}
    x.grad = None
    for name, gradient in gradients.items():
        assert_close(found[f"ssm.{name}"], gradient, GRADIENTS, name)


@pytest.mark.parametrize(("kind", "case", "rule"), CASES)
def test_both_directions_equal_the_published_ones(kind: str, case: str, rule: str) -> None:
    tensors, count, place = golden("bidirectional"), SEGMENTS[case], f"{kind}.{rules(case)[rule]}"
    start = f"{kind}.weight."
    weights = {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)}
    layer = golden_layer(weights, kind, rates=rule)
    x = tensors[f"{kind}.{case}.x"].clone().requires_grad_()
    segments = Segments({"one": 6, "three": 2}[case], 6, 2)
    order = order_of(TTTVideoConfig(**{"attention_head_dim": 16, "mini_batch_size": 8, "rates": rule}), segments, count)
    runs = TokenRows.whole(segments, count).runs
    out = parted(layer(joined(x, segments, count), runs, order), segments)
    assert_close(out, tensors[f"{place}.out"], OUTPUTS)
    if f"{place}.grad.x" in tensors:
        out.square().mean().backward()
        assert_close(x.grad, tensors[f"{place}.grad.x"], GRADIENTS)


def test_tokens_stand_in_the_published_order() -> None:
    for case in json.loads((FOLDER / "token_order.json").read_text())["orders"]:
        count = case["segments"]
        segments = Segments(case["text"], case["tokens"], case["attn_length"])
        config = TTTVideoConfig(segment_frames=case["attn_length"], attention_head_dim=16)
        order = order_of(config, segments, count, (1, case["tokens"]))
        published = torch.arange(case["tokens_total"])
        stream = joined(published[None], segments, count)[0]
        assert stream.tolist() == case["interleaved"]
        assert stream[order.backward].tolist() == case["flipped_interleaved"]
        assert order.backward[order.places].tolist() == published.tolist()
        assert parted(stream[None], segments)[0].tolist() == published.tolist()


def test_rotary_tables_are_the_published_ones() -> None:
    tensors = golden("rotary_tables")
    for key, width, grid in (("head16_7x2x3", 16, (7, 2, 3)), ("head64_2x3x2", 64, (2, 3, 2))):
        quarter = width // 4
        table = RotaryPositions((quarter, quarter * 3 // 2, quarter * 3 // 2), 10_000.0)(grid, torch.device("cpu"))
        for found, name in zip(table, ("cos", "sin"), strict=True):
            torch.testing.assert_close(found, tensors[f"{key}.ttt_{name}"], rtol=0, atol=1e-6)
            twice = found.repeat_interleave(2, -1)
            torch.testing.assert_close(twice, tensors[f"{key}.attention_{name}"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("rotations", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("group", "case", "sizes"),
    [("short", "one", (2, 2, 6, 5)), ("short", "three", (2, 2, 6, 4)), ("twelve", "three", (12, 1, 2, 5))],
)
def test_attention_in_segments_equals_the_published_one(
    group: str, case: str, sizes: tuple[int, ...], rotations: str
) -> None:
    tensors, count = golden("local_attention"), SEGMENTS[case]
    frames, heads, frame, text_tokens = sizes
    config = TTTVideoConfig(num_attention_heads=heads, attention_head_dim=32 // heads)
    layer = SegmentAttention(config)
    naming = FORMAT.namings["published"]
    for name, value in tensors.items():
        if name.startswith(f"{group}.weight."):
            theirs = name.removeprefix(f"{group}.weight.")
            (own,) = naming.parts_of(f"layers.0.seq_modeling_block.{theirs}")
            layer.get_parameter(own.removeprefix("transformer_blocks.0.attn1.")).data.copy_(value)
    text, video = (tensors[f"{group}.{case}.{name}"].clone().requires_grad_() for name in ("text", "video"))
    quarter = config.head_dim // 4
    grid = (frames + 1, *((2, 3) if frame == 6 else (1, 2)))
    table = RotaryPositions((quarter, quarter * 3 // 2, quarter * 3 // 2), 10_000.0)(grid, torch.device("cpu"))
    segments, rope = Segments(text_tokens, frame, frames), join_positions(text_tokens, table)
    if rotations == "bfloat16":
        rope = rope.bfloat16().float()
    tokens = joined(torch.cat([text, video], 1), segments, count)
    out = parted(layer(tokens, Share(segments, rope, is_first=True, is_last=True)), segments)
    place = f"{group}.{case}"
    if rotations == "bfloat16":
        if f"{place}.out_rope_bf16" in tensors:
            assert_close(out, tensors[f"{place}.out_rope_bf16"], OUTPUTS)
        return
    assert_close(out, tensors[f"{place}.out"], OUTPUTS)
    out.square().mean().backward()
    found = {**published_gradients(layer, "attn1."), "text": text.grad, "video": video.grad}
    for name in ("text", "video", "q.weight", "k_norm.weight", "o.bias"):
        assert_close(found[name], tensors[f"{place}.grad.{name}"], GRADIENTS, name)


@pytest.mark.parametrize(("kind", "case", "rule"), CASES)
def test_the_transformer_equals_the_published_one(kind: str, case: str, rule: str) -> None:
    tensors, place = golden(f"dit_{kind}_cases"), rules(case)[rule]
    model = golden_model(kind, rates=rule)
    x, t, conditions = golden_inputs(tensors, case)
    x, conditions = x.clone().requires_grad_(), conditions.map(lambda value: value.clone().requires_grad_())
    out = model(x, t, conditions).transpose(1, 2)
    assert_close(out, tensors[f"{place}.out"], OUTPUTS)
    if rule != "aligned":
        return
    out.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    found = dict(ConvertedWeights(FORMAT, gradients, model.config, PUBLISHED))
    whole = {**found, "video": x.grad.transpose(1, 2), "text": conditions["text"].grad}
    for name, gradient in tensors.items():
        if name.startswith(f"{place}.grad."):
            assert_close(whole[name.removeprefix(f"{place}.grad.")], gradient, GRADIENTS, name)
    norms = json.loads((FOLDER / f"dit_{kind}_grad_norms.json").read_text())
    column = norms["columns"].index(place)
    assert norms["norms"].keys() == found.keys()
    for name, values in norms["norms"].items():
        assert found[name].norm().item() == pytest.approx(values[column], rel=2e-4, abs=1e-6), name


def test_a_chunk_of_the_mini_batchs_length_is_ttt_mlp() -> None:
    tensors = golden("dit_mlp_cases")
    inputs = golden_inputs(tensors, "three")
    out = golden_model("mlp", mixer="large_chunk", chunk=8)(*inputs).transpose(1, 2)
    assert_close(out, tensors["three.aligned.out"], OUTPUTS)


def test_wrong_frames_and_texts_are_refused() -> None:
    config = tiny_config()
    model = TTTVideo(config)
    x, t, conditions = random_inputs(config)
    with pytest.raises(UserError, match=r"6 latent frames are not 2 a segment and one more; choose 3, 5"):
        model(x[:, :, :6], t, conditions)
    with pytest.raises(UserError, match=r"needs \[2, 3, any, 32\]"):
        model(x, t, Conditions(text=conditions["text"][:, :2]))
    with pytest.raises(UserError, match="do not divide into mini-batches of 8"):
        TTTVideo(tiny_config(rates="last_row"))(x, t, conditions)
