"""Whether a latent store fits a run: same settings, same clips, nothing missing."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from longtake.buckets import BucketRule, OrderInputs
from longtake.contracts import UserError
from longtake.data import ClipTable, DatasetConfig, EncoderFacts, LatentStore, MixedTable, SlotDataset, text_hash
from longtake.data.latents.shard import MEND
from longtake.data.latents.store import CLIP_FACTS, read_facts
from longtake.encode.fingerprint import differences, encoder_digests, make_fingerprint
from longtake.encode.plan import clips_of, encode_inputs, slot_of, view_samples
from longtake.encode.verify import file_size
from longtake.parallel import World
from longtake.system import Encoders, SystemConfig

_CHUNK = 1 << 17
_CAPTIONS_TRIED = 500  # of each view, evenly spread; all others are compared when they are read
_FILES_TRIED = 200  # clip files whose size is compared, evenly spread; `--verify` looks at all
_READERS = 16  # threads that look at files: on a network disk each look is a wait


@dataclass(frozen=True)
class FittingStore:
    """A store that a run may train from."""

    store: LatentStore
    needed: int  # entries that the run's views ask for
    missing: int  # of them, those that the store has not

    @property
    def facts(self) -> EncoderFacts | None:
        """What takes the place of the encoders; None where they are needed for what is missing."""
        return None if self.missing else self.store.encoders

    def refuse_other_weights(self, encoders: Encoders, world: World) -> None:
        """Raises `UserError` where encoders have other weights than those that made the store. Collective."""

        def compare() -> None:
            known = self.store.facts.get("made", {}).get("weights", {})
            different = differences(encoder_digests(encoders) if known else {}, known, "weights")
            if different:
                raise UserError(
                    f"dataset.latents = {str(self.store.folder)!r}: other weights have made the store "
                    f"({'; '.join(different)}); train with those, or encode with these into another folder"
                )

        world.on_main(compare)

    def __str__(self) -> str:
        views = self.store.fingerprint["dataset.views"]
        made = "no encoder is loaded" if not self.missing else f"{self.missing} of them are missing and encoded here"
        known = f", with known frames for {', '.join(self.store.kinds)}" if self.store.kinds else ""
        return f"latents: {self.needed} samples in {views} views{known}, from {self.store.folder}; {made}"


def open_fitting_store(
    config: SystemConfig,
    dataset: DatasetConfig,
    rule: BucketRule,
    table: ClipTable | MixedTable,
    stage: int,
    world: World,
) -> FittingStore:
    """Opens `dataset.latents` on every rank, once rank 0 has compared it with the run. Collective.

    Raises `UserError` that names every setting that differs with both values, the first clip whose numbers differ, a
    caption that does, how many clip files have another size, or how many samples are missing where
    `dataset.latents_missing` is "refuse".
    """
    assert dataset.latents is not None
    place = f"dataset.latents = {dataset.latents!r}"
    fingerprint = make_fingerprint(config, dataset, rule, stage)

    def compare() -> tuple[int, int]:
        different = differences(fingerprint, read_facts(Path(dataset.latents))["fingerprint"])
        if different:
            raise UserError(
                f"{place}: the store was made for other settings ({'; '.join(different)}); train with those, or "
                "encode for these into another folder"
            )
        store = LatentStore.open(dataset.latents)
        inputs = encode_inputs(config.seed, dataset, rule, table, stage)
        captions = SlotDataset(
            table, dataset, seed=config.seed, stage=stage, latent=store.encoders.latent, compat=config.compat
        )
        return _compare_clips(store, inputs, table, captions, place)

    needed, missing = world.on_main(compare)
    if missing and dataset.latents_missing == "refuse":
        raise UserError(
            f"{place}: {missing} of the {needed} samples that the run asks for are not in it; repeat `longtake data "
            "encode` (all parts) or encode the present table into another folder, or write "
            'dataset.latents_missing = "online" to encode them in training'
        )
    store = world.on_all(lambda: LatentStore.open(dataset.latents, check=False))
    return FittingStore(store, needed, missing)


def _compare_clips(
    store: LatentStore, inputs: OrderInputs, table: ClipTable | MixedTable, captions: SlotDataset, place: str
) -> tuple[int, int]:
    """`(needed, missing)`: the samples of all views, and those that the store has not.

    A whole store that was made for the very same samples has them all; otherwise each is looked up.
    """
    made = store.facts["made"]
    same = store.complete and clips_of(inputs) == {name: made[name] for name in ("table", "copies")}
    needed = missing = 0
    for view in range(inputs.views):
        if same:
            rows, ids = store.samples(view)
        else:
            rows, ids, codes = view_samples(inputs, view)
            missing += _look_up(store, inputs, table, view, rows, ids, codes, place)
        needed += len(ids)
        tried = _spread(len(ids), _CAPTIONS_TRIED)
        _refuse_other_captions(store, inputs.rule, captions, view, rows[tried], ids[tried], place)
        if view == 0:
            tried = _spread(len(ids), _FILES_TRIED)
            _refuse_other_files(store, table, rows[tried], store.find(view, ids[tried]), place)
    return needed, missing


def _spread(count: int, most: int) -> np.ndarray:
    """At most `most` of `count` places, evenly spread: int64."""
    return np.unique(np.linspace(0, max(0, count - 1), most).astype(np.int64))[:count]


def _refuse_other_files(
    store: LatentStore, table: ClipTable | MixedTable, rows: np.ndarray, entries: np.ndarray, place: str
) -> None:
    """Raises `UserError` where clip files have another size than when they were encoded.

    Files that are gone do no harm, and a time alone says nothing: a copy has another one.
    """
    known = [
        (table.location(row), table.written_path(row), int(store.column("file_bytes")[entry]))
        for row, entry in zip(rows.tolist(), entries.tolist(), strict=True)
        if entry >= 0 and store.column("shard")[entry] >= 0 and store.column("file_bytes")[entry] >= 0
    ]
    with ThreadPoolExecutor(_READERS) as readers:
        sizes = list(readers.map(file_size, (location for location, _, _ in known)))
    there = [(path, size, now) for (_, path, size), now in zip(known, sizes, strict=True) if now is not None]
    changed = [path for path, size, now in there if now != size]
    if changed:
        raise UserError(
            f"{place}: {len(changed)} of {len(there)} clip files have another size than when they were encoded (first: "
            f"{changed[0]}); put the old ones back, or {MEND}, and what belongs to other files"
        )


def _look_up(
    store: LatentStore,
    inputs: OrderInputs,
    table: ClipTable | MixedTable,
    view: int,
    rows: np.ndarray,
    ids: np.ndarray,
    codes: np.ndarray,
    place: str,
) -> int:
    """How many samples of a view are missing. Raises `UserError` where one is another than in the store."""
    missing = 0
    for start in range(0, len(ids), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        entries = store.find(view, ids[chunk])
        there = entries >= 0
        missing += int((~there).sum())
        _refuse_other_numbers(store, inputs, table, rows[chunk][there], entries[there], place)
        _refuse_other_buckets(store, inputs.rule, table, rows[chunk][there], codes[chunk][there], entries[there])
    return missing


def _refuse_other_numbers(
    store: LatentStore,
    inputs: OrderInputs,
    table: ClipTable | MixedTable,
    rows: np.ndarray,
    entries: np.ndarray,
    place: str,
) -> None:
    for name in CLIP_FACTS:
        here = np.asarray(getattr(inputs, name)[rows], np.float64)
        there = np.asarray(store.column(name)[entries], np.float64)
        wrong = np.flatnonzero((here != there) & ~(np.isnan(here) & np.isnan(there)))
        if len(wrong):
            first = wrong[0]
            raise UserError(
                f"{place}: {name} of {table.written_path(int(rows[first]))} is {here[first]:g} in the clip table and "
                f"{there[first]:g} in the store (so it is with {len(wrong)} samples); train with the table that was "
                "encoded, or encode this one into another folder"
            )


def _refuse_other_buckets(
    store: LatentStore,
    rule: BucketRule,
    table: ClipTable | MixedTable,
    rows: np.ndarray,
    codes: np.ndarray,
    entries: np.ndarray,
) -> None:
    """Equal settings and equal numbers give equal buckets, unless the program that made the store was another."""
    places = {name: number for number, name in enumerate(store.buckets)}
    ours = np.array([places.get(bucket.name, -1) for bucket in rule.buckets], np.int64)
    wrong = np.flatnonzero(ours[codes] != store.column("bucket")[entries])
    if len(wrong):
        first = wrong[0]
        raise UserError(
            f"dataset.latents: {table.written_path(int(rows[first]))} is in bucket {rule.buckets[codes[first]].name} "
            f"here and in {store.buckets[store.column('bucket')[entries[first]]]} in the store (so it is with "
            f"{len(wrong)} samples); encode again into another folder"
        )


def _refuse_other_captions(
    store: LatentStore,
    rule: BucketRule,
    captions: SlotDataset,
    view: int,
    rows: np.ndarray,
    ids: np.ndarray,
    place: str,
) -> None:
    entries = store.find(view, ids)
    for row, entry, text in zip(rows, entries, captions.texts(slot_of(rule, view, 0, rows, ids)), strict=True):
        if entry >= 0 and text_hash(text) != int(store.column("text")[entry]):
            raise UserError(
                f"{place}: the caption of {captions.table.written_path(int(row))} is {text[:80]!r} now, which is not "
                "the one that was encoded; encode again into another folder"
            )
