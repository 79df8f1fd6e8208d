"""The demo's steps: make clips, probe, train, generate, judge, report. Each step is the product's own."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from longtake import __version__
from longtake.data.clips.video import read_image
from longtake.data.probing.probe import probe_table
from longtake.data.shapes import make_shapes, split_prompts
from longtake.data.tables.table import ClipTable
from longtake.demo.extras import Check, draw_given, least_psnr, sample_few, split_table, stills_of
from longtake.demo.judge import JUDGED, Accuracy, score
from longtake.demo.place import REPORT, Note, find_run, free_folder
from longtake.demo.report import Group, ShownSample, write_report
from longtake.demo.systems import FIRST_FRAME, DemoSystem, GivenCase, given_frames, has_several_buckets, kinds, looks
from longtake.durable import replace
from longtake.generate.config import GenerateConfig
from longtake.generate.requests import Video
from longtake.generate.run import generate, open_system, read_video
from longtake.generate.source import resolve_source
from longtake.pages import duration, percent
from longtake.parallel.world import World
from longtake.system.build import System
from longtake.train.config import RunConfig
from longtake.train.report import read_record
from longtake.train.run import Outcome, train
from longtake.train.run_file import read_run

_VIDEOS_AT_ONCE = 32
_OF_BOTH = "device", "dtype", "cpu_threads", "num_workers"  # keys that adapters train with as the run did


@dataclass(frozen=True)
class DemoOutcome:
    """How the demo ended; no report where it was interrupted."""

    folder: Path
    run: Outcome | None = None  # of the training, once it has ended
    accuracy: dict[str, Accuracy] = field(default_factory=dict)  # by the name of a kind: "main", "heldout" ...
    checks: dict[str, float] = field(default_factory=dict)  # further figures, by name
    report: Path | None = None
    seconds: dict[str, float] = field(default_factory=dict)  # by part of the demo, interrupted calls included

    @property
    def stopped(self) -> bool:
        """Whether it was interrupted; the same call goes on."""
        return self.report is None


@dataclass(frozen=True)
class Sampler:
    """A model, and what it is asked for."""

    config: GenerateConfig
    system: System

    def asked(self, size: Mapping[str, Any], **keys: Any) -> Sampler:
        """Return the same with other keys; `size`: those of `sampling_option`."""
        option = self.config.sampling_option.model_copy(update=dict(size))
        return Sampler(self.config.model_copy(update={**keys, "sampling_option": option}), self.system)


@dataclass
class Demo:
    """One demo under way: where it is, what it was asked for, and its processes. Every method is collective."""

    folder: Path
    note: Note
    world: World
    console: Console
    system: DemoSystem
    config: RunConfig  # of its training
    of_adapters: Sequence[str] = ()
    groups: dict[str, Group] = field(default_factory=dict)  # what was judged so far, by name; on rank 0
    checks: dict[str, Check] = field(default_factory=dict)
    part: int = 0

    def __post_init__(self) -> None:
        self.kinds = kinds(self.config, self.system.held_back)

    def take(self, source: str) -> DemoOutcome:
        """Take all steps in their order, those that an earlier call has done in no time."""
        self.world.on_main(lambda: self.note.save(self.folder))
        self.begin(f"clips, in {self.folder}")
        if self.note.seconds:
            self.say(f"an earlier call was interrupted; this one goes on {shlex.join(['with', *self.note.overrides])}")
        with self.timed("make and probe the clips"):
            real = self.world.on_main(self.clips)
        self.begin("train")
        with self.timed("train"):
            run = self.train(source)
        if run.stopped:
            return DemoOutcome(self.folder, run, seconds=self.note.seconds)
        self.begin("generate and judge")
        with self.timed("generate and judge"):
            base = self.open(run.checkpoint, "--grid")
            self.samples(base)
        for name, extra in self.extras().items():
            self.begin(name)
            with self.timed(name):
                if not extra(run, base):
                    return DemoOutcome(self.folder, run, seconds=self.note.seconds)
        self.begin("report")
        report = self.folder / REPORT
        self.world.on_main(lambda: self.write(report, run, real))
        self.console.print(_accuracy_table(self.groups.values()))
        for check in self.checks.values():
            self.say(f"{check.what}: {check.found}, wanted {check.wanted}")
        self.say(f"{duration(sum(self.note.seconds.values()))} in all; open in a browser: {report}")
        accuracy = self.world.broadcast({name: group.accuracy for name, group in self.groups.items()})
        checks = {name: check.value for name, check in self.checks.items()}
        return DemoOutcome(self.folder, run, accuracy, checks, report, self.note.seconds)

    def extras(self) -> dict[str, Callable[[Outcome, Sampler], bool]]:
        """Return the parts that not every system has, by name; each returns whether it came to its end."""
        found: dict[str, Callable[[Outcome, Sampler], bool]] = {}
        for given in given_frames(self.config):
            found[given.part] = partial(self.go_on, given)
        if self.system.adapters is not None:
            found["learn a colour with adapters"] = self.adapt
        return found

    def train(self, source: str) -> Outcome:
        """Return the training run, or what is left of it."""
        return train(self.config, self.world, source, self.console)

    def begin(self, what: str) -> None:
        """Says which part begins."""
        self.part += 1
        self.say(f"[{self.part}/{4 + len(self.extras())}] {what}", "bold")

    def clips(self) -> Accuracy:
        """Make the clips and last their table, or take those that are there; return what the judge sees in them.
        Rank 0."""
        table = table_of(self.folder)
        with self.bar() as bar:

            def shown(text: str) -> Callable[[int, int], None]:
                task = bar.add_task(text, total=None)
                return lambda done, total: bar.update(task, completed=done, total=total)

            self.make_clips(table, shown)
            if self.system.held_back is not None:
                split_table(table, self.system.held_back)
            clips = ClipTable.open(table)
            pairs = ((clips.caption(row), read_video(Path(clips.location(row)))) for row in range(len(clips)))
            real = score(bar.track(pairs, total=len(clips), description="judging them"))
        self.say(f"{len(clips)} mp4 and png files with captions, listed in {table}")
        named = f"the colour of {percent(real.colour)}, the shape of {percent(real.shape)}"
        seen = f"{named} and the direction of {percent(real.direction)} of them"
        self.say(f"the judge, which is shown pixels alone, names {seen} correctly")
        return real

    def make_clips(self, table: Path, shown: Callable[[str], Callable[[int, int], None]]) -> None:
        """Make the clips and their table, where it is not there. `shown` begins a bar."""
        if not table.exists():
            num_stills = self.note.num_stills if has_several_buckets(self.config) else 0
            sizes = {"num_clips": self.note.num_clips, "num_stills": num_stills}
            look = looks(self.config)
            made = make_shapes(table.parent, **sizes, **look, progress=shown("making clips"))
            probe_table(made, table, progress=shown("probing"))

    def open(self, place: Path | None, *flags: str) -> Sampler:
        """What makes videos with the averaged weights of a checkpoint, or of a run's newest."""
        source = resolve_source(str(place), ["--batch-size", str(_VIDEOS_AT_ONCE), *flags])
        return Sampler(source.config, open_system(source, self.world, self.say))

    def samples(self, base: Sampler) -> None:
        """Generate every kind of video and judge the files, which appear in `samples/` when all are made."""
        partial = self.folder / ".samples.partial"
        self.world.on_main(lambda: shutil.rmtree(partial, ignore_errors=True))
        for kind in self.kinds:
            size = {"aspect_ratio": kind.aspect_ratio, "num_frames": kind.num_frames}
            own = {"prompt": list(kind.prompts), "save_dir": str(partial / kind.name)}
            self.videos(kind.name, kind.title, kind.num_shown, base.asked(size, **own))
        place = self.world.on_main(lambda: replace(partial, free_folder(self.folder / "samples")))
        total = sum(len(kind.prompts) for kind in self.kinds)
        self.say(f"{total} videos and stills, and contact sheets (grid.png), in {place}")

    def videos(self, name: str, title: str, num_shown: int, asked: Sampler, made: slice = slice(None)) -> list[Video]:
        """Generate videos, and judge them as one group; `made`: as for `judge`."""
        with self.bar() as bar:
            task = bar.add_task("generating", total=None)

            def update(done: float, of: int) -> None:
                bar.update(task, completed=done, total=of)

            videos = generate(asked.system, asked.config, self.world, lambda line: None, update)
        if self.world.is_main:
            self.groups[name] = _judged(title, num_shown, videos, made)
        return videos

    def go_on(self, given: GivenCase, run: Outcome, base: Sampler) -> bool:
        """Videos that go on from frames that training has not seen, by prompts of the main bucket."""
        prompts, folder, look = self.kinds[0].prompts, self.folder / given.name, looks(self.config)
        table = self.world.on_main(lambda: draw_given(folder, prompts, given, self.config, look))
        place = self.world.on_main(lambda: free_folder(folder / "samples"))
        asked = base.asked(
            {}, cond_type=given.cond_type or base.config.kind_of_first_frame, prompts=str(table), save_dir=str(place)
        )
        self.videos(given.name, f"{given.title}, main bucket", 12, asked, slice(*given.made))
        key = "given_frame_psnr" if given.name == FIRST_FRAME.name else f"{given.name}_psnr"
        self.checks[key] = least_psnr(asked.system, asked.config, folder / "looked_at", given.title)
        if given.name == FIRST_FRAME.name:
            frames = self.kinds[0].num_frames
            still = score((prompt, np.repeat(read_image(ref), frames, axis=0)) for prompt, ref in stills_of(table))
            words = "direction of the stills repeated, which do not move"
            self.checks["repeated_still_direction"] = Check(words, still.direction, percent(still.direction), "0 %")
        return True

    def adapt(self, run: Outcome, base: Sampler) -> bool:
        """Adapters learn a colour that the run was not shown; videos of it before and after, and of the others."""
        colour, folder = self.system.held_back, self.folder / "held_back"
        prompts = [line for lines in split_prompts() for line in lines if colour in line.split()]
        before = base.asked({}, prompt=prompts, num_sample=2, save_dir=str(folder / "before"))
        self.videos("held_back_before", f"{colour}, which training never showed", 6, before)
        trained = self.train_adapters(run)
        if trained.stopped:
            return False
        last = trained.checkpoint
        adapted, unused = self.open(last), self.open(last, "--lora.strength", "0")
        alike = base.config.sampling_option.model_dump()
        after = adapted.asked(alike, prompt=prompts, num_sample=2, save_dir=str(folder / "after"))
        self.videos("held_back_after", f"{colour}, with adapters trained on it", 6, after)
        main = self.kinds[0]
        others = adapted.asked(alike, prompt=list(main.prompts), save_dir=str(folder / "others"))
        self.videos("others_after", "Main bucket, with these adapters", 6, others)
        asked, place = {"prompt": list(main.prompts)}, folder / "looked_at"
        one, other = (sample_few(of.system, of.asked(alike, **asked).config, place)[1] for of in (base, unused))
        same, words = bool((one == other).all()), "adapters at strength 0 are the run without, bit by bit"
        self.checks["strength_0_is_the_base"] = Check(words, same, "yes" if same else "no", "yes")
        return True

    def train_adapters(self, run: Outcome) -> Outcome:
        """Return the run of adapters upon the demo's run."""
        source = str(find_run(self.folder, "adapters") or self.system.adapters)
        preset = read_run(source).value
        mix = [(str(table_of(self.folder).with_name(Path(path).name)), weight) for path, weight in preset.dataset.mix]
        own = ["--dataset.mix", repr(mix), "--outputs", str(self.folder), "--exp-name", "adapters"]
        own += ["--model.from-pretrained", str(run.folder)]
        own += [word for key in _OF_BOTH for word in (f"--{key}", repr(getattr(self.config, key)))]
        own += [word for key in ("model", "ae") for word in _flags_of(key, self.note.overrides)]
        config = read_run(source, [*own, *self.of_adapters]).value
        return train(config, self.world, source, self.console)

    def write(self, path: Path, run: Outcome, real: Accuracy) -> None:
        """The report. Rank 0."""
        on_cuda, cpu = self.world.device.type == "cuda", f"CPU, {os.cpu_count()} cores, {platform.machine()}"
        device = torch.cuda.get_device_name(self.world.device) if on_cuda else cpu
        versions = f"longtake {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
        facts = [("device", f"{self.world.size} x {device}" if self.world.size > 1 else device), ("versions", versions)]
        groups, checks = list(self.groups.values()), list(self.checks.values())
        write_report(path, read_record(run.folder), groups, real, self.note.seconds, facts, checks)

    def say(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False)

    def bar(self) -> Progress:
        """Return a live bar on a terminal, nothing elsewhere."""
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        live = self.console.is_terminal and self.world.is_main
        return Progress(*columns, console=self.console, transient=True, disable=not live)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time of a step to the note, also where it is interrupted."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.note.seconds[name] = self.note.seconds.get(name, 0.0) + time.perf_counter() - start
            if self.world.is_main:
                self.note.save(self.folder)


def _flags_of(section: str, words: Sequence[str]) -> Iterator[str]:
    """Those of a command line that are about a section, values that stand apart included."""
    taken = False
    for word in words:
        taken = word.startswith(f"--{section}.") if word.startswith("--") else taken
        if taken:
            yield word


def table_of(folder: Path) -> Path:
    return folder / "clips" / "clips.parquet"


def _judged(title: str, num_shown: int, videos: Sequence[Video], made: slice) -> Group:
    """Read files back, judge all, and pick the ones to show evenly."""
    pairs = [(video.prompt.text, read_video(video.path)) for video in videos]
    picks = np.linspace(0, len(pairs) - 1, min(num_shown, len(pairs))).round().astype(int)
    shown = [ShownSample.of(*pairs[pick], made) for pick in picks]
    return Group(title, score(pairs, made), shown)


def _accuracy_table(groups: Iterable[Group]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("videos")
    groups = list(groups)
    names = (*JUDGED, "continuity")  # as many as 80 columns hold
    for name in ("count", *names):
        table.add_column(name, justify="right")
    for group in groups:
        a = group.accuracy
        table.add_row(group.title, str(a.count), *(percent(a.shares[name]) for name in names))
    return table
