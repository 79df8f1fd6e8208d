"""Fetching a window of a clip: cost against the file's length and the frames used, and memory over many fetches.

python benchmarks/fetch.py                   files of 10 s to 10 min, 20,000 fetches; some minutes
python benchmarks/fetch.py --tiny            short files, few fetches, to see that it runs

The files are 720p H.264 at 24 frames a second with a key frame every 250 frames, as x264 makes them by default. One
group of pictures is encoded and its packets repeated, so a long file costs no more to make than a short one. Windows
lie in the middle of the file at four distances from the key frame, the same for every length. Beside ours: decoding
from the start until the window's last frame, and decoding the whole file (up to 2 min); both are spared the conversion
of frames that are not wanted. Times are processor time of one thread, so a busy machine changes them little; repeats
are interleaved and the fastest counts.

Memory is that of another process, which makes batches as a loader's worker does, of small files of several kinds,
damaged ones and some of the 720p clip.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
import torch.nn.functional as F
from av.video.reformatter import VideoReformatter
from machine import print_table, write_json
from PIL import Image

from longtake.contracts import Bucket, LatentShape, Slot
from longtake.data.clips.transforms import cover_size, fit_frame
from longtake.data.clips.video import decode_frames, write_image, write_video
from longtake.data.config import DatasetConfig
from longtake.data.loading.dataset import SlotDataset
from longtake.data.tables.table import ClipTable

FPS, GROUP = 24, 250
SIZE, TINY_SIZE = (720, 1280), (360, 640)
TARGET = (256, 448)
OFFSETS = (0, 60, 120, 180)  # of the window's first frame from a key frame
MOST_GROWTH_MB = 50
MOST_RATIO = 1.5  # the longest file's fetch beside the shortest one's


def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fetches", type=int, default=20_000, help="fetches of the memory measurement")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="10 s and 1 min at half the size, 400 fetches, one repeat")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--memory", nargs=2, metavar=("FOLDER", "FETCHES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory:
        print(json.dumps(memory(Path(arguments.memory[0]), int(arguments.memory[1]))))
        return
    lengths = (10, 60) if arguments.tiny else (10, 60, 120, 300, 600)
    fetches, repeats = (400, 1) if arguments.tiny else (arguments.fetches, arguments.repeats)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        group = encode_group(folder / "group.mp4", *(TINY_SIZE if arguments.tiny else SIZE))
        files = {
            (kind, seconds): repeat_group(group, folder / f"{seconds}.{kind}", max(1, round(seconds * FPS / GROUP)))
            for kind in ("mp4", "mkv")
            for seconds in lengths
        }
        command = [sys.executable, __file__, "--memory", str(folder), str(fetches)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        by_length = measure_lengths(files, repeats)
        by_frames = measure_frames(files["mp4", lengths[-1]], (1, 17, 65) if arguments.tiny else (1, 17, 33, 65, 129))
        reducing = measure_reducing(files["mp4", 10])
        said, _ = worker.communicate()
        marks = json.loads(said)
    report(by_length, by_frames, reducing, marks)
    figures = {"lengths": by_length, "frames": by_frames, "reducing_ms_a_frame": reducing, "memory": marks}
    write_json(arguments.json, "fetch", {"tiny": arguments.tiny, **figures})


def encode_group(path: Path, height: int, width: int) -> Path:
    """One closed group of pictures of a drifting pattern under film grain, with B-frames."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (height // 12 + 8, width // 12 + 8, 3), dtype=np.uint8)
    picture = np.asarray(Image.fromarray(coarse).resize((width + 2 * GROUP, height + GROUP), Image.Resampling.BICUBIC))
    grain = rng.integers(0, 24, (height + 64, width + 64, 3), dtype=np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"preset": "veryfast", "g": str(GROUP), "crf": "21"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(GROUP):
            pixels = picture[number : number + height, 2 * number : 2 * number + width] // 2
            top, left = rng.integers(0, 64, 2)
            pixels += grain[top : top + height, left : left + width]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return path


def repeat_group(group: Path, path: Path, times: int) -> Path:
    """A file of `times` groups one after the other, copied without encoding."""
    with av.open(str(group)) as source, av.open(str(path), "w") as target:
        template = source.streams.video[0]
        packets = [
            (bytes(packet), packet.pts, packet.dts, packet.is_keyframe)
            for packet in source.demux(template)
            if packet.size
        ]
        step = round(1 / (FPS * template.time_base))
        stream = target.add_stream_from_template(template)
        for number in range(times):
            for data, pts, dts, is_key in packets:
                packet = av.Packet(data)
                packet.pts, packet.dts = pts + number * GROUP * step, dts + number * GROUP * step
                packet.time_base, packet.stream, packet.is_keyframe = template.time_base, stream, is_key
                target.mux(packet)
    return path


def fetch(path: Path, numbers: np.ndarray) -> np.ndarray:
    """The frames as training gets them: uint8 [3, T, height, width]."""
    out = np.empty((3, len(numbers), *TARGET), np.uint8)
    for places, pixels in decode_frames(path, numbers):
        out[:, places] = fit_frame(pixels, TARGET)[:, None]
    return out


def fetch_from_start(path: Path, numbers: np.ndarray, whole: bool = False) -> np.ndarray:
    """The same, decoding from the first frame to the last one wanted, or to the file's end."""
    out, places = np.empty((3, len(numbers), *TARGET), np.uint8), {n: i for i, n in enumerate(numbers.tolist())}
    reformatter = VideoReformatter()
    with av.open(str(path)) as container:
        container.streams.video[0].codec_context.thread_count = 1
        for number, frame in enumerate(container.decode(video=0)):
            if number in places:
                rgb = reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
                out[:, places[number]] = fit_frame(rgb, TARGET)
            if number >= numbers[-1] and not whole:
                break
    return out


def fetch_whole(path: Path, numbers: np.ndarray) -> np.ndarray:
    """The same, decoding to the file's end."""
    return fetch_from_start(path, numbers, whole=True)


def measure_lengths(files: dict[tuple[str, int], Path], repeats: int) -> list[dict[str, Any]]:
    """Milliseconds of a fetch of 33 frames from the middle of each file, in three ways."""
    best: dict[tuple, list[float]] = {}
    for _ in range(repeats):
        for (kind, seconds), path in files.items():
            for offset in OFFSETS:
                best.setdefault((kind, seconds, offset), []).append(_seconds(fetch, path, window(seconds, offset, 33)))
    lines, beside = [], {}
    for (kind, seconds), path in files.items():
        numbers = window(seconds, 90, 33)  # the mean of the offsets
        if kind == "mp4":  # the packets of the others are the same
            beside[seconds] = {
                "from_start_ms": _seconds(fetch_from_start, path, numbers) * 1e3,
                "whole_ms": _seconds(fetch_whole, path, numbers) * 1e3 if seconds <= 120 else None,
            }
        mean = float(np.mean([min(best[kind, seconds, offset]) for offset in OFFSETS]))
        lines.append(
            {"kind": kind, "seconds": seconds, "megabytes": path.stat().st_size / 1e6, "fetch_ms": mean * 1e3}
            | beside[seconds]
        )
    return lines


def measure_frames(path: Path, counts: tuple[int, ...]) -> list[dict[str, Any]]:
    """Milliseconds of a fetch against the frames used, from a key frame on."""
    seconds = int(path.stem)
    best = {count: float("inf") for count in counts}
    for _ in range(3):
        for count in counts:
            best[count] = min(best[count], _seconds(fetch, path, window(seconds, 0, count)))
    return [{"frames": count, "fetch_ms": found * 1e3} for count, found in best.items()]


def measure_reducing(path: Path, count: int = 20) -> dict[str, float]:
    """Milliseconds a decoded frame takes to become the bucket's size, in three ways."""
    with av.open(str(path)) as container:
        frames = [frame for _, frame in zip(range(count), container.decode(video=0), strict=False)]
    scaler, converter = VideoReformatter(), VideoReformatter()
    height, width = cover_size((frames[0].height, frames[0].width), TARGET)

    def bytes_of(frame: av.VideoFrame) -> np.ndarray:
        return converter.reformat(frame, format="rgb24", threads=1).to_ndarray()

    def by_swscale(frame: av.VideoFrame) -> object:
        settings = {"width": width, "height": height, "format": "rgb24", "interpolation": "BICUBIC"}
        return scaler.reformat(frame, threads=1, **settings).to_ndarray()

    def in_fp32(frame: av.VideoFrame) -> object:
        pixels = torch.from_numpy(bytes_of(frame)).permute(2, 0, 1)[None].float()
        return F.interpolate(pixels, size=(height, width), mode="bicubic", antialias=True)

    ways: dict[str, Callable[[av.VideoFrame], object]] = {
        "ours": lambda frame: fit_frame(bytes_of(frame), TARGET),
        "swscale_bicubic": by_swscale,
        "fp32_bicubic": in_fp32,
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(3):
        for name, way in ways.items():
            started = time.process_time()
            for frame in frames:
                way(frame)
            best[name] = min(best[name], (time.process_time() - started) / count * 1e3)
    return best


def window(seconds: int, offset: int, count: int) -> np.ndarray:
    """`count` frame numbers, `offset` behind the key frame in the middle of a file."""
    groups = max(1, round(seconds * FPS / GROUP))
    first = groups // 2 * GROUP + offset
    return np.arange(first, first + count)


def memory(folder: Path, fetches: int) -> dict[str, Any]:
    """Resident memory of this process at marks of `fetches` batches of one sample."""
    table = _mixed_clips(folder)
    config = DatasetConfig.model_validate({"data_path": str(table.source)})
    latent = LatentShape(channels=4, temporal=4, spatial=8, causal=True)
    data = SlotDataset(table, config, seed=0, stage=0, latent=latent)
    rng = np.random.default_rng(0)
    every = max(1, fetches // 20)
    marks, faults, started = [], 0, time.perf_counter()
    for number in range(fetches):
        row = 0 if number % 400 == 0 else int(rng.integers(1, len(table)))
        frames = 1 if table.num_frames[row] == 1 else 9
        shape = (frames, 256, 448) if row == 0 else (frames, 64, 64)
        at = np.array([row])
        ids = table.clip_ids[at] + np.uint64(number)
        batch = data[Slot(Bucket("", frames, "", shape, 1), 0, at, ids, ids, np.ones(1, np.float32))]
        faults += len(batch.faults)
        if (number + 1) % every == 0:
            marks.append((number + 1, _resident_mb()))
    settled = next(megabytes for count, megabytes in marks if count * 10 >= fetches)
    return {
        "fetches": fetches,
        "faults": faults,
        "fetches_a_second": fetches / (time.perf_counter() - started),
        "marks": marks,
        "growth_mb": max(megabytes for count, megabytes in marks if count * 10 >= fetches) - settled,
    }


def _mixed_clips(folder: Path) -> ClipTable:
    """Row 0 is the 720p clip; then small videos of several kinds, stills, a damaged and a missing file."""
    rows = [f"10.mp4,a long one,{GROUP},720,1280,24"]
    for number in range(12):
        frames = np.random.default_rng(number).integers(0, 256, (60, 12, 16, 3), dtype=np.uint8)
        frames = frames.repeat(8, axis=1).repeat(8, axis=2)
        name = f"small{number}.{('mp4', 'mkv', 'mov')[number % 3]}"
        write_video(folder / name, frames, 24, crf=30)
        rows.append(f"{name},small,60,96,128,24")
    for suffix in ("png", "jpg", "webp"):
        write_image(folder / f"still.{suffix}", frames[0])
        rows.append(f"still.{suffix},still,1,96,128,")
    whole = (folder / "small0.mp4").read_bytes()
    (folder / "damaged.mp4").write_bytes(whole[: len(whole) // 2])
    rows += ["damaged.mp4,damaged,60,96,128,24", "missing.mp4,missing,60,96,128,24"]
    table = folder / "clips.csv"
    table.write_text("path,text,num_frames,height,width,fps\n" + "\n".join(rows) + "\n")
    return ClipTable.open(table)


def _resident_mb() -> float:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _seconds(function: Callable[[Path, np.ndarray], object], path: Path, numbers: np.ndarray) -> float:
    started = time.process_time()
    function(path, numbers)
    return time.process_time() - started


def report(
    by_length: list[dict[str, Any]], by_frames: list[dict[str, Any]], reducing: dict[str, float], marks: dict[str, Any]
) -> None:
    """Prints the table, and what misses its target."""
    rows = []
    for line in by_length:
        what = f"33 frames, {line['seconds']} s {line['kind']} of {line['megabytes']:.0f} MB"
        whole = f", whole file {line['whole_ms']:,.0f} ms" if line["whole_ms"] else ""
        beside = f"from the start {line['from_start_ms']:,.0f} ms{whole}"
        rows.append((what, f"{line['fetch_ms']:.0f} ms", beside))
    for line in by_frames:
        frames = line["frames"]
        beside = f"{line['fetch_ms'] / frames:.1f} ms a frame"
        rows.append((f"{frames} frames, longest file", f"{line['fetch_ms']:.0f} ms", beside))
    beside = f"swscale {reducing['swscale_bicubic']:.2f} ms, in fp32 {reducing['fp32_bicubic']:.2f} ms"
    rows.append(("a 720p frame to RGB at 256p", f"{reducing['ours']:.2f} ms", beside))
    for count, megabytes in marks["marks"][1::2]:
        rows.append((f"memory after {count:,} fetches", f"{megabytes:.0f} MB", ""))
    rows.append(("growth after the first tenth", f"{marks['growth_mb']:.1f} MB", f"target {MOST_GROWTH_MB} MB"))
    print_table(("what", "found", "beside it"), rows)
    for kind in ("mp4", "mkv"):
        times = [line["fetch_ms"] for line in by_length if line["kind"] == kind]
        ratio = times[-1] / times[0]
        missed = "  missed" if ratio > MOST_RATIO else ""
        print(f"{kind}: the longest file's fetch takes {ratio:.2f} times the shortest's (target {MOST_RATIO}){missed}")
    if marks["growth_mb"] > MOST_GROWTH_MB:
        print("missed: memory grows")


if __name__ == "__main__":
    main()
