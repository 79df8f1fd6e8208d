"""What is in a clip table, in numbers: one sweep over its rows, in memory that does not grow with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtake.data.tables.checks import clean_numbers, floats
from longtake.data.tables.rows import LINE, Chunk, open_rows
from longtake.pages import number
from longtake.random import sample_ids

SAMPLE_ROWS = 200_000  # up to here medians and histograms are of all rows, above of as many drawn at random
FIRST_INVALID = 20  # rows that cannot be used and are named
_MOST_SIZES = 100_000  # different sizes that are counted one by one
_SHOWN = 5  # values of a column that are counted in the summary
_FEW_VALUES = 50  # a column of texts with at most so many different ones is counted by them, another by length


@dataclass
class NumberColumn:
    """A column of numbers. `smallest`, `largest` and `mean` are of all rows, `sample` of some."""

    empty: int = 0
    filled: int = 0
    smallest: float = np.inf
    largest: float = -np.inf
    total: float = 0.0
    sample: np.ndarray = field(default_factory=lambda: np.empty(0))  # float64, ascending

    @property
    def median(self) -> float:
        return float(np.median(self.sample)) if len(self.sample) else np.nan

    @property
    def mean(self) -> float:
        return self.total / self.filled if self.filled else np.nan


@dataclass
class TableStats:
    """The numbers of a table."""

    source: Path
    columns: list[str]
    folder: Path | str = ""  # where relative paths start; a URL is a string
    rows: int = 0
    stills: int = 0
    invalid: Counter[str] = field(default_factory=Counter)  # what is wrong -> rows
    first_invalid: dict[int, str] = field(default_factory=dict)  # the first rows that cannot be used -> why
    seconds: float = 0.0  # of the videos whose rate is known
    unknown_length: int = 0  # videos whose rate is not
    numbers: dict[str, NumberColumn] = field(default_factory=dict)
    empty_texts: dict[str, int] = field(default_factory=dict)  # text column -> rows without
    lengths: dict[str, NumberColumn] = field(default_factory=dict)  # text column -> characters
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)  # (width, height)
    values: dict[str, Counter[str]] = field(default_factory=dict)  # text column -> its values, where they are few
    examples: list[tuple[int, str, str]] = field(default_factory=list)  # (row, path, text), rows ascending
    sampled: int = 0  # rows that medians and histograms are of

    @property
    def videos(self) -> int:
        return self.rows - self.stills - sum(self.invalid.values())


def table_stats(source: Path, examples: int = 0) -> TableStats:
    """Sweeps over a table. `examples`: so many rows are drawn to be shown. Raises `UserError` as `open_rows` does."""
    rows = open_rows(source)
    found = TableStats(rows.source, rows.names, rows.folder)
    # clip_id is text in a CSV, and no value to count
    kinds = {field.name: field.type for field in rows.schema if field.name != "clip_id"}
    numeric = [name for name, kind in kinds.items() if pa.types.is_integer(kind) or pa.types.is_floating(kind)]
    texts = [name for name, kind in kinds.items() if pa.types.is_string(kind)]
    made = [name for name in ("aspect_ratio", "resolution") if name not in rows.names]
    numeric += made if {"height", "width"} <= set(numeric) else []
    found.numbers = {name: NumberColumn() for name in numeric}
    found.lengths = {name: NumberColumn() for name in texts if name != "path"}
    found.empty_texts = dict.fromkeys(texts, 0)
    found.values = {name: Counter() for name in texts if name not in ("path", "text")}
    sample = _Sample([*numeric, *(f"characters of {name}" for name in found.lengths)])
    drawn: list[tuple[int, tuple[int, str, str]]] = []
    for chunk in rows.chunks():
        batch = chunk.batch
        taken = {name: _add_values(column, _values(batch, name)) for name, column in found.numbers.items()}
        sample.add(taken | _add_texts(found, batch), found.rows, len(batch))
        if examples and "path" in rows.names:
            drawn = sorted(drawn + _examples(batch, found.rows, examples))[:examples]
        if {"path", "num_frames", "height", "width", "fps"} <= set(rows.names):
            _add_clips(found, chunk, rows.with_lines)
        found.rows += len(batch)
    for name, values in sample.columns().items():
        column = found.numbers.get(name) or found.lengths[name.removeprefix("characters of ")]
        column.sample = values
    found.sampled, found.examples = len(sample), sorted(row for _, row in drawn)
    found.values = {name: counts for name, counts in found.values.items() if 0 < len(counts) <= _FEW_VALUES}
    found.lengths = {name: column for name, column in found.lengths.items() if name not in found.values}
    return found


def _values(batch: pa.RecordBatch, name: str) -> np.ndarray:
    """Return a column of numbers as float64 [N], NaN where empty; aspect ratio and resolution are made where
    missing."""
    if name in batch.schema.names:
        return floats(batch, name)
    height, width = _values(batch, "height"), _values(batch, "width")
    if name == "resolution":
        return height * width
    return np.divide(height, width, out=np.full(len(batch), np.nan), where=width > 0)


def _add_values(column: NumberColumn, values: np.ndarray) -> np.ndarray:
    filled = values[~np.isnan(values)]
    column.empty += len(values) - len(filled)
    if len(filled):
        column.filled += len(filled)
        column.total += float(filled.sum())
        column.smallest = min(column.smallest, float(filled.min()))
        column.largest = max(column.largest, float(filled.max()))
    return values


def _add_texts(found: TableStats, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
    taken = {}
    for name in found.empty_texts:
        cells = pc.fill_null(batch.column(name), "")
        lengths = pc.utf8_length(cells).to_numpy(zero_copy_only=False).astype(np.float64)
        found.empty_texts[name] += int((lengths == 0).sum())
        if name in found.lengths:
            taken[f"characters of {name}"] = _add_values(found.lengths[name], np.where(lengths > 0, lengths, np.nan))
        if name in found.values and len(found.values[name]) <= _FEW_VALUES:
            counted = pc.value_counts(cells)
            counts = zip(counted.field(0).to_pylist(), counted.field(1).to_pylist(), strict=True)
            found.values[name].update({value: count for value, count in counts if value})
    return taken


def _add_clips(found: TableStats, chunk: Chunk, with_lines: Callable[[dict[int, str]], dict[int, str]]) -> None:
    """Count sizes, stills, seconds, and the rows that cannot be used."""
    numbers, invalid = clean_numbers(chunk.batch, chunk.unreadable, chunk.first)
    invalid = with_lines(invalid)
    room = FIRST_INVALID - len(found.first_invalid)
    found.first_invalid |= dict(islice(sorted(invalid.items()), room))
    found.invalid.update(kind_of_fault(reason) for reason in invalid.values())
    frames, fps = numbers["num_frames"], numbers["fps"]
    found.stills += int((frames == 1).sum())
    timed = (frames > 1) & (fps > 0)
    found.seconds += float((frames[timed] / fps[timed]).sum())
    found.unknown_length += int(((frames > 1) & ~timed).sum())
    good = frames > 0
    pairs = numbers["width"][good] * (1 << 32) + numbers["height"][good]
    if len(found.sizes) <= _MOST_SIZES:
        for pair, count in zip(*(part.tolist() for part in np.unique(pairs, return_counts=True)), strict=True):
            found.sizes[pair >> 32, pair & 0xFFFFFFFF] += count


def kind_of_fault(reason: str) -> str:
    """Return the error of a row, without its line and cell: `height`, or `cannot be read`."""
    bare = LINE.sub("", reason)
    name, _, rest = bare.partition(" ")
    return name if rest.startswith(("is ", "holds ")) else "cannot be read"


class _Sample:
    """Rows drawn at random, as many as memory allows, the same in every run: those with the smallest hashes."""

    def __init__(self, names: list[str]):
        self._names = names
        self._keys = np.empty(0, np.uint64)
        self._values = np.empty((len(names), 0))

    def __len__(self) -> int:
        return min(len(self._keys), SAMPLE_ROWS)

    def add(self, columns: dict[str, np.ndarray], first_row: int, count: int) -> None:
        keys = _row_keys(first_row, count)
        values = np.array([columns[name] for name in self._names]).reshape(len(self._names), count)
        self._keys = np.concatenate([self._keys, keys])
        self._values = np.concatenate([self._values, values], axis=1)
        if len(self._keys) > 2 * SAMPLE_ROWS:
            self._cut()

    def columns(self) -> dict[str, np.ndarray]:
        """Return the filled cells of each column, ascending."""
        self._cut()
        return {name: np.sort(cells[~np.isnan(cells)]) for name, cells in zip(self._names, self._values, strict=True)}

    def _cut(self) -> None:
        if len(self._keys) > SAMPLE_ROWS:
            chosen = np.argpartition(self._keys, SAMPLE_ROWS)[:SAMPLE_ROWS]
            self._keys, self._values = self._keys[chosen], self._values[:, chosen]


def _examples(batch: pa.RecordBatch, first_row: int, count: int) -> list[tuple[int, tuple[int, str, str]]]:
    """Return a few rows drawn at random, the same in every run, those with the smallest keys: (key, (row,
    path, text))."""
    keys = _row_keys(first_row + (1 << 40), len(batch))
    best = np.argsort(keys)[:count]
    rows = zip(best.tolist(), batch.take(pa.array(best)).to_pylist(), strict=True)
    return [(int(keys[at]), (first_row + at, row["path"] or "", row.get("text") or "")) for at, row in rows]


def _row_keys(first_row: int, count: int) -> np.ndarray:
    return sample_ids(np.arange(first_row, first_row + count, dtype=np.uint64), 1)


def table_facts(stats: TableStats) -> list[tuple[str, str]]:
    """Return the table in a few lines: what is counted, and how much."""
    hours, invalid = stats.seconds / 3600, sum(stats.invalid.values())
    lines = [("rows", f"{stats.rows:,}")]
    if "num_frames" in stats.numbers:
        lines += [("videos", f"{stats.videos:,}"), ("stills", f"{stats.stills:,}")]
        lines.append(("hours", number(hours)) if hours >= 0.1 else ("seconds", number(stats.seconds)))
    if stats.unknown_length:
        lines.append(("videos without a rate", f"{stats.unknown_length:,} (not in the hours)"))
    if invalid:
        reasons = ", ".join(f"{count:,} {name}" for name, count in stats.invalid.most_common())
        lines.append(("rows that cannot be used", f"{invalid:,} ({reasons})"))
    lines += _common("sizes", Counter({f"{w}x{h}": count for (w, h), count in stats.sizes.items()}))
    for name, counts in stats.values.items():
        lines += _common(name, counts)
    for name, count in stats.empty_texts.items():
        if count:
            lines.append((f"rows without {name}", f"{count:,}"))
    return lines


def _common(name: str, counts: Counter[str]) -> list[tuple[str, str]]:
    if not counts:
        return []
    shown = ", ".join(f"{value} {count:,}" for value, count in counts.most_common(_SHOWN))
    rest = len(counts) - _SHOWN
    return [(name, shown + (f", and {rest:,} others" if rest > 0 else ""))]


def column_rows(stats: TableStats) -> list[tuple[str, str, str, str, str, str]]:
    """For each column of numbers, and the lengths of texts: name, empty cells, min, median, mean, max."""
    out = []
    for name, column in named_columns(stats).items():
        cells = (column.smallest, column.median, column.mean, column.largest) if column.filled else ()
        out.append((name, f"{column.empty:,}", *(number(cell) for cell in cells), *[""] * (4 - len(cells))))
    return out


def named_columns(stats: TableStats) -> dict[str, NumberColumn]:
    """Each column of numbers, and the lengths of texts, by what it is called."""
    return stats.numbers | {f"characters of {name}": column for name, column in stats.lengths.items()}
