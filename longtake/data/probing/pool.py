"""A function called on many strings in several processes, any of which may crash; or all over a Ray cluster."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import pyarrow as pa

from longtake import processes
from longtake.contracts import UserError

_CHUNK = 32  # arguments handed to a worker at once
_SECONDS_HELD = 0.02  # answers are sent together: one by one costs more than the header of a small file
_READY = "ready"
_FROZEN_SECONDS = 60.0  # that a worker may be stopped, or wait for a disk
_ROWS = 256  # files asked about in one task of Ray: a journal is at most so many behind for each process


class WorkerPool:
    """Processes that answer lists of arguments. Use as a context manager, so that they end with it."""

    def __init__(self, function: Callable[[str], Any], workers: int = 0):
        """`function` must be importable; `workers`: processes, started when first needed; 0 works in this one."""
        self._function, self._size = function, workers
        self._workers: list[_Worker] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, whatever they are at."""
        for worker in self._workers:
            worker.stop()
        self._workers.clear()

    def answers(self, arguments: Sequence[str]) -> Iterator[tuple[int, Any]]:
        """`(place, function(arguments[place]))` for every place, as they are ready.

        Where an argument crashes its process (a decoder's segmentation fault), its answer is a text that says so, and
        the others are not affected. An exception in `function` ends the iteration. To be used up before the next call.
        """
        if self._size <= 0:
            for place, argument in enumerate(arguments):
                yield place, self._function(argument)
            return
        total = len(arguments)
        waiting = deque(_FileBatch(deque(range(at, min(at + _CHUNK, total)))) for at in range(0, total, _CHUNK))
        while len(self._workers) < min(self._size, len(waiting)):
            self._workers.append(_Worker.start(self._function))
        for worker in self._workers:
            if worker.started and waiting:
                worker.take(waiting.popleft(), arguments)
        done = 0
        while done < total:
            ready = wait([worker.connection for worker in self._workers], _FROZEN_SECONDS / 4)
            frozen = [] if ready else [one for one in self._workers if one.watch.is_frozen(one.process.pid or 0)]
            for worker in frozen:
                worker.process.kill()  # not waited for: in a read from a dead drive it cannot be ended
                for answer in self._replace(worker, waiting, f"reading it took no step for {_FROZEN_SECONDS:g} s"):
                    yield answer
                    done += 1
            for connection in ready:
                worker = next(one for one in self._workers if one.connection is connection)
                for answer in self._receive(worker, waiting):
                    yield answer
                    done += 1
                if worker.started and not worker.chunk.places and waiting:
                    worker.take(waiting.popleft(), arguments)

    def _receive(self, worker: _Worker, waiting: deque[_FileBatch]) -> Iterator[tuple[int, Any]]:
        """What a worker has to say; a dead one is replaced, and what it had not answered waits again."""
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionError):
            reason = worker.cause_of_death()
            worker.stop()
            yield from self._replace(worker, waiting, reason)
            return
        if isinstance(message, Exception):
            raise message
        if message == _READY:
            worker.started = True
            return
        for answer in message:
            yield worker.chunk.places.popleft(), answer

    def _replace(self, worker: _Worker, waiting: deque[_FileBatch], reason: str) -> Iterator[tuple[int, Any]]:
        """Start another process for one that is gone or frozen; the file that it certainly was at has `reason` as its
        answer."""
        self._workers.remove(worker)
        worker.started = False
        self._workers.append(_Worker.start(self._function))
        if worker.chunk.careful:
            yield worker.chunk.places.popleft(), reason
        if worker.chunk.places:  # which of them it was shows when each is answered by itself
            waiting.appendleft(_FileBatch(worker.chunk.places, careful=True))


def ask_here(ask: Callable[[str], Any], workers: int, files: Sequence[str]) -> Generator[tuple[int, Any], None, None]:
    """Yield the answers of a `WorkerPool`, which ends with them."""
    with WorkerPool(ask, workers) as pool:
        yield from pool.answers(files)


def ask_on_ray(ask: Callable[[str], Any], workers: int, files: Sequence[str]) -> Generator[tuple[int, Any], None, None]:
    """`(place, ask(files[place]))` as they are ready; answers must be JSON values.

    Uses the cluster that RAY_ADDRESS names, or makes one of this machine. `workers`: processes in the whole cluster,
    0: one a core. Every machine must see the files under the same paths and have Longtake installed.
    """
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise UserError("--engine ray: Ray is not installed; pip install '.[ray]' in Longtake's folder") from error
    if not files:
        return
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    cores = int(ray.cluster_resources().get("CPU", 1))
    num_tasks = -(-len(files) // _ROWS)
    table = pa.table({"place": np.arange(len(files)), "file": pa.array(files, pa.string())})
    blocks = [table.slice(at, _ROWS) for at in range(0, len(files), _ROWS)]
    actors = max(1, min(workers or cores, cores, num_tasks))
    answered = ray.data.from_arrow(blocks).map_batches(
        _Asker,
        fn_constructor_args=(ask,),
        batch_size=_ROWS,
        batch_format="pyarrow",
        num_cpus=1,
        compute=ray.data.ActorPoolStrategy(size=actors),
    )
    for batch in answered.iter_batches(batch_size=None, batch_format="pyarrow"):
        for place, answer in zip(batch["place"].to_pylist(), batch["answer"].to_pylist(), strict=True):
            yield place, json.loads(answer)


class _Asker:
    """Lives in a process of the cluster; a second process beside it does the asking, since files may crash it."""

    def __init__(self, ask: Callable[[str], Any]):
        self._pool = WorkerPool(ask, workers=1)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Columns place and file become columns place and answer."""
        places = batch["place"].to_numpy()
        found = list(self._pool.answers(batch["file"].to_pylist()))
        return pa.table(
            {
                "place": pa.array([int(places[at]) for at, _ in found]),
                "answer": pa.array([json.dumps(answer) for _, answer in found]),
            }
        )


@dataclass
class _FileBatch:
    places: deque[int]  # not answered yet
    careful: bool = False  # every answer is sent before the next argument is touched


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    chunk: _FileBatch
    started: bool = False
    watch: processes.FrozenWatch = field(default_factory=lambda: processes.FrozenWatch(_FROZEN_SECONDS))

    @classmethod
    def start(cls, function: Callable[[str], Any]) -> _Worker:
        ours, theirs = multiprocessing.Pipe()
        # A fork would copy the locks of Arrow's and torch's threads. Pickled, what `function` needs is imported late.
        process = processes.start(_serve, (theirs, pickle.dumps(function)), "spawn", "probe worker")
        theirs.close()
        return cls(process, ours, _FileBatch(deque()))

    def take(self, chunk: _FileBatch, arguments: Sequence[str]) -> None:
        self.chunk = chunk
        with suppress(ConnectionError):  # it died meanwhile: the next wait() says so
            self.connection.send((chunk.careful, [arguments[place] for place in chunk.places]))

    def cause_of_death(self) -> str:
        """Why the process is gone; raises `RuntimeError` if it never came up, which no argument can be blamed for."""
        self.process.join()
        cause = processes.how_it_ended(self.process.exitcode)
        if not self.started:
            raise RuntimeError(f"a worker process ended at its start ({cause})")
        return f"reading it crashed the decoder ({cause})"

    def stop(self) -> None:
        self.connection.close()
        processes.end(self.process)


def _serve(connection: Connection, pickled: bytes) -> None:
    """A worker's life: answers each argument of each list it is sent, until the other side hangs up or is gone."""
    function: Callable[[str], Any] = pickle.loads(pickled)
    with suppress(EOFError, ConnectionError):
        connection.send(_READY)
        while True:
            careful, arguments = connection.recv()
            held, sent = [], time.monotonic()
            for argument in arguments:
                try:
                    held.append(function(argument))
                except Exception as error:
                    connection.send(error)
                    return
                if careful or time.monotonic() - sent > _SECONDS_HELD:
                    connection.send(held)
                    held, sent = [], time.monotonic()
            if held:
                connection.send(held)
