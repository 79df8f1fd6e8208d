"""Random captions from a clip table in memory-mapped shards: speed and memory, beside the table held in memory.

python benchmarks/table.py                10 million clips, about 4 GB in the temporary folder
python benchmarks/table.py --rows 1e6
python benchmarks/table.py --tiny         20,000 clips, to see that it runs

Every line is a process of its own. RSS is what it has mapped at the end of the line, pages shared with others counted
in full; PSS divides those among the processes that share them; private is what it has alone (USS). A rank imports
Longtake with PyTorch, opens the table and reads all its numbers; its workers are forked from it and read captions at
the same time. `cold` reads the first captions after the operating system has been told to forget the files.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
from machine import print_table, write_json

from longtake.data.tables.convert import make_shards
from longtake.data.tables.select import filter_table
from longtake.data.tables.table import ClipTable

TARGET_RATE, TARGET_RSS_MB, TARGET_GROWTH_MB = 50_000, 1000, 50
MARKS = 5  # blocks of captions, with the memory after each
WORKERS = 2
_SENTENCE = "a the red blue cat dog walks runs over under grass river slowly camera pans left while sun sets behind"


def main() -> None:
    """Makes a table, converts it, reads from it in several ways, and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=float, default=1e7, help="clips")
    parser.add_argument("--captions", type=float, default=1e6, help="captions that a process reads")
    parser.add_argument("--tiny", action="store_true", help="20,000 clips, 20,000 captions")
    parser.add_argument("--folder", type=Path, help="where the table is made; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--one", nargs=3, metavar=("WHAT", "FILE", "CAPTIONS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        what, file, captions = arguments.one
        print(json.dumps(MEASURES[what](Path(file), int(captions))))
        return
    rows, captions = (20_000, 20_000) if arguments.tiny else (int(arguments.rows), int(arguments.captions))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        figures = _measure_all(Path(folder), rows, captions)
    head = ("step", "seconds", "a second", "RSS MB", "PSS MB", "private MB", "peak RSS MB")
    print_table(head, [_row(step, figure) for step, figure in figures["steps"].items()])
    for name, (found, target, holds) in _verdicts(figures).items():
        print(f"{name}: {found} ({target}){'' if holds else ' MISSED'}")
    write_json(arguments.json, "table", {"tiny": arguments.tiny, **figures})


def _measure_all(folder: Path, rows: int, captions: int) -> dict[str, Any]:
    steps = {}
    _make_table(folder / "clips.parquet", rows)
    _write_csv(folder / "clips.parquet", folder / "clips.csv")
    for suffix in (".parquet", ".csv"):
        source = folder / f"clips{suffix}"
        steps[f"convert {suffix[1:]}"] = _in_process("convert", source, captions)
    steps["filter parquet"] = _in_process("filter", folder / "clips.parquet", captions)
    shards = folder / "clips.shards"
    size = sum(file.stat().st_size for file in shards.iterdir())
    for what in ("rank", "workers"):
        steps[what] = _in_process(what, shards, captions)
    steps["in memory"] = _in_process("rank", folder / "clips.parquet", captions)
    steps["cold"] = _in_process("cold", shards, captions)
    sizes = {suffix[1:]: (folder / f"clips{suffix}").stat().st_size for suffix in (".parquet", ".csv")}
    return {"rows": rows, "captions": captions, "shard_bytes": size, "table_bytes": sizes, "steps": steps}


def convert(source: Path, captions: int) -> dict[str, Any]:
    """Converts a table; the peak is of the whole process."""
    begun = time.perf_counter()
    done = make_shards(source, source.with_suffix(".shards"))
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "rate": done.rows / seconds, **memory()}


def filter_rows(source: Path, captions: int) -> dict[str, Any]:
    """Writes the rows that meet a condition, about half of them."""
    begun = time.perf_counter()
    done = filter_table(source, source.with_name("kept.parquet"), "fps > 8 AND score_aes > 5.5")
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "rate": done.rows / seconds, **memory()}


def rank(source: Path, captions: int) -> dict[str, Any]:
    """Opens a table, reads all numbers, then captions at random, with the memory after every block of them."""
    import torch  # noqa: F401 - a rank has it

    begun = time.perf_counter()
    table = ClipTable.open(source)
    opened = time.perf_counter() - begun
    for name in ("num_frames", "height", "width", "fps", "clip_ids", "motion_score"):
        getattr(table, name).max()
    after_numbers = memory()
    marks, rates = [], []
    for block in range(MARKS):
        rates.append(_read(table, captions // MARKS, block))
        marks.append(memory()["rss_mb"])
    marked = {"rss_marks_mb": marks, "rates": rates, "after_numbers": after_numbers}
    return {"seconds": captions / MARKS * sum(1 / rate for rate in rates), "rate": min(rates), "opened": opened} | (
        marked | memory()
    )


def cold(source: Path, captions: int) -> dict[str, Any]:
    """Reads captions after the files have left the operating system's cache."""
    table = ClipTable.open(source)
    for file in source.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    count = min(captions, 20_000)
    rate = _read(table, count, 99)
    return {"seconds": count / rate, "rate": rate, **memory()}


def workers(source: Path, captions: int) -> dict[str, Any]:
    """Two forked workers of a rank reading at the same time; the figures are of the slower and the larger one."""
    import torch  # noqa: F401

    table = ClipTable.open(source)
    table.num_frames.max()
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(WORKERS), context.SimpleQueue()

    def work(number: int) -> None:
        rate = _read(table, captions // MARKS, 7 + number)
        barrier.wait()
        queue.put({"rate": rate, **memory()})
        barrier.wait()

    crew = [context.Process(target=work, args=(number,)) for number in range(WORKERS)]
    for worker in crew:
        worker.start()
    found = [queue.get() for _ in crew]
    for worker in crew:
        worker.join()
    worst = {name: max(each[name] for each in found) for name in found[0]}
    rate = min(each["rate"] for each in found)
    return worst | {"rate": rate, "seconds": captions // MARKS / rate, "workers": found}


MEASURES = {"convert": convert, "filter": filter_rows, "rank": rank, "cold": cold, "workers": workers}


def _read(table: ClipTable, count: int, seed: int) -> float:
    """Reads captions of random rows; returns how many a second."""
    rows = np.random.default_rng(seed).integers(0, len(table), count).tolist()
    begun = time.perf_counter()
    for row in rows:
        table.caption(row)
    return count / (time.perf_counter() - begun)


def memory() -> dict[str, float]:
    """The memory of this process now, and its highest RSS so far."""
    found = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        found[name] = int(value.split()[0]) * 1024 / 1e6
    private = found["Private_Clean"] + found["Private_Dirty"]
    status = Path("/proc/self/status").read_text()  # ru_maxrss would count the program that started this one
    peak = int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e6
    return {"rss_mb": found["Rss"], "pss_mb": found["Pss"], "private_mb": private, "peak_mb": peak}


def _make_table(target: Path, rows: int) -> None:
    """Writes made-up clips, some 100,000 at a time: 8 to 40 words of caption each."""
    random, size = np.random.default_rng(0), 1 << 17
    texts = [" ".join(random.choice(_SENTENCE.split(), random.integers(8, 40))) for _ in range(5000)]
    writer = None
    for start in range(0, rows, size):
        count = min(size, rows - start)
        height, width = random.integers(240, 2160, count), random.integers(240, 3840, count)
        draws = random.integers(0, 5000, count)
        batch = pa.record_batch(
            {
                "path": [f"videos/{row // 1000:06d}/clip_{row:09d}.mp4" for row in range(start, start + count)],
                "text": [f"{texts[draw]}, take {start + row}" for row, draw in enumerate(draws)],
                "num_frames": random.integers(16, 600, count),
                "height": height,
                "width": width,
                "fps": random.choice([23.976, 24.0, 25.0, 29.97, 30.0, 60.0], count),
                "score_aes": random.uniform(3, 8, count).astype(np.float32),
                "score_vmafmotion": random.uniform(0, 20, count),
            }
        )
        if writer is None:
            writer = pyarrow.parquet.ParquetWriter(str(target), batch.schema)
        writer.write_batch(batch)
    assert writer is not None
    writer.close()


def _write_csv(source: Path, target: Path) -> None:
    """Writes the same table as CSV."""
    with pyarrow.parquet.ParquetFile(source) as file, pyarrow.csv.CSVWriter(str(target), file.schema_arrow) as writer:
        for batch in file.iter_batches():
            writer.write_batch(batch)


def _in_process(what: str, file: Path, captions: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", what, str(file), str(captions)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _row(step: str, figure: dict[str, Any]) -> list[str]:
    cells = [f"{figure[name]:,.0f}" for name in ("rate", "rss_mb", "pss_mb", "private_mb", "peak_mb")]
    return [step, f"{figure['seconds']:.1f}", *cells]


def _verdicts(figures: dict[str, Any]) -> dict[str, tuple[str, str, bool]]:
    """Each claim: what was found, the target, and whether it holds."""
    steps = figures["steps"]
    found = steps["rank"]
    growth = max(found["rss_marks_mb"][1:]) - found["rss_marks_mb"][0]
    rate = min(found["rate"], steps["workers"]["rate"])
    largest = max(found["peak_mb"], steps["workers"]["peak_mb"])
    return {
        "captions a second": (
            f"{rate:,.0f}",
            f"target {TARGET_RATE:,}, files in the system's cache",
            rate >= TARGET_RATE,
        ),
        "RSS of a rank or worker, at most": (
            f"{largest:,.0f} MB",
            f"target {TARGET_RSS_MB:,}",
            largest <= TARGET_RSS_MB,
        ),
        "growth of RSS over the captions": (
            f"{growth:,.0f} MB",
            f"target {TARGET_GROWTH_MB}",
            growth <= TARGET_GROWTH_MB,
        ),
    }


if __name__ == "__main__":
    main()
