"""Linear layers of one input as one product: results and gradients as of their own, and what becomes of the weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from longtake.models import AdapterSize, LoraLinear, Trace, build_denoiser, fused
from longtake.models.projections import joined, joins, project
from longtake.parallel import choose_kept
from longtake.plan import Layout, MicroBatch
from longtake.plan.blocks import count_blocks
from longtake.plan.parameters import block_names
from tests.models.test_fused import FAMILIES, Seen, assert_same, computed

WIDTH, TOKENS = 16, 10


class Three(nn.Module):
    projections: ClassVar[tuple[str, ...]] = ("q", "k", "v")

    def __init__(self, bias: bool = True, outputs: int = WIDTH) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, outputs, bias=bias) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        return project(self, x)


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
def test_one_product_gives_what_three_do(dtype: torch.dtype, bias: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    model = Three(bias, outputs=WIDTH // 2).to(dtype)
    wanted = outcome(model, dtype)
    fused.use(("project",))
    found = outcome(
        model, dtype, torch.compile(model.forward, backend="aot_eager", fullgraph=True) if compiled else None
    )
    assert len(found) == len(wanted)
    exact = outcome(copy.deepcopy(model).double(), torch.float64, of=dtype)
    for ours, theirs, of in zip(found, wanted, exact, strict=True):
        far, apart = (float((one - of).detach().norm() / of.detach().norm()) for one in (ours, theirs))
        assert far <= max(1.02 * apart, 2 * torch.finfo(torch.float32).eps)


def test_weights_that_do_not_train_get_no_gradient_and_others_do() -> None:
    model = Three()
    model.k.requires_grad_(False)
    wanted = outcome(model, torch.float32)
    fused.use(("project",))
    found = outcome(model, torch.float32)
    torch.testing.assert_close(found, wanted)
    model.requires_grad_(False)
    assert len(outcome(model, torch.float32)) == 3 + 1


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
        return [name for name, _ in seen.found if name == "longtake::project"]

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
        assert not joins(model)
    assert joins(Three())
    assert not joins(build_denoiser(FAMILIES["stdit3"]))


@pytest.mark.parametrize("budget", [0.2, 0.6, 1.0])
def test_a_budget_keeps_their_product_as_it_keeps_theirs(budget: float) -> None:
    """Once kept, it is not computed again."""
    wanted = computed("mmdit")
    fused.use(("project",))
    with Seen() as seen:
        assert_same(computed("mmdit", budget=budget), wanted)
    config = FAMILIES["mmdit"]
    model = build_denoiser(config)
    again = [name for name, _ in seen.found].count("longtake::project")
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
