"""Evaluation of a checkpoint: its held-out loss, its videos, their figures, and those of a user's command."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from longtake.checkpoint.runs import list_checkpoints
from longtake.checkpoint.state import RunState
from longtake.contracts import UserError
from longtake.data.clips.animation import is_still
from longtake.data.clips.transforms import fit_frame
from longtake.data.clips.video import ClipError, read_frames, read_image
from longtake.data.tables.mix import open_clips
from longtake.durable import write_whole
from longtake.evaluate.config import LOSSES_FILE
from longtake.evaluate.metrics import SeenVideo, figures, means, video_figures
from longtake.evaluate.validation import Validation, plan_validation
from longtake.generate.requests import Video
from longtake.generate.run import open_system, read_video
from longtake.generate.source import load_weights, resolve_source
from longtake.parallel.config import ParallelConfig
from longtake.parallel.degrees import BucketPeers
from longtake.parallel.world import World
from longtake.random import hash64
from longtake.small_files import parse_json
from longtake.system.build import System
from longtake.track.progress import make_console, task_progress
from longtake.track.trackers import read_lines
from longtake.train.config import RunConfig
from longtake.train.heldout import HeldOut
from longtake.train.inputs import RunData, Table, open_held_out, open_held_out_table

FOLDER = "watch"  # in the folder of a run: what is made beside it
_CLIPS, _FRAMES = 12, 49  # of the data, whose figures those of the videos are compared with
_MOST_ROWS = 100_000  # of a table, that they are chosen from
_COMMAND_SECONDS = 3600.0
_OF_LOSSES = {"measured", "clips", "loss", "levels", "buckets"}  # of a line


@dataclass
class Judge:
    """Validates the checkpoints of one run, on this process's device; its model is built for the first of them."""

    run: Path
    config: RunConfig  # with a `validation` section, for one process
    world: World
    command: str | None = None  # gets the folder of the videos, prints a JSON object of numbers
    say: Any = print
    _system: System | None = None
    _held_out: HeldOut | None = None
    _data: dict[str, float] = field(default_factory=dict)
    _open: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        assert self.config.validation is not None, "a run without validations"
        self.section = self.config.validation
        self.validation: Validation = plan_validation(self.config, self.section)

    def close(self) -> None:
        """Free the model, and end the processes that read clips."""
        self._open.close()
        self._system = self._held_out = None
        self.world.free_memory()

    def judge(self, checkpoint: Path, step: int) -> Iterator[tuple[dict[str, Any], list[Video]]]:
        """Yield a line for each kind of weights that the section wants and the checkpoint has, with the videos made
        of it. Raises OSError where the checkpoint goes away meanwhile."""
        if self._system is None:
            self._build(checkpoint)
        assert self._system is not None, "it was built"
        seen = set[str]()
        for ema in {"both": (True, False), True: (True,), False: (False,)}[self.section.ema]:
            part = load_weights(self._system, checkpoint, ema)
            weights = "ema" if part == "ema" else "raw"
            if weights in seen:
                continue
            seen.add(weights)
            line: dict[str, Any] = {"step": step, "weights": weights}
            console, name = make_console(), f"{self.run}: step {step}, {weights} weights"
            if self._held_out is not None:
                with task_progress(console, f"{name}, held-out loss") as show:
                    line |= self._held_out.losses(show, lambda: False) or {}
            with task_progress(console, f"{name}, videos") as show:
                folder = place_of(self.run, weights)
                videos = self.validation.make(self._system, folder, step, self.world, show) or []
            if videos:
                line["videos"] = self._figures(videos) | self._own_figures(videos[0].path.parent)
            yield line, videos

    def _build(self, checkpoint: Path) -> None:
        """Build the model, with its encoders, and open the clips that its loss is measured on."""
        source = resolve_source(str(checkpoint), ["--device", self.world.device.type])
        self._system = open_system(source, self.world, lambda line: None)  # which weights, each line says
        config, world = self.config, self.world
        clips = _clips_of_run(config)
        if clips is not None:
            with suppress(ClipError, OSError, UserError):
                self._data = means(_figures_of_clips(clips, self.validation.config.fps_save))
        if self.section.holds_out and clips is None:
            lacking = f"{self.run}: its clips are not here, so no held-out loss can be measured"
            if not self.section.prompts:
                raise UserError(lacking)
            self.say(lacking)
        elif self.section.holds_out:
            assert clips is not None, "they are here"
            data = RunData(clips, None, open_held_out_table(config))
            peers = BucketPeers.create(self._system.mesh)
            folder = self.run / FOLDER
            folder.mkdir(exist_ok=True)
            stream = open_held_out(config, self._system, data, peers, world, folder, self.say)
            self._open.callback(stream.loader.close)
            self._held_out = HeldOut(config, self._system, stream, stream.plan(0, None), world)

    def _figures(self, videos: Sequence[Video]) -> dict[str, float]:
        seen = []
        for video in videos:
            frames, first = read_video(video.path), None
            if video.refs and (first := _first_frame(video.refs[0])) is not None:
                first = _fitted(first, frames.shape[1:3])
            seen.append(SeenVideo(video.prompt.text, frames, first))
        return figures(seen, self._data)

    def _own_figures(self, folder: Path) -> dict[str, float]:
        """Return the figures that the user's command prints for the videos in a folder; if it fails, report it and
        return none."""
        if self.command is None:
            return {}
        words = [*shlex.split(self.command), str(folder)]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True)
            found = parse_json(done.stdout)
            return {str(name): float(value) for name, value in found.items()}
        except (OSError, subprocess.SubprocessError, ValueError, TypeError, AttributeError) as error:
            said = getattr(error, "stderr", None) or str(error)
            self.say(f"--metrics {self.command!r}: {said.strip()[-200:]}; it is to print a JSON object of numbers")
            return {}


def place_of(run: Path, weights: str) -> Path:
    """Return the folder for the videos of one kind of weights; its subfolders are as in a run's."""
    return run / FOLDER / ("raw" if weights == "raw" else "")


def for_one_process(config: RunConfig, checkpoint: Path) -> RunConfig:
    """Return a run's config for this process alone; what the run has not trained is read from where it came from."""
    model = config.model.model_copy(update={"from_pretrained": RunState.read(checkpoint).frozen_source})
    dataset = config.dataset.model_copy(update={"latents": None})
    parts = {"parallel": ParallelConfig(), "model": model, "dataset": dataset, "num_workers": 0}
    return config.model_copy(update=parts)


def _clips_of_run(config: RunConfig) -> Table | None:
    """Return the table of the run's clips; None where it is not here."""
    try:
        return open_clips(config.dataset, config.sample_rules.columns)
    except (UserError, OSError):
        return None


def _figures_of_clips(clips: Table, fps: float) -> Iterator[Mapping[str, float]]:
    """Of the beginnings of some videos among the clips, always the same ones, at about `fps`."""
    rows = sorted(range(min(len(clips), _MOST_ROWS)), key=lambda row: hash64("watch", int(clips.clip_ids[row])))
    for row in [row for row in rows if clips.num_frames[row] > 2][:_CLIPS]:
        step = max(1, round(float(clips.fps[row]) / fps)) if clips.fps[row] > 0 else 1
        with suppress(ClipError, OSError):
            numbers = range(0, int(clips.num_frames[row]), step)[:_FRAMES]
            yield video_figures(read_frames(clips.location(row), numbers))


def _first_frame(path: str) -> np.ndarray | None:
    with suppress(ClipError, OSError):
        return read_image(path)[0] if is_still(path) else read_frames(path, [0])[0]
    return None


def _fitted(frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return a frame as a video of a size begins with it: covered, the overhang cut evenly."""
    return np.ascontiguousarray(fit_frame(frame, size).transpose(1, 2, 0))


def steps_saved(run: Path) -> list[int]:
    """Return the steps of the whole checkpoints of a run."""
    return [info.step for info in list_checkpoints(run) if info.complete]


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Return the recorded figures of a run's checkpoints, in the order of steps."""
    path = run / FOLDER / LOSSES_FILE
    if not path.exists():
        return []
    lines = [parse_json(line) for line in path.read_text("utf-8").splitlines() if line.endswith("}")]
    return sorted(lines, key=lambda line: line["step"])


def lines_of_both(run: Path) -> list[dict[str, Any]]:
    """Return a line for each step and kind of weights, of the run's own validations and those beside it, whose
    figures count where both have some. Losses of other clips or levels than the last ones are no part of them: a
    curve of both would tell of their difference."""
    own = read_lines(run / LOSSES_FILE) if (run / LOSSES_FILE).exists() else []
    beside = lines_of(run)
    whose = [line["measured"] for line in (*own, *beside) if "measured" in line][-1:]
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for line in (*own, *beside):
        kept = dict(line) if line.get("measured") in (None, *whose) else {k: line[k] for k in line.keys() - _OF_LOSSES}
        key = line["step"], line["weights"]
        found[key] = {**found.get(key, {}), **kept}
    return [found[key] for key in sorted(found)]


def write_lines(run: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Write them anew, whole or not at all."""
    write_whole(run / FOLDER / LOSSES_FILE, "".join(json.dumps(line) + "\n" for line in lines))
