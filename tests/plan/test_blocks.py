"""What is counted by a law and where none can be fitted, and for a denoiser that takes few lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from longtake.contracts import UserError
from longtake.models.cogvideox_config import CogVideoXConfig
from longtake.models.config import MMDiTConfig
from longtake.models.law import Law
from longtake.models.stdit3_config import STDiT3Config
from longtake.models.ttt_video_config import TTTVideoConfig
from longtake.plan import blocks
from longtake.plan.layout import Layout, MicroBatch
from tests.families.plain import Plain, PlainConfig

CONFIG = PlainConfig(channels=4, width=32, heads=2, layers=3)
BATCHES = [MicroBatch(batch=batch, latent=(4, 13, 24, 40), text_tokens=16) for batch in (1, 3)]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Nothing is known from other tests, nor by them from these."""
    caches = (blocks._count_blocks, blocks._law, blocks._traced_blocks)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def counted(**peers: int) -> np.ndarray:
    found = []
    for batch in BATCHES:
        of = blocks.count_blocks(CONFIG, batch, Layout(**peers))
        numbers = [(one.saved, one.input, one.working, one.made, *one.forward, *one.backward) for one in of.blocks]
        found.append([*np.ravel(numbers), of.given, of.final, of.entry, *of.forward])
    return np.array(found)


def hold_no_law(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks._count_blocks.cache_clear()
    blocks._law.cache_clear()
    monkeypatch.setattr(blocks, "fit", lambda *how, **named: Law({}, lambda sizes: (), np.zeros(0), False))


@pytest.mark.parametrize("peers", [{}, {"sequence": 2}], ids=str)
def test_where_no_law_holds_each_micro_batch_is_traced_itself(
    monkeypatch: pytest.MonkeyPatch, peers: dict[str, int]
) -> None:
    by_law = counted(**peers)
    hold_no_law(monkeypatch)
    np.testing.assert_allclose(counted(**peers), by_law, rtol=1e-3, atol=512)


def test_a_denoiser_is_traced_at_lengths_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, forward = counted(), Plain.forward

    def of_segments(self: Plain, x: Tensor, *rest: Any) -> Tensor:
        if x.shape[2] % 12 != 1:
            raise UserError(f"{x.shape[2]} latent frames are not 12 n + 1")
        return forward(self, x, *rest)

    for cache in (blocks._count_blocks, blocks._law, blocks._traced_blocks):
        cache.cache_clear()
    monkeypatch.setattr(Plain, "forward", of_segments)
    with pytest.raises(UserError, match="are not 12 n"):
        counted()
    frames = staticmethod(lambda config: (13, 25, 37, 49, 61, 73))
    monkeypatch.setattr(Plain, "traced_frames", frames, raising=False)
    np.testing.assert_allclose(counted(), expected, rtol=1e-3, atol=512)


SHORT = {"text_embed_dim": 32, "time_embed_dim": 32, "num_layers": 2, "num_attention_heads": 4}
WIDTHS = {"hidden_size": 96, "num_heads": 4, "depth": 1}
FAMILIES = {
    "mmdit": MMDiTConfig(**WIDTHS, axes_dim=(8, 8, 8), depth_single_blocks=1, context_in_dim=64, vec_in_dim=32),
    "cogvideox": CogVideoXConfig(**SHORT, attention_head_dim=16),
    "ttt_video": TTTVideoConfig(**SHORT, attention_head_dim=16),
    "stdit3": STDiT3Config(**WIDTHS, caption_channels=32),
}
SIZES = [(1, 13, 46, 62), (3, 7, 46, 62), (2, 10, 30, 54), (3, 1, 46, 62)]  # samples, latent frames, rows, columns
DEGREES = [(1, 1), (2, 2), *(pytest.param(*pair, marks=pytest.mark.weekly) for pair in ((2, 1), (1, 2)))]


@pytest.mark.parametrize(("sequence", "tensor"), DEGREES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_law_gives_what_a_trace_sees_where_none_was_fitted(
    family: str, sequence: int, tensor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, layout = FAMILIES[family], Layout(sequence=sequence, tensor=tensor)
    batches = [
        MicroBatch(batch, (config.latent_channels, *latent), text_tokens=16)
        for batch, *latent in SIZES
        if family != "ttt_video" or latent[0] % 12 == 1 < latent[0]  # whole segments
    ]

    def found(batch: MicroBatch) -> list[float]:
        of = blocks.count_blocks(config, batch, layout)
        numbers = [(one.saved, one.input, one.working + one.made, *one.forward, *one.backward) for one in of.blocks]
        sent = [sum(pair) for one in of.blocks for pair in one.sent.values()]
        return [*np.ravel(numbers), *sent, of.given, of.final, of.entry, *of.beside]

    by_law = [found(batch) for batch in batches]
    hold_no_law(monkeypatch)
    np.testing.assert_allclose(by_law, [found(batch) for batch in batches], rtol=0.01)
