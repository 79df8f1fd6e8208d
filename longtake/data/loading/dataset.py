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
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from longtake.contracts import Batch, Bucket, Fault, LatentShape, Slot
from longtake.data.clips.captions import caption
from longtake.data.clips.frames import target_fps, window
from longtake.data.clips.remote import FileCache, default_cache_folder, file_name
from longtake.data.clips.transforms import Compat, fit_frame
from longtake.data.clips.video import ClipError, decode_frames, is_image, read_image
from longtake.data.config import DatasetConfig
from longtake.data.loading.draws import caption_columns, draw, window_draws
from longtake.data.tables.mix import MixedTable
from longtake.data.tables.table import ClipTable

_STDERR = 2  # the file descriptor, which is there also where sys.stderr is not


class SlotDataset(Dataset[Batch]):
    """A map from slots to batches: `dataset[slot] -> Batch`, a pure function of the slot, the table and the files.

    Samples of weight 0 (fillers), and those in `quarantined` for the slot's pass, are not decoded; a sample that fails
    keeps its place at weight 0 and is named in `Batch.faults`. Their pixels repeat the first good sample of the slot,
    or are zeros, so shapes never depend on what could be read.

    `quarantined`: sample id -> the pass it failed in. `latent` gives the shape of the noise. `posterior` asks for the
    draws of the autoencoder's posterior. Picklable; the table travels as its file's name, the cache stays behind.
    """

    def __init__(
        self,
        table: ClipTable | MixedTable,
        config: DatasetConfig,
        *,
        seed: int,
        stage: int,
        latent: LatentShape,
        posterior: bool = False,
        quarantined: Mapping[int, int] | None = None,
        compat: Compat | None = None,
    ):
        self.table, self.config = table, config
        self.seed, self.stage, self.latent, self.posterior = seed, stage, latent, posterior
        self.quarantined = dict(quarantined or {})
        self.compat: Compat | None = compat
        self.files = file_cache(config)
        self._cache = ClipCache(int(config.cache_mb * 1e6))

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_cache": ClipCache(self._cache.capacity_bytes)}

    def batch_bytes(self, bucket: Bucket) -> int:
        """How large the tensors of a bucket's batch are, but for a few bytes a sample."""
        pixels = 3 * math.prod(bucket.shape) * (1 if self.compat is None else 4)
        noise = 4 * math.prod(self.latent(*bucket.shape)) * (2 if self.posterior else 1)
        return bucket.batch_size * (pixels + noise)

    def __getitem__(self, slot: Slot) -> Batch:
        draws = draw(slot, self.seed, self.stage, self.latent, self.config.views, self.posterior)
        return self.read(slot, draws)

    def read(self, slot: Slot, draws: Mapping[str, Tensor]) -> Batch:
        """The batch of a slot, whose random numbers for the trainer are `draws`."""
        started = time.perf_counter()
        weights = np.array(slot.weights, dtype=np.float32)
        places = window_draws(slot, self.seed, self.stage, self.config.views)
        dtype = np.uint8 if self.compat is None else np.float32
        video = np.zeros((len(slot.rows), 3, *slot.bucket.shape), dtype)
        faults = []
        for i, (row, sample) in enumerate(zip(slot.rows.tolist(), slot.samples.tolist(), strict=True)):
            if weights[i] == 0:
                continue
            if self.quarantined.get(sample) == slot.pass_index:
                weights[i] = 0
                continue
            try:
                self._fill(video[i], row, float(places[i]))
            except ClipError as error:
                weights[i], video[i] = 0, 0
                faults.append(Fault(self.table.written_path(row), sample, slot.pass_index, str(error)))
        good = np.flatnonzero(weights)
        if len(good):
            video[weights == 0] = video[good[0]]
        return self.batch(slot, torch.from_numpy(video), weights, faults, draws, started)

    def batch(
        self,
        slot: Slot,
        video: Tensor,
        weights: np.ndarray,
        faults: Sequence[Fault],
        draws: Mapping[str, Tensor],
        started: float,
    ) -> Batch:
        """A batch of a slot's pixels with all that the table says of its samples. `started`: by `perf_counter`."""
        return Batch(
            bucket=slot.bucket,
            video=video,
            text=self.texts(slot),
            fps=torch.tensor(self._rates(slot), dtype=torch.float32),
            size=torch.from_numpy(np.stack([self.table.height[slot.rows], self.table.width[slot.rows]], axis=1)),
            keys=slot.keys,
            weights=torch.from_numpy(weights),
            draws=draws,
            faults=tuple(faults),
            fetch_seconds=time.perf_counter() - started,
            kind_draws=draws["mask"].numpy() if "mask" in draws else np.zeros(0, np.float32),  # none for a store
        )

    def _fill(self, out: np.ndarray, row: int, place: float) -> None:
        """Writes one sample's pixels into `out`: [3, T, H, W], uint8 (float32 under compat). Raises `ClipError`."""
        num_frames, *size = out.shape[1:]
        location = self.table.location(row)
        still = is_image(file_name(location))
        if still:
            if num_frames != 1:
                raise ClipError(f"a still cannot fill {num_frames} frames")
            numbers = np.zeros(1, np.int64)
        else:
            total = int(self.table.num_frames[row])
            interval = target_fps(self.table.fps[row], self.config.fps_max)[1]
            try:
                numbers = window(total, num_frames, interval, place, self.compat)
            except ValueError as error:
                raise ClipError(str(error)) from error
        fit = partial(fit_frame, size=(size[0], size[1]), compat=self.compat, still=still)
        key = row, size[0], size[1]
        clip = self._cache.get(key)
        if clip is None:
            keeps = self._cache.has_room(int(self.table.num_frames[row]) * out[:, 0].nbytes)
            with self.files.local(location) as path, time_limit(self.config.timeout_seconds):
                if not keeps:
                    for where, pixels in _frames(path, still, numbers):
                        out[:, where] = fit(pixels)[:, None]
                    return
                clip = np.stack([fit(pixels) for _, pixels in _frames(path, still, None)])
            self._cache.put(key, clip)
        if numbers[-1] >= len(clip):
            raise ClipError(f"frame {numbers[-1]} was asked for, but the file ends after {len(clip)} frames")
        out[:] = clip[numbers].transpose(1, 0, 2, 3)

    def texts(self, slot: Slot) -> tuple[str, ...]:
        """The captions of a slot, suffix included, each from its drawn column or, where that is empty, another one."""
        tried = caption_columns(slot, self.config.captions, self.seed, self.stage, self.config.views)
        found = []
        for row, rate, columns in zip(slot.rows.tolist(), self._rates(slot), tried, strict=True):
            written = next(filter(None, (self.table.caption(row, column) for column in columns)), "")
            found.append(self._suffixed(written, row, rate))
        return tuple(found)

    def _rates(self, slot: Slot) -> list[float]:
        """Frames per second of each sample after the frame-rate rule, 0 where unknown."""
        return [target_fps(self.table.fps[row], self.config.fps_max)[0] for row in slot.rows.tolist()]

    def _suffixed(self, text: str, row: int, rate: float) -> str:
        score = self.table.motion_score[row] if self.config.vmaf else None
        if self.compat == "opensora_v2" and self.config.fps_max is None:
            rate = 0  # that program tells the rate only under a ceiling
        return caption(text, rate, score, self.compat)


def _frames(path: str, still: bool, numbers: np.ndarray | None) -> Iterator[tuple[list[int], np.ndarray]]:
    """The wanted frames (None: all) of a video or a still, one after the other, as `decode_frames` gives them."""
    if still:
        return iter([([0], read_image(path)[0])])
    return decode_frames(path, numbers)


class ClipCache:
    """Decoded clips at a bucket's size, the least recently used given up first; for sets that fit into memory.

    A clip is uint8 or float32 [T, 3, H, W], its key (row, H, W).
    """

    def __init__(self, capacity_bytes: int):
        self.capacity_bytes = capacity_bytes
        self._clips: OrderedDict[tuple[int, int, int], np.ndarray] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._clips)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a clip of that size is worth keeping: a quarter of the cache at most, so a few large clips cannot
        push out all others."""
        return 4 * num_bytes <= self.capacity_bytes

    def get(self, key: tuple[int, int, int]) -> np.ndarray | None:
        clip = self._clips.get(key)
        if clip is not None:
            self._clips.move_to_end(key)
        return clip

    def put(self, key: tuple[int, int, int], clip: np.ndarray) -> None:
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
    """Raises `ClipError` in the body after `seconds` of wall time; 0: never.

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
