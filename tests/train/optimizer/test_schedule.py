"""The learning rate as a function of the step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.config.load import resolve
from longtake.contracts import UserError
from longtake.train.config import RunConfig
from longtake.train.optimizer.config import ClipConfig
from longtake.train.optimizer.schedule import learning_rate
from longtake.train.optimizer.update import limit_at
from tests.precision import within

GOLDEN = json.loads(
    (Path(__file__).parents[2] / "golden" / "opensora_v2" / "lr.json").read_text(encoding="utf-8"),
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
    assert within(learning_rate(config, 109), 1e-6)
    assert learning_rate(config, 500) == 0


def test_a_linear_fall_keeps_its_share_at_the_end() -> None:
    config = run_config(lr=1e-3, decay_fraction=0.5, final_lr_ratio=0.2, max_steps=100)
    assert [learning_rate(config, step) for step in (0, 50)] == [1e-3, 1e-3]
    assert learning_rate(config, 75) == pytest.approx(6e-4)
    assert learning_rate(config, 100) == pytest.approx(2e-4)


def test_one_cycle_is_two_cosines_and_then_constant() -> None:
    """Open-Sora 1.2's stages 4 and 5 on many nodes."""
    points = [(0, 1.6e-5, "cosine"), (400, 6.4e-4, "cosine"), (800, 1.6e-4)]
    config = run_config(optim={"schedule": points})
    wanted = {0: 1.6e-5, 200: 3.28e-4, 400: 6.4e-4, 600: 4.0e-4, 800: 1.6e-4, 5000: 1.6e-4}
    assert {step: learning_rate(config, step) for step in wanted} == pytest.approx(wanted)


def test_points_say_a_warm_up_of_any_kind_and_a_cosine_to_an_end_above_zero() -> None:
    """TTT-Video's rates: (step + 1) / W of the peak, then a cosine to its end at step T."""
    peak, end, warmup, last = 1e-4, 1e-5, 100, 5000
    points = [(0, peak / warmup), (warmup - 1, peak), (warmup, peak, "cosine"), (last, end)]
    config = run_config(optim={"schedule": points})
    for step in (0, 1, 50, 99, 100, 101, 2500, 4999, 5000, 9000):
        done = min(1.0, (step - warmup) / (last - warmup))
        cosine = end + (peak - end) * (1 + math.cos(math.pi * done)) / 2
        assert learning_rate(config, step) == pytest.approx((step + 1) / warmup * peak if step < warmup else cosine)


def test_a_group_follows_the_runs_schedule_at_its_own_peak_or_its_own_points() -> None:
    groups = [{"match": ["a*"], "lr": 5e-4}, {"match": ["b*"], "schedule": [(0, 1.0), (100, 0.0)]}, {"match": ["c*"]}]
    config = run_config(
        lr=1e-3, use_cosine_scheduler=True, max_steps=100, warmup_steps=4, initial_lr=0, optim={"groups": groups}
    )
    for step in (0, 3, 4, 40, 99):
        others = learning_rate(config, step)
        half, own, same = (learning_rate(config, step, group) for group in config.optim.groups)
        assert half == pytest.approx(others / 2)
        assert (own, same) == (pytest.approx(1 - step / 100), others)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"optim": {"schedule": [(0, 1.0), (0, 2.0)]}},
            "step 0 comes after step 0; the steps of a schedule must asc",
        ),
        ({"optim": {"schedule": []}}, "a schedule needs a point"),
        ({"optim": {"schedule": [(0, -1.0)]}}, "optim.schedule"),
        ({"optim": {"schedule": [(0, 1.0, "sine")]}}, "optim.schedule"),
        ({"optim": {"schedule": [(0, 1.0)]}, "warmup_steps": 3}, "says the rates by itself; leave optim.lr, warmup_"),
        ({"optim": {"groups": [{"match": []}]}}, "optim.groups"),
        ({"optim": {"groups": [{"match": ["a"], "lr": 1.0, "schedule": [(0, 1.0)]}]}}, "schedule says the rates alr"),
        ({"optim": {"groups": [{"match": ["a"], "name": "x"}, {"match": ["b"], "name": "x"}]}}, "two are called 'x'"),
        ({"optim": {"groups": [{"match": ["a"]}, {"match": ["b"], "name": "group 1"}]}}, "two are called 'group 1'"),
        ({"optim": {"groups": [{"match": ["a"], "name": "others"}]}}, "two are called 'others'"),
    ],
)
def test_rates_that_contradict_each_other_are_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        run_config(**keys)


def test_the_limit_on_the_norm_falls_and_then_answers_what_is_abnormal() -> None:
    law = ClipConfig(start=5.0, steps=4, abnormal=5.0, most=10.0)

    def limits(step: int, *norms: float) -> list[float]:
        return [float(limit_at(law, 0.1, step, torch.tensor(norm))) for norm in norms]

    assert limits(1, 100.0) == pytest.approx([0.5])
    assert limits(3, 100.0) == pytest.approx([0.3])
    assert limits(5, 100.0) == pytest.approx([0.1])
    assert limits(6, 0.4, 0.8, 100.0) == pytest.approx([0.1, 0.1 / 8, 0.01])
    assert limit_at(None, 0.1, 1, torch.tensor(9.0)) == 0.1
