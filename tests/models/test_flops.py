"""The documented FLOPs formula against torch's own counter, which sees the operations as they are called."""

from __future__ import annotations

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from longtake.models.build import build_denoiser
from longtake.models.config import MMDiTConfig
from longtake.models.mmdit import MMDiT
from tests.models.golden import random_inputs
from tests.parallel.blocks import set_blocks

FULL_WIDTH = MMDiTConfig(depth=2, depth_single_blocks=3, attention="math")
SIZE, TEXT, BATCH = (5, 16, 24), 64, 2


def counted(config: MMDiTConfig, remat: tuple[int, int] = (0, 0), backward: bool = True) -> int:
    """FLOPs that torch counts over a forward, and the backward of it, of a model that is never allocated."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        model = build_denoiser(config)
        set_blocks(model, "full", remat)
        prediction = model(*random_inputs(config, SIZE, batch=BATCH, text_tokens=TEXT))
        if backward:
            prediction.sum().backward()
    return counter.get_total_flops()


def formula(config: MMDiTConfig) -> int:
    return BATCH * MMDiT.forward_flops(config, (config.latent_channels, *SIZE), TEXT)


@pytest.mark.parametrize("changes", [{}, {"fused_qkv": True, "guidance_embed": True}, {"cond_embed": True}])
def test_forward_at_full_width_is_counted_exactly(changes: dict) -> None:
    config = FULL_WIDTH.model_copy(update=changes)
    assert counted(config, backward=False) == formula(config)


def test_training_costs_three_forwards() -> None:
    """All but the gradients of the model's inputs, which nobody asks for."""
    assert counted(FULL_WIDTH) == pytest.approx(3 * formula(FULL_WIDTH), rel=0.01)


@pytest.mark.parametrize("remat", [(2, 0), (0, 3), (1, 2)])
def test_recomputation_costs_the_forwards_of_its_blocks(remat: tuple[int, int]) -> None:
    none, *one = (
        FULL_WIDTH.model_copy(update={"depth": double, "depth_single_blocks": single})
        for double, single in ((0, 0), (1, 0), (0, 1))
    )
    double, single = (formula(config) - formula(none) for config in one)
    more = counted(FULL_WIDTH, remat) - counted(FULL_WIDTH)
    # A recomputed block may leave out its last product: nothing of it is saved for backward.
    tokens, width = BATCH * (5 * 8 * 12 + TEXT), FULL_WIDTH.hidden_size
    last = remat[0] * 2 * tokens * width * 4 * width + remat[1] * 2 * tokens * width * 5 * width
    wanted = remat[0] * double + remat[1] * single
    assert wanted - last <= more <= wanted
