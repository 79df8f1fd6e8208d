"""What decides the contents of a latent store, as plain data, and whether a store fits a run: same settings, same
clips, nothing missing."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longtake.buckets.inputs import OrderInputs
from longtake.buckets.protocol import BucketLaw
from longtake.contracts import UserError
from longtake.data.config import DatasetConfig
from longtake.data.latents.dataset import shown
from longtake.data.latents.shard import MEND
from longtake.data.latents.source import EncoderFacts, LatentSource
from longtake.data.latents.store import DIGEST, FACT_COLUMNS, LatentStore, read_facts, text_hash
from longtake.data.loading.dataset import SlotDataset
from longtake.data.tables.mix import MixedTable
from longtake.data.tables.table import ClipTable
from longtake.encode.changed import ALL_COMPARED, SOME_COMPARED, FilesThen, compare_files, first_paths, spread
from longtake.encode.plan import clips_of, encode_inputs, slot_of, view_samples
from longtake.encoders.autoencoder import Autoencoder
from longtake.parallel.world import World
from longtake.system.config import SystemConfig
from longtake.system.encoders import Encoders, empty_texts
from longtake.system.examples import any_masked, windows_of

_CHUNK = 1 << 17
_CAPTIONS_TRIED = 500  # of each view, evenly spread; all others are compared when they are read


_ABSENT = object()  # the value of a key that is not there
PIXELS = 2  # raised when equal settings begin to give other frames, pixels or captions


def make_fingerprint(
    config: SystemConfig, dataset: DatasetConfig, rule: BucketLaw, stage: int, kinds: Mapping[str, float] | None
) -> dict[str, Any]:
    """Key of the config -> value, of everything but the clips that latents and embeddings depend on. Fit for JSON.

    Batch sizes are left out: they decide which samples stand side by side, not what a sample is. `kinds`: the weights
    of the kinds of known places, by which masks of pixels are drawn.
    """
    found: dict[str, Any] = {
        "seed": config.seed,
        "stage": stage,
        "compat": config.compat,
        "dataset.views": dataset.views,
        "dataset.fps_max": dataset.fps_max,
        "dataset.captions": [list(pair) for pair in (dataset.captions or {"text": 1.0}).items()],
        "dataset.vmaf": dataset.vmaf,
        "pixels": PIXELS,
        "dataset.transform_name": dataset.transform_name,
        **rule.content(),
        "ae": config.ae.content(),
        **{text.section: getattr(config, text.section).content() for text in config.family.texts},
        "rules": config.sample_rules.content(),
    }
    if companions := config.sample_rules.companions:
        found["companions"] = [asdict(companion) for companion in companions]
    if any_masked(windows_of(config, kinds, rule.buckets, config.ae.latent)):
        found["condition_config"] = dict(kinds or {})
    return json.loads(json.dumps(found))


def known_fingerprint(facts: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fingerprint of a store; an old one has no rules, since `compat` alone decided them."""
    return {"rules": fingerprint["rules"], **facts["fingerprint"]}


class OtherStore(UserError):
    """A folder holds a store of something else; made of the folder and of every difference."""

    def __str__(self) -> str:
        return f"{self.said}; choose another folder with -o, or the settings that it was begun with"

    @property
    def said(self) -> str:
        folder, found = self.args
        return f"{folder}: holds a store of something else ({'; '.join(found)})"


def differences(present: Mapping[str, Any], stored: Mapping[str, Any], place: str = "") -> list[str]:
    """Every key whose values differ, with both: `seed is 8 here and 7 in the store`."""
    found = []
    for name in dict.fromkeys([*present, *stored]):
        key = f"{place}.{name}" if place else name
        here, there = present.get(name, _ABSENT), stored.get(name, _ABSENT)
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            found += differences(here, there, key)
        elif here != there:
            ours, theirs = ("nothing" if value is _ABSENT else json.dumps(value) for value in (here, there))
            found.append(f"{key} is {ours} here and {theirs} in the store")
    return found


def weights_digest(encoder: object) -> str | None:
    """16 hex digits over the names, types and bytes of an encoder's weights; None for one without weights."""
    module = nn.ModuleDict(encoder.encoding) if isinstance(encoder, Autoencoder) else encoder  # without the decoder
    state = module.state_dict() if isinstance(module, nn.Module) else {}
    if not state:
        return None
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # collective
        digest.update(whole.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def encoder_digests(encoders: Encoders) -> dict[str, str | None]:
    """Return the digest of each encoder's weights."""
    found = {"autoencoder": weights_digest(encoders.autoencoder)}
    for text in encoders.texts:
        found["pooled" if text.pooled else text.condition] = weights_digest(encoders.of_captions[text.condition])
    return found


@dataclass(frozen=True)
class FittingStore:
    """A store that a run may train from."""

    store: LatentSource
    views: int
    needed: int  # entries that the run's views ask for
    missing: int  # of them, those that the store has not
    empty: Mapping[str, Tensor] | None = None  # what stands for no text, where the store does not say all of it
    note: str = ""  # what of the clips' files was not compared

    @property
    def facts(self) -> EncoderFacts | None:
        """What takes the place of the encoders; None where they are needed for what is missing."""
        if self.missing or self.empty is None:
            return None if self.missing else self.store.encoders
        return replace(self.store.encoders, empty=self.empty)

    def refuse_other_weights(self, encoders: Encoders, world: World) -> None:
        """Raise `UserError` where encoders have other weights than those that made a store of ours. Collective."""

        def compare() -> None:
            facts = self.store.facts if isinstance(self.store, LatentStore) else {}
            known = facts.get("made", {}).get("weights", {})
            different = differences(encoder_digests(encoders) if known else {}, known, "weights")
            if different:
                raise UserError(
                    f"dataset.latents = {self.store.place!r}: other weights have made the store "
                    f"({'; '.join(different)}); train with those, or encode with these into another folder"
                )

        world.on_main(compare)

    def __str__(self) -> str:
        made = "no encoder is loaded" if not self.missing else f"{self.missing} of them are missing and encoded here"
        note = f"; {self.note}" if self.note else ""
        known = f", with known frames for {', '.join(self.store.kinds)}" if self.store.kinds else ""
        return f"latents: {self.needed} samples in {self.views} views{known}, from {self.store.place}; {made}{note}"


def open_fitting_store(
    config: SystemConfig,
    dataset: DatasetConfig,
    rule: BucketLaw,
    table: ClipTable | MixedTable,
    stage: int,
    kinds: Mapping[str, float] | None,
    world: World,
) -> FittingStore:
    """Open `dataset.latents` on every rank, once rank 0 has compared it with the run. Collective.

    Raises `UserError` that names every setting that differs with both values, the first clip whose numbers differ, a
    caption that does, how many clip files have another size, or how many samples are missing where
    `dataset.latents_missing` is "refuse".
    """
    assert dataset.latents is not None
    place = f"dataset.latents = {dataset.latents!r}"
    if opener := config.family.source_of(dataset.latents):
        source = world.on_all(lambda: opener(config, table))
        found = _fit_foreign(source, encode_inputs(config.seed, dataset, rule, table, stage), dataset, world)
        if found.missing:
            return found
        given, dropout = dataset.empty_prompt, getattr(config, "dropout_ratio", {})
        empty = world.on_main(lambda: empty_texts(config, source.encoders, given, dropout, world.device))
        return replace(found, empty=empty)
    fingerprint = make_fingerprint(config, dataset, rule, stage, kinds)

    def compare() -> tuple[int, int, str]:
        different = differences(fingerprint, known_fingerprint(read_facts(Path(dataset.latents)), fingerprint))
        if different:
            raise UserError(
                f"{place}: the store was made for other settings ({'; '.join(different)}); train with those, or "
                "encode for these into another folder"
            )
        store = LatentStore.open(dataset.latents)
        inputs = encode_inputs(config.seed, dataset, rule, table, stage)
        latent = store.encoders.latent
        captions = SlotDataset(
            table, dataset, seed=config.seed, stage=stage, latent=latent, rules=config.sample_rules, law=rule
        )
        return _Comparison(store, inputs, captions, place).count()

    needed, missing, note = world.on_main(compare)
    if missing and dataset.latents_missing == "refuse":
        again = f"longtake data encode RUN -o {shlex.quote(str(place))}"
        raise UserError(
            f"{place}: {missing} of the {needed} samples that the run asks for are not in it; repeat `{again}` (all "
            "parts) or encode the present table into another folder, or write "
            'dataset.latents_missing = "online" to encode them in training'
        )
    store = world.on_all(lambda: LatentStore.open(dataset.latents, check=False))
    return FittingStore(store, dataset.views, needed, missing, note=note)


def _fit_foreign(source: LatentSource, inputs: OrderInputs, dataset: DatasetConfig, world: World) -> FittingStore:
    """Files of another program, which say nothing of the settings they were made for; what is missing is counted."""

    def count() -> tuple[int, int]:
        needed = missing = 0
        for view in range(inputs.views):
            rows, ids, _ = view_samples(inputs, view)
            needed, missing = needed + len(ids), missing + int((source.find(view, ids, rows) < 0).sum())
        return needed, missing

    needed, missing = world.on_main(count)
    if missing and dataset.latents_missing == "refuse":
        raise UserError(
            f"dataset.latents = {source.place!r}: {missing} of the {needed} samples that the run asks for are not in "
            'it; add them, leave their clips out of the table, or write dataset.latents_missing = "online"'
        )
    return FittingStore(source, dataset.views, needed, missing)


@dataclass(frozen=True)
class _Comparison:
    """A store beside the samples of a run, with the run's numbers, buckets, captions and files; `place` is its name in
    sentences. Every method raises `UserError` where the store was made of something else."""

    store: LatentStore
    inputs: OrderInputs
    captions: SlotDataset
    place: str

    def count(self) -> tuple[int, int, str]:
        """`(needed, missing, note)`: the samples of all views, those that the store has not, and what of the clips'
        files was not compared.

        A whole store that was made for the very same samples has them all; otherwise each is looked up.
        """
        made = self.store.facts["made"]
        same = self.store.complete and clips_of(self.inputs) == {name: made[name] for name in ("table", "copies")}
        needed = missing = 0
        note = ""
        for view in range(self.inputs.views):
            if same:
                rows, ids = self.store.samples(view)
            else:
                rows, ids, _ = view_samples(self.inputs, view)
                missing += self._look_up(view, rows, ids)
            needed += len(ids)
            tried = spread(len(ids), _CAPTIONS_TRIED)
            self._refuse_other_captions(view, rows[tried], ids[tried])
            if view == 0:
                note = self._refuse_other_files(rows, ids)
        return needed, missing, note

    def _look_up(self, view: int, rows: np.ndarray, ids: np.ndarray) -> int:
        """How many samples of a view are missing."""
        missing = 0
        for start in range(0, len(ids), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            entries = self.store.find(view, ids[chunk])
            there = entries >= 0
            missing += int((~there).sum())
            self._refuse_other_numbers(rows[chunk][there], entries[there])
        return missing

    def _written(self, row: int) -> str:
        return self.captions.table.written_path(int(row))

    def _refuse_other_numbers(self, rows: np.ndarray, entries: np.ndarray) -> None:
        for name in FACT_COLUMNS:
            here = np.asarray(getattr(self.inputs, name)[rows], np.float64)
            there = np.asarray(self.store.column(name)[entries], np.float64)
            wrong = np.flatnonzero((here != there) & ~(np.isnan(here) & np.isnan(there)))
            if len(wrong):
                first = wrong[0]
                raise UserError(
                    f"{self.place}: {name} of {self._written(rows[first])} is {here[first]:g} in the clip table and "
                    f"{there[first]:g} in the store (and so for {len(wrong)} samples); train with the table that "
                    "was encoded, or encode this one into another folder"
                )

    def _refuse_other_captions(self, view: int, rows: np.ndarray, ids: np.ndarray) -> None:
        store, rule = self.store, self.inputs.rule
        places = {bucket.name: number for number, bucket in enumerate(rule.buckets)}
        for i, entry in enumerate(store.find(view, ids).tolist()):
            if entry < 0:
                continue
            bucket, one = places[store.buckets[store.column("bucket")[entry]]], slice(i, i + 1)
            (text,) = self.captions.texts(slot_of(rule, view, bucket, rows[one], ids[one]))
            if text_hash(text) != int(store.column("text")[entry]):
                raise UserError(
                    f"{self.place}: the caption of {self._written(rows[i])} is {shown(text)} now, which is not the one "
                    "that was encoded; encode again into another folder"
                )

    def _refuse_other_files(self, rows: np.ndarray, ids: np.ndarray) -> str:
        """Compare the clips' files with those that were encoded; what could not be compared, in words. Files that are
        gone do no harm, and copies have another time and equal contents."""
        store, table = self.store, self.captions.table
        tried = spread(len(ids), SOME_COMPARED) if len(ids) > ALL_COMPARED else np.arange(len(ids))
        entries = store.find(0, ids[tried], rows[tried])
        is_read = entries >= 0
        is_read[is_read] = store.column("shard")[entries[is_read]] >= 0
        tried_rows, first = np.unique(rows[tried][is_read], return_index=True)
        names = ("file_bytes", "file_mtime_ns", DIGEST)
        then = FilesThen(tried_rows, *(store.column(name)[entries[is_read][first]] for name in names))
        changes = compare_files(then, table, self.captions.rules.companion_columns)
        if changes.changed:
            raise UserError(
                f"{self.place}: {len(changes.changed)} of {changes.compared} clip files have changed since they were "
                f"encoded ({first_paths(table, changes.changed)}); put the old ones back, or {MEND}, and what belongs "
                "to other files"
            )
        notes = []
        if len(tried) < len(ids):
            notes.append(f"{len(tried):,} of {len(ids):,} clip files were compared with those encoded")
        if changes.unknown:
            notes.append(
                f"{len(changes.unknown):,} clip files have another time than when they were encoded and were not "
                f"compared by content ({first_paths(table, changes.unknown)})"
            )
        if notes:
            notes.append("`longtake data encode RUN -o FOLDER --verify` compares all")
        return "; ".join(notes)
