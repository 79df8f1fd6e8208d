"""Probing a whole table: many files, several processes or machines, and a journal that a restart continues from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtake.contracts import UserError
from longtake.data.clips.remote import FileCache, check_protocols, default_cache_folder, join_location, refuse_url
from longtake.data.clips.video import ClipError
from longtake.data.probing.complete import Answers, complete, write_bad
from longtake.data.probing.journal import Journal
from longtake.data.probing.listing import list_clips
from longtake.data.probing.one_file import ClipInfo, probe_file
from longtake.data.probing.pool import Crew
from longtake.data.tables import json_table
from longtake.data.tables.captions import probe_warning
from longtake.data.tables.ids import compute_clip_ids
from longtake.data.tables.paths import moved_paths
from longtake.data.tables.rows import id_values
from longtake.data.tables.shards import is_shards
from longtake.data.tables.table import base_folder, read_columns, text_column
from longtake.data.tables.write_rows import check_target, write_table

Engine = Literal["local", "ray"]
Asked = Generator[tuple[int, Any], None, None]  # (place, answer) as they are ready


@dataclass(frozen=True)
class ProbeResult:
    """What came of probing a table."""

    target: Path  # the table written; of a part, its own name
    kept: int  # rows written
    bad: int  # rows left out
    bad_rows: tuple[tuple[int, str, str], ...]  # (row of the source, path as written, reason), in order
    bad_path: Path | None  # the list of bad rows; None where there is none
    continued: int  # rows whose answers a journal had


def probe_table(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    workers: int = 0,
    root: str | os.PathLike[str] | None = None,
    strict: bool = False,
    decode_check: bool = False,
    part: tuple[int, int] | None = None,
    engine: Engine = "local",
    cache: FileCache | None = None,
    progress: Callable[[int, int], None] | None = None,
    warn: Callable[[str], None] | None = None,
) -> ProbeResult:
    """Probes every clip of a table and writes the completed one; suffixes choose CSV, Parquet, Arrow, JSON or JSONL.

    `source` needs a column path, or is a folder of clips (`list_clips`); text is empty where missing; other columns
    are kept. Made, or made anew: num_frames, height, width, aspect_ratio (height / width), resolution (height x
    width), fps, duration (seconds), codec; clip_id if not there. Rows keep their order. A file that cannot be used
    costs its row: it is listed with the reason in `<target stem>.bad.csv` beside the target. With `strict` any bad
    file is a `UserError` and only the list is written; so is a table of which no clip can be used.

    Relative paths that start elsewhere than in the target's folder are rewritten to start there; made clip ids are
    those of the paths as the target has them.

    `workers`: processes, 0 in this one; a decoder that crashes takes its file along, not the run. `root`: as in
    `ClipTable.open`. `decode_check`: also decode every file and leave out those that fail. `part`: (i, n) does the
    i-th (from 1) of n stretches of the table and writes `part_path(target, i, n)`; the parts, one after the other, are
    the whole table. `engine` "ray" spreads the files over a Ray cluster, `workers` processes in all (0: one a core).
    `cache`: where files that lie on servers are fetched to (None: `FileCache` in the user's cache folder).
    `progress(done, total)` is called as files are finished, first with what was done before; `warn(sentence)` before
    the first file, where clips have no caption.

    Answers are kept in `<target>.journal` until the table is written. After an interruption of any kind the same call
    continues from it; bad files are tried again. Output files are complete or absent.
    """
    source, target = Path(source), Path(target)
    if part is not None:
        target = part_path(target, *part)
    refuse_url(source)
    refuse_url(target)
    check_target(target, [source])
    columns = _checked(read_source(source), source, target)
    if warn and (said := probe_warning(columns, source)):
        warn(said)
    paths = columns["path"].to_pylist()
    folder = source if source.is_dir() else base_folder(source, root)
    rows = _rows_of_part(len(paths), *(part or (1, 1)))
    files = [join_location(folder, path) if path else "" for path in paths[rows]]
    check_protocols(files)
    belongs_to = {
        "table": _digest(paths),
        "root": folder if isinstance(folder, str) else str(folder.resolve()),
        "decode_check": decode_check,
        "part": list(part or (1, 1)),
    }
    ask = partial(_ask, decode_check=decode_check, cache=cache or FileCache(default_cache_folder()))
    with Journal(target.with_name(f"{target.name}.journal"), belongs_to) as journal:
        answers, continued = _answer_all(files, journal, partial(_ASKERS[engine], ask, workers), progress)
        bad = tuple((rows.start + row, paths[rows.start + row], text) for row, text in sorted(answers.reasons.items()))
        bad_path = write_bad(target.with_name(f"{target.stem}.bad.csv"), bad)
        if bad and (strict or (part is None and len(bad) == len(files))):
            raise UserError(_complaint(source, len(files), bad, bad_path, folder))
        paths = moved_paths(paths, folder, target.parent)
        columns = columns.set_column(columns.column_names.index("path"), "path", pa.array(paths, pa.string()))
        clip_ids = compute_clip_ids(paths)[rows]  # over all rows: bad files and parts do not change the others' ids
        write_table(complete(columns, rows, answers, clip_ids, target.suffix.lower() != ".csv"), target)
        journal.remove()
    return ProbeResult(target, len(files) - len(bad), len(bad), bad, bad_path, continued)


def part_path(target: Path, number: int, count: int) -> Path:
    """Where part `number` (from 1) of `count` is written: `clips.part-00003-of-00016.parquet`."""
    if not 1 <= number <= count:
        raise UserError(
            f"--part {number}/{count}: parts are counted from 1, the last one of {count} is {count}/{count}"
        )
    return target.with_name(f"{target.stem}.part-{number:05d}-of-{count:05d}{target.suffix}")


def read_source(source: Path) -> pa.Table:
    """The table to probe: columns of a CSV all as text, those of other formats as they are, or the clips of a folder.

    Raises `UserError`.
    """
    if is_shards(source):
        raise UserError(f"{source}: is a folder of shards; probe the table that they are made from")
    if source.is_dir():
        return list_clips(source).select(["path", "text"])
    if source.suffix.lower() not in json_table.SUFFIXES:
        return read_columns(source, as_text=True)
    if not source.is_file():
        raise UserError(f"{source}: no such file; give the list of clips as .csv, .parquet, .arrow, .json or .jsonl")
    return json_table.read_json(source)


def _checked(columns: pa.Table, source: Path, target: Path) -> pa.Table:
    """The table with path and text as texts (never null) and clip_id as uint64, before hours are spent on its files."""
    if "path" not in columns.column_names:
        found = ", ".join(columns.column_names) or "no column"
        raise UserError(f"{source}: column path is missing (found {found}); it names the file of each clip")
    if not len(columns):
        raise UserError(f"{source}: the table has no rows; list one clip a row with its path and text")
    for name in ("path", "text", "clip_id"):
        if name in columns.column_names:
            if name == "clip_id":
                values = pa.array(id_values(columns["clip_id"], source))
            else:
                values = pc.fill_null(text_column(columns, name, source).cast(pa.string()), "")
            columns = columns.set_column(columns.column_names.index(name), name, values)
    return columns


def _rows_of_part(num_rows: int, number: int, count: int) -> slice:
    return slice(num_rows * (number - 1) // count, num_rows * number // count)


def _digest(paths: Sequence[str]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        digest.update(path.encode(errors="surrogateescape") + b"\0")
    return digest.hexdigest()


def _ask(location: str, decode_check: bool, cache: FileCache) -> list[Any] | str:
    """A file's info as a list that JSON can hold, or the reason why it cannot be used."""
    if not location:
        return "path is empty"
    try:
        with cache.local(location) as path:
            return list(astuple(probe_file(path, decode_check)))
    except ClipError as error:
        return str(error)


def _answer_all(
    files: Sequence[str],
    journal: Journal,
    ask_each: Callable[[Sequence[str]], Asked],
    progress: Callable[[int, int], None] | None,
) -> tuple[Answers, int]:
    """The answers for all files, of which the journal may have some; bad ones are asked again. And how many it had."""
    answers = Answers(len(files))
    for row, answer in journal.read():
        if not isinstance(answer, str):
            answers.set(row, ClipInfo(*answer))
    open_rows = np.flatnonzero(~answers.kept)
    done = continued = len(files) - len(open_rows)
    if progress:
        progress(done, len(files))
    with closing(ask_each([files[row] for row in open_rows])) as asked:  # so that an interrupt ends the processes
        for place, answer in asked:
            row = int(open_rows[place])
            journal.add(row, answer)
            answers.set(row, answer if isinstance(answer, str) else ClipInfo(*answer))
            done += 1
            if progress:
                progress(done, len(files))
    return answers, continued


def _ask_here(ask: Callable[[str], Any], workers: int, files: Sequence[str]) -> Asked:
    with Crew(ask, workers) as crew:
        yield from crew.answers(files)


def _ask_on_ray(ask: Callable[[str], Any], workers: int, files: Sequence[str]) -> Asked:
    from longtake.data.probing.on_ray import ask_on_ray

    return ask_on_ray(ask, workers, files)


_ASKERS: dict[Engine, Callable[..., Asked]] = {"local": _ask_here, "ray": _ask_on_ray}


def _complaint(
    source: Path, num_files: int, bad: Sequence[tuple[int, str, str]], bad_path: Path | None, folder: Path | str
) -> str:
    first = f"the first: {bad[0][1]}: {bad[0][2]}"
    if len(bad) == num_files:
        return (
            f"{source}: no clip is usable, all {num_files} are listed with the reason in {bad_path} ({first}); "
            f"relative paths start from {os.path.abspath(folder) if isinstance(folder, Path) else folder}, "
            "which --root changes"
        )
    return (
        f"{source}: {len(bad)} of {num_files} clips cannot be used, listed in {bad_path} ({first}); "
        "mend or leave out their rows, or probe without --strict"
    )
