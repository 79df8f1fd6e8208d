"""One process that makes batches, as its parent sees it and as it lives.

Slots go to it through a pipe. A batch comes back as an anonymous file in memory, whose descriptor travels through a
socket: nothing has a name in `/dev/shm`, so nothing stays there however a process ends, and a small `/dev/shm`, as
containers have it, does not matter.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import pickle
import socket
import struct
import sys
import traceback
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import numpy as np
import torch

from longtake import processes
from longtake.contracts import Batch, Bucket, Caption, Slot
from longtake.data.loading.parcel import Parcel, plan_parcel

# A forked worker starts at once and shares the memory of the table. Elsewhere a fork would break system libraries.
_START_METHOD = "fork" if sys.platform == "linux" else "spawn"
_LAST_WORD_SECONDS = 1.0  # for a worker whose line is closed
_HEADER = struct.Struct("<qqqq")  # number of the task, kind, bytes of tensors, bytes of the pickle behind them
_MADE, _FAILED, _TRYING = range(3)


class SlotSource(Protocol):
    """What makes a batch of a slot: `SlotDataset`, or anything that does the same."""

    table: Any  # `written_path(row)` names a clip

    def __getitem__(self, slot: Slot) -> Batch: ...

    def texts(self, slot: Slot) -> Sequence[Caption]:
        """Return the captions of its samples."""

    def batch_bytes(self, bucket: Bucket) -> int:
        """How large the tensors of a bucket's batch are, roughly."""


@dataclass(frozen=True)
class Answer:
    """What a worker says of a task: its batch, the error that making it raised, or which sample it is about to try."""

    number: int  # of the task
    parcel: Parcel | None = None
    error: Exception | None = None
    trying: int | None = None  # its place in the slot; None without batch and error: the whole slot after all


class WorkerDied(Exception):
    """A worker is gone; the text says by what."""


@dataclass(eq=False)
class DataWorker:
    """A worker process and this process's ends of its lines."""

    process: BaseProcess
    requests: Connection
    answers: socket.socket

    @classmethod
    def start(cls, source: SlotSource) -> DataWorker:
        """Start a process that serves `source`."""
        their_requests, our_requests = multiprocessing.Pipe(duplex=False)
        our_answers, their_answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        _OUR_ENDS.update((our_requests, our_answers))
        process = processes.start(_serve, (source, their_requests, their_answers), _START_METHOD, "data worker")
        their_requests.close()
        their_answers.close()
        return cls(process, our_requests, our_answers)

    def fileno(self) -> int:
        """For `multiprocessing.connection.wait`: readable when there is an answer, or the process is gone."""
        return self.answers.fileno()

    def ask(self, number: int, slot: Slot, careful: bool) -> None:
        """Hands a slot over; `careful`: each sample is loaded by itself first, so that one that kills shows."""
        with suppress(ConnectionError):  # it died meanwhile: `answer` says so
            self.requests.send((number, slot, careful))

    def answer(self) -> Answer:
        """Return the next thing the worker has to say; waits for it. Raises `WorkerDied`."""
        try:
            number, kind, num_bytes, rest, descriptors = self._header()
        except (EOFError, ConnectionError) as error:
            raise WorkerDied(self._cause_of_death()) from error
        if kind == _TRYING:
            return Answer(number, trying=num_bytes if num_bytes >= 0 else None)
        (descriptor,) = descriptors
        try:
            pages = mmap.mmap(descriptor, num_bytes + rest)
        finally:
            os.close(descriptor)
        content = pickle.loads(memoryview(pages)[num_bytes:])
        if kind == _FAILED:
            error, trace = content
            error.add_note(f"in data worker (pid {self.process.pid}):\n{trace}")
            return Answer(number, error=error)
        data = torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes) if num_bytes else torch.empty(0).byte()
        return Answer(number, Parcel(content, data))

    def _header(self) -> tuple[int, int, int, int, list[int]]:
        received, descriptors, _, _ = socket.recv_fds(self.answers, _HEADER.size, 1)
        while len(received) < _HEADER.size:
            more = self.answers.recv(_HEADER.size - len(received)) if received else b""
            if not more:
                for descriptor in descriptors:
                    os.close(descriptor)
                raise EOFError
            received += more
        return *_HEADER.unpack(received), descriptors

    def _cause_of_death(self) -> str:
        processes.end(self.process, _LAST_WORD_SECONDS)  # its line is closed, so it is no use any more
        return processes.how_it_ended(self.process.exitcode)

    def hang_up(self) -> None:
        """Lets the process end by itself once it is idle."""
        self.requests.close()
        self.answers.close()


_OUR_ENDS: weakref.WeakSet[Connection | socket.socket] = weakref.WeakSet()  # of all lines, whichever loader's


def _serve(source: SlotSource, requests: Connection, answers: socket.socket) -> None:
    """A worker's life: makes each batch it is asked for, until the other side hangs up."""
    for end in _OUR_ENDS:  # a fork has copies of its parent's ends; kept open, they would hide that one hangs up
        end.close()
    torch.set_num_threads(1)
    gc.freeze()  # what came from the parent is not gone through, so its pages stay shared
    gc.enable()
    with suppress(ConnectionError, EOFError):
        while True:
            task, slot, careful = requests.recv()
            try:
                if careful:
                    _try_each(source, task, slot, answers)
                _send(answers, task, _MADE, source[slot], None)
            except Exception as error:  # where the parent is gone, saying so fails as well
                _send(answers, task, _FAILED, None, (_portable(error), traceback.format_exc()))


def _try_each(source: SlotSource, task: int, slot: Slot, answers: socket.socket) -> None:
    """Load the samples of a slot one by one, each named before it is touched."""
    for place in np.flatnonzero(slot.weights).tolist():
        answers.sendall(_HEADER.pack(task, _TRYING, place, 0))
        alone = np.zeros_like(slot.weights)
        alone[place] = slot.weights[place]
        source[replace(slot, weights=alone)]
    answers.sendall(_HEADER.pack(task, _TRYING, -1, 0))


def _send(answers: socket.socket, task: int, kind: int, batch: Batch | None, content: Any) -> None:
    """Put a batch (or any small object) into an anonymous file and send its descriptor."""
    contents, num_bytes = [], 0
    if batch is not None:
        content, contents, num_bytes = plan_parcel(batch)
    rest = pickle.dumps(content)
    descriptor = processes.anonymous_file("longtake-batch")
    try:
        os.ftruncate(descriptor, num_bytes + len(rest))
        for place, tensor in contents:
            # a contiguous tensor of one element may have any stride, which `view` would refuse
            flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
            _write(descriptor, flat.view(torch.uint8).numpy().data, place.start)
        _write(descriptor, memoryview(rest), num_bytes)
        socket.send_fds(answers, [_HEADER.pack(task, kind, num_bytes, len(rest))], [descriptor])
    finally:
        os.close(descriptor)


def _write(descriptor: int, content: memoryview, start: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, start)
        content, start = content[written:], start + written


def _portable(error: Exception) -> Exception:
    """Return the error as it can travel: some classes do not survive pickling."""
    with suppress(Exception):
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")
