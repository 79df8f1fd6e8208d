"""What a run would train on, without building its model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import model_validator

from longtake.buckets import BucketReport, OrderInputs, plan_pass
from longtake.data import read_numbers
from longtake.train.config import RunConfig
from longtake.train.folder import read_run


class PreviewedRun(RunConfig):
    """A run whose data alone is looked at: the parts of its model need not fit each other yet."""

    @model_validator(mode="after")
    def _parts_fit(self) -> PreviewedRun:
        return self


def read_previewed(run: str, table: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of RUN (a config file, or the folder of a run) with `table` in place of its own `dataset`'s.

    `overrides` are command-line words. Raises `ConfigError`.
    """
    own = ["--dataset.mix", "None", f"--dataset.data_path={str(table)!r}"]
    return read_run(run, [*overrides, *own], PreviewedRun).value


def preview_buckets(config: RunConfig, table: Path) -> BucketReport:
    """The bucket report of the first pass of a run over `table`, in place of the run's own.

    Steps are counted with the run's `slots_per_step`, or without one as on a single rank. Raises `UserError` as
    `open_rows` and `ClipTable.open` do.
    """
    numbers = read_numbers(table)
    inputs = OrderInputs(
        seed=config.seed,
        stage=0,
        slots_per_step=config.slots_per_step or config.accumulation_steps,
        rule=config.bucket_rule,
        views=config.dataset.views,
        table="",
        **{name: numbers[name] for name in ("num_frames", "height", "width", "fps", "clip_ids")},
    )
    return plan_pass(inputs, 0).report
