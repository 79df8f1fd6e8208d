"""Linear layers of one input as one product: results and gradients as of their own, and what becomes of the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from longtake.models import AdapterSize, LoraLinear, Trace, build_denoiser, fused
from longtake.models.projections import joined, joins, project, project_out
from longtake.parallel import choose_kept
from longtake.plan import Layout, MicroBatch
from longtake.plan.blocks import count_blocks
from longtake.plan.parameters import block_names
from tests.models.test_fused import FAMILIES, Seen, assert_same, computed
from tests.precision import within

WIDTH, TOKENS = 16, 10


class Three(nn.Module):
    projections: ClassVar[tuple[str, ...]] = ("q", "k", "v")

    def __init__(self, bias: bool = True, outputs: int = WIDTH) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, outputs, bias=bias) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        return project(self, x)


class Streams(nn.Module):
    """Two, of 2 and 3 tokens."""

    ways_out: ClassVar[tuple[str, ...]] = ("q", "k")

    def __init__(self, bias: bool = True, outputs: int = WIDTH) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(WIDTH, outputs, bias=bias) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        return project_out(self, x, (2, 3))


KINDS = {"project": Three, "project_out": Streams}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    fused.use(())


def outcome(
    model: nn.Module,
    dtype: torch.dtype,
    called: Callable[[Tensor], list[Tensor]] | None = None,
    of: torch.dtype | None = None,
) -> list[Tensor]:
    """Results, and gradients of the input and of what trains, at numbers rounded to `of`."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(2, TOKENS // 2, WIDTH, generator=draw).to(of or dtype).to(dtype).requires_grad_()
    out = (called or model.forward)(x)
    weights = [p for p in model.parameters() if p.requires_grad]
    grads = [torch.randn(one.shape, generator=draw).to(of or dtype).to(dtype) for one in out]
    return [*out, *torch.autograd.grad(out, [x, *weights], grads)]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_one_operator_gives_what_each_layer_does(name: str, dtype: torch.dtype, bias: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    model = KINDS[name](bias, outputs=WIDTH // 2).to(dtype)
    wanted = outcome(model, dtype)
    fused.use((name,))
    found = outcome(
        model, dtype, torch.compile(model.forward, backend="aot_eager", fullgraph=True) if compiled else None
    )
    assert len(found) == len(wanted)
    exact = outcome(copy.deepcopy(model).double(), torch.float64, of=dtype)
    for ours, theirs, of in zip(found, wanted, exact, strict=True):
        far, apart = (float((one - of).detach().norm() / of.detach().norm()) for one in (ours, theirs))
        assert within(far - apart, max(0.02 * apart, 2 * torch.finfo(torch.float32).eps - apart))


@pytest.mark.parametrize("name", KINDS)
def test_weights_that_do_not_train_get_no_gradient_and_others_do(name: str) -> None:
    model = KINDS[name]()
    model.k.requires_grad_(False)
    model.q.bias.requires_grad_(False)
    wanted = outcome(model, torch.float32)
    fused.use((name,))
    found = outcome(model, torch.float32)
    torch.testing.assert_close(found, wanted)
    outputs = len(model(torch.randn(2, TOKENS // 2, WIDTH)))
    sum(one.sum() for one in model(torch.randn(2, TOKENS // 2, WIDTH))).backward()  # where the input wants none
    assert [p.grad is not None for p in model.parameters()] == [p.requires_grad for p in model.parameters()]
    model.requires_grad_(False)
    assert len(outcome(model, torch.float32)) == outputs + 1


def test_operators_are_what_they_say() -> None:
    """Of their schema, their stand-ins and their gradients, by PyTorch's own checks."""
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    weights, biases = ([torch.randn(*size, requires_grad=True) for _ in range(2)] for size in ((4, WIDTH), (4,)))
    for own in (biases, []):
        torch.library.opcheck(torch.ops.longtake.project.default, (x, weights, own))
        torch.library.opcheck(torch.ops.longtake.project_out.default, (x, weights, own, [2, 3]))


def test_a_way_out_reads_where_attention_wrote() -> None:
    """And its gradient is written where attention's backward reads it."""
    model, x = Streams(), torch.randn(2, 5, WIDTH, requires_grad=True)
    fused.use(("project_out",))
    with Seen() as seen:
        sum(one.sum() for one in model(x)).backward()
    assert not {name for name, _ in seen.found} & {"aten::clone", "aten::cat", "aten::slice_backward", "aten::copy_"}


def test_weights_that_lie_together_are_joined_as_a_view() -> None:
    whole = torch.randn(12, 4)
    parts = whole.split([2, 6, 4])
    view = joined(parts)
    assert view.data_ptr() == whole.data_ptr()
    assert torch.equal(view, whole)
    for apart in ([parts[1], parts[0]], [parts[0], parts[2]], [parts[0], torch.randn(2, 4)], [whole.t(), whole.t()]):
        copy = joined(apart)
        assert copy.data_ptr() != apart[0].data_ptr()
        assert torch.equal(copy, torch.cat(apart))


def test_layers_that_are_not_as_they_were_made_keep_their_own_products() -> None:
    fused.use(("project",))

    def operators(model: nn.Module) -> list[str]:
        with Seen() as seen:
            model(torch.randn(2, 5, WIDTH))
        return [name for name, _ in seen.found if name.startswith("longtake::project")]

    assert operators(Three()) == ["longtake::project"]
    adapted = Three()
    adapted.k = LoraLinear(adapted.k, AdapterSize(2, 1.0))
    cut = Three()
    cut.v.forward = cut.v.forward  # as tensor peers do
    uneven, wider = Three(), Three()
    uneven.q.bias = None
    wider.v = nn.Linear(WIDTH, 2 * WIDTH)
    for model in (adapted, cut, uneven, wider):
        assert operators(model) == []
        assert not joins(model, "project")
    fused.use(fused.NAMES)
    assert operators(Streams()) == ["longtake::project_out"] * 2  # results
    adapted, uneven = Streams(), Streams()
    adapted.k = LoraLinear(adapted.k, AdapterSize(2, 1.0))
    uneven.q.bias = None
    for model in (adapted, uneven):
        assert operators(model) == []
        assert not joins(model, "project_out")
    found = {name: [joins(build_denoiser(FAMILIES[name]), which) for which in KINDS] for name in FAMILIES}
    assert found == {
        "mmdit": [True, True], "cogvideox": [True, False], "ttt_video": [True, False], "stdit3": [False, False],
    }  # fmt: skip


@pytest.mark.parametrize("budget", [0.2, 0.6, 1.0])
@pytest.mark.parametrize("name", KINDS)
def test_a_budget_keeps_their_product_as_it_keeps_theirs(name: str, budget: float) -> None:
    """Once kept, it is not computed again."""
    wanted = computed("mmdit")
    fused.use((name,))
    with Seen() as seen:
        assert_same(computed("mmdit", budget=budget), wanted)
    config = FAMILIES["mmdit"]
    model = build_denoiser(config)
    again = [found for found, _ in seen.found].count(f"longtake::{name}")
    is_kept = choose_kept(model, "double_blocks", budget).takes((config.hidden_size, config.hidden_size))
    assert again == len(model.double_blocks) * 2 * (1 if is_kept else 2)  # of either stream


def test_a_forecast_counts_the_joined_weight() -> None:
    """While it is multiplied; and values that stay where they are because queries and keys of one memory do."""
    width = 64
    weights = [torch.empty(width, width, device="meta", requires_grad=True) for _ in range(3)]
    model = Three()
    for name, weight in zip("qkv", weights, strict=True):
        layer = nn.Linear(width, width, bias=False, device="meta")
        layer.weight = nn.Parameter(weight)
        setattr(model, name, layer)
    peaks, flops = {}, {}
    for names in ((), ("project",)):
        fused.use(names)
        x = torch.empty(1, 2, width, device="meta")
        with Trace(model, x) as trace, torch.no_grad():
            model(x)
        peaks[names], flops[names] = trace.peak, trace.flops
        with FlopCounterMode(display=False) as counter:
            sum(one.sum() for one in model(x.clone().requires_grad_())).backward()
        assert counter.get_total_flops() == 3 * flops[names]
    assert flops[()] == flops["project",] == 2 * 2 * width * 3 * width
    assert peaks["project",] - peaks[()] == 3 * width * width * 4
    config = FAMILIES["mmdit"].model_copy(update={"attention": "sdpa"})
    batch = MicroBatch(2, (config.latent_channels, 5, 16, 24), 16)
    blocks = {}
    for names in ((), ("project",)):
        fused.use(names)
        blocks[names] = count_blocks(config, batch, Layout()).blocks
    values = 2 * (5 * 8 * 12 + 16) * config.hidden_size * 2  # in one memory with queries and keys, which are kept
    for name, plain, ours in zip(block_names(config), blocks[()], blocks["project",], strict=True):
        assert ours.saved - plain.saved == pytest.approx(values if name.startswith("double") else 0, abs=1)
        assert ours.forward.flops + ours.backward.flops == pytest.approx(plain.forward.flops + plain.backward.flops)
        assert (ours.forward.moved > plain.forward.moved) == name.startswith("double")


def test_a_forecast_counts_what_is_not_copied_on_the_way_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Attention's result of several samples, u bytes: 2 u to copy it, and u that backward would keep."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = FAMILIES["mmdit"].model_copy(update={"attention": "sdpa"})
    batch = MicroBatch(2, (config.latent_channels, 5, 16, 24), 16)
    u = batch.batch * (5 * 8 * 12 + 16) * config.hidden_size * 2
    for compiled in (False, True):
        blocks = {}
        for names in ((), ("project_out",)):
            fused.use(names)
            blocks[names] = count_blocks(config, batch, Layout(compiled=compiled)).blocks[0]
        plain, ours = blocks[()], blocks["project_out",]
        moved = [of.moved / u for of in (plain.forward, plain.backward)]
        older = compiled and torch.__version__ < "2.12"  # whose compiler moves u more each way where nothing is copied
        assert moved == pytest.approx([23.5, 34.6] if older else [22.5, 33.6] if compiled else [55, 107], rel=0.01)
        added = 0 if compiled else 2 * u  # biases, in a pass of their own behind a product of several samples
        assert plain.forward.moved - ours.forward.moved == pytest.approx((1 if older else 2) * u + added, rel=0.02)
        assert plain.saved - ours.saved == pytest.approx(u, rel=0.02)
        assert plain.forward.flops + plain.backward.flops == pytest.approx(ours.forward.flops + ours.backward.flops)
        assert ours.backward.moved <= plain.backward.moved
