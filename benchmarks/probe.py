"""Probing, measured: against decoding whole files, and against opening them with FFmpeg.

python benchmarks/probe.py                     300-frame 720p clips, and 2,000 small files
python benchmarks/probe.py --tiny              a few small ones, to see that it runs
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import av
import numpy as np
from machine import print_table, write_json

from longtake.data.probing.one_file import ClipInfo, probe_file
from longtake.data.probing.probe import probe_table

TARGET_LARGE = 130.0  # times as fast as decoding everything
TARGET_SMALL = 0.8  # of the speed of a loop of av.open
Numbers = tuple[int, int, int, float]  # frames, height, width, fps


def main() -> None:
    """Makes the files, measures and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="2 clips of 24 frames, 40 small files, one repeat")
    parser.add_argument("--repeats", type=int, help="measurements of each way, in turn; the best counts")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    num_large, num_frames, size, num_small = (2, 24, (96, 160), 40) if arguments.tiny else (4, 300, (720, 1280), 2000)
    repeats = arguments.repeats or (1 if arguments.tiny else 5)
    figures, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        for codec in ("libx264", "libx265"):
            large = make_files(Path(folder) / codec, num_large, num_frames, size, codec)
            figures.append(measure(f"{num_frames} frames {size[0]}p {codec[3:]}", large, repeats, decode=True))
        small = make_files(Path(folder) / "small", 20, 48, (256, 256), "libx264")
        small = [_link(path, number) for number in range(num_small // 20) for path in small]
        figures.append(measure(f"{len(small)} small files", small, repeats, decode=False))
        figures.append(measure_table(small, repeats))
    for figure in figures:
        for way, seconds in figure["milliseconds"].items():
            decode, bare = figure["milliseconds"].get("decode everything"), figure["milliseconds"]["bare av.open"]
            times = f"{decode / seconds:,.0f}x" if decode else ""
            rows.append((figure["files"], way, f"{seconds:.3f}", times, f"{bare / seconds:.0%}", figure["same"]))
    print_table(("files", "way", "ms a file", "of decoding", "of av.open", "same numbers"), rows)
    print(f"target: probe >= {TARGET_LARGE:.0f}x decoding (aim 500x), >= {TARGET_SMALL:.0%} of av.open on small files")
    write_json(arguments.json, "probe", {"tiny": arguments.tiny, "repeats": repeats, "measurements": figures})


def measure(name: str, files: Sequence[Path], repeats: int, decode: bool) -> dict[str, object]:
    """Milliseconds a file of each way, the best of several in turn, one process, files in the page cache."""
    ways: dict[str, Callable[[Path], object]] = {"bare av.open": open_bare, "probe": probe_numbers}
    ways |= {"decode everything": decode_everything} if decode else {}
    found: dict[str, list[object]] = {}
    best: dict[str, float] = {}
    for repeat in range(repeats):
        for way, ask in ways.items():
            if way == "decode everything" and repeat >= 2:  # minutes; its time hardly varies
                continue
            begun = time.perf_counter()
            found[way] = [ask(path) for path in files]
            milliseconds = (time.perf_counter() - begun) * 1e3 / len(files)
            best[way] = min(best.get(way, milliseconds), milliseconds)
    same = found["probe"] == found["decode everything"] if decode else None
    return {"files": name, "milliseconds": best, "same": same}


def measure_table(files: Sequence[Path], repeats: int) -> dict[str, object]:
    """The same for a whole table, with its journal and the writing of a Parquet file."""
    best = {"bare av.open": float("inf"), "probe_table": float("inf")}
    table = files[0].parent / "table.csv"
    table.write_text("path\n" + "".join(f"{path}\n" for path in files), encoding="utf-8")
    for _ in range(repeats):
        begun = time.perf_counter()
        for path in files:
            open_bare(path)
        opened = time.perf_counter()
        result = probe_table(table, table.with_name("out.parquet"))
        ended = time.perf_counter()
        assert result.kept == len(files)
        best["bare av.open"] = min(best["bare av.open"], (opened - begun) * 1e3 / len(files))
        best["probe_table"] = min(best["probe_table"], (ended - opened) * 1e3 / len(files))
    return {"files": f"table of {len(files)} small files", "milliseconds": best, "same": None}


def open_bare(path: Path) -> None:
    """The plainest use of PyAV there is."""
    with av.open(str(path)):
        pass


def probe_numbers(path: Path) -> Numbers:
    """What is measured."""
    info: ClipInfo = probe_file(path)
    return info.num_frames, info.height, info.width, info.fps


def decode_everything(path: Path) -> Numbers:
    """The reference's way: every frame decoded, by one thread; it makes arrays of them too, which is left out here."""
    count, height, width = 0, 0, 0
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        for frame in container.decode(stream):
            count, height, width = count + 1, frame.height, frame.width
        return count, height, width, round(float(stream.average_rate), 3)


def make_files(folder: Path, count: int, num_frames: int, size: tuple[int, int], codec: str) -> list[Path]:
    """Clips of a slowly panned pattern, as much detail as filmed material has at x264's usual quality."""
    folder.mkdir(parents=True)
    made = []
    for number in range(count):
        path = folder / f"{number}.mp4"
        generator = np.random.default_rng(number)
        pattern = generator.integers(0, 255, (size[0] // 8 + 48, size[1] // 8 + 160, 3), np.uint8)
        pattern = pattern.repeat(8, axis=0).repeat(8, axis=1)
        with av.open(str(path), "w") as container:
            options = {"preset": "veryfast"} | ({"x265-params": "log-level=none"} if codec == "libx265" else {})
            stream = container.add_stream(codec, rate=24, options=options)
            stream.height, stream.width = size
            stream.pix_fmt = "yuv420p"
            for at in range(num_frames):
                pixels = np.ascontiguousarray(pattern[at : at + size[0], 4 * at : 4 * at + size[1]])
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            container.mux(stream.encode())
        made.append(path)
    return made


def _link(path: Path, number: int) -> Path:
    other = path.with_name(f"{number}_{path.name}")
    os.link(path, other)
    return other


if __name__ == "__main__":
    main()
