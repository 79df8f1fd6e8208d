"""The demo's steps: make clips, probe, train, generate, judge, report. Each step is the product's own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from longtake import __version__
from longtake.data import ClipTable, probe_table
from longtake.data.shapes import COLOURS, make_shapes, split_prompts
from longtake.demo.report import DemoReport, Group, Sample, write_report
from longtake.evaluate import Accuracy, judge, score
from longtake.generate import generate, open_system, read_video, resolve_source
from longtake.parallel import start_world
from longtake.track import METRICS_FILE, read_lines
from longtake.train import Outcome, train_run

CONFIG = Path(__file__).with_name("shapes.py")
REPORT = "report.html"
NUM_CLIPS, NUM_STILLS = 1440, 180
_VIDEOS_AT_ONCE = 32


@dataclass(frozen=True)
class Kind:
    """One set of videos that the demo makes and judges."""

    name: str
    title: str
    prompts: Sequence[str]
    aspect_ratio: str
    num_frames: int
    num_shown: int


@dataclass(frozen=True)
class DemoOutcome:
    """How the demo ended; no accuracy and no report where it was stopped while training."""

    folder: Path
    run: Outcome
    accuracy: dict[str, Accuracy]
    report: Path | None


def run_demo(
    folder: Path, console: Console, overrides: Sequence[str] = (), num_clips: int = NUM_CLIPS, num_stills: int = NUM_STILLS
) -> DemoOutcome:
    """Runs the demo in `folder`, going on where an interrupted one left off. `overrides` are of the training run."""
    seconds: dict[str, float] = {}
    clips = folder / "clips"
    with _timed(seconds, "make and probe clips"):
        table = _prepare(clips, console, num_clips, num_stills)
    real = score(_real_clips(table))
    console.print(f"the judge sees colour {real.colour:.0%} and direction {real.direction:.0%} of {real.count} real clips right")
    run_folder = folder / "run"
    source, flags = str(CONFIG), ["--dataset.data-path", str(table), "--outputs", str(folder), "--exp-name", "run"]
    if run_folder.is_dir():
        source, flags = str(run_folder), []
    with _timed(seconds, "train"):
        outcome = train_run(source, [*flags, *overrides], console)
    if outcome.stopped:
        console.print("to go on with the whole demo: longtake demo", markup=False)
        return DemoOutcome(folder, outcome, {}, None)
    with _timed(seconds, "generate and judge"):
        groups = _generate(folder, outcome.folder, console)
    report = _report(folder, outcome, groups, seconds, real)
    for group in groups:
        a = group.accuracy
        console.print(f"{group.title}: colour {a.colour:.1%}, direction {a.direction:.1%}, both {a.both:.1%} of {a.count}")
    console.print(f"report: {report}", markup=False)
    return DemoOutcome(folder, outcome, {group.title: group.accuracy for group in groups}, report)


def kinds() -> list[Kind]:
    """What is generated: the main bucket first, then every other bucket, then what training never showed."""
    train, heldout = split_prompts()
    stills = [f"a {colour} circle" for colour in COLOURS]
    return [
        Kind("main", "main bucket (1:1, 8 frames)", train, "1:1", 8, 24),
        Kind("wide", "wide (24x40, 8 frames)", train, "2:1", 8, 6),
        Kind("long", "long (1:1, 16 frames)", train, "1:1", 16, 6),
        Kind("wide_long", "wide and long (24x40, 16 frames)", train, "2:1", 16, 6),
        Kind("heldout", "held-out combinations (1:1, 8 frames)", heldout, "1:1", 8, 12),
        Kind("heldout_long", "held-out combinations (1:1, 16 frames)", heldout, "1:1", 16, 6),
        Kind("stills", "stills (1:1)", stills, "1:1", 1, 6),
    ]


def _prepare(clips: Path, console: Console, num_clips: int, num_stills: int) -> Path:
    """Makes the clips and their table, or finds those of an interrupted demo. Returns the probed table."""
    target = clips / "clips.parquet"
    if target.exists():
        return target
    with console.status("making clips") as status:
        shapes = make_shapes(
            clips,
            num_clips=num_clips,
            num_stills=num_stills,
            progress=lambda done, total: status.update(f"making clips: {done} of {total}"),
        )
        result = probe_table(
            shapes.table,
            target,
            workers=0,
            progress=lambda done, total: status.update(f"probing: {done} of {total}"),
        )
    console.print(f"{result.kept} clips in {clips}, table {target}", markup=False)
    return target


def _real_clips(table_path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every file of the table, decoded, beside its caption."""
    table = ClipTable.open(table_path)
    return ((table.caption(row), read_video(table.path(row))) for row in range(len(table)))


def _generate(folder: Path, run_folder: Path, console: Console) -> list[Group]:
    """Generates every kind of video with the run's averaged weights, and judges the files that were written."""
    source = resolve_source(str(run_folder), ["--batch-size", str(_VIDEOS_AT_ONCE)])
    groups = []
    with start_world(source.config.device) as world:
        system = open_system(source, world, lambda line: console.print(line, markup=False))
        for kind in kinds():
            option = source.config.sampling_option.model_copy(
                update={"aspect_ratio": kind.aspect_ratio, "num_frames": kind.num_frames}
            )
            place = str(folder / "samples" / kind.name)
            config = source.config.model_copy(
                update={"prompt": list(kind.prompts), "sampling_option": option, "save_dir": place, "grid": True}
            )
            with console.status(f"generating: {kind.title}"):
                videos = generate(system, config, world, _silent)
            pairs = [(video.prompt.text, read_video(video.path)) for video in videos]
            stride = -(-len(pairs) // kind.num_shown)
            shown = [Sample(prompt, frames, judge(frames)) for prompt, frames in pairs[::stride]]
            groups.append(Group(kind.title, score(pairs), shown))
    return groups


def _report(
    folder: Path, outcome: Outcome, groups: Sequence[Group], seconds: dict[str, float], real: Accuracy
) -> Path:
    """Writes `report.html` into the demo's folder."""
    lines = read_lines(outcome.folder / METRICS_FILE)
    main = groups[0].accuracy
    path = folder / REPORT
    write_report(
        path,
        DemoReport(
            summary=(
                f"{outcome.clock.global_step} steps on made-up clips; in the main bucket {main.colour:.0%} of the videos have "
                f"the colour and {main.direction:.0%} the direction that the prompt asks for, by a judge that only sees "
                f"pixels (real clips: {real.colour:.0%} and {real.direction:.0%})."
            ),
            groups=groups,
            losses=[(line["step"], line["loss"]) for line in lines],
            buckets=(outcome.folder / "bucket_report.txt").read_text(encoding="utf-8"),
            seconds=list(seconds.items()),
            facts=[
                ("version", __version__),
                ("torch", torch.__version__),
                ("device", torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"),
                ("run folder", str(outcome.folder)),
                ("checkpoint", str(outcome.checkpoint)),
                ("samples seen", str(outcome.clock.samples)),
            ],
            fps=8,
        ),
    )
    return path


def _silent(text: str) -> None:
    """The status line says enough."""


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
