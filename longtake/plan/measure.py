"""Measured rates of this machine by kind of work: timed in seconds at the shapes of a planned run."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.contracts import Conditions, UserError
from longtake.encoders.cost import on_meta, pieces_of
from longtake.models.attention import Attention
from longtake.models.attention_kernels import flash_attention_restored
from longtake.models.build import denoiser_class
from longtake.models.config import Backend
from longtake.models.failures import Report, failure_of, report_to
from longtake.models.trace import Trace, meta_conditions
from longtake.parallel.collectives import all_gather_single
from longtake.parallel.host import tune_host
from longtake.parallel.mesh import TokenPeers
from longtake.parallel.shard import cut_among
from longtake.parallel.world import World
from longtake.plan import timing
from longtake.plan.block_traces import one_of_each_kind
from longtake.plan.machine import CPU, Machine
from longtake.plan.rates import Rates, measured_rates
from longtake.plan.run import RunPlan
from longtake.plan.work import Work, read_layout
from longtake.processes import physical_bytes
from longtake.system.encoders import device_dtype
from longtake.track.devices import Gpu, gpu_named

_CALLS, _PRODUCTS = 3, 3  # timed calls of each, after one; sizes of products, those of most FLOPs
_MOST_FLOPS = {"cuda": 3e13, "cpu": 4e9}  # of one call; larger shapes are cut to it
_MOST_BYTES = {"cuda": 1 << 30, "cpu": 1 << 25}  # of one tensor that is copied
_CHAIN = 100  # small kernels in a row


def measure_rates(plan: RunPlan, world: World, say: Callable[[str], None]) -> Rates:
    """Return the rates of this process's device at the run's costliest shapes; that of links where several processes
    run. `say` prints why a kernel fails. Collective."""
    work, device = plan.work, world.device
    if device.type == "cpu":
        tune_host(work.config.cpu_threads)
    dtype = device_dtype(work.config.dtype, device)
    longest = max(plan.entries, key=lambda entry: entry.tokens * entry.bucket.batch_size)
    layout = plan.layout.at_degree(longest.sequence)
    seen = _operations(plan, longest.bucket, layout)
    time_of = partial(_seconds, device)
    (shapes, _), *_ = seen["attention"].most_common(1)
    products = _products(seen["products"], device, dtype, time_of)
    convolved = _convolutions(plan, longest.bucket.shape, device, time_of)
    stream = dtype.itemsize * longest.bucket.batch_size * longest.tokens * work.model.head_dim
    stream *= denoiser_class(work.model).heads(work.model)
    return Rates(
        products=products,
        attention={work.model.head_dim: _attention(work.model.attention, shapes, device, dtype, time_of, say)},
        convolutions=convolved or products,
        copies=_copies(min(stream, _MOST_BYTES[device.type]), device, dtype, time_of),
        links=_links(world, time_of),
        host=_host(time_of) if device.type == "cuda" else None,
        launch=_launch(device),
        said=f"measured here on {datetime.now(UTC):%Y-%m-%d}, {_name(device)}",
    )


def device_here(device: torch.device | None = None) -> str:
    """Return the name that `--gpu` uses for the device of this process."""
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    return gpu_named(torch.cuda.get_device_name(device)).name if on_gpu else CPU


def words_of_here(work: Work) -> str | None:
    """Memory and time of a step on this machine without a GPU, as one process; None where it has one."""
    if torch.cuda.is_available():
        return None
    device = device_named(CPU, measures=True)
    place = f"this machine: no GPU, {device.memory_gib:.1f} GiB of memory"
    try:
        layout = read_layout(work.config, 1, 1, CPU)
    except UserError as error:
        return f"{place}; {error}"
    worst = max(work.entries, key=lambda bucket: work.memory(bucket, layout).total)
    needs = work.memory(worst, layout).total / 2**30
    step = f"{place}; a step of {worst.resolution}/{worst.num_frames}f takes {needs:.1f} GiB, which"
    if needs > device.memory_gib:
        return f"{step} does not fit; --tiny tries a small model here"
    step += " fits"
    if (rates := measured_rates(CPU)) is None:
        return f"{step}; `longtake plan RUN --measure` times it"
    return f"{step}; {work.time(worst, layout, Machine(device, measured=rates)).seconds:.3g} s"


def device_named(gpu: str, measures: bool = False) -> Gpu:
    """Return a kind of GPU; or this machine's processor, whose peak is what products were measured to reach. Raises
    `UserError` for one that was not measured, unless it is about to be."""
    if gpu != CPU:
        return gpu_named(gpu)
    rates = measured_rates(CPU)
    if rates is None and not measures:
        raise UserError(f"--gpu {CPU}: nothing is known of this processor; measure it: longtake plan RUN --measure")
    peak, copies = (rates.products, rates.copies) if rates else (1e11, 1e10)
    return Gpu(CPU, CPU, peak, physical_bytes() / 2**30, copies, copies)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"


class _Operations(Trace):
    """Notes what products, attention (queries and keys [B, L, N, K]) and convolutions are called with, and their
    FLOPs."""

    def __init__(self, *known: Any) -> None:
        super().__init__(*known)
        self.seen: dict[str, Counter[Any]] = defaultdict(Counter)

    def saw(self, operation: Any, args: Sequence[Any], out: Any, flops: int) -> None:
        name, tensors = operation._opname, [tuple(one.shape) for one in args if isinstance(one, Tensor)]
        if name in ("mm", "addmm"):
            (m, k), (_, n) = tensors[-2:]
            self.seen["products"][m, k, n] += flops
        elif flops and "attention" in name:
            ours = operation.namespace == "longtake"  # PyTorch's own has heads before tokens
            self.seen["attention"][*((b, *(one if ours else one[::-1]), k) for b, *one, k in tensors[:2])] += flops
        elif name == "convolution":
            self.seen["convolutions"][*tensors[:2], *map(tuple, args[3:6])] += flops


def _operations(plan: RunPlan, bucket: Any, layout: Any) -> dict[str, Counter[Any]]:
    """Sizes and FLOPs by kind, of a forward with one block of each kind."""
    work, upkeep = plan.work, layout.upkeep
    config, sizes = work.model, work.micro_batch(bucket)
    _, model = one_of_each_kind(config, upkeep, layout.compute_bytes)
    if layout.peers > 1:
        heads = denoiser_class(config).heads(config)
        cut_among(model, TokenPeers.counted(layout.sequence, layout.tensor, layout.sequence_attention, heads))
    x = torch.empty(sizes.batch, *sizes.latent, device="meta")
    return operations_of(model, x, meta_conditions(config, sizes.latent, sizes.text_tokens, sizes.batch))


def operations_of(model: nn.Module, x: Tensor, conditions: Conditions) -> dict[str, Counter[Any]]:
    """Return the same of a denoiser and its input [B, C, F, h, w] on the meta device."""
    with torch.no_grad(), _Operations(model) as trace:
        model(x, x[:, 0, 0, 0, 0], conditions)
    return trace.seen


def _products(seen: Counter[Any], device: torch.device, dtype: torch.dtype, time_of: Callable[..., float]) -> float:
    """Return the products of most FLOPs, forward and for both gradients."""
    done = taken = 0.0
    for (m, k, n), flops in seen.most_common(_PRODUCTS):
        rows = max(1, min(m, int(_MOST_FLOPS[device.type] / (2 * k * n))))
        seconds = sum(map(time_of, product_calls(rows, k, n, device, dtype)))
        done, taken = done + 3 * flops, taken + seconds * flops / (2 * rows * k * n)
    return done / taken


def product_calls(rows: int, k: int, n: int, device: torch.device, dtype: torch.dtype) -> list[Callable[[], Tensor]]:
    """Return a product [rows, k] x [k, n] of a linear layer, and those of the gradients of its input and of
    its weight."""
    x, w, y = (torch.randn(*size, device=device, dtype=dtype) for size in ((rows, k), (n, k), (rows, n)))
    return [lambda: x @ w.t(), lambda: y @ w, lambda: y.t() @ x]


def _attention(
    backend: Backend,
    shapes: Any,
    device: torch.device,
    dtype: torch.dtype,
    time_of: Callable[..., float],
    say: Callable[[str], None],
) -> tuple[float, float]:
    """FLOP/s forward and backward of the run's attention."""
    (batch, queries, heads, width), (_, keys, *_) = shapes
    batch = max(1, min(batch, int(_MOST_FLOPS[device.type] / (4 * heads * queries * keys * width))))
    whole = 4 * batch * heads * queries * keys * width
    part = min(1.0, _MOST_FLOPS[device.type] / whole)
    queries, keys = (max(16, int(length * part**0.5)) for length in (queries, keys))
    q, k, v = (
        torch.randn(batch, n, heads, width, device=device, dtype=dtype, requires_grad=True)
        for n in (queries, keys, keys)
    )
    rates = attention_rates(q, k, v, time_of, report_to(say, "attention"), [backend])
    if backend not in rates:
        raise UserError(
            f"--measure: attention = {backend!r} did not run {tuple(q.shape)} forward and backward; see above; "
            "choose another, or leave --measure out"
        )
    return rates[backend]


def attention_rates(
    q: Tensor, k: Tensor, v: Tensor, time_of: Callable[..., float], report: Report, backends: Sequence[Backend]
) -> dict[Backend, tuple[float, float]]:
    """FLOP/s forward and backward over q, k, v [B, L, N, K] by backend. time_of: returns the seconds of a call.
    `report` is called for those that fail."""
    found = {}
    flops = 4 * q.numel() * k.shape[1]
    for name in backends:
        kernel = Attention(name)
        try:
            with flash_attention_restored():
                out = kernel(q, k, v)
                grad = torch.randn_like(out)
                there = time_of(partial(kernel, q, k, v))
                back = time_of(partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True))
        except RuntimeError as error:  # not at this shape, or out of memory
            report(name, failure_of(error, q.device))
            continue
        found[name] = flops / there, 2.5 * flops / back
    return found


def _convolutions(
    plan: RunPlan, shape: tuple[int, int, int], device: torch.device, time_of: Callable[..., float]
) -> float | None:
    """FLOP/s of the autoencoder's costliest convolution; None where it has none."""
    section = plan.work.config.ae
    video = torch.empty(1, 3, *shape, device="meta")
    with torch.no_grad(), _Operations(video) as trace:
        pieces_of(on_meta(section), video)[0].run()
    for (given, weight, *options), flops in trace.seen["convolutions"].most_common(1):
        dtype = device_dtype(section.dtype, device)
        rows = max(weight[-2], int(given[-2] * min(1.0, _MOST_FLOPS[device.type] / flops)))
        x = torch.randn(*given[:-2], rows, given[-1], device=device, dtype=dtype)
        w = torch.randn(*weight, device=device, dtype=dtype)
        stride, padding, dilation = options
        convolve = F.conv3d if len(weight) == 5 else F.conv2d
        run = partial(convolve, x, w, None, stride, padding, dilation)
        with torch.no_grad():
            return 2 * run().numel() / weight[0] * w.numel() / time_of(run)
    return None


def _copies(num_bytes: int, device: torch.device, dtype: torch.dtype, time_of: Callable[..., float]) -> float:
    """Return the bandwidth of kernels between matmuls, in bytes per second: sums, scales, norms, activations, casts."""
    rows = max(1, num_bytes // dtype.itemsize // 1024)
    x, y = (torch.randn(rows, 1024, device=device, dtype=dtype) for _ in range(2))
    kernels: dict[Callable[[], Tensor], int] = {
        lambda: x + y: 3,
        lambda: x * y[:1]: 2,
        lambda: F.gelu(x, approximate="tanh"): 2,
        lambda: F.rms_norm(x, (1024,)): 2,
        lambda: x.clone(): 2,
    }
    with torch.no_grad():
        return sum(kernels.values()) * x.nbytes / sum(map(time_of, kernels))


def _links(world: World, time_of: Callable[..., float]) -> float | None:
    """Bytes/s that a process takes in where all gather from all."""
    if world.size == 1:
        return None
    part = torch.ones((1 << 26) // world.size, device=world.device)
    whole = part.new_empty(part.numel() * world.size)
    seconds = time_of(partial(all_gather_single, whole, part))
    return (whole.nbytes - part.nbytes) / seconds


def _host(time_of: Callable[..., float]) -> float:
    x = torch.empty(1 << 26, dtype=torch.float32, pin_memory=True)
    return x.nbytes / time_of(lambda: x.to("cuda", non_blocking=True))


def _launch(device: torch.device) -> float:
    """Seconds a kernel of many small ones, forward and backward."""
    w, x = torch.ones(64, device=device, requires_grad=True), torch.ones(64, device=device)

    def run() -> None:
        y = x
        for _ in range(_CHAIN):
            y = y * w
        y.sum().backward()

    return _typical(partial(_elapsed, device), run) / (4 * _CHAIN)  # backward: two products, and a sum


def clock(device: torch.device) -> float:
    """Seconds, once the device has done all it was asked to; on a CPU those that its threads were given, so that other
    work beside them does not count."""
    return timing.clock(device) if device.type == "cuda" else time.process_time() / torch.get_num_threads()


def _elapsed(device: torch.device, run: Callable[[], Any]) -> float:
    """Seconds of one call, with the host's time for launching it."""
    start = clock(device)
    run()
    return clock(device) - start


def _seconds(device: torch.device, run: Callable[[], Any]) -> float:
    """Seconds of the device for a call, the median of a few."""
    return _typical(
        partial(timing.seconds_of, device=device) if device.type == "cuda" else partial(_elapsed, device), run
    )


def _typical(seconds_of: Callable[[Callable[[], Any]], float], run: Callable[[], Any]) -> float:
    """Return the median of a few calls, after one."""
    return median([seconds_of(run) for _ in range(1 + _CALLS)][1:])
