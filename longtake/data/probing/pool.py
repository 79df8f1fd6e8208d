"""A function called on many strings in several processes, any of which may crash."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

_CHUNK = 32  # arguments handed to a worker at once
_SECONDS_HELD = 0.02  # answers are sent together: one by one costs more than the header of a small file
_READY = "ready"


class Crew:
    """Processes that answer lists of arguments. Use as a context manager, so that they end with it."""

    def __init__(self, function: Callable[[str], Any], workers: int = 0):
        """`function` must be importable; `workers`: processes, started when first needed; 0 works in this one."""
        self._function, self._size = function, workers
        self._crew: list[_Worker] = []

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes, whatever they are at."""
        for worker in self._crew:
            worker.stop()
        self._crew.clear()

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
        waiting = deque(_Chunk(deque(range(at, min(at + _CHUNK, total)))) for at in range(0, total, _CHUNK))
        while len(self._crew) < min(self._size, len(waiting)):
            self._crew.append(_Worker.start(self._function))
        for worker in self._crew:
            if worker.started and waiting:
                worker.take(waiting.popleft(), arguments)
        done = 0
        while done < total:
            for connection in wait([worker.connection for worker in self._crew]):
                worker = next(one for one in self._crew if one.connection is connection)
                for answer in self._receive(worker, waiting):
                    yield answer
                    done += 1
                if worker.started and not worker.chunk.places and waiting:
                    worker.take(waiting.popleft(), arguments)

    def _receive(self, worker: _Worker, waiting: deque[_Chunk]) -> Iterator[tuple[int, Any]]:
        """What a worker has to say; a dead one is replaced, and what it had not answered waits again."""
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionError):
            reason = worker.cause_of_death()
            self._crew.remove(worker)
            worker.stop()
            worker.started = False
            self._crew.append(_Worker.start(self._function))
            if worker.chunk.careful:
                yield worker.chunk.places.popleft(), reason
            if worker.chunk.places:  # which of them it was shows when each is answered by itself
                waiting.appendleft(_Chunk(worker.chunk.places, careful=True))
            return
        if isinstance(message, Exception):
            raise message
        if message == _READY:
            worker.started = True
            return
        for answer in message:
            yield worker.chunk.places.popleft(), answer


@dataclass
class _Chunk:
    places: deque[int]  # not answered yet
    careful: bool = False  # every answer is sent before the next argument is touched


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    chunk: _Chunk
    started: bool = False

    @classmethod
    def start(cls, function: Callable[[str], Any]) -> _Worker:
        context = multiprocessing.get_context("spawn")  # a fork would copy the locks of Arrow's and torch's threads
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, function), daemon=True)
        # Ctrl-C is for the parent. A child inherits the mask, so it is deaf from its first instruction on: a handler
        # set in `_serve` would come after seconds of imports. Starting the tracker would lift the mask: it goes first.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return cls(process, ours, _Chunk(deque()))

    def take(self, chunk: _Chunk, arguments: Sequence[str]) -> None:
        self.chunk = chunk
        with suppress(ConnectionError):  # it died meanwhile: the next wait() says so
            self.connection.send((chunk.careful, [arguments[place] for place in chunk.places]))

    def cause_of_death(self) -> str:
        """Why the process is gone; raises `RuntimeError` if it never came up, which no argument can be blamed for."""
        self.process.join()
        code = self.process.exitcode or 0
        cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if not self.started:
            raise RuntimeError(f"a worker process ended at its start ({cause})")
        return f"reading it crashed the decoder ({cause})"

    def stop(self) -> None:
        self.connection.close()
        self.process.terminate()
        self.process.join()


def _serve(connection: Connection, function: Callable[[str], Any]) -> None:
    """A worker's life: answers each argument of each list it is sent, until the other side hangs up or is gone."""
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
