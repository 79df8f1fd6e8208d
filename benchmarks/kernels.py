"""Rates of what a step is made of, one by one: matrix products, attention, the autoencoder, T5.

python benchmarks/kernels.py sustained               NCCL with one rank, a copy, a GEMM in a burst and for 8 s
python benchmarks/kernels.py gemm attention          on CUDA products of the 11B model, shapes of all families
python benchmarks/kernels.py varlen                  256px images with padded text and with text of its true length
python benchmarks/kernels.py vae t5                  random weights, 129 x 256 x 256; T5-XXL on 3 and 45 captions
python benchmarks/kernels.py tiles                   129 x 192 x 336 by sizes of tiles, and with compiled blocks
python benchmarks/kernels.py chain                   256 steps of TTT-MLP's scan: microseconds a step
python benchmarks/kernels.py gemm attention varlen vae t5 tiles chain --tiny --device cpu      small

FLOP/s are medians over `--seconds` of each. Products are [M, K] x [K, N]: forward, the gradient of the input and that
of the weight. Attention's backward counts as 2.5 times its forward.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import LAYOUTS, lay_out_weights
from machine import print_table, write_json
from step import Case
from step_limits import GpuWatch, attention_rates, kernel_seconds, median_seconds, sustained_seconds
from step_models import SUBJECTS, with_blocks
from step_run import our_blocks, random_autoencoder

from longtake.encoders.autoencoder_config import HunyuanVAEConfig
from longtake.encoders.cost import autoencoder_cost
from longtake.models.failures import report_to
from longtake.models.ttt import MLP_RATIO
from longtake.models.ttt_scan import ttt_scan
from longtake.parallel.compile import missing_compiler
from longtake.parallel.world import start_world

ROWS, INNER, OUTER = (8960, 17920, 26880), 3072, (3072, 9216, 12288, 15360, 21504)  # 9216: q, k and v in one layer
ATTENTION = (  # B, L, N, K
    (3, 8960, 24, 128),
    (1, 33852, 12, 128),
    (2, 76544, 6, 128),
    (1, 17776, 48, 64),
    (30, 1590, 16, 72),
    (1590, 30, 16, 72),
)
TINY_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 128}


def main() -> None:
    """Measures the parts that are asked for and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=tuple(PARTS))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, help="of each; default: 1 on CUDA")
    parser.add_argument("--frames", type=int, default=129, help="of the video that `vae` encodes")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    arguments.device = torch.device(arguments.device)
    if arguments.seconds is None:
        arguments.seconds = 1.0 if arguments.device.type == "cuda" and not arguments.tiny else 0.0
    lines = []
    with GpuWatch() as watch:
        for part in arguments.parts:
            for line in PARTS[part](arguments):
                lines.append({"part": part, **line})
                print(f"{part}: {line['what']}: {line['ms']:.3f} ms, {line['rate']}", flush=True)
                _write(arguments, lines)  # as they come: what is cut short leaves those before it
    print_table(("part", "what", "ms", "rate"), [_row(line) for line in lines])
    _write(arguments, lines, **watch.figures)


def products(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Linear layers of the 11B model: bf16, and fp8 where the device has it."""
    rows, inner, outer = ((64,), 32, (48,)) if arguments.tiny else (ROWS, INNER, OUTER)
    device, kinds = arguments.device, ["bf16"]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        kinds.append("fp8")
    for m in rows:
        for k, n in [*((inner, width) for width in outer), *((width, inner) for width in outer if width != inner)]:
            for way, (a, b, c) in {"forward": (m, k, n), "dgrad": (m, n, k), "wgrad": (n, m, k)}.items():
                for kind in kinds:
                    seconds = median_seconds(_product(kind, a, b, c, device), device, arguments.seconds)
                    yield _line(f"{way} {kind} [{a}, {b}] x [{b}, {c}]", seconds, 2 * m * k * n)


def _product(kind: str, m: int, k: int, n: int, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randn(*size, device=device, dtype=torch.bfloat16) for size in ((m, k), (n, k)))
    if kind == "bf16":
        return lambda: a @ b.t()
    a, b = (x.to(torch.float8_e4m3fn) for x in (a, b))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)


def sustained(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """NCCL with one rank, a copy, and a GEMM of the 11B model in a burst and for 8 s, with clock and power."""
    device, tiny = arguments.device, arguments.tiny
    rows = 64 if tiny else ROWS[-1]
    start = time.perf_counter()
    with start_world(device.type):
        dist.all_reduce(torch.ones(1, device=device))
        seconds = time.perf_counter() - start
    yield {"what": "first collective of one rank", "ms": 1e3 * seconds, "rate": f"{seconds:.2f} s from its start"}
    x = torch.zeros(1 << (10 if tiny else 30), device=device)
    a, b = (torch.randn(n, 32 if tiny else INNER, device=device, dtype=torch.bfloat16) for n in (rows, OUTER[2]))
    for what, call, seconds in (
        ("copy", x.clone, 0.5),
        ("gemm, burst", lambda: a @ b.t(), 0.2),
        ("gemm, 8 s", lambda: a @ b.t(), 8.0),
    ):
        with GpuWatch() as watch:
            each = sustained_seconds([call], device, 0.0 if tiny else seconds)
        if what == "copy":
            line = {"what": what, "ms": 1e3 * each, "rate": f"{2 * x.nbytes / each / 1e12:.2f} TB/s"}
        else:
            line = _line(what, each, 2 * rows * a.shape[1] * len(b))
        yield {**line, **watch.figures}


def attention(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each kernel at each shape, v by itself and, at less than 50,000 tokens, as a slice of one buffer with q and k."""
    report = report_to(partial(print, flush=True), "attention")
    for shape in ((2, 64, 2, 16),) if arguments.tiny else ATTENTION:
        flops = 4 * shape[0] * shape[1] ** 2 * shape[2] * shape[3]
        for joined in (False, True) if shape[1] < 50_000 else (False,):
            rates = attention_rates(shape, torch.bfloat16, arguments.device, arguments.seconds, report, joined)
            for kernel, rate in rates.items():
                name, facts = f"{kernel} {shape}{', v a slice' * joined}", {"width": shape[-1], "rates": rate}
                yield _line(f"{name}, forward", flops / rate["forward"], flops) | facts
                yield _line(f"{name}, backward", 2.5 * flops / rate["backward"], 2.5 * flops) | facts


def varlen(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Blocks of the 11B model, forward and backward, on 256px images: text padded to 512 tokens, or of its true length
    in one packed sequence. In the packed one all samples share a modulation, so a gather for each token is missing."""
    size, blocks, batch, padded = ("tiny", (1, 1), 2, 16) if arguments.tiny else ("11b", (2, 4), 24, 512)
    model, side = with_blocks(SUBJECTS["flux"].sizes[size].model, blocks), 32 if arguments.tiny else 256
    device, image = arguments.device, (side // 16) ** 2
    for mean in (None, padded // 8, padded // 2):  # tokens of text
        lengths = None if mean is None else [mean // 2 + mean * i // (batch - 1) for i in range(batch)]
        if lengths is None:
            case = Case(model, model, (1, side, side), batch, padded)
        else:  # images as frames of one sample
            case = Case(model, model, (4 * batch - 3, side, side), 1, sum(lengths))
            lengths = [image + length for length in lengths]
        run = our_blocks(case, device, torch.bfloat16, (0, 0), device.type == "cuda", lengths)
        seconds = median_seconds(run, device, arguments.seconds)
        del run
        what = f"{batch} images, text {f'padded to {padded}' if mean is None else f'of {mean} tokens on average'}"
        found = {"what": what, "ms": 1e3 * seconds, "text_tokens": mean or padded, "packed": mean is not None}
        yield {**found, "samples_per_second": batch / seconds, "rate": f"{batch / seconds:.1f} images/s"}


def autoencoder(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """HunyuanVideo's encoder by memory layout: as it is, compiled, and with cuDNN's search."""
    small = {"block_out_channels": (32,) * 4, "layers_per_block": 1} if arguments.tiny else {}
    shape, device = (5, 32, 32) if arguments.tiny else (arguments.frames, 256, 256), arguments.device
    torch.backends.cudnn.benchmark_limit = 3  # algorithms tried for each convolution, where that is searched
    ways = ["", ", cudnn.benchmark"] if missing_compiler(device) else ["", ", compiled", ", cudnn.benchmark"]
    for way, name in product(ways, LAYOUTS):
        section = HunyuanVAEConfig(**small, compile=way == ", compiled")
        torch.backends.cudnn.benchmark = way == ", cudnn.benchmark"
        encoder = random_autoencoder(section, device, torch.bfloat16)
        lay_out_weights(encoder.encoding.values(), name)
        video = torch.rand(1, 3, *shape, device=device).to(torch.bfloat16)
        with torch.inference_mode():
            seconds = median_seconds(partial(encoder.posterior, video), device, arguments.seconds)
        yield _line(f"{name}{way} {shape}", seconds, autoencoder_cost(section, shape, 1).flops)
    torch.backends.cudnn.benchmark = False


def tiles(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """HunyuanVideo's encoder on the widest frames of Open-Sora 2.0's first stage: published tiles and equal ones, and
    these by compiled blocks, whose compilation is not in the time."""
    small = {"block_out_channels": (32,) * 4, "layers_per_block": 1} if arguments.tiny else {}
    shape = (5, 32, 48) if arguments.tiny else (129, 192, 336)
    equal = {"sample_size": "auto"}
    ways = {"tiles of 256": {}, "equal": equal, "equal, compiled": equal | {"compile": True}}
    if missing_compiler(arguments.device):
        del ways["equal, compiled"]
    for name, own in ways.items():
        section = HunyuanVAEConfig(**small, **own)
        encoder = random_autoencoder(section, arguments.device, torch.bfloat16)
        video = torch.rand(1, 3, *shape, device=arguments.device).to(torch.bfloat16)
        with torch.inference_mode():
            seconds = median_seconds(partial(encoder.posterior, video), arguments.device, arguments.seconds)
        yield _line(f"{name} {shape}", seconds, autoencoder_cost(section, shape, 1).flops)


def t5(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """T5 v1.1 XXL's encoder with random weights."""
    from longtake.encoders.text import T5_XXL, t5_module

    facts, length = (T5_XXL | TINY_T5, 16) if arguments.tiny else (T5_XXL, 512)
    with torch.device("meta"):
        module = t5_module(facts).to(torch.bfloat16).eval()
    module = module.to_empty(device=arguments.device)
    for tensor in module.state_dict().values():
        tensor.normal_(0, 0.02)
    linear = sum(p.numel() for name, p in module.named_parameters() if p.dim() == 2 and "embed" not in name)
    for captions in (1, 3) if arguments.tiny else (3, 45):
        ids = torch.randint(facts["vocab_size"], (captions, length), device=arguments.device)
        with torch.inference_mode():
            seconds = median_seconds(partial(module, input_ids=ids), arguments.device, arguments.seconds)
        scores = 4 * captions * length**2 * facts["d_kv"] * facts["num_heads"] * facts["num_layers"]
        yield _line(f"{captions} captions of {length} tokens", seconds, 2 * linear * captions * length + scores)


def chain(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The scan of TTT-MLP, by how many samples and heads run at once; on CUDA its kernels by themselves too."""
    device, dtype = arguments.device, torch.bfloat16
    steps, width, mini_batch = (4, 16, 4) if arguments.tiny else (256, 64, 64)
    hidden = MLP_RATIO * width
    for programs in (2,) if arguments.tiny else (48, 96, 132, 192):
        rows = 1, steps * mini_batch, programs
        q, k, target = (torch.randn(*rows, width, device=device, dtype=dtype).requires_grad_() for _ in range(3))
        rate = torch.full(rows, 0.1 / (width * mini_batch), device=device)
        norm = torch.ones(programs, width, device=device), torch.zeros(programs, width, device=device)
        sizes = (width, hidden), (1, hidden), (hidden, width), (1, width)
        state = tuple(0.02 * torch.randn(programs, *size, device=device) for size in sizes)
        forward = partial(ttt_scan, q, k, target, rate, *norm, state, mini_batch)
        out = forward()
        backward = partial(torch.autograd.grad, out, (q, k, target), torch.ones_like(out), retain_graph=True)
        for kind, run in (("forward", forward), ("backward", backward)):
            seconds = median_seconds(run, device, arguments.seconds)
            kernels = ("learn", "learn_backward", "read", "read_backward", "prepare_backward")
            times = {kind: seconds, **kernel_seconds(run, kernels)}
            for name, of in times.items():
                what = f"{programs} programs, {kind}{f', kernel {name}' * (name != kind)}"
                found = {"what": what, "ms": 1e3 * of, "microseconds_a_step": 1e6 * of / steps}
                yield {**found, "rate": f"{found['microseconds_a_step']:.1f} us a step"}


PARTS = {
    "sustained": sustained,
    "gemm": products,
    "attention": attention,
    "varlen": varlen,
    "vae": autoencoder,
    "t5": t5,
    "tiles": tiles,
    "chain": chain,
}


def _write(arguments: argparse.Namespace, lines: list[dict[str, Any]], **watched: float) -> None:
    write_json(arguments.json, "kernels", {"tiny": arguments.tiny, **watched, "runs": lines})


def _line(what: str, seconds: float, flops: float) -> dict[str, Any]:
    found = {"what": what, "ms": 1e3 * seconds, "tflops": flops / seconds / 1e12}
    return {**found, "rate": f"{found['tflops']:.1f} TFLOP/s"}


def _row(line: dict[str, Any]) -> tuple[str, ...]:
    return line["part"], line["what"], f"{line['ms']:.3f}", line["rate"]


if __name__ == "__main__":
    main()
