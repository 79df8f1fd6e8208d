"""What a run would train on, without building its model."""

from __future__ import annotations

from pathlib import Path

from longtake.buckets import BucketReport, BucketRule, OrderInputs, plan_pass
from longtake.data import read_numbers
from longtake.train.config import RunConfig


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
        rule=BucketRule.from_config(config.bucket_config, config.size_divisor, config.dataset.fps_max, config.compat),
        num_frames=numbers["num_frames"],
        height=numbers["height"],
        width=numbers["width"],
        fps=numbers["fps"],
        clip_ids=numbers["clip_ids"],
        views=config.dataset.views,
        table="",
    )
    return plan_pass(inputs, 0).report
