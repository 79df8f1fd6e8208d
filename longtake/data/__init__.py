"""From files to batches: clip table, probing, decoding, transforms, captions, and the samples of a slot.

A row of `ClipTable` is a clip; `probe_table` makes one from a list of files. `SlotDataset` turns a slot of the order
into a `Batch`, with its pixels, captions and random numbers, and `SlotLoader` does so in worker processes. `caption`
and `write_video` serve training and generation alike.
"""

from __future__ import annotations

from longtake.data.clips.captions import caption
from longtake.data.clips.frames import target_fps, window
from longtake.data.clips.remote import FileCache, default_cache_folder
from longtake.data.clips.transforms import from_unit, resize_crop, to_unit
from longtake.data.clips.video import ClipError, read_frames, read_image, write_image, write_video
from longtake.data.config import DatasetConfig
from longtake.data.latents.dataset import StoredDataset, text_hash
from longtake.data.latents.store import EncoderFacts, LatentStore, of_window
from longtake.data.loading.buffers import Delivery, DeviceFeed
from longtake.data.loading.dataset import SlotDataset
from longtake.data.loading.draws import draw
from longtake.data.loading.loader import Fetched, SlotLoader
from longtake.data.loading.memory import machine_bytes
from longtake.data.loading.parcel import Parcel
from longtake.data.loading.quarantine import append_quarantine, list_quarantine, read_quarantine
from longtake.data.probing.one_file import ClipInfo, probe_file
from longtake.data.probing.probe import ProbeResult, part_path, probe_table
from longtake.data.tables.captions import told_captions
from longtake.data.tables.convert import make_shards
from longtake.data.tables.mix import MixedTable, open_clips, order_columns
from longtake.data.tables.numbers import read_numbers
from longtake.data.tables.select import filter_table, merge_tables, split_table
from longtake.data.tables.stats import column_rows, table_facts, table_stats
from longtake.data.tables.stats_page import frame_reader, middle_frame, stats_page
from longtake.data.tables.table import ClipTable, base_folder

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
    "base_folder",
    "caption",
    "column_rows",
    "default_cache_folder",
    "draw",
    "filter_table",
    "frame_reader",
    "from_unit",
    "list_quarantine",
    "machine_bytes",
    "make_shards",
    "merge_tables",
    "middle_frame",
    "of_window",
    "open_clips",
    "order_columns",
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
    "told_captions",
    "window",
    "write_image",
    "write_video",
]
