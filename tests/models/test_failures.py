"""Errors of kernels that are tried: texts are reported, and a device that has failed ends the run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from longtake.models import attention
from longtake.models.failures import Report, failure_of
from longtake.parallel import host
from longtake.parallel.offload import BlockStore
from longtake.plan import measure

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def ignore(name: str, text: str) -> None: ...


def fails(*_: object, **__: object) -> None:
    raise torch.AcceleratorError("an illegal memory access was encountered")


def tensor() -> torch.Tensor:
    return torch.zeros(1, 4, 2, 8)


def attention_rates(report: Report) -> object:
    return measure.attention_rates(tensor(), tensor(), tensor(), lambda run: 1.0, report, ["auto"])


TRIED: dict[str, Callable[[], object]] = {
    "rates of attention": lambda: measure.attention_rates(
        tensor(), tensor(), tensor(), lambda run: 1.0, ignore, ["auto"]
    ),
    "a probe of attention": lambda: attention.fault_of("flash", CPU, torch.float32, 8),
    "offloaded activations": lambda: BlockStore(1)._host(CPU),
}


@pytest.mark.parametrize("name", TRIED)
def test_failed_device_is_not_taken_for_a_failed_candidate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.Attention, "forward", fails)
    monkeypatch.setattr(torch.autograd, "grad", fails)
    monkeypatch.setattr("longtake.parallel.offload.host_memory", fails)
    with pytest.raises(torch.AcceleratorError):
        TRIED[name]()


def test_failure_of_library_call_after_illegal_access_raises_at_synchronisation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    error = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    assert failure_of(error, CUDA) == str(error)
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    with pytest.raises(torch.AcceleratorError):
        failure_of(error, CUDA)


def test_memory_that_cannot_be_pinned_does_not_hide_a_failed_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: type("Runtime", (), {"cudaHostRegister": lambda *_: 2}))
    memory = tensor()
    monkeypatch.setattr(torch, "zeros", fails)  # a refusal to pin, which the next kernel reports
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    assert not host.pin(memory)
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    with pytest.raises(torch.AcceleratorError):
        host.pin(memory)


def test_failed_candidate_is_reported_with_its_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "backend='inductor' raised:\nCompilationError: at 5:10"

    def refuses(*_: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(attention.Attention, "forward", refuses)
    failed: dict[str, str] = {}
    attention_rates(failed.__setitem__)
    assert failed == {"auto": text}
    assert attention.fault_of("math", CPU, torch.float32, 8) == text
