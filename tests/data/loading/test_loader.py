"""Worker processes: order, errors, deaths, memory, and that none of them stays behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from longtake.contracts import Slot, UserError
from longtake.data.loading import loader as loading
from longtake.data.loading import workers
from longtake.data.loading.loader import SlotLoader
from tests.data.sources import Numbers, die, once, same, slot_of, slots_of
from tests.forks import Forked
from tests.train.runs import PATIENCE_SECONDS

SLOTS = slots_of(12)


def wait_for(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not ready():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not asked for its exit code does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_undisturbed(loader: SlotLoader, slots: list[Slot] = SLOTS) -> None:
    got = list(loader.fetch(slots))
    assert len(got) == len(slots)
    assert all(same(batch, Numbers()[slot]) for batch, slot in zip(got, slots, strict=True))


def test_a_worker_that_is_stopped_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_WARNED_AFTER_SECONDS", 0.5)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        os.kill(loader.pids[0], signal.SIGCONT)

    loader = SlotLoader(Numbers(), 1, say=say)
    batches = loader.fetch(SLOTS)
    next(batches)
    os.kill(loader.pids[0], signal.SIGSTOP)
    assert len(list(batches)) == len(SLOTS) - 1
    assert f"data worker (pid {loader.pids[0]}) has not finished a micro-batch of " in said[0]
    assert "its clips begin with " in said[0]
    loader.close()


def test_worker_that_stays_stopped_is_replaced() -> None:
    lines: list[str] = []
    loader = SlotLoader(Numbers(), 1, say=lines.append, frozen_seconds=0.2)
    batches = loader.fetch(SLOTS)
    next(batches)
    (stopped,) = loader.pids
    os.kill(stopped, signal.SIGSTOP)
    assert len(list(batches)) == len(SLOTS) - 1
    assert loader.pids != [stopped]
    assert not alive(stopped)
    assert f"data worker (pid {stopped}) was killed after 0.2 s" in lines[0]
    loader.close()


def test_worker_that_runs_slowly_is_left_alone() -> None:
    lines: list[str] = []
    loader = SlotLoader(Numbers(lambda slot, sample: time.sleep(0.2)), 1, say=lines.append, frozen_seconds=0.02)
    assert_undisturbed(loader, SLOTS[:3])
    assert lines == []
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_batches_come_in_the_order_of_their_slots_whoever_is_slow(num_workers: int) -> None:
    def slow(slot: Slot, sample: int) -> None:
        time.sleep(0.001 * (7 * sample % 5))

    loader = SlotLoader(Numbers(slow), num_workers)
    assert_undisturbed(loader)
    assert_undisturbed(loader)
    loader.close()
    assert_undisturbed(loader)  # a closed loader starts anew


def test_workers_live_on_between_fetches_and_a_fetch_that_is_left_does_not_mix_into_the_next() -> None:
    loader = SlotLoader(Numbers(), num_workers=2)
    left = loader.fetch(SLOTS)
    assert next(left).keys.tolist() == SLOTS[0].keys.tolist()
    pids = loader.pids
    assert_undisturbed(loader, SLOTS[5:9])
    assert (loader.pids, list(left)) == (pids, [])


def test_a_parcel_holds_the_same_batch() -> None:
    for num_workers in (0, 1):
        fetched = SlotLoader(Numbers(), num_workers).fetch(SLOTS[:1])
        parcel = fetched.parcel()
        assert parcel is not None
        assert parcel.data.dtype == torch.uint8
        assert same(parcel.batch, Numbers()[SLOTS[0]])
        assert fetched.parcel() is None


def test_a_fetch_says_whether_the_next_batch_is_there(tmp_path: Path) -> None:
    def wait_for_word(slot: Slot, sample: int) -> None:
        while not (tmp_path / "go").exists():
            time.sleep(0.01)

    fetched = SlotLoader(Numbers(wait_for_word), num_workers=1).fetch(SLOTS[:1])
    assert not fetched.ready()
    (tmp_path / "go").touch()
    wait_for(fetched.ready)
    assert len(list(fetched)) == 1
    assert not fetched.ready()


def test_slots_are_read_only_a_little_ahead() -> None:
    asked: list[int] = []

    def endless() -> object:
        while True:
            asked.append(len(asked))
            yield SLOTS[0]

    fetched = SlotLoader(Numbers(), num_workers=2, prefetch_factor=3).fetch(endless())
    for taken in range(5):
        assert len(asked) == taken + 6
        next(fetched)


# Mistakes


class Unspeakable(Exception):
    """Survives no pickling: it wants two arguments."""

    def __init__(self, one: str, two: str):
        super().__init__(one + two)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (KeyError("ours"), KeyError, "ours"),
        (UserError("a wrong key"), UserError, "a wrong key"),
        (Unspeakable("so", "so"), RuntimeError, "Unspeakable: soso"),
        (ConnectionResetError("a server's"), ConnectionResetError, "a server's"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_in_a_worker_is_raised_when_its_turn_comes(error: Exception, kind: type, words: str) -> None:
    class Strict(Numbers):
        def __getitem__(self, slot: Slot) -> object:
            if 6 in slot.samples:
                raise error
            return super().__getitem__(slot)

    fetched = SlotLoader(Strict(), num_workers=3).fetch(SLOTS)
    assert same(next(fetched), Numbers()[SLOTS[0]])
    assert same(next(fetched), Numbers()[SLOTS[1]])
    with pytest.raises(kind, match=words) as raised:
        next(fetched)
    assert type(raised.value) is kind
    assert "in __getitem__" in raised.value.__notes__[0], "the worker's own traceback"


# Deaths


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTRAP])
def test_a_worker_that_is_killed_is_named_and_its_batches_are_the_same(number: signal.Signals) -> None:
    said: list[str] = []
    loader = SlotLoader(Numbers(lambda slot, sample: time.sleep(0.005)), num_workers=2, say=said.append)
    fetched = loader.fetch(SLOTS)
    got = [next(fetched) for _ in range(3)]
    victim, survivor = loader.pids
    os.kill(victim, number)
    got += list(fetched)
    assert [same(batch, Numbers()[slot]) for batch, slot in zip(got, SLOTS, strict=True)] == [True] * len(SLOTS)
    assert len(said) == 1
    assert said[0].startswith(f"data worker (pid {victim}) was killed by {number.name}; another one takes its place")
    assert survivor in loader.pids
    assert victim not in loader.pids


def test_all_workers_may_die_at_once_and_while_idle() -> None:
    loader = SlotLoader(Numbers(), num_workers=3, say=lambda line: None)
    for _ in range(2):
        assert_undisturbed(loader)
        for pid in loader.pids:
            os.kill(pid, signal.SIGKILL)
    assert_undisturbed(loader)


@pytest.mark.parametrize("times", [1, 2])
def test_a_crash_that_does_not_come_back_costs_nothing(tmp_path: Path, times: int) -> None:
    crash = once(tmp_path, partial(die, signal.SIGSEGV), at=7, times=times)
    assert_undisturbed(SlotLoader(Numbers(crash), num_workers=2, say=lambda line: None))


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_a_clip_that_kills_its_worker_each_time_costs_that_clip(number: signal.Signals) -> None:
    def deadly(slot: Slot, sample: int) -> None:
        if sample == 7:
            die(number)

    def unreadable(slot: Slot, sample: int) -> None:
        if sample == 7:
            raise OSError(f"reading it kills the data worker (killed by {number.name})")

    said: list[str] = []
    got = list(SlotLoader(Numbers(deadly), num_workers=2, say=said.append).fetch(SLOTS))
    expected = [Numbers(unreadable)[slot] for slot in SLOTS]
    assert expected[2].weights.tolist() == [1, 0, 1]
    assert all(same(a, b) for a, b in zip(got, expected, strict=True))
    assert len(said) == 3


def test_two_deadly_clips_in_one_slot_are_both_found() -> None:
    def deadly(slot: Slot, sample: int) -> None:
        if sample in (6, 8):
            die(signal.SIGSEGV)

    got = list(SlotLoader(Numbers(deadly), num_workers=1, say=lambda line: None).fetch(SLOTS))
    assert got[2].weights.tolist() == [0, 1, 0]
    assert [fault.path for fault in got[2].faults] == ["clips/6.mp4", "clips/8.mp4"]
    assert all(batch.weights.all() for place, batch in enumerate(got) if place != 2)


def test_clips_are_not_blamed_for_want_of_memory() -> None:
    """Whatever is tried at that slot is killed: no sample can be the one."""
    loader = SlotLoader(Numbers(lambda slot, sample: die(signal.SIGKILL)), num_workers=1, say=lambda line: None)
    with pytest.raises(UserError) as raised:
        next(loader.fetch(SLOTS))
    assert str(raised.value).startswith(
        "a data worker was killed by SIGKILL again and again at one micro-batch of 8px/2f/1:1 (its clips begin with "
        "clips/0.mp4, clips/1.mp4, clips/2.mp4); if memory ran out, lower num_workers"
    )
    assert "\n" not in str(raised.value)


def test_a_crash_of_the_whole_slot_that_no_sample_explains_ends_the_run() -> None:
    class Doomed(Numbers):
        def __getitem__(self, slot: Slot) -> object:
            if slot.weights.all():
                os._exit(3)
            return super().__getitem__(slot)

    loader = SlotLoader(Doomed(), num_workers=1, say=lambda line: None)
    with pytest.raises(UserError, match=r"^a data worker ended with exit code 3 again and again at one micro-batch"):
        next(loader.fetch(SLOTS))


def test_workers_that_die_at_ever_new_places_end_the_run(tmp_path: Path) -> None:
    def deadly(slot: Slot, sample: int) -> None:
        if sample % 3 == 0:
            once(tmp_path, partial(die, signal.SIGKILL), at=sample)(slot, sample)

    said: list[str] = []
    with pytest.raises(UserError, match=r"^data workers die again and again, the last one was killed by SIGKILL"):
        list(SlotLoader(Numbers(deadly), num_workers=1, say=said.append).fetch(slots_of(40)))
    assert len(said) == 11


# Memory


SMALL, LARGE = (1, 8, 8), (16, 32, 32)


def test_batches_in_flight_stay_within_the_limit_whatever_their_sizes() -> None:
    slots = [slot_of([2 * n, 2 * n + 1], LARGE if n % 5 == 2 else SMALL) for n in range(40)]
    largest = max(sum(t.nbytes for t in (batch.video, batch.fps)) for batch in map(Numbers().__getitem__, slots))
    for limit in (2.5 * largest, 1.5 * largest):
        loader = SlotLoader(Numbers(), num_workers=2, prefetch_factor=8, limit_bytes=int(limit))
        fetched = loader.fetch(slots)
        seen = []
        for slot in slots:
            seen.append(loader.bytes_in_flight)
            assert same(next(fetched), Numbers()[slot])
        assert max(*seen, loader.peak_bytes) <= limit
        assert loader.peak_bytes > 0.6 * limit, "the room is used"
        assert loader.bytes_in_flight == 0


def test_a_slot_that_waits_for_room_is_left_with_its_fetch() -> None:
    loader = SlotLoader(Numbers(), num_workers=1, prefetch_factor=8, limit_bytes=1)
    assert same(next(loader.fetch(SLOTS)), Numbers()[SLOTS[0]])  # one is under way by now and the next one waits
    assert_undisturbed(loader, SLOTS[6:])


def test_one_batch_is_always_under_way_however_small_the_limit() -> None:
    loader = SlotLoader(Numbers(lambda slot, sample: time.sleep(0.001)), num_workers=2, limit_bytes=1)
    assert_undisturbed(loader)
    assert loader.peak_bytes < 2 * loader._size(SLOTS[0])


def left_in_shared_memory() -> set[str]:
    """Files in `/dev/shm` that this process holds or nobody does; other tests' processes have some there as well."""
    ours, others = "", ""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            held = (process / "maps").read_text() + " ".join(map(os.readlink, (process / "fd").iterdir()))
            if int(process.name) == os.getpid():
                ours = held
            else:
                others += held
    return {name for name in os.listdir("/dev/shm") if f"/dev/shm/{name}" in ours or f"/dev/shm/{name}" not in others}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks into /proc")
def test_nothing_stays_open_or_mapped_behind_the_batches() -> None:
    def marks() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("longtake-batch")

    gc.collect()  # what tests before this one left open must not be closed in between
    shared = left_in_shared_memory()
    loader = SlotLoader(Numbers(), num_workers=2, say=lambda line: None)
    assert_undisturbed(loader)
    before = marks()
    for _ in range(5):
        os.kill(loader.pids[0], signal.SIGKILL)
        assert_undisturbed(loader)
    assert marks() == before
    loader.close()
    assert len(os.listdir("/proc/self/fd")) < before[0]
    wait_for(lambda: left_in_shared_memory() <= shared)


@pytest.mark.usefixtures("own_collector")
def test_a_worker_collects_its_own_garbage_only() -> None:
    class Notes(Numbers):
        def __getitem__(self, slot: Slot) -> object:
            assert gc.isenabled()
            assert gc.get_freeze_count() > 1000
            return super().__getitem__(slot)

    gc.disable()
    try:
        list(SlotLoader(Notes(), num_workers=1).fetch(SLOTS[:2]))
    finally:
        gc.enable()


# Ends


def test_signals_for_the_trainer_do_not_end_workers() -> None:
    said: list[str] = []
    loader = SlotLoader(Numbers(), num_workers=2, say=said.append)
    fetched = loader.fetch(SLOTS)
    pids = loader.pids
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    assert len(list(fetched)) == len(SLOTS)
    assert (loader.pids, said) == (pids, [])


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("closed", [False, True])
def test_workers_end_with_their_loader_whatever_they_are_at(busy: bool, closed: bool) -> None:
    loader = SlotLoader(Numbers(lambda slot, sample: time.sleep(1e6 if busy else 0)), num_workers=3)
    loader.fetch(SLOTS)
    pids = loader.pids
    if closed:
        loader.close()
    del loader  # forgotten is as good as closed
    assert not any(alive(pid) for pid in pids)


def test_another_loaders_workers_do_not_keep_ended_ones_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_LAST_WORD_SECONDS", float(PATIENCE_SECONDS))
    first, second = SlotLoader(Numbers(), num_workers=2), SlotLoader(Numbers(), num_workers=2)
    assert_undisturbed(first)
    assert_undisturbed(second)
    processes = [worker.process for worker in first._workers]
    first.close()
    assert [process.exitcode for process in processes] == [0, 0], "they ended by themselves, none had to be killed"
    assert_undisturbed(second)


LEFT_OPEN = """
import sys, time
from longtake.data.loading.loader import SlotLoader
from tests.forks import Forked
from tests.data.sources import Numbers, slots_of
seconds, wait = float(sys.argv[1]), float(sys.argv[2])
loader = SlotLoader(Numbers(lambda slot, sample: time.sleep(seconds)), num_workers=2)
fetched = loader.fetch(slots_of(12))
print(*loader.pids, flush=True)
time.sleep(wait)
"""


@pytest.mark.parametrize("seconds", [0, 600], ids=["idle", "hanging"])
@pytest.mark.parametrize("killed", [False, True], ids=["ends", "is killed"])
def test_no_worker_outlives_a_process_that(killed: bool, seconds: int) -> None:
    words = [sys.executable, "-c", LEFT_OPEN, str(seconds), "600" if killed else "0"]
    process = Forked(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    assert len(pids) == 2
    if killed:
        process.kill()
    assert process.wait(PATIENCE_SECONDS) == (-signal.SIGKILL if killed else 0)
    process.stdout.close()
    wait_for(lambda: not any(alive(pid) for pid in pids))


def test_workers_need_no_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_START_METHOD", "spawn")
    loader = SlotLoader(Numbers(), num_workers=1)
    assert_undisturbed(loader)
    loader.close()
