"""The cells of a table: which kind a column is of, and the cells that cannot be read as it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtake.contracts import UserError
from longtake.small_files import parse_json, readable_text

SCORE = "score_vmafmotion"
UNEVEN = "uneven_times"  # 1 where frames of a video are not shown at equal steps
NUMBERS = ("num_frames", "height", "width", "fps", SCORE, UNEVEN)  # the columns of numbers that training reads
_NUMBER = r"(?i)^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$|^[+-]?(inf|infinity|nan)$"
_NAME = r"^[+-]?0\d"  # a name such as 007, not a number
_EMPTY = (  # what pyarrow reads as an empty cell in a column of numbers
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "N/A", "NA", "NULL"),
    *("NaN", "n/a", "nan", "null"),
)
_NOT_TEXTS = ("path", "control", "clip_id")  # columns of strings that no model reads
_CONTROL = r"[^\P{Cc}\t\n\r]"
_JSON_CELLS = {b"longtake_cells": b"json"}
_BLANKS = " \t"  # that the reader of a CSV takes away around a number
_SHOWN = 40  # letters of a cell that is no number


def json_field(name: str) -> pa.Field:
    """Return a column of strings whose cells are JSON: values of several kinds, in a table whose columns have
    one each."""
    return pa.field(name, pa.string(), metadata=_JSON_CELLS)


def holds_json(field: pa.Field) -> bool:
    """Return True for a field of `json_field`."""
    return pa.types.is_string(field.type) and _JSON_CELLS.items() <= (field.metadata or {}).items()


@dataclasses.dataclass(frozen=True)
class RawRows:
    """Some rows as a reader of a file gives them, and those that it could not read, by their number here."""

    batch: pa.RecordBatch
    lost: Mapping[int, str] = dataclasses.field(default_factory=dict)


def plain_schema(schema: pa.Schema, source: Path, texts: Collection[str] | None = ()) -> pa.Schema:
    """Return the kinds that cells are given: one kind of text, no dictionaries, and numbers where training reads
    numbers.

    texts: columns of captions besides `text`, which are text whatever their cells are, see `readable_cells`, but for
    columns of numbers; None: any column may be one, and lists of texts become JSON arrays. Raises `UserError` where
    path, text or one of `NUMBERS` is of a kind that cannot be made text or numbers.
    """
    fields = []
    for field in schema:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        is_text = _is_text(kind)
        if is_text:
            kind = pa.string()
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
        may_be_captions = texts is None and _is_list(kind) and _is_text(kind.value_type)
        if field.name == "text":
            is_cells = _is_list(kind) or pa.types.is_floating(kind)  # NaN alone, as pandas writes it
        else:
            is_cells = may_be_captions or (is_caption(field.name, texts or ()) and not is_number)
        if is_cells:
            fields.append(pa.field(field.name, pa.string()))
            continue
        if field.name in ("path", "text") or (field.name in NUMBERS and not is_number):
            wanted, words = (pa.float64(), "numbers") if field.name in NUMBERS else (pa.string(), "text")
            if not (is_text or pa.types.is_null(kind)):
                raise UserError(f"{source}: column {field.name} holds {kind}; it must hold {words}")
            kind = wanted
        fields.append(pa.field(field.name, kind, metadata=field.metadata if holds_json(field) else None))
    return pa.schema(fields)


def is_caption(name: str, texts: Collection[str]) -> bool:
    """Return True for a column that models read: `text`, or another one of `texts`."""
    return name == "text" or (name in texts and name not in (*_NOT_TEXTS, *NUMBERS))


def joined_schema(schemas: Sequence[tuple[Path, pa.Schema]]) -> pa.Schema:
    """Return the columns of all tables by name, in the order of their first coming, each of a kind that holds them all.

    Whole and decimal numbers become decimal; numbers and text become text. Raises `UserError` for lists and objects
    that do not go together.
    """
    fields: dict[str, tuple[Path, pa.DataType]] = {}
    of_json: dict[str, bool] = {}
    for source, schema in schemas:
        for field in schema:
            before = fields.setdefault(field.name, (source, field.type))
            fields[field.name] = (source, _joined(field.name, *before, source, field.type))
            of_json[field.name] = of_json.get(field.name, True) and (holds_json(field) or pa.types.is_null(field.type))
    joined = {name: pa.field(name, kind) for name, (_, kind) in fields.items()}
    is_json = {name: of_json[name] and pa.types.is_string(field.type) for name, field in joined.items()}
    return pa.schema([json_field(name) if is_json[name] else field for name, field in joined.items()])


def _joined(name: str, first: Path, one: pa.DataType, second: Path, other: pa.DataType) -> pa.DataType:
    pair = [pa.schema([(name, kind)]) for kind in (one, other)]
    try:
        return pa.unify_schemas(pair, promote_options="permissive").field(0).type
    except pa.ArrowException as error:
        if not pa.types.is_nested(one) and not pa.types.is_nested(other):
            return pa.string()
        if first == second:
            raise UserError(f"{first}: column {name} holds {one} and {other}; make it one kind") from error
        raise UserError(
            f"{second}: column {name} holds {other}, and {one} in {first}; give one of them another name"
        ) from error


class CsvKind:
    """The kind of a column of a CSV, widened cell by cell: numbers where every filled cell is one, else text.

    A column that training reads as numbers stays numbers, and is read as text where some of its cells are none.
    """

    def __init__(self, name: str, as_text: bool = False):
        self._is_number, self._has_others = name in NUMBERS and not as_text, False
        self._kind = pa.string() if as_text or name in ("path", "text", "clip_id") else pa.null()

    @property
    def is_text(self) -> bool:
        """Whether no further cell can change that it is text."""
        return pa.types.is_string(self._kind)

    @property
    def kind(self) -> pa.DataType:
        if pa.types.is_null(self._kind):
            return pa.float64() if self._is_number else pa.string()
        return self._kind

    def cast(self, cells: pa.Array) -> pa.Array:
        """Cells given as text as what the column holds; as text where some of its cells are no numbers."""
        if self._has_others or pa.types.is_string(self.kind):
            return cells
        cells = pc.ascii_trim(cells, _BLANKS)
        is_empty = pc.is_in(cells, value_set=pa.array(_EMPTY, cells.type))
        return pc.cast(pc.if_else(is_empty, pa.scalar(None, cells.type), cells), self.kind)

    def add(self, cells: pa.Array) -> None:
        """Look at further cells, given as text."""
        if self.is_text:
            return
        cells = pc.ascii_trim(cells, _BLANKS)
        cells = cells.filter(pc.invert(pc.is_in(cells, value_set=pa.array(_EMPTY))))
        numbers = pc.match_substring_regex(cells, _NUMBER)
        if self._is_number:
            self._has_others |= not pc.all(numbers).as_py()
            cells = cells.filter(numbers)
        elif not pc.all(numbers).as_py() or pc.any(pc.match_substring_regex(cells, _NAME)).as_py():
            self._kind = pa.string()
            return
        if len(cells) and not pa.types.is_floating(self._kind):
            try:
                pc.cast(cells, pa.int64())
                self._kind = pa.int64()
            except pa.ArrowInvalid:
                self._kind = pa.float64()


def readable_cells(
    batch: pa.RecordBatch, schema: pa.Schema, texts: Collection[str] | None = ()
) -> tuple[pa.RecordBatch, dict[int, str]]:
    """Return a batch with the columns and kinds of `schema`, and the rows with a cell that cannot be read, each with a
    reason.

    Such a cell is left empty, as is a column that the batch lacks. Not readable are texts that are not UTF-8, other
    text where training reads numbers, and in `text` and the captions of `texts` (None: any column of strings) a value
    that is not one text, or a NUL; their other control characters become blanks. Raises `pa.ArrowException` for what
    is damaged, and for other kinds.
    """
    columns, wrong = [], {}
    for field in schema:
        place = batch.schema.get_field_index(field.name)
        column = pa.nulls(len(batch), field.type) if place < 0 else batch.column(place)
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        column.validate(full=not is_text)  # of a damaged file Arrow would read beyond the end
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        is_values = _is_list(column.type) or pa.types.is_floating(column.type) or pa.types.is_boolean(column.type)
        is_values |= is_caption(field.name, texts or ())
        if is_text:
            column = _texts(column, field.name, wrong)
            if field.name in NUMBERS and not pa.types.is_string(field.type):
                column = _numbers(column, field.name, wrong)
            elif place >= 0 and holds_json(batch.schema.field(place)) and not holds_json(field):
                values = [None if cell is None else parse_json(cell, finite=False) for cell in column.to_pylist()]
                column = _texts_of_values(values, field.name, wrong)
        elif pa.types.is_string(field.type) and is_values and not pa.types.is_null(column.type):
            column = _texts_of_values(column.to_pylist(), field.name, wrong)
        if pa.types.is_string(column.type) and (texts is None or is_caption(field.name, texts)):
            column = _without_control(column, field.name, wrong)
        columns.append(column if column.type == field.type else pc.cast(column, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema), wrong


def text_of(value: Any, is_path: bool = False) -> str | None:
    """Return the text that a value is: of a list of texts a JSON array, as captions of segments are written; None
    for an empty list and for numbers that are not finite. Raises `ValueError` for everything else, which is not one
    text."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        raise ValueError(f"is {json.dumps(value)}, expected a text")
    if isinstance(value, int | float):
        return str(value) if math.isfinite(value) else None
    if isinstance(value, list) and not is_path:
        if not all(isinstance(part, str) for part in value):
            raise ValueError("is a list with something other than texts, expected a text or a list of texts")
        return json.dumps([readable_text(part) for part in value], ensure_ascii=False) if value else None
    raise ValueError(f"is {'a list' if isinstance(value, list) else 'an object'}, expected a text")


def _texts_of_values(values: Sequence[Any], name: str, wrong: dict[int, str]) -> pa.Array:
    texts: list[str | None] = []
    for row, value in enumerate(values):
        try:
            texts.append(text_of(value, is_path=name == "path"))
        except ValueError as error:
            texts.append(None)
            wrong.setdefault(row, f"{name} {error}")
    return pa.array(texts, pa.string())


def _without_control(column: pa.Array, name: str, wrong: dict[int, str]) -> pa.Array:
    has_control = pc.fill_null(pc.match_substring_regex(column, _CONTROL), False)
    if name in _NOT_TEXTS or not pc.any(has_control).as_py():
        return column
    cells = column.to_pylist()
    for row in np.flatnonzero(np.asarray(has_control)).tolist():
        try:
            cells[row] = readable_text(cells[row])
        except ValueError as error:
            cells[row] = None
            wrong.setdefault(row, f"{name} {error}")
    return pa.array(cells, column.type)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _texts(column: pa.Array, name: str, wrong: dict[int, str]) -> pa.Array:
    try:
        column.validate(full=True)
        return column
    except pa.ArrowInvalid:  # the texts, or where they lie
        column = column.view(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())
        column.validate(full=True)
    cells = column.to_pylist()
    for row, cell in enumerate(cells):
        try:
            cells[row] = None if cell is None else cell.decode()
        except UnicodeDecodeError as error:
            cells[row] = None
            wrong.setdefault(row, f"{name} is not text in UTF-8 ({error.reason} at byte {error.start})")
    return pa.array(cells, pa.large_string() if pa.types.is_large_binary(column.type) else pa.string())


def _numbers(column: pa.Array, name: str, wrong: dict[int, str]) -> pa.Array:
    cells = pc.ascii_trim(column, _BLANKS)
    cells = pc.if_else(pc.is_in(cells, value_set=pa.array(_EMPTY, cells.type)), pa.scalar(None, cells.type), cells)
    numbers = pc.fill_null(pc.match_substring_regex(cells, _NUMBER), True)
    for row in np.flatnonzero(~np.asarray(numbers)).tolist():
        cell = cells[row].as_py()
        shown = repr(cell[:_SHOWN]) + ("..." if len(cell) > _SHOWN else "")
        wrong.setdefault(row, f"{name} is {shown}, expected a number")
    return pc.cast(pc.if_else(numbers, cells, pa.scalar(None, cells.type)), pa.float64())
