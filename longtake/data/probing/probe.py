"""Probing a whole table: many files, several processes or machines, and a journal that a restart continues from."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from longtake.contracts import UserError
from longtake.data.clips.file_cache import FileCache, default_cache_folder
from longtake.data.clips.locations import join_location, refuse_url
from longtake.data.clips.servers import check_protocols
from longtake.data.clips.video import ClipError
from longtake.data.probing.journal import Journal
from longtake.data.probing.listing import digest_of, list_clips
from longtake.data.probing.one_file import ClipInfo, probe_file
from longtake.data.probing.pool import ask_here, ask_on_ray
from longtake.data.tables.cells import UNEVEN
from longtake.data.tables.checks import check_path
from longtake.data.tables.ids import compute_clip_ids
from longtake.data.tables.rows import id_values, open_rows, our_names
from longtake.data.tables.shards import is_shards
from longtake.data.tables.table import base_folder, probe_warning
from longtake.data.tables.write_rows import check_target, moved_batch, write_table

MADE = ("num_frames", "height", "width", "aspect_ratio", "resolution", "fps", "duration", "codec", UNEVEN)
_NUMBERS = {
    "num_frames": np.int64,
    "height": np.int64,
    "width": np.int64,
    "fps": np.float64,
    "duration": np.float64,
    UNEVEN: np.int64,
}
_ANSWER = np.dtype([*_NUMBERS.items(), ("codec", np.int16)])  # a `ClipInfo`, its codec by number

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
    width), fps, duration (seconds), codec, uneven_times (1 where frames are not shown at equal steps); clip_id if not
    there. Rows keep their order. A file that cannot be used
    costs its row: it is listed with the reason in `<target stem>.bad.csv` beside the target. With `strict` any bad
    file is a `UserError` and only the list is written; so is a table of which no clip can be used. Relative paths that
    start elsewhere than in the target's folder are rewritten to start there; made clip ids are those of the paths as
    the target has them.

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
    source, target = Path(source), Path(target) if part is None else part_path(Path(target), *part)
    refuse_url(source)
    refuse_url(target)
    check_target(target, [source])
    columns, unreadable = read_source(source, target.suffix.lower() == ".csv", warn or (lambda note: None))
    if warn and (warning := probe_warning(_readable(columns, unreadable), source)):
        warn(warning)
    paths = columns["path"].to_pylist()
    folder = source if source.is_dir() else base_folder(source, root)
    rows = _rows_of_part(len(paths), *(part or (1, 1)))
    files = [join_location(folder, path) if path else "" for path in paths[rows]]
    check_protocols(files)
    ask = partial(_ask, decode_check=decode_check, cache=cache or FileCache(default_cache_folder()))
    journal_path = target.with_name(f"{target.name}.journal")
    with Journal(journal_path, _belonging(paths, folder, decode_check, part or (1, 1))) as journal:
        answers = Answers(len(files), {row - rows.start: reason for row, reason in unreadable.items()})
        continued = _answer_all(files, answers, journal, partial(_ASKERS[engine], ask, workers), progress)
        bad = tuple((rows.start + row, paths[rows.start + row], text) for row, text in sorted(answers.reasons.items()))
        bad_path = write_bad(target.with_name(f"{target.stem}.bad.csv"), bad)
        if bad and (strict or (part is None and len(bad) == len(files))):
            raise UserError(_complaint(source, len(files), bad, bad_path, folder))
        columns = moved_batch(columns, folder, target.parent)
        write_table(complete(columns, rows, answers, columns["path"].to_pylist()), target)
        journal.remove()
    return ProbeResult(target, len(files) - len(bad), len(bad), bad, bad_path, continued)


def part_path(target: Path, number: int, count: int) -> Path:
    """Where part `number` (from 1) of `count` is written: `clips.part-00003-of-00016.parquet`."""
    if not 1 <= number <= count:
        raise UserError(
            f"--part {number}/{count}: parts are counted from 1, the last one of {count} is {count}/{count}"
        )
    return target.with_name(f"{target.stem}.part-{number:05d}-of-{count:05d}{target.suffix}")


def read_source(
    source: Path, as_text: bool, warn: Callable[[str], None] = lambda note: None
) -> tuple[pa.Table, dict[int, str]]:
    """Return the table to probe, or the clips of a folder, without the columns that a probe makes; text is never null.

    `as_text`: a CSV's columns are all text. Also the rows with a cell or caption that cannot be read, each with the
    reason. `warn` gets a sentence for each kind of file of a folder that is not used. Raises `UserError`.
    """
    if is_shards(source):
        raise UserError(f"{source}: is a folder of shards; probe the table that they are made from")
    if source.is_dir():
        listing = list_clips(source)
        for note in listing.notes:
            warn(f"{source}: {note}")
        return listing.clips.select(["path", "text"]), listing.lost
    rows = open_rows(source, as_text)
    own = our_names(rows.names)
    check_path(own, source)
    wanted = [name for name in rows.names if name not in MADE]
    columns, unreadable = rows.whole(wanted)
    names = our_names(wanted)
    columns = columns.rename_columns(names)
    for place, name in enumerate(names):
        if name == "clip_id":
            columns = columns.set_column(place, name, pa.array(id_values(columns[name], source, 0, unreadable)))
        elif name in ("path", "text"):
            columns = columns.set_column(place, name, pc.fill_null(columns[name], ""))
    return columns, unreadable


def _readable(columns: pa.Table, unreadable: Mapping[int, str]) -> pa.Table:
    """Return the rows that can be read."""
    return columns.filter(pa.array([row not in unreadable for row in range(len(columns))])) if unreadable else columns


class Answers:
    """What is known of each row so far, as arrays: 50 bytes a row, however many rows there are."""

    def __init__(self, num_rows: int, unusable: Mapping[int, str]):
        """`num_rows`: rows that will be answered, all open at first; `unusable`: reasons by row, of any numbers."""
        self._found = np.zeros(num_rows, _ANSWER)
        self._codecs: list[str] = []
        self.reasons = {row: why for row, why in unusable.items() if 0 <= row < num_rows}  # they cannot be used

    def set(self, row: int, answer: ClipInfo | str) -> None:
        """Note a row's info, or the reason why it cannot be used."""
        if isinstance(answer, str):
            self.reasons[row] = answer
            return
        if answer.codec not in self._codecs:
            self._codecs.append(answer.codec)
        numbers = (getattr(answer, name) for name in _NUMBERS)
        self._found[row] = (*numbers, self._codecs.index(answer.codec))

    @property
    def kept(self) -> np.ndarray:
        """Which rows can be used: bool [N]."""
        return self._found["num_frames"] > 0

    def columns(self) -> dict[str, pa.Array]:
        """Return the made columns of the rows that can be used; NaN becomes empty."""
        found = self._found[self.kept]
        columns = {name: np.ascontiguousarray(found[name]) for name in _NUMBERS}
        columns["aspect_ratio"] = columns["height"] / columns["width"]
        columns["resolution"] = columns["height"] * columns["width"]
        columns["codec"] = np.array(self._codecs, object)[found["codec"]]
        kinds = {"codec": pa.string()}
        return {name: pa.array(columns[name], kinds.get(name), from_pandas=True) for name in MADE}


def complete(columns: pa.Table, rows: slice, answers: Answers, paths: Sequence[str]) -> pa.Table:
    """Return the rows that can be used: path, text, what was probed, clip_id, then the other columns in their order.

    `columns` and `paths` (as the output has them): of the whole table; `rows`: the stretch that `answers` are of.
    """
    kept = pa.array(answers.kept)
    given = columns.slice(rows.start, rows.stop - rows.start).filter(kept)
    out: dict[str, Any] = {"path": pa.array(paths[rows], pa.string()).filter(kept)}
    out["text"] = given["text"] if "text" in given.column_names else pa.array([""] * len(given), pa.string())
    out |= answers.columns()
    if "clip_id" not in given.column_names:  # made over all rows: bad files and parts do not change the others' ids
        out["clip_id"] = pa.array(compute_clip_ids(paths)[rows]).filter(kept)
    else:
        out["clip_id"] = given["clip_id"]
    return pa.table(out | {name: given[name] for name in given.column_names if name not in out})


def write_bad(path: Path, bad: Sequence[tuple[int, str, str]]) -> Path | None:
    """Write the list of bad rows, or remove the one of an earlier probe."""
    if not bad:
        path.unlink(missing_ok=True)
        return None
    rows, paths, reasons = zip(*bad, strict=True)
    write_table(pa.table({"row": pa.array(rows), "path": pa.array(paths), "reason": pa.array(reasons)}), path)
    return path


def _rows_of_part(num_rows: int, number: int, count: int) -> slice:
    return slice(num_rows * (number - 1) // count, num_rows * number // count)


def _belonging(paths: Sequence[str], folder: Path | str, decode_check: bool, part: tuple[int, int]) -> dict[str, Any]:
    """What a journal must have been begun for, to be gone on with."""
    root = folder if isinstance(folder, str) else str(folder.resolve())
    return {"table": digest_of(paths), "root": root, "decode_check": decode_check, "part": list(part)}


def _ask(location: str, decode_check: bool, cache: FileCache) -> list[Any] | str:
    """Return a file's info as a list that JSON can hold, or the reason why it cannot be used."""
    if not location:
        return "path is empty"
    try:
        with cache.local(location) as path:
            return list(astuple(probe_file(path, decode_check)))
    except ClipError as error:
        return str(error)


def _answer_all(
    files: Sequence[str],
    answers: Answers,
    journal: Journal,
    ask_each: Callable[[Sequence[str]], Asked],
    progress: Callable[[int, int], None] | None,
) -> int:
    """Completes the answers for all files, asking bad ones again; returns how many of them the journal had."""
    for row, answer in journal.read():
        if isinstance(answer, str) or row in answers.reasons:
            continue
        try:
            answers.set(row, ClipInfo(*answer))
        except (TypeError, ValueError, OverflowError, IndexError) as error:
            raise UserError(
                f"{journal.path}: {answer} of row {row} is not an answer about a clip; delete the file"
            ) from error
    missing = ~answers.kept
    continued = len(files) - int(missing.sum())
    missing[[*answers.reasons]] = False
    asked_rows = np.flatnonzero(missing)
    done = len(files) - len(asked_rows)
    if progress:
        progress(done, len(files))
    with closing(ask_each([files[row] for row in asked_rows])) as asked:  # so that an interrupt ends the processes
        for place, answer in asked:
            row = int(asked_rows[place])
            journal.add(row, answer)
            answers.set(row, answer if isinstance(answer, str) else ClipInfo(*answer))
            done += 1
            if progress:
                progress(done, len(files))
    return continued


_ASKERS: dict[Engine, Callable[..., Asked]] = {"local": ask_here, "ray": ask_on_ray}


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
