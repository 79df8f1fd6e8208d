"""A function called on many strings in several processes, any of which may crash."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

_CHUNK = 32  # arguments handed to a worker at once
_READY = "ready"


def call_each(
    function: Callable[[str], Any],
    arguments: Sequence[str],
    workers: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[Any]:
    """`[function(argument) for argument in arguments]`, in `workers` processes (0: in this one).

    Where an argument crashes its process (a decoder's segmentation fault), its result is a text that says so, and the
    others are not affected. `function` must be importable. An exception in it ends the call.
    """
    total = len(arguments)
    results: list[Any] = [None] * total
    if workers <= 0:
        for place, argument in enumerate(arguments):
            results[place] = function(argument)
            if progress:
                progress(place + 1, total)
        return results
    open_chunks = deque(deque(range(at, min(at + _CHUNK, total))) for at in range(0, total, _CHUNK))
    crew = [_Worker.start(function) for _ in range(min(workers, len(open_chunks)))]
    done = 0
    try:
        while done < total:
            for connection in wait([worker.connection for worker in crew]):
                worker = next(one for one in crew if one.connection is connection)
                try:
                    message = worker.connection.recv()
                except (EOFError, ConnectionError):
                    crew.remove(worker)
                    reason = worker.cause_of_death()
                    if worker.rows:
                        results[worker.rows.popleft()] = reason
                        done += 1
                    if worker.rows:
                        open_chunks.appendleft(worker.rows)
                    crew.append(_Worker.start(function))
                else:
                    if isinstance(message, Exception):
                        raise message
                    if worker.started:
                        results[worker.rows.popleft()] = message
                        done += 1
                    worker.started = True
                if worker in crew and not worker.rows and open_chunks:
                    worker.take(open_chunks.popleft(), arguments)
                if progress:
                    progress(done, total)
    finally:
        for worker in crew:
            worker.stop()
    return results


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    rows: deque[int]  # handed out, not answered yet
    started: bool = False

    @classmethod
    def start(cls, function: Callable[[str], Any]) -> _Worker:
        context = multiprocessing.get_context("spawn")  # a fork would copy the locks of Arrow's and torch's threads
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, function), daemon=True)
        process.start()
        theirs.close()
        return cls(process, ours, deque())

    def take(self, rows: deque[int], arguments: Sequence[str]) -> None:
        self.rows = rows
        with suppress(ConnectionError):  # it died meanwhile: the next wait() says so
            self.connection.send([arguments[row] for row in rows])

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
    """A worker's life: answers each argument of each list it is sent, until the other side hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    connection.send(_READY)
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        for argument in arguments:
            try:
                answer = function(argument)
            except Exception as error:
                answer = error
            connection.send(answer)
