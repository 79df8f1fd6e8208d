from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from longtake.models.config import LoraConfig, MMDiTConfig
from longtake.models.mmdit import MMDiT
from longtake.plan.blocks import count_blocks
from longtake.plan.layout import Layout, MicroBatch, Upkeep
from longtake.plan.machine import Machine
from longtake.plan.parameters import count_weights
from longtake.plan.rates import Rates
from longtake.plan.speed import forecast_time, update_seconds
from longtake.track.devices import gpu_named
from tests.plan.trace import step_bytes

MODEL = MMDiTConfig()
MACHINE = Machine(gpu_named("h100"), efficiency=0.5, bandwidth=0.5)
LATENT = (16, 33, 32, 32)
BATCH = MicroBatch(3, LATENT, 512)
FORWARD = MMDiT.forward_flops(MODEL, LATENT, 512)


def seconds(layout: Layout, machine: Machine = MACHINE, batch: MicroBatch = BATCH):
    return forecast_time(MODEL, batch, layout, machine)


def test_alone_a_micro_batch_takes_its_flops_over_the_assumed_rate() -> None:
    found = seconds(Layout())
    assert found.seconds == pytest.approx(3 * 3 * FORWARD / (989e12 * 0.5))
    assert found.mfu == pytest.approx(0.5)
    assert (found.weights_wait, found.token_exchange) == (0, 0)


def test_each_kind_of_work_takes_the_time_of_its_own_rate() -> None:
    rates = Rates(1e14, {128: (1e13, 2e13)}, 1e12, 1e12, 1e11, 1e10, 0.0, "made up")
    machine = Machine(gpu_named("h100"), measured=rates)
    parts = seconds(Layout(), machine).parts
    attention = 4 * (33 * 256 + 512) ** 2 * MODEL.hidden_size * 3 * 57
    assert parts["attention"] == pytest.approx(attention / 1e13 + 2.5 * attention / 2e13)
    assert parts["products"] == pytest.approx(3 * (3 * FORWARD - attention) / 1e14, rel=0.01)
    unit = 3 * (33 * 256 + 512) * MODEL.hidden_size * 2  # bytes of the tokens' stream; a block moves some 210 of them
    assert 170 * 57 * unit / 1e12 < parts["elementwise"] < 250 * 57 * unit / 1e12
    again = seconds(Layout(remat=(19, 38), level="selective"), machine).parts
    kept = {name: again[name] for name in ("products", "attention", "elementwise")}
    assert kept == {name: parts[name] for name in kept}
    assert again["recomputation"] == pytest.approx((parts["products"] + parts["elementwise"]) / 3, rel=0.2)


def test_compiled_blocks_move_only_what_crosses_between_fused_kernels_and_products() -> None:
    unit = 3 * (33 * 256 + 512) * MODEL.hidden_size * 2
    single = {way: count_blocks(MODEL, BATCH, Layout(compiled=way)).blocks[-1] for way in (False, True)}
    assert single[True].forward.moved < 0.45 * single[False].forward.moved
    assert single[True].backward.moved < 0.4 * single[False].backward.moved
    # q, k and v in and out for norm and rotary, the MLP's 4 in and out for GELU, the stream in, modulated and out
    assert 15 * unit < single[True].forward.moved < 25 * unit
    assert single[True].forward.flops == single[False].forward.flops


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    lora = Layout(upkeep=Upkeep(lora=LoraConfig(rank=8)))
    assert 0.62 < seconds(lora).parts["products"] / seconds(Layout()).parts["products"] < 0.70


def test_what_is_computed_again_costs_time_but_is_not_counted_as_use() -> None:
    found = seconds(Layout(remat=(19, 38)))
    assert found.seconds == pytest.approx(4 / 3 * seconds(Layout()).seconds, rel=0.01)
    assert found.mfu == pytest.approx(0.5 * 3 / 4, rel=0.01)
    assert seconds(Layout(remat=(100, 100))).seconds == found.seconds  # no more blocks than there are


def test_attention_that_is_not_kept_costs_its_time_again() -> None:
    layout = Layout(remat=(19, 38), level="selective", sequence=8)
    ring = replace(layout, sequence_attention="ring")
    again = 4 * (33 * 256 + 512) ** 2 * MODEL.hidden_size * 3 * 57 / 8 / (989e12 * 0.5)
    without = replace(ring, level="full")
    assert seconds(ring).compute == pytest.approx(seconds(layout).compute, rel=1e-3)
    assert seconds(without).compute == pytest.approx(seconds(ring).compute + again, rel=1e-3)


def test_a_small_model_takes_as_long_as_the_host_takes_to_start_its_kernels() -> None:
    small = MMDiTConfig(hidden_size=256, num_heads=2, depth=2, depth_single_blocks=4)
    batch = MicroBatch(1, (16, 1, 16, 16), 8)
    once, again = (forecast_time(small, batch, Layout(remat=counts), MACHINE).seconds for counts in ((0, 0), (2, 4)))
    assert 2e-3 < once < 20e-3  # hundreds of kernels, of 10 us
    assert 1.2 * once < again < 1.5 * once
    twice = replace(batch, batch=2)
    assert forecast_time(small, twice, Layout(), MACHINE).seconds == pytest.approx(once, rel=0.05)


def test_gathering_weights_is_hidden_until_it_takes_longer_than_computing() -> None:
    assert seconds(Layout(shard=8)).weights_wait == 0
    slow = replace(MACHINE, network=1e9)
    found = seconds(Layout(shard=64), slow)
    weights = count_weights(MODEL, 64)
    once = weights.blocks[-1].gathered + weights.rest.gathered
    assert weights.blocks[-1].gathered > 0
    sent = (2 * (2 * weights.num_parameters - once) + 4 * weights.num_parameters) * 63 / 64
    assert found.weights_wait + found.compute == pytest.approx(sent / 0.5e9)
    assert seconds(Layout(shard=64, zero=2), slow).seconds < found.seconds  # gathers once instead of twice
    assert seconds(Layout(shard=8, replicate=8), slow).seconds < found.seconds  # only gradients leave the node


@pytest.mark.parametrize(("zero", "again"), [(3, 2), (2, 1)])
def test_offloaded_masters_travel_in_float32_and_one_gpu_waits_for_them(zero: int, again: int) -> None:
    weights, host = count_weights(MODEL, 1), MACHINE.rates.host
    last, rest = weights.blocks[-1].owned, weights.rest.owned
    there = 4 * (again * (weights.owned - last - rest) + last + rest) / host
    alone = seconds(Layout(offload=True, zero=zero))
    assert alone.compute > 4 * weights.owned / host  # hides gradients on their way to the host
    assert alone.weights_wait == pytest.approx(there)
    slow = replace(MACHINE, host=1e6)
    of_two = count_weights(MODEL, 2)
    last, rest = of_two.blocks[-1].owned, of_two.rest.owned
    both = 4 * (again * (of_two.owned - last - rest) + last + rest + of_two.owned) / 1e6
    found = seconds(Layout(shard=2, offload=True, zero=zero), slow)
    assert found.weights_wait + found.compute == pytest.approx(both, rel=0.01)  # and a little between the two


def test_frozen_weights_are_gathered_only_from_other_gpus_or_the_host() -> None:
    upkeep = Upkeep(lora=LoraConfig(rank=16))
    alone, offloaded, shared = (
        count_weights(MODEL, shards, upkeep, offload=offload) for shards, offload in ((1, False), (1, True), (2, False))
    )
    assert sum(unit.gathered for unit in (*alone.blocks, alone.rest)) == alone.num_trained
    for weights in (offloaded, shared):
        assert sum(unit.gathered for unit in (*weights.blocks, weights.rest)) > weights.num_parameters
    assert alone.frozen == offloaded.frozen == 2 * alone.num_parameters


def test_a_ring_is_counted_to_send_what_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, operation = [], dist.P2POp

    def see(start: Any, x: Tensor, **to: Any) -> Any:
        sent.append(x.nbytes * (start is dist.isend))
        return operation(start, x, **to)

    monkeypatch.setattr(dist, "P2POp", see)
    model = MMDiTConfig(depth=1, depth_single_blocks=2, attention="sdpa")
    peers = {"sequence": 4, "sequence_attention": "ring"}
    step_bytes(model, (9, 26, 40), 512, batch=3, remat=(1, 2), **peers)
    blocks = count_blocks(model, MicroBatch(3, (16, 9, 26, 40), 512), Layout(**peers)).blocks
    assert sum(sent) == pytest.approx(sum(2 * there + back for there, back in (of.sent["sequence"] for of in blocks)))


def test_peers_share_the_compute_and_wait_for_each_others_tokens() -> None:
    for layout in (Layout(sequence=4), Layout(tensor=4)):
        found = seconds(layout)
        assert found.compute == pytest.approx(seconds(Layout()).compute / 4, rel=0.01)  # each embeds all tokens
        assert found.token_exchange > 0
        assert found.mfu < 0.5


def test_the_update_moves_every_owned_number() -> None:
    owned = count_weights(MODEL, 8).owned
    bandwidth = MACHINE.rates.copies
    assert update_seconds(MODEL, Layout(shard=8), MACHINE) == pytest.approx(40 * owned / bandwidth)
    assert update_seconds(MODEL, Layout(shard=8, ema=True), MACHINE) == pytest.approx(52 * owned / bandwidth)
    assert update_seconds(MODEL, Layout(shard=8, offload=True), MACHINE) > 10 * 40 * owned / bandwidth


def test_peers_send_what_the_way_of_their_attention_asks_for() -> None:
    tokens, width = 3 * (33 * 256 + 512), MODEL.hidden_size  # of all peers
    moved = 2 * tokens // 4 * width  # bytes of q, of k, of v of one of four peers
    for way, forward, backward in (
        ("ulysses", 4 * 3 / 4, 4 * 3 / 4),  # q, k, v and the result, three quarters to the others
        ("ring", 2 * 3, 2 * 3 + 2 * 2 * 4),  # k and v three times on; their gradients, in float32, all the way round
    ):
        blocks = count_blocks(MODEL, BATCH, Layout(sequence=4, sequence_attention=way)).blocks
        for block in (blocks[0], blocks[-1]):
            assert block.sent["sequence"] == pytest.approx((forward * moved, backward * moved), rel=1e-3)
            assert block.sent["tensor"] == (0, 0)
