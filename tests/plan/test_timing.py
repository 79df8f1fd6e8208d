"""How calls are timed on a GPU."""

from __future__ import annotations

import pytest
import torch

from longtake.plan.timing import seconds_of

CUDA = torch.device("cuda")


@pytest.mark.parametrize(("milliseconds", "calls"), [(1.0, 1 + 30), (40.0, 1), (0.001, 1 + 100)])
def test_gpu_is_timed_after_a_wait_and_kept_busy(
    monkeypatch: pytest.MonkeyPatch, milliseconds: float, calls: int
) -> None:
    """On a clock of the device that moves when it is called."""
    now, done, waits = [0.0], [], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now[0]

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    def call() -> None:
        done.append(milliseconds)
        now[0] += milliseconds

    for name, value in {"Event": Event, "synchronize": lambda device: None, "_sleep": waits.append}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert seconds_of(call, CUDA) == pytest.approx(milliseconds / 1e3)
    assert (len(done), len(waits)) == (calls, 1 + (calls > 1))
