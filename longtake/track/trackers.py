"""Destinations of a run's metrics: `metrics.jsonl` always, TensorBoard by default, Weights & Biases when asked.

A step's number is that of `global_step` after its update (the first is 1), as in a checkpoint's folder name. Another
place is a subclass of `Tracker` in `KINDS`, with its keys in `TrackingConfig`.
"""

from __future__ import annotations

import importlib.util
import io
import json
import logging
import math
import netrc
import os
import secrets
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from longtake.contracts import UserError
from longtake.durable import naming, unfinished, write_whole
from longtake.small_files import parse_json
from longtake.track.config import TrackingConfig

if TYPE_CHECKING:
    import numpy as np

METRICS_FILE = "metrics.jsonl"
WANDB_ID_FILE = "wandb_id.txt"
_AXIS, _WATCH_AXIS = "global_step", "watch/step"
# The axes of W&B's curves by the beginnings of their names. Who writes into a shared run replaces what others have said
# of axes, so all say the same; no two patterns fit one name, and none but the last of them `watch/`.
_AXES = {f"{letter}*": _AXIS for letter in (*ascii_lowercase.replace("w", ""), "wait")} | {"watch/*": _WATCH_AXIS}
_MOST_SIDE = 256  # pixels of a video in an event file
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrackedRun:
    """Facts on a run for the trackers that open it."""

    folder: Path
    config: TrackingConfig
    settings: Mapping[str, Any] = field(default_factory=dict)  # the whole config of the run, as plain data
    resume_step: int | None = None  # the step this start resumes from; what was written after it is removed
    joins: Path | None = None  # the folder of another run, whose W&B run it writes into, on a step axis of its own


@dataclass(frozen=True)
class TrackedVideo:
    """A video or image that a run has made."""

    name: str  # such as validation/prompt_0000, the same at every step
    caption: str
    path: Path
    frames: np.ndarray  # uint8 [T, H, W, 3]
    fps: float

    def gif(self) -> tuple[bytes, int, int]:
        """Return the video as a looping animated GIF, with its width and height; large frames are reduced."""
        from PIL import Image

        pictures = [Image.fromarray(frame) for frame in self.frames]
        for picture in pictures:
            picture.thumbnail((_MOST_SIDE, _MOST_SIDE))
        file, rest = io.BytesIO(), pictures[1:]
        pictures[0].save(file, "GIF", save_all=True, append_images=rest, duration=round(1000 / self.fps), loop=0)
        return file.getvalue(), *pictures[0].size


class Tracker:
    """One place where numbers go."""

    @classmethod
    def wanted(cls, config: TrackingConfig) -> bool:
        """Return whether a run uses this tracker. Raises `UserError` where it cannot."""
        return True

    def __init__(self, run: TrackedRun) -> None:
        """Open it. Raises `UserError` and OSError."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of a step, by names such as `train/loss`."""

    def log_line(self, record: Mapping[str, Any]) -> None:
        """Write the exact record of one step: JSON types, with `step` among them."""

    def show(self, step: int, videos: Sequence[TrackedVideo]) -> None:
        """Log the videos of a step."""

    def close(self) -> None:
        """Write all pending data to the system."""


class MetricsFile(Tracker):
    """`metrics.jsonl`: a line per step, handed to the system at once, so that a killed process loses none.

    Floats are written with the digits that give the same bits back; those JSON has no word for become the strings
    "NaN", "Infinity" and "-Infinity", which `float()` reads.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._path = run.folder / METRICS_FILE
        mend_lines(self._path, run.resume_step)
        self._stream = self._path.open("a", encoding="utf-8")

    def log_line(self, record: Mapping[str, Any]) -> None:
        assert "step" in record, "a line of metrics without its step"
        with naming(self._path):
            self._stream.write(json.dumps(_finite(record), allow_nan=False) + "\n")
            self._stream.flush()

    def close(self) -> None:
        with naming(self._path):
            self._stream.close()


class TensorBoard(Tracker):
    """Event files in `tensorboard/`; what came after the step that a run resumes from is purged."""

    @classmethod
    def wanted(cls, config: TrackingConfig) -> bool:
        return config.tensorboard

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        now = time.time_ns()  # readers take the files in the order of their names
        name = f"events.out.tfevents.{now // 10**9:010d}.{socket.gethostname()}.{now}"
        self._path = run.folder / "tensorboard" / name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Written here, not in a SummaryWriter's thread, which would tell of a full disk by its own traceback.
        self._writer = RecordWriter(self._path.open("wb"))
        self._write(file_version="brain.Event:2")
        if run.resume_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(step=run.resume_step + 1, session_log=start)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        found = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summary(value=found))

    def show(self, step: int, videos: Sequence[TrackedVideo]) -> None:
        for video in videos:
            gif, width, height = video.gif()
            image = self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif)
            said = {"summary_description": video.caption}
            self._write(step=step, summary=self._summary(value=[{"tag": video.name, "metadata": said, "image": image}]))

    def close(self) -> None:
        with naming(self._path):
            self._writer.close()

    def _write(self, **fields: Any) -> None:
        with naming(self._path):
            self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())
            self._writer.flush()


class WeightsAndBiases(Tracker):
    """One Weights & Biases run per folder: its id is kept there, so a restart continues the same curves.

    W&B's own step may never go back, so `global_step` is logged as the x axis instead.
    """

    @classmethod
    def wanted(cls, config: TrackingConfig) -> bool:
        if config.wandb and importlib.util.find_spec("wandb") is None:
            raise UserError(
                "wandb = True: Weights & Biases is not installed; pip install '.[wandb]' in Longtake's folder"
            )
        return config.wandb

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        _unset_empty_variables()
        id_file = (run.joins or run.folder) / WANDB_ID_FILE
        if not id_file.exists():
            write_whole(id_file, secrets.token_hex(4))
        facts = {"project": run.config.wandb_project, "entity": run.config.wandb_entity}
        facts |= {"name": run.folder.name, "config": dict(run.settings)}
        facts |= {"id": id_file.read_text(encoding="ascii").strip(), "dir": str(run.folder), "resume": "allow"}
        if run.config.wandb_shared:
            own = {"x_label": "watch", "x_primary": False, "x_update_finish_state": False} if run.joins else {}
            facts["settings"] = wandb.Settings(mode="shared", **own)
        try:
            self._run = wandb.init(**facts)
        except wandb.errors.Error as error:
            raise UserError(
                f"wandb = True: Weights & Biases did not start ({error}); run `wandb login`, or set WANDB_MODE=offline"
            ) from error
        except ValidationError as error:
            raise _refused_variable(error) from error
        self._axis = _WATCH_AXIS if run.joins else _AXIS
        for names, axis in _AXES.items():
            self._run.define_metric(names, step_metric=axis)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({self._axis: step, **values})

    def show(self, step: int, videos: Sequence[TrackedVideo]) -> None:
        import wandb

        shown = {video.name: wandb.Image if video.path.suffix == ".png" else wandb.Video for video in videos}
        media = {video.name: shown[video.name](str(video.path), caption=video.caption) for video in videos}
        self._run.log({self._axis: step, **media})

    def close(self) -> None:
        self._run.finish()


def require_wandb_login(config: TrackingConfig) -> None:
    """Check before a job is queued that its run can log to Weights & Biases, where nobody answers a prompt. The server
    is not asked. Raises `UserError`."""
    if not WeightsAndBiases.wanted(config):
        return
    import wandb

    _unset_empty_variables()
    try:
        settings = wandb.setup().settings
    except ValidationError as error:
        raise _refused_variable(error) from error
    if settings.mode not in ("online", "run", "shared") or settings.api_key or settings.identity_token_file:
        return
    if not _has_login(urlsplit(settings.base_url).netloc):
        raise UserError(
            "wandb = True: no login to Weights & Biases on this machine, so the job would end at its start; run "
            "`wandb login`, set WANDB_API_KEY or WANDB_MODE=offline, or add --wandb False (train.py: --wandb.disable)"
        )


def offline_line(folder: Path) -> str:
    """Return the line on how to upload what a run and its watchers wrote without a network; empty where there is
    nothing. W&B appends folders of one run in one command in the order in which they were begun, so none replaces
    another's rows."""
    patterns = [pattern for pattern in _OFFLINE if any(folder.glob(pattern))]
    paths = " ".join(f"{shlex.quote(str(folder))}/{pattern}" for pattern in patterns)
    return f"to upload to Weights & Biases: wandb sync {paths}" if paths else ""


def _has_login(host: str) -> bool:
    """Look for the key that `wandb login` writes. `wandb.login` asks the server too: 10 s where there is no network."""
    files = [Path(os.environ["NETRC"])] if "NETRC" in os.environ else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for path in files:
        with suppress(OSError, netrc.NetrcParseError):
            logins = netrc.netrc(path)
            if logins.authenticators(host) or logins.authenticators("api.wandb.ai"):
                return True
    return False


def _refused_variable(error: ValidationError) -> UserError:
    problem = error.errors()[0]
    variable = f"WANDB_{'_'.join(map(str, problem['loc']))}".upper()
    return UserError(f"{variable} = {problem['input']!r}: {problem['msg']}; set or unset it")


def _unset_empty_variables() -> None:
    """`WANDB_MODE=` in a job script means that it is unset; W&B refuses empty values."""
    for name in [name for name, value in os.environ.items() if name.startswith("WANDB_") and not value]:
        del os.environ[name]


_OFFLINE = ("wandb/offline-run-*", "watch/wandb/offline-run-*")  # in a run's folder
KINDS: tuple[type[Tracker], ...] = (MetricsFile, TensorBoard, WeightsAndBiases)


class Trackers:
    """The open trackers of one run."""

    def __init__(self, run: TrackedRun, enabled: bool = True) -> None:
        """Open the trackers. `enabled`: on rank 0 only; elsewhere none is open and every call does nothing.

        What was written down after `run.resume_step`, by the process that was stopped, is taken back, so that each step
        stands there once; None leaves all that is there. Raises `UserError`, on every rank, for one that cannot be had.
        """
        kinds = [kind for kind in KINDS if kind.wanted(run.config)]
        self._closing, self._open = ExitStack(), []
        if enabled:
            run.folder.mkdir(parents=True, exist_ok=True)
            for kind in kinds:
                self._open.append(kind(run))
                self._closing.callback(self._open[-1].close)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """`Tracker.log` of each."""
        for tracker in self._open:
            tracker.log(step, values)

    def log_line(self, record: Mapping[str, Any]) -> None:
        """`Tracker.log_line` of each."""
        for tracker in self._open:
            tracker.log_line(record)

    def show(self, step: int, videos: Sequence[TrackedVideo]) -> None:
        """`Tracker.show` of each."""
        for tracker in self._open:
            tracker.show(step, videos)

    def close(self) -> None:
        """Close all of them; may be called again."""
        self._open = []
        self._closing.close()


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Add a record, with `step` among it, to a file of lines as `MetricsFile` writes them."""
    with naming(path), path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(_finite(record), allow_nan=False) + "\n")


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a `metrics.jsonl`, oldest first; a last line that was cut off is left out."""
    return [record for _, record in _whole_lines(Path(path))]


def _whole_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the lines that are records, with what they say."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    whole = [(line, record) for line in lines if (record := _record(line)) is not None]
    if len(whole) < len(lines):
        _LOG.warning("%s: %d unreadable line(s), cut off while being written", path, len(lines) - len(whole))
    return whole


def _record(line: str) -> dict[str, Any] | None:
    with suppress(ValueError):
        record = parse_json(line)
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            return record
    return None


def mend_lines(path: Path, last_step: int | None) -> None:
    """Drop lines that were cut off, and those after `last_step`; the file is replaced in one move or not at all."""
    if not path.exists():
        return
    kept = [line for line, record in _whole_lines(path) if last_step is None or record["step"] <= last_step]
    with unfinished(path) as partial, partial.open("w", encoding="utf-8") as stream:
        stream.writelines(line + "\n" for line in kept)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
