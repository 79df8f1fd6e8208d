"""The benchmark of fine-tuning holds a step without encoders against a forecast without them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from longtake.plan import Machine, Measured, plan_run
from longtake.presets import run_file
from longtake.track import gpu_named
from longtake.train import read_run

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_forecast_has_no_encoding_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    finetune = importlib.import_module("finetune")
    words = [
        "--model.grad-ckpt-budget",
        "0",
        "--dataset.data-path",
        "-",
        "--bucket_config",
        "{'_delete_': True, '256px': {129: (1.0, 1)}}",
    ]
    for name, width in (("t5", 4096), ("clip", 768)):
        words += [f"--{name}", f"{{'_delete_': True, 'type': 'words', 'dim': {width}}}"]
    plan = plan_run(read_run(run_file("opensora_v2/lora", "train"), words).value, 1, Machine(gpu_named("h100")))
    (entry,) = plan.entries
    full = SimpleNamespace(
        measure=lambda bucket, batch: Measured(batch, None, None), system=SimpleNamespace(device=torch.device("cpu"))
    )
    line = finetune._line("lora", plan, entry, full, SimpleNamespace(seconds=[]), SimpleNamespace(repeats=1))
    assert line["forecast_bytes"] < entry.memory.total - plan.work.encoder_bytes, "encoding is the worst moment here"
    assert line["forecast_bytes"] == plan.work.memory(entry.bucket, plan.layout, 1, encodes=False).total
    assert "out of memory" in finetune._row(line)
