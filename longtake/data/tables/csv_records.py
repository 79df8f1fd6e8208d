"""The records of a CSV, each with its line number: a faulty record costs its first line, never the lines after it.

A quoted cell may span lines. Where its quote is never closed, is closed amid other text, or encloses lines that are
records themselves, reading resumes at the line after the one on which the record begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from mmap import mmap

from longtake.contracts import UserError
from longtake.data.clips.formats import CLIP_SUFFIXES
from longtake.small_files import encoding_by_mark

_CELL = re.compile(rb'(?:[ \t]*"((?:[^"]++|"")*+)"[ \t]*|((?![ \t]*")[^,\r\n]++)?+)(?=[,\r\n]|\Z)')
_QUOTED = re.compile(rb'[ \t]*"(?:[^"]++|"")*+"')
_LINE = re.compile(rb"[^\r\n]*+(?:\r\n|\r|\n|\Z)")
_SEP_LINE = re.compile(rb"\s*sep=.?\s*", re.IGNORECASE)
_OTHER_DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_URL = re.compile(r"\w+://\S+")
_PATH_NAMES = ("path", "file_path")
_SHOWN = 40  # letters of a line in a message


@dataclass(frozen=True)
class Header:
    """The names of the columns, and where the records begin."""

    names: list[str]
    end: int  # in bytes
    next_line: int  # number of the line after it

    @property
    def path_column(self) -> int | None:
        return next((column for column, name in enumerate(self.names) if name in _PATH_NAMES), None)


def read_header(data: bytes | mmap, source: object) -> Header:
    """Return the first record that is not blank; without one there are no names. Raises `UserError` for a header
    that is not UTF-8, has other delimiters than commas, or is a directive for a spreadsheet program."""
    if encoding := encoding_by_mark(data[:4]):
        raise UserError(f"{source}: line 1: the file is in {encoding}, expected UTF-8; save it as CSV in UTF-8")
    start, line = (3 if data[:3] == b"\xef\xbb\xbf" else 0), 1
    while start < len(data) and not (first := _line_at(data, start)).strip():
        start, line = start + len(first), line + 1
    if start >= len(data):
        return Header([], start, line)
    if b"\0" in first:
        raise UserError(f"{source}: line {line} has NUL bytes, as UTF-16 without its mark; save it as CSV in UTF-8")
    if _SEP_LINE.fullmatch(first):
        raise UserError(f"{source}: line {line} is {first.decode('latin-1').strip()!r}, a line for Excel; delete it")
    cells, end = _record(data, start)
    if isinstance(cells, str):
        raise UserError(f"{source}: line {line}: {cells}")
    try:
        names = [cell.decode().strip() for cell in cells]  # `path, text` has a column text
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: its first line is not UTF-8 ({error}); write the table in UTF-8") from error
    for delimiter, plural in _OTHER_DELIMITERS.items():
        if sum(name.count(delimiter) for name in names) >= len(names):
            raise UserError(f"{source}: line {line} has {plural} between its cells, expected commas; save it with them")
    return Header(names, end, line + _num_breaks(data[start:end]))


def records(data: bytes | mmap, header: Header, may_be_short: bool = False) -> Iterator[tuple[int, list[bytes] | str]]:
    """(line from 1, the cells of a record or the reason why it cannot be read). Blank lines are skipped.

    may_be_short: a record may have fewer cells than there are columns; the missing ones are empty.
    """
    start, line, num_columns = header.end, header.next_line, len(header.names)
    while start < len(data):
        first = _line_at(data, start)
        line_end = start + len(first)
        if not first.strip():
            start, line = line_end, line + 1
            continue
        cells, end = _record(data, start)
        if isinstance(cells, list) and end > line_end and (inner := enclosed_row(cells, header)) is not None:
            cells = f"a quoted cell encloses the row {inner[:_SHOWN]!r}; close its quote, or write it twice"
        while isinstance(cells, list) and len(cells) > num_columns and not cells[-1]:
            cells.pop()  # commas at the end of a line, as spreadsheets write them
        if isinstance(cells, str):
            end = line_end
        elif len(cells) > num_columns or (len(cells) < num_columns and not may_be_short):
            cells = _count_fault(cells, num_columns)
        else:
            cells += [b""] * (num_columns - len(cells))
        yield line, cells
        line += _num_breaks(data[start:end])
        start = end


def enclosed_row(cells: Sequence[bytes], header: Header) -> str | None:
    """Return the first line within one of `cells` that looks like a row of the table; None where none does.

    In a table with a column of paths such a line has the file of a clip there. In another one, all lines of the cell
    but its first and last have as many cells as the table, and none begins with a blank, as prose after a comma does.
    """
    num_columns, path_column = len(header.names), header.path_column
    for cell in cells:
        lines = cell.decode(errors="replace").splitlines()[1:]
        if path_column is not None:
            for line in lines:
                parts = line.split(",")
                has_path = len(parts) > path_column and (len(parts) > 1 or num_columns == 1)
                if has_path and _is_file(parts[path_column].strip().strip('"')):
                    return line
        elif lines and num_columns > 1:
            inner = [line.split(",") for line in lines[:-1] or lines]
            if all(len(parts) == num_columns and not any(part[:1].isspace() for part in parts) for parts in inner):
                return lines[0]
    return None


def _is_file(text: str) -> bool:
    return _URL.fullmatch(text) is not None or text.lower().endswith(CLIP_SUFFIXES)


def _line_at(data: bytes | mmap, start: int) -> bytes:
    match = _LINE.match(data, start)
    assert match is not None
    return match.group()


def _record(data: bytes | mmap, start: int) -> tuple[list[bytes] | str, int]:
    """Return the cells of the record at `start`, or its fault, and where it ends, line break included."""
    cells: list[bytes] = []
    while match := _CELL.match(data, start):
        quoted, plain = match.groups()
        cells.append((plain or b"") if quoted is None else quoted.replace(b'""', b'"'))
        start = match.end()
        if data[start : start + 1] != b",":
            return cells, start + len(_line_at(data, start))
        start += 1
    return _quote_fault(data, start, len(cells) + 1), start


def _quote_fault(data: bytes | mmap, start: int, number: int) -> str:
    closed = _QUOTED.match(data, start)
    if closed is None:
        return f"the quote that opens cell {number} is never closed"
    twice = 'write a quote inside a quoted cell twice ("")'
    if data[closed.end() - 2 : closed.end() - 1] == b"\\":
        return rf"cell {number} has a \" inside; {twice}"
    return f"cell {number} continues after its closing quote; {twice}"


def _count_fault(cells: Sequence[bytes], num_columns: int) -> str:
    count = f"{len(cells)} cell{'s' * (len(cells) != 1)} for {num_columns} column{'s' * (num_columns != 1)}"
    if len(cells) > num_columns:
        return f"{count} (a cell with a comma needs quotes around it)"
    other = next((plural for mark, plural in _OTHER_DELIMITERS.items() if mark.encode() in cells[0]), None)
    return count + (f" (there are {other} where commas are expected)" if other else "")


def _num_breaks(text: bytes) -> int:
    return text.count(b"\n") + text.count(b"\r") - text.count(b"\r\n")
