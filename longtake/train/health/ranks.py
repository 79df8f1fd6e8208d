"""Time for which each rank computes and waits for data by itself; the time of a step is the same on all of them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtake.parallel.collectives import all_gather_single

if TYPE_CHECKING:
    from longtake.system.build import System
    from longtake.train.stream import StepInput, StepStream


class RankTimes:
    """Timer of the forward of the model's blocks, where a rank does not wait for others: weights are gathered before a
    block. Only sequence- and tensor-parallel ranks wait for each other inside. All ranks make one together."""

    def __init__(self, system: System, stream: StepStream, every: int) -> None:
        """`every`: steps between two readings; in a world of one there are none."""
        self._system, self._stream, self._every = system, stream, every
        self._marks: deque[list[tuple[Any, Any]]] = deque([[]])  # of the last steps: begin and end of each block
        self._own: deque[float] = deque()  # 10^12 FLOPs of their forwards on this rank
        self._paces: list[float] = []  # seconds for 10^12 FLOPs, of the steps since the last reading
        self._work: list[float] = []  # 10^12 FLOPs of a step, mean over ranks
        self._waits: list[float] = []
        self._cuda = system.device.type == "cuda"
        if stream.world.size > 1:
            for denoiser in (one.denoiser for one in system.experts):
                for block in (block for name in denoiser.blocks for block in denoiser.get_submodule(name)):
                    block.forward = partial(self._timed, block.forward)

    def _timed(self, forward: Callable[..., Any], *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        begin = self._now()
        out = forward(*args)
        self._marks[-1].append((begin, self._now()))
        return out

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def step(self, step: StepInput, number: int) -> Tensor | None:
        """Take in a step whose forwards have been started, its number `number`. In every `every`-th, float32 [R, 3] of
        the steps before: seconds of a step's share of forwards, seconds of waiting for data, 10^12 FLOPs of a share."""
        world, peers = self._stream.world, self._stream.peers
        if world.size == 1:
            return None

        def work(slot: Any) -> float:
            return self._system.flops(slot.bucket.shape) * slot.bucket.batch_size / 1e12

        self._own.append(sum(work(turn.slot) / peers.count(turn.slot.bucket) for turn in step.turns))
        self._work.append(sum(map(work, step.slots)) / world.size)
        self._waits.append(step.wait_seconds)
        self._marks.append([])
        if len(self._own) > 2:  # that step's results have been read, so its events are past
            spans, own = self._marks.popleft(), self._own.popleft()
            self._paces.append(sum(b.elapsed_time(e) / 1e3 if self._cuda else e - b for b, e in spans) / own)
        if number % self._every or not self._paces:
            return None
        share = fmean(self._work)
        figures = median(self._paces) * share, fmean(self._waits), share
        self._paces, self._work, self._waits = [], [], []
        device = self._system.device
        own = torch.stack([torch.full((), value, device=device) for value in figures])  # no copy to wait for
        gathered = torch.empty(world.size * len(figures), device=device)
        # A collective of its own: in that of the step's sums, these would change the order in which others are added.
        all_gather_single(gathered, own)
        return gathered.view(world.size, -1)
