"""Steps of the fine-tuning presets on this machine's GPU, beside what `longtake plan` forecasts of them.

python benchmarks/finetune.py                     all of BUCKETS
python benchmarks/finetune.py --preset opensora_v2/lora --bucket 256px/129f
python benchmarks/finetune.py --tiny              tiny models, on a CPU too

Model, adapters, recomputation, optimizer, moments and average are the preset's own, weights random, latents and
embeddings made up; no encoder is built, and none is in the forecast. `micro-batch` is forward and backward, `update`
clipping, optimizer and average; a step is `micro-batches` of the former and one of the latter. The best of several
repeats counts. MFU is 3 x forward FLOPs of the denoiser (2 x with LoRA: frozen weights get no gradient; adapters'
own FLOPs are left out) over the peak of the device, recomputation not counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import gib, percent, print_table, write_json

from longtake.parallel.world import World, start_world
from longtake.plan.machine import Machine
from longtake.plan.probe import ProbeStep
from longtake.plan.run import EntryPlan, RunPlan, plan_run
from longtake.plan.speed import update_seconds
from longtake.plan.timing import clock
from longtake.presets import run_file
from longtake.track.devices import gpu_named, peak_flops
from longtake.train.config import RunConfig
from longtake.train.optimizer.update import WeightUpdate
from longtake.train.run_file import read_run

BUCKETS = {
    "opensora_v2/lora": ("256px/1f", "256px/65f", "256px/129f"),
    "opensora_v2/lora_24gb": ("256px/1f", "256px/65f", "256px/129f"),
    "opensora_v2/finetune_1gpu": ("256px/1f", "256px/65f", "256px/129f"),
    "cogvideox_fun/lora_2b": ("480x720/49f",),
    "cogvideox_fun/lora_5b": ("480x720/49f",),
    "cogvideox_fun/full_5b": ("480x720/49f",),
    "wan/lora_1_3b": ("480p/81f",),
    "wan/lora_5b": ("480p/81f",),
    "wan/lora_14b": ("480p/33f",),
    "wan/full_1_3b": ("480p/81f",),
}
_SIZED = ("--sizes", "None", "--bucket_config", '{"480x720": {49: (1.0, 1)}}')  # of presets that draw their sizes
TINY_BUCKETS = ("32px/1f", "32px/17f", "64px/17f")


def main() -> None:
    """Measures every preset and prints one table."""
    arguments = _arguments()
    figures: list[dict[str, Any]] = []
    with start_world(arguments.device) as world:
        for preset in arguments.preset or BUCKETS:
            figures += measure(preset, arguments, world)
    head = ("preset", "bucket", "tokens", "batch", "micro-batch ms", "update ms", "micro-batches", "step s", "MFU")
    print_table((*head, "GiB", "GiB forecast", "forecast / peak"), [_row(line) for line in figures])
    write_json(arguments.json, "finetune", {"tiny": arguments.tiny, "runs": figures})


def measure(preset: str, arguments: argparse.Namespace, world: World) -> list[dict[str, Any]]:
    """The figures of one preset, a line for each bucket."""
    words = ["--dataset.data-path", "-", "--device", arguments.device, *(["--tiny"] if arguments.tiny else [])]
    words += _SIZED if preset.startswith("cogvideox_fun/") and not arguments.tiny else ()
    config = read_run(run_file(preset, "train"), words, RunConfig).value
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "h200"
    plan = plan_run(config, 1, Machine(gpu_named(gpu)))
    timed = _Timed(world)
    wanted = arguments.bucket or (TINY_BUCKETS if arguments.tiny else BUCKETS[preset])
    if not (entries := [entry for entry in plan.entries if entry.name in wanted]):
        raise SystemExit(f"{preset}: expected buckets of {[entry.name for entry in plan.entries]}, got {wanted}")
    step = ProbeStep(plan, config, world, lambda denoiser: timed.over(WeightUpdate(denoiser, config).at_rate_zero))
    lines = [_line(preset, plan, entry, step, timed, arguments) for entry in entries]
    del step
    world.free_memory()
    return lines


def _line(
    preset: str, plan: RunPlan, entry: EntryPlan, step: ProbeStep, timed: _Timed, arguments: argparse.Namespace
) -> dict[str, Any]:
    batch, device = entry.bucket.batch_size, step.system.device
    timed.seconds.clear()
    tries = [step.measure(entry.bucket, batch) for _ in range(arguments.repeats)]
    times = [one.seconds for one in tries if one.seconds is not None]
    peaks = [one.peak_bytes for one in tries if one.peak_bytes is not None]
    forecast = plan.work.memory(entry.bucket, plan.layout, batch, encodes=False).total
    line: dict[str, Any] = {
        "preset": preset,
        "bucket": entry.name,
        "tokens": entry.tokens,
        "batch": batch,
        "micro_batches": plan.layout.micro_batches,
        "out_of_memory": not times,
        "forecast_bytes": forecast,
        "peak_bytes": max(peaks, default=None),
    }
    if times:
        micro_batch, update = min(times), min(timed.seconds)
        passes = 2 if plan.work.config.lora is not None else 3
        flops = passes * batch * step.system.flops(entry.bucket.shape)
        peak = peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        count, time = plan.layout.micro_batches, entry.time
        update_forecast, on_gpu = update_seconds(plan.work.model, plan.layout, plan.machine), device.type == "cuda"
        line |= {
            "step_ms": 1e3 * (count * micro_batch + update),
            "forecast_ms": 1e3 * (count * (time.seconds - time.encoding) + update_forecast) if on_gpu else None,
            "micro_batch_ms": 1e3 * micro_batch,
            "update_ms": 1e3 * update,
            "step_seconds": plan.layout.micro_batches * micro_batch + update,
            "mfu": flops / micro_batch / peak if peak else None,
        }
    return line


class _Timed:
    """Seconds of every update, the device waited for."""

    def __init__(self, world: World) -> None:
        self.seconds: list[float] = []
        self._device = world.device

    def over(self, update: Callable[[], None]) -> Callable[[], None]:
        """The same update, timed."""

        def timed() -> None:
            start = clock(self._device)
            update()
            self.seconds.append(clock(self._device) - start)

        return timed


def _row(line: dict[str, Any]) -> tuple[str, ...]:
    update, step, mfu = "-", "-", "-"
    if line["out_of_memory"]:
        micro_batch = "out of memory"
    else:
        micro_batch, update = f"{line['micro_batch_ms']:.0f}", f"{line['update_ms']:.0f}"
        step, mfu = f"{line['step_seconds']:.2f}", percent(line["mfu"])
    peak, forecast = line["peak_bytes"], line["forecast_bytes"]
    return (
        line["preset"],
        line["bucket"],
        f"{line['tokens']:,}",
        str(line["batch"]),
        micro_batch,
        update,
        str(line["micro_batches"]),
        step,
        mfu,
        gib(peak),
        gib(forecast),
        "-" if peak is None else f"{forecast / peak:.2f}",
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", action="append", choices=tuple(BUCKETS), help="default: all of them")
    parser.add_argument("--bucket", action="append", help="as the plan names them; default: by preset")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="tiny models")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
