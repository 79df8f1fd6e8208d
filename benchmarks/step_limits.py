"""What a step is held against: the limit of its matrix products and attention, and where the device's time goes."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.nn.attention.varlen import varlen_attn
from torch.profiler import ProfilerActivity, profile

from longtake.models.attention import Attention, fault_of
from longtake.models.build import build_denoiser
from longtake.models.config import Backend, ModelSection
from longtake.models.failures import Report
from longtake.models.trace import meta_conditions
from longtake.plan import measure
from longtake.plan.timing import seconds_of

KERNELS: tuple[Backend, ...] = ("cudnn", "flash", "fa3", "efficient")  # of attention on a GPU
GEMM_SECONDS = 8.0  # clocks fall within the first seconds of full load; a step runs at what remains
_QUEUED_ROUNDS = 8  # launched ahead of the device
_SPAN = re.compile(r"## Call CompiledFxGraph|Torch-Compiled Region")  # of kernels, which are listed by themselves
_FUSED = r"triton_(?!tem)|\w*cpp_fused"  # Inductor names these by all operators that are in them
CLASSES = {  # the first that is found in the name of another kernel, on a CPU of an operator
    "attention": r"flash|fmha|sdpa|attention|softmax|dot_do_o",
    "convolution": r"conv(?!ert)|fprop|dgrad|wgrad|winograd",
    "gemm": r"triton_tem|gemm|nvjet|cutlass|cublas|_scaled_mm|::addmm|::mm|::bmm|::linear|matmul",
    "copy": r"memcpy|memset|copy|nccl|::cat|::clone|::contiguous|::fill_|::zero_",
}


def time_by_class(run: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Milliseconds of the device in one call, by class of kernel; what has none is "elementwise"."""
    on_gpu, found = device.type == "cuda", defaultdict(float)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds) as trace:
        run()
        if on_gpu:
            torch.cuda.synchronize(device)
    for event in trace.key_averages():
        if on_gpu and (event.device_type != DeviceType.CUDA or event.is_user_annotation or _SPAN.match(event.key)):
            continue
        time = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        found[class_of(event.key)] += time / 1e3
    return dict(found)


def kernel_seconds(run: Callable[[], object], names: Collection[str]) -> dict[str, float]:
    """Seconds on the GPU of the kernels of these names in one call, those alone that ran; nothing without a GPU."""
    if not torch.cuda.is_available():
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    return {one.key: one.self_device_time_total / 1e6 for one in trace.key_averages() if one.key in names}


def class_of(kernel: str) -> str:
    """One of `CLASSES`, or "elementwise"."""
    name = kernel.lower()
    classes = {} if re.match(_FUSED, name) else CLASSES
    return next((kind for kind, words in classes.items() if re.search(words, name)), "elementwise")


def attention_rates(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
    report: Report,
    joined: bool = False,
) -> dict[str, Any]:
    """FLOP/s of attention over q, k, v of `shape` (B, L, N, K), forward and backward, by kernel; on a CPU of the one it
    has. `joined`: v is a slice of one buffer of all three. `report` is called for a kernel that fails."""
    batch, length, heads, width = shape
    buffer = torch.randn(batch, length, 3, heads, width, device=device, dtype=dtype)
    q, k, v = buffer.unbind(2)
    q, k, v = (x.detach().requires_grad_() for x in (q.contiguous(), k.contiguous(), v if joined else v.contiguous()))
    del buffer
    usable = []
    for name in KERNELS if device.type == "cuda" else ():
        fault = fault_of(name, device, dtype, width)
        if fault is None:
            usable.append(name)
        else:
            report(name, fault)
    found = measure.attention_rates(
        q, k, v, lambda run: median_seconds(run, device, seconds), report, usable or ["auto"]
    )
    return {name: {"forward": there, "backward": back} for name, (there, back) in found.items()}


def gemm_rate(
    model: ModelSection,
    latent: tuple[int, int, int, int],
    text_tokens: int,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
    frozen: bool = False,
) -> dict[str, Any]:
    """FLOP/s of the GEMM in which a forward of `model` spends most FLOPs, with those of its gradients, alone on the
    device for so many seconds. frozen: without the gradient of the weights."""
    conditions = meta_conditions(model, latent, text_tokens, batch)
    with torch.device("meta"):
        denoiser = build_denoiser(model)
    operations = measure.operations_of(denoiser, torch.empty(batch, *latent, device="meta"), conditions)
    ((rows, width, out), _), *_ = operations["products"].most_common(1)
    calls = measure.product_calls(rows, width, out, device, dtype)[: 2 if frozen else 3]
    with GpuWatch() as watch:
        each = sustained_seconds(calls, device, seconds)
    flops = len(calls) * 2 * rows * width * out
    return {"shape": [rows, width, out], "flops_per_second": flops / each, "seconds": seconds, **watch.figures}


def sustained_seconds(calls: Sequence[Callable[[], object]], device: torch.device, seconds: float) -> float:
    """Seconds of one round of `calls`, launched for so long without a pause; at least one round, after another."""
    for call in calls:
        call()
    events: deque[torch.cuda.Event] = deque()
    begun, rounds = time.perf_counter(), 0
    start = measure.clock(device)
    while rounds == 0 or time.perf_counter() - begun < seconds:
        for call in calls:
            call()
        rounds += 1
        if device.type == "cuda":
            events.append(torch.cuda.Event())
            events[-1].record()
            if len(events) > _QUEUED_ROUNDS:
                events.popleft().synchronize()
    return (measure.clock(device) - start) / rounds


def limit_seconds(
    flops: float, attention: float, rates: dict[str, Any], gemm: float | None, frozen: bool = False
) -> float | None:
    """Seconds of a step of nothing but matrix products and the fastest attention. `flops`: of the model, forward and
    backward; `attention`: those of attention among them; `gemm`: FLOP/s that `gemm_rate` measured. frozen: weights have
    no gradients, which are a third of the products. None without rates."""
    if not rates or gemm is None:
        return None
    products = (flops - attention) * (2 / 3 if frozen else 1)
    return products / gemm + min(attention_seconds(attention / 3, rate) for rate in rates.values())


def attention_seconds(flops: float, rate: dict[str, float]) -> float:
    """Of so many FLOPs forward, and of the backward, which makes 2.5 times as many."""
    return flops / rate["forward"] + 2.5 * flops / rate["backward"]


def emulate_peers(model: nn.Module, peers: int) -> None:
    """Makes attention that of one of `peers` sequence peers (Ulysses): tokens of all, a share of the heads. What they
    would exchange is copied, so each exchange costs a pass over memory and none over links."""
    for module in model.modules():
        if isinstance(module, Attention) and peers > 1:
            module.forward = partial(_as_peer, module.forward, peers)


def _as_peer(forward: Callable[..., Tensor], peers: int, *joined: Tensor) -> Tensor:
    def to_heads(x: Tensor) -> Tensor:  # [B, L, N, K] -> [B, P L, N / P, K]
        batch, length, heads, width = x.shape
        x = x.reshape(batch, length, peers, heads // peers, width)
        return x.transpose(1, 2).reshape(batch, peers * length, heads // peers, width)

    out = forward(*map(to_heads, joined))
    batch, length, heads, width = out.shape
    out = out.reshape(batch, peers, length // peers, heads, width).transpose(1, 2)
    return out.reshape(batch, length // peers, peers * heads, width)


def pack_samples(model: nn.Module, lengths: Sequence[int], device: torch.device) -> None:
    """Makes attention that of samples of these lengths which follow each other in one sequence; without the kernel,
    on a CPU, sample by sample."""
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if device.type == "cuda":
            return varlen_attn(q[0], k[0], v[0], ends, ends, longest, longest)[None]
        samples = zip(*(x.transpose(1, 2).split(list(lengths), dim=2) for x in (q, k, v)), strict=True)
        return torch.cat([F.scaled_dot_product_attention(*sample) for sample in samples], dim=2).transpose(1, 2)

    for module in model.modules():
        if isinstance(module, Attention):
            module.forward = attend


def samples_of(run: Callable[[], object], device: torch.device, seconds: float, repeats: int) -> list[float]:
    """Seconds of the device for calls: at least `repeats`, and as many as run in `seconds`."""
    found: list[float] = []
    start = time.perf_counter()
    while len(found) < repeats or time.perf_counter() - start < seconds:
        found.append(seconds_of(run, device))
    return found


def median_seconds(run: Callable[[], object], device: torch.device, seconds: float, repeats: int = 3) -> float:
    """The median of `samples_of`, once it has run."""
    run()
    return median(samples_of(run, device, seconds, repeats))


class GpuWatch:
    """Clock and power of the first GPU while a context lasts: `figures` has their medians, nothing without a GPU."""

    _QUERY = (
        "nvidia-smi",
        "--query-gpu=clocks.sm,power.draw",
        "--format=csv,noheader,nounits",
        "-i",
        "0",
        "-lms",
        "200",
    )

    def __enter__(self) -> GpuWatch:
        self.figures: dict[str, float] = {}
        self._lines: list[str] = []
        self._process = None
        if torch.cuda.is_available():
            self._process = subprocess.Popen(self._QUERY, stdout=subprocess.PIPE, text=True)
            self._reader = threading.Thread(target=lambda: self._lines.extend(self._process.stdout), daemon=True)
            self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        self._reader.join(5)
        pairs = [line.split(",") for line in self._lines if line.count(",") == 1]
        if pairs:
            self.figures = {"clock_mhz": _median_of(pairs, 0), "watts": _median_of(pairs, 1)}


def _median_of(pairs: list[list[str]], column: int) -> float | None:
    """Of what are numbers: where a GPU does not tell, nvidia-smi says [N/A]."""
    numbers = [float(pair[column]) for pair in pairs if re.fullmatch(r"[\d. ]+", pair[column].strip())]
    return median(numbers) if numbers else None
