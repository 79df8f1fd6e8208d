"""The demo's steps: make clips, probe, train, generate, judge, report. Each step is the product's own."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from longtake import __version__, presets
from longtake.contracts import UserError
from longtake.data import ClipTable, probe_table
from longtake.data.shapes import COLOURS, make_shapes, split_prompts
from longtake.demo.judge import Accuracy, judge, score
from longtake.demo.place import REPORT, Note, choose_folder, find_run, free_folder, read_note
from longtake.demo.report import Group, ShownSample, write_report
from longtake.durable import replace
from longtake.generate import GenerationSource, Video, generate, open_system, read_video, resolve_source
from longtake.pages import duration, percent
from longtake.parallel import World, start_world
from longtake.system import System
from longtake.train import Outcome, RunConfig, read_record, read_run, train

CONFIG = presets.FOLDER / "demo" / "shapes.py"
NUM_CLIPS, NUM_STILLS = 2400, 240
_WIDE = _LONG = 0.4  # shares of the files
_VIDEOS_AT_ONCE = 32
_OWN_KEYS = ("dataset.data_path", "dataset.root", "outputs", "exp_name")


@dataclass(frozen=True)
class DemoKind:
    name: str
    title: str
    prompts: Sequence[str]
    aspect_ratio: str
    num_frames: int
    num_shown: int  # in the report


@dataclass(frozen=True)
class DemoOutcome:
    """How the demo ended; no report where it was interrupted."""

    folder: Path
    run: Outcome | None = None  # of the training, once it has ended
    accuracy: dict[str, Accuracy] = field(default_factory=dict)  # by the name of a kind: "main", "heldout" ...
    report: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # by part of the demo, interrupted calls included

    @property
    def stopped(self) -> bool:
        """Whether it was interrupted; the same call goes on."""
        return self.report is None


def kinds() -> list[DemoKind]:
    """What is generated: the main bucket first, then every other bucket, then what training never showed."""
    seen, unseen = split_prompts()
    stills = [f"a {colour} circle" for colour in COLOURS]
    return [
        DemoKind("main", "Main bucket: 32 x 32, 8 frames", seen, "1:1", 8, 24),
        DemoKind("wide", "Wide: 40 x 24, 8 frames", seen, "2:1", 8, 6),
        DemoKind("long", "Long: 32 x 32, 16 frames", seen, "1:1", 16, 6),
        DemoKind("wide_long", "Wide and long: 40 x 24, 16 frames", seen, "2:1", 16, 6),
        DemoKind("heldout", "Held out: 32 x 32, 8 frames", unseen, "1:1", 8, 12),
        DemoKind("heldout_long", "Held out: 32 x 32, 16 frames", unseen, "1:1", 16, 6),
        DemoKind("stills", "Stills: 32 x 32", stills, "1:1", 1, 6),
    ]


def run_demo(
    folder: Path,
    console: Console,
    overrides: Sequence[str] = (),
    num_clips: int = NUM_CLIPS,
    num_stills: int = NUM_STILLS,
) -> DemoOutcome:
    """Runs the demo in `folder`, going on where an interrupted one left off; beside a finished one in `folder-2`, ...

    `overrides` are of the training run, and remembered. Under torchrun every process calls it; rank 0 speaks and
    writes. Ctrl-C ends it with a word on how to go on. Raises `UserError` for a mistake in the overrides.
    """
    asked, folder = folder, choose_folder(folder)
    note = read_note(folder, overrides, num_clips, num_stills)
    _refuse_own_keys(note.overrides)
    source = str(find_run(folder) or CONFIG)
    own = ["--dataset.data-path", str(_table(folder)), "--outputs", str(folder), "--exp-name", "run"]
    config = read_run(source, [*own, *note.overrides]).value
    with start_world(config.device) as world:
        demo = Demo(folder, note, world, console if world.is_main else Console(quiet=True))
        try:
            outcome = demo.take(config, source)
        except KeyboardInterrupt:
            demo.say("interrupted")
            outcome = DemoOutcome(folder, seconds=note.seconds)
        if outcome.stopped:
            demo.say(f"to go on with the demo: longtake demo --folder {shlex.quote(str(asked))}")
        return outcome


@dataclass
class Demo:
    """One demo under way: where it is, what it was asked for, and its processes. Every method is collective."""

    folder: Path
    note: Note
    world: World
    console: Console

    def take(self, config: RunConfig, source: str) -> DemoOutcome:
        """Takes all steps in their order, those that an earlier call has done in no time."""
        self.world.on_main(lambda: self.note.save(self.folder))
        self.say(f"[1/4] clips, in {self.folder}", "bold")
        if self.note.seconds:
            self.say(f"an earlier call was interrupted; this one goes on {shlex.join(['with', *self.note.overrides])}")
        with self.timed("make and probe the clips"):
            real = self.world.on_main(self.clips)
        self.say("[2/4] train", "bold")
        with self.timed("train"):
            run = train(config, self.world, source, self.console)
        if run.stopped:
            return DemoOutcome(self.folder, run, seconds=self.note.seconds)
        self.say("[3/4] generate and judge", "bold")
        with self.timed("generate and judge"):
            groups = self.samples(str(run.checkpoint))
        self.say("[4/4] report", "bold")
        report = self.folder / REPORT
        self.world.on_main(lambda: self.write(report, run, groups, real))
        self.console.print(_accuracy_table(groups))
        self.say(f"{duration(sum(self.note.seconds.values()))} in all; open in a browser: {report}")
        accuracy = self.world.broadcast(
            {kind.name: group.accuracy for kind, group in zip(kinds(), groups, strict=False)}
        )
        return DemoOutcome(self.folder, run, accuracy, report, self.note.seconds)

    def clips(self) -> Accuracy:
        """Makes the clips and last their table, or takes those that are there; returns what the judge sees in them.
        Rank 0."""
        table, num_files = _table(self.folder), self.note.num_clips + self.note.num_stills
        with self.bar() as bar:

            def shown(text: str) -> Callable[[int, int], None]:
                task = bar.add_task(text, total=num_files)
                return lambda done, total: bar.update(task, completed=done, total=total)

            if not table.exists():
                counts = {"num_clips": self.note.num_clips, "num_stills": self.note.num_stills}
                made = make_shapes(table.parent, **counts, wide=_WIDE, long=_LONG, progress=shown("making clips"))
                probe_table(made, table, progress=shown("probing"))
            clips = ClipTable.open(table)
            pairs = ((clips.caption(row), read_video(Path(clips.location(row)))) for row in range(len(clips)))
            real = score(bar.track(pairs, total=len(clips), description="judging them"))
        self.say(f"{len(clips)} mp4 and png files with captions, listed in {table}")
        seen = f"the colour of {percent(real.colour)} and the direction of {percent(real.direction)} of them"
        self.say(f"the judge, which is shown pixels alone, names {seen} correctly")
        return real

    def samples(self, checkpoint: str) -> list[Group]:
        """Generates every kind of video with the averaged weights and judges the files, which appear in `samples/` when
        all are made; groups on rank 0."""
        source = resolve_source(checkpoint, ["--batch-size", str(_VIDEOS_AT_ONCE), "--grid"])
        system = open_system(source, self.world, self.say)
        partial = self.folder / ".samples.partial"
        self.world.on_main(lambda: shutil.rmtree(partial, ignore_errors=True))
        groups, made, total = [], 0, sum(len(kind.prompts) for kind in kinds())
        with self.bar() as bar:
            task = bar.add_task("generating", total=total)
            for kind in kinds():

                def update(done: float, of: int, before: int = made) -> None:
                    bar.update(task, completed=before + done)

                videos = self.videos(kind, source, system, partial / kind.name, update)
                made += len(videos)
                if self.world.is_main:
                    groups.append(_judged(kind, videos))
        place = self.world.on_main(lambda: replace(partial, free_folder(self.folder / "samples")))
        self.say(f"{total} videos and stills, and contact sheets (grid.png), in {place}")
        return groups

    def videos(
        self,
        kind: DemoKind,
        source: GenerationSource,
        system: System,
        folder: Path,
        progress: Callable[[float, int], None],
    ) -> list[Video]:
        size = {"aspect_ratio": kind.aspect_ratio, "num_frames": kind.num_frames}
        option = source.config.sampling_option.model_copy(update=size)
        own = {"prompt": list(kind.prompts), "sampling_option": option, "save_dir": str(folder)}
        config = source.config.model_copy(update=own)
        return generate(system, config, self.world, lambda line: None, progress)

    def write(self, path: Path, run: Outcome, groups: Sequence[Group], real: Accuracy) -> None:
        """The report. Rank 0."""
        on_cuda, cpu = self.world.device.type == "cuda", f"CPU, {os.cpu_count()} cores, {platform.machine()}"
        device = torch.cuda.get_device_name(self.world.device) if on_cuda else cpu
        versions = f"longtake {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
        facts = [("device", f"{self.world.size} x {device}" if self.world.size > 1 else device), ("versions", versions)]
        write_report(path, read_record(run.folder), groups, real, self.note.seconds, facts)

    def say(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False)

    def bar(self) -> Progress:
        """A live bar on a terminal, nothing elsewhere."""
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        live = self.console.is_terminal and self.world.is_main
        return Progress(*columns, console=self.console, transient=True, disable=not live)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds the time of a step to the note, also where it is interrupted."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.note.seconds[name] = self.note.seconds.get(name, 0.0) + time.perf_counter() - start
            if self.world.is_main:
                self.note.save(self.folder)


def _table(folder: Path) -> Path:
    return folder / "clips" / "clips.parquet"


def _judged(kind: DemoKind, videos: Sequence[Video]) -> Group:
    """Reads the files of a kind back, judges all, and picks the ones to show evenly."""
    pairs = [(video.prompt.text, read_video(video.path)) for video in videos]
    picks = np.linspace(0, len(pairs) - 1, min(kind.num_shown, len(pairs))).round().astype(int)
    shown = [ShownSample(*pairs[pick], judge(pairs[pick][1])) for pick in picks]
    return Group(kind.title, score(pairs), shown)


def _accuracy_table(groups: Sequence[Group]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("videos")
    for name in ("count", "colour", "direction", "both", "continuity"):
        table.add_column(name, justify="right")
    for group in groups:
        a = group.accuracy
        shares = (a.colour, a.direction, a.both, a.continuity)
        table.add_row(group.title, str(a.count), *map(percent, shares))
    return table


def _refuse_own_keys(overrides: Sequence[str]) -> None:
    """Raises `UserError` for a key that the demo sets itself."""
    for word in overrides:
        name = word.removeprefix("--").split("=")[0].replace("-", "_")
        if word.startswith("--") and name in _OWN_KEYS:
            raise UserError(
                f"{word.split('=')[0]}: the demo makes its own clips and folders; choose the place with --folder, "
                f"or train on other clips with longtake train {CONFIG} --dataset.data-path clips.csv"
            )
