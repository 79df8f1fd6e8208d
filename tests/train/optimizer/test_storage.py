"""Tensors that pass through the device, chunk by chunk."""

from __future__ import annotations

import pytest
import torch

from longtake.train.optimizer.storage import SLOTS, OnDevice, OnHost

CPU = torch.device("cpu")
LAYOUTS = [
    {"a": ((3, 5), torch.float32), "b": ((3, 5), torch.uint8)},
    {"a": ((1000,), torch.float32)},
    {"a": ((0, 4), torch.float32)},
    {"a": ((7,), torch.float32), "b": ((), torch.float32)},
    {"a": ((64, 8), torch.uint8)},
]


@pytest.mark.parametrize("chunk_bytes", [1, 2048, 1 << 20])
def test_what_is_changed_on_the_way_is_there_at_the_next_walk(chunk_bytes: int) -> None:
    storage, resident = OnHost(LAYOUTS, CPU, chunk_bytes), OnDevice(LAYOUTS, CPU)
    for turn in range(3):
        for place in (storage, resident):
            seen = []
            for indices, tensors in place.walk():
                seen += indices
                for index, own in zip(indices, tensors, strict=True):
                    assert {name: (tuple(t.shape), t.dtype) for name, t in own.items()} == LAYOUTS[index]
                    for tensor in own.values():
                        tensor.add_(index + turn)
            assert seen == list(range(len(LAYOUTS)))
    storage.wait()
    for ours, theirs in zip(storage.tensors, resident.tensors, strict=True):
        for name in theirs:
            assert torch.equal(ours[name], theirs[name])


def test_what_is_written_into_the_host_tensors_is_walked() -> None:
    storage = OnHost(LAYOUTS, CPU, 2048)
    storage.tensors[1]["a"].fill_(5.0)
    found = {i: own for indices, tensors in storage.walk() for i, own in zip(indices, tensors, strict=True)}
    assert (found[1]["a"] == 5.0).all()


def test_the_device_holds_a_few_chunks_only() -> None:
    layouts = [{"a": ((1 << 12,), torch.float32)}] * 40
    storage = OnHost(layouts, CPU, chunk_bytes=1 << 15)
    assert sum(slot.nbytes for slot in storage._slots) == SLOTS << 15
    assert sum(tensor["a"].nbytes for tensor in storage.tensors) == 40 << 14


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_chunks_come_and_go_without_mixing_on_cuda() -> None:
    layouts = [{"a": ((1 << 20,), torch.float32)}] * 24
    storage = OnHost(layouts, torch.device("cuda"), chunk_bytes=8 << 20)
    for turn in range(5):
        for indices, tensors in storage.walk():
            for index, own in zip(indices, tensors, strict=True):
                own["a"].add_(index + turn)
    storage.wait()
    for index, own in enumerate(storage.tensors):
        assert own["a"].is_pinned()
        assert (own["a"] == 5 * index + 10).all()
