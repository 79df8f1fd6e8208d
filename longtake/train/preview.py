"""Preview of a run's training data, without building its model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from pydantic import model_validator

from longtake.buckets.page import bucket_picture
from longtake.buckets.report import BucketReport
from longtake.config.load import Dialect
from longtake.data.tables.mix import clip_weights, open_clips
from longtake.data.tables.rows import read_numbers
from longtake.pages import Html, html
from longtake.parallel.config import resolve_degrees
from longtake.plan.layout import Layout
from longtake.plan.run import first_pass
from longtake.plan.work import Work
from longtake.system.caption_lengths import caption_length_lines
from longtake.train.config import RunConfig
from longtake.train.run_file import read_run


class PreviewedRun(RunConfig):
    """A run whose data alone is looked at: the parts of its model need not fit each other yet."""

    @model_validator(mode="after")
    def _parts_fit(self) -> PreviewedRun:
        return self


@dataclass(frozen=True)
class Preview:
    """The first pass of a run over a table, and what its steps are counted for."""

    report: BucketReport
    steps: str

    def text(self) -> str:
        """Return the report as a plain table, and below it what a step is taken to be."""
        return f"{self.report.text()}\n{self.steps}"

    def picture(self) -> Html:
        """Return the same as parts of a page."""
        return html('{}<p class="note">{}</p>', bucket_picture(self.report.to_json()), self.steps)


def read_previewed(run: str, table: Path, overrides: Sequence[str] = (), dialect: Dialect | None = None) -> RunConfig:
    """Return the config of RUN (a config file, or the folder of a run) with `table` in place of its own `dataset`'s.

    `overrides` are command-line words. `dialect`: that of RUN. Raises `ConfigError`.
    """
    own = ["--dataset.mix", "None", f"--dataset.data_path={str(table)!r}"]
    return read_run(run, [*overrides, *own], PreviewedRun, dialect).value


def preview_buckets(config: RunConfig, table: Path) -> Preview:
    """Return the bucket report of the first pass of a run over `table`, in place of the run's own.

    Steps are counted as at the run's first launch on the fewest GPUs that its degrees allow, where `slots_per_step`
    does not say how large they are. Raises `UserError` as `open_rows` and `ClipTable.open` do, and for degrees that do
    not fit each other.
    """
    numbers = read_numbers(table)
    parallel = config.parallel
    given = [parallel.replicate, parallel.shard, parallel.sequence, parallel.tensor]
    replicate, shard, sequence, _ = resolve_degrees(parallel, prod(degree for degree in given if degree != "auto"))
    work = Work(config, config.bucket_rule, config.ae.latent, config.text_length, encoder_bytes=0)
    layout = Layout(replicate, shard, sequence, bucket_sequence=parallel.bucket_sequence)
    columns: dict[str, Any] = {name: numbers[name] for name in ("num_frames", "height", "width", "fps", "clip_ids")}
    sizes = {work.slot_size(bucket, layout) for bucket in work.entries} if layout.bucket_sequence else set()
    columns["weights"] = clip_weights(config.dataset, numbers["num_frames"])
    return Preview(first_pass(work, layout, table="", **columns), _said(config, layout.data_ranks, sorted(sizes)))


def preview_captions(config: RunConfig) -> list[str]:
    """Lines that a run would report on the lengths of its captions before its first step."""
    return caption_length_lines(config, open_clips(config.dataset, config.sample_rules.columns))


def _said(config: RunConfig, ranks: int, sizes: list[int]) -> str:
    slots = config.slots_at(ranks)
    said = f"steps of {slots} slot" + ("s" if slots > 1 else "")
    if config.slots_per_step is None:
        said += f", as {ranks} data rank{'s' if ranks > 1 else ''} would make them: n times as many make n times fewer"
    if max(sizes, default=1) > 1:
        said += f"; a slot holds {sizes[0]} to {sizes[-1]} micro-batches, by its bucket's sequence degree"
    return said
