"""Slots to batches: each worker decodes, cuts and draws for whole slots, so a batch depends on its slot alone."""

from __future__ import annotations

import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from longtake.contracts import Batch, Fault, LatentShape, Slot
from longtake.data.captions import caption
from longtake.data.config import DatasetConfig
from longtake.data.draws import caption_columns, draw, window_draws
from longtake.data.frames import target_fps, window
from longtake.data.mix import MixedTable
from longtake.data.table import ClipTable
from longtake.data.transforms import Compat, resize_crop
from longtake.data.video import ClipError, is_image, read_frames, read_image


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
        self._cache = ClipCache(int(config.cache_mb * 1e6))

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_cache": ClipCache(self._cache.capacity_bytes)}

    def __getitem__(self, slot: Slot) -> Batch:
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
                with time_limit(self.config.timeout_seconds):
                    video[i] = self._pixels(row, slot.bucket.shape, float(places[i])).numpy()
            except ClipError as error:
                weights[i] = 0
                faults.append(Fault(self.table.written_path(row), sample, slot.pass_index, str(error)))
        good = np.flatnonzero(weights)
        if len(good):
            video[weights == 0] = video[good[0]]
        rates = [target_fps(self.table.fps[row], self.config.fps_max)[0] for row in slot.rows.tolist()]
        return Batch(
            bucket=slot.bucket,
            video=torch.from_numpy(video),
            text=self._texts(slot, rates),
            fps=torch.tensor(rates, dtype=torch.float32),
            size=torch.from_numpy(np.stack([self.table.height[slot.rows], self.table.width[slot.rows]], axis=1)),
            keys=slot.keys,
            weights=torch.from_numpy(weights),
            draws=draw(slot, self.seed, self.stage, self.latent, self.config.views, self.posterior),
            faults=tuple(faults),
            fetch_seconds=time.perf_counter() - started,
        )

    def _pixels(self, row: int, shape: tuple[int, int, int], place: float) -> Tensor:
        """One sample's pixels: [3, T, H, W], uint8 (float32 in [-1, 1] under compat). Raises `ClipError`."""
        frames, *size = shape
        path = self.table.path(row)
        still = is_image(path)
        if still:
            if frames != 1:
                raise ClipError(f"a still cannot fill {frames} frames")
            numbers = None
        else:
            total = int(self.table.num_frames[row])
            interval = target_fps(self.table.fps[row], self.config.fps_max)[1]
            try:
                numbers = window(total, frames, interval, place, self.compat)
            except ValueError as error:
                raise ClipError(str(error)) from error
        pixels = self._cache.get(row)
        if pixels is None:
            if not self._cache.has_room(
                self.table.num_frames[row] * self.table.height[row] * self.table.width[row] * 3
            ):
                pixels = read_image(path) if still else read_frames(path, numbers)
                return resize_crop(pixels, (size[0], size[1]), self.compat, still)
            pixels = read_image(path) if still else read_frames(path)
            self._cache.put(row, pixels)
        if numbers is not None:
            if numbers[-1] >= len(pixels):
                raise ClipError(f"frame {numbers[-1]} was asked for, but the file ends after {len(pixels)} frames")
            pixels = pixels[numbers]
        return resize_crop(pixels, (size[0], size[1]), self.compat, still)

    def _texts(self, slot: Slot, rates: list[float]) -> tuple[str, ...]:
        """The captions of a slot, suffix included, each from its drawn column or, where that is empty, another one."""
        tried = caption_columns(slot, self.config.captions, self.seed, self.stage, self.config.views)
        found = []
        for row, rate, columns in zip(slot.rows.tolist(), rates, tried, strict=True):
            written = next(filter(None, (self.table.caption(row, column) for column in columns)), "")
            found.append(self._suffixed(written, row, rate))
        return tuple(found)

    def _suffixed(self, text: str, row: int, rate: float) -> str:
        score = self.table.motion_score[row] if self.config.vmaf else None
        if self.compat == "opensora_v2" and self.config.fps_max is None:
            rate = 0  # that program tells the rate only under a ceiling
        return caption(text, rate, score, self.compat)


class ClipCache:
    """Decoded clips at their source size, the least recently used given up first; for sets that fit into memory."""

    def __init__(self, capacity_bytes: int):
        self.capacity_bytes = capacity_bytes
        self._clips: OrderedDict[int, np.ndarray] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._clips)

    def has_room(self, num_bytes: int) -> bool:
        """Whether a clip of that size is worth keeping: a quarter of the cache at most, so a few large clips cannot
        push out all others."""
        return 4 * num_bytes <= self.capacity_bytes

    def get(self, row: int) -> np.ndarray | None:
        clip = self._clips.get(row)
        if clip is not None:
            self._clips.move_to_end(row)
        return clip

    def put(self, row: int, clip: np.ndarray) -> None:
        if row in self._clips or clip.nbytes > self.capacity_bytes:
            return
        self._clips[row] = clip
        self._bytes += clip.nbytes
        while self._bytes > self.capacity_bytes:
            self._bytes -= self._clips.popitem(last=False)[1].nbytes


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `ClipError` in the body after `seconds` of wall time; 0: never.

    Uses the interval timer, so it works in the main thread only (loader workers run in theirs); elsewhere, and on
    systems without the timer, there is no limit. A timer that was running before goes on afterwards.
    """
    if seconds <= 0 or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def give_up(*_: object) -> None:
        raise ClipError(f"took longer than {seconds:g} s (dataset.timeout_seconds)")

    handler = signal.signal(signal.SIGALRM, give_up)
    started = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-6), interval)
