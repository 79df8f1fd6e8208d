"""One generation with an Open-Sora 2.0 preset on this machine's GPU, random weights: time by part, MFU, peak memory.

python benchmarks/generate.py                      256px, 129 frames, 50 steps: the model resident, then offloaded
python benchmarks/generate.py --preset 768px --frames 129 --steps 4
python benchmarks/generate.py --cond-type i2v_head --solver ab2 --steps 25
python benchmarks/generate.py --tiny               a tiny model and its pixel autoencoder, on a CPU too
torchrun --nproc_per_node 8 benchmarks/generate.py --preset 768px       one video on all of them
python benchmarks/generate.py --compare            a small model on a CPU: ways to run the same steps, in turns

The denoiser and the autoencoder have their real sizes; text embeddings are made up in the widths of T5 XXL and CLIP-L,
so neither their time nor their memory is in the figures. `start` is everything before the first step: noise, text,
known frames. `branches` counts network evaluations for one video; MFU is their FLOPs over the time of the steps and the
peak of the device. Needs diffusers, but for --tiny. `--compare`: medians of a step's milliseconds with branches of
guidance at once and in turn, blocks eager and compiled, and of two processes that each make one video or make it
together.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import gib, percent, print_table, write_json
from torch import Tensor
from torch.multiprocessing import spawn

from longtake.diffusion.known import NOTHING_KNOWN
from longtake.generate.run import open_system
from longtake.generate.sample import Request, guidance_scales, pixel_shape, sample_videos
from longtake.generate.source import GenerationSource, resolve_source
from longtake.parallel.mesh import TokenPeers
from longtake.parallel.world import World, start_world
from longtake.plan.timing import clock
from longtake.system.build import System
from longtake.track.devices import peak_flops

PRESETS = Path(__file__).parents[1] / "configs" / "opensora_v2" / "inference"
TEXT_TOKENS = 512
_SMALL = ("--model.hidden_size", "256", "--model.num_heads", "8", "--model.axes_dim", "(8, 12, 12)")
_SMALL += ("--model.depth", "2", "--model.depth_single_blocks", "4")
_PORT = 29533


def main() -> None:
    """Measures each way of keeping the model and prints one table."""
    arguments = _arguments()
    if arguments.compare:
        compare(arguments)
        return
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, start_world(arguments.device) as world:
        autoencoder = None if arguments.tiny else _random_autoencoder(Path(folder), world)
        for offload in (False, True):
            source = resolve_source(str(PRESETS / f"{arguments.preset}.py"), _words(arguments, offload, autoencoder))
            figures.append(measure(source, world))
            world.free_memory()
    if not world.is_main:
        return
    head = ("preset", "kind", "TxHxW", "tokens", "steps", "branches", "model", "start s", "steps s", "decode s")
    print_table((*head, "all s", "MFU", "GiB"), [_row(line) for line in figures])
    write_json(arguments.json, "generate", {"tiny": arguments.tiny, "ranks": world.size, "runs": figures})


def measure(source: GenerationSource, world: World) -> dict[str, Any]:
    """The figures of one video; a first one of two steps, which is not measured, loads kernels."""
    config, option = source.config, source.config.sampling_option
    system = open_system(source, world, lambda line: None)
    shape = pixel_shape(system, option)
    places = system.law.given(config.kind, system.latent, shape) if system.law else NOTHING_KNOWN
    known = tuple(torch.rand(3, len(window.pixels), *shape[1:]) * 2 - 1 for window in places.windows)
    request = Request("raining, sea", 42, places=places, known=known)
    sample_videos(system, [request], option.model_copy(update={"num_steps": 2}))
    on_gpu = world.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(world.device)
    marks = [clock(world.device)]

    def on_step(done: int, total: int, x: Tensor) -> None:
        marks.append(clock(world.device))

    sample_videos(system, [request], option, on_step)
    marks.append(clock(world.device))
    by_known = bool(known) and config.family.guided_by_known
    stills = bool(known) and all(len(window.frames) == 1 for window in places.windows)
    scales, frames = guidance_scales(config, option, stills, by_known), system.latent(*shape)[1]
    counts = [len(scales.coefficients(step, option.num_steps, frames)) for step in range(option.num_steps)]
    per_branch = (marks[-2] - marks[1]) / sum(counts[1:])  # the first step's time has the start in it
    flops = sum(counts) * system.flops(shape) / world.size
    peak = peak_flops(torch.cuda.get_device_name(world.device)) if on_gpu else None
    steps = per_branch * sum(counts)
    return {
        "preset": config.sampling_option.resolution,
        "kind": config.kind,
        "pixels": list(shape),
        "tokens": system.tokens(shape),
        "solver": option.solver,
        "steps": option.num_steps,
        "branches": sum(counts),
        "offload_model": config.offload_model,
        "start_seconds": marks[1] - marks[0] - per_branch * counts[0],
        "steps_seconds": steps,
        "decode_seconds": marks[-1] - marks[-2],
        "seconds": marks[-1] - marks[0],
        "mfu": flops / steps / peak if peak else None,
        "peak_bytes": torch.cuda.max_memory_allocated(world.device) if on_gpu else None,
    }


def compare(arguments: argparse.Namespace) -> None:
    """Times ways to run the steps of one video, in turns in the same processes, and prints their medians."""
    turns, figures = 2 if arguments.tiny else 9, {}
    with tempfile.TemporaryDirectory() as folder:
        with start_world("cpu") as world:
            eager, compiled = _small(arguments, world), _small(arguments, world, "--compile", "True")
            shape = pixel_shape(eager, eager.config.sampling_option)
            sizes = {"pixels": shape, "tokens": eager.tokens(shape), "parameters": eager.num_parameters()[0]}
            ways = {
                "branches at once, eager": _stepper(eager),
                "branches in turn, eager": _stepper(eager, guidance_batch=False),
                "branches at once, compiled": _stepper(compiled),
            }
            figures |= _medians(ways, turns)
        spawn(_of_two, (arguments, turns, folder), nprocs=2)
        figures |= json.loads(Path(folder, "two.json").read_text())
    first = figures["branches at once, eager"]
    rows = [(name, f"{ms:.0f}", f"{first / ms:.2f}") for name, ms in figures.items()]
    print_table(("a step of one video", "ms", "the first over it"), rows)
    write_json(arguments.json, "generate", {"tiny": arguments.tiny, "turns": turns, **sizes, "milliseconds": figures})


def _of_two(rank: int, arguments: argparse.Namespace, turns: int, folder: str) -> None:
    """The same of two processes, with a thread each, by rank 0 into a file."""
    torch.set_num_threads(1)
    store = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _PORT}
    os.environ.update({name: str(value) for name, value in store.items()})
    with start_world("cpu") as world:
        system = _small(arguments, world)
        heads = type(system.denoiser).heads(system.config.model)
        alone, together = (system.mesh.token_peers(heads, degree) for degree in (1, 2))
        ways = {
            "two processes, each makes it": _stepper(system, peers=alone),
            "two processes, together": _stepper(system, peers=together),
        }
        found = _medians(ways, turns)
        if world.is_main:
            Path(folder, "two.json").write_text(json.dumps(found))


def _small(arguments: argparse.Namespace, world: World, *flags: str) -> System:
    """A system for `--compare`; of two processes, they are sequence peers."""
    words = ["--tiny", "--dtype", "fp32", "--device", "cpu", "--prompt", "raining, sea", "--num-steps", "3"]
    size = [] if arguments.tiny else ["--resolution", "128px", *_SMALL]
    source = resolve_source(str(PRESETS / "256px.py"), [*words, *size, *flags])
    parallel = source.config.parallel.model_copy(update={"sequence": world.size})
    return open_system(source, world, lambda line: None, parallel=parallel)


def _stepper(system: System, guidance_batch: bool = True, peers: TokenPeers | None = None) -> Callable[[], float]:
    """A call that samples a video and returns the milliseconds of a step, the first one left out."""
    option = system.config.sampling_option.model_copy(update={"guidance_batch": guidance_batch})

    def step() -> float:
        marks: list[float] = []
        if peers is not None:
            system.cut.use(peers)
        request = Request("raining, sea", 42)
        sample_videos(system, [request], option, lambda *_: marks.append(clock(system.device)))
        return 1e3 * (marks[-1] - marks[0]) / (len(marks) - 1)

    return step


def _medians(ways: dict[str, Callable[[], float]], turns: int) -> dict[str, float]:
    """The median of each way's results, the first turn left out."""
    found = [[way() for way in ways.values()] for _ in range(turns + 1)][1:]
    return {name: median(column) for name, column in zip(ways, zip(*found, strict=True), strict=True)}


def _random_autoencoder(folder: Path, world: World) -> str:
    """A folder with an autoencoder of HunyuanVideo's size and random weights."""
    from diffusers import AutoencoderKLHunyuanVideo

    folder = Path(world.broadcast(str(folder)))
    if world.is_main:
        torch.manual_seed(0)
        AutoencoderKLHunyuanVideo().save_pretrained(folder)
    world.barrier()
    return str(folder)


def _words(arguments: argparse.Namespace, offload: bool, autoencoder: str | None) -> list[str]:
    words = {
        "device": arguments.device,
        "cond_type": arguments.cond_type,
        "offload_model": offload,
        "ref": None if arguments.cond_type == "t2v" else "none.png",
        "prompt": "raining, sea",
        "model.from_pretrained": None,
        "sampling_option.solver": arguments.solver,
    }
    if arguments.steps is not None:
        words["sampling_option.num_steps"] = arguments.steps
    if arguments.frames is not None:
        words["sampling_option.num_frames"] = arguments.frames
    if arguments.compile:
        words["compile"] = True
    if autoencoder is not None:
        words["ae.from_pretrained"] = autoencoder
        for name, width in (("t5", 4096), ("clip", 768)):
            words[name] = {"_delete_": True, "type": "words", "dim": width, "max_length": TEXT_TOKENS}
    flags = [word for key, value in words.items() for word in (f"--{key}", str(value))]
    return [*flags, "--tiny"] if arguments.tiny else flags


def _row(line: dict[str, Any]) -> tuple[str, ...]:
    return (
        line["preset"],
        line["kind"],
        "x".join(map(str, line["pixels"])),
        f"{line['tokens']:,}",
        str(line["steps"]),
        str(line["branches"]),
        "offloaded" if line["offload_model"] else "resident",
        *(f"{line[f'{part}_seconds']:.2f}" for part in ("start", "steps", "decode")),
        f"{line['seconds']:.2f}",
        percent(line["mfu"]),
        gib(line["peak_bytes"]),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=("256px", "768px"), default="256px")
    parser.add_argument("--cond-type", default="t2v")
    parser.add_argument("--frames", type=int, help="4k+1; default: the preset's 129")
    parser.add_argument("--steps", type=int, help="default: the preset's 50")
    parser.add_argument("--solver", default="euler")
    parser.add_argument("--compile", action="store_true", help="compile the denoiser's blocks")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="a tiny model")
    parser.add_argument("--compare", action="store_true", help="compare ways to run the same steps, on a CPU")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
