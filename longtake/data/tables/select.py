"""Tables made from tables: rows that meet a condition, several tables in one, one dealt out to several."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtake.contracts import UserError
from longtake.data.tables.condition import check_condition
from longtake.data.tables.ids import repeats
from longtake.data.tables.paths import moved_paths, same_start
from longtake.data.tables.rows import Rows, aligned, open_rows, readable
from longtake.data.tables.write_rows import TableWriter, check_target, joined_schema
from longtake.random import hash64, sample_ids

Repeated = Literal["refuse", "first", "rename"]
_TWIN = 1 << 32  # as in a mix: copies of a clip are counted far below
_SHARE = 1 << 33  # the number that a clip id is mixed with to say which part it falls into


@dataclass(frozen=True)
class Selected:
    """What came of writing a table."""

    target: Path
    kept: int  # rows written
    rows: int  # rows read


def filter_table(source: Path, target: Path, where: str) -> Selected:
    """Writes the rows of a table for which the SQL condition `where` (DuckDB's) is true, in their order.

    Clip ids stay, those that the paths give too: the output has a column clip_id. Relative paths are rewritten to
    start from the output's folder. In the condition, NaN counts as empty, and `resolution` (height x width),
    `aspect_ratio` (height / width) and `duration` (seconds) can be used where the table has not got them but what
    they are made of. Raises `UserError` as `check_condition` does, and for what else DuckDB refuses in it.
    """
    import duckdb

    check_target(target, [source])
    rows = open_rows(source)
    _need_path(rows)
    check_condition(where, source, rows.names)
    schema = _with_id(rows.schema)
    count, failed = 0, None

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal count, failed
        try:
            for batch in rows.with_ids():
                count += len(batch)
                yield _nan_is_empty(batch)
        except UserError as error:  # DuckDB would wrap it in words of its own
            failed = error
            raise

    names = ", ".join(rows.names)
    made = ", ".join(f"{formula} AS {name}" for name, formula in _made(rows.names).items())
    everything = f"(SELECT *{', ' + made if made else ''} FROM clips)"
    kept = ", ".join(f'"{name.replace(chr(34), chr(34) * 2)}"' for name in schema.names)
    settings = {"threads": 1, "enable_external_access": False, "preserve_insertion_order": True}
    try:
        with duckdb.connect(config=settings) as connection, TableWriter(target, schema) as writer:
            connection.register("clips", pa.RecordBatchReader.from_batches(schema, batches()))
            # The line break ends a comment in the condition.
            found = connection.sql(f"SELECT {kept} FROM {everything} WHERE (\n{where}\n)")
            for batch in found.to_arrow_reader(1 << 16):
                writer.write(_moved(aligned(batch, schema), rows.folder, target))
    except duckdb.Error as error:
        if failed is not None:
            raise failed from None
        raise UserError(f"--where {where!r}: {_one_line(error)}; the columns of {source} are {names}") from error
    return Selected(target, writer.rows, count)


def merge_tables(sources: Sequence[Path], target: Path, repeated: Repeated = "refuse") -> Selected:
    """Writes several tables as one, one after the other; a column that a table lacks is empty in its rows.

    Clip ids stay as each table has or gives them. Rows with an id that an earlier row has: "refuse" them with a
    `UserError`, keep the "first" only, or "rename": the n-th such row gets the id that it would have in a mix of these
    tables. Relative paths are rewritten to start from the output's folder. Raises `UserError` also for columns whose
    kinds do not go together.
    """
    check_target(target, sources)
    tables = [open_rows(source) for source in sources]
    for table in tables:
        _need_path(table)
    schema = joined_schema([(table.source, _with_id(table.schema)) for table in tables])
    ids = [table.ids() for table in tables]
    starts = [0, *accumulate(map(len, ids))]
    joined = np.concatenate(ids)
    rows, ordinals = repeats(joined)
    if len(rows) and repeated == "refuse":
        raise UserError(_told_repeated(joined, int(rows[0]), len(rows), starts, sources))
    keep = np.ones(len(joined), bool)
    if repeated == "first":
        keep[rows] = False
    else:
        joined[rows] = sample_ids(joined[rows], _TWIN + ordinals)
    with TableWriter(target, schema) as writer:
        for table, start in zip(tables, starts, strict=False):
            for batch in table.batches():
                here = slice(start, start + len(batch))
                start += len(batch)
                with readable(table.source):
                    batch = aligned(batch, schema)
                batch = batch.set_column(schema.get_field_index("clip_id"), "clip_id", pa.array(joined[here]))
                writer.write(_moved(batch.filter(pa.array(keep[here])), table.folder, target))
    return Selected(target, writer.rows, len(joined))


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
    rows = open_rows(source)
    _need_path(rows)
    if by is not None and by not in rows.names:
        raise UserError(f"--by {by}: {source} has no such column; choose among {', '.join(rows.names)}")
    schema = _with_id(rows.schema)
    ends = np.array([*accumulate(fractions)][:-1])
    count = 0
    with ExitStack() as stack:
        writers = [stack.enter_context(TableWriter(target, schema)) for target in targets]
        for batch in rows.with_ids():
            count += len(batch)
            places = np.searchsorted(ends, _shares(batch, by, seed), side="right")
            for number, writer in enumerate(writers):
                part = batch.filter(pa.array(places == number))
                writer.write(_moved(aligned(part, schema), rows.folder, writer.target))
    return [Selected(writer.target, writer.rows, count) for writer in writers]


def _shares(batch: pa.RecordBatch, by: str | None, seed: int) -> np.ndarray:
    """A number in [0, 1) for each row."""
    ids = batch.column("clip_id").to_numpy()
    if by is not None:
        ids = np.array([hash64(str(value)) for value in batch.column(by).to_pylist()], np.uint64)
    return (sample_ids(ids, _SHARE + seed) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _check_split(targets: Sequence[Path], fractions: Sequence[float]) -> None:
    told = ",".join(f"{fraction:g}" for fraction in fractions)
    if len(targets) != len(fractions):
        raise UserError(f"--fractions {told}: {len(fractions)} for {len(targets)} outputs; give one for each -o")
    if not all(math.isfinite(fraction) and fraction > 0 for fraction in fractions) or abs(sum(fractions) - 1) > 1e-6:
        raise UserError(f"--fractions {told}: they must be above 0 and add up to 1; they add up to {sum(fractions):g}")
    if len({target.absolute() for target in targets}) < len(targets):
        raise UserError(f"-o {targets[0]}: two outputs have the same name; give each its own")


def _told_repeated(ids: np.ndarray, row: int, count: int, starts: Sequence[int], sources: Sequence[Path]) -> str:
    first = int(np.flatnonzero(ids == ids[row])[0])
    places = []
    for found in (first, row):
        table = int(np.searchsorted(starts, found, side="right")) - 1
        places.append(f"row {found - starts[table]} of {sources[table]}")
    return (
        f"{places[1]}: has the clip id {ids[row]} of {places[0]} ({count} such rows in all); keep the first of them "
        "with --repeated first, or all under new ids with --repeated rename"
    )


def _need_path(rows: Rows) -> None:
    if "path" not in rows.names:
        raise UserError(
            f"{rows.source}: column path is missing (found {', '.join(rows.names)}); it names the file of each clip"
        )


def _with_id(schema: pa.Schema) -> pa.Schema:
    """The schema of an output: with clip_id."""
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


def _moved(batch: pa.RecordBatch, folder: Path | str, target: Path) -> pa.RecordBatch:
    """The batch with paths that start from the folder of `target`."""
    if same_start(folder, target.parent):
        return batch
    place = batch.schema.get_field_index("path")
    paths = moved_paths(batch.column(place).to_pylist(), folder, target.parent)
    return batch.set_column(place, batch.schema.field(place), pa.array(paths, pa.string()))
