"""What sampling needs, against the real model, and the choice that follows from it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longtake.contracts import Conditions
from longtake.models.build import build_denoiser
from longtake.models.config import MMDiTConfig
from longtake.parallel.config import ParallelConfig
from longtake.system import room
from longtake.system.room import fits_at_once, forward_bytes, gathered_bytes
from tests.plan.trace import norms_as_on_cuda, sampling_bytes

WIDE = MMDiTConfig(depth=1, depth_single_blocks=2, attention="sdpa")
FUSED = WIDE.model_copy(update={"fused_qkv": True, "guidance_embed": True})
SINGLE = WIDE.model_copy(update={"depth": 0})
CASES = {
    "video": (WIDE, (33, 32, 32), {}),
    "a batch": (WIDE, (17, 32, 32), {"batch": 3}),
    "fused": (FUSED, (33, 32, 32), {}),
    "single blocks": (SINGLE, (33, 32, 32), {}),
    "fused single blocks": (SINGLE.model_copy(update={"fused_qkv": True}), (33, 32, 32), {}),
    "a still": (WIDE, (1, 48, 84), {"batch": 3}),
    "sequence peers": (WIDE, (33, 32, 32), {"sequence": 2}),
    "tensor peers": (WIDE, (33, 32, 32), {"tensor": 2}),
    "shards": (WIDE, (33, 32, 32), {"shard": 8}),
}


def system_of(config: MMDiTConfig, ranks: int = 1) -> Any:
    with torch.device("meta"):
        denoiser = build_denoiser(config)
    return SimpleNamespace(
        config=SimpleNamespace(model=config),
        denoiser=denoiser,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        facts=SimpleNamespace(text_length=512),
        mesh=SimpleNamespace(size=ranks, sequence=1, tensor=1, config=ParallelConfig(zero=3)),
        cut=None,
    )


@pytest.mark.parametrize("name", CASES)
def test_a_forward_needs_what_is_foretold(name: str) -> None:
    config, latent, options = CASES[name]
    with norms_as_on_cuda():
        counted = sampling_bytes(config, latent, 512, **options)
    peers = {axis: options.get(axis, 1) for axis in ("sequence", "tensor")}
    shape = (config.latent_channels, *latent)
    ranks = options.get("shard", 1) * peers["sequence"] * peers["tensor"]
    assert needed(system_of(config, ranks), shape, options.get("batch", 1), **peers) == pytest.approx(counted, rel=0.05)


def needed(system: Any, shape: tuple[int, ...], samples: int, **peers: int) -> int:
    moved, weights = forward_bytes(system.config.model, shape, 512, samples, **peers), gathered_bytes(system)
    return max(moved[name] + weights[name] for name in moved)


def test_branches_run_as_one_batch_as_long_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    system, shape = system_of(WIDE), (16, 33, 96, 96)
    one, three = (needed(system, shape, n) for n in (1, 3))
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda data, device: tensor(data, dtype=torch.float64))
    for free, wanted in ((three / 0.89, True), (three / 0.91, False), (one, False)):
        monkeypatch.setattr(room, "free_bytes", lambda device, free=free: int(free))
        assert fits_at_once(system, 3, shape) is wanted


def test_a_cpu_always_has_room() -> None:
    system = system_of(WIDE)
    system.device = torch.device("cpu")
    assert fits_at_once(system, 1000, (16, 33, 96, 96))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_needs_no_more_than_is_foretold() -> None:
    device = torch.device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = build_denoiser(WIDE)
    finally:
        torch.set_default_dtype(torch.float32)
    x = torch.zeros(2, 16, 17, 32, 32, device=device)
    conditions = Conditions(text=torch.zeros(2, 512, 4096, device=device), vector=torch.zeros(2, 768, device=device))
    with torch.no_grad():
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model(x, torch.zeros(2, device=device), conditions)
            counted = torch.cuda.max_memory_allocated() - before
    assert counted <= 1.1 * max(forward_bytes(WIDE, (16, 17, 32, 32), 512, 2).values())
