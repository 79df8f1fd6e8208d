"""The scan of a TTT layer and its gradient by Triton's kernels: what must wait is one chain, the rest is parallel.

A segment of mini-batches takes two launches forward. `learn`, one program for a sample and head, carries the network
through it in float32 and leaves a copy before each mini-batch; `read` lets all its queries read these copies at once.
Backward, from the last segment to the first, `learn` makes the copies again, `read_backward` gives at once what the
queries say of each copy, `prepare_backward` computes at once what depends on the copies alone, and `learn_backward`,
one program for a sample and head, carries the gradient back. Nothing waits for the device. Names and packing are those
of `ttt_chunked`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from longtake.models import ttt_kernels as kernels

_WARPS, _TILE = 8, 64  # hidden units of a tile


def forward(
    q: Tensor, k: Tensor, target: Tensor, rate: Tensor, gamma: Tensor, beta: Tensor, state: Tensor, hidden: int,
    mini_batch: int, segment: int, keep: bool, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `ttt_chunked.forward` with Triton kernels."""
    q, k, target, rate, gamma, beta = (tensor.contiguous() for tensor in (q, k, target, rate, gamma, beta))
    launch = _SegmentLauncher(q, hidden, mini_batch, segment, eps)
    out = torch.empty_like(q)
    kept = state.new_empty(launch.segments if keep else 0, q.shape[0], *state.shape)
    running = state.expand(q.shape[0], *state.shape).clone()
    for number in range(launch.segments):
        if keep:
            kept[number] = running
        launch.learn(number, k, target, rate, gamma, beta, running)
        launch(kernels.read, number, q, gamma, beta, launch.nets, launch.biases, out, parallel=True)
    return out, kept


def backward(
    grad: Tensor, q: Tensor, k: Tensor, target: Tensor, rate: Tensor, gamma: Tensor, beta: Tensor, kept: Tensor,
    hidden: int, mini_batch: int, segment: int, eps: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Compute `ttt_chunked.backward` with Triton kernels."""
    q, k, target, rate, gamma, beta, grad = (tensor.contiguous() for tensor in (q, k, target, rate, gamma, beta, grad))
    launch = _SegmentLauncher(q, hidden, mini_batch, segment, eps)
    grads = [torch.empty_like(tensor) for tensor in (q, k, target, rate)]
    later = torch.zeros_like(kept[0])
    net_grads = kept.new_empty(launch.count + 1, *kept.shape[1:])  # by queries: row i is that of nets[i]
    net_grads[0] = 0.0
    norm_grads = gamma.new_empty(launch.count, *kept.shape[1:3], 2, q.shape[-1])
    norm_sum = gamma.new_zeros(*kept.shape[1:3], 2, q.shape[-1])
    prepared, work = launch.buffers_of_backward()
    for number in reversed(range(launch.segments)):
        steps = launch.steps(number)
        launch.learn(number, k, target, rate, gamma, beta, kept[number].clone())
        launch(
            kernels.read_backward, number, grad, q, gamma, beta, launch.nets, launch.biases, grads[0], net_grads,
            norm_grads, parallel=True,
        )  # fmt: skip
        launch(
            kernels.prepare_backward, number, k, target, rate, gamma, beta, launch.nets, launch.biases, *prepared,
            parallel=True,
        )  # fmt: skip
        later += net_grads[steps]
        launch(
            kernels.learn_backward, number, k, target, rate, gamma, beta, launch.nets, *prepared, net_grads, later,
            norm_grads, *grads[1:], *work,
        )  # fmt: skip
        norm_sum += norm_grads[:steps].sum(0)
    return (*grads, norm_sum[:, :, 0].sum(0), norm_sum[:, :, 1].sum(0), later.sum(0))


class _SegmentLauncher:
    """Starts kernels for segments of one scan; holds the copies of networks that a segment needs."""

    def __init__(self, q: Tensor, hidden: int, mini_batch: int, segment: int, eps: float) -> None:
        samples, self.tokens, self.heads, width = q.shape
        self.programs, self.mini_batch, self.eps = samples * self.heads, mini_batch, eps
        self.mini_batches = -(-self.tokens // mini_batch)
        self.count = min(segment, self.mini_batches)
        self.segments = -(-self.mini_batches // self.count)
        self.matrices = 2 * width * hidden or width * width
        self.nets = q.new_empty(self.count + 1, samples, self.heads, self.matrices)
        self.biases = q.new_empty(self.count + 1, samples, self.heads, hidden + width, dtype=torch.float32)
        rows, tile = max(16, triton.next_power_of_2(mini_batch)), min(hidden, _TILE) or width
        sizes = {"MINI_BATCH": mini_batch, "ROWS": rows, "K": width, "M": hidden, "TILE": tile}
        self.sizes = {**sizes, "TILES": (hidden or width) // tile}

    def learn(
        self, number: int, k: Tensor, target: Tensor, rate: Tensor, gamma: Tensor, beta: Tensor, running: Tensor
    ) -> None:
        """Carry packed networks [B, N, P] through a segment, in place, and store copies in `nets` and `biases`."""
        self.nets[0].copy_(running[..., : self.matrices])
        self.biases[0].copy_(running[..., self.matrices :])
        self(kernels.learn, number, k, target, rate, gamma, beta, running, self.nets, self.biases)
        running[..., self.matrices :].copy_(self.biases[self.steps(number)])

    def buffers_of_backward(self) -> tuple[list[Tensor], list[Tensor]]:
        """Results of `prepare_backward` for each mini-batch of a segment, and scratch memory of `learn_backward`."""
        # float16 would lose gradients: factors of its products are scaled where they are used
        dtype = torch.bfloat16 if self.nets.dtype == torch.bfloat16 else torch.float32
        width, hidden = self.sizes["K"], self.sizes["M"]
        rows = (self.programs, self.sizes["ROWS"])

        def empty(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
            return self.nets.new_empty(sizes, dtype=dtype)

        z, v = empty(self.count, *rows, width, dtype=torch.float32), empty(self.count, *rows, width)
        prepared = [z, v, *(empty(self.count, *rows, hidden) for _ in range(4))]
        d_v, d_z = empty(*rows, width, dtype=torch.float32), empty(*rows, width)
        return prepared, [d_v, d_z, *(empty(*rows, hidden) for _ in range(3))]

    def steps(self, number: int) -> int:
        """Mini-batches of a segment."""
        return min(self.count, self.mini_batches - number * self.count)

    def __call__(self, kernel: Any, number: int, *tensors: Tensor, parallel: bool = False) -> None:
        steps = self.steps(number)
        grid = (self.programs, steps) if parallel else (self.programs,)
        with torch.cuda.device_of(tensors[0]):
            kernel[grid](
                *tensors, number * self.count, steps, self.tokens, self.heads, self.eps,
                **self.sizes, num_warps=_WARPS, num_stages=1,
            )  # fmt: skip
