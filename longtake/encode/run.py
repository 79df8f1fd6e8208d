"""Encoding a run's data: the plan, this process's share of its shards, and the index once all are there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import torch

from longtake._version import __version__
from longtake.buckets import BucketConfig, BucketRule
from longtake.contracts import Slot, UserError
from longtake.data import DatasetConfig, LatentStore, SlotLoader, machine_bytes, open_clips
from longtake.data.latents.shard import crc_of, remove_abandoned, whole_file, write_tensors
from longtake.data.latents.store import (
    EMPTY_FILE,
    FORMAT_VERSION,
    INDEX_NAMES,
    LATENTS,
    PLAN_FILE,
    STORE_FILE,
    TEXTS,
    gather_index,
    index_schema,
    read_facts,
    read_table,
)
from longtake.diffusion import ConditionConfig, Window
from longtake.encode.fingerprint import differences, encoder_digests, make_fingerprint
from longtake.encode.plan import Plan, clips_of, encode_inputs, entries_per_shard, make_plan
from longtake.encode.shards import (
    LatentShard,
    PixelSource,
    missing_pieces,
    piece_path,
    write_index,
    write_text_shard,
)
from longtake.encode.verify import VerifyResult, whole_files
from longtake.parallel import World, tune_host
from longtake.system import Encoders, SystemConfig, build_encoders, kinds_apart, windows_of

_ALL_BAD = 100  # clips of one process, none of which can be read, end it: most often the root is wrong
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class EncodeOptions:
    """How a store is made; none of it changes what an entry means, `dtype` how exactly it is kept."""

    folder: Path
    part: tuple[int, int] = (1, 1)  # (i, n): the i-th of n shares of the shards, from 1
    dtype: Literal["bf16", "fp32"] | None = None  # None: as the encoders give it, so nothing is rounded
    shard_bytes: int = 256_000_000
    num_workers: int = 0
    prefetch_factor: int = 2
    retry_bad: bool = False  # make those shards anew that have clips which could not be read
    mend: VerifyResult | None = None  # make anew what `verify_store` has found damaged in the folder


@dataclass(frozen=True)
class EncodeResult:
    """What came of one call."""

    folder: Path
    num_entries: int  # of the whole store
    num_texts: int
    num_views: int
    continued: int  # entries and captions of this process's share that were made before
    missing: int  # shards that other parts have still to make
    bad: int  # entries whose clip could not be read; 0 while shards are missing


def encode(
    config: SystemConfig,
    dataset: DatasetConfig,
    bucket_config: BucketConfig,
    stage: int,
    options: EncodeOptions,
    world: World,
    progress: Callable[[int, int], None] | None = None,
    conditions: ConditionConfig | None = None,
) -> EncodeResult:
    """Makes this process's share of the store. Collective over the processes of `world`.

    `conditions`: the kinds of known frames that the run trains on; what a kind makes known of a clip is encoded by
    itself too, where the clip is long enough. `progress(done, total)`: entries and captions of this process's share.
    Raises `UserError` where `dataset.views` is 0, the folder holds a store of something else, no clip has a bucket, or
    no clip can be read.

    Shards are whole or absent, and the same whoever makes them; a call after an interruption makes what is missing.
    """
    if not dataset.views:
        raise UserError(
            "dataset.views = 0: every pass would take other windows, so there would be no end of views; write "
            "--dataset.views K, the number of different windows of a clip over all passes"
        )
    if world.device.type == "cpu":
        tune_host(config.cpu_threads)
    rule = BucketRule.from_config(bucket_config, config.size_divisor, dataset.fps_max, config.compat)
    table = world.on_all(lambda: open_clips(dataset))
    encoders = build_encoders(config, world.device, world, unequal=True)
    for bucket in rule.buckets:
        encoders.autoencoder.check(*bucket.shape)
    latent = encoders.autoencoder.latent
    source = PixelSource(table, dataset, seed=config.seed, stage=stage, latent=latent, compat=config.compat)
    inputs = encode_inputs(config.seed, dataset, rule, table, stage)
    windows = windows_of(conditions, rule.buckets, latent)
    made = clips_of(inputs) | ({"kinds": list(kinds_apart(conditions, latent))} if windows else {})
    facts = _facts(config, dataset, rule, stage, encoders, options, made, windows)
    world.on_main(lambda: _begin(options, facts, encoders, lambda: make_plan(inputs, source.texts)))
    plan = world.on_all(lambda: Plan.read(options.folder / PLAN_FILE))
    work = _Work(plan, rule, facts, options, source, encoders, windows, (world.rank, world.size))
    continued = work.run(progress or (lambda done, total: None))
    world.barrier()
    missing, bad = world.on_main(lambda: work.finish())
    views = dataset.views
    return EncodeResult(options.folder, len(plan), len(plan.first_of_texts), views, continued, missing, bad)


def _facts(
    config: SystemConfig,
    dataset: DatasetConfig,
    rule: BucketRule,
    stage: int,
    encoders: Encoders,
    options: EncodeOptions,
    made: dict[str, Any],
    windows: Mapping[int, Mapping[str, Window]],
) -> dict[str, Any]:
    """What `store.json` will say."""
    smallest = min((bucket.shape for bucket in rule.buckets), key=np.prod)
    with torch.inference_mode():
        moments = encoders.moments(torch.zeros(1, 3, *smallest, dtype=torch.uint8))
        embedded = encoders.embed([""])
    dtype = DTYPES.get(options.dtype or "")
    shapes: dict[str, list[Any]] = {name: list("CFhw") for name in moments}
    shapes |= {name: list(value.shape[1:]) for name, value in embedded.items()}
    tensors = {
        name: {"dtype": str(dtype or value.dtype).removeprefix("torch."), "shape": shapes[name]}
        for name, value in (moments | embedded).items()
    }
    return {
        "longtake_format": "latent store",
        "longtake_format_version": FORMAT_VERSION,
        "fingerprint": make_fingerprint(config, dataset, rule, stage),
        "made": made
        | {"dtype": options.dtype, "shard_bytes": options.shard_bytes, "weights": encoder_digests(encoders)},
        "longtake": __version__,
        "buckets": [bucket.name for bucket in rule.buckets],
        "latent": asdict(encoders.autoencoder.latent),
        "text_length": encoders.text.max_length,
        "deterministic": "std" not in moments,
        "tensors": tensors,
        "windows": {
            str(length): {name: len(window.frames) for name, window in of_length.items()}
            for length, of_length in windows.items()
        },
    }


def _begin(options: EncodeOptions, facts: dict[str, Any], encoders: Encoders, plan: Callable[[], Plan]) -> None:
    """Puts down what the store is, or refuses a folder that holds another one."""
    folder = options.folder
    if (folder / STORE_FILE).is_file():
        known = read_facts(folder)
        found = differences(facts["fingerprint"], known["fingerprint"]) + differences(facts["made"], known["made"])
        if found:
            raise UserError(
                f"{folder}: holds a store of something else ({'; '.join(found)}); choose another folder with -o, or "
                "the settings that it was begun with"
            )
        if options.mend is not None:
            _discard(options, options.mend, known, encoders, plan)
        Plan.read(folder / PLAN_FILE, known.get("plan_crc"))
        return
    for kind in (LATENTS, TEXTS):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    if missing_pieces(folder, LATENTS, range(1)) != [0]:
        raise UserError(f"{folder}: has shards and no {STORE_FILE}; choose an empty folder with -o")
    made = plan()
    if not len(made):
        raise UserError(
            "bucket_config: no clip has a bucket in any view; `longtake train` prints the reason for each, loosen "
            "bucket_config or add clips"
        )
    made.write(folder / PLAN_FILE)
    facts = facts | {"plan_crc": made.crc, "empty_crc": _write_empty(options, encoders)}
    with whole_file(folder / STORE_FILE) as file:
        file.write((json.dumps(facts, indent=1) + "\n").encode())


def _write_empty(options: EncodeOptions, encoders: Encoders) -> int:
    """Embeds the empty prompt; returns the CRC-32 of its file's tensors."""
    dtype = DTYPES.get(options.dtype or "")
    with torch.inference_mode():
        empty = {k: (v if dtype is None else v.to(dtype)).cpu() for k, v in encoders.embed([""]).items()}
    write_tensors(options.folder / EMPTY_FILE, empty)
    return crc_of(empty)


def _discard(
    options: EncodeOptions, found: VerifyResult, facts: dict[str, Any], encoders: Encoders, plan: Callable[[], Plan]
) -> None:
    """Removes the damaged shards and the whole index; makes the plan and the empty prompt again if they are damaged."""
    folder = options.folder
    if found.is_damaged:
        for path in whole_files(folder):
            path.unlink(missing_ok=True)
    for kind, number in found.shards:
        piece = piece_path(folder, kind, number)
        piece.unlink(missing_ok=True)  # first: it is what calls the shard whole
        piece.with_suffix(".safetensors").unlink(missing_ok=True)
    if PLAN_FILE in found.files:
        made = plan()
        if facts.get("plan_crc", made.crc) != made.crc:
            raise UserError(
                f"{folder / PLAN_FILE}: is damaged, and cannot be made again: the captions of the table are not those "
                "that the store was begun with; encode into another folder"
            )
        made.write(folder / PLAN_FILE)
    if EMPTY_FILE in found.files:
        _write_empty(options, encoders)


class _Work:
    """The shards of a store, and this process's share of them."""

    def __init__(
        self,
        plan: Plan,
        rule: BucketRule,
        facts: dict[str, Any],
        options: EncodeOptions,
        source: PixelSource,
        encoders: Encoders,
        windows: Mapping[int, Mapping[str, Window]],
        place: tuple[int, int],
    ):
        self.plan, self.rule, self.options, self.source, self.encoders = plan, rule, options, source, encoders
        self.windows = windows
        self.folder, self.dtype = options.folder, DTYPES.get(options.dtype or "")
        self._entry_bytes = _entry_bytes(facts)
        self.latents = plan.latent_shards(
            lambda bucket: entries_per_shard(options.shard_bytes, self._latent_bytes(bucket))
        )
        self.texts = plan.text_shards(entries_per_shard(options.shard_bytes, self._entry_bytes[1]))
        (part, parts), (rank, ranks) = options.part, place
        self._first, self._stride, self._ranks = part - 1 + parts * rank, parts * ranks, ranks
        self._tried = self._good = 0
        self._only_bad: list[Path] = []  # pieces written before the first clip that could be read

    def run(self, progress: Callable[[int, int], None]) -> int:
        """Makes what is missing of this process's share; returns how much of it was there."""
        mine = {LATENTS: self._mine(self.latents), TEXTS: self._mine(self.texts)}
        sizes = {kind: np.diff(shards, axis=1)[:, 0] for kind, shards in ((LATENTS, self.latents), (TEXTS, self.texts))}
        if self.options.retry_bad:
            self._forget_bad(mine[LATENTS])
        todo = {kind: missing_pieces(self.folder, kind, numbers) for kind, numbers in mine.items()}
        total = sum(int(sizes[kind][numbers].sum()) for kind, numbers in mine.items())
        done = continued = total - sum(int(sizes[kind][numbers].sum()) for kind, numbers in todo.items())
        progress(done, total)
        for number in todo[TEXTS]:
            entries = self.plan.first_of_texts[slice(*self.texts[number])]
            write_text_shard(self.folder, number, self.plan, entries, self.rule, self.source, self.encoders, self.dtype)
            done += len(entries)
            progress(done, total)
        self.encoders.finish_captions()
        for count in self._encode_latents(todo[LATENTS]):
            done += count
            progress(done, total)
        return continued

    def finish(self) -> tuple[int, int]:
        """Writes the whole index if every shard is there: (shards missing, entries whose clip could not be read)."""
        missing = len(missing_pieces(self.folder, LATENTS, range(len(self.latents))))
        missing += len(missing_pieces(self.folder, TEXTS, range(len(self.texts))))
        if missing:
            return missing, 0
        if not all(path.is_file() for path in whole_files(self.folder)):
            self._write_whole()
        bad = int((LatentStore.open(self.folder).column("shard") < 0).sum())
        if bad == len(self.plan):
            raise UserError(
                f"dataset.root: none of the {bad} samples could be read, see {self.folder / 'bad.csv'}; check "
                "dataset.root and the paths in the clip table, and repeat with --retry-bad"
            )
        return 0, bad

    def _write_whole(self) -> None:
        """Writes `bad.csv`, then the whole index; its last file is what says that all is there."""
        tables = {kind: gather_index(self.folder, kind) for kind in (TEXTS, LATENTS)}
        self._write_bad(tables[LATENTS].filter(pc.not_equal(tables[LATENTS]["reason"], "")))
        for kind, table in tables.items():
            for suffix in (".parquet", ".arrow"):  # the second is what readers look for
                write_index(table, self.folder / f"{INDEX_NAMES[kind]}{suffix}")
        for folder in (self.folder, self.folder / LATENTS, self.folder / TEXTS):
            remove_abandoned(folder)

    def _write_bad(self, bad: pa.Table) -> None:
        """`bad.csv`, for people: which clip, in which view, and why."""
        path = self.folder / "bad.csv"
        if not len(bad):
            path.unlink(missing_ok=True)
            return
        names = [self.source.table.written_path(row) for row in bad["row"].to_pylist()]
        with whole_file(path) as file:
            pyarrow.csv.write_csv(pa.table({"path": names, "view": bad["view"], "reason": bad["reason"]}), file)

    def _encode_latents(self, numbers: Sequence[int]) -> Iterator[int]:
        """Makes shards one after the other; yields how many entries were added, batch by batch."""
        limit = int(machine_bytes() / 4 / self._ranks)
        loader = SlotLoader(self.source, self.options.num_workers, self.options.prefetch_factor, limit)
        try:
            batches = iter(loader.fetch(slot for number in numbers for slot in self._slots(number)))
            for number in numbers:
                shard = LatentShard(number, self.plan, *self.latents[number].tolist(), self.source)
                for slot in self._slots(number):
                    batch = next(batches)
                    windows = self.windows.get(slot.bucket.shape[0], {})
                    good = shard.add(slot, batch, self.encoders, self.dtype, windows)
                    self._count(len(slot.rows), good, batch.faults)
                    yield len(slot.rows)
                path = shard.write(self.folder)
                if not self._good:
                    self._only_bad.append(path)
            alone = self._ranks == 1 and self.options.part[1] == 1
            if self._tried and not self._good and alone and len(numbers) == len(self.latents):
                self._refuse_all_bad()
        finally:
            loader.close()

    def _count(self, tried: int, good: int, faults: Sequence[Any]) -> None:
        self._tried, self._good = self._tried + tried, self._good + good
        if faults and not hasattr(self, "_first_fault"):
            self._first_fault = faults[0]
        if self._tried >= _ALL_BAD and not self._good:
            self._refuse_all_bad()

    def _refuse_all_bad(self) -> None:
        for path in self._only_bad:  # so that a later call tries them again
            path.unlink(missing_ok=True)
        first = self._first_fault
        raise UserError(
            f"dataset.root: none of the first {self._tried} clips can be read (first: {first.path}: {first.reason}); "
            "check dataset.root and the paths in the clip table"
        )

    def _forget_bad(self, numbers: Sequence[int]) -> None:
        """Removes those pieces, of some shards, that name a clip which could not be read, and the whole index."""
        for number in numbers:
            path = piece_path(self.folder, LATENTS, number)
            if path.is_file() and _has_bad(path):
                for whole in whole_files(self.folder):
                    whole.unlink(missing_ok=True)
                path.unlink()

    def _mine(self, shards: np.ndarray) -> list[int]:
        return list(range(len(shards)))[self._first :: self._stride]

    def _slots(self, number: int) -> Iterator[Slot]:
        start, stop = self.latents[number].tolist()
        yield from self.plan.slots(self.rule, start, stop)

    def _latent_bytes(self, bucket: int) -> int:
        shape = self.rule.buckets[bucket].shape
        channels, frames, height, width = self.source.latent(*shape)
        frames += sum(len(window.frames) for window in self.windows.get(shape[0], {}).values())
        return self._entry_bytes[0] * channels * frames * height * width


def _has_bad(piece: Path) -> bool:
    """Whether a piece of the index names a clip that could not be read."""
    reasons = read_table(piece, index_schema(LATENTS))["reason"]
    return bool(pc.any(pc.not_equal(reasons, "")).as_py())


def _entry_bytes(facts: dict[str, Any]) -> tuple[int, int]:
    """Bytes of an entry's latents for each of their elements, and of an embedded caption."""
    sizes: dict[bool, int] = {True: 0, False: 0}
    for entry in facts["tensors"].values():
        of_video = isinstance(entry["shape"][0], str)
        count = 1 if of_video else int(np.prod(entry["shape"]))
        sizes[of_video] += count * getattr(torch, entry["dtype"]).itemsize
    return sizes[True], sizes[False]
