"""TTT-Video against the published program, and what it promises about lengths, directions, chunks and cost."""

from __future__ import annotations

import copy
import json
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from longtake.contracts import Conditions, UserError
from longtake.models.build import build_denoiser
from longtake.models.layers import RotaryPositions, join_positions
from longtake.models.segments import SegmentAttention, Segments, Share, TokenRows
from longtake.models.ttt_video import SegmentBlock, TTTVideo, Where
from longtake.models.ttt_video_config import TTTVideoConfig
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
from tests.models.initialised import initialise
from tests.precision import rounding

OUTPUTS, GRADIENTS = 2e-5, 2e-4  # of the largest value, as the golden data's README suggests


def assert_close(found: Tensor, expected: Tensor, far: float, name: str = "") -> None:
    """Within a share of the largest value."""
    torch.testing.assert_close(
        found.reshape(expected.shape),
        expected,
        rtol=0,
        atol=far * float(expected.detach().abs().max()),
        msg=name or None,
    )


CASES = [(kind, case, rule) for kind, case in product(("linear", "mlp"), SEGMENTS) for rule in rules(case)]


@pytest.mark.parametrize(("kind", "case", "rule"), CASES)
def test_the_layer_equals_the_published_one(kind: str, case: str, rule: str) -> None:
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


@pytest.mark.parametrize(("mixer", "count"), [("ttt_linear", 21), ("ttt_mlp", 21), ("large_chunk", 9)])
def test_what_a_block_mixes_equals_the_formulas_in_float64(mixer: Any, count: int) -> None:
    config = tiny_config(mixer=mixer, num_attention_heads=2, segment_frames=12)
    block = SegmentBlock(config)
    generator = torch.Generator().manual_seed(count)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    segments, grid = Segments(3, 2, 12), (1, 2)
    order = order_of(config, segments, count, grid)
    of_one = join_positions(3, RotaryPositions((4, 6, 6), 10_000.0)((13, *grid), torch.device("cpu")))
    rows = TokenRows.whole(segments, count)
    x = torch.randn(1, rows.stop, config.hidden_size, generator=generator).requires_grad_()
    probe = torch.randn(x.shape, generator=generator)
    out = block.mix(joined(x, segments, count), rows.runs, Where(Share(segments, of_one, True, True), order))
    (parted(out, segments) * probe).sum().backward()
    found, of_x = parted(out, segments), x.grad.clone()
    gradients = {name: p.grad.clone() for name, p in block.named_parameters() if p.grad is not None}
    block.zero_grad()
    x64 = x.detach().double().requires_grad_()
    exact = mixed_in_float64(block.double(), x64, count, 3, 2, order.mini_batch)
    (exact * probe).sum().backward()
    assert_close(found.double(), exact, OUTPUTS)
    assert_close(of_x.double(), x64.grad, GRADIENTS)
    for name, parameter in block.named_parameters():
        if name in gradients:
            assert_close(gradients[name].double(), parameter.grad, GRADIENTS, name)


def mixed_in_float64(block: SegmentBlock, x: Tensor, count: int, texts: int, frame: int, update: int) -> Tensor:
    """Attention of each segment for itself, then the network both ways: [texts | video] [1, S, D], as the sheet has it,
    one mini-batch after another."""
    attn, ttt, heads = block.attn1, block.ttt, 2
    width = x.shape[-1] // heads
    table = angles((12 * count + 1, 1, frame), width)
    total, visits = torch.zeros_like(x), torch.zeros(x.shape[1], 1)
    for i in range(count):
        rows = torch.tensor(
            [
                *range(i * texts, (i + 1) * texts),
                *range(count * texts + 12 * i * frame, count * texts + (12 * i + 13) * frame),
            ]
        )
        q, k, v = (layer(x[:, rows]).unflatten(-1, (heads, -1)) for layer in (attn.to_q, attn.to_k, attn.to_v))
        q, k = (turned(one, table, texts) for one in (attn.norm_q(q), attn.norm_k(k)))
        scores = torch.einsum("bqnk,bpnk->bnqp", q, k) / width**0.5
        out = attn.to_out(torch.einsum("bnqp,bpnk->bqnk", scores.softmax(-1), v).flatten(2))
        total, visits = total.index_add(1, rows, out), visits.index_add(0, rows, torch.ones(len(rows), 1))
    z = total / visits
    z = gated(z, one_way_in_float64(ttt, z, table, count, texts, frame, update), ttt.forward_gate, count * texts)
    back = torch.cat(
        [
            torch.arange(count * texts).view(count, texts).flip(0).flatten(),
            torch.arange(count * texts, z.shape[1]).flip(0),
        ]
    )
    out = one_way_in_float64(ttt, z[:, back], table, count, texts, frame, update)
    return gated(z, out[:, torch.argsort(back)], ttt.backward_gate, count * texts)


def gated(z: Tensor, out: Tensor, gate: Any, texts: int) -> Tensor:
    return z + torch.cat([gate.text.tanh() * out[:, :texts], gate.video.tanh() * out[:, texts:]], 1)


def one_way_in_float64(ttt: Any, x: Tensor, table: Tensor, count: int, texts: int, frame: int, update: int) -> Tensor:
    heads, scan = 2, ttt.scan
    q, k, v = (layer(x).unflatten(-1, (heads, -1)) for layer in (ttt.wq, ttt.wk, ttt.wv))
    q, k = (turned(one / one.norm(dim=-1, keepdim=True), table, count * texts) for one in (q, k))
    d = v - k
    target = scan.norm_weight * (d - d.mean(-1, keepdim=True)) / (d.std(-1, keepdim=True) + 1e-8) + scan.norm_bias
    rate = 16.0 * ttt.rate(x).sigmoid() / q.shape[-1] / update
    places = [*range(texts), *range(count * texts, count * texts + 13 * frame)]
    for i in range(1, count):
        start = count * texts + (12 * i + 1) * frame
        places += [*range(i * texts, (i + 1) * texts), *range(start, start + 12 * frame)]
    place = torch.tensor(places)
    outs = []
    net = [part[None] for part in scan.state]
    for start in range(0, len(place), update):
        rows = place[start : start + update]
        net = learned(net, k[:, rows], target[:, rows], rate[:, rows], scan)
        outs.append(q[:, rows] + normed(run(net, q[:, rows]), scan))
    out = torch.cat(outs, 1)[:, torch.argsort(place)].flatten(2)
    return ttt.wo(ttt.post_norm(out))


def run(net: list[Tensor], x: Tensor) -> Tensor:
    hidden = torch.einsum("bsnk,bnkm->bsnm", x, net[0]) + net[1].transpose(1, 2)
    if len(net) == 2:
        return hidden
    return torch.einsum("bsnm,bnmk->bsnk", torch.nn.functional.gelu(hidden, approximate="tanh"), net[2]) + net[
        3
    ].transpose(1, 2)


def normed(z: Tensor, scan: Any) -> Tensor:
    return torch.nn.functional.layer_norm(z, z.shape[-1:], eps=1e-8) * scan.norm_weight + scan.norm_bias


def learned(net: list[Tensor], k: Tensor, target: Tensor, rate: Tensor, scan: Any) -> list[Tensor]:
    """The network after a step of gradient descent, whose gradient autograd finds."""
    loss = ((normed(run(net, k), scan) - target).square() * rate[..., None]).sum() / 2
    return [part - grad for part, grad in zip(net, torch.autograd.grad(loss, net, create_graph=True), strict=True)]


def angles(grid: tuple[int, int, int], width: int) -> Tensor:
    """Of each pair of channels at each place: float64 [F * h * w, K/2]."""
    places = torch.cartesian_prod(*(torch.arange(size, dtype=torch.float64) for size in grid))
    dims = width // 4, width * 3 // 8, width * 3 // 8
    return torch.cat(
        [
            places[:, i : i + 1] * 10_000.0 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
            for i, dim in enumerate(dims)
        ],
        1,
    )


def turned(x: Tensor, table: Tensor, texts: int) -> Tensor:
    """x [1, l, N, K], whose first tokens are text, turned as complex numbers."""
    pairs = torch.view_as_complex(x[:, texts:].contiguous().unflatten(-1, (-1, 2)))
    turns = torch.polar(torch.ones_like(table), table)[: pairs.shape[1], None]
    return torch.cat([x[:, :texts], torch.view_as_real(pairs * turns).flatten(-2)], 1)


def test_parallel_directions_read_the_same() -> None:
    config = tiny_config(directions="parallel")
    model = TTTVideo(config)
    initialise(model, 1)
    ttt = model.transformer_blocks[0].ttt
    segments = Segments(5, 6, 2)
    order, runs = order_of(config, segments, 3), TokenRows.whole(segments, 3).runs
    z = torch.randn(2, 57, config.hidden_size, generator=torch.Generator().manual_seed(0))
    ahead = ttt.forward_gate(z, ttt.one_way(z, order, "forward"), runs)
    both = ttt.backward_gate(ahead, ttt.one_way(z, order, "backward"), runs)
    assert_close(ttt(z, runs, order), both, 1e-6)


def test_initial_values_are_those_of_the_sheet() -> None:
    model = TTTVideo(tiny_config(num_attention_heads=4))
    initialise(model, 1)
    ttt = model.transformer_blocks[1].ttt
    for drawn in (ttt.scan.W1, ttt.scan.W2, ttt.rate.weight):
        assert abs(float(drawn.detach().std()) / 0.02 - 1) < 0.1
    assert all(bool((gate == 0.1).all()) for one in (ttt.forward_gate, ttt.backward_gate) for gate in one.parameters())
    zeros = ttt.scan.b1, ttt.scan.b2, ttt.scan.norm_bias, ttt.rate.bias, ttt.post_norm.bias
    assert not any(bool(parameter.any()) for parameter in zeros)
    assert bool((ttt.scan.norm_weight == 1).all())
    assert 0.9 * 64**-0.5 < float(ttt.wq.weight.detach().abs().max()) < 64**-0.5
    assert bool(ttt.wq.bias.any())


@pytest.mark.parametrize("mixer", ["none", "ttt_linear", "ttt_mlp", "large_chunk"])
def test_forward_flops_equal_the_counter_of_torch(mixer: Any) -> None:
    config = tiny_config(mixer=mixer, attention="math")
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        x, t, conditions = random_inputs(config)
        build_denoiser(config)(x, t, conditions)
    assert counter.get_total_flops() == 2 * TTTVideo.forward_flops(config, (4, 7, 4, 6), 5)


@pytest.mark.parametrize("chunk", ["frame", "segment", 8])
def test_flops_of_an_image_are_counted_with_large_chunks(chunk: Any) -> None:
    config = tiny_config(mixer="large_chunk", chunk=chunk)
    image, clip = (TTTVideo.forward_flops(config, (4, frames, 4, 6), 5) for frames in (1, 7))
    assert 0 < image < clip


def test_bf16_weights_take_fp32_inputs() -> None:
    model = TTTVideo(tiny_config(ttt_base_lr=1.0))
    initialise(model, 0)
    inputs = random_inputs(model.config)
    exact = model(*inputs)
    bound = rounding(float(exact.detach().abs().max()), steps=2, dtype=torch.bfloat16)  # of two blocks
    torch.testing.assert_close(model.bfloat16()(*inputs).float(), exact, atol=bound, rtol=0)


def test_a_traced_model_gives_the_same_answer() -> None:
    model = TTTVideo(tiny_config())
    initialise(model, 0)
    inputs = random_inputs(model.config)
    traced = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(*inputs), model(*inputs), atol=1e-6, rtol=0)
