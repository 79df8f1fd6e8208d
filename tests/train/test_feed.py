"""From the loader to the device: batches as bytes, buffers that are never written while they are read."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from longtake.contracts import Batch
from longtake.data.loading.loader import SlotLoader
from longtake.data.loading.parcel import Parcel, pack, plan_parcel
from longtake.train.feed import DeviceFeed, HostBuffers
from tests.data.sources import Numbers, same, slot_of, slots_of
from tests.train.runs import PATIENCE_SECONDS

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CPU = torch.device("cpu")


def feed_by(streams: LateCopies) -> DeviceFeed:
    """A feed whose copies are made by `streams`."""
    feed = DeviceFeed(CPU)
    feed._streams = streams
    return feed


class Copy:
    """Stands for the event behind a copy: over when `over` is set, or when somebody waits for it."""

    def __init__(self, staged: torch.Tensor, over: bool) -> None:
        self.address, self.over, self.waited = staged.data_ptr(), over, False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.waited = not self.over
        self.over = True


class NotedCopies:
    """Notes what is sent; copies are `over` at once, or when they are waited for."""

    def __init__(self, over: bool) -> None:
        self.over, self.copies = over, list[Copy]()

    def send(self, staged: torch.Tensor) -> tuple[torch.Tensor, Copy]:
        self.copies.append(Copy(staged, self.over))
        return staged.clone(), self.copies[-1]

    def receive(self, sent: torch.Tensor, copied: Copy) -> None: ...


def bytes_of(buffers: HostBuffers) -> int:
    return sum(len(data) for data, _ in buffers._used)


def parcel(num_bytes: int) -> Parcel:
    return Parcel(Numbers()[slot_of([1])], torch.zeros(num_bytes, dtype=torch.uint8))


def batch() -> Batch:
    """With what stored latents bring: half precision, an empty tensor, a lone element of odd stride."""
    found = Numbers()[slot_of([1, 2, 3])]
    encoded = {"mean": torch.randn(3, 4, 5).bfloat16(), "text": torch.randn(3, 7, 2).transpose(1, 2)}
    return replace(found, video=torch.empty(0), encoded=encoded, fps=torch.arange(6.0)[::2][:1])


def test_a_packed_batch_is_the_same_batch() -> None:
    for original in (batch(), Numbers()[slot_of([4, 5])]):
        packed = pack(original)
        assert same(packed.batch, original)
        assert all(place.start % 256 == 0 for place, _ in plan_parcel(original)[1])
        moved = torch.full((len(packed.data) + 100,), 7, dtype=torch.uint8)
        there = packed.on(moved)
        there.data.copy_(packed.data)
        assert same(there.batch, original), "a longer buffer does as well"


def test_a_packed_batch_has_no_memory_of_its_own() -> None:
    packed = pack(Numbers()[slot_of([1, 2])])
    packed.batch.video[:] = 9
    assert (packed.batch.video == 9).all()
    plan, contents, num_bytes = plan_parcel(packed.batch)
    assert sum(place.num_bytes for place, _ in contents) <= num_bytes == len(packed.data)
    assert plan == packed.plan


def test_buffers_are_made_once_and_used_again() -> None:
    buffers, streams = HostBuffers(CPU), NotedCopies(over=True)
    buffers.expect(1000)
    for size in (10, 1000, 300, 1000, 1, 999):
        buffers.send(parcel(size), streams)
    assert len({copy.address for copy in streams.copies}) == 1
    assert bytes_of(buffers) == 1000


def test_a_buffer_whose_copy_is_not_over_is_waited_for_once_both_are_in_use() -> None:
    buffers, streams = HostBuffers(CPU), NotedCopies(over=False)
    for _ in range(3):
        buffers.send(parcel(100), streams)
    first, second, third = streams.copies
    assert first.address == third.address != second.address
    assert (first.waited, second.waited) == (True, False)
    assert bytes_of(buffers) == 200


def test_a_larger_batch_than_all_before_replaces_a_buffer_once_its_copy_is_over() -> None:
    buffers, streams = HostBuffers(CPU), NotedCopies(over=False)
    for size in (100, 100, 500):
        buffers.send(parcel(size), streams)
    assert [copy.waited for copy in streams.copies] == [True, False, False]
    assert bytes_of(buffers) == 600


def test_on_the_cpu_batches_pass_as_they_are() -> None:
    slots = slots_of(5)
    feed = DeviceFeed(CPU)
    for num_workers in (0, 1):
        loader = SlotLoader(Numbers(), num_workers)
        parcels = list(feed.parcels(loader.fetch(slots)))
        assert all(same(p.batch, Numbers()[slot]) and n == 3 for (p, n), slot in zip(parcels, slots, strict=True))
    assert bytes_of(feed.buffers) == 0


class LateCopies:
    """A device that copies at the last moment: a buffer written too early, or bytes used too early, would show."""

    def __init__(self) -> None:
        self.copies: list[LateCopy] = []

    def send(self, staged: torch.Tensor) -> tuple[torch.Tensor, LateCopy]:
        self.copies.append(LateCopy(staged, torch.zeros_like(staged)))
        return self.copies[-1].target, self.copies[-1]

    def receive(self, sent: torch.Tensor, copied: LateCopy) -> None:
        assert sent.data_ptr() == copied.target.data_ptr()
        copied.synchronize()


class LateCopy:
    def __init__(self, source: torch.Tensor, target: torch.Tensor):
        self.source, self.target, self.over = source, target, False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        if not self.over:
            self.target.copy_(self.source)
        self.over = True


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_device_that_copies_late_gets_the_right_bytes(num_workers: int) -> None:
    shapes = [(2, 8, 8), (16, 32, 32), (4, 64, 64)]
    slots = [slot_of([2 * n, 2 * n + 1], shapes[n % 3]) for n in range(30)]
    streams = LateCopies()
    feed = feed_by(streams)
    fetched = SlotLoader(Numbers(), num_workers).fetch(slots)
    for (parcel, loaded), slot in zip(feed.parcels(fetched), slots, strict=True):
        assert same(parcel.batch, Numbers()[slot])
        assert loaded == 2
        time.sleep(0.005)  # training: workers make the next batch meanwhile
    assert len(feed.buffers._used) <= 2


def test_the_next_batch_is_on_its_way_before_this_one_is_used() -> None:
    streams = LateCopies()
    fetched = SlotLoader(Numbers(), num_workers=2).fetch(slots_of(4))
    deliveries = feed_by(streams).parcels(fetched)
    next(deliveries)
    end = time.monotonic() + PATIENCE_SECONDS
    while not (fetched.ready() and all(task.done for task in fetched._loader._tasks.values())):
        assert time.monotonic() < end
        time.sleep(0.01)
    next(deliveries)
    assert [copy.over for copy in streams.copies] == [True, True, False]


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("num_workers", [0, 2])
def test_on_a_device_batches_hold_the_same_numbers_while_kernels_run(num_workers: int) -> None:
    """The device is kept busy, so that a copy into memory still read, or one not waited for, would show."""
    shapes = [(2, 8, 8), (16, 64, 64), (4, 256, 256)]
    slots = [slot_of([2 * n, 2 * n + 1], shapes[n % 3]) for n in range(60)]
    device = torch.device("cuda", 0)
    feed = DeviceFeed(device)
    feed.buffers.expect(max(Numbers().batch_bytes(slot.bucket) for slot in slots))
    work = torch.randn(2048, 2048, device=device)
    sums = []
    for parcel, _ in feed.parcels(SlotLoader(Numbers(), num_workers).fetch(slots)):
        batch = parcel.batch
        assert batch.video.device == device
        for _ in range(4):
            work = (work @ work).tanh()
        sums.append((batch.video.double().sum(), batch.draws["mask"].clone()))
    for (total, mask), slot in zip(sums, slots, strict=True):
        expected = Numbers()[slot]
        assert total.item() == expected.video.double().sum().item()
        assert torch.equal(mask.cpu(), expected.draws["mask"])


@pytest.mark.gpu
@needs_cuda
def test_on_a_device_two_pinned_buffers_serve_for_ever() -> None:
    feed = DeviceFeed(torch.device("cuda", 0))
    slots = slots_of(50)
    for _ in range(2):
        list(feed.parcels(SlotLoader(Numbers(), 1).fetch(slots)))
    assert len(feed.buffers._used) <= 2
    assert all(data.is_pinned() for data, _ in feed.buffers._used)
