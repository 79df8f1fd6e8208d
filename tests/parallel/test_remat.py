"""Recomputing activations in backward, keeping some of them, and letting inputs wait in the host's memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

from longtake.contracts import Conditions, UserError
from longtake.models import Attention, MMDiT, MMDiTConfig, TTTVideo
from longtake.models.config import Backend
from longtake.models.segments import Segments
from longtake.models.ttt import inner_flops
from longtake.parallel import (
    INPUTS,
    BlockCompiler,
    BlockStore,
    Budget,
    Split,
    choose_kept,
    keeps_outputs,
    offload_inputs,
    remat_blocks,
)
from longtake.parallel.offload import Room
from longtake.parallel.remat import Kept
from tests.models import flash_attention_3, golden_ttt_video
from tests.models.initialised import initialise
from tests.plan.trace import saved_bytes
from tests.precision import within

CONFIG = MMDiTConfig(
    in_channels=12,
    patch_size=1,
    vec_in_dim=8,
    context_in_dim=8,
    hidden_size=32,
    num_heads=2,
    depth=2,
    depth_single_blocks=3,
    axes_dim=(4, 6, 6),
    attention="sdpa",
)


SPLIT = Split(1.0, 0.12, (1, 2))


def built(counts: tuple[int, int] | None, budget: Budget = INPUTS, store: BlockStore | None = None) -> MMDiT:
    model = MMDiT(CONFIG)
    initialise(model, 3)
    if counts is not None:
        remat_blocks(model, counts, budget=budget, store=store)
    if store is not None:
        offload_inputs(model, counts or (0, 0), store)
    return model


def loss_of(model: MMDiT, frames: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(frames)
    x = torch.randn(2, 12, frames, 3, 3, generator=generator)
    text, vector = torch.randn(2, 5, 8, generator=generator), torch.randn(2, 8, generator=generator)
    return model(x, torch.tensor([0.2, 0.7]), Conditions(text=text, vector=vector)).square().mean()


def gradients(model: MMDiT) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters()}


def kept_numbers(model: MMDiT) -> int:
    """How many numbers a forward leaves in memory for its backward, the model's own aside."""

    seen: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.numel()) or t, lambda t: t):
        loss_of(model).backward()
    return sum(seen)


PLAIN = built(None)
loss_of(PLAIN).backward()


def assert_same_gradients(model: MMDiT) -> None:
    found, wanted = gradients(model), gradients(PLAIN)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("counts", [(2, 3), (1, 0), (0, 2)])
def test_remat_changes_no_gradient_and_no_name_and_keeps_less(counts: tuple[int, int]) -> None:
    again = built(counts)
    assert kept_numbers(again) < kept_numbers(built(None))
    assert_same_gradients(again)


@pytest.mark.parametrize("budget", [0.0, 0.12, 0.25, 0.6, 1.0, SPLIT, Split(0.0, INPUTS, (1, 2))])
def test_what_is_kept_changes_no_gradient(budget: Budget) -> None:
    again = built((2, 3), budget)
    loss_of(again).backward()
    assert_same_gradients(again)


def flops(budget: Budget | None, store: BlockStore | None = None) -> int:
    """Of a forward and a backward."""
    model = built(None if budget is None else (2, 3), INPUTS if budget is None else budget, store)
    with FlopCounterMode(display=False) as counter:
        loss_of(model).backward()
    return counter.get_total_flops()


def test_a_larger_budget_computes_less_again_and_a_full_one_no_product_over_tokens() -> None:
    found = [flops(budget) for budget in (INPUTS, 0.0, 0.25, 0.6, 1.0)]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 5
    assert found[0] - found[1] == 5 * 2 * 2 * (2 * 23**2 * 32)  # attention of five blocks
    assert flops(0.6, BlockStore(1 << 20, least_bytes=1)) == found[3]
    between = [flops(Split(1.0, 0.6, last)) for last in ((0, 0), (0, 1), (0, 3), (1, 3), (2, 3))]
    assert between == sorted(between, reverse=True)
    assert (between[0], between[-1], len(set(between))) == (found[3], found[4], 5)
    modulations = 2 * 2 * (2 * 2 * 32 * 6 * 32) + 3 * (2 * 2 * 32 * 3 * 32)  # once a sample: not among what is kept
    assert 0 <= found[-1] - flops(None) <= modulations


def test_attention_is_kept_first_then_the_layers_of_most_inputs() -> None:
    model = MMDiT(CONFIG)

    def kept(blocks: str, budget: float) -> str:
        return str(choose_kept(model, blocks, budget))

    assert kept("single_blocks", INPUTS) == ""
    assert kept("single_blocks", 0.0) == kept("single_blocks", 1 / 9) == "attention"  # a ninth of what they put out
    assert kept("single_blocks", 0.25) == "attention, linear2"
    assert kept("single_blocks", 1.0) == "attention, linear2, q_proj, k_proj, v_mlp"
    assert kept("double_blocks", 0.2) == "attention, img_mlp.2"


def use_backend(model: nn.Module, backend: Backend) -> None:
    for module in model.modules():
        if isinstance(module, Attention):
            module.backend = backend


@pytest.mark.parametrize("backend", ["math", "flex"])
def test_attention_that_is_always_computed_again_leaves_the_budget_to_linear_layers(backend: str) -> None:
    model = MMDiT(CONFIG.model_copy(update={"attention": backend}))
    kept = choose_kept(model, "single_blocks", 1 / 9)
    assert (kept.attention, kept.layers) == (False, ("linear2",))
    assert not keeps_outputs(model, 0.0)
    use_backend(model, "flash")
    assert str(choose_kept(model, "single_blocks", 1 / 9)) == "attention"


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attention_by_flash_attention_3_is_kept(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    calls = flash_attention_3.install(monkeypatch)
    model = built((2, 3), 0.0)
    use_backend(model, "fa3")
    compiler = BlockCompiler(backend="aot_eager")
    if compiled:
        compiler.compile(model)
    loss_of(model).backward()
    assert sorted(calls) == ["activated"] + 5 * ["backward"] + 5 * ["forward"]
    assert sum(compiler.variants.values()) == 2 * compiled
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, gradients(PLAIN)[name], atol=1e-6, rtol=1e-5)


def test_what_is_kept_is_told_in_the_sizes_of_one_rank() -> None:
    model = MMDiT(CONFIG)
    whole, half = (choose_kept(model, "single_blocks", 1.0, tensor) for tensor in (1, 2))
    assert whole.products == {(160, 32), (32, 32), (32, 160)}
    assert half.products == {(80, 32), (32, 16), (32, 80)}


@pytest.mark.parametrize(("budget", "pieces"), [(INPUTS, 5), (0.0, 10), (0.25, 15)])  # attention; a layer too
def test_inputs_and_what_is_kept_wait_with_the_host_and_the_memory_is_used_again(budget: float, pieces: int) -> None:
    store = BlockStore(1 << 20, least_bytes=1000)
    model = built((2, 3), budget, store)
    loss = loss_of(model)
    assert store.room.used_bytes == pieces * 6144  # 23 tokens of two samples, in lines of 512 bytes
    loss.backward()
    assert_same_gradients(model)
    del loss
    assert store.room.used_bytes == 0
    most = store.room.most_bytes
    loss_of(model).backward()
    assert store.room.most_bytes == most


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
def test_what_compiled_blocks_keep_waits_with_the_host_too() -> None:
    """As much as of eager ones, and no weights."""
    stores = [BlockStore(1 << 20, least_bytes=1000) for _ in range(2)]
    eager, compiled = built((2, 3), 0.25, stores[0]), built((2, 3), 0.25)
    BlockCompiler(backend="aot_eager_decomp_partition").compile(compiled)
    offload_inputs(compiled, (2, 3), stores[1], compiled=True)
    losses = [loss_of(model) for model in (eager, compiled)]
    assert stores[1].room.used_bytes == stores[0].room.used_bytes > 0
    for loss in losses:
        loss.backward()
    largest = max(float(grad.abs().max()) for grad in gradients(eager).values())
    for name, grad in gradients(eager).items():
        assert within(float((gradients(compiled)[name] - grad).abs().max()), 1e-5 * largest)
    del loss, losses
    assert stores[1].room.used_bytes == 0


def test_sizes_may_be_symbols_of_the_compiler() -> None:
    """As where adapters on other bases were compiled before, in one process."""
    shapes = ShapeEnv()
    width = shapes.create_symintnode(shapes.create_symbol(32, ConstantSource("width")), hint=32)
    kept = Kept(True, frozenset({(32, 8)}))
    with pytest.raises(TypeError, match="unhashable"):
        hash((width, 8))
    assert kept.takes((width, 8))
    assert not kept.takes((width, 16))


def test_what_finds_no_room_stays_on_the_device() -> None:
    store = BlockStore(6000, least_bytes=1)  # one input of a block
    model = built((2, 3), store=store)
    loss = loss_of(model)
    assert 0 < store.room.used_bytes <= 6000
    loss.backward()
    assert_same_gradients(model)


def test_two_forwards_may_wait_at_once() -> None:
    store = BlockStore(1 << 20, least_bytes=1)
    model, plain = built((2, 3), store=store), built(None)
    for each in (model, plain):
        (loss_of(each) + loss_of(each, 3)).backward()
    assert all(torch.equal(gradients(model)[name], grad) for name, grad in gradients(plain).items())
    assert store.room.used_bytes == 0


def test_nothing_waits_without_gradients() -> None:
    store = BlockStore(1 << 20, least_bytes=1)
    with torch.no_grad():
        loss_of(built((2, 3), store=store))
    assert store.room.most_bytes == 0


def test_room_is_given_out_in_the_first_gap_and_never_twice() -> None:
    room = Room(4 * 512)
    first, second, third = room.take(512), room.take(600), room.take(1)
    assert (first, second, third) == (0, 512, 1536)
    assert room.take(1) is None
    room.give_back(512)
    assert room.take(1025) is None
    assert [room.take(512), room.take(1), room.take(1)] == [512, 1024, None]


def test_more_host_memory_than_there_is_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"model.grad_ckpt_buffer_size = .*choose fewer bytes"):
        loss_of(built((2, 3), store=BlockStore(1 << 60, least_bytes=1)))


@pytest.mark.parametrize("key", ["grad_ckpt_budget", "grad_ckpt_buffer_size"])
def test_keys_of_recomputation_want_recomputed_blocks(key: str) -> None:
    with pytest.raises(ValueError, match=r"write grad_ckpt_settings = \(19, 38\) too"):
        MMDiTConfig(**{key: 1})


@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_block_keeps_what_it_is_told() -> None:
    """Compilation comes after `remat_blocks` here: it finds the marks."""
    model = built((2, 3), 0.25)
    saved = {}
    for name, again in (("eager", model), ("compiled", built((2, 3), 0.25))):
        if name == "compiled":
            block = again.single_blocks[0]
            block.forward = torch.compile(block.forward, backend="aot_eager")
        loss = loss_of(again)
        loss.backward()
        saved[name] = gradients(again)
    largest = max(float(grad.abs().max()) for grad in saved["eager"].values())
    for name, grad in saved["eager"].items():
        assert within(float((saved["compiled"][name] - grad).abs().max()), 1e-5 * largest)


def kept_by_compiled(budget: float) -> int:
    """Bytes that a compiled single block keeps, computed again with a budget."""
    model, found = built((0, 3), budget), []
    block = model.single_blocks[1]
    forward = torch.compile(block.forward, backend="aot_eager_decomp_partition", dynamic=False)

    def see(*args: Tensor) -> Tensor:
        out: list[Tensor] = []
        found.append(saved_bytes(lambda: out.append(forward(*args)), [*block.parameters(), *args[1:]]))
        return out[0]

    block.forward = see
    loss_of(model)
    torch._dynamo.reset()
    return found[0]


@pytest.mark.usefixtures("fresh_compiler")
def test_attention_is_kept_with_its_sums_and_projections_by_the_budget() -> None:
    tokens = 2 * (18 + 5) * 4  # bytes of one number of each
    attention = 32 + 2  # what it gives, and the log-sum-exp of two heads
    assert kept_by_compiled(INPUTS) == tokens * 32
    assert kept_by_compiled(0.0) == tokens * (32 + attention)
    assert kept_by_compiled(1.0) == tokens * (32 + attention + 3 * 32 + 4 * 32 + 32)  # q, k, v, inner width, linear2


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-9)])
def test_recomputation_in_compiled_code_sees_what_its_forward_saw(dtype: torch.dtype, most: float) -> None:
    found = []
    for counts in ((0, 0), (0, 1)):
        model = built(counts, 0.0)
        block = model.single_blocks[0].to(dtype)
        compiled = torch.compile(block.forward)
        block.forward = lambda x, vec, rope, run=compiled: run(x.to(dtype), vec.to(dtype), rope).float()
        loss_of(model).backward()
        found.append(gradients(model))
        torch._dynamo.reset()
    largest = max(float(grad.abs().max()) for grad in found[0].values())
    assert within(max(float((found[1][name] - grad).abs().max()) for name, grad in found[0].items()), most * largest)


def test_pinned_memory_is_let_go_with_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go: list[int] = []
    monkeypatch.setattr("longtake.parallel.host.pin", lambda memory: True)
    monkeypatch.setattr("longtake.parallel.host.unpin", let_go.append)
    monkeypatch.setattr("torch.cuda.Stream", lambda device: None)
    store = BlockStore(1024)
    place = store._host(torch.device("cuda")).data_ptr()
    assert let_go == []
    del store
    assert let_go == [place]


@pytest.mark.gpu
def test_offloading_on_a_gpu_gives_the_same_gradients_and_frees_inputs() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    config = CONFIG.model_copy(
        update={"hidden_size": 512, "num_heads": 4, "axes_dim": (32, 48, 48), "depth_single_blocks": 12}
    )
    peaks, grads = {}, {}
    for num_bytes in (0, 1 << 30):
        model = MMDiT(config).to("cuda", torch.bfloat16)
        with torch.no_grad():
            for index, p in enumerate(model.parameters()):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(index)) * 0.02)
        store = BlockStore(num_bytes) if num_bytes else None
        remat_blocks(model, (2, 12), budget=0.12, store=store)
        if store is not None:
            offload_inputs(model, (2, 12), store)
        x = torch.randn(4, 12, 16, 16, 16, generator=torch.Generator().manual_seed(1)).cuda()
        text = torch.zeros(4, 8, 8, device="cuda")
        conditions = Conditions(text=text, vector=torch.zeros(4, 8, device="cuda"))
        for _ in range(2):
            model.zero_grad()
            before = torch.cuda.memory_allocated()  # a model's blocks refer to themselves: the last one may be there
            loss = model(x, torch.full((4,), 0.5, device="cuda"), conditions).float().square().mean()
            held = torch.cuda.memory_allocated() - before
            loss.backward()
        peaks[num_bytes] = held
        grads[num_bytes] = gradients(model)
    inputs = 13 * 4 * 16 * 16 * 16 * 512 * 2
    assert peaks[0] - peaks[1 << 30] > 1.4 * inputs  # and what attention gives is as large
    for name, grad in grads[0].items():
        assert torch.allclose(grads[1 << 30][name], grad, rtol=1e-2, atol=1e-3)


def test_scans_that_are_kept_are_not_computed_again() -> None:
    """Of TTT-Video: attention and the scans of both directions, and then gradients are the same."""
    config = golden_ttt_video.tiny_config("mlp", attention="sdpa")
    gradients, flops = [], []
    for budget, store in ((None, None), (INPUTS, None), (0.0, None), (0.0, BlockStore(1 << 20, least_bytes=1))):
        model = TTTVideo(config)
        initialise(model, 3)
        if budget is not None:
            remat_blocks(model, (2,), budget=budget, store=store)
        if store is not None:
            offload_inputs(model, (2,), store)
        inputs = golden_ttt_video.random_inputs(config)
        with FlopCounterMode(display=False) as counter:
            model(*inputs).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        flops.append(counter.get_total_flops())
    assert str(choose_kept(model, "transformer_blocks", 0.0)) == "attention"
    assert all(torch.equal(found, gradients[0]) for found in gradients[1:])
    scans = 2 * config.num_layers * inner_flops(config, Segments(5, 6, 2), 3)
    assert flops[1] - flops[2] >= scans > 0
    assert flops[3] == flops[2]
    assert store.room.most_bytes > 2 * 7 * 512  # of each block the input, attention and two scans, each in two parts
