"""Measured rates as they lie in the user's cache."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from longtake.models.attention import Attention, MaskedAttention
from longtake.parallel.world import start_world
from longtake.plan import measure
from longtake.plan.machine import Machine
from longtake.plan.rates import Rates, keep_rates, measured_rates
from longtake.plan.run import plan_run
from longtake.track.devices import gpu_named
from tests.plan.runs import run_config

MEASURED = Rates(5e14, {128: (4e14, 3e14)}, 1e14, 3e12, 2e11, 3e10, 5e-6, "measured here")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "longtake" / "rates"


def test_later_measurements_keep_what_they_lack_of_earlier_ones() -> None:
    assert keep_rates("h100", MEASURED) == measured_rates("h100") == MEASURED
    alone = replace(MEASURED, products=6e14, attention={64: (2e14, 1e14)}, links=None)
    assert keep_rates("h100", alone) == measured_rates("h100")
    assert measured_rates("h100") == replace(alone, attention=MEASURED.attention | alone.attention, links=2e11)
    assert measured_rates("h200") is None


def test_what_was_not_measured_is_as_the_plan_assumes() -> None:
    alone = replace(MEASURED, links=None, host=None)
    for bandwidth in (0.7, 0.2):
        rates = Machine(gpu_named("h100"), bandwidth=bandwidth, host=1e10, measured=alone).rates
        assert rates == replace(MEASURED, links=450e9 * bandwidth, host=1e10)
    assert Machine(gpu_named("h100"), bandwidth=0.2, measured=MEASURED).rates == MEASURED


def test_attention_is_timed_at_the_tokens_and_heads_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_run(run_config(), 1, Machine(gpu_named("h100")))
    longest = max(plan.entries, key=lambda entry: entry.tokens * entry.bucket.batch_size)
    timed: list[tuple[int, ...]] = []
    monkeypatch.setattr(measure, "attention_rates", lambda q, *_: timed.append(tuple(q.shape)) or {"auto": (1.0, 1.0)})
    with start_world("cpu") as world:
        measure.measure_rates(plan, world, print)
    assert timed == [(longest.bucket.batch_size, longest.tokens + plan.work.config.text_length, 4, 64)]


def test_all_ways_of_attention_are_seen_alike() -> None:
    q, k = (torch.empty(2, length, 4, 16, device="meta") for length in (6, 9))
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool, device="meta")
    for layer, more in ((Attention(), ()), (MaskedAttention(), (mask,))):
        with torch.no_grad(), measure._Operations() as trace:
            layer(q, k, k, *more)
        assert set(trace.seen["attention"]) == {((2, 6, 4, 16), (2, 9, 4, 16))}


@pytest.mark.parametrize(
    "damage",
    [
        {"products": 0},
        {"copies": float("nan")},
        {"launch": None},
        {"convolutions": "fast"},
        {"links": float("inf")},
        {"attention": []},
        {"attention": {}},
        {"attention": {"128": [4e14]}},
    ],
)
def test_a_damaged_file_counts_as_none(cache: Path, damage: dict[str, object]) -> None:
    keep_rates("h100", MEASURED)
    (file,) = cache.iterdir()
    for content in (json.dumps(asdict(MEASURED) | damage), "[]", file.read_text()[:-9]):
        file.write_text(content)
        assert measured_rates("h100") is None
