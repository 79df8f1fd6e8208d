"""Small clip files for the tests, written and read with plain PyAV, independently of the code under test."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import islice
from pathlib import Path

import av
import numpy as np

from longtake.contracts import Bucket, Draw, LatentShape, Slot
from longtake.data.config import DatasetConfig
from longtake.data.loading.dataset import SlotDataset
from longtake.data.tables.table import ClipTable
from longtake.random import Purpose

AV1 = Path(__file__).with_name("av1.mp4")  # `encode(AV1, "libsvtav1", size=(64, 64), options={"g": "12"})` of once
LATENT = LatentShape(channels=4, temporal=4, spatial=8, causal=True)


def noise_frames(count: int, height: int = 48, width: int = 64, seed: int = 0) -> np.ndarray:
    """Frames that no encoder makes equal: coarse random blocks over a slope, uint8 [T, H, W, 3]."""
    blocks = np.random.default_rng(seed).integers(0, 255, (count, -(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    return np.ascontiguousarray(blocks.repeat(8, axis=1).repeat(8, axis=2)[:, :height, :width])


def encode(
    path: Path,
    codec: str = "libx264",
    count: int = 40,
    size: tuple[int, int] = (48, 64),
    fps: Fraction | int = 24,
    pix_fmt: str = "yuv420p",
    options: dict[str, str] | None = None,
    times: Sequence[int] | None = None,
    rotation: int | None = None,
) -> Path:
    """Writes a video; `times` are timestamps in 1/600 s for unevenly spaced frames.

    The codec "av1" copies the packets of `AV1`, whose frames are 64x64: where root runs SVT-AV1, it leaves the calling
    thread with real-time priority, and all that the process starts later; on few cores others then stand still.
    """
    if codec == "av1":
        return _copy_packets(AV1, path, count)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps, options=options or {})
        stream.height, stream.width = size
        stream.pix_fmt = pix_fmt
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 600)
        if rotation is not None:
            stream.set_display_rotation(rotation)
        for number, pixels in enumerate(noise_frames(count, *size)):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[number], Fraction(1, 600)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def _copy_packets(source: Path, target: Path, count: int) -> Path:
    """The first packets of a video in a container of another kind; `count` ends a closed group of pictures."""
    with av.open(str(source)) as old, av.open(str(target), "w") as new:
        stream = new.add_stream_from_template(old.streams.video[0], opaque=True)
        for packet in islice((packet for packet in old.demux(video=0) if packet.size), count):
            packet.stream = stream
            new.mux(packet)
    return target


def cut_without_decoding(source: Path, target: Path, key: int, hidden: float = 0) -> Path:
    """Copies the packets from the `key`-th key frame on, as a lossless cutter does; an edit list hides the first
    `hidden` seconds."""
    options = {"avoid_negative_ts": "disabled"} if hidden else {}
    with av.open(str(source)) as old, av.open(str(target), "w", options=options) as new:
        stream = new.add_stream_from_template(old.streams.video[0])
        keys, start = 0, None
        for packet in old.demux(old.streams.video[0]):
            keys += packet.is_keyframe and packet.size > 0
            if keys > key and packet.size:
                if hidden:
                    start = packet.pts if start is None else start
                    shift = start + round(hidden / packet.time_base)
                    packet.pts, packet.dts = packet.pts - shift, packet.dts - shift
                packet.stream = stream
                new.mux(packet)
    return target


def decode_all(path: Path) -> np.ndarray:
    """Every frame by the plainest loop there is: uint8 [T, H, W, 3]."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


# What training with a random posterior and known frames draws.
DRAWS = {
    "noise": Draw(Purpose.NOISE, "normal", "latent"),
    "timestep": Draw(Purpose.TIMESTEP, "normal"),
    "dropout": Draw(Purpose.DROPOUT, "uniform", (2,)),
    "mask": Draw(Purpose.MASK, "uniform", of_view=True, is_choice=True),
    "posterior": Draw(Purpose.POSTERIOR, "normal", "latent"),
}


def make_slot(
    table: ClipTable,
    rows: Sequence[int],
    shape: tuple[int, int, int] = (5, 16, 16),
    weights: Sequence[float] | None = None,
    pass_index: int = 0,
) -> Slot:
    bucket = Bucket("16px", shape[0], "1:1", shape, len(rows))
    at = np.asarray(rows, dtype=np.int64)
    kept = np.ones(len(rows), np.float32) if weights is None else np.asarray(weights, dtype=np.float32)
    ids = table.clip_ids[at]
    return Slot(bucket, pass_index, at, ids, ids ^ np.uint64(1), kept)


def make_dataset(table: ClipTable, **settings: object) -> SlotDataset:
    """`settings` are keys of the dataset section or arguments of `SlotDataset`."""
    ours = {name: settings.pop(name) for name in ("draws", "law", "quarantined", "rules", "stage") if name in settings}
    config = DatasetConfig.model_validate({"data_path": str(table.source)} | settings)
    return SlotDataset(table, config, **{"seed": 7, "stage": 0, "latent": LATENT, "draws": DRAWS} | ours)
