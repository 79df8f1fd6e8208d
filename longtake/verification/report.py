"""The record of a verification: plain numbers that can be published, and the table made of such records."""

from __future__ import annotations

import getpass
import json
import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longtake.contracts import UserError
from longtake.small_files import parse_json, read_small

FORMAT = 1
OUTPUT_LIMIT, GRADIENT_LIMIT = 1e-4, 1e-3  # of the largest value, in float32
NO_REFERENCE = "no reference class"
_PATH = re.compile(r"(?<![\w.:/])(?:~|[A-Za-z]:)?[/\\](?:[^\s/\\'\",:;()]+[/\\])+(?=[^\s/\\'\",:;()]*)")


@dataclass(frozen=True)
class PartResult:
    """The denoiser, the autoencoder or a text encoder beside the library's."""

    name: str  # "denoiser", "low_noise" for the second one, or the encoder's section
    weights: str  # on the hub, or "local file" or "local folder"
    sha256: str | None = None  # of the contents of its files, in the order of their names
    parameters: int = 0
    reference: str = NO_REFERENCE
    output_error: float | None = None  # largest difference over the largest value; None: nothing to compare with
    gradient_error: float | None = None
    notes: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class TrainingResult:
    """Steps on drawn clips, beside the forecast."""

    steps: int = 0
    bucket: str | None = None
    batch_size: int | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    step_seconds: float | None = None  # median, data waits excluded
    forecast_seconds: float | None = None  # None: nothing is known of the device
    peak_bytes: int | None = None  # of device memory; None on a CPU
    forecast_bytes: int | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Verification:
    """One run of `longtake verify`."""

    preset: str
    family: str
    date: str
    device: str
    device_gib: float | None
    versions: dict[str, str]
    parts: tuple[PartResult, ...]
    training: TrainingResult

    @property
    def problems(self) -> list[str]:
        """The parts that failed, each with its reason."""
        named = [(part.name, part.problem) for part in self.parts] + [("training", self.training.problem)]
        return [f"{name}: {problem}" for name, problem in named if problem is not None]

    @property
    def unseen(self) -> list[str]:
        """The parts without a problem whose numbers were compared with nothing."""
        return [part.name for part in self.parts if part.reference == NO_REFERENCE and part.problem is None]

    def to_json(self, private: Sequence[str] = ()) -> str:
        """Return the record as text, without paths and names. `private`: further words that must not be in it."""
        facts = {"format": FORMAT, "passed": not self.problems, **asdict(self)}
        return json.dumps(_redacted(facts, [*private, *_private_words()]), indent=1, allow_nan=False) + "\n"


def _private_words() -> list[str]:
    """Home, user and host names; short ones are parts of other words."""
    words = [str(Path.home()), str(Path.cwd()), platform.node()]
    with suppress(OSError, KeyError):
        words.append(getpass.getuser())
    return [word for word in words if len(word) > 2]


def _redacted(value: Any, private: Sequence[str]) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(item, private) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redacted(item, private) for item in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return str(value)  # JSON has no nan
    if not isinstance(value, str):
        return value
    text = _PATH.sub("", value)
    for word in sorted(private, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "...", text)
    return text


def read_verified(folder: Path) -> list[dict[str, Any]]:
    """Return the records in a folder, by preset and device. Raises `UserError` for a file that is not one."""
    records = []
    for file in sorted(folder.glob("*.json")):
        try:
            record = parse_json(read_small(file))
            record["parts"], record["training"]["steps"], record["preset"], record["device"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file}: expected a record of `longtake verify`, got {error}; write it again") from None
        if record.get("format") != FORMAT:
            raise UserError(f"{file}: expected format {FORMAT}, got {record.get('format')}; write it again")
        records.append(record)
    return sorted(records, key=lambda record: (record["preset"], record["device"]))


def verified_table(records: Sequence[dict[str, Any]]) -> str:
    """Return the Markdown table of records; one line where there are none."""
    if not records:
        return "No preset has been verified with its released weights yet."
    head = ("preset", "device", "passed", "outputs", "gradients", "steps", "seconds, forecast", "GiB, forecast")
    lines = [head, tuple("---" for _ in head), *map(_row, records)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    training, parts = record["training"], record["parts"]
    errors = [
        max((part[key] for part in parts if isinstance(part[key], float)), default=None)
        for key in ("output_error", "gradient_error")
    ]
    shown = ["no class" if error is None else f"{error:.0e}" for error in errors]
    seconds = _pair(training["step_seconds"], training["forecast_seconds"], 1)
    memory = _pair(training["peak_bytes"], training["forecast_bytes"], 2**30)
    passed = "yes" if record["passed"] else "no"
    return record["preset"], record["device"], passed, *shown, str(training["steps"]), seconds, memory


def _pair(measured: float | None, forecast: float | None, unit: float) -> str:
    return ", ".join("unknown" if value is None else f"{value / unit:.3g}" for value in (measured, forecast))
