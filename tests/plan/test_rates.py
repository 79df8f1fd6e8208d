"""Measured rates as they lie in the user's cache."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from longtake.plan import Machine, Rates, keep_rates, measured_rates
from longtake.track import gpu_named

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
