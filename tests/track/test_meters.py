"""Rates are sums over seconds, with a clock that the test turns."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from longtake.track.devices import peak_flops
from longtake.track.meters import StepMeter, memory


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rates_are_counts_over_the_time_between_steps():
    clock = Clock()
    meter = StepMeter(peak=1e12, num_devices=2, clock=clock)
    meter.step(clips=999, tokens=999)  # the first one holds the start-up
    assert meter.read() == {}
    for seconds in (1.0, 3.0):
        clock.now += seconds
        meter.step(clips=8, tokens=400, flops=2e12, wait_seconds=0.5)
    rates = meter.read()
    assert rates == pytest.approx(
        {
            "step_seconds": 2.0,
            "clips_per_second": 4.0,
            "tokens_per_second": 200.0,
            "wait_share": 0.25,
            "tflops_per_device": 0.5,
            "mfu": 0.5,
        }
    )


def test_a_pause_is_left_out():
    clock = Clock()
    meter = StepMeter(clock=clock)
    meter.step(clips=1, tokens=1)
    clock.now += 1.0
    with meter.paused():
        clock.now += 50.0
    clock.now += 1.0
    meter.step(clips=4, tokens=4)
    assert meter.read()["clips_per_second"] == pytest.approx(2.0)


def test_only_the_window_counts():
    clock = Clock()
    meter = StepMeter(window=2, clock=clock)
    for seconds in (0.0, 100.0, 1.0, 1.0):
        clock.now += seconds
        meter.step(clips=1, tokens=1)
    assert meter.read()["clips_per_second"] == pytest.approx(1.0)


def test_without_a_known_peak_there_is_no_mfu():
    clock = Clock()
    meter = StepMeter(peak=peak_flops("cpu"), clock=clock)
    for _ in range(2):
        clock.now += 1.0
        meter.step(clips=1, tokens=1, flops=1e12)
    assert "mfu" not in meter.read()
    assert meter.read()["tflops_per_device"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A10G", None),
        ("Tesla V100-SXM2-16GB", None),
        ("cpu", None),
    ],
)
def test_the_peak_is_that_of_the_named_chip_and_no_other(name, peak):
    assert peak_flops(name) == peak


def test_memory_sees_an_allocation():
    with mmap.mmap(-1, 1 << 27) as block:  # new pages: what NumPy gets may be some that the process has had before
        before = memory()["rss_gib"]
        np.frombuffer(block, np.uint8)[:] = 1
        assert memory()["rss_gib"] - before == pytest.approx(len(block) / 2**30, rel=0.2)
