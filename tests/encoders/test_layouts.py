"""Memory layouts of convolutions: the same results, and the faster one is taken on CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.encoders import choose_layout, lay_out_weights, layouts
from tests.encoders.test_kl import flux, hunyuan, pixels
from tests.precision import apart, autoencoder_in_float64

CUDA = torch.device("cuda")


def take(choose: Any) -> Any:
    return choose()


def ignore(name: str, text: str) -> None: ...


@pytest.mark.parametrize("of_images", [False, True], ids=["videos", "images"])
def test_layouts_change_rounding_alone(weights: Path, of_images: bool) -> None:
    own = flux(weights / "flux_ae.safetensors") if of_images else hunyuan(weights)
    video = pixels(1, 3, 5, 16, 24)
    mean = own.posterior(video)["mean"]
    decoded = own.decode(mean, 5)
    with autoencoder_in_float64(own), torch.no_grad():
        exact_mean, exact = own.posterior(video)["mean"], own.decode(mean, 5)
    parts = [*own.encoding.values(), *own.decoding.values()]
    lay_out_weights(parts, "channels_last")
    filters = [p for part in parts for p in part.parameters() if p.dim() >= 4 and p.shape[1] > 1 and p.shape[-1] > 1]
    assert filters
    assert not any(p.is_contiguous() for p in filters)
    torch.testing.assert_close(own.posterior(video)["mean"], mean, rtol=0, atol=apart(exact_mean, mean))
    torch.testing.assert_close(own.decode(mean, 5), decoded, rtol=0, atol=apart(exact, decoded))
    lay_out_weights(parts, "contiguous")
    assert all(p.is_contiguous() for p in filters)


def test_each_layout_is_timed_at_a_tile_by_this_rank_alone(weights: Path) -> None:
    own, shapes = hunyuan(weights, sample_size=32), []
    compute = own.compute = lambda tiles: pytest.fail("other ranks were asked")
    own.model.encoder.register_forward_hook(lambda module, args, out: shapes.append(tuple(args[0].shape)))
    assert own.piece((65, 40, 24)) == (65, 32, 24)
    found = layouts.time_layouts(own, (5, 16, 16), torch.device("cpu"), False, ignore)
    assert sorted(found) == ["channels_last", "contiguous"]
    assert min(found.values()) > 0
    assert set(shapes) == {(1, 3, 5, 16, 16)}
    assert own.compute is compute


def test_the_faster_one_is_taken_and_told(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, asked = hunyuan(weights, sample_size=32), []
    seconds = {"contiguous": 0.002, "channels_last": 0.001}
    monkeypatch.setattr(layouts, "time_layouts", lambda *given: asked.append(given[1:]) or dict(seconds))
    line = choose_layout(own, (65, 40, 24), CUDA, take, ignore, decodes=True)
    size = "33 x 32 x 24 pixels: contiguous 2.0 ms, channels_last 1.0 ms"
    assert line == f"autoencoder, decoding: channels_last in memory ({size})"
    assert asked == [((33, 32, 24), CUDA, True, ignore)]
    assert not own.model.decoder.conv_in.conv.weight.is_contiguous()
    assert own.model.encoder.conv_in.conv.weight.is_contiguous()
    assert choose_layout(own, (65, 40, 24), CUDA, lambda _: {"seconds": {}}, ignore, decodes=True).startswith(
        "autoencoder, decoding: contiguous"
    )
    assert own.model.decoder.conv_in.conv.weight.is_contiguous()


@pytest.mark.parametrize("changes", [{"placement": "offloaded"}, {"compile": True}], ids=str)
def test_nothing_is_timed_on_a_cpu_or_where_weights_move_or_are_compiled(
    weights: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "time_layouts", lambda *given: pytest.fail("timed"))
    assert choose_layout(hunyuan(weights), (5, 16, 16), torch.device("cpu"), take, ignore) is None
    own = hunyuan(weights)
    own.config = own.config.model_copy(update=changes)
    assert choose_layout(own, (5, 16, 16), CUDA, take, ignore) is None
