"""The loop of `longtake watch`: checkpoints as they come, newest first, and alarms over the curves of their runs."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch

from longtake import locks
from longtake.checkpoint.leases import leased
from longtake.checkpoint.runs import CheckpointInfo, held, list_checkpoints
from longtake.contracts import UserError
from longtake.durable import write_whole
from longtake.evaluate.validation import plan_validation
from longtake.generate.requests import Video
from longtake.generate.run import read_video
from longtake.parallel.world import World, start_world
from longtake.track.trackers import METRICS_FILE, WANDB_ID_FILE, TrackedRun, TrackedVideo, Trackers
from longtake.train.asking import is_training
from longtake.train.config import RunConfig, RunWithoutTable
from longtake.train.health.launches import read_launches
from longtake.train.heldout import curves
from longtake.train.run_file import CONFIG_FILE, read_run
from longtake.watch.alarms import Curves, find_alarms
from longtake.watch.judging import FOLDER, Judge, for_one_process, lines_of, lines_of_both, steps_saved, write_lines
from longtake.watch.page import write_page
from longtake.watch.telling import Teller

_FREE_MIB = 600  # of memory that a GPU nobody uses may have taken
_LAST_BYTES = 1 << 25  # of metrics.jsonl that alarms look at
Say = Callable[[str], None]


@dataclass(frozen=True)
class WatchOptions:
    """Options of watching runs."""

    overrides: tuple[str, ...] = ()  # of their configs, such as --validation.prompts FILE
    device: str = "auto"
    every: float = 30.0  # seconds between two looks
    once: bool = False  # what there is now, and no more
    metrics: str | None = None  # a command: `Judge.command`
    on_alarm: str | None = None
    webhook: str | None = None
    pick: str = "all"  # checkpoints: all, last, last:STEP, first-of-pass
    wandb_run: str | None = None  # id of the W&B run that is written into, or "new"; None: that of the run


@dataclass
class _Watched:
    """One run that is watched."""

    run: Path
    config: RunConfig
    changed: float  # when its config was written
    teller: Teller
    trackers: Trackers

    def tell_alarms(self) -> bool:
        """Report the alarms that the current curves raise; return whether any has begun or ended."""
        return self.teller.tell(find_alarms(curves_of(self.run)))

    def due(self, failed: set[Path], pick: str) -> CheckpointInfo | None:
        """Return the newest whole checkpoint that is not judged yet, as it is now."""
        judged = {(line["step"], line.get("saved")) for line in lines_of(self.run)}
        found = [info for info in list_checkpoints(self.run) if info.complete]
        if pick == "first-of-pass":
            found = sorted({info.epoch: info for info in reversed(found)}.values(), key=lambda info: info.step)
        elif pick.startswith("last"):
            _, _, step = pick.partition(":")
            found = [info for info in found if not step or info.step <= int(step)][-1:]
        waiting = (info for info in reversed(found) if (info.step, _saved(info)) not in judged)
        return next((info for info in waiting if info.path not in failed), None)


def watch_runs(runs: Sequence[Path], options: WatchOptions, say: Say) -> None:
    """Look after runs until Ctrl-C, or once. Raises `UserError` for what is no run, or has nothing to validate."""
    with ExitStack() as stack:
        watched = [stack.enter_context(_watched(run, options, say)) for run in runs]
        device, judges, failed = None, None, set[Path]()
        told = False
        if not options.once:
            say(f"watches {', '.join(map(str, runs))}: looks every {options.every:g} s; Ctrl-C ends it")
        while True:
            for one in watched:
                if one.tell_alarms():
                    write_page(one.run)
            due = [(one, info) for one in watched if (info := one.due(failed, options.pick)) is not None]
            if due and device is None:
                device = _free_device(options.device, [one for one, _ in due])
                if device is not None:
                    judges = _Judges(stack.enter_context(start_world(device)), options, say)
                    stack.callback(judges.close)
                elif not told:
                    told = True
                    for one, _ in due:
                        say(f"{one.run}: no free GPU is here: {_left_to(one)}")
            if due and judges is not None:
                one, info = max(due, key=lambda pair: pair[1].when)
                with _telling_meanwhile(watched, options.every):
                    judged = _judge(one, info, judges, say)
                if judged:
                    say(f"page: {write_page(one.run)}")
                else:
                    failed.add(info.path)
                continue
            if options.once:
                left = sorted(str(path) for path in failed if path.exists())
                done = f"could not be validated: {', '.join(left)}" if left else "all checkpoints are validated"
                say("checkpoints wait for a GPU" if due else done)
                return
            time.sleep(options.every)


@dataclass
class _Judges:
    """The judge of the run whose checkpoint came last: one model at a time is in memory."""

    world: World
    options: WatchOptions
    say: Say
    last: Judge | None = None

    def of(self, one: _Watched, checkpoint: Path) -> Judge:
        """Return the judge of a run, as its config is now. Raises `UserError` for a damaged checkpoint."""
        if self.last is None or self.last.run != one.run or _changed(one.run) != one.changed:
            self.close()
            one.config, one.changed = _read(one.run, self.options), _changed(one.run)
            config = for_one_process(one.config, checkpoint)
            self.last = Judge(one.run, config, self.world, self.options.metrics, self.say)
        return self.last

    def close(self) -> None:
        if self.last is not None:
            self.last.close()
        self.last = None


def _judge(one: _Watched, info: CheckpointInfo, judges: _Judges, say: Say) -> bool:
    """Validate a checkpoint, and take what it shows to trackers and lines; False where it cannot be."""
    try:
        with held(info.path), leased(info.path):
            judge = judges.of(one, info.path)
            found = list(judge.judge(info.path, info.step))
    except (OSError, UserError) as error:
        if info.path.exists():
            say(f"{info.path}: {error}")
        return False
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):  # of a GPU, CPU
            raise
        fewer = "--validation.batch_size, or another --validation.sampling_option.resolution or num_frames"
        say(f"{info.path}: its validation ran out of memory; give a smaller {fewer}")
        return False
    kept = [line for line in lines_of(one.run) if line["step"] != info.step]
    write_lines(one.run, [*kept, *({**line, "saved": _saved(info)} for line, _ in found)])
    for line, videos in found:
        prefix = "watch/raw/" if line["weights"] == "raw" and len(found) > 1 else "watch/"
        figures = {f"{prefix}{name}": value for name, value in line.get("videos", {}).items()}
        one.trackers.log(info.step, {**(dict(curves(line, prefix)) if "loss" in line else {}), **figures})
        one.trackers.show(info.step, [_tracked(video, prefix, judge) for video in videos])
        loss = f"held-out loss {line['loss']:.5g}, " if "loss" in line else ""
        say(f"{one.run}: step {info.step}, {line['weights']} weights: {loss}{len(videos)} videos")
    return True


@contextmanager
def _telling_meanwhile(watched: Sequence[_Watched], every: float) -> Iterator[None]:
    """Look at the curves of all runs while the body validates a checkpoint, which may take long. A look that fails is
    left to the caller's next one."""
    ended = Event()

    def look() -> None:
        while not ended.wait(every):
            for one in watched:
                with suppress(OSError, UserError):
                    if one.tell_alarms():
                        write_page(one.run)

    thread = Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _tracked(video: Video, prefix: str, judge: Judge) -> TrackedVideo:
    rate = judge.validation.config.fps_save
    return TrackedVideo(f"{prefix}{video.prompt.name}", video.prompt.text, video.path, read_video(video.path), rate)


def curves_of(run: Path) -> Curves:
    """Return the curves of a run, as its folder has them; validations of the run itself are among them."""
    lines = lines_of_both(run)
    weights = "ema" if any(line["weights"] == "ema" for line in lines) else "raw"
    steps = [(line["step"], line) for line in lines if line["weights"] == weights]
    names = {name for _, line in steps for name in line.get("buckets", {})}
    return Curves(
        losses=_training_losses(run / METRICS_FILE),
        held_out=[(step, float(line["loss"])) for step, line in steps if "loss" in line],
        buckets={
            name: [(step, float(of[name]["loss"])) for step, line in steps if name in (of := line.get("buckets", {}))]
            for name in sorted(names)
        },
        motion=_figure(steps, "motion_of_data"),
        diversity=_figure(steps, "diversity"),
        checkpoints=steps_saved(run),
    )


def _figure(steps: Sequence[tuple[int, Mapping[str, Any]]], name: str) -> list[tuple[int, float]]:
    return [(step, line["videos"][name]) for step, line in steps if name in line.get("videos", {})]


def _training_losses(path: Path) -> list[tuple[int, float]]:
    found = []
    if path.exists():
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _LAST_BYTES))
            for text in file.read().splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    line = json.loads(text)
                    found.append((int(line["step"]), float(line["loss"])))
    return found


@contextmanager
def _watched(run: Path, options: WatchOptions, say: Say) -> Iterator[_Watched]:
    """Yield a run to be watched, which nobody else watches meanwhile."""
    config = _read(run, options)
    assert config.validation is not None, "it was read with one"
    plan_validation(config, config.validation)  # a fault of prompts is said now, not when a checkpoint comes
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    with (folder / ".lock").open("a") as lock, ExitStack() as stack:
        try:
            with suppress(PermissionError):
                locks.flock(lock, locks.LOCK_EX | locks.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{run}: another `longtake watch` looks after it; end that one first") from None
        own = options.wandb_run is not None
        joins = config.wandb and (own or config.wandb_shared or not is_training(run))
        if own and options.wandb_run != "new":
            write_whole(folder / WANDB_ID_FILE, str(options.wandb_run))
        if config.wandb and not joins:
            say(f"{run}: nothing goes to Weights & Biases while it trains; train with wandb_shared = True for that")
        told = config.model_copy(update={"wandb": joins})
        trackers = Trackers(TrackedRun(folder, told, joins=folder if own else run))
        stack.callback(trackers.close)
        yield _Watched(run, config, _changed(run), Teller(run, say, options.on_alarm, options.webhook), trackers)


def _read(run: Path, options: WatchOptions) -> RunConfig:
    """Return a run's config, as it validates its checkpoints here."""
    if not run.is_dir():
        raise UserError(f"{run}: is no folder of a run; give one, such as outputs/demo/run")
    trained = read_run(str(run), schema=RunWithoutTable).value.validation
    if trained is None and not any(word.startswith("--validation") for word in options.overrides):
        raise UserError(f"{run}: has no `validation` section; add --validation.prompts prompts.csv")
    config = read_run(str(run), [*options.overrides, "--validate_every", "1"], RunWithoutTable).value
    share = config.validation.heldout if config.validation is not None else 0
    if share != (trained.heldout if trained is not None else 0):
        raise UserError(
            f"--validation.heldout {share:g}: the run has not held back these clips; name other ones as "
            "--validation.data_path"
        )
    return config


def _left_to(one: _Watched) -> str:
    every = read_run(str(one.run), schema=RunWithoutTable).value.validate_every
    done = f"validations are left to its validate_every = {every}" if every else "it makes no validations itself either"
    return f"{done}; checkpoints wait until one is free, and alarms go on"


def _free_device(wanted: str, due: Sequence[_Watched]) -> str | None:
    """Return the device on which checkpoints are validated: "cpu" where that is wanted, or runs train there too; else a
    GPU that nobody uses, the only one that this process sees from then on; None where there is none."""
    trained = {launch.device for one in due for launch in read_launches(one.run)[-1:]}
    if wanted == "cpu" or (wanted == "auto" and trained <= {"cpu"}):
        return "cpu"
    query = ["nvidia-smi", "--query-gpu=uuid,memory.used", "--format=csv,noheader,nounits"]
    try:
        rows = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
        free = [uuid.strip() for uuid, used in (row.split(",") for row in rows) if int(used) < _FREE_MIB]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    if not free:
        return None
    os.environ["CUDA_VISIBLE_DEVICES"] = free[-1]
    return "cuda"


def _changed(run: Path) -> float:
    return (run / CONFIG_FILE).stat().st_mtime


def _saved(info: CheckpointInfo) -> str:
    return info.when.isoformat()
