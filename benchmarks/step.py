"""A training step in its phases, beside a peer's way of computing the same blocks, in the same run.

python benchmarks/step.py                     on CUDA the 11B model's blocks, on a CPU a small model
python benchmarks/step.py --size 11b --blocks 2 4 --remat 2 4 --frames 33 --frames 129 --batch 3
python benchmarks/step.py --model cogvideox-5b           on CUDA 49 x 480 x 720, 17,776 tokens with the text's
python benchmarks/step.py --tiny              a tiny model, to see that it runs
python benchmarks/step.py --overhead          what the trainer adds to forward and backward, in a real small run
torchrun --nproc_per_node 8 benchmarks/step.py ...      the same over several GPUs

Phases: data (the random numbers of the samples, as a loader process draws them), encode (to the device, text dropout,
noising; latents and embeddings are made up, so no autoencoder is in it), forward, backward, optimizer (clipping,
AdamW, average). Phases are timed with the device waited for between them, `step` without. Blocks of the step are
compiled on CUDA, or where --compiled-step asks for it.

The peer is FLUX, or CogVideoX, as diffusers has it, with the same width, blocks and tokens. It is compared with our
model by itself, like with like: weights and compute in one dtype, forward and backward alone, no masters and no
sharding, eager and compiled block by block. Contenders take turns, and the fastest of all repeats counts. The
comparison is left out where diffusers is not installed, and on more than one rank.

MFU counts 3 x forward FLOPs of the blocks that run, recomputation not counted. Where a size stands for a deeper model,
`full ms` is the step of that depth: measured time x FLOPs of the whole / FLOPs of the blocks that ran.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import gib, now, percent, print_table, write_json
from step_models import LATENT, SUBJECTS, Size, blocks_of, draws_of, objective_of, random_conditions, with_blocks
from step_overhead import TARGET_OVERHEAD, measure_overhead

from longtake.contracts import Bucket, Conditions, Slot
from longtake.data.loading.draws import draw
from longtake.diffusion import drop_text, micro_batch_loss
from longtake.models import MMDiTConfig, build_denoiser
from longtake.models.build import denoiser_class
from longtake.models.config import ModelSection
from longtake.parallel import (
    BlockCompiler,
    Mesh,
    ParallelConfig,
    World,
    initialise_sharded,
    remat_blocks,
    shard_model,
    start_world,
)
from longtake.plan import Layout, MicroBatch, forecast_memory
from longtake.system.encoders import device_dtype
from longtake.track import peak_flops
from longtake.train.config import RunConfig
from longtake.train.optimizer import ShardedAdamW, clip_scale
from longtake.train.optimizer.ema import Ema

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
        return 3 * self.batch * denoiser_class(config).forward_flops(config, self.latent_shape, self.text_tokens)

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
        cases = _cases(arguments, world)
        figures = [measure(case, world, arguments) for case in cases]
    if not world.is_main:
        return
    head = ("model", "blocks", "TxHxW", "tokens", "batch", *(f"{phase} ms" for phase in PHASES), "step ms", "tokens/s")
    print_table(
        (*head, "MFU", "full ms", "GiB", "GiB forecast", "peer eager", "peer compiled"), list(map(_row, figures))
    )
    print("peer: its forward and backward over our model's, above 1 we are faster")
    write_json(arguments.json, "step", {"tiny": arguments.tiny, "ranks": world.size, "runs": figures})


def measure(case: Case, world: World, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of one case: ours first alone, for its peak memory, then in turns with the peer."""
    dtype = device_dtype(DEFAULTS.dtype, world.device)
    mesh = Mesh.create(ParallelConfig(zero=arguments.zero), world)
    remat = tuple(arguments.remat or [0] * len(blocks_of(case.model)))
    compiled_step = world.device.type == "cuda" if arguments.compiled_step is None else arguments.compiled_step
    step = OurStep(case, mesh, world, dtype, remat, compiled_step)
    _reset_peak(world)
    for _ in range(arguments.warmup):
        step.run()
    peak = torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else None
    contenders: dict[str, Callable[[], None]] = {}
    if arguments.peer and world.size == 1:
        peer = SUBJECTS[arguments.model].peer
        peers = peer(case.model, case, world.device, dtype, remat, compiled=arguments.compile)
        for name, run in peers.items():
            contenders[f"ours {name}"] = our_blocks(case, world.device, dtype, remat, compiled=name == "compiled")
            contenders[f"peer {name}"] = run
        for run in contenders.values():
            for _ in range(arguments.warmup):
                run()
    phases: dict[str, float] = dict.fromkeys(PHASES, float("inf"))
    best = {name: float("inf") for name in ("step", *contenders)}
    for _ in range(arguments.repeats):
        for name, seconds in step.phases().items():
            phases[name] = min(phases[name], seconds)
        for name, run in {"step": step.run, **contenders}.items():
            best[name] = min(best[name], _seconds(run, world))
    flops, whole = case.flops(case.model), case.flops(case.whole)
    device_peak = peak_flops(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
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
        "remat": list(remat),
        "zero": arguments.zero,
        "compiled_step": compiled_step,
        "phases_ms": {name: 1e3 * seconds for name, seconds in phases.items()},
        "step_ms": 1e3 * best["step"],
        "tokens_per_second": world.size * case.batch * case.tokens / best["step"],
        "tflops_per_device": flops / best["step"] / 1e12,
        "mfu": flops / best["step"] / device_peak if device_peak else None,
        "full_step_ms": 1e3 * best["step"] * whole / flops,
        "peak_bytes": peak,
        "forecast_bytes": _forecast(case, mesh, dtype, remat),
        "blocks_ms": {name: 1e3 * best[name] for name in contenders},
        "peer_over_ours": {way: best[f"peer {way}"] / best[f"ours {way}"] for way in ways},
    }
    del step, contenders
    world.free_memory()
    return figures


class OurStep:
    """One rank's step: the trainer's own parts, on made-up latents and embeddings."""

    def __init__(
        self, case: Case, mesh: Mesh, world: World, dtype: torch.dtype, remat: tuple[int, ...], compiled: bool
    ) -> None:
        self.case, self.mesh, self.world, self.count = case, mesh, world, 0
        with torch.device("meta"):
            self.model = build_denoiser(case.model)
        if compiled:
            BlockCompiler().compile(self.model)
        remat_blocks(self.model, remat)
        shard_model(self.model, mesh, dtype)
        initialise_sharded(self.model, world.device, seed=1)
        self.optimizer = ShardedAdamW(self.model, DEFAULTS)
        self.ema = Ema(self.model, 0.99)
        self.objective, self.draws = objective_of(case.model), draws_of(case.model)
        self.latents = torch.randn(case.batch, *case.latent_shape)
        self.conditions = case.conditions()
        self.empty = self.conditions.map(lambda tensor: tensor[:1].to(world.device))

    def run(self) -> None:
        """A whole step."""
        for _ in self._steps():
            pass

    def phases(self) -> dict[str, float]:
        """Seconds of each phase of a step, the device waited for after each."""
        seconds, start = {}, now(self.world.device)
        for phase in self._steps():
            end = now(self.world.device)
            seconds[phase], start = end - start, end
        return seconds

    def _steps(self) -> Iterator[str]:
        """The phases one after the other: yields the name of each when it is done."""
        case, device = self.case, self.world.device
        draws = draw(_slot(case, self.count), 1, 0, LATENT, self.draws)
        yield "data"
        with torch.no_grad():
            draws = {name: numbers.to(device, non_blocking=True) for name, numbers in draws.items()}
            weights = torch.ones(case.batch, device=device)
            given = self.conditions.map(lambda tensor: tensor.to(device))
            uniforms = dict(zip(given, draws["dropout"].unbind(1), strict=True))
            conditions = drop_text(given, self.empty, uniforms, dict.fromkeys(given, 0.1))
            noised = self.objective.noise(self.latents.to(device), draws, weights)
        yield "encode"
        prediction = self.model(noised.x, noised.t, conditions)
        loss = micro_batch_loss(self.objective.loss, prediction, noised, weights, case.batch)
        yield "forward"
        loss.backward()
        yield "backward"
        norm = self.optimizer.grad_square_sum().sqrt()
        self.optimizer.step(1e-5, clip_scale(norm, 1.0))
        self.count += 1
        self.ema.update(self.count)
        yield "optimizer"


def our_blocks(
    case: Case, device: torch.device, dtype: torch.dtype, remat: tuple[int, ...], compiled: bool
) -> Callable[[], None]:
    """A call that runs forward and backward of our model once, without a trainer around it, and frees the gradients."""
    with torch.device(device):
        model = build_denoiser(case.model).to(dtype)
    if compiled:
        BlockCompiler(dynamic=False).compile(model)
    remat_blocks(model, remat)
    x = torch.randn(case.batch, *case.latent_shape, device=device, dtype=dtype)
    conditions = case.conditions(device=device, dtype=dtype)
    t = torch.rand(case.batch, device=device) * objective_of(case.model).noise_time
    target = torch.randn_like(x, dtype=torch.float32)

    def run() -> None:
        (model(x, t, conditions).float() - target).square().mean().backward()
        model.zero_grad(set_to_none=True)

    return run


def _slot(case: Case, number: int) -> Slot:
    samples = np.arange(case.batch, dtype=np.uint64) + np.uint64(number * case.batch)
    rows = np.zeros(case.batch, np.int64)
    return Slot(case.bucket, 0, rows, samples, samples, np.ones(case.batch, np.float32))


def _forecast(case: Case, mesh: Mesh, dtype: torch.dtype, remat: tuple[int, ...]) -> int:
    """Bytes that `longtake plan` would foretell for this step."""
    layout = Layout(shard=mesh.data_ranks, zero=mesh.config.zero, remat=remat, ema=True, compute_bytes=dtype.itemsize)
    return forecast_memory(case.model, MicroBatch(case.batch, case.latent_shape, case.text_tokens), layout).total


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

    def batch(shape: tuple[int, int, int]) -> int:
        return arguments.batch or (size.batches.get(shape[0], 1) if shape[1:] == size.sides else 1)

    return [Case(model, size.model, shape, batch(shape), size.text_tokens) for shape in shapes]


def _report_overhead(arguments: argparse.Namespace) -> None:
    figures = measure_overhead(tiny=arguments.tiny)
    parts = ("forward", "backward", "optimizer", "wait", "prepare", "other")
    head = ("steps", "step ms", *(f"{part} ms" for part in parts), "overhead", "without optimizer", "other alone")
    shares = [f"{figures[f'overhead{kind}']:.1%}" for kind in ("", "_without_optimizer", "_bookkeeping")]
    row = (figures["steps"], f"{figures['step_ms']:.1f}", *(f"{figures['parts_ms'][p]:.2f}" for p in parts), *shares)
    print_table(head, [row])
    print(f"target: overhead <= {TARGET_OVERHEAD:.0%} at a 100 ms step")
    if not arguments.tiny and figures["overhead"] > TARGET_OVERHEAD:
        print(f"missed: overhead {figures['overhead']:.1%} at {figures['step_ms']:.0f} ms")
    write_json(arguments.json, "step_overhead", {"tiny": arguments.tiny, **figures})


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
        f"{line['full_step_ms']:.0f}",
        gib(line["peak_bytes"]),
        gib(line["forecast_bytes"]),
        *("-" if ratio is None else f"{ratio:.2f}" for ratio in peers),
    )


def _seconds(run: Callable[[], None], world: World) -> float:
    start = now(world.device)
    run()
    return now(world.device) - start


def _reset_peak(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=tuple(SUBJECTS), default="flux")
    parser.add_argument("--size", help="tiny, small, 11b (flux), 5b (cogvideox-5b); default: small on a CPU, else all")
    parser.add_argument("--blocks", type=int, nargs="+", metavar="N", help="blocks that run, of each list")
    parser.add_argument("--frames", type=int, action="append", help="frames of a clip; default: by size")
    parser.add_argument("--side", type=int, help="height and width in pixels; default: by size")
    parser.add_argument("--batch", type=int, help="samples of a micro-batch; default: by size and frames")
    parser.add_argument("--remat", type=int, nargs="+", metavar="N", help="blocks computed again, of each list")
    parser.add_argument("--zero", type=int, choices=(2, 3), default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="compare compiled too")
    parser.add_argument(
        "--compiled-step", action=argparse.BooleanOptionalAction, help="compile the step's blocks; default: on CUDA"
    )
    parser.add_argument("--overhead", action="store_true", help="what the trainer adds, in a real small run")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, two repeats")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
