"""Several runs on one HTML page: what they are to show, in which settings they differ, and their curves at equal steps
and at equal GPU-hours."""

from __future__ import annotations

import math
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from longtake import pages
from longtake.config.dump import literal
from longtake.config.section import Section
from longtake.contracts import UserError
from longtake.durable import write_whole
from longtake.report import render
from longtake.train.health.launches import FILE as LAUNCHES_FILE
from longtake.train.health.launches import LaunchRecord
from longtake.train.report import LAST, MOST_CURVES, RunRecord, mean_loss, mean_watts, watts_by_node

_CHARTS = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate", "seconds": "seconds of a step"}
_MOST_LAUNCHES = 30  # that are shown of a run
_LOSSES = (
    "model.type",
    "ae",
    "objective",
    "low_noise",
    "condition_config",
    "no_i2v_ref_loss",
)  # what a loss depends on


@dataclass(frozen=True)
class _Compared:
    """One of the runs."""

    name: str
    record: RunRecord

    @cached_property
    def hours(self) -> list[float] | None:
        """GPU-hours up to each step; None where nobody has written down how many processes there were."""
        if not self.record.launches:
            return None
        return list(accumulate(_seconds(line) * _made_by(self.record, line).processes / 3600 for line in self._lines))

    @property
    def _lines(self) -> Sequence[Mapping[str, Any]]:
        return self.record.lines

    @property
    def total_hours(self) -> float:
        """GPU-hours of all launches, lost steps, starts and saves too."""
        seconds = sum(map(_seconds, self._lines))
        return self.hours[-1] * self.record.total_seconds / seconds if self.hours and seconds else math.nan

    @property
    def failures(self) -> list[LaunchRecord]:
        """Launches that ended badly, or without a word though another one came after."""
        launches = self.record.launches
        return [
            one for one in launches if one.ended in ("failed", "hung") or (one.ended is None and one != launches[-1])
        ]

    def loss_at(self, step: float | None = None, hours: float | None = None) -> float:
        """Return the mean over the last steps up to there."""
        if hours is not None:
            lines = [line for line, at in zip(self._lines, self.hours or (), strict=False) if at <= hours * (1 + 1e-9)]
        else:
            lines = [line for line in self._lines if step is None or line["step"] <= step]
        return mean_loss(lines)

    def points(self, key: str, by_hours: bool) -> list[tuple[float, Any]]:
        places = (self.hours or []) if by_hours else [line["step"] for line in self._lines]
        return [(at, line[key]) for at, line in zip(places, self._lines, strict=False) if key in line]


def _seconds(line: Mapping[str, Any]) -> float:
    found = line.get("seconds")
    return float(found) if isinstance(found, (int, float)) else 0.0


def _made_by(record: RunRecord, line: Mapping[str, Any]) -> LaunchRecord:
    """Return the last launch that began before a step: an earlier one's was made again."""
    return next((one for one in reversed(record.launches) if one.step < line["step"]), record.launches[0])


def write_comparison(path: Path, records: Sequence[RunRecord]) -> None:
    """Write the page of several runs, whole or not at all. Raises `UserError` where one has made no step, or is given
    twice."""
    for number, record in enumerate(records):
        if not record.lines:
            raise UserError(f"{record.folder}: has made no step yet; compare it with others once it has")
        if record.folder.resolve() in [other.folder.resolve() for other in records[:number]]:
            raise UserError(f"{record.folder}: is given twice; give another run")
    runs = [_Compared(name, record) for name, record in zip(_names(records), records, strict=True)]
    notes = [run.record.note for run in runs]
    text = render(
        "comparison.html",
        title=" · ".join(run.name for run in runs),
        same_note=notes[0] if len(set(notes)) == 1 else None,
        notes=[(run.name, run.record.note or "no note") for run in runs],
        unlike=", ".join(key for key, _ in _differing(runs) if key.startswith(_LOSSES)),
        names={place: run.name for place, run in enumerate(runs)},
        figures=_figures(runs),
        by_hours=_charts(runs, by_hours=True),
        by_steps=_charts(runs, by_hours=False),
        settings=_settings(runs),
        power=_power(runs),
        launches=_launches(runs),
    )
    write_whole(path, text)


def _names(records: Sequence[RunRecord]) -> list[str]:
    """Names of folders, with as much of what is above as tells them apart."""
    folders = [record.folder.resolve() for record in records]
    for count in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = [os.sep.join(folder.parts[-count:]) for folder in folders]
        if len(set(names)) == len(names):
            break
    return names


def _figures(runs: Sequence[_Compared]) -> pages.Html:
    """Return final figures side by side."""
    step = min(run.record.step for run in runs)
    known = [run.hours[-1] for run in runs if run.hours]
    hours = min(known) if len(known) == len(runs) else None

    def row(what: str, of: Any) -> tuple[object, ...]:
        return (what, *map(of, runs))

    rows = [
        row("steps", lambda run: f"{run.record.step:,}"),
        row("samples trained on", lambda run: f"{run.record.samples:,}"),
        row(f"loss, mean of the last {LAST} steps", lambda run: pages.number(run.loss_at())),
        row(f"the same up to step {step:,}, which all have", lambda run: pages.number(run.loss_at(step))),
    ]
    if hours is not None:
        what = f"the same up to {pages.number(hours, 3)} GPU-hours, which all have"
        rows.append(row(what, lambda run: pages.number(run.loss_at(hours=hours))))
    rows += [
        row("a step, median", lambda run: pages.duration(median(map(_seconds, run.record.lines)))),
        row("GPU-hours in steps that count", lambda run: pages.number(run.hours[-1] if run.hours else math.nan)),
        row("GPU-hours in all launches", lambda run: pages.number(run.total_hours)),
        row("of the time was spent training", lambda run: pages.percent(run.record.seconds.goodput)),
        row("samples that could not be loaded", lambda run: f"{len(run.record.lost):,}"),
        row("steps left out", lambda run: f"{sum(bool(line.get('skipped')) for line in run.record.lines):,}"),
        row("launches", lambda run: f"{len(run.record.launches):,}" if run.record.launches else "–"),
        row("of them failed", lambda run: f"{len(run.failures):,}" if run.record.launches else "–"),
    ]
    return pages.table(("", *(run.name for run in runs)), rows)


def _charts(runs: Sequence[_Compared], by_hours: bool) -> pages.Html:
    if by_hours and all(run.hours is None for run in runs):
        return _unknown(runs)
    by = "GPU-hour" if by_hours else "step"
    charts = pages.joined(
        pages.curves(
            title,
            [run.points(key, by_hours) for run in runs],
            log=key != "lr",
            by=by,
            mean_of=1 if key == "lr" else None,
        )
        for key, title in _CHARTS.items()
    )
    drawn = pages.joined([pages.html('<div class="charts">{}</div>', charts), *_by_bucket(runs, by_hours, by)])
    said = "GPU-hours are those of steps that count: seconds of each step times the processes that made it."
    parts = [pages.html('<p class="note">{}</p>', said), *([_unknown(runs)] if None in [r.hours for r in runs] else [])]
    return pages.joined([*parts, drawn]) if by_hours else drawn


def _by_bucket(runs: Sequence[_Compared], by_hours: bool, by: str) -> Iterator[pages.Html]:
    """Yield the losses of buckets that several runs have, the most frequent first."""
    found = [[(at, of) for at, of in run.points("buckets", by_hours) if isinstance(of, Mapping)] for run in runs]
    counts = [Counter(name for _, of in points for name in of) for points in found]
    common = [name for name, _ in sum(counts, Counter()).most_common() if sum(name in one for one in counts) > 1]
    if len(common) > 1:
        charts = pages.joined(
            pages.curves(name, [[(at, of[name]) for at, of in points if name in of] for points in found], True, by)
            for name in common[:MOST_CURVES]
        )
        head = f"loss by bucket, {min(len(common), MOST_CURVES)} of {len(common)}, the most frequent first"
        yield pages.folded(head, pages.html('<div class="charts">{}</div>', charts))


def _unknown(runs: Sequence[_Compared]) -> pages.Html:
    names = ", ".join(run.name for run in runs if run.hours is None)
    why = f"not known: no {LAUNCHES_FILE} says how many processes there were"
    return pages.html('<p class="note">{}: {}.</p>', names, why)


def _settings(runs: Sequence[_Compared]) -> pages.Html:
    rows = [(key, *(pages.html("<code>{}</code>", value) for value in values)) for key, values in _differing(runs)]
    if not rows:
        return pages.html("<p>None: the runs have the same settings.</p>")
    places = range(len(runs) + 1)
    return pages.table(("key", *(run.name for run in runs)), rows, words=tuple(places))


def _differing(runs: Sequence[_Compared]) -> Iterator[tuple[str, list[str]]]:
    """Keys whose values are not the same in all runs, and these values."""
    settings = [dict(_flat(run.record.config)) for run in runs]
    for key in dict.fromkeys(key for of in settings for key in of):
        values = [of.get(key, "–") for of in settings]
        if len(set(values)) > 1:
            yield key, values


def _flat(section: Section, above: str = "") -> Iterator[tuple[str, str]]:
    """Every key of a config, sections included, and its value in the notation of run files."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield above + name, literal(value, "", 0)


def _power(runs: Sequence[_Compared]) -> pages.Html:
    """Return the mean draw of a GPU, over all nodes."""
    known = [run for run in runs if any("watts" in line for line in run.record.lines)]
    unknown = ", ".join(run.name for run in runs if run not in known)
    why = "metrics.jsonl has no watts, which only NVIDIA's driver tells, from a run's second point in the log on"
    parts = [pages.html('<p class="note">{}: {}.</p>', unknown, why)] if unknown else []
    if known:
        watts = [[(line["step"], mean_watts(line)) for line in run.record.lines if "watts" in line] for run in runs]
        parts.append(pages.html('<div class="charts">{}</div>', pages.curves("watts of a GPU", watts)))
    return pages.joined(parts)


def _launches(runs: Sequence[_Compared]) -> pages.Html:
    """Return the outcome of every launch, and the failures by node."""
    known = [run for run in runs if run.record.launches]
    parts = [_unknown_launches(runs)] if len(known) < len(runs) else []
    rows: list[tuple[object, ...]] = []
    for run in known:
        launches = run.record.launches
        more = f", the last {_MOST_LAUNCHES}" if len(launches) > _MOST_LAUNCHES else ""
        count = f"{len(launches):,} launch{'es' * (len(launches) > 1)}"
        rows.append((f"{run.name}: {count}{more}",))
        rows += [_launch(one, one == launches[-1]) for one in launches[-_MOST_LAUNCHES:]]
    if rows:
        parts.append(pages.table(("began, UTC", "step", "on", "ended"), rows, words=(0, 2, 3)))
    if nodes := list(_nodes(known)):
        head = ("node", "launches", "failures told there", "launches that ended without a word", "watts of a GPU")
        parts.append(pages.html("<h3>By node</h3>{}", pages.table(head, nodes)))
    return pages.joined(parts)


def _unknown_launches(runs: Sequence[_Compared]) -> pages.Html:
    names = ", ".join(run.name for run in runs if not run.record.launches)
    said = f"{names}: launches are not known: there is no {LAUNCHES_FILE}."
    return pages.html('<p class="note">{}</p>', said)


def _launch(one: LaunchRecord, last: bool) -> tuple[object, ...]:
    places = ", ".join(f"{host} ({count})" for host, count in sorted(one.hosts.items()))
    ended = one.ended or ("goes on, or was killed" if last else "without a word: killed, or a node was lost")
    if one.ended == "hung":
        ended = "hung: no step in watchdog_seconds; the stacks are in its folder"
    if one.ended == "failed":
        ended = f"failed on {one.host or '?'}: {one.why or 'no reason was told'}"
    return (time.strftime("%Y-%m-%d %H:%M", time.gmtime(one.time)), f"{one.step:,}", f"{one.device}: {places}", ended)


def _nodes(runs: Sequence[_Compared]) -> Iterator[tuple[object, ...]]:
    """Each node with the launches it was in, those that worst failed on it first."""
    launches, told, silent = Counter[str](), Counter[str](), Counter[str]()
    watts = defaultdict[str, list[float]](list)
    for run in runs:
        bad = run.failures
        for one in run.record.launches:
            launches.update(one.hosts.keys())
            if one in bad and one.host is None:
                silent.update(one.hosts.keys())
        told.update(one.host for one in bad if one.host is not None)
        for line in run.record.lines:
            for host, value in watts_by_node(line).items():
                watts[host].append(value)
    for host in sorted(launches, key=lambda host: (-told[host], -silent[host], host)):
        drawn = pages.number(sum(watts[host]) / len(watts[host]) if watts[host] else math.nan, 3)
        yield host, f"{launches[host]:,}", f"{told[host]:,}", f"{silent[host]:,}", drawn
