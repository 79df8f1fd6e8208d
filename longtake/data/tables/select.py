"""Tables made from tables: rows that meet a condition, several tables in one, one dealt out to several."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtake.contracts import UserError
from longtake.data.tables.cells import RawRows, joined_schema, readable_cells
from longtake.data.tables.checks import check_path, probe_command, readable
from longtake.data.tables.ids import rename_repeats, repeats
from longtake.data.tables.rows import Chunk, Rows, open_rows, our_names
from longtake.data.tables.write_rows import TableWriter, check_target, moved_batch
from longtake.random import hash64, sample_ids

Repeated = Literal["refuse", "first", "rename"]
_SHARE = 1 << 33  # the number that a clip id is mixed with to say which part it falls into
_MET = "longtake_met"  # the condition's answer, as a column behind the table's
_EXAMPLE = "resolution >= 65536 AND fps > 8"
_MOST_ASKED = 50  # columns of a condition that are looked at for empty cells
_MOST_NAMED = 20  # rows that cannot be read
_KINDS = ("rows without num_frames", "stills", "videos")


@dataclass(frozen=True)
class Selected:
    """What came of writing a table."""

    target: Path
    kept: int  # rows written
    rows: int  # rows read
    left_out: Mapping[str, int]  # which of the rows read are in no output, and why -> how many
    unreadable: tuple[tuple[Path, int, str], ...]  # the first rows with a cell that cannot be read: table, row, why


def filter_table(source: Path, target: Path, where: str) -> Selected:
    """Write the rows of a table for which the SQL condition `where` (DuckDB's) is true, in their order.

    Clip ids stay, those that the paths give too: the output has a column clip_id. Relative paths are rewritten to
    start from the output's folder. In the condition, NaN counts as empty, and `resolution` (height x width),
    `aspect_ratio` (height / width) and `duration` (seconds) can be used where the table has not got them but what
    they are made of. Rows with a cell that cannot be read are left out. Raises `UserError` as `check_condition` does,
    and for what else DuckDB refuses in it.
    """
    import duckdb

    check_target(target, [source])
    rows, theirs = _open(source)
    made = _made(rows.names) | {name: _quoted(own) for own, name in theirs.items()}
    asked = check_condition(where, source, rows.names, [*made])
    schema, left_out = _with_id(rows.schema), _LeftOut()
    count, failed = 0, None

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal count, failed
        try:
            for chunk in rows.with_ids():
                count = chunk.end
                yield _nan_is_empty(left_out.take_unreadable(chunk, source))
        except UserError as error:  # DuckDB would wrap it in words of its own
            failed = error
            raise

    clips = f"(SELECT {', '.join(['*', *(f'{formula} AS {name}' for name, formula in made.items())])} FROM clips)"
    condition = f"(\n{where}\n)"  # the line break ends a comment
    wanted = [*map(_quoted, schema.names), f"{condition}::BOOLEAN AS {_MET}"]
    wanted += [f"{_quoted(name)} IS NULL" for name in asked]
    settings = {"threads": 1, "enable_external_access": False, "preserve_insertion_order": True}
    try:
        with duckdb.connect(config=settings) as connection, TableWriter(target, _named(schema, theirs)) as writer:
            connection.register("clips", schema.empty_table())
            connection.sql(f"SELECT 1 FROM {clips} WHERE {condition}")  # refuses what looks at several rows
            connection.register("clips", pa.RecordBatchReader.from_batches(schema, batches()))
            for found in connection.sql(f"SELECT {', '.join(wanted)} FROM {clips}").to_arrow_reader(1 << 16):
                left_out.add_unmet(found, asked)
                met, _ = readable_cells(found.filter(found.column(_MET)), schema)
                writer.write(_named(moved_batch(met, rows.folder, target.parent), theirs))
    except duckdb.Error as error:
        if failed is not None:
            raise failed from None
        raise UserError(f"--where {where!r}: {_one_line(error)}; {_columns(source, rows.names)}") from error
    return Selected(target, writer.rows, count, left_out.counts, tuple(left_out.unreadable))


def check_condition(where: str, source: Path, names: Sequence[str], made: Sequence[str] = ()) -> list[str]:
    """Return the columns that a condition asks about, of `names` and `made`.

    Raises `UserError` where it is empty, not SQL, more than one expression, or asks about other rows. DuckDB reads
    it twice, alone and in brackets; only one complete expression is right in both. `source` and its columns `names`
    are named in errors. Whether columns and kinds are right is not looked at.
    """
    columns = _columns(source, names)
    if not where.strip():
        raise UserError(f"--where is empty; write a condition such as {_EXAMPLE!r}; {columns}")
    alone, bracketed = (_tree(f"SELECT * FROM clips WHERE {text}") for text in (f"\n{where}\n", f"(\n{where}\n)"))
    for tree in (bracketed, alone):
        if tree["error"]:
            said = " ".join(tree["error_message"].split())
            raise UserError(f"--where {where!r}: {said}; write one condition such as {_EXAMPLE!r}; {columns}")
    if any(node.get("class") == "SUBQUERY" for node in _nodes(alone)):
        raise UserError(
            f"--where {where!r}: has a SELECT in it; a condition looks at one row at a time, such as {_EXAMPLE!r}"
        )
    parts = {part.lower() for node in _nodes(alone) for part in node.get("column_names", ())}
    return [name for name in (*names, *made) if name.lower() in parts]


def _columns(source: Path, names: Sequence[str]) -> str:
    unprobed = "num_frames" not in names
    more = f"; `{probe_command(source)}` makes a table with frames, sizes and rates" if unprobed else ""
    return f"the columns of {source} are {', '.join(names)}{more}"


def _open(source: Path) -> tuple[Rows, dict[str, str]]:
    """Return a table, and how those of its columns are called there that have other names in clip tables
    (`file_path`)."""
    rows = open_rows(source)
    names = our_names(rows.names)
    check_path(names, rows.source)
    theirs = {own: name for own, name in zip(names, rows.names, strict=True) if own != name}
    ours = {name: own for own, name in theirs.items()}

    def read(wanted: Sequence[str]) -> Iterator[RawRows]:
        raw_rows = rows.read([theirs.get(name, name) for name in wanted])
        return (replace(raw, batch=_named(raw.batch, ours)) for raw in raw_rows)

    return replace(rows, schema=_named(rows.schema, ours), read=read) if theirs else rows, theirs


def _named(part: Any, names: Mapping[str, str]) -> Any:
    """Return a batch or a schema, columns renamed."""
    if isinstance(part, pa.Schema):
        return pa.schema([field.with_name(names.get(field.name, field.name)) for field in part], part.metadata)
    return part.rename_columns([names.get(name, name) for name in part.schema.names])


def _tree(statement: str) -> dict[str, Any]:
    """What DuckDB's parser makes of a statement."""
    import duckdb

    with duckdb.connect(config={"threads": 1, "enable_external_access": False}) as connection:
        found = connection.execute("SELECT json_serialize_sql(?)", [statement]).fetchone()
    assert found is not None
    return json.loads(found[0])


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _nodes(part)


def merge_tables(sources: Sequence[Path], target: Path, repeated: Repeated = "refuse") -> Selected:
    """Write several tables as one, one after the other; a column that a table lacks is empty in its rows.

    Clip ids stay as each table has or gives them. Rows with an id that an earlier row has: "refuse" them with a
    `UserError`, keep the "first" only, or "rename": the n-th such row gets the id that it would have in a mix of these
    tables. Rows with a cell that cannot be read are left out. Relative paths are rewritten to start from the output's
    folder. Raises `UserError` also for columns whose kinds do not go together.
    """
    check_target(target, sources)
    tables, named = zip(*map(_open, sources), strict=True)
    theirs = {own: name for own, name in named[0].items() if all(each.get(own) == name for each in named)}
    schema, left_out = joined_schema([(table.source, _with_id(table.schema)) for table in tables]), _LeftOut()
    ids = [table.ids() for table in tables]
    starts = [0, *accumulate(map(len, ids))]
    joined = np.concatenate(ids)
    rows, _ = repeats(joined)
    if len(rows) and repeated == "refuse":
        raise UserError(_repeated_ids(joined, int(rows[0]), len(rows), starts, sources))
    keep = np.ones(len(joined), bool)
    if repeated == "first":
        keep[rows] = False
    else:
        rename_repeats(joined)
    with TableWriter(target, _named(schema, theirs)) as writer:
        for table, start in zip(tables, starts, strict=False):
            for chunk in table.chunks():
                here = slice(start + chunk.first, start + chunk.end)
                with readable(table.source):
                    batch, wrong = readable_cells(chunk.batch, schema)
                wrong = table.with_lines({chunk.first + row: why for row, why in wrong.items()})
                chunk = replace(chunk, unreadable=wrong | chunk.unreadable)
                batch = batch.set_column(schema.get_field_index("clip_id"), "clip_id", pa.array(joined[here]))
                batch = left_out.take_unreadable(replace(chunk, batch=batch), table.source, keep[here])
                writer.write(_named(moved_batch(batch, table.folder, target.parent), theirs))
    return Selected(target, writer.rows, len(joined), left_out.counts, tuple(left_out.unreadable))


class _LeftOut:
    """Counts the rows that are not written, by what they are and why."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.unreadable: list[tuple[Path, int, str]] = []

    def take_unreadable(self, chunk: Chunk, source: Path, keep: np.ndarray | None = None) -> pa.RecordBatch:
        """Return the rows of which every cell can be read; `keep`: bool [N], false where a row repeats an
        earlier one."""
        kept = np.ones(len(chunk.batch), bool) if keep is None else keep.copy()
        self._count("rows: their clip id is that of an earlier one", int((~kept).sum()))
        for row, reason in chunk.unreadable.items():
            self._count("rows: a cell cannot be read", int(kept[row - chunk.first]))
            kept[row - chunk.first] = False
            if len(self.unreadable) < _MOST_NAMED:
                self.unreadable.append((source, row, reason))
        return chunk.batch if kept.all() else chunk.batch.filter(pa.array(kept))

    def add_unmet(self, rows: pa.RecordBatch, asked: Sequence[str]) -> None:
        """`rows`: with the condition's answer, and behind it, of each column that it `asked` about, what is empty."""
        place = rows.schema.get_field_index(_MET)
        met, empty = rows.column(place), rows.columns[place + 1 :][:_MOST_ASKED]
        frames = rows.column("num_frames") if "num_frames" in rows.schema.names else pa.nulls(len(rows), pa.int64())
        frames = np.asarray(pc.fill_null(pc.cast(frames, pa.float64()), 0))
        blank = sum((np.asarray(cells).astype(np.int64) << bit for bit, cells in enumerate(empty)), start=np.int64(0))
        why = np.where(np.asarray(pc.is_null(met)), 1 + blank, 0) * len(_KINDS) + np.clip(frames, 0, 2).astype(np.int64)
        codes, counts = np.unique(why[~np.asarray(pc.fill_null(met, False))], return_counts=True)
        for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
            reason, kind = divmod(code, len(_KINDS))
            named = " and ".join(name for bit, name in enumerate(asked) if reason and reason - 1 >> bit & 1)
            verdict = "is neither true nor false" if reason else "is false"
            said = f"{named} empty" if named else f"the condition {verdict}"
            self._count(f"{_KINDS[kind]}: {said}", count)

    def _count(self, what: str, rows: int) -> None:
        if rows:
            self.counts[what] += rows


def split_table(
    source: Path, targets: Sequence[Path], fractions: Sequence[float], by: str | None = None, seed: int = 0
) -> list[Selected]:
    """Deals the rows of a table out to several, in their order: about `fractions` of them to each.

    Where a row goes is a function of its clip id and `seed` alone, so rows that are added later move no others. With
    `by`, rows that have the same value in that column go together, and the value decides. Clip ids stay; relative
    paths are rewritten to start from the folder of each output. Raises `UserError` for fractions that do not add up
    to 1, or not one for each output.
    """
    _check_split(targets, fractions)
    for target in targets:
        check_target(target, [source])
    rows, theirs = _open(source)
    by = next((own for own, name in theirs.items() if name == by), by)
    if by is not None and by not in rows.names:
        raise UserError(f"--by {by}: {source} has no such column; choose among {', '.join(rows.names)}")
    schema = _with_id(rows.schema)
    ends = np.array([*accumulate(fractions)][:-1])
    count, left_out = 0, _LeftOut()
    with ExitStack() as stack:
        writers = [stack.enter_context(TableWriter(target, _named(schema, theirs))) for target in targets]
        for chunk in rows.with_ids():
            count, batch = chunk.end, left_out.take_unreadable(chunk, source)
            places = np.searchsorted(ends, _shares(batch, by, seed), side="right")
            for number, writer in enumerate(writers):
                part, _ = readable_cells(batch.filter(pa.array(places == number)), schema)
                writer.write(_named(moved_batch(part, rows.folder, writer.target.parent), theirs))
    unread = tuple(left_out.unreadable)
    return [Selected(writer.target, writer.rows, count, left_out.counts, unread) for writer in writers]


def _shares(batch: pa.RecordBatch, by: str | None, seed: int) -> np.ndarray:
    """Return a number in [0, 1) for each row."""
    ids = batch.column("clip_id").to_numpy()
    if by is not None:
        ids = np.array([hash64(str(value)) for value in batch.column(by).to_pylist()], np.uint64)
    return (sample_ids(ids, _SHARE + seed) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _check_split(targets: Sequence[Path], fractions: Sequence[float]) -> None:
    given = ",".join(f"{fraction:g}" for fraction in fractions)
    if len(targets) != len(fractions):
        raise UserError(f"--fractions {given}: {len(fractions)} for {len(targets)} outputs; give one for each -o")
    if not all(math.isfinite(fraction) and fraction > 0 for fraction in fractions) or abs(sum(fractions) - 1) > 1e-6:
        raise UserError(f"--fractions {given}: they must be above 0 and add up to 1; they add up to {sum(fractions):g}")
    if len({target.absolute() for target in targets}) < len(targets):
        raise UserError(f"-o {targets[0]}: two outputs have the same name; give each its own")


def _repeated_ids(ids: np.ndarray, row: int, count: int, starts: Sequence[int], sources: Sequence[Path]) -> str:
    first = int(np.flatnonzero(ids == ids[row])[0])
    places = []
    for found in (first, row):
        table = int(np.searchsorted(starts, found, side="right")) - 1
        places.append(f"row {found - starts[table]} of {sources[table]}")
    return (
        f"{places[1]}: has the clip id {ids[row]} of {places[0]} ({count} such rows in all); keep the first of them "
        "with --repeated first, or all under new ids with --repeated rename"
    )


def _with_id(schema: pa.Schema) -> pa.Schema:
    """Return the schema of an output: with clip_id."""
    place, field = schema.get_field_index("clip_id"), pa.field("clip_id", pa.uint64())
    return schema.append(field) if place < 0 else schema.set(place, field)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).strip().split("LINE ")[0].split())


def _made(names: Sequence[str]) -> dict[str, str]:
    """Columns that a condition may use although the table lacks them."""
    formulas = {
        "resolution": ("height * width", {"height", "width"}),
        "aspect_ratio": ("height / width", {"height", "width"}),
        "duration": ("num_frames / nullif(fps, 0)", {"num_frames", "fps"}),
    }
    return {name: text for name, (text, needs) in formulas.items() if name not in names and needs <= set(names)}


def _nan_is_empty(batch: pa.RecordBatch) -> pa.RecordBatch:
    for place, field in enumerate(batch.schema):
        if pa.types.is_floating(field.type):
            cells = batch.column(place)
            is_nan = pc.fill_null(pc.is_nan(cells), False)
            if pc.any(is_nan).as_py():
                batch = batch.set_column(place, field, pc.if_else(is_nan, pa.scalar(None, field.type), cells))
    return batch


def _quoted(name: str) -> str:
    """Return a column's name as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'
