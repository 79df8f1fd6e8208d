"""Recomputing activations in backward, saving some of them, and offloading what is saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

from longtake.contracts import Bucket, Conditions, UserError
from longtake.models.attention import Attention
from longtake.models.config import MMDiTConfig
from longtake.models.mmdit import MMDiT
from longtake.models.segments import Segments
from longtake.models.ttt import inner_flops
from longtake.models.ttt_video import TTTVideo
from longtake.parallel.compile import BlockCompiler
from longtake.parallel.offload import BlockStore, Room
from longtake.parallel.recomputation import CurrentLevel, Level, Saved, check_level, level_and_counts, saved_by_list
from tests.models import flash_attention_3, golden_ttt_video
from tests.models.initialised import initialise
from tests.parallel.blocks import set_blocks
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


LAYERS = ("linear2", "img_mlp.2")


def built(
    level: Level | CurrentLevel = "none",
    counts: tuple[int, int] | None = None,
    store: BlockStore | None = None,
    compiler: BlockCompiler | None = None,
) -> MMDiT:
    model = MMDiT(CONFIG)
    initialise(model, 3)
    set_blocks(model, level, counts, store=store, compiler=compiler)
    return model


def loss_of(model: MMDiT, frames: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(frames)
    x = torch.randn(2, 12, frames, 3, 3, generator=generator)
    text, vector = torch.randn(2, 5, 8, generator=generator), torch.randn(2, 8, generator=generator)
    return model(x, torch.tensor([0.2, 0.7]), Conditions(text=text, vector=vector)).square().mean()


def gradients(model: MMDiT) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters()}


def saved_numbers(model: MMDiT) -> int:
    """How many numbers a forward leaves in memory for its backward, the model's own aside."""

    seen: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.numel()) or t, lambda t: t):
        loss_of(model).backward()
    return sum(seen)


PLAIN = built()
loss_of(PLAIN).backward()


def assert_same_gradients(model: MMDiT) -> None:
    found, wanted = gradients(model), gradients(PLAIN)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("counts", [(2, 3), (1, 0), (0, 2)])
def test_full_recomputation_changes_no_gradient_and_saves_less(counts: tuple[int, int]) -> None:
    again = built("full", counts)
    assert saved_numbers(again) < saved_numbers(built())
    assert_same_gradients(again)


@pytest.mark.parametrize("level", ["none", "selective", LAYERS])
def test_a_level_changes_no_gradient(level: Level) -> None:
    again = built(level)
    loss_of(again).backward()
    assert_same_gradients(again)


def flops(level: Level, store: BlockStore | None = None) -> int:
    """Of a forward and a backward."""
    model = built(level, store=store)
    with FlopCounterMode(display=False) as counter:
        loss_of(model).backward()
    return counter.get_total_flops()


def test_a_cheaper_level_computes_less_twice() -> None:
    every = ("linear2", "q_proj", "k_proj", "v_mlp")
    levels: list[Level] = ["full", "selective", ("linear2",), every, "none"]
    found = dict(zip(levels, map(flops, levels), strict=True))
    assert list(found.values()) == sorted(set(found.values()), reverse=True)
    assert found["full"] - found["selective"] == 5 * 2 * 2 * (2 * 23**2 * 32)  # attention of five blocks
    assert found["selective"] - found["linear2",] == 3 * 2 * 2 * 23 * 160 * 32
    assert flops(("linear2",), BlockStore(1 << 20, least_bytes=1)) == found["linear2",]


def test_the_level_is_switched_for_each_micro_batch() -> None:
    entries = {("", 1): "full", ("", 2): "selective", ("", 3): "none"}
    current = CurrentLevel("none", entries)
    model = built(current)
    for (name, frames), level in (*entries.items(), (("other", 5), "full")):
        current.use(Bucket(name, frames, "", (frames, 3, 3), 2))
        with FlopCounterMode(display=False) as counter:
            loss_of(model).backward()
        assert current.level == level
        assert counter.get_total_flops() == flops(level)
        model.zero_grad()


def test_layers_are_saved_by_their_sizes_on_one_rank_and_unknown_ones_refused() -> None:
    model = MMDiT(CONFIG)
    assert set(saved_by_list(model, "selective").values()) == {Saved()}
    whole, half = (saved_by_list(model, (*LAYERS, "q_proj"), tensor) for tensor in (1, 2))
    assert whole == {
        "double_blocks": Saved(frozenset({(128, 32)})),
        "single_blocks": Saved(frozenset({(160, 32), (32, 32)})),
    }
    assert half == {
        "double_blocks": Saved(frozenset({(64, 32)})),
        "single_blocks": Saved(frozenset({(80, 32), (32, 16)})),
    }
    with pytest.raises(UserError, match=r"model.recompute: linear3: not a linear layer of the blocks; use .*linear2"):
        saved_by_list(model, ("linear2", "linear3"))


def test_blocks_are_recomputed_as_either_key_asks() -> None:
    def asked(**keys: Any) -> tuple[Level, tuple[int, ...]]:
        return level_and_counts(MMDiTConfig(depth=2, depth_single_blocks=3, **keys))

    assert asked() == asked(recompute="none", grad_ckpt_settings=(1, 1)) == ("none", (0, 0))
    assert asked(grad_ckpt_settings=(1, 100)) == ("selective", (1, 3))
    assert asked(recompute="full") == ("full", (2, 3))
    assert asked(recompute=["linear2"], grad_ckpt_settings=(0, 1)) == (("linear2",), (0, 1))
    for number in (0, 1, -0.5, 1.5):
        with pytest.raises(ValueError, match="recompute"):
            asked(recompute=number)


def test_a_number_is_refused_where_the_compiler_cannot_choose() -> None:
    check_level(0.5, compiled=True, ranks=1)
    check_level("full", compiled=False, ranks=4)
    with pytest.raises(UserError, match=r"^model.recompute = 0.5: .* not compiled; write compile = True, or "):
        check_level(0.5, compiled=False, ranks=1)
    with pytest.raises(UserError, match=r"^model.recompute = 0.5: .* the 4 ranks that share a micro-batch; write "):
        check_level(0.5, compiled=True, ranks=4)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attention_by_flash_attention_3_is_saved(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    calls = flash_attention_3.install(monkeypatch)
    compiler = BlockCompiler(backend="aot_eager")
    model = built("selective", compiler=compiler if compiled else None)
    for module in model.modules():
        if isinstance(module, Attention):
            module.backend = "fa3"
    loss_of(model).backward()
    assert sorted(calls) == ["activated"] + 5 * ["backward"] + 5 * ["forward"]
    assert sum(compiler.variants.values()) == 2 * compiled
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, gradients(PLAIN)[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("level", "pieces"), [("none", 0), ("full", 5), ("selective", 10), (LAYERS, 15)])
def test_saved_tensors_are_offloaded_and_the_memory_is_used_again(level: Level, pieces: int) -> None:
    """Inputs, outputs of attention and of a layer, of five blocks; those of a double block are in two parts."""
    store = BlockStore(1 << 20, least_bytes=1000)
    model = built(level, store=store)
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
def test_tensors_that_compiled_blocks_save_are_offloaded_too() -> None:
    """As much as of eager ones, and no weights."""
    stores = [BlockStore(1 << 20, least_bytes=1000) for _ in range(2)]
    compiler = BlockCompiler(backend="aot_eager_decomp_partition")
    eager, compiled = built(LAYERS, store=stores[0]), built(LAYERS, store=stores[1], compiler=compiler)
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
    saved = Saved(frozenset({(32, 8)}))
    with pytest.raises(TypeError, match="unhashable"):
        hash((width, 8))
    assert saved.has((width, 8))
    assert not saved.has((width, 16))


def test_what_finds_no_room_stays_on_the_device() -> None:
    store = BlockStore(6000, least_bytes=1)  # one input of a block
    model = built("full", store=store)
    loss = loss_of(model)
    assert 0 < store.room.used_bytes <= 6000
    loss.backward()
    assert_same_gradients(model)


def test_two_forwards_may_wait_at_once() -> None:
    store = BlockStore(1 << 20, least_bytes=1)
    model, plain = built("full", store=store), built()
    for each in (model, plain):
        (loss_of(each) + loss_of(each, 3)).backward()
    assert all(torch.equal(gradients(model)[name], grad) for name, grad in gradients(plain).items())
    assert store.room.used_bytes == 0


def test_nothing_waits_without_gradients() -> None:
    store = BlockStore(1 << 20, least_bytes=1)
    with torch.no_grad():
        loss_of(built("full", store=store))
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
        loss_of(built("full", store=BlockStore(1 << 60, least_bytes=1)))


def test_a_buffer_wants_recomputed_blocks() -> None:
    with pytest.raises(ValueError, match=r'write recompute = "selective" too'):
        MMDiTConfig(grad_ckpt_buffer_size=1)


def saved_by_compiled(level: Level) -> int:
    """Bytes that a compiled single block saves at a level."""
    compiler = BlockCompiler(dynamic=False, backend="aot_eager_decomp_partition")
    model, found = built(level, (0, 3), compiler=compiler), []
    block = model.single_blocks[1]
    forward = block.forward

    def see(*args: Tensor) -> Tensor:
        out: list[Tensor] = []
        found.append(saved_bytes(lambda: out.append(forward(*args)), [*block.parameters(), *args[1:]]))
        return out[0]

    block.forward = see
    loss_of(model)
    torch._dynamo.reset()
    return found[0]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
def test_compiled_blocks_save_what_their_level_says() -> None:
    tokens = 2 * (18 + 5) * 4  # bytes of one number of each
    attention = 32 + 2  # its output, and the log-sum-exp of two heads
    full = tokens * 32
    assert saved_by_compiled("full") == full
    assert saved_by_compiled("selective") == full + tokens * attention
    every = ("linear2", "q_proj", "k_proj", "v_mlp")
    assert saved_by_compiled(every) == full + tokens * (
        attention + 3 * 32 + 4 * 32 + 32
    )  # q, k, v, inner width, linear2
    some = [saved_by_compiled(number) for number in (0.2, 0.5, 0.8)]
    assert full < some[0] < some[2] <= saved_by_compiled("none")
    assert some == sorted(some)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
def test_a_number_changes_no_gradient() -> None:
    model = built(0.3, (0, 2), compiler=BlockCompiler(backend="aot_eager_decomp_partition"))
    loss_of(model).backward()
    largest = max(float(grad.abs().max()) for grad in gradients(PLAIN).values())
    for name, grad in gradients(PLAIN).items():
        assert within(float((gradients(model)[name] - grad).abs().max()), 1e-5 * largest)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-9)])
def test_recomputation_in_compiled_code_sees_what_its_forward_saw(dtype: torch.dtype, most: float) -> None:
    found = []
    for counts in ((0, 0), (0, 1)):
        model = built("selective", counts)
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
        set_blocks(model, "selective", store=store)
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


def test_scans_that_are_saved_are_not_computed_twice() -> None:
    """Of TTT-Video: attention and the scans of both directions, and then gradients are the same."""
    config = golden_ttt_video.tiny_config("mlp", attention="sdpa")
    gradients, flops = [], []
    offloaded = BlockStore(1 << 20, least_bytes=1)
    for level, store in (("none", None), ("full", None), ("selective", None), ("selective", offloaded)):
        model = TTTVideo(config)
        initialise(model, 3)
        set_blocks(model, level, store=store)
        inputs = golden_ttt_video.random_inputs(config)
        with FlopCounterMode(display=False) as counter:
            model(*inputs).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        flops.append(counter.get_total_flops())
    assert all(torch.equal(found, gradients[0]) for found in gradients[1:])
    scans = 2 * config.num_layers * inner_flops(config, Segments(5, 6, 2), 3)
    assert flops[1] - flops[2] >= scans > 0
    assert flops[3] == flops[2]
    assert store.room.most_bytes > 2 * 7 * 512  # of each block the input, attention and two scans, each in two parts
