"""Saving while training goes on: a copy of the tensors is taken, a process beside the run writes it.

The run waits for the copy alone, which goes into memory that is kept (pinned on CUDA). One save is in progress at a
time: the next one first waits for it. See `writer` for the process.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import longtake
from longtake import processes
from longtake.checkpoint import writer
from longtake.checkpoint.folder import checkpoint_path
from longtake.checkpoint.layout import ShardFile, lay_out, local_part, signature
from longtake.checkpoint.save import discard, marker_facts, open_partial, size_of, state_bytes, write_error_sentence
from longtake.contracts import UserError
from longtake.parallel.host import pin, unpin
from longtake.parallel.world import World
from longtake.tensor_files import bytes_of

_LEAST_BYTES = 1 << 16  # of the memory file: one of no bytes cannot be mapped


class BackgroundSaver:
    """Saves checkpoints of one run, one after another. `save` and `wait` are collective."""

    def __init__(self) -> None:
        self._staging = Staging()
        self._writer: _WriterProcess | None = None
        self._layout: tuple[object, tuple[ShardFile, ...]] | None = None
        self._job: _Job | None = None

    @property
    def failed(self) -> bool:
        """Whether this rank's part of the save in progress has failed. `wait`, on all ranks, says why."""
        return self._job is not None and self._job.failed

    def save(
        self,
        run_folder: str | Path,
        epoch: int,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        then: Callable[[], object] = lambda: None,
    ) -> Path:
        """`save_checkpoint`, but returns once the tensors are copied; they may change from then on.

        `then` runs on rank 0, in a thread, when the checkpoint is complete. Raises as `save_checkpoint` for the save
        before this one, and for what is known at once about this one.
        """
        assert tensors, "a checkpoint without tensors"
        self.wait()
        target = checkpoint_path(run_folder, epoch, step)
        world, size = World.here(), size_of(tensors)
        partial = world.on_main(lambda: open_partial(target))
        try:
            if self._layout is None or self._layout[0] != signature(tensors):
                self._layout = signature(tensors), lay_out(tensors)
            files = self._layout[1]

            def begin() -> None:
                process = self._staged(files, tensors)
                request = {
                    "partial": str(partial.resolve()),
                    "target": str(target.resolve()),
                    "rank": world.rank,
                    "marker": marker_facts(epoch, step),
                    "state": state_bytes(state).decode("latin-1") if world.is_main else "",
                    "files": [file.request for file in files],
                }
                self._job = _Job(process, request, lambda error: write_error_sentence(target, size, error), then)

            world.on_all(begin)
        except Exception as error:
            self.close(0.0)
            discard(partial)
            if isinstance(error, OSError):
                raise UserError(write_error_sentence(target, size, error)) from error
            raise
        return target

    def _staged(self, files: tuple[ShardFile, ...], tensors: Mapping[str, Tensor]) -> _WriterProcess:
        """Return the writer that has a copy of this rank's part."""
        if self._staging.take(files, tensors) or self._writer is None or not self._writer.alive:
            self.close(0.0)  # the memory file is another one
            self._writer = _WriterProcess(self._staging.descriptor)
        return self._writer

    def wait(self) -> None:
        """Wait until the save in progress is complete on all ranks. Raises UserError on all of them if it failed."""
        job = self._job
        if job is None:
            return
        try:
            World.here().on_all(job.written.result)
            World.here().on_main(job.ended.result)
        except Exception:
            self.close(0.0)
            raise
        self._job = None

    def close(self, seconds: float) -> None:
        """End the writer, at the latest after `seconds`, which a save in progress has to finish."""
        if self._job is not None:
            wait([self._job.ended], seconds)
        if self._writer is not None:
            self._writer.end()
        if self._job is not None:
            discard(Path(self._job.request["partial"]))  # nothing is there any more where it came to its end
        self._job, self._writer = None, None


class Staging:
    """This rank's part of a checkpoint in one memory file, which the writer maps too."""

    def __init__(self) -> None:
        self.descriptor = -1
        self._map: mmap.mmap | None = None
        self._bytes: Tensor | None = None  # uint8, the memory file
        self._pinned = False

    def take(self, files: tuple[ShardFile, ...], tensors: Mapping[str, Tensor]) -> bool:
        """Copy the pieces of `files`; return whether a new memory file was made for them. Waits for the device."""
        num_bytes = max([_LEAST_BYTES, *(file.start + file.num_bytes for file in files)])
        on_cuda = any(tensor.is_cuda for tensor in tensors.values())
        renewed = self._bytes is None or num_bytes > len(self._bytes)
        if renewed:
            self._make(num_bytes, on_cuda)
        for file in files:
            place = file.start
            for piece in file.pieces:
                source = bytes_of(local_part(tensors[piece.name]))
                self._bytes[place : place + piece.num_bytes].copy_(source, non_blocking=self._pinned)
                place += piece.num_bytes
        if on_cuda:
            torch.cuda.current_stream().synchronize()
        return renewed

    def _make(self, num_bytes: int, pinned: bool) -> None:
        self.free()
        self.descriptor = processes.anonymous_file("longtake-checkpoint")
        os.ftruncate(self.descriptor, num_bytes)
        self._map = mmap.mmap(self.descriptor, num_bytes)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned = pinned and pin(self._bytes)

    def free(self) -> None:
        """Give the memory back."""
        if self._bytes is None:
            return
        if self._pinned:
            unpin(self._bytes.data_ptr())
            self._pinned = False
        os.close(self.descriptor)
        self.descriptor, self._bytes, self._map = -1, None, None


class _WriterProcess:
    """The process beside the run."""

    def __init__(self, descriptor: int) -> None:
        # As a file and without site-packages: `-m` would import this package, and torch with it.
        numbers = [str(int(number)) for number in (descriptor, *processes.parent_facts())]
        with processes.born_deaf():
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", writer.__file__, *numbers],
                env={**os.environ, "PYTHONPATH": str(Path(longtake.__file__).parents[1])},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[descriptor],
                start_new_session=True,  # where a terminal is closed, what becomes of the save is for the run to say
                text=True,
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, request: Mapping[str, Any]) -> None:
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the next answer; an error where the process is gone."""
        line = self._process.stdout.readline()
        if line.endswith("\n"):
            return json.loads(line)
        ended = processes.how_it_ended(self._process.wait())
        return {"error": f"its background writer ended ({ended}); is this machine out of memory?", "errno": None}

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@dataclass
class _Job:
    """One save in the hands of the writer; a thread takes its answers."""

    process: _WriterProcess
    request: Mapping[str, Any]
    disk_sentence: Callable[[OSError], str]
    then: Callable[[], object]

    def __post_init__(self) -> None:
        self.written: Future[None] = Future()  # this rank's files are on the disk, or UserError
        self.ended: Future[None] = Future()  # on rank 0: the checkpoint is complete, or UserError
        self.process.send(self.request)
        threading.Thread(target=self._follow, name="checkpoint", daemon=True).start()

    @property
    def failed(self) -> bool:
        """Whether this rank's part has failed, as far as is known."""
        return any(future.done() and future.exception() is not None for future in (self.written, self.ended))

    def _follow(self) -> None:
        try:
            self._take(self.process.answer())
            self.written.set_result(None)
            if self.request["rank"] == 0:
                self._take(self.process.answer())
                self.then()
            self.ended.set_result(None)
        except Exception as error:
            fault = error if isinstance(error, UserError) else UserError(f"{self.request['target']}: {error}")
            for future in (self.written, self.ended):
                if not future.done():
                    future.set_exception(fault)

    def _take(self, answer: Mapping[str, Any]) -> None:
        """Raise `UserError` for an answer that is an error."""
        if "error" in answer and answer["errno"] is not None:
            raise UserError(self.disk_sentence(OSError(answer["errno"], answer["error"])))
        if "error" in answer:
            raise UserError(f"{self.request['target']}: was not saved: {answer['error']}")
