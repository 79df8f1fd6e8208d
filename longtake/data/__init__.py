"""From files to batches: clip table, probing, decoding, transforms, captions, and the samples of a slot.

A row of `ClipTable` is a clip; `probe_table` makes one from a list of files. `SlotDataset` turns a slot of the order
into a `Batch`, with its pixels, captions and random numbers, and `SlotLoader` does so in worker processes. `caption`
and `write_video` serve training and generation alike.
"""

from __future__ import annotations

from longtake.data.captions import caption
from longtake.data.config import DatasetConfig
from longtake.data.dataset import SlotDataset
from longtake.data.draws import draw
from longtake.data.frames import target_fps, window
from longtake.data.loader import SlotLoader
from longtake.data.mix import MixedTable, open_clips
from longtake.data.probe import ProbeResult, part_path, probe_table
from longtake.data.probe_file import ClipInfo, probe_file
from longtake.data.quarantine import append_quarantine, read_quarantine
from longtake.data.table import ClipTable
from longtake.data.transforms import from_unit, resize_crop, to_unit
from longtake.data.video import ClipError, read_frames, read_image, write_image, write_video

__all__ = [
    "ClipError",
    "ClipInfo",
    "ClipTable",
    "DatasetConfig",
    "MixedTable",
    "ProbeResult",
    "SlotDataset",
    "SlotLoader",
    "append_quarantine",
    "caption",
    "draw",
    "from_unit",
    "open_clips",
    "part_path",
    "probe_file",
    "probe_table",
    "read_frames",
    "read_image",
    "read_quarantine",
    "resize_crop",
    "target_fps",
    "to_unit",
    "window",
    "write_image",
    "write_video",
]
