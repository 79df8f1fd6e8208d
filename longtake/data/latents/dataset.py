"""Slots to batches from a latent store: what the encoders would make of the pixels and captions, read from disk."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longtake.contracts import Batch, Bucket, Fault, Slot, UserError
from longtake.data.latents.shard import MEND, DamagedShard
from longtake.data.latents.store import TEXTS, LatentStore, tensors_of
from longtake.data.loading.dataset import SlotDataset
from longtake.data.loading.draws import draw, view_of
from longtake.random import hash64


def text_hash(caption: str) -> int:
    """The 64-bit hash under which a caption, suffix included, lies in a store."""
    return hash64("caption", caption)


class StoredDataset(SlotDataset):
    """A `SlotDataset` whose batches carry latents and embeddings of a store in place of pixels.

    A clip that could not be read when the store was made, or whose bytes in the store are damaged (those of its caption
    too), is a fault as a clip that cannot be read is: weight 0, quarantine. A slot with a sample that the store has
    not, or not its caption, is made from its files, as a whole; the caller sees to it that this happens only where it
    is wanted.

    Indexing raises `UserError` where a caption is not the one that was encoded.
    """

    def __init__(
        self,
        store: LatentStore,
        *arguments: Any,
        windows: Mapping[int, Sequence[str]] | None = None,
        **options: Any,
    ):
        """`store`, then as for `SlotDataset`; whether the posterior is drawn from is the store's to say.

        windows: frames of a clip -> the windows whose latents batches bring, which the store must have.
        """
        super().__init__(*arguments, **options | {"posterior": store.has_posterior})
        self.store, self.windows = store, dict(windows or {})

    def batch_bytes(self, bucket: Bucket) -> int:
        """The larger of a batch from the store and one from the files."""
        letters = dict(zip("CFhw", self.latent(*bucket.shape), strict=True))
        sizes = [
            math.prod(letters.get(axis, axis) for axis in entry["shape"]) * getattr(torch, entry["dtype"]).itemsize
            for entry in self._tensors(bucket).values()
        ]
        noise = 4 * math.prod(letters.values()) * (2 if self.posterior else 1)
        return max(bucket.batch_size * (sum(sizes) + noise), super().batch_bytes(bucket))

    def __getitem__(self, slot: Slot) -> Batch:
        started = time.perf_counter()
        draws = draw(slot, self.seed, self.stage, self.latent, self.config.views, self.posterior)
        entries = self.store.find(view_of(slot.pass_index, self.config.views), slot.samples)
        if (entries < 0).any():
            return self.read(slot, draws)
        weights = np.array(slot.weights, dtype=np.float32)
        rows, faults = self._latents(slot, entries, weights)
        batch = self.batch(slot, torch.empty(0, dtype=torch.uint8), weights, faults, draws, started)
        texts, more = self._embeddings(slot, batch.text, entries, weights)
        of_text = tensors_of(self.store.facts)[TEXTS]
        encoded = {
            name: self._stack(texts if name in of_text else rows, name, entry, slot.bucket)
            for name, entry in self._tensors(slot.bucket).items()
        }
        return replace(
            batch,
            encoded=encoded,
            weights=torch.from_numpy(weights),
            faults=(*faults, *more),
            fetch_seconds=time.perf_counter() - started,
        )

    def _latents(
        self, slot: Slot, entries: np.ndarray, weights: np.ndarray
    ) -> tuple[list[dict[str, Tensor] | None], list[Fault]]:
        """The latents of the samples that train, None for the others; `weights` of those that fail become 0."""
        rows: list[dict[str, Tensor] | None] = [None] * len(weights)
        faults = []
        for i, (row, sample, entry) in enumerate(
            zip(slot.rows.tolist(), slot.samples.tolist(), entries.tolist(), strict=True)
        ):
            if weights[i] == 0:
                continue
            if self.quarantined.get(sample) == slot.pass_index:
                weights[i] = 0
                continue
            reason = self.store.reason(entry)
            if not reason:
                try:
                    rows[i] = self.store.read(entry)
                    continue
                except DamagedShard as error:
                    reason = f"{error}; {MEND}"
            weights[i] = 0
            faults.append(self._fault(row, sample, slot.pass_index, reason))
        return rows, faults

    def _embeddings(
        self, slot: Slot, captions: Sequence[str], entries: np.ndarray, weights: np.ndarray
    ) -> tuple[list[dict[str, Tensor] | None], list[Fault]]:
        """The embedded captions, None where one is damaged; `weights` of those become 0."""
        found: list[dict[str, Tensor] | None] = []
        faults = []
        for i, (caption, entry) in enumerate(zip(captions, entries.tolist(), strict=True)):
            row, stored = int(slot.rows[i]), int(self.store.column("text")[entry])
            if text_hash(caption) != stored:
                raise UserError(
                    f"dataset.latents = {str(self.store.folder)!r}: the caption of {self.table.written_path(row)} is "
                    f"{caption[:80]!r} now, which is not the one that was encoded; encode again into another folder"
                )
            try:
                found.append(self.store.read_text(stored))
            except DamagedShard as error:
                found.append(None)
                if weights[i]:
                    weights[i] = 0
                    faults.append(self._fault(row, int(slot.samples[i]), slot.pass_index, f"{error}; {MEND}"))
        return found, faults

    def _fault(self, row: int, sample: int, pass_index: int, reason: str) -> Fault:
        return Fault(self.table.written_path(row), sample, pass_index, f"latent store: {reason}")

    def _tensors(self, bucket: Bucket) -> dict[str, Any]:
        """What a batch of a bucket brings: name -> {"dtype", "shape"} of one sample's tensor."""
        num_frames = bucket.shape[0]
        return {**self.store.tensors, **self.store.window_tensors(num_frames, self.windows.get(num_frames, ()))}

    def _stack(
        self, rows: Sequence[dict[str, Tensor] | None], name: str, entry: Mapping[str, Any], bucket: Bucket
    ) -> Tensor:
        """One tensor of all samples, zeros where a sample has none: its weight is 0."""
        letters = dict(zip("CFhw", self.latent(*bucket.shape), strict=True))
        shape = [letters.get(axis, axis) for axis in entry["shape"]]
        blank = torch.zeros(shape, dtype=getattr(torch, entry["dtype"]))
        return torch.stack([blank if row is None else row[name] for row in rows])
