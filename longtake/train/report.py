"""A run as parts of an HTML page: its curves, data used and lost, where its time went, settings, how to go on."""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from longtake import pages
from longtake.buckets.page import bucket_picture
from longtake.checkpoint.runs import list_checkpoints
from longtake.config.dump import literal
from longtake.config.section import Section
from longtake.contracts import ClipFault, UserError
from longtake.data.clips.video import ClipError
from longtake.data.loading.quarantine import list_quarantine
from longtake.data.tables.stats_page import short_film
from longtake.durable import write_whole
from longtake.evaluate.config import LOSSES_FILE
from longtake.small_files import read_object, read_small
from longtake.track.trackers import METRICS_FILE, read_lines
from longtake.train.config import RunConfig, RunWithoutTable
from longtake.train.folder import QUARANTINE_FILE
from longtake.train.health.goodput import Seconds, read_seconds
from longtake.train.health.launches import LaunchRecord, read_launches
from longtake.train.run_file import CONFIG_FILE, read_run

_BUCKETS_FILE = "bucket_report.json"
NOTE_FILE = "note.txt"
_PARTS = (
    "steps that count",
    "starting",
    "steps made again",
    "saving",
    "waiting for data",
    "steps left out",
    "validations",
)
_MOST_FILMS, _MOST_TEXT, MOST_CURVES, _MOST_LOST = 24, 2000, 12, 100
_MOST_PASSES, _MOST_BUCKETS = 8, 24
_SEVERAL = "several in one step"  # of lines that do not say how many samples each had
LAST = 25  # steps whose mean is the loss of a run


@dataclass(frozen=True)
class RunRecord:
    """Contents of a run's folder."""

    folder: Path
    config: RunConfig
    lines: Sequence[dict[str, Any]]  # of `metrics.jsonl`
    buckets: pages.Html | None  # of the last launch
    seconds: Seconds
    lost: Sequence[ClipFault]
    launches: Sequence[LaunchRecord] = ()
    note: str = ""
    validations: Sequence[dict[str, Any]] = ()  # held-out losses, a line for each step and kind of weights

    @property
    def step(self) -> int:
        return self.lines[-1]["step"] if self.lines else 0

    @property
    def samples(self) -> int:
        """Trained on, repeats included."""
        counts = (line.get("samples") for line in self.lines if not line.get("skipped"))
        return sum(count for count in counts if isinstance(count, int))

    @property
    def total_seconds(self) -> float:
        return sum(astuple(self.seconds))


def read_record(folder: Path) -> RunRecord:
    """Read the folder of a run, also of one that goes on meanwhile. Raises `UserError` where it is none."""
    if not folder.is_dir():
        raise UserError(f"{folder}: is no folder of a run; give one, such as outputs/demo/run")
    config = read_run(str(folder), schema=RunWithoutTable).value
    metrics, buckets = folder / METRICS_FILE, folder / _BUCKETS_FILE
    lines = read_lines(metrics) if metrics.exists() else []
    picture = _buckets(buckets) if buckets.exists() else None
    lost, launches = list_quarantine(folder / QUARANTINE_FILE), read_launches(folder)
    losses = folder / LOSSES_FILE
    validations = read_lines(losses) if losses.exists() else []
    told = lost, launches, _read_note(folder), validations
    return RunRecord(folder, config, lines, picture, read_seconds(folder), *told)


def _read_note(folder: Path) -> str:
    path = folder / NOTE_FILE
    try:
        return read_small(path).decode("utf-8", "replace").strip() if path.exists() else ""
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is no note of a run ({error}); remove it") from error


def write_note(folder: Path, note: str) -> None:
    """Keep what a run is to show, for its reports; an empty note takes away the one that is there."""
    if note.strip():
        write_whole(folder / NOTE_FILE, note.strip() + "\n")
    else:
        (folder / NOTE_FILE).unlink(missing_ok=True)


def _buckets(path: Path) -> pages.Html:
    remedy = "remove it: the next launch writes it anew"
    report = read_object(path, {"buckets": dict, "unused": dict}, remedy)
    try:
        return bucket_picture(report)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: is no report of buckets ({error!r}); {remedy}") from error


def write_report(path: Path, record: RunRecord, samples: Path | None = None) -> None:
    """Write the page of a run, with the videos and stills in the folder `samples`, whole or not at all."""
    config, films = record.config, [] if samples is None else sample_films(samples)
    last = f"{config.max_steps:,}" if config.max_steps else "no last one"
    shown = [pages.html("<h2>Samples</h2>{}", pages.grid(films, plays=True))] if films else []
    note = [pages.html("<p>{}</p>", record.note)] if record.note else []
    figures = [
        (f"steps, of {last}", f"{record.step:,}"),
        ("samples trained on", f"{record.samples:,}"),
        (f"loss, mean of the last {LAST} steps", pages.number(mean_loss(record.lines))),
        ("trained for", pages.duration(record.total_seconds)),
        ("of the time was spent training", pages.percent(record.seconds.goodput)),
        ("samples that could not be loaded", f"{len(record.lost):,}"),
    ]
    title = f"Run {record.folder.resolve().name}"
    write_whole(path, pages.page(title, *note, pages.tiles(figures), *shown, *run_sections(record)))


def mean_loss(lines: Sequence[Mapping[str, Any]]) -> float:
    """Of the last steps among these."""
    losses = [line.get("loss") for line in lines[-LAST:]]
    kept = [loss for loss in losses if isinstance(loss, float) and math.isfinite(loss)]
    return sum(kept) / len(kept) if kept else math.nan


def watts_by_node(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the power per GPU of each node, in watts, where a line of metrics has it."""
    of = line.get("watts")
    found = of.items() if isinstance(of, dict) else ()
    return {str(node): float(value) for node, value in found if isinstance(value, (int, float))}


def mean_watts(line: Mapping[str, Any]) -> float:
    """Over all nodes."""
    return math.nan if not (found := watts_by_node(line)) else sum(found.values()) / len(found)


def run_sections(
    record: RunRecord, facts: Sequence[tuple[str, str]] = (), prompt: str = "what the video shows"
) -> list[pages.Html]:
    """Return the parts of every report of a run. `facts`: more about it; `prompt`: of a video that it may make."""
    commands = [(what, pages.html("<code>{}</code>", line)) for what, line in going_on(record, prompt)]
    return [
        pages.html("<h2>Curves</h2>{}", _curves(record)),
        pages.html("<h2>Data</h2>{}", _data(record)),
        pages.html("<h2>Time</h2>{}", _time(record.seconds)),
        pages.html("<h2>Settings</h2>{}", _settings(record, facts)),
        pages.html("<h2>Go on</h2>{}", pages.pairs(commands)),
    ]


def sample_films(folder: Path) -> list[pages.Html]:
    """Return the videos and stills in a folder, at most 24 evenly chosen, each with the text beside it. Raises
    `UserError` where there is no such folder."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give the one that `longtake generate` has written to")
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".mp4", ".png") and not _is_sheet(path))
    return [_sample(path) for path in files[:: -(-len(files) // _MOST_FILMS) or 1]]


def _is_sheet(path: Path) -> bool:
    """Return whether it is a contact sheet, as `--grid` makes them."""
    return path.stem.startswith("grid") and not path.with_suffix(".txt").exists()


def _sample(path: Path) -> pages.Html:
    prompt = path.with_suffix(".txt")
    text = prompt.read_text("utf-8", "replace")[:_MOST_TEXT].strip() if prompt.is_file() else path.name
    step = re.fullmatch(r"step0*(\d+)", path.parent.name)  # of a validation
    try:
        film = pages.film(*short_film(str(path), math.inf, 24), alt=text)
        return pages.figure(film, text, f"step {int(step[1]):,}" if step else "")
    except ClipError as error:
        return pages.figure(pages.html('<p class="bad">cannot be read: {}</p>', error), text)


def _curves(record: RunRecord) -> pages.Html:
    def points(name: str) -> list[tuple[int, Any]]:
        return [(line["step"], line[name]) for line in record.lines if name in line]

    shown = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate", "seconds": "seconds"}
    charts = pages.joined(  # the learning rate as it was: a mean would draw a restart or a warm-up late
        pages.curve(title, points(name), log=name != "lr", mean_of=1 if name == "lr" else None)
        for name, title in shown.items()
    )
    if watts := [(line["step"], mean_watts(line)) for line in record.lines if "watts" in line]:
        charts = pages.joined([charts, pages.curve("watts of a GPU", watts)])
    drawn = pages.html('<div class="charts">{}</div>', pages.joined([charts, *_held_out(record.validations)]))
    losses = [(line["step"], line["buckets"]) for line in record.lines if isinstance(line.get("buckets"), dict)]
    common = Counter(name for _, found in losses for name in found).most_common()
    if len(common) < 2:
        return drawn
    each = (
        pages.curve(name, [(step, found[name]) for step, found in losses if name in found], log=True)
        for name, _ in common[:MOST_CURVES]
    )
    head = f"loss by bucket, {min(len(common), MOST_CURVES)} of {len(common)}, the most frequent first"
    return pages.joined([drawn, pages.folded(head, pages.html('<div class="charts">{}</div>', pages.joined(each)))])


def _held_out(lines: Sequence[Mapping[str, Any]]) -> Iterator[pages.Html]:
    """Yield the held-out loss: the whole, by noise level and by bucket; of the averaged weights where there
    are some."""
    weights = "ema" if any(line.get("weights") == "ema" for line in lines) else "raw"
    kept = {
        line["step"]: line for line in lines if line.get("weights") == weights and isinstance(line.get("loss"), float)
    }
    if not kept:
        return
    yield pages.curve("held-out loss", [(step, line["loss"]) for step, line in kept.items()], log=True, mean_of=1)
    levels, buckets = ({name for line in kept.values() for name in line[key]} for key in ("levels", "buckets"))
    for name in sorted(levels, key=float):
        points = [(step, line["levels"].get(name)) for step, line in kept.items()]
        yield pages.curve(f"held-out loss at noise level {name}", points, log=True, mean_of=1)
    for name in sorted(buckets)[:MOST_CURVES] if len(buckets) > 1 else ():
        points = [(step, line["buckets"].get(name, {}).get("loss")) for step, line in kept.items()]
        yield pages.curve(f"held-out loss of {name}", points, log=True, mean_of=1)


def _data(record: RunRecord) -> pages.Html:
    skipped = sum(bool(line.get("skipped")) for line in record.lines)
    said = (
        f"Samples trained on: {record.samples:,}; samples that could not be loaded: {len(record.lost):,}; steps left "
        f"out for a loss or gradient that was not finite or too large: {skipped:,}."
    )
    parts = [pages.html("<p>{}</p>", said), *_trained(record.lines)]
    if record.buckets is not None:
        parts.append(pages.html("<h3>Clips <span>as the last launch found them</span></h3>{}", record.buckets))
    if record.lost:
        rows = [(fault.path, fault.reason, fault.pass_index) for fault in record.lost[:_MOST_LOST]]
        name = f"{len(record.lost):,} samples that could not be loaded, of which {len(rows)} are shown"
        parts.append(pages.folded(name, pages.table(("clip", "reason", "pass"), rows, words=(0, 1))))
    return pages.joined(parts)


def _trained(lines: Sequence[Mapping[str, Any]]) -> Iterator[pages.Html]:
    """Yield the samples and steps of all launches, by epoch and by bucket."""
    passes, samples, steps = Counter[int](), Counter[str](), Counter[str]()
    for line in lines:
        count, names, drawn = line.get("samples"), line.get("buckets"), line.get("drawn")
        if line.get("skipped") or not isinstance(count, int) or not isinstance(names, dict):
            continue
        passes[line["pass"] if isinstance(line.get("pass"), int) else 0] += count
        known = isinstance(drawn, dict) and all(isinstance(number, int) for number in drawn.values())
        for name, number in (drawn if known else {next(iter(names)) if len(names) == 1 else _SEVERAL: count}).items():
            samples[name] += number
            steps[name] += 1
    if not passes:
        return
    shown = ", ".join(f"{count:,} in pass {index:,}" for index, count in sorted(passes.items())[:_MOST_PASSES])
    more = f" and {len(passes) - _MOST_PASSES:,} passes more" if len(passes) > _MOST_PASSES else ""
    head, most = ("bucket", "samples", "steps with it"), max(1, *samples.values())
    rows = [(name, pages.meter(n / most, f"{n:,}"), f"{steps[name]:,}") for name, n in samples.most_common()]
    yield pages.html("<h3>Trained on <span>{}</span></h3>", shown + more)
    yield pages.table(head, rows[:_MOST_BUCKETS])
    if rest := rows[_MOST_BUCKETS:]:
        yield pages.folded(f"{len(rest)} smaller buckets", pages.table(head, rest))


def _time(seconds: Seconds) -> pages.Html:
    parts = [(spent, f"{name} {pages.duration(spent)}") for spent, name in zip(astuple(seconds), _PARTS, strict=True)]
    total, share = pages.duration(sum(astuple(seconds))), pages.percent(seconds.goodput)
    said = pages.html("<p>Trained for {}, all launches together; {} of the time was spent training.</p>", total, share)
    return pages.joined([said, pages.breakdown(parts)])


def _settings(record: RunRecord, facts: Sequence[tuple[str, str]]) -> pages.Html:
    found = [info for info in list_checkpoints(record.folder) if info.complete]
    last = ("last checkpoint", str(found[-1].path) if found else "none")
    rows = [
        *facts,
        ("folder", str(record.folder)),
        last,
        *((name, pages.html("<code>{}</code>", text)) for name, text in _changed(record.config)),
    ]
    whole = pages.html("<pre>{}</pre>", read_small(record.folder / CONFIG_FILE).decode("utf-8", "replace"))
    note = pages.html('<p class="note">Of the keys those whose values are not the defaults.</p>')
    return pages.joined([note, pages.pairs(rows), pages.folded(f"all of {CONFIG_FILE}", whole)])


def _changed(section: Section, above: str = "") -> Iterator[tuple[str, str]]:
    """Every key of a config, sections included, whose value is not its default."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _changed(value, f"{above}{name}.")
        elif value != field.get_default(call_default_factory=True):
            yield above + name, literal(value, "", 0)


def going_on(record: RunRecord, prompt: str) -> Iterator[tuple[str, str]]:
    """Yield the (purpose, command line) pairs that a finished or stopped run allows."""
    run, config = shlex.quote(str(record.folder)), record.config
    ended = config.max_steps is not None and record.step >= config.max_steps
    yield "train on", f"longtake train {run}" + (f" --max-steps {2 * record.step}" if ended else "")
    if any(info.complete for info in list_checkpoints(record.folder)):
        place = shlex.quote(str(record.folder / "samples"))
        yield "make a video", f"longtake generate {run} --prompt {shlex.quote(prompt)} --save-dir {place}"
        yield "take the weights away", f"longtake checkpoint export {run} weights.safetensors"
    yield "write this page anew, with what lies in its samples/", f"longtake report {run}"
    yield "see every setting, and where it comes from", f"longtake config show {run}"
    if config.tensorboard:
        yield "watch the curves", f"tensorboard --logdir {run}"
