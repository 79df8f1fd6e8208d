"""Recomputing activations in backward."""

from __future__ import annotations

import torch

from longtake.contracts import Conditions
from longtake.models import MMDiT, MMDiTConfig, initialise
from longtake.parallel import remat_blocks

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
)


def gradients(counts: tuple[int, int] | None) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients by name, and how many tensors the forward kept for backward."""
    model = MMDiT(CONFIG)
    initialise(model, 3)
    if counts is not None:
        remat_blocks(model, counts)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 12, 2, 3, 3, generator=generator)
    conditions = Conditions(
        text=torch.randn(2, 5, 8, generator=generator), vector=torch.randn(2, 8, generator=generator)
    )
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        out = model(x, torch.tensor([0.2, 0.7]), conditions)
    out.square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters()}, sum(kept)


def test_remat_changes_no_gradient_and_no_name_and_keeps_less() -> None:
    plain, kept = gradients(None)
    for counts in ((2, 3), (1, 0), (0, 2)):
        again, kept_less = gradients(counts)
        assert again.keys() == plain.keys()
        assert all(torch.equal(again[name], plain[name]) for name in plain)
        assert kept_less < kept
