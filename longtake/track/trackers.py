"""Where a run's numbers go: `metrics.jsonl` always, TensorBoard by default, Weights & Biases when asked.

A step's number is that of `global_step` after its update (the first is 1), as in a checkpoint's folder name.
"""

from __future__ import annotations

import html
import importlib.util
import json
import logging
import math
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longtake.contracts import UserError
from longtake.durable import unfinished

METRICS_FILE = "metrics.jsonl"
_WANDB_ID_FILE = "wandb_id.txt"
_LOG = logging.getLogger(__name__)


class Trackers:
    """The open trackers of one run. On ranks other than 0 none is open and every call does nothing."""

    def __init__(self, metrics: Any = None, tensorboard: Any = None, wandb: Any = None) -> None:
        self._metrics, self._tensorboard, self._wandb = metrics, tensorboard, wandb

    @classmethod
    def open(
        cls,
        run_folder: str | Path,
        *,
        tensorboard: bool = True,
        wandb: bool = False,
        wandb_project: str = "longtake",
        run_name: str | None = None,
        config: Mapping[str, Any] | None = None,
        enabled: bool = True,
        resume_step: int | None = None,
    ) -> Trackers:
        """Open the trackers of a run in its folder.

        `enabled`: true on rank 0 only. `run_name` (default: the folder's name) and `config` go to Weights & Biases.
        `resume_step`: the step this start goes on from; what was written down after it, by the process that was
        stopped, is taken back (lines dropped, TensorBoard told to purge), so that each step stands there once.
        None leaves all that is there.

        Raises UserError, on every rank, where `wandb` is asked for and not installed.
        """
        if wandb and importlib.util.find_spec("wandb") is None:
            raise UserError("wandb = True: Weights & Biases is not installed; run `pip install longtake[wandb]`")
        if not enabled:
            return cls()
        folder = Path(run_folder)
        folder.mkdir(parents=True, exist_ok=True)
        metrics = folder / METRICS_FILE
        _mend_lines(metrics, resume_step)
        return cls(
            metrics.open("a", encoding="utf-8"),
            _open_tensorboard(folder, resume_step) if tensorboard else None,
            _open_wandb(folder, wandb_project, run_name or folder.name, config or {}) if wandb else None,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step, by names such as `train/loss`, to TensorBoard and Weights & Biases."""
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log({"global_step": step, **values})

    def log_line(self, record: Mapping[str, Any]) -> None:
        """Append one line to `metrics.jsonl` and hand it to the system, so that a killed process loses none.

        `record`: JSON types, with `step` among them. Floats are written with the digits that give the same bits back;
        those JSON has no word for become the strings "NaN", "Infinity" and "-Infinity", which `float()` reads.
        """
        assert "step" in record, "a line of metrics without its step"
        if self._metrics is not None:
            self._metrics.write(json.dumps(_finite(record), allow_nan=False) + "\n")
            self._metrics.flush()

    def text(self, name: str, text: str, step: int = 0) -> None:
        """A piece of text (a report, the resolved config) under a name, in fixed width."""
        if self._tensorboard is not None:
            self._tensorboard.add_text(name, "    " + text.replace("\n", "\n    "), step)
        if self._wandb is not None:
            import wandb

            self._wandb.log({"global_step": step, name: wandb.Html(f"<pre>{html.escape(text)}</pre>")})

    def close(self) -> None:
        """Flush and close all of them; may be called again."""
        if self._metrics is not None:
            self._metrics.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._metrics = self._tensorboard = self._wandb = None

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The records of a `metrics.jsonl`, oldest first; a last line that was cut off is left out."""
    return [json.loads(line) for line in _whole_lines(Path(path))]


def _whole_lines(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    whole = [line for line in lines if _is_record(line)]
    if len(whole) < len(lines):
        _LOG.warning("%s: %d unreadable line(s), left by a stop in mid-write", path, len(lines) - len(whole))
    return whole


def _is_record(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _mend_lines(path: Path, last_step: int | None) -> None:
    """Drop lines that were cut off, and those after `last_step`; the file is replaced in one move or not at all."""
    if not path.exists():
        return
    kept = _whole_lines(path)
    if last_step is not None:
        kept = [line for line in kept if json.loads(line).get("step", 0) <= last_step]
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


def _open_tensorboard(folder: Path, resume_step: int | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    purge = None if resume_step is None else resume_step + 1
    return SummaryWriter(str(folder / "tensorboard"), purge_step=purge)


def _open_wandb(folder: Path, project: str, name: str, config: Mapping[str, Any]) -> Any:
    """One Weights & Biases run per folder: its id is kept there, so a restart goes on with the same curves.

    W&B's own step may never go back, so `global_step` is logged as the x axis instead.
    """
    import wandb

    id_file = folder / _WANDB_ID_FILE
    if not id_file.exists():
        id_file.write_text(secrets.token_hex(4), encoding="ascii")
    run_id = id_file.read_text(encoding="ascii").strip()
    try:
        run = wandb.init(project=project, name=name, id=run_id, resume="allow", dir=str(folder), config=dict(config))
    except wandb.errors.Error as error:
        raise UserError(
            f"wandb = True: Weights & Biases did not start ({error}); run `wandb login`, or set WANDB_MODE=offline"
        ) from error
    run.define_metric("global_step")
    run.define_metric("*", step_metric="global_step")
    return run
