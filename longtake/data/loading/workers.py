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
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import numpy as np
import torch

from longtake.contracts import Batch, Bucket, Slot
from longtake.data.loading.parcel import Parcel, plan_parcel

# A forked worker starts at once and shares the memory of the table. Elsewhere a fork would break system libraries.
_START_METHOD = "fork" if sys.platform == "linux" else "spawn"
_DEAF_TO = (signal.SIGINT, signal.SIGTERM)  # both are for the trainer, which wants to save first
_SECONDS_BETWEEN_LOOKS = 1.0  # whether the parent still lives
_HEADER = struct.Struct("<qqqq")  # number of the task, kind, bytes of tensors, bytes of the pickle behind them
_MADE, _FAILED, _TRYING = range(3)


class SlotSource(Protocol):
    """What makes a batch of a slot: `SlotDataset`, or anything that does the same."""

    table: Any  # `written_path(row)` names a clip

    def __getitem__(self, slot: Slot) -> Batch: ...

    def batch_bytes(self, bucket: Bucket) -> int:
        """How large the tensors of a bucket's batch are, roughly."""
        ...


@dataclass(frozen=True)
class Made:
    """A batch is ready."""

    number: int
    parcel: Parcel


@dataclass(frozen=True)
class Failed:
    """Making a batch raised an error."""

    number: int
    error: Exception


@dataclass(frozen=True)
class Trying:
    """A careful worker is about to load one sample by itself, or the whole slot after all."""

    number: int
    sample: int | None  # its place in the slot


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
        """Starts a process that serves `source`."""
        context = multiprocessing.get_context(_START_METHOD)
        their_requests, our_requests = context.Pipe(duplex=False)
        our_answers, their_answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        process = context.Process(
            target=_serve, args=(source, their_requests, their_answers, os.getpid()), daemon=True, name="data worker"
        )
        worker = cls(process, our_requests, our_answers)
        _LIVING.add(worker)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _DEAF_TO)  # the child is deaf from its first instruction on
        try:
            with warnings.catch_warnings():  # newer Pythons warn of any fork beside threads; the child uses no other
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        their_requests.close()
        their_answers.close()
        return worker

    def fileno(self) -> int:
        """For `multiprocessing.connection.wait`: readable when there is an answer, or the process is gone."""
        return self.answers.fileno()

    def ask(self, number: int, slot: Slot, careful: bool) -> None:
        """Hands a slot over; `careful`: each sample is loaded by itself first, so that one that kills shows."""
        with suppress(ConnectionError):  # it died meanwhile: `answer` says so
            self.requests.send((number, slot, careful))

    def answer(self) -> Made | Failed | Trying:
        """The next thing the worker has to say; waits for it. Raises `WorkerDied`."""
        try:
            number, kind, num_bytes, rest, descriptors = self._header()
        except (EOFError, ConnectionError) as error:
            raise WorkerDied(self._cause_of_death()) from error
        if kind == _TRYING:
            return Trying(number, num_bytes if num_bytes >= 0 else None)
        (descriptor,) = descriptors
        try:
            pages = mmap.mmap(descriptor, num_bytes + rest)
        finally:
            os.close(descriptor)
        content = pickle.loads(memoryview(pages)[num_bytes:])
        if kind == _FAILED:
            error, told = content
            error.add_note(f"in data worker (pid {self.process.pid}):\n{told}")
            return Failed(number, error)
        data = torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes) if num_bytes else torch.empty(0).byte()
        return Made(number, Parcel(content, data))

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
        self.process.join(_SECONDS_BETWEEN_LOOKS)
        if self.process.exitcode is None:  # its line is closed, so it is no use any more
            self.process.kill()
            self.process.join()
        code = self.process.exitcode or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def hang_up(self) -> None:
        """Tells the process to end by itself once it is idle."""
        self.requests.close()
        self.answers.close()

    def end(self, seconds: float) -> None:
        """Waits for the end of a process that was told to; kills it after `seconds`."""
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


_LIVING: weakref.WeakSet[DataWorker] = weakref.WeakSet()  # of this process, whichever loader they belong to


def _serve(source: SlotSource, requests: Connection, answers: socket.socket, parent: int) -> None:
    """A worker's life: makes each batch it is asked for, until the other side hangs up."""
    for worker in _LIVING:  # a fork has copies of this process's ends; kept open, they would hide its end
        worker.hang_up()
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _DEAF_TO)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
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
    """Loads the samples of a slot one by one, each named before it is touched."""
    for place in np.flatnonzero(slot.weights).tolist():
        answers.sendall(_HEADER.pack(task, _TRYING, place, 0))
        alone = np.zeros_like(slot.weights)
        alone[place] = slot.weights[place]
        source[replace(slot, weights=alone)]
    answers.sendall(_HEADER.pack(task, _TRYING, -1, 0))


def _send(answers: socket.socket, task: int, kind: int, batch: Batch | None, content: Any) -> None:
    """Puts a batch (or any small object) into an anonymous file and sends its descriptor."""
    contents, num_bytes = [], 0
    if batch is not None:
        content, contents, num_bytes = plan_parcel(batch)
    rest = pickle.dumps(content)
    descriptor = _anonymous_file()
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


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("longtake-batch")
    with tempfile.TemporaryFile() as file:  # has no name either, but may lie on a disk
        return os.dup(file.fileno())


def _write(descriptor: int, content: memoryview, start: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, start)
        content, start = content[written:], start + written


def _portable(error: Exception) -> Exception:
    """The error as it can travel: some classes do not survive pickling."""
    with suppress(Exception):
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _end_with(parent: int) -> None:
    """Ends this process when its parent is gone, whatever it is at: a decoder may hang for ever."""
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os._exit(1)
