"""From files to batches: clip table, probing, decoding, transforms, captions, and the samples of a slot.

A row of `ClipTable` is a clip; `probe_table` makes one from a list of files. `SlotDataset` turns a slot of the order
into a `Batch`, with its pixels, captions and random numbers, and `SlotLoader` does so in worker processes. `caption`
and `write_video` serve training and generation alike.
"""

from __future__ import annotations

from longtake.data.buffers import Delivery, DeviceFeed
from longtake.data.captions import caption
from longtake.data.config import DatasetConfig
from longtake.data.convert import make_shards
from longtake.data.dataset import SlotDataset
from longtake.data.draws import draw
from longtake.data.frames import target_fps, window
from longtake.data.loader import Fetched, SlotLoader
from longtake.data.memory import machine_bytes
from longtake.data.mix import MixedTable, open_clips
from longtake.data.numbers import read_numbers
from longtake.data.parcel import Parcel
from longtake.data.probe import ProbeResult, part_path, probe_table
from longtake.data.probe_file import ClipInfo, probe_file
from longtake.data.quarantine import append_quarantine, list_quarantine, read_quarantine
from longtake.data.remote import FileCache, default_cache_folder
from longtake.data.select import filter_table, merge_tables, split_table
from longtake.data.stats import column_rows, table_facts, table_stats
from longtake.data.stats_page import middle_frame, stats_page
from longtake.data.store import EncoderFacts, LatentStore
from longtake.data.stored import StoredDataset, text_hash
from longtake.data.table import ClipTable
from longtake.data.transforms import from_unit, resize_crop, to_unit
from longtake.data.video import ClipError, read_frames, read_image, write_image, write_video

__all__ = [
    "ClipError",
    "ClipInfo",
    "ClipTable",
    "DatasetConfig",
    "Delivery",
    "DeviceFeed",
    "EncoderFacts",
    "Fetched",
    "FileCache",
    "LatentStore",
    "MixedTable",
    "Parcel",
    "ProbeResult",
    "SlotDataset",
    "SlotLoader",
    "StoredDataset",
    "append_quarantine",
    "caption",
    "column_rows",
    "default_cache_folder",
    "draw",
    "filter_table",
    "from_unit",
    "list_quarantine",
    "machine_bytes",
    "make_shards",
    "merge_tables",
    "middle_frame",
    "open_clips",
    "part_path",
    "probe_file",
    "probe_table",
    "read_frames",
    "read_image",
    "read_numbers",
    "read_quarantine",
    "resize_crop",
    "split_table",
    "stats_page",
    "table_facts",
    "table_stats",
    "target_fps",
    "text_hash",
    "to_unit",
    "window",
    "write_image",
    "write_video",
]
