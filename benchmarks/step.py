"""A training step in its phases, beside a peer's way of computing the same blocks, in the same run.

python benchmarks/step.py                     on CUDA the 11B model's blocks, on a CPU a small model
python benchmarks/step.py --size 11b --blocks 2 4 --remat 2 4 --frames 33 --frames 129 --batch 3
python benchmarks/step.py --model cogvideox-5b           on CUDA 49 x 480 x 720, 17,776 tokens with the text's
python benchmarks/step.py --tiny              a tiny model, to see that it runs
python benchmarks/step.py --overhead          what the trainer adds to forward and backward, in a real small run
python benchmarks/step.py --overhead --before TREE      another checkout too, in turns
torchrun --nproc_per_node 8 benchmarks/step.py ...      the same over several GPUs

Phases: data (the random numbers of the samples, which a run draws beside the steps before), encode (to the device,
text dropout, noising; latents and embeddings are made up, so no autoencoder is in it), forward, backward, optimizer
(clipping, AdamW, average). Phases are timed with the device waited for between them, `step`, which is all but data,
without. Blocks of the step are compiled on CUDA, or where --compiled-step asks for it.

The peer is FLUX, or CogVideoX, as diffusers has it, with the same width, blocks and tokens. It is compared with our
model by itself, like with like: weights and compute in one dtype, forward and backward alone, no masters and no
sharding, eager and compiled block by block. Contenders take turns, and the fastest of all repeats counts. The
comparison is left out where diffusers is not installed, and on more than one rank.

On CUDA medians over at least ten seconds count, on a CPU the fastest. `of limit`: what matrix products and the
fastest attention kernel at this shape would take alone, over the step. Products count at the rate of the step's
largest GEMM, which runs alone for 8 seconds before the step.
Several values of --batch and --level are a line each, written to --json as they come.

MFU counts 3 x forward FLOPs of the blocks that run, recomputation not counted. Where a size stands for a deeper model,
`full ms` is the step of that depth: measured time x FLOPs of the whole / FLOPs of the blocks that ran.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import gib, percent, print_table, write_json
from step_limits import (
    GEMM_SECONDS,
    GpuWatch,
    attention_rates,
    attention_seconds,
    gemm_rate,
    limit_seconds,
    time_by_class,
)
from step_models import LATENT, SUBJECTS, Size, blocks_of, random_conditions, with_blocks
from step_overhead import TARGET_OVERHEAD, measure_overhead, overhead_of_trees
from step_run import How, OurStep, our_blocks

from longtake.contracts import Bucket, Conditions, UserError
from longtake.models.build import denoiser_class
from longtake.models.config import LoraConfig, MMDiTConfig, ModelSection
from longtake.parallel.config import ParallelConfig
from longtake.parallel.mesh import Mesh
from longtake.parallel.recomputation import NAMED_LEVELS, Level, level_text
from longtake.parallel.world import World, start_world
from longtake.plan.layout import Layout, MicroBatch, Upkeep
from longtake.plan.machine import Machine
from longtake.plan.memory import forecast_memory
from longtake.plan.speed import forecast_time, update_seconds
from longtake.plan.timing import seconds_of
from longtake.system.encoders import device_dtype
from longtake.track.devices import gpu_named, peak_flops
from longtake.train.config import RunConfig

HERE = Path(__file__).resolve().parents[1]
PHASES = ("data", "encode", "forward", "backward", "optimizer")
DEFAULTS = RunConfig(  # of a run; of the model's section nothing is read
    dataset={"data_path": "-"},
    bucket_config={"256px": {1: (1.0, 1)}},
    model=MMDiTConfig(in_channels=3 * 8 * 8 * 8 * 4, context_in_dim=128, vec_in_dim=128),
)


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    model: ModelSection  # with the blocks that run
    whole: ModelSection  # the model it stands for
    pixels: tuple[int, int, int]  # T, H, W
    batch: int
    text_tokens: int
    peers: int = 1  # sequence peers that are emulated; pixels and text are one rank's share

    @property
    def bucket(self) -> Bucket:
        return Bucket(f"{self.pixels[1]}px", self.pixels[0], "1:1", self.pixels, self.batch)

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        return LATENT(*self.pixels)

    @property
    def tokens(self) -> int:
        return denoiser_class(self.model).tokens(self.model, self.latent_shape)

    def flops(self, config: ModelSection) -> int:
        """Model FLOPs of one rank's micro-batch, forward and backward."""
        own = 3 * self.batch * denoiser_class(config).forward_flops(config, self.latent_shape, self.text_tokens)
        return own + (self.peers - 1) * self._own_attention(config)  # of a peer: 1 / P of the heads, P times the tokens

    @property
    def attention_flops(self) -> int:
        """Those of attention among them."""
        return self.peers * self._own_attention(self.model)

    def _own_attention(self, config: ModelSection) -> int:
        width = denoiser_class(config).heads(config) * config.head_dim
        return 3 * self.batch * sum(blocks_of(config)) * 4 * (self.tokens + self.text_tokens) ** 2 * width

    def conditions(self, **place: Any) -> Conditions:
        """Made-up ones, on a device and in a dtype."""
        return random_conditions(self.model, self.latent_shape, self.text_tokens, self.batch, **place)


def main() -> None:
    """Measures each case and prints one table."""
    arguments = _arguments()
    if arguments.overhead:
        _report_overhead(arguments)
        return
    with start_world(arguments.device) as world:
        if arguments.seconds is None:
            arguments.seconds = 10.0 if world.device.type == "cuda" and not arguments.tiny else 0.0
        figures: list[dict[str, Any]] = []
        for case, level in product(_cases(arguments, world), arguments.level):
            figures += _if_it_fits(case, level, world, arguments)
            if world.is_main:  # as they come: what is cut short leaves those before it
                write_json(arguments.json, "step", {"tiny": arguments.tiny, "ranks": world.size, "runs": figures})
    if not world.is_main:
        return
    measured = [line for line in figures if "out_of_memory" not in line]
    head = ("model", "blocks", "TxHxW", "tokens", "batch", *(f"{phase} ms" for phase in PHASES), "step ms", "tokens/s")
    tail = ("MFU", "of limit", "full ms", "GiB", "GiB forecast", "peer eager", "peer compiled")
    print_table((*head, *tail), list(map(_row, measured)))
    for line in measured:
        way = f"compiled by {line['backend']}, {line['graphs']} graphs" if line["compiled"] else "eager"
        again = f"recomputed {'+'.join(map(str, line['remat']))}, {level_text(line['level'])}"
        print(f"{'+'.join(map(str, line['blocks']))}, batch {line['batch']}: {line['step_ms']:.1f} ms, {way}, {again}")
        if line["classes_ms"]:
            print("  ".join(f"{name} {ms:.1f} ms" for name, ms in sorted(line["classes_ms"].items())))
    print("peer: its forward and backward over our model's, above 1 we are faster")
    if len(measured) < len(figures):
        raise SystemExit(1)


def _if_it_fits(case: Case, level: Level, world: World, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The figures of `measure`, or what was left out where one GPU has not the memory, and a line that says so."""
    try:
        return [measure(case, level, world, arguments)]
    except torch.OutOfMemoryError as error:
        if world.size > 1:  # the others would wait
            raise
        print(f"batch {case.batch}, level {level}: {error}", flush=True)
        left_out = {"batch": case.batch, "tokens": case.tokens, "level": level}
    torch.compiler.reset()
    world.free_memory()
    return [{"out_of_memory": True, **left_out}]


def measure(case: Case, level: Level, world: World, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one case: ours first alone, for its peak memory, then in turns with the peer. level: of blocks
    that are recomputed."""
    dtype = device_dtype(DEFAULTS.dtype, world.device)
    mesh = Mesh.create(ParallelConfig(zero=arguments.zero), world)
    failures: dict[str, str] = {}
    rates = _attention_rates(case, dtype, world, arguments, failures)
    gemm = _gemm_rate(case, dtype, world, arguments)
    how = _how(arguments, case, level, rates, world)
    step = OurStep(case, mesh, world, dtype, how, DEFAULTS)
    _reset_peak(world)
    for _ in range(arguments.warmup):
        step.run()
    peak = torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else None
    contenders = _contenders(case, world, arguments, dtype, how) if arguments.peer and world.size == 1 else {}
    with GpuWatch() as watch:
        phases, taken = _take_turns(step, contenders, arguments)
    typical = median if world.device.type == "cuda" else min
    best = {name: typical(spent) for name, spent in taken.items()}
    flops, whole = case.flops(case.model), case.flops(case.whole)
    device_peak = peak_flops(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
    limit = limit_seconds(flops, case.attention_flops, rates, gemm.get("flops_per_second"), how.lora is not None)
    ways = [way for way in ("eager", "compiled") if f"peer {way}" in contenders]
    figures = {
        "kind": arguments.model,
        "model": arguments.size,
        "blocks": list(blocks_of(case.model)),
        "whole_blocks": list(blocks_of(case.whole)),
        "pixels": list(case.pixels),
        "tokens": case.tokens,
        "text_tokens": case.text_tokens,
        "batch": case.batch,
        "dtype": str(dtype).removeprefix("torch."),
        "zero": arguments.zero,
        **asdict(how),
        "graphs": step.graphs,
        "phases_ms": {name: 1e3 * typical(spent) for name, spent in phases.items()},
        "step_ms": 1e3 * best["step"],
        "tokens_per_second": world.size * case.batch * case.tokens / best["step"],
        "tflops_per_device": flops / best["step"] / 1e12,
        "mfu": flops / best["step"] / device_peak if device_peak else None,
        "full_step_ms": 1e3 * best["step"] * whole / flops,
        "gemm": gemm,
        "attention_failures": failures,
        "limit_ms": limit and 1e3 * limit,
        "share_of_limit": limit and limit / best["step"],
        "runs": len(taken["step"]),
        **watch.figures,
        "classes_ms": time_by_class(step.run, world.device) if arguments.profile else None,
        "peak_bytes": peak,
        **_forecast(case, mesh, dtype, how, world.device),
        "blocks_ms": {name: 1e3 * best[name] for name in contenders},
        "peer_over_ours": {way: best[f"peer {way}"] / best[f"ours {way}"] for way in ways},
    }
    del step, contenders
    torch.compiler.reset()  # or the next model's blocks are looked for among these graphs
    world.free_memory()
    return figures


def _take_turns(
    step: OurStep, contenders: dict[str, Callable[[], None]], arguments: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each phase of a step; and of whole steps and of contenders, in turns."""
    phases: dict[str, list[float]] = {name: [] for name in PHASES}
    taken: dict[str, list[float]] = {name: [] for name in ("step", *contenders)}
    while len(taken["step"]) < arguments.repeats or sum(taken["step"]) < arguments.seconds:
        for name, spent in step.phases().items() if len(phases["data"]) < arguments.repeats else ():
            phases[name].append(spent)
        for name, run in {"step": step.run, **contenders}.items():
            taken[name].append(seconds_of(run, step.world.device))
    return phases, taken


def _forecast(case: Case, mesh: Mesh, dtype: torch.dtype, how: How, device: torch.device) -> dict[str, float | None]:
    """Forecast of `longtake plan` for this step by its table of rates, without the autoencoder: bytes, and on
    CUDA milliseconds."""
    upkeep = Upkeep(lora=how.lora and LoraConfig(rank=how.lora))
    kept = {"remat": how.remat, "level": how.level, "compiled": how.compiled, "upkeep": upkeep}
    sharded = {"shard": mesh.data_ranks, "zero": mesh.config.zero, "compute_bytes": dtype.itemsize}
    layout = Layout(**sharded, **kept, ema=True)
    batch, seconds = MicroBatch(case.batch, case.latent_shape, case.text_tokens), None
    if device.type == "cuda":
        machine = Machine(gpu_named(torch.cuda.get_device_name(device)))
        seconds = forecast_time(case.model, batch, layout, machine).seconds
        seconds += update_seconds(case.model, layout, machine)
    return {
        "forecast_bytes": forecast_memory(case.model, batch, layout).total,
        "forecast_ms": seconds and 1e3 * seconds,
    }


def _cases(arguments: argparse.Namespace, world: World) -> list[Case]:
    sizes = SUBJECTS[arguments.model].sizes
    if arguments.tiny:
        arguments.size, arguments.repeats, arguments.warmup = "tiny", 2, 1
    if arguments.size is None:
        arguments.size = list(sizes)[-1] if world.device.type == "cuda" else "small"
    if arguments.size not in sizes:
        raise SystemExit(f"--size {arguments.size}: --model {arguments.model} has {', '.join(sizes)}")
    size: Size = sizes[arguments.size]
    blocks = arguments.blocks or size.blocks or blocks_of(size.model)
    if len(blocks) != len(blocks_of(size.model)):
        raise SystemExit(f"--blocks: --model {arguments.model} has {len(blocks_of(size.model))} lists of them")
    model, sides = with_blocks(size.model, blocks), (arguments.side,) * 2 if arguments.side else size.sides
    shapes = [(t, *sides) for t in arguments.frames or size.frames]
    if not (arguments.side or arguments.frames):
        shapes += size.also

    def batches(shape: tuple[int, int, int]) -> list[int]:
        return arguments.batch or [size.batches.get(shape[0], 1) if shape[1:] == size.sides else 1]

    peers = arguments.sequence
    if any(shape[1] % (16 * peers) for shape in shapes):
        raise SystemExit(f"--sequence {peers}: every height must divide by {16 * peers}")
    shares = {shape: (shape[0], shape[1] // peers, shape[2]) for shape in shapes}
    text = size.text_tokens // peers
    pairs = [(shape, batch) for shape in shapes for batch in batches(shape)]
    return [Case(model, size.model, shares[shape], batch, text, peers) for shape, batch in pairs]


def _contenders(
    case: Case, world: World, arguments: argparse.Namespace, dtype: torch.dtype, how: How
) -> dict[str, Callable[[], None]]:
    """Our model by itself and the peer's, each eager and compiled, warm."""
    found, peer = {}, SUBJECTS[arguments.model].peer
    for name, run in peer(case.model, case, world.device, dtype, how.remat, compiled=arguments.compile).items():
        found[f"ours {name}"] = our_blocks(case, world.device, dtype, how.remat, compiled=name == "compiled")
        found[f"peer {name}"] = run
    for run in found.values():
        for _ in range(arguments.warmup):
            run()
    return found


def _how(arguments: argparse.Namespace, case: Case, level: Level, rates: dict[str, Any], world: World) -> How:
    compiled = world.device.type == "cuda" if arguments.compiled_step is None else arguments.compiled_step
    none = [0] * len(blocks_of(case.model))
    remat = tuple(none if level == "none" else arguments.remat or none)
    attention = arguments.attention
    if attention == "auto" and rates:  # as a run: the fastest in forward and backward together
        attention = min(rates, key=lambda name: attention_seconds(1.0, rates[name]))
    return How(
        remat=remat,
        compiled=compiled,
        static=arguments.static,
        level=level,
        attention=attention,
        lora=arguments.lora,
        latents=arguments.latents,
        sequence=arguments.sequence,
        backend=arguments.backend,
        autotune_reductions=arguments.autotune_reductions,
    )


def _attention_rates(
    case: Case, dtype: torch.dtype, world: World, arguments: argparse.Namespace, failures: dict[str, str]
) -> dict[str, Any]:
    """Of the available kernels, at the shape that a rank's attention has; none on a CPU, which has no known limit. The
    texts of those that fail are put into `failures`."""
    if world.device.type != "cuda":
        return {}
    heads, length = denoiser_class(case.model).heads(case.model), case.tokens + case.text_tokens
    shape = case.batch, length * case.peers, heads // case.peers, case.model.head_dim

    def report(name: str, text: str) -> None:
        failures[name] = text
        print(f"attention: {name} cannot be used: {text}", flush=True)

    return attention_rates(shape, dtype, world.device, seconds=min(0.3, arguments.seconds), report=report)


_gemm_rates: dict[tuple[Any, ...], dict[str, Any]] = {}


def _gemm_rate(case: Case, dtype: torch.dtype, world: World, arguments: argparse.Namespace) -> dict[str, Any]:
    """Of the step's largest GEMM, measured once in a process; nothing on a CPU."""
    if world.device.type != "cuda":
        return {}
    sizes = case.latent_shape, case.text_tokens, case.batch
    frozen = arguments.lora is not None
    key = repr(case.model), sizes, frozen
    if key not in _gemm_rates:
        seconds = 0.0 if arguments.tiny else GEMM_SECONDS
        _gemm_rates[key] = gemm_rate(case.model, *sizes, dtype, world.device, seconds, frozen)
    return _gemm_rates[key]


def _report_overhead(arguments: argparse.Namespace) -> None:
    trees = {"before": arguments.before, "now": HERE} if arguments.before else {}
    measured = overhead_of_trees(trees, arguments.tiny) or {"now": measure_overhead(tiny=arguments.tiny)}
    figures = measured["now"]
    parts = ("forward", "backward", "optimizer", "wait", "prepare", "other")
    head = ("steps", "step ms", *(f"{part} ms" for part in parts), "overhead", "without optimizer", "other alone")

    def row(found: dict[str, Any]) -> tuple[str, ...]:
        shares = [f"{found[f'overhead{kind}']:.1%}" for kind in ("", "_without_optimizer", "_bookkeeping")]
        times = (found["step_ms"], *(found["parts_ms"][part] for part in parts))
        return str(found["steps"]), *(f"{ms:.2f}" for ms in times), *shares

    print_table(("tree", *head), [(name, *row(found)) for name, found in measured.items()])
    print(f"target: other alone <= {TARGET_OVERHEAD:.0%} of a 100 ms step")
    if not arguments.tiny and figures["overhead_bookkeeping"] > TARGET_OVERHEAD:
        print(f"missed: {figures['overhead_bookkeeping']:.1%} at {figures['step_ms']:.0f} ms")
    earlier = {"before": measured["before"]} if "before" in measured else {}
    write_json(arguments.json, "step_overhead", {"tiny": arguments.tiny, **figures, **earlier})


def _row(line: dict[str, Any]) -> tuple[str, ...]:
    peers = (line["peer_over_ours"].get(name) for name in ("eager", "compiled"))
    return (
        line["model"],
        "+".join(map(str, line["blocks"])),
        "x".join(map(str, line["pixels"])),
        f"{line['tokens']:,}",
        str(line["batch"]),
        *(f"{line['phases_ms'][phase]:.1f}" for phase in PHASES),
        f"{line['step_ms']:.1f}",
        f"{line['tokens_per_second']:,.0f}",
        percent(line["mfu"]),
        percent(line["share_of_limit"]),
        f"{line['full_step_ms']:.0f}",
        gib(line["peak_bytes"]),
        gib(line["forecast_bytes"]),
        *("-" if ratio is None else f"{ratio:.2f}" for ratio in peers),
    )


def _reset_peak(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)


def _level(word: str) -> Level:
    if word in NAMED_LEVELS:
        return word
    try:
        share = float(word)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{word}: expected {', '.join(NAMED_LEVELS)}, or a number between 0 and 1")
    return share


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SUBJECTS), default="flux")
    parser.add_argument(
        "--size", help="tiny, small, 11b (flux), 5b (cogvideox-5b); default: small on a CPU, else the last"
    )
    parser.add_argument("--blocks", type=int, nargs="+", metavar="N", help="blocks that run, of each list")
    parser.add_argument("--frames", type=int, action="append", help="frames of a clip; default: by size")
    parser.add_argument("--side", type=int, help="height and width in pixels; default: by size")
    parser.add_argument(
        "--batch", type=int, nargs="+", metavar="N", help="samples of a micro-batch, each in turn; default: by size"
    )
    parser.add_argument("--remat", type=int, nargs="+", metavar="N", help="blocks computed again, of each list")
    parser.add_argument("--zero", type=int, choices=(2, 3), default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention", default="auto", help="kernel, as model.attention names it")
    parser.add_argument(
        "--level",
        type=_level,
        nargs="+",
        default=["full"],
        help='as model.recompute, of the blocks of --remat, each in turn (default: "full")',
    )
    parser.add_argument("--static", action="store_true", help="a graph for each shape")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of that rank alone")
    parser.add_argument("--latents", choices=("stored", "online"), default="stored", help="online: pixels are encoded")
    parser.add_argument("--sequence", type=int, default=1, help="be one of so many sequence peers, which are emulated")
    parser.add_argument("--profile", action="store_true", help="time of the device by class of kernel")
    parser.add_argument("--seconds", type=float, help="measure for so long at least; default: 10 on CUDA")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="compare compiled too")
    parser.add_argument(
        "--compiled-step", action=argparse.BooleanOptionalAction, help="compile the step's blocks; default: on CUDA"
    )
    parser.add_argument("--backend", default="inductor", help="of the compiler of the step's blocks")
    parser.add_argument("--autotune-reductions", action="store_true", help="as Inductor does by itself; a run does not")
    parser.add_argument("--overhead", action="store_true", help="what the trainer adds, in a real small run")
    parser.add_argument("--before", type=Path, metavar="TREE", help="with --overhead: a checkout of an earlier commit")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, two repeats")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"step.py: {error}")
