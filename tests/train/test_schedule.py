"""The learning rate as a function of the step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longtake.config import resolve
from longtake.train import RunConfig, learning_rate

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "opensora_v2" / "lr.json").read_text(encoding="utf-8"),
)["cases"]


def run_config(**values: Any) -> RunConfig:
    """A config with the given keys; its model is as small as its parts allow."""
    tree = {
        "dataset": {"data_path": "clips.parquet"},
        "bucket_config": {"32px": {1: (1.0, 1)}},
        "model": {"in_channels": 1536, "patch_size": 1, "vec_in_dim": 128, "context_in_dim": 128},
        **values,
    }
    return resolve(tree, [], RunConfig).value


@pytest.mark.parametrize("case", [case for case in GOLDEN if not case.get("resume")], ids=str)
def test_warm_up_gives_the_rates_of_opensora(case: dict[str, Any]) -> None:
    config = run_config(lr=case["lr"], warmup_steps=case["warmup_steps"])
    found = [learning_rate(config, step) for step in range(case["steps"])]
    assert found == pytest.approx(case["values"], rel=1e-6)


@pytest.mark.parametrize("case", [case for case in GOLDEN if case.get("resume")], ids=str)
def test_a_resumed_run_with_another_lr_gives_the_rates_of_opensora(case: dict[str, Any]) -> None:
    resume = case["resume"]
    config = run_config(lr=resume["lr"], warmup_steps=case["warmup_steps"])
    found = [learning_rate(config, resume["step"] + number) for number in range(case["steps"])]
    assert found == pytest.approx(case["values"], rel=1e-6)


def test_the_optimizers_own_lr_comes_first() -> None:
    assert learning_rate(run_config(lr=1e-3, optim={"lr": 2e-3}), 5) == 2e-3


def test_a_cosine_falls_from_the_end_of_the_warm_up_to_zero() -> None:
    config = run_config(lr=1e-3, warmup_steps=10, use_cosine_scheduler=True, max_steps=110)
    assert learning_rate(config, 10) == 1e-3
    assert learning_rate(config, 60) == pytest.approx(5e-4)
    assert learning_rate(config, 109) < 1e-6
    assert learning_rate(config, 500) == 0


def test_a_linear_fall_keeps_its_share_at_the_end() -> None:
    config = run_config(lr=1e-3, decay_fraction=0.5, final_lr_ratio=0.2, max_steps=100)
    assert [learning_rate(config, step) for step in (0, 50)] == [1e-3, 1e-3]
    assert learning_rate(config, 75) == pytest.approx(6e-4)
    assert learning_rate(config, 100) == pytest.approx(2e-4)
