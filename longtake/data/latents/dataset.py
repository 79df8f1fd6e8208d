"""Slots to batches from a source of latents: what encoders would make of pixels and captions, read from files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longtake.buckets.protocol import view_of
from longtake.contracts import Batch, Bucket, Caption, ClipFault, Slot, UserError
from longtake.data.latents.source import (
    LARGEST_LATENT,
    Kind,
    LatentSource,
    UnusableLatents,
    check_numbers,
    num_bytes,
    sized,
)
from longtake.data.latents.store import captions_of
from longtake.data.loading.dataset import SlotDataset


def shown(caption: Caption) -> str:
    """Return the beginning of a clip's captions, for a sentence."""
    return repr(" | ".join(captions_of(caption))[:80])


class StoredDataset(SlotDataset):
    """A `SlotDataset` whose batches carry latents and embeddings of a source in place of pixels.

    A clip that could not be read when the latents were made, or whose files there are damaged (those of its caption
    too), of another shape than its bucket's, or hold NaN or infinity, is a fault as a clip that cannot be read is:
    weight 0, quarantine. A slot with a sample that the source has not is made from its clips' files, as a whole; the
    caller sees to it that this happens only where it is wanted.

    Indexing raises `UserError` where a caption is not the one that was encoded.
    """

    def __init__(
        self, source: LatentSource, *arguments: Any, windows: Mapping[int, Sequence[str]] | None = None, **options: Any
    ):
        """`source`, then as for `SlotDataset`. windows: frames of a clip -> the windows whose latents batches bring,
        which the source must have."""
        super().__init__(*arguments, **options)
        self.source, self.windows = source, dict(windows or {})

    def batch_bytes(self, bucket: Bucket) -> int:
        """Return the larger of a batch from the source and one from the files."""
        stored = sum(num_bytes(of_kind.values()) for of_kind in self._wanted(bucket))
        return max(bucket.batch_size * (stored + self._drawn_bytes(bucket)), super().batch_bytes(bucket))

    def __getitem__(self, slot: Slot) -> Batch:
        texts = self.texts(slot)
        entries = self.source.find(view_of(slot.pass_index, self.config.views), slot.samples, slot.rows)
        if (entries < 0).any():
            return self.read(slot, self.draw(slot))
        draws = self.draw(slot, for_pixels=False)
        weights = np.array(slot.weights, dtype=np.float32)
        faults: list[ClipFault] = []
        wanted = self._wanted(slot.bucket)
        rows: list[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]] = []
        for i, (row, sample, entry) in enumerate(
            zip(slot.rows.tolist(), slot.samples.tolist(), entries.tolist(), strict=True)
        ):
            if self.quarantined.get(sample) == slot.pass_index:
                weights[i] = 0
            latents: Mapping[str, Tensor] = {}
            embedded: Mapping[str, Tensor] = {}
            try:
                embedded = _of_shapes(self._texts(row, entry, texts[i]), wanted[1])
                latents = _of_shapes(self.source.latents(entry), wanted[0], LARGEST_LATENT) if weights[i] else {}
            except UnusableLatents as error:
                if weights[i]:
                    reason = f"latent store: {error}"
                    faults.append(ClipFault(self.table.written_path(row), sample, slot.pass_index, reason))
                    weights[i] = 0
            rows.append((latents, embedded))
        encoded = {
            name: torch.stack([row[kind].get(name, torch.zeros(shape, dtype=dtype)) for row in rows])
            for kind, of_kind in enumerate(wanted)
            for name, (dtype, shape) in of_kind.items()
        }
        nothing = torch.empty(0, dtype=torch.uint8)
        return replace(self.batch(slot, texts, nothing, weights, faults, draws), encoded=encoded)

    def _texts(self, row: int, entry: int, caption: Caption) -> Mapping[str, Tensor]:
        try:
            return self.source.texts(entry, caption)
        except ValueError as error:
            raise UserError(
                f"dataset.latents = {self.source.place!r}: the caption of {self.table.written_path(row)} is "
                f"{shown(caption)} now, which is not the one that was encoded; encode again into another folder"
            ) from error

    def _wanted(self, bucket: Bucket) -> tuple[dict[str, Kind], dict[str, Kind]]:
        """What a batch of a bucket brings of latents and of captions: name -> dtype and shape of one sample's."""
        num_frames = bucket.shape[0]
        parts = () if self.rules.segments is None else (self.rules.segments(num_frames),)
        latents = self.source.latent_tensors(num_frames, self.windows.get(num_frames, ()))
        texts = sized(self.source.text_tensors(), self.latent, bucket.shape)
        with_parts = {name: (dtype, (*parts, *shape)) for name, (dtype, shape) in texts.items()}
        return sized(latents, self.latent, bucket.shape), with_parts


def _of_shapes(
    found: Mapping[str, Tensor], wanted: Mapping[str, Kind], largest: float = math.inf
) -> Mapping[str, Tensor]:
    """`found`, if it has all that is wanted, its numbers with fractions in the wanted precision.

    Raises `UnusableLatents`, also for NaN, infinity and numbers, but of "std", larger in size than `largest`.
    """
    converted = dict(found)
    for name, (dtype, shape) in wanted.items():
        if name not in found:
            raise UnusableLatents(f"{name!r} is missing")
        if dtype.is_floating_point and found[name].is_floating_point():
            check_numbers(repr(name), found[name], math.inf if name.endswith("std") else largest)
            converted[name] = found[name].to(dtype)
        if (converted[name].dtype, tuple(found[name].shape)) != (dtype, shape):
            has, needs = (
                f"{list(size)} of {str(kind).removeprefix('torch.')}"
                for kind, size in ((found[name].dtype, found[name].shape), (dtype, shape))
            )
            raise UnusableLatents(f"{name!r} has the shape {has}; the clip's bucket needs {needs}")
    return converted
