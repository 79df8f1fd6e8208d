"""How an autoencoder decodes is timed once for a GPU, its versions and a size, whatever process asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longtake.encoders import HunyuanVAEConfig
from longtake.generate import run
from longtake.parallel import World


def test_a_decoding_layout_is_timed_once_for_what_it_depends_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = {"seconds": {"contiguous": 2.0, "channels_last": 1.0}}
    timed, said = [], []

    def choose(
        own: Any, shape: Any, device: Any, take: Callable[[Callable[[], Any]], Any], *_: Any, decodes: bool
    ) -> str:
        return str(take(lambda: timed.append(shape) or found))

    def prepare(tile: int, dtype: torch.dtype = torch.bfloat16) -> None:
        own = SimpleNamespace(config=HunyuanVAEConfig(), dtype=dtype, piece=lambda shape: (33, tile, tile))
        system = SimpleNamespace(autoencoder=own, device=torch.device("cpu"))
        world = World(0, 1, 0, torch.device("cpu"))
        run.prepare_decoding(system, SimpleNamespace(sampling_option=None, deterministic=False), world, said.append)

    monkeypatch.setattr(run, "choose_layout", choose)
    monkeypatch.setattr(run, "pixel_shape", lambda system, option: (65, 256, 256))
    prepare(256)
    prepare(256)
    assert (len(timed), said) == (1, [str(found)] * 2)
    prepare(128)
    prepare(256, torch.float32)
    assert len(timed) == 3
    monkeypatch.setattr(torch, "__version__", "another")
    prepare(256)
    assert len(timed) == 4
    found["seconds"].pop("channels_last")  # for want of memory, at this moment
    prepare(64)
    prepare(64)
    assert len(timed) == 6
