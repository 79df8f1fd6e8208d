"""AdamW and clipping on local shards, against PyTorch's own, in every way that states and weights are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longtake.train.optimizer.adamw import StepNumbers, update_8bit
from longtake.train.optimizer.quantise import table
from longtake.train.optimizer.rounding import rounding_key
from longtake.train.optimizer.sharded import ShardedAdamW, clip_scale
from tests.precision import within
from tests.train.optimizer.test_schedule import run_config

WAYS = {  # of keeping moments and weights
    "fp32": ({}, torch.float32),
    "8bit": ({"states": "8bit"}, torch.float32),
    "bf16": ({}, torch.bfloat16),
    "8bit bf16": ({"states": "8bit"}, torch.bfloat16),
}
SHAPES = (64, 96), (5,), (80, 64), (3, 4)  # two of them large enough for 8 bits
Way = tuple[Mapping[str, Any], torch.dtype]
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def model_of(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Parameters of these shapes and nothing else, with fixed values."""
    random = torch.Generator().manual_seed(0)
    model = nn.Module()
    for number, shape in enumerate(shapes):
        model.register_parameter(f"p{number}", nn.Parameter(torch.randn(shape, generator=random).to(dtype)))
    return model


def give_gradients(model: nn.Module, seed: int) -> list[Tensor]:
    """The same gradients for the same seed."""
    random = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=random).to(parameter.dtype)
    return [parameter.grad for parameter in model.parameters()]


def test_steps_equal_those_of_torch_with_its_clipping() -> None:
    ours, theirs = model_of((3, 4), (5,)), model_of((3, 4), (5,))
    config = run_config(lr=1e-2, eps=1e-8, optim={"betas": (0.8, 0.95), "weight_decay": 0.1})
    sharded = ShardedAdamW(ours, config)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, eps=1e-8, betas=(0.8, 0.95), weight_decay=0.1)
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        expected = nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        norm = sharded.grad_square_sum().sqrt()
        assert norm == pytest.approx(float(expected), rel=1e-6)
        sharded.step(1e-2, clip_scale(norm, 1.0))
        reference.step()
        assert all(p.grad is None for p in ours.parameters())
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_a_short_gradient_is_not_stretched() -> None:
    assert clip_scale(torch.tensor(0.25), 1.0) == 1
    assert clip_scale(torch.tensor(0.0), 1.0) == 1
    assert clip_scale(torch.tensor(4.0), 1.0) == pytest.approx(1 / (4 + 1e-6), rel=1e-6)


def optimizer_of(model: nn.Module, way: Way, **optim: Any) -> ShardedAdamW:
    return ShardedAdamW(model, run_config(lr=1e-2, eps=1e-8, optim={"weight_decay": 0.1, **way[0], **optim}))


def take_steps(model: nn.Module, optimizer: ShardedAdamW, numbers: range, skip: float | None = None) -> None:
    for number in numbers:
        give_gradients(model, number)
        scale = clip_scale(optimizer.grad_square_sum().sqrt(), 1.0)
        optimizer.step(1e-2, scale, None if skip is None else torch.tensor(skip))


def assert_same(ours: tuple[nn.Module, ShardedAdamW], theirs: tuple[nn.Module, ShardedAdamW]) -> None:
    """The same weights and states, bit by bit."""
    for one, other in zip(ours, theirs, strict=True):
        first, second = ((x.state() if isinstance(x, ShardedAdamW) else x.state_dict()) for x in (one, other))
        assert first.keys() == second.keys()
        for name in first:
            assert torch.equal(first[name], second[name]), name


@every_way
def test_state_read_into_a_new_optimizer_goes_on_bit_by_bit(way: Way) -> None:
    first, second = model_of(*SHAPES, dtype=way[1]), model_of(*SHAPES, dtype=way[1])
    ours, theirs = optimizer_of(first, way), optimizer_of(second, way, offload=True)
    take_steps(first, ours, range(3))
    second.load_state_dict(first.state_dict())
    for name, tensor in theirs.state().items():
        tensor.copy_(ours.state()[name])
    theirs.set_updates(3)
    take_steps(first, ours, range(3, 5))
    take_steps(second, theirs, range(3, 5))
    assert_same((first, ours), (second, theirs))


@every_way
def test_states_that_the_host_keeps_change_nothing(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtake.train.optimizer.storage.CHUNK_BYTES", 1 << 14)  # several chunks
    first, second = model_of(*SHAPES, dtype=way[1]), model_of(*SHAPES, dtype=way[1])
    ours, theirs = optimizer_of(first, way), optimizer_of(second, way, offload=True)
    assert len(theirs.storage._hosts) > 1
    take_steps(first, ours, range(4))
    take_steps(second, theirs, range(4))
    assert_same((first, ours), (second, theirs))


@every_way
@pytest.mark.parametrize("offload", [False, True])
def test_a_step_that_is_left_out_leaves_everything_as_it_was(way: Way, offload: bool) -> None:
    first, second = model_of(*SHAPES, dtype=way[1]), model_of(*SHAPES, dtype=way[1])
    ours, theirs = optimizer_of(first, way, offload=offload), optimizer_of(second, way)
    take_steps(first, ours, range(2), skip=0.0)
    take_steps(second, theirs, range(2))
    for p in first.parameters():
        p.grad = torch.full_like(p, float("nan"))
    ours.step(1e-2, clip_scale(ours.grad_square_sum().sqrt(), 1.0), torch.tensor(1.0))
    assert_same((first, ours), (second, theirs))
    take_steps(first, ours, range(2, 4), skip=0.0)  # its number is not counted either
    take_steps(second, theirs, range(2, 4))
    assert_same((first, ours), (second, theirs))


def test_our_formula_is_that_of_the_fused_kernel() -> None:
    ours, theirs = model_of(*SHAPES, dtype=torch.bfloat16), model_of(*SHAPES)
    theirs.load_state_dict({name: p.float() for name, p in ours.state_dict().items()})
    first, second = optimizer_of(ours, WAYS["bf16"]), optimizer_of(theirs, WAYS["fp32"])
    take_steps(ours, first, range(1))
    give_gradients(theirs, 0)
    for p in theirs.parameters():
        p.grad = p.grad.bfloat16().float()
    second.step(1e-2, clip_scale(second.grad_square_sum().sqrt(), 1.0))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.float(), q, rtol=2**-7, atol=0)  # one step of bfloat16 away
        assert within(abs((p.detach().float() - q.detach()).mean().item()), 2e-3)  # and not to one side
    for name, tensor in first.state().items():
        torch.testing.assert_close(tensor, second.state()[name], rtol=1e-5, atol=1e-9)


def test_bytes_of_states() -> None:
    model = model_of((256, 1024))
    plain, small = optimizer_of(model, WAYS["fp32"]), optimizer_of(model, WAYS["8bit"])
    count = model.p0.numel()
    assert sum(t.nbytes for t in plain.state().values()) == 8 * count
    assert sum(t.nbytes for t in small.state().values()) == 2 * (count + 4 * count // 256)
    assert all(t.device.type == "cpu" for t in small.state().values())


def test_parameters_named_by_no_decay_do_not_decay() -> None:
    ours, theirs = model_of((3, 4), (5,)), model_of((3, 4), (5,))
    sharded = optimizer_of(ours, WAYS["fp32"], no_decay=["p1"])
    groups = [{"params": [theirs.p0], "weight_decay": 0.1}, {"params": [theirs.p1], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=1e-2, eps=1e-8)
    for step in range(3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        sharded.step(1e-2, None)
        reference.step()
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def last_loss(way: Way) -> float:
    """What a small network reaches on a fixed task: the mean of its last losses."""
    random = torch.Generator().manual_seed(1)
    teacher = torch.randn(64, 64, generator=random) / 8
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=random) / 10)
    model.to(way[1])
    optimizer = ShardedAdamW(model, run_config(eps=1e-15, optim=dict(way[0])))
    losses = []
    for _ in range(150):
        x = torch.randn(64, 64, generator=random)
        y = (
            model.float()(x)
            if way[1] == torch.float32
            else torch.func.functional_call(model, {name: p.float() for name, p in model.named_parameters()}, (x,))
        )
        loss = (y - torch.tanh(x @ teacher)).square().mean()
        loss.backward()
        optimizer.step(3e-3, clip_scale(optimizer.grad_square_sum().sqrt(), 1.0))
        losses.append(loss.item())
    return sum(losses[-30:]) / 30


def test_every_way_trains_to_nearly_the_same_loss() -> None:
    reached = {name: last_loss(way) for name, way in WAYS.items()}
    for name in WAYS:
        assert reached[name] < 1.02 * reached["fp32"], reached


def test_frozen_parameters_have_neither_updates_nor_state() -> None:
    model = model_of((2,), (3,))
    model.p1.requires_grad_(False)
    before = model.p1.clone()
    optimizer = ShardedAdamW(model, run_config())
    model.p0.grad = torch.ones(2)
    optimizer.step(1e-2, None)
    assert torch.equal(model.p1, before)
    assert set(optimizer.state()) == {"optim.p0.exp_avg", "optim.p0.exp_avg_sq"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_way
@pytest.mark.parametrize("offload", [False, True])
def test_steps_on_cuda_are_those_on_a_cpu(way: Way, offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longtake.train.optimizer.storage.CHUNK_BYTES", 1 << 14)
    ours, theirs = model_of(*SHAPES, dtype=way[1]).cuda(), model_of(*SHAPES, dtype=way[1])
    first, second = optimizer_of(ours, way, offload=offload), optimizer_of(theirs, way)
    for number in range(3):
        for model, optimizer in ((ours, first), (theirs, second)):
            for p, grad in zip(model.parameters(), give_gradients(theirs, number), strict=True):
                p.grad = grad.to(p.device)
            optimizer.step(1e-2, torch.tensor(0.5), torch.tensor(float(number == 1), device=p.device))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        far = (p.cpu().float() - q.float()).abs()
        assert within((far > 1e-5 * q.float().abs() + 1e-6).float().mean(), 1e-2)  # but for roundings at a border
        assert within(far.max(), 0.02)
    assert all(t.is_cuda is not offload for t in first.state().values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every_way
def test_a_step_never_waits_for_the_device(way: Way) -> None:
    model = model_of(*SHAPES, dtype=way[1]).cuda()
    optimizer = optimizer_of(model, way, offload=True)
    for number in range(3):  # the first compiles
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        scale, skip = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
        torch.cuda.set_sync_debug_mode("error" if number else "default")
        try:
            optimizer.step(1e-2, scale, skip)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_formula_is_one_graph_for_any_number_of_blocks(dtype: torch.dtype) -> None:
    graphs = []

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(update_8bit, fullgraph=True, backend=counted)
    cpu = torch.device("cpu")
    for blocks in (6, 9, 20, 31):
        weights, grad = torch.randn(2, blocks, 96).to(dtype)
        moments = [torch.zeros(blocks, 96, dtype=torch.uint8) for _ in range(2)]
        scales = [torch.zeros(blocks) for _ in range(2)]
        args = (table(True, cpu), table(False, cpu), rounding_key(0, "a", 0, cpu), torch.tensor(1e-3))
        numbers = StepNumbers.of(1e-2, (0.9, 0.999), torch.zeros(()), None, None).tensors()
        eager = [x.clone() for x in (weights, *moments, *scales)]
        update_8bit(eager[0], grad, *eager[1:], *args, numbers, (0.9, 0.999), 1e-8)
        compiled(weights, grad, *moments, *scales, *args, numbers, (0.9, 0.999), 1e-8)
        for ours, theirs in zip((weights, *moments, *scales), eager, strict=True):
            assert torch.equal(ours, theirs)
    assert len(graphs) <= 2
