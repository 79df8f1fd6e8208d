"""What `longtake plan` says of a step of every preset on H200s, before and after; and of a step here, against the step.

python benchmarks/forecast.py                 every preset that trains, at its entry of most tokens
python benchmarks/forecast.py --encoding      encoding's share of a step by the rate of convolutions, by forecast.json
python benchmarks/forecast.py --here          rates of this machine, then a small model's steps against their forecast
python benchmarks/forecast.py --tiny          two presets; with --here one size

Before: the preset's file at commit 3834e5b, eager, counted by today's code; recomputed blocks keep their inputs alone
unless that file says more. After: as it is now. GPUs are as many as the preset is for, LoRA on one. Share of the limit:
matrix products at 742 TFLOP/s and attention at the best published kernel's rate, nothing else, over the step; with
stored latents nothing is encoded.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import print_table, write_json

from longtake.parallel.world import start_world
from longtake.plan.machine import Machine
from longtake.plan.measure import device_named, measure_rates
from longtake.plan.probe import ProbeStep
from longtake.plan.run import RunPlan, plan_run
from longtake.plan.speed import update_seconds
from longtake.plan.work import read_layout, read_work
from longtake.presets import FOLDER, find_preset, preset_gpus, presets
from longtake.track.devices import gpu_named
from longtake.train.config import RunConfig, RunWithoutTable
from longtake.train.optimizer.update import WeightUpdate
from longtake.train.run_file import read_run

BEFORE = "3834e5b"  # presets as they stood before the work on speed
FAMILIES = ("opensora_v2/", "opensora_v1_2/", "cogvideox_fun/", "ttt_video/")
CLIPS = ("--dataset.data-path", "clips.parquet")
EAGER = ("--compile", "False")
FULL = ("--model.recompute", "full")  # which blocks were then unless a preset set a budget
TERMS = ("products", "attention", "elementwise", "recomputation", "encoding", "other")
RESULTS = Path(__file__).parent / "results"
ENCODING = ("opensora_v2/stage1", "opensora_v2/stage2")  # at 8,960 and 76,544 tokens
TARGET_RATE = 300e12  # FLOP/s of convolutions at which encoding is to take 25 % and 10 % of a step there
SIZES = ((8, 4), (16, 2), (32, 1))  # frames and batch of what runs here
HERE: Mapping[str, Any] = {
    "dataset": {"data_path": "clips.csv"},
    "ae": {"type": "pixel", "temporal": 4, "spatial": 8},
    "t5": {"type": "words", "dim": 128, "max_length": 64},
    "clip": {"type": "words", "dim": 128, "max_length": 64},
    "model": {
        **{"in_channels": 768, "patch_size": 1, "hidden_size": 384, "num_heads": 6, "axes_dim": (16, 24, 24)},
        **{"depth": 2, "depth_single_blocks": 4, "vec_in_dim": 128, "context_in_dim": 128},
    },
    "max_steps": 100,
    "device": "cpu",
    "dtype": "fp32",
    "cpu_threads": 1,
}


def main() -> None:
    """Prints one table and writes its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--here", action="store_true")
    what.add_argument("--encoding", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    if arguments.here:
        name, figures = "forecast_here", steps_here(SIZES[:1] if arguments.tiny else SIZES)
    elif arguments.encoding:
        name, figures = "forecast_encoding", encoding_shares(("opensora_v2/lora",) if arguments.tiny else ENCODING)
    else:
        name, figures = "forecast", forecasts(arguments.tiny)
    write_json(arguments.json, name, figures, "benchmarks/forecast.py")


def forecasts(tiny: bool) -> dict[str, Any]:
    """A line for each preset, before and after."""
    found = (one for one in presets() if one.kind == "train" and one.name.startswith(FAMILIES) and one.gpus)
    names = {one.name: one.path for one in found if "stages" not in one.path.read_text(encoding="utf-8")}
    if tiny:
        names = {name: names[name] for name in ("opensora_v2/lora", "cogvideox_fun/lora_2b")}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name, path in names.items():
            gpus = 1 if "lora" in name else preset_gpus(str(path))[0]
            old = old_presets(Path(folder)) / path.relative_to(FOLDER)
            for way, file in {"before": old, "after": path}.items():
                if file.is_file():
                    words = old_words(file) if way == "before" else ()
                    lines.append({"preset": name, "gpus": gpus, "way": way, **step_of(file, words, gpus)})
                    print(f"{name} {way}: {lines[-1]['step_ms']:.0f} ms", flush=True)
    print_markdown(lines)
    return {"gpu": "h200", "before": BEFORE, "lines": lines}


def encoding_shares(names: Sequence[str]) -> dict[str, Any]:
    """Encoding's share of a step of each preset, whose other terms are those of `forecast.json`, at the table's rate of
    convolutions and at `TARGET_RATE`; and the rates at which it would take a quarter and a tenth."""
    steps = json.loads((RESULTS / "forecast.json").read_text(encoding="utf-8"))["figures"]["lines"]
    table = Machine(gpu_named("h200")).rates
    rates = {"table": table.convolutions, "target": TARGET_RATE}
    lines = []
    for name in names:
        (step,) = (line for line in steps if line["preset"] == name and line["way"] == "after")
        config = read_run(str(find_preset(name)), CLIPS, RunWithoutTable).value
        work, layout = read_work(config), read_layout(config, step["gpus"], min(step["gpus"], 8))
        (bucket,) = (one for one in work.entries if f"{one.resolution}/{one.num_frames}f" == step["entry"])
        flops = work.encoder_work(bucket, bucket.batch_size, layout.at_degree(work.degree(bucket, layout)).peers)
        each = 1e3 * layout.micro_batches
        rest, captions = step["step_ms"] - step["ms"]["encoding"], each * flops.products / table.products
        line = {key: step[key] for key in ("preset", "gpus", "entry", "tokens", "batch")}
        line |= {"rest_ms": rest, "captions_ms": captions, "convolutions_flops": flops.convolutions}
        for way, rate in rates.items():
            encoding = each * flops.convolutions / rate + captions
            line[way] = {"encoding_ms": encoding, "step_ms": rest + encoding, "share": encoding / (rest + encoding)}
        line["rate_for"] = {}
        for share in (0.25, 0.1):
            allowed = share / (1 - share) * rest - captions
            line["rate_for"][str(share)] = each * flops.convolutions / allowed if allowed > 0 else None
        lines.append(line)
    heads = ("preset", "tokens", *(f"at {rate / 1e12:.0f} TFLOP/s" for rate in rates.values()), "25 % at", "10 % at")
    print(f"| {' | '.join(heads)} |\n| {' | '.join(['---'] * len(heads))} |")
    for line in lines:
        shares = (f"{line[way]['share']:.1%}" for way in rates)
        needed = ("never" if rate is None else f"{rate / 1e12:,.0f} TFLOP/s" for rate in line["rate_for"].values())
        cells = (f"`{line['preset']}`", f"{line['tokens']:,}", *shares, *needed)
        print(f"| {' | '.join(cells)} |")
    return {"gpu": "h200", "rates": rates, "lines": lines}


def old_presets(folder: Path) -> Path:
    """The presets of the commit before, unpacked once."""
    place = "longtake/presets"
    if not (folder / place).is_dir():
        command = ["git", "archive", BEFORE, place]
        packed = subprocess.run(command, cwd=FOLDER.parents[1], capture_output=True, check=True)
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
            tar.extractall(folder, filter="data")
        for file in (folder / place).rglob("*.py"):  # budgets of that time saved attention and a few layers
            text = re.sub(r"grad_ckpt_budget=[\d.]+", 'recompute="selective"', file.read_text(encoding="utf-8"))
            file.write_text(re.sub(r"\{t: (\(.*?\)) for t in (.+)\}", _listed, text), encoding="utf-8")
    return folder / place


def _listed(comprehension: re.Match[str]) -> str:
    """A dict of that time's files written out: run files have no comprehensions any more."""
    value, frames = comprehension.groups()
    return "{" + ", ".join(f"{t}: {value}" for t in eval(frames, {"range": range})) + "}"


def old_words(file: Path) -> tuple[str, ...]:
    """What makes a preset of the commit before run as it did then."""
    is_set = "recompute" in read_run(str(file), CLIPS, RunWithoutTable).value.model.model_fields_set
    return EAGER if is_set else (*EAGER, *FULL)


def step_of(file: Path, words: Sequence[str], gpus: int) -> dict[str, Any]:
    """The step of the entry of most tokens, by the plan."""
    config = read_run(str(file), (*CLIPS, *words), RunWithoutTable).value
    plan = plan_run(config, gpus, Machine(gpu_named("h200")))
    entry = max(plan.entries, key=lambda one: (one.tokens, one.bucket.batch_size))
    times, each = entry.time, plan.layout.micro_batches
    update = update_seconds(plan.work.model, plan.layout, plan.machine)
    step = each * times.seconds + update
    terms = {name: each * times.parts.get(name, 0.0) for name in TERMS} | {"encoding": each * times.encoding}
    terms["other"] = step - sum(terms.values())
    stored = step - terms["encoding"]
    mfu = times.mfu * times.seconds * each / step
    return {
        "entry": entry.name,
        "tokens": entry.tokens,
        "batch": entry.bucket.batch_size,
        "fits": entry.fits,
        "step_ms": 1e3 * step,
        "ms": {name: 1e3 * seconds for name, seconds in terms.items()},
        "mfu": mfu,
        "of_limit": each * times.limit / step,
        "mfu_stored": mfu * step / stored,
        "of_limit_stored": each * times.limit / stored,
        "bytes": entry.memory.total,
    }


HEADS = ("preset", "GPUs", "entry", "batch", "step, ms", *TERMS, "MFU", "of the limit", "MFU, stored", "of it", "GiB")


def print_markdown(lines: Sequence[Mapping[str, Any]]) -> None:
    """A row for each preset, for those alike together: what it takes, before and behind the arrow as it is now."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in dict.fromkeys(line["preset"] for line in lines):
        before, after = ({**line, **line["ms"]} for line in lines if line["preset"] == name)
        cells = [str(after["gpus"]), after["entry"], str(after["batch"])]
        cells += [_from_to(f"{before[key]:,.0f}", f"{after[key]:,.0f}") for key in ("step_ms", *TERMS)]
        shares = ("mfu", "of_limit", "mfu_stored", "of_limit_stored")
        cells += [_from_to(f"{before[key]:.0%}", f"{after[key]:.0%}") for key in shares]
        cells.append(_from_to(*(f"{one['bytes'] / 2**30:.0f}{'' if one['fits'] else ' !'}" for one in (before, after))))
        rows.setdefault(tuple(cells), []).append(f"`{name}`")
    table = ([", ".join(names), *cells] for cells, names in rows.items())
    for cells in (HEADS, ["---"] * len(HEADS), *table):
        print(f"| {' | '.join(cells)} |")


def _from_to(before: str, after: str) -> str:
    return after if before == after else f"{before} → {after}"


class SteadyStep(ProbeStep):
    """Steps by the time that this process's threads are given: other work beside them does not count."""

    def _now(self) -> float:
        return time.process_time() / torch.get_num_threads()


def steps_here(sizes: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Forward and backward of a small model on the CPU, by the rates that are measured first, and as they take."""
    buckets = {"64px": {frames: (1.0, batch) for frames, batch in sizes}}
    lines = []
    with start_world("cpu") as world:
        for remat in (None, (2, 4)):
            model = {**HERE["model"], "grad_ckpt_settings": remat}
            config = RunConfig(**{**HERE, "model": model, "bucket_config": buckets})
            device = device_named("cpu", measures=True)
            rates = measure_rates(plan_run(config, 1, Machine(device)), world, print)
            plan = plan_run(config, 1, Machine(device, measured=rates))
            step = SteadyStep(plan, config, world, lambda of, config=config: WeightUpdate(of, config).at_rate_zero)
            lines += [_against(plan, step, entry, bool(remat)) for entry in plan.entries]
    shown = ("entry", "batch", "recomputed")
    print_table(
        (*shown, "forecast ms", "measured ms", "over it"),
        [(*(one[k] for k in shown), *(f"{one[k]:.3g}" for k in ("forecast_ms", "ms", "ratio"))) for one in lines],
    )
    ratios = [one["ratio"] for one in lines]
    return {"rates": rates.said, "lines": lines, "least": min(ratios), "most": max(ratios), "median": median(ratios)}


def _against(plan: RunPlan, step: ProbeStep, entry: Any, recomputed: bool) -> dict[str, Any]:
    batch = entry.bucket.batch_size
    seconds = median(step.measure(entry.bucket, batch).seconds for _ in range(3))
    forecast = entry.time.seconds - entry.time.encoding
    line = {"entry": entry.name, "tokens": entry.tokens, "batch": batch, "recomputed": recomputed}
    parts = {name: 1e3 * of for name, of in entry.time.parts.items()}
    return {**line, "forecast_ms": 1e3 * forecast, "parts": parts, "ms": 1e3 * seconds, "ratio": seconds / forecast}


if __name__ == "__main__":
    main()
