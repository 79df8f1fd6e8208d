"""Slots to batches: each worker decodes, cuts and draws for whole slots, so a batch depends on its slot alone."""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from longtake.buckets.assignment import BucketRule
from longtake.buckets.protocol import BucketLaw, Timing, keyed_draw, view_of
from longtake.contracts import Batch, Bucket, Caption, ClipFault, Draw, LatentShape, Places, Slot
from longtake.data.clips.animation import is_still
from longtake.data.clips.captions import names_in, read_frame_numbers, segment_captions, single_caption
from longtake.data.clips.file_cache import FileCache, default_cache_folder
from longtake.data.clips.locations import file_name
from longtake.data.clips.transforms import fit_frame, window
from longtake.data.clips.video import ClipError, decode_frames, is_image, read_image
from longtake.data.config import DatasetConfig
from longtake.data.loading.captions import prefixed_caption, written_caption
from longtake.data.loading.controls import control_frames
from longtake.data.loading.draws import caption_columns, draw, draw_bytes, window_draws
from longtake.data.probing.one_file import frames_at
from longtake.data.rules import MASK, OWN, Companion, SampleRules
from longtake.data.tables.mix import MixedTable
from longtake.data.tables.table import ClipTable
from longtake.random import Purpose, uniforms

_STDERR = 2  # the file descriptor, which is there also where sys.stderr is not


class KnownSource(Protocol):
    """Draws what is known of the samples of a batch, from their choices."""

    def __call__(self, choices: Mapping[str, np.ndarray], shape: tuple[int, int, int]) -> Mapping[int, Places]:
        """Of clips (T, H, W), by rows."""

    def num_bytes(self, shape: tuple[int, int, int]) -> int:
        """Return the most that the tensors of one sample take."""


class SlotDataset(Dataset[Batch]):
    """A map from slots to batches: `dataset[slot] -> Batch`, a pure function of the slot, the table and the files.

    Samples of weight 0 (fillers), and those in `quarantined` for the slot's pass, are not decoded; a sample that fails
    keeps its place at weight 0 and is named in `Batch.faults`. Their pixels repeat the first good sample of the slot,
    or are zeros, so shapes never depend on what could be read.

    `quarantined`: sample id -> the pass it failed in. `latent` gives the shape of the noise. `draws`: the random
    numbers that batches bring for the trainer; `known`: draws what is known of samples (None: nothing). `rules`: the
    family's; `law`: by which clips got their buckets, and get the frames that may be used (None: all, at the rate or
    stride of `config` and `rules`). Picklable; the table travels as its file's name, the cache stays behind.
    """

    def __init__(
        self,
        table: ClipTable | MixedTable,
        config: DatasetConfig,
        *,
        seed: int,
        stage: int,
        latent: LatentShape,
        draws: Mapping[str, Draw] = MappingProxyType({}),
        quarantined: Mapping[int, int] | None = None,
        rules: SampleRules = OWN,
        law: BucketLaw | None = None,
        known: KnownSource | None = None,
    ):
        self.table, self.config = table, config
        self.seed, self.stage, self.latent, self.draws = seed, stage, latent, dict(draws)
        self.quarantined = dict(quarantined or {})
        self.rules, self.known = rules, known
        self.law = law or BucketRule((), 1, config.fps_max, frame_interval=rules.stride)
        self.files = file_cache(config)
        self._cache = ClipCache(int(config.cache_mb * 1e6))

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_cache": ClipCache(self._cache.capacity_bytes)}

    def batch_bytes(self, bucket: Bucket) -> int:
        """How large the tensors of a bucket's batch are, but for a few bytes a sample."""
        pixels = 3 * math.prod(bucket.shape) * self.rules.pixel_bytes
        for one in self.rules.companions:
            size = 4 if one.kind == "numbers" else self.rules.pixel_bytes
            pixels += size * sum(map(math.prod, one.shapes(bucket.shape).values()))
        return bucket.batch_size * (pixels + self._drawn_bytes(bucket))

    def _drawn_bytes(self, bucket: Bucket) -> int:
        """Of what is drawn for one sample."""
        masks = 0 if self.known is None else self.known.num_bytes(bucket.shape)
        return masks + draw_bytes(self.latent, bucket, self.draws)

    def __getitem__(self, slot: Slot) -> Batch:
        return self.read(slot, self.draw(slot))

    def draw(self, slot: Slot, for_pixels: bool = True) -> dict[str, Tensor]:
        """Return the random numbers of a slot's samples; for_pixels: also those for pixels themselves, one for each."""
        wanted = {name: one for name, one in self.draws.items() if for_pixels or one.shape != "pixels"}
        return draw(slot, self.seed, self.stage, self.latent, wanted, self.config.views)

    def read(self, slot: Slot, draws: Mapping[str, Tensor]) -> Batch:
        """Return the batch of a slot, whose random numbers for the trainer are `draws`."""
        weights = np.array(slot.weights, dtype=np.float32)
        places, timing = window_draws(slot, self.seed, self.stage, self.config.views), self.timing(slot)
        texts, wrong = self.captions(slot)
        video = np.zeros((len(slot.rows), 3, *slot.bucket.shape), self._dtype)
        brought = self._blank_companions(slot)
        faults = []
        for i, (row, sample) in enumerate(zip(slot.rows.tolist(), slot.samples.tolist(), strict=True)):
            if weights[i] == 0:
                continue
            if self.quarantined.get(sample) == slot.pass_index:
                weights[i] = 0
                continue
            try:
                if i in wrong:
                    raise ClipError(wrong[i])
                numbers = self._numbers(row, slot.bucket.shape[0], timing, i, float(places[i]))
                self._fill(video[i], row, self._shown(row, numbers))
                for companion in self.rules.companions:
                    self._bring(companion, {name: values[i] for name, values in brought.items()}, slot, i, numbers)
            except ClipError as error:
                weights[i] = 0
                for values in (video, *brought.values()):
                    values[i] = 0
                faults.append(ClipFault(self.table.written_path(row), sample, slot.pass_index, str(error)))
        good = np.flatnonzero(weights)
        for values in (video, *brought.values()) if len(good) else ():
            values[weights == 0] = values[good[0]]
        batch = self.batch(slot, texts, torch.from_numpy(video), weights, faults, draws)
        return replace(batch, companions={name: torch.from_numpy(values) for name, values in brought.items()})

    def batch(
        self,
        slot: Slot,
        texts: tuple[Caption, ...],
        video: Tensor,
        weights: np.ndarray,
        faults: Sequence[ClipFault],
        draws: Mapping[str, Tensor],
    ) -> Batch:
        """Return a batch of a slot's pixels and captions with all that the table says of it."""
        choices = {name: drawn.numpy() for name, drawn in draws.items() if self.draws[name].is_choice}
        return Batch(
            bucket=slot.bucket,
            video=video,
            text=texts,
            fps=torch.from_numpy(self.timing(slot).rate.astype(np.float32)),
            size=torch.from_numpy(np.stack([self.table.height[slot.rows], self.table.width[slot.rows]], axis=1)),
            keys=slot.keys,
            weights=torch.from_numpy(weights),
            draws={name: drawn for name, drawn in draws.items() if not self.draws[name].is_choice},
            faults=tuple(faults),
            choices=choices,
            known={} if self.known is None else self.known(choices, slot.bucket.shape),
        )

    def timing(self, slot: Slot) -> Timing:
        """Which frames of each clip may be used, how densely, and the rate that its caption gives."""
        names = ("num_frames", "height", "width", "fps")
        columns = tuple(np.asarray(getattr(self.table, name)[slot.rows], np.float64) for name in names)
        view = view_of(slot.pass_index, self.config.views)
        found = self.law.timing(columns, keyed_draw(self.seed, self.stage, view, slot.samples))
        if self.rules.still_fps:
            found = replace(found, rate=np.where(columns[0] == 1, self.rules.still_fps, found.rate))
        return found

    def _numbers(self, row: int, num_frames: int, timing: Timing, i: int, place: float) -> np.ndarray:
        """Return the source frames of sample `i` of a slot: int64 [num_frames]. Raises `ClipError`."""
        if is_image(file_name(self.table.location(row))) and self.table.num_frames[row] == 1:
            if num_frames != 1:
                raise ClipError(f"a still cannot fill {num_frames} frames")
            return np.zeros(1, np.int64)
        first, stop, interval = (int(values[i]) for values in (timing.first, timing.stop, timing.interval))
        try:
            return first + window(stop - first, num_frames, interval, place, self.rules.window)
        except ValueError as error:
            raise ClipError(str(error)) from error

    def _shown(self, row: int, numbers: np.ndarray) -> np.ndarray:
        """Return the frames of a clip that a player shows where these stand at the clip's mean rate."""
        if self.table.uneven_times[row] != 1 or not self.table.fps[row] > 0:
            return numbers
        with self.files.local(self.table.location(row)) as path:
            return frames_at(path, numbers / float(self.table.fps[row]))

    def _fill(self, out: np.ndarray, row: int, numbers: np.ndarray, named: str | None = None, column: str = "") -> None:
        """Write one sample's pixels into `out`: [3, T, H, W]; `named`: a file of the `column` in place of the clip."""
        size = out.shape[2:]
        location = self.table.location(row) if named is None else self.table.location_of(row, named)
        key = row, column, size[0], size[1]
        clip = self._cache.get(key)
        if clip is None:
            keeps = self._cache.has_room(int(self.table.num_frames[row]) * out[:, 0].nbytes)
            with self.files.local(location) as path, time_limit(self.config.timeout_seconds):
                still = is_still(path)
                fit = partial(fit_frame, size=(size[0], size[1]), law=self.rules.pixels, still=still)
                if not keeps:
                    for where, pixels in _frames(path, still, numbers):
                        out[:, where] = fit(pixels)[:, None]
                    return
                clip = np.stack([fit(pixels) for _, pixels in _frames(path, still, None)])
            self._cache.put(key, clip)
        if numbers[-1] >= len(clip):
            raise ClipError(f"frame {numbers[-1]} was asked for, but the file ends after {len(clip)} frames")
        out[:] = clip[numbers].transpose(1, 0, 2, 3)

    @property
    def _dtype(self) -> type:
        return np.uint8 if self.rules.pixel_bytes == 1 else np.float32

    def _blank_companions(self, slot: Slot) -> dict[str, np.ndarray]:
        """Zeros for all that the clips of a slot bring along, by the names of tensors."""
        found = {}
        for one in self.rules.companions:
            for name, shape in one.shapes(slot.bucket.shape).items():
                dtype = bool if name.endswith(MASK) else np.float32 if one.kind == "numbers" else self._dtype
                found[name] = np.zeros((len(slot.rows), *shape), dtype)
        return found

    def _bring(self, one: Companion, out: Mapping[str, np.ndarray], slot: Slot, i: int, numbers: np.ndarray) -> None:
        """Write what sample `i`, of these frames, brings along into `out`, by the names of its tensors."""
        row = int(slot.rows[i])
        try:
            names = names_in(self.table.caption(row, one.column))
            if not names and (one.required or one.kind != "stills"):
                raise ClipError(f"column {one.column} names no file")
            if one.kind == "stills":
                for place, name in enumerate(self._chosen(names, one.most, slot, i)):
                    self._fill(out[one.name][place], row, np.zeros(1, np.int64), name, f"{one.column} {name}")
                    out[one.name + MASK][place] = True
                return
            if len(names) != 1:
                raise ClipError(f"column {one.column} names {len(names)} files; one is expected")
            location = self.table.location_of(row, names[0])
            if one.kind == "numbers":
                with self.files.local(location) as path:
                    shown = self._shown(row, numbers)
                    out[one.name][:] = read_frame_numbers(path, shown, one.width, one.header)
            else:
                with self.files.local(location) as path:
                    if len(numbers) != 1 and is_still(path):
                        raise ClipError(f"a still cannot fill {len(numbers)} frames")
                    matched = control_frames(path, self.table, row, numbers)
                self._fill(out[one.name], row, matched, names[0], one.column)
        except ClipError as error:
            raise ClipError(f"{one.name}: {error}") from error

    def _chosen(self, names: Sequence[str], most: int, slot: Slot, i: int) -> list[str]:
        """Return the stills that a sample takes: all, in their order, or as many as it may, drawn for its view."""
        if len(names) <= most:
            return list(names)
        view = view_of(slot.pass_index, self.config.views)
        drawn = uniforms(self.seed, self.stage, Purpose.COMPANION, view, int(slot.samples[i]), len(names))[0]
        return [names[place] for place in np.argsort(drawn, kind="stable")[:most].tolist()]

    def texts(self, slot: Slot) -> tuple[Caption, ...]:
        """Return the captions of a slot, suffix included, each from its drawn column or, where that is empty, another
        one."""
        return self.captions(slot)[0]

    def captions(self, slot: Slot) -> tuple[tuple[Caption, ...], dict[int, str]]:
        """`texts`, and the samples, by their place, whose captions cannot be used, with the reason.

        Where a clip has several, one for each segment, the cell is a JSON array of them; one that cannot be used
        becomes as many empty ones.
        """
        tried = caption_columns(slot, self.config.captions, self.seed, self.stage, self.config.views)
        rates, needed = self.timing(slot).rate.tolist(), 0
        if self.rules.segments is not None:
            needed = self.rules.segments(slot.bucket.shape[0])
        found: list[Caption] = []
        wrong: dict[int, str] = {}
        for i, (row, rate, columns) in enumerate(zip(slot.rows.tolist(), rates, tried, strict=True)):
            written = next(filter(None, (self.table.caption(row, column) for column in columns)), "")
            if not needed:
                try:
                    written = single_caption(written)
                except ValueError as error:
                    wrong[i], written = str(error), ""
                found.append(self._suffixed(written, row, rate))
                continue
            try:
                parts = segment_captions(written, needed)
            except ValueError as error:
                wrong[i], parts = f"{error} of {slot.bucket.shape[0]} frames", ("",) * needed
            found.append(tuple(self._suffixed(part, row, rate) for part in parts))
        return tuple(found), wrong

    def _suffixed(self, text: str, row: int, rate: float) -> str:
        return written_caption(self.config, self.table, self.rules, text, row, rate)

    def prefixed(self, text: str, row: int) -> str:
        """Return a caption with the `caption_prefix` of the table that its row is of."""
        return prefixed_caption(self.config, self.table, text, row)


def _frames(path: str, still: bool, numbers: np.ndarray | None) -> Iterator[tuple[list[int], np.ndarray]]:
    """Return the wanted frames (None: all) of a video or a still, one after the other, as `decode_frames`
    gives them."""
    if still:
        return iter([([0], read_image(path)[0])])
    return decode_frames(path, numbers)


class ClipCache:
    """Decoded clips at a bucket's size, the least recently used given up first; for sets that fit into memory.

    A clip is uint8 or float32 [T, 3, H, W], its key (row, column, H, W).
    """

    def __init__(self, capacity_bytes: int):
        self.capacity_bytes = capacity_bytes
        self._clips: OrderedDict[tuple[int, str, int, int], np.ndarray] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._clips)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a clip of that size is worth keeping: a quarter of the cache at most, so a few large clips cannot
        push out all others."""
        return 4 * num_bytes <= self.capacity_bytes

    def get(self, key: tuple[int, str, int, int]) -> np.ndarray | None:
        clip = self._clips.get(key)
        if clip is not None:
            self._clips.move_to_end(key)
        return clip

    def put(self, key: tuple[int, str, int, int], clip: np.ndarray) -> None:
        if key in self._clips or clip.nbytes > self.capacity_bytes:
            return
        self._clips[key] = clip
        self._bytes += clip.nbytes
        while self._bytes > self.capacity_bytes:
            self._bytes -= self._clips.popitem(last=False)[1].nbytes


def file_cache(config: DatasetConfig) -> FileCache:
    """Where the clips of a run that lie on servers are fetched to."""
    folder = default_cache_folder() if config.cache_dir is None else Path(config.cache_dir).absolute()
    return FileCache(folder, int(config.cache_gb * 1e9), config.download_seconds)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `ClipError` in the body after `seconds` of wall time; 0: never.

    Uses the interval timer, so it works in the main thread only (loader workers run in theirs); elsewhere, and on
    systems without the timer, there is no limit. A timer that was running before goes on afterwards.

    The timer waits for C code to come back to Python. A decoder that never does would hang the run, so after twice the
    time a loader's worker (a daemon process) ends itself, saying where it was; its loader makes up for it.
    """
    if seconds <= 0 or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(*_: object) -> None:
        raise ClipError(f"took longer than {seconds:g} s (dataset.timeout_seconds)")

    handler = signal.signal(signal.SIGALRM, give_up)
    started = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    expendable = multiprocessing.current_process().daemon
    if expendable:
        faulthandler.dump_traceback_later(2 * seconds, exit=True, file=_STDERR)
    try:
        yield
    finally:
        if expendable:
            faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-6), interval)
