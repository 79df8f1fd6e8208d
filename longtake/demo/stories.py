"""The demo of stories: a curriculum from one scene to three, and what the mixer of segments is for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from longtake.contracts import EXIT_INTERRUPTED, UserError
from longtake.data.probing.probe import probe_table
from longtake.data.stories import make_stories
from longtake.demo.extras import Check
from longtake.demo.judge import scenes_of, score
from longtake.demo.place import find_run
from longtake.demo.report import Group
from longtake.demo.run import Demo, Sampler
from longtake.demo.systems import stories
from longtake.generate.requests import Video
from longtake.generate.run import read_video
from longtake.pages import percent
from longtake.train.config import RunConfig
from longtake.train.run import Outcome, train
from longtake.train.run_file import read_run

WITHOUT = "without"  # the run whose segments share a frame and no more
BACK = "_back"  # behind the name of videos in which the shape is gone: its last scene


class StoryDemo(Demo):
    """A demo whose run is the last stage of a curriculum. Another run of that stage, from the same weights, has no
    mixer. In a world of one process both train at once."""

    def __post_init__(self) -> None:
        self.kinds = stories(self.config)

    def extras(self) -> dict[str, Callable[[Outcome, Sampler], bool]]:
        return {"compare with no mixer": self.compare}

    def make_clips(self, table: Path, shown: Callable[[str], Callable[[int, int], None]]) -> None:
        for path, num_scenes in ((self.singles, 1), (table, 3)):
            if not path.exists():
                num_clips = self.note.num_clips // (2 if num_scenes == 1 else 1)
                bar = shown(f"making clips of {num_scenes} scenes")
                probe_table(make_stories(path.parent, num_scenes, num_clips=num_clips, progress=bar), path)

    @property
    def singles(self) -> Path:
        """The table of clips of one scene."""
        return self.folder / "clips" / "of_one_scene" / "clips.parquet"

    def train(self, source: str) -> Outcome:
        first = self.system.stages[0]
        known = find_run(self.folder, first)
        place = str(known or self.system.run)
        own = ["--dataset.data-path", str(self.singles), "--outputs", str(self.folder), "--exp-name", first]
        own += [] if known else ["--stage", first]
        before = train(read_run(place, [*own, *self.note.overrides]).value, self.world, place, self.console)
        if before.stopped:
            return before
        weights = {"from_pretrained": str(before.checkpoint)}
        self.config = self.config.model_copy(update={"model": self.config.model.model_copy(update=weights)})
        last = self.system.stages[-1]
        words = [*self.note.overrides, "--stage", last, "--dataset.data-path", str(self.config.dataset.data_path)]
        words += ["--model.mixer", "none", "--model.from-pretrained", str(before.checkpoint)]
        if self.world.size > 1:
            run = train(self.config, self.world, source, self.console)
            words += ["--outputs", str(self.folder / WITHOUT), "--exp-name", last, "--resume", "auto"]
            return run if run.stopped else self.second(read_run(str(self.system.run), words).value, run)
        words += ["--outputs", str(self.folder), "--exp-name", WITHOUT]  # the stage has a folder in there
        with self.beside(words) as other:
            run = train(self.config, self.world, source, self.console)
            if run.stopped:
                other.terminate()
        return replace(run, stopped=run.stopped or other.returncode == EXIT_INTERRUPTED)

    def second(self, config: RunConfig, run: Outcome) -> Outcome:
        """Trains another run in this world; the outcome is that of the first, stopped where this one is."""
        return replace(run, stopped=train(config, self.world, str(self.system.run), self.console).stopped)

    @contextmanager
    def beside(self, words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
        """Another training run on the other core, whose lines go to a file; waits for its end. Raises `UserError`
        where it fails."""
        log = self.folder / f"{WITHOUT}.log"
        self.say(f"beside it, the same without a mixer; its lines are in {log}")
        with log.open("ab") as lines:
            command = [sys.executable, "-m", "longtake", "train", str(self.system.run), *words]
            other = subprocess.Popen(command, stdout=lines, stderr=lines)
            try:
                yield other
            except BaseException:
                other.terminate()
                raise
            finally:
                other.wait()
        if other.returncode not in (0, EXIT_INTERRUPTED):
            raise UserError(f"{log}: the run without a mixer ended with status {other.returncode}; its lines say why")

    def compare(self, run: Outcome, base: Sampler) -> bool:
        """Return the same videos by the run without a mixer."""
        sampler = self.open(self.folder / WITHOUT / self.system.stages[-1])
        for kind in self.kinds:
            own = {"prompt": list(kind.prompts), "save_dir": str(self.folder / f"{WITHOUT}_mixer" / kind.name)}
            self.videos(f"{WITHOUT}_{kind.name}", f"No mixer. {kind.title}", 4, sampler.asked({}, **own))
        for name, words, wanted in (("", "with", "90 % or more"), (f"{WITHOUT}_", "without", "60 % or less")):
            if self.world.is_main:
                colour = self.groups[f"{name}gone{BACK}"].accuracy.colour
                what = f"colour of the shape that is back, {words} a mixer"
                self.checks[f"{name}gone{BACK}"] = Check(what, colour, percent(colour), wanted)
        return True

    def videos(self, name: str, title: str, num_shown: int, asked: Sampler, made: slice = slice(None)) -> list[Video]:
        videos = super().videos(name, title, num_shown, asked, made)
        if self.world.is_main and name.endswith("gone"):
            lasts = (scenes_of(video.prompt.text, read_video(video.path))[-1] for video in videos)
            self.groups[name + BACK] = Group(f"{title}, its last scene", score(lasts), ())
        return videos
