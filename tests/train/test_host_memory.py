"""Adapters on a CPU: the weights under them are in memory once, in the type that they are computed in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.models.build import build_denoiser
from longtake.system.encoders import device_dtype
from longtake.train import run as run_module
from longtake.train.loop import Trainer
from longtake.train.run_file import read_run
from longtake.weights.files import save_weights
from tests.train.runs import train_here, write_config

SIZES = {"hidden_size": 512, "num_heads": 4, "axes_dim": (32, 48, 48), "depth": 4, "depth_single_blocks": 8}


def anonymous_bytes() -> int:
    """Memory of this process that is not a mapped file."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux says how much memory a process has")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_frozen_weights_are_held_once_in_the_type_of_the_computation(
    dtype: str, tmp_path: Path, clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"type": "flux", "in_channels": 1536, "patch_size": 1, "vec_in_dim": 16, "context_in_dim": 16, **SIZES}
    whole = build_denoiser(read_run(str(write_config(tmp_path / "base", clips, model=model))).value.model)
    weights = {name: torch.randn_like(value).mul_(0.02).bfloat16() for name, value in whole.state_dict().items()}
    file = tmp_path / "base.safetensors"
    save_weights(weights, file)
    del whole
    frozen: dict[torch.dtype, int] = {}
    held: list[int] = []

    def build(*arguments: Any, **options: Any) -> Any:
        before = anonymous_bytes()
        system = original_build(*arguments, **options)
        held.append(anonymous_bytes() - before)
        for parameter in system.denoiser.parameters():
            if not parameter.requires_grad:
                frozen[parameter.dtype] = frozen.get(parameter.dtype, 0) + parameter.nbytes
        return system

    def step(trainer: Trainer, *arguments: Any) -> Any:
        before = anonymous_bytes()
        sums = original_step(trainer, *arguments)
        held.append(anonymous_bytes() - before)
        return sums

    original_build, original_step = run_module.build_system, Trainer.forward_backward
    monkeypatch.setattr(run_module, "build_system", build)
    monkeypatch.setattr(Trainer, "forward_backward", step)
    changes = {"model": {**model, "from_pretrained": str(file)}, "lora": {"rank": 2}, "ema_decay": None}
    run = write_config(tmp_path / "run", clips, **changes, dtype=dtype, slots_per_step=1, max_steps=2)
    train_here(run)
    (kind, num_bytes), *others = frozen.items()
    assert (kind, others) == (device_dtype(dtype, torch.device("cpu")), [])
    assert num_bytes > 100e6
    built, *steps = held
    assert built < 1.3 * num_bytes
    assert max(steps) < 0.4 * num_bytes  # activations; a copy of the weights would be as large as they are
