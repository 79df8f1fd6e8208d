"""Batches made ahead of time in worker processes, in the order of their slots, within a bound on memory.

A worker that dies is named and replaced, and its slots are made again: a batch depends on its slot alone, so nobody
downstream can tell. If the same slot kills a second worker, its samples are tried one by one; the one that kills is
left out like any clip that cannot be read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import util
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

from longtake import processes
from longtake.contracts import Batch, ClipFault, Slot, UserError
from longtake.data.loading.parcel import Parcel, pack
from longtake.data.loading.workers import DataWorker, SlotSource, WorkerDied

_LAST_WORD_SECONDS = 1.0  # for workers to end by themselves
_CAREFUL_AFTER = 2  # deaths at one slot; one more that no sample is to blame for ends the run
_MOST_DEATHS = 10  # more than this, less one for every `_FORGIVEN_AFTER` batches, end the run
_FORGIVEN_AFTER = 50
_SHOWN_CLIPS = 3
_WARNED_AFTER_SECONDS = 60.0
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class SlotLoader:
    """Worker processes that turn slots into batches; they stay alive, with their caches, from one `fetch` to the next.

    `num_workers`: 0 makes each batch in this process when it is asked for; `prefetch_factor`: slots made ahead by each
    worker (None: 2). `limit_bytes`: the most that batches made or under way, and not yet taken, may hold together; one
    is always under way, however large (None: no limit). `say` puts a line about a worker's death on the terminal.
    `frozen_seconds`: a worker that has been stopped, or waited for a disk, for so long is replaced (None: never).
    """

    def __init__(
        self,
        source: SlotSource,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        limit_bytes: int | None = None,
        say: Callable[[str], None] = print,
        frozen_seconds: float | None = None,
    ):
        self.frozen_seconds = frozen_seconds
        self.source, self.num_workers, self.limit_bytes, self.say = source, num_workers, limit_bytes, say
        self.most_ahead = num_workers * (prefetch_factor or 2)
        self.peak_bytes = 0  # the most that was in flight so far
        self._workers: list[DataWorker] = []
        self._ending = util.Finalize(self, _end_all, (self._workers,), exitpriority=10)
        self._tasks: dict[int, _Task] = {}  # in flight, by number, in the order of their slots
        self._count = 0
        self._waiting: Slot | None = None  # taken from the slots, but there is no room for it yet
        self._slots: Iterator[Slot] = iter(())
        self._fetches = 0
        self._sizes: dict[str, int] = {}  # bytes of a bucket's batches, as seen
        self._deaths = 0.0

    def fetch(self, slots: Iterable[Slot]) -> Fetched:
        """Batches of `slots` in their order, whatever the number of workers; they start at once.

        `slots` is read ahead by `num_workers * prefetch_factor` at most. A new `fetch` ends the one before it. Raises
        `UserError` where workers die again and again.
        """
        self._fetches += 1
        self._tasks, self._waiting, self._slots = {}, None, iter(slots)
        self._fill()
        return Fetched(self, self._fetches)

    def close(self) -> None:
        """End the worker processes; the next `fetch` starts new ones. Without it they end with the loader."""
        _end_all(self._workers)
        self._tasks, self._slots, self._waiting = {}, iter(()), None

    @property
    def bytes_in_flight(self) -> int:
        """What the batches made or under way, and not yet taken, hold together."""
        return sum(task.num_bytes for task in self._tasks.values())

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers that run now."""
        return [worker.process.pid or 0 for worker in self._workers]

    def _take(self) -> Parcel | Batch:
        """Return the next batch, waited for. Raises `StopIteration` behind the last one."""
        if not self.num_workers:
            return self.source[next(self._slots)]
        self._fill()
        if not self._tasks:
            raise StopIteration
        number, task = next(iter(self._tasks.items()))
        self._wait_for(task)
        if task.error is not None:
            raise task.error
        del self._tasks[number]
        self._deaths = max(0.0, self._deaths - 1 / _FORGIVEN_AFTER)
        self._fill()
        assert task.parcel is not None
        return task.parcel

    def _wait_for(self, task: _Task) -> None:
        """Until a task is done; says so where that takes minutes, and replaces a worker that is frozen."""
        begun, warn_after = time.monotonic(), _WARNED_AFTER_SECONDS
        watch = None if self.frozen_seconds is None else processes.FrozenWatch(self.frozen_seconds)
        while not task.done:
            left = max(0.0, begun + warn_after - time.monotonic())
            self._listen(left if watch is None else min(left, watch.every_seconds))
            if not task.done and watch is not None and watch.is_frozen(task.worker.process.pid or 0):
                task.worker.process.kill()  # not waited for: in a read from a dead drive it cannot be ended
                self._replace(
                    task.worker, f"killed after {watch.seconds:g} s without running (dataset.timeout_seconds)"
                )
            if not task.done and time.monotonic() - begun >= warn_after:
                clips = ", ".join(self.source.table.written_path(row) for row in task.slot.rows[:_SHOWN_CLIPS].tolist())
                self.say(
                    f"no data for {warn_after:.0f} s: data worker (pid {task.worker.process.pid}) has not finished a "
                    f"micro-batch of {task.slot.bucket.name} (its clips begin with {clips}); look at the disk or "
                    "network they lie on, and whether that process is stopped"
                )
                warn_after *= 2

    def _ready(self) -> bool:
        self._listen(0)
        return bool(self._tasks) and next(iter(self._tasks.values())).done

    def _fill(self) -> None:
        """Hands out slots as long as there is room, each to the worker with the least to do."""
        while len(self._tasks) < self.most_ahead:
            slot = self._waiting or next(self._slots, None)
            if slot is None:
                return
            in_flight, size = self.bytes_in_flight, self._size(slot)
            if self._tasks and self.limit_bytes is not None and in_flight + size > self.limit_bytes:
                self._waiting = slot
                return
            self._waiting = None
            while len(self._workers) < self.num_workers:
                self._workers.append(DataWorker.start(self.source))
            self._count += 1
            load = [sum(task.worker is worker for task in self._open()) for worker in self._workers]
            task = _Task(self._count, slot, self._workers[int(np.argmin(load))], size)
            self._tasks[task.number] = task
            self.peak_bytes = max(self.peak_bytes, in_flight + size)
            task.worker.ask(task.number, task.slot, task.careful)

    def _size(self, slot: Slot) -> int:
        """Of its batch, in bytes: what the source says, or the most that was seen."""
        return max(self._sizes.get(slot.bucket.name, 0), self.source.batch_bytes(slot.bucket))

    def _open(self) -> Iterator[_Task]:
        return (task for task in self._tasks.values() if not task.done)

    def _listen(self, seconds: float | None) -> None:
        """Take in what workers have to say; wait for it up to `seconds` (None: until there is something)."""
        for worker in wait(self._workers, seconds) if self._workers else ():
            try:
                answer = worker.answer()
            except WorkerDied as death:
                self._replace(worker, str(death))
                continue
            task = self._tasks.get(answer.number)
            if task is None:  # of a fetch that was left
                continue
            if answer.parcel is not None:
                self._made(task, answer.parcel)
            else:
                task.error, task.trying = answer.error, answer.trying

    def _made(self, task: _Task, parcel: Parcel) -> None:
        if task.faults:
            parcel = replace(parcel, plan=replace(parcel.plan, faults=(*parcel.plan.faults, *task.faults)))
        task.parcel, task.num_bytes = parcel, len(parcel.data)
        self._sizes[task.slot.bucket.name] = max(self._size(task.slot), task.num_bytes)
        self.peak_bytes = max(self.peak_bytes, self.bytes_in_flight)

    def _replace(self, worker: DataWorker, cause: str) -> None:
        """Start another worker in place of a dead one; it make what that one had not finished."""
        worker.hang_up()
        place = self._workers.index(worker)
        del self._workers[place]
        tasks = [task for task in self._open() if task.worker is worker]
        again = ", and makes its micro-batches again" if tasks else ""
        self.say(f"data worker (pid {worker.process.pid}) {_died(cause)}; another one takes its place{again}")
        self._deaths += 1
        if tasks:
            self._blame(tasks[0], cause)
        if self._deaths > _MOST_DEATHS:
            raise UserError(f"data workers die again and again, the last one {_died(cause)}; {_ADVICE}")
        fresh = DataWorker.start(self.source)
        self._workers.insert(place, fresh)
        for task in tasks:
            task.worker = fresh
            fresh.ask(task.number, task.slot, task.careful)

    def _blame(self, task: _Task, cause: str) -> None:
        """Note a death at a slot. The second makes its next try careful; a sample that then kills is left out. SIGKILL
        mostly means that memory ran out, so it is blamed on one sample of a slot at most."""
        task.deaths += 1
        slot, place, task.trying = task.slot, task.trying, None
        if place is not None and not (task.faults and cause == _OUT_OF_MEMORY):
            weights = slot.weights.copy()
            weights[place] = 0
            task.slot = replace(slot, weights=weights)
            path, sample = self.source.table.written_path(int(slot.rows[place])), int(slot.samples[place])
            task.faults += (ClipFault(path, sample, slot.pass_index, f"reading it kills the data worker ({cause})"),)
            task.deaths, self._deaths = _CAREFUL_AFTER, self._deaths - 1  # it is explained
        elif task.deaths > _CAREFUL_AFTER:
            clips = ", ".join(self.source.table.written_path(row) for row in slot.rows[:_SHOWN_CLIPS].tolist())
            raise UserError(
                f"a data worker {_died(cause)} again and again at one micro-batch of {slot.bucket.name} (its clips "
                f"begin with {clips}); {_ADVICE}"
            )
        task.careful = task.deaths >= _CAREFUL_AFTER


_OUT_OF_MEMORY = "killed by SIGKILL"
_ADVICE = (
    "if memory ran out, lower num_workers, dataset.max_host_gb or dataset.cache_mb, else find the clip with "
    "`longtake data probe TABLE -o OUTPUT --decode-check`"
)


def _died(cause: str) -> str:
    return f"was {cause}" if cause.startswith("killed") else f"ended with {cause}"


class Fetched(Iterator[Batch]):
    """The batches of one `fetch`."""

    def __init__(self, loader: SlotLoader, number: int):
        self._loader, self._number = loader, number

    def __next__(self) -> Batch:
        found = self._next()
        return found.batch if isinstance(found, Parcel) else found

    def parcel(self) -> Parcel | None:
        """Return the next batch in one stretch of bytes; None behind the last one."""
        try:
            found = self._next()
        except StopIteration:
            return None
        return found if isinstance(found, Parcel) else pack(found)

    def ready(self) -> bool:
        """Whether the next batch is there without waiting."""
        return self._loader._fetches == self._number and self._loader._ready()

    def _next(self) -> Parcel | Batch:
        if self._loader._fetches != self._number:
            raise StopIteration
        return self._loader._take()


@dataclass(eq=False)
class _Task:
    """A slot in flight."""

    number: int
    slot: Slot
    worker: DataWorker
    num_bytes: int
    parcel: Parcel | None = None  # once it is made
    error: Exception | None = None  # that making it raised; raised here when its turn comes
    deaths: int = 0  # of workers that were at it
    careful: bool = False
    trying: int | None = None  # the sample that a careful worker is at
    faults: tuple[ClipFault, ...] = ()

    @property
    def done(self) -> bool:
        return self.parcel is not None or self.error is not None


def machine_bytes() -> int:
    """Return the memory of this machine, or of the container that the process runs in, where that has less."""
    found = processes.physical_bytes()
    for file in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            found = min(found, int(Path(file).read_text(encoding="ascii")))
    return found


def _end_all(workers: list[DataWorker]) -> None:
    for worker in workers:
        worker.hang_up()
    deadline = time.monotonic() + _LAST_WORD_SECONDS
    for worker in workers:
        processes.end(worker.process, max(0.0, deadline - time.monotonic()))
    workers.clear()
