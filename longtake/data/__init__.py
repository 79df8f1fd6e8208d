"""From files to batches: clip table, probing, decoding, transforms, captions, and the samples of a slot.

A row of `ClipTable` is a clip; `probe_table` makes one from a list of files. `SlotDataset` turns a slot of the order
into a `Batch`, with its pixels, captions and random numbers, and `SlotLoader` does so in worker processes. `caption`
and `write_video` serve training and generation alike.
"""

from typing import TYPE_CHECKING

from longtake.lazy import lazy_exports

if TYPE_CHECKING:
    from longtake.data.clips.captions import caption, prefixed
    from longtake.data.clips.file_cache import FileCache, default_cache_folder
    from longtake.data.clips.transforms import from_unit, resize_crop, to_unit
    from longtake.data.clips.video import ClipError, read_frames, read_image, video_writer, write_image, write_video
    from longtake.data.config import DatasetConfig, DatasetWithoutTable
    from longtake.data.latents.dataset import StoredDataset
    from longtake.data.latents.source import EncoderFacts, LatentSource
    from longtake.data.latents.store import LatentStore, of_window, text_hash
    from longtake.data.loading.controls import control_lines
    from longtake.data.loading.dataset import SlotDataset
    from longtake.data.loading.loader import Fetched, SlotLoader, machine_bytes
    from longtake.data.loading.parcel import Parcel
    from longtake.data.loading.quarantine import append_quarantine, list_quarantine, read_quarantine
    from longtake.data.probing.one_file import frames_at, probe_file
    from longtake.data.probing.probe import probe_table
    from longtake.data.tables.captions import FromFiles, edit_captions
    from longtake.data.tables.convert import make_shards
    from longtake.data.tables.mix import MixedTable, clip_weights, open_clips, order_columns, table_and_root
    from longtake.data.tables.rows import folder_notes, read_numbers
    from longtake.data.tables.select import filter_table, merge_tables, split_table
    from longtake.data.tables.stats import column_rows, table_facts, table_stats
    from longtake.data.tables.stats_page import film_reader, short_film, stats_page
    from longtake.data.tables.table import ClipTable, base_folder, caption_lines

__getattr__ = lazy_exports(__name__)
