"""What a pass trains on and what it leaves out, with reasons: printed before step 1 and saved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from longtake.buckets.inputs import OrderInputs
from longtake.buckets.protocol import Unused
from longtake.buckets.sweep import Sorted
from longtake.contracts import Bucket, UserError

REPORT_VERSION = 1  # of the report as plain data
_NUM_EXAMPLES = 5
_ROWS_AT_ONCE = 1 << 18
_MAX_FILLERS = 0.2  # share of the computed samples, above which a line names batch sizes that fit
_TRANSIENT = {Unused.SKIPPED, Unused.NOT_KEPT, Unused.NO_COPY, Unused.SEEN}  # another pass may train on these
_REMEDIES = {
    Unused.TOO_SMALL: "add a lower resolution",
    Unused.TOO_SHORT: "add a shorter length, raise fps_max or lower the stride",
    Unused.NO_STILLS: "add length 1",
    Unused.DISABLED: "raise the keep probability or lower the skip probability",
    Unused.INVALID: "probe the table again",
    Unused.HELD_BACK: "hold back a smaller share",
    Unused.QUARANTINED: "repair the files and remove their lines from the quarantine list",
}


@dataclass(frozen=True)
class BucketCount:
    """One bucket of a report."""

    bucket: Bucket
    clips: int  # distinct rows; a clip whose copies fall into several buckets counts in each
    samples: int
    micro_batches: int
    fillers: int  # places of weight 0 in its last micro-batch
    frames_cut: float  # share of the frames of its clips that lie outside the training windows, 0..1
    area_cut: float  # mean share of a picture that the crop to the bucket's shape takes away, 0..1


@dataclass(frozen=True)
class UnusedCount:
    """The clips that are left out for one reason."""

    reason: Unused
    clips: int
    rows: tuple[int, ...]  # the first few of them, as row numbers of the table


@dataclass(frozen=True)
class BucketReport:
    """One pass under its present settings. Every clip of the table is used or unused: the counts add up.

    After a change of settings in the middle of a pass it covers what the change left over; clips done before are
    listed under `Unused.SEEN`.
    """

    pass_index: int
    num_clips: int  # rows of the table
    num_used: int  # rows with at least one sample in a bucket
    num_steps: int
    buckets: tuple[BucketCount, ...]  # those that hold samples
    unused: tuple[UnusedCount, ...]
    frames_cut: float = 0.0  # over all buckets, as in `BucketCount`
    area_cut: float = 0.0

    @property
    def num_samples(self) -> int:
        return sum(line.samples for line in self.buckets)

    @property
    def num_micro_batches(self) -> int:
        return sum(line.micro_batches for line in self.buckets)

    @property
    def num_fillers(self) -> int:
        return sum(line.fillers for line in self.buckets)

    def as_rows(self) -> list[tuple[str, int, int, int, int, int, float, float]]:
        """Return a row for each bucket: name, batch size, clips, samples, micro-batches, fillers, frames cut,
        area cut."""
        rows = []
        for line in self.buckets:
            counts = line.clips, line.samples, line.micro_batches, line.fillers
            cut = round(line.frames_cut, 4), round(line.area_cut, 4)
            rows.append((line.bucket.name, line.bucket.batch_size, *counts, *cut))
        return rows

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        columns = ("batch_size", "clips", "samples", "micro_batches", "fillers", "frames_cut", "area_cut")
        return {
            "format_version": REPORT_VERSION,
            "pass": self.pass_index,
            "clips": self.num_clips,
            "used": self.num_used,
            "samples": self.num_samples,
            "micro_batches": self.num_micro_batches,
            "fillers": self.num_fillers,
            "steps": self.num_steps,
            "frames_cut": round(self.frames_cut, 4),
            "area_cut": round(self.area_cut, 4),
            "buckets": {
                row[0]: {"shape": list(line.bucket.shape), **dict(zip(columns, row[1:], strict=True))}
                for row, line in zip(self.as_rows(), self.buckets, strict=True)
            },
            "unused": {
                line.reason.name.lower(): {
                    "clips": line.clips,
                    "reason": line.reason.sentence,
                    "example_rows": list(line.rows),
                }
                for line in self.unused
            },
        }

    def text(self) -> str:
        """Return the report as a plain table with a line for each reason below it."""
        heading = ("bucket", "TxHxW", "batch", "clips", "samples", "micro-batches", "fillers", "time cut", "area cut")
        counts = (self.num_used, self.num_samples, self.num_micro_batches, self.num_fillers)
        total = ("total", "", "", *counts, self.frames_cut, self.area_cut)
        shapes = ["x".join(map(str, line.bucket.shape)) for line in self.buckets]
        rows = [(row[0], shape, *row[1:]) for row, shape in zip(self.as_rows(), shapes, strict=True)]
        table = [
            [f"{cell:.1%}" if isinstance(cell, float) else str(cell) for cell in row] for row in (heading, *rows, total)
        ]
        widths = [max(len(row[column]) for row in table) for column in range(len(heading))]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in table
        ]
        lines.append(f"pass {self.pass_index}: {self.num_steps} steps, {self.num_used} of {self.num_clips} clips used")
        for line in self.unused:
            rows = ", ".join(map(str, line.rows)) + (", ..." if line.clips > len(line.rows) else "")
            unused = "" if line.reason is Unused.HELD_BACK else "unused: "
            lines.append(f"  {line.clips} {unused}{line.reason.sentence} (rows {rows})")
        return "\n".join([*lines, *self._filler_lines()])

    def _filler_lines(self) -> list[str]:
        """Return a line where more than a fifth of the computed samples are fillers, with the batch sizes that fit."""
        computed = self.num_samples + self.num_fillers
        if self.num_fillers <= _MAX_FILLERS * computed:
            return []
        entries: dict[tuple[str, int], list[BucketCount]] = {}
        for line in self.buckets:
            entries.setdefault(line.bucket.entry, []).append(line)
        fits = []
        for (resolution, num_frames), lines in entries.items():
            size, counts = lines[0].bucket.batch_size, [line.samples for line in lines]
            if (fit := _fitting_batch_size(size, counts)) < size:
                fits.append(f"{resolution}/{num_frames}f {fit} instead of {size}")
        return [
            f"  fillers: {self.num_fillers} of {computed} computed samples train nothing, because buckets have fewer "
            f"clips than their batch size takes; batch sizes that fit: {', '.join(fits)}"
        ]

    def require_clips(self, place: str = "bucket_config") -> None:
        """Raise UserError if no clip fits any bucket, unless only the draws of this pass left them all out.

        `place`: the key of the config that says the buckets.
        """
        if self.num_used or any(line.reason in _TRANSIENT for line in self.unused):
            return
        if not self.num_clips:
            raise UserError("dataset: the clip table has no rows; give at least one clip")
        why = ", ".join(f"{line.clips} {line.reason.sentence}" for line in self.unused)
        fixes = "; or ".join(_REMEDIES[line.reason] for line in self.unused)
        raise UserError(f"{place}: none of the {self.num_clips} clips fits a bucket ({why}); {fixes}")


def _fitting_batch_size(size: int, counts: list[int]) -> int:
    """Return the largest batch size up to `size` at which at most a fifth of what buckets of these samples compute is
    filler.

    It is never above the largest count: that would only add fillers.
    """
    for batch_size in range(min(size, max(counts)), 1, -1):
        computed = sum(-(-count // batch_size) * batch_size for count in counts)
        if computed - sum(counts) <= _MAX_FILLERS * computed:
            return batch_size
    return 1


def make_report(inputs: OrderInputs, pass_index: int, found: Sorted, rows: np.ndarray | None) -> BucketReport:
    """Count what `sort_samples` found.

    `rows`: int64 [S], the samples' rows in ascending order, or None where sample i is row i; a row without sample has
    no copy in this pass.
    """
    buckets, num_clips = inputs.rule.buckets, inputs.num_clips
    samples, reasons = found.samples, found.codes
    if rows is None:
        clips = samples
    else:
        clips, reasons = np.zeros(len(buckets), np.int64), np.full(num_clips, Unused.NO_COPY, found.codes.dtype)
        starts = np.searchsorted(rows, range(0, num_clips, _ROWS_AT_ONCE)).tolist()
        for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
            if start < stop:
                clips += _count_rows(found.codes[start:stop], rows[start:stop], reasons, len(buckets))
        if inputs.held_back is not None:
            reasons[(reasons == Unused.NO_COPY) & inputs.held_back] = Unused.HELD_BACK
    lines, num_slots = [], 0
    for index in np.flatnonzero(samples).tolist():
        bucket, count = buckets[index], int(samples[index])
        micro_batches = -(-count // bucket.batch_size)
        num_slots += -(-micro_batches // int(inputs.micro_batches[index]))
        fillers = micro_batches * bucket.batch_size - count
        frames_cut = 1 - float(found.used_frames[index] / found.source_frames[index])
        area_cut = 1 - float(found.kept_area[index] / count)
        lines.append(BucketCount(bucket, int(clips[index]), count, micro_batches, fillers, frames_cut, area_cut))
    unused = []
    for reason in Unused:
        left_out = np.flatnonzero(reasons == reason)
        if len(left_out):
            unused.append(UnusedCount(reason, len(left_out), tuple(left_out[:_NUM_EXAMPLES].tolist())))
    num_used = num_clips - sum(line.clips for line in unused)
    num_steps = -(-num_slots // inputs.slots_per_step)
    cut = _share_cut(found.used_frames, found.source_frames), _share_cut(found.kept_area, samples)
    return BucketReport(pass_index, num_clips, num_used, num_steps, tuple(lines), tuple(unused), *cut)


def _share_cut(kept: np.ndarray, whole: np.ndarray) -> float:
    """1 - sum(kept) / sum(whole); 0 where there is nothing."""
    return 1 - float(kept.sum() / whole.sum()) if whole.sum() else 0.0


def _count_rows(codes: np.ndarray, rows: np.ndarray, reasons: np.ndarray, num_buckets: int) -> np.ndarray:
    """int64 [B]: rows with a copy in each bucket. Writes into `reasons`, of all rows of the table: 0 or above where any
    copy is used, else the reason nearest to success over the copies.

    `rows`: at least one, ascending; all copies of a row are here.
    """
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    best = np.maximum.reduceat(codes, starts)
    reasons[rows[starts]] = np.where(best >= 0, best, np.minimum.reduceat(codes, starts))
    # distinct (row, bucket) pairs: a clip counts once in each bucket that has a copy of it
    pairs = (rows * num_buckets + codes)[codes >= 0]
    pairs.sort(kind="stable")  # rows ascend already, so little is left to do
    return np.bincount(pairs[np.diff(pairs, prepend=-1) != 0] % num_buckets, minlength=num_buckets)
