"""What is counted where no law can be fitted, and for a denoiser that takes few lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from longtake.contracts import UserError
from longtake.models.trace import Law
from longtake.plan import blocks
from longtake.plan.layout import Layout, MicroBatch
from tests.families.plain import Plain, PlainConfig

CONFIG = PlainConfig(channels=4, width=32, heads=2, layers=3)
BATCHES = [MicroBatch(batch=batch, latent=(4, 13, 24, 40), text_tokens=16) for batch in (1, 3)]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Nothing is known from other tests, nor by them from these."""
    caches = (blocks._count_blocks, blocks._law, blocks._run)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def counted(**peers: int) -> np.ndarray:
    found = []
    for batch in BATCHES:
        of = blocks.count_blocks(CONFIG, batch, Layout(**peers))
        numbers = [(one.saved, one.input, one.working, one.made, one.flops, *one.launches) for one in of.blocks]
        found.append([*np.ravel(numbers), of.entry, of.final, of.flops])
    return np.array(found)


@pytest.mark.parametrize("peers", [{}, {"sequence": 2}], ids=str)
def test_where_no_law_holds_each_micro_batch_is_traced_itself(
    monkeypatch: pytest.MonkeyPatch, peers: dict[str, int]
) -> None:
    by_law = counted(**peers)
    blocks._count_blocks.cache_clear()
    blocks._law.cache_clear()
    monkeypatch.setattr(blocks, "fit", lambda points, measure, *rest: Law({}, lambda sizes: (), np.zeros(0), False))
    np.testing.assert_allclose(counted(**peers), by_law, rtol=1e-3, atol=512)


def test_a_denoiser_is_traced_at_lengths_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, forward = counted(), Plain.forward

    def of_segments(self: Plain, x: Tensor, *rest: Any) -> Tensor:
        if x.shape[2] % 12 != 1:
            raise UserError(f"{x.shape[2]} latent frames are not 12 n + 1")
        return forward(self, x, *rest)

    for cache in (blocks._count_blocks, blocks._law, blocks._run):
        cache.cache_clear()
    monkeypatch.setattr(Plain, "forward", of_segments)
    with pytest.raises(UserError, match="are not 12 n"):
        counted()
    frames = staticmethod(lambda config: (13, 25, 37, 49, 61, 73))
    monkeypatch.setattr(Plain, "traced_frames", frames, raising=False)
    np.testing.assert_allclose(counted(), expected, rtol=1e-3, atol=512)
