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
from longtake.buckets.protocol import BucketLaw
from longtake.contracts import ClipFault, Slot, UserError
from longtake.data.config import DatasetConfig
from longtake.data.latents import store
from longtake.data.latents.shard import crc_of, write_tensors
from longtake.data.latents.source import OF_VIDEO, num_bytes, sized
from longtake.data.latents.store import LatentStore
from longtake.data.loading.dataset import SlotDataset
from longtake.data.loading.loader import SlotLoader, machine_bytes
from longtake.data.rules import MASK
from longtake.data.tables.mix import open_clips
from longtake.diffusion.known import Window
from longtake.durable import unfinished, write_whole
from longtake.encode.autoencoder import fit_autoencoder
from longtake.encode.fit import OtherStore, differences, encoder_digests, known_fingerprint, make_fingerprint
from longtake.encode.plan import EncodePlan, clips_of, encode_inputs, entries_per_shard, make_plan
from longtake.encode.shards import (
    LatentShard,
    in_use,
    kept_as,
    look_for_room,
    missing_pieces,
    piece_path,
    remove_abandoned,
    write_index,
    write_text_shard,
)
from longtake.encode.verify import VerifyResult, whole_files
from longtake.parallel.host import tune_host
from longtake.parallel.world import World
from longtake.system.config import SystemConfig
from longtake.system.encoders import Encoders, build_encoders, set_tf32
from longtake.system.examples import KnownDraw, any_masked, kinds_apart, windows_of

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

    @property
    def kept_dtype(self) -> torch.dtype | None:
        """`dtype` as PyTorch's."""
        return DTYPES.get(self.dtype or "")


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
    rule: BucketLaw,
    stage: int,
    options: EncodeOptions,
    world: World,
    progress: Callable[[int, int], None] | None = None,
    kinds: Mapping[str, float] | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> EncodeResult:
    """Make this process's share of the store. Collective over the processes of `world`.

    `kinds`: the weights of the kinds of known frames that the run trains on; what a kind makes known of a clip is
    encoded by itself too, where the clip is long enough. `progress(done, total)`: entries and captions of its share.
    `say` gets a line where the autoencoder is fitted first.
    Raises `OtherStore` where the folder holds a store of something else, `UserError` where `dataset.views` is 0, no
    clip has a bucket, or no clip can be read.

    Shards are whole or absent, and the same whoever makes them; a call after an interruption makes what is missing.
    """
    if not dataset.views:
        raise UserError(
            "dataset.views = 0: every pass would take other windows, so the views would never end; write "
            "--dataset.views K, the number of different windows of a clip over all passes"
        )
    if world.device.type == "cpu":
        tune_host(config.cpu_threads)
    table = world.on_all(lambda: open_clips(dataset, config.sample_rules.columns))
    config = fit_autoencoder(config, dataset, rule, stage, options.folder, world, say)
    set_tf32(config)
    encoders = build_encoders(config, world.device, world, unequal=True)
    for bucket in rule.buckets:
        config.check_shape(*bucket.shape)
    latent = encoders.autoencoder.latent
    inputs = encode_inputs(config.seed, dataset, rule, table, stage)
    windows = windows_of(config, kinds, rule.buckets, latent)
    masks = config.law_of_family if any_masked(windows) else None
    settings = {"seed": config.seed, "stage": stage, "latent": latent, "rules": config.sample_rules, "law": rule}
    known = KnownDraw.create(masks, kinds, latent)
    source = SlotDataset(table, dataset, draws=masks.draws if masks else {}, known=known, **settings)
    made = clips_of(inputs) | ({"kinds": list(kinds_apart(config, kinds, latent))} if windows else {})
    facts = _facts(config, source, encoders, options, made, windows, kinds)
    other = world.on_main(
        lambda: _begin(options, facts, encoders, lambda: make_plan(inputs, source.texts, store.has_segments(facts)))
    )
    if other:
        raise OtherStore(str(options.folder), other)
    plan = world.on_all(lambda: EncodePlan.read(options.folder / store.PLAN_FILE, facts))
    work = _EncodeJob(plan, facts, options, source, encoders, windows, (world.rank, world.size))
    with in_use(options.folder):
        continued = work.run(progress or (lambda done, total: None))
    world.barrier()
    missing, bad = world.on_main(lambda: work.finish())
    sizes = len(plan), len(plan.first_of_texts), dataset.views
    return EncodeResult(options.folder, *sizes, continued, missing, bad)


def _facts(
    config: SystemConfig,
    source: SlotDataset,
    encoders: Encoders,
    options: EncodeOptions,
    made: dict[str, Any],
    windows: Mapping[int, Mapping[str, Window]],
    kinds: Mapping[str, float] | None,
) -> dict[str, Any]:
    made = made | {"dtype": options.dtype, "shard_bytes": options.shard_bytes, "weights": encoder_digests(encoders)}
    smallest = min((bucket.shape for bucket in source.law.buckets), key=np.prod)
    with torch.inference_mode():
        posterior = encoders.posterior(torch.zeros(1, 3, *smallest, dtype=torch.uint8))
        embedded = encoders.embed_nothing() | encoders.embed([""])
    shapes: dict[str, list[Any]] = {name: list("CFhw") for name in posterior}
    shapes |= {name: list(value.shape[1:]) for name, value in embedded.items()}
    tensors = {
        name: {"dtype": str(kept_as(value, options.kept_dtype).dtype).removeprefix("torch."), "shape": shapes[name]}
        for name, value in (posterior | embedded).items()
    }
    return {
        "longtake_format": "latent store",
        "longtake_format_version": store.FORMAT_VERSION,
        "fingerprint": make_fingerprint(config, source.config, source.law, source.stage, kinds),
        "made": made,
        "longtake": __version__,
        "buckets": [bucket.name for bucket in source.law.buckets],
        "latent": asdict(encoders.autoencoder.latent),
        "text_length": encoders.text_length,
        "deterministic": "std" not in posterior,
        "tensors": tensors,
        "windows": {
            str(length): {name: len(window.frames) for name, window in of_length.items()}
            for length, of_length in windows.items()
        },
        **({"segments": True} if config.family.segments else {}),
        **({"companions": companions} if (companions := _companion_tensors(config, tensors)) else {}),
    }


def _companion_tensors(config: SystemConfig, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Name -> {"dtype", "shape"} of what a store holds of clips' companions; `tensors`: of the clips themselves."""
    found: dict[str, Any] = {}
    for one in config.sample_rules.companions:
        if one.kind == "numbers":
            found[one.name] = {"dtype": "float32", "shape": ["T", one.width]}
        elif one.kind == "video":
            found |= {store.of_window(one.name, moment): tensors[moment] for moment in OF_VIDEO if moment in tensors}
        else:
            still = {**tensors["mean"], "shape": [one.most, "C", 1, "h", "w"]}
            found |= {store.of_window(one.name, "mean"): still, one.name + MASK: {"dtype": "bool", "shape": [one.most]}}
    return found


def _begin(
    options: EncodeOptions, facts: dict[str, Any], encoders: Encoders, plan: Callable[[], EncodePlan]
) -> list[str]:
    """Put down what the store is; return what differs in a folder that holds another one, which stays as it is."""
    folder = options.folder
    if (folder / store.STORE_FILE).is_file():
        known = store.read_facts(folder)
        found = differences(facts["fingerprint"], known_fingerprint(known, facts["fingerprint"]))
        found += differences(facts["made"], known["made"])
        if found:
            return found
        if options.mend is not None:
            _discard(options, options.mend, known, encoders, plan)
        EncodePlan.read(folder / store.PLAN_FILE, known)
        return []
    for kind in (store.LATENTS, store.TEXTS):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    if missing_pieces(folder, store.LATENTS, range(1)) != [0]:
        raise UserError(f"{folder}: has shards and no {store.STORE_FILE}; choose an empty folder with -o")
    made = plan()
    if not len(made):
        raise UserError(
            "bucket_config: no clip has a bucket in any view; `longtake data stats TABLE --run RUN` counts why; loosen "
            "bucket_config (or sizes) or add clips"
        )
    made.write(folder / store.PLAN_FILE)
    facts = facts | {"plan_crc": made.crc, "empty_crc": _write_empty(options, encoders)}
    write_whole(folder / store.STORE_FILE, json.dumps(facts, indent=1) + "\n")
    return []


def _write_empty(options: EncodeOptions, encoders: Encoders) -> int:
    """Write what stands for no text; return the CRC-32 of its file's tensors."""
    with torch.inference_mode():
        empty = {name: kept_as(value, options.kept_dtype) for name, value in encoders.embed_nothing().items()}
    write_tensors(options.folder / store.EMPTY_FILE, empty)
    return crc_of(empty)


def _discard(
    options: EncodeOptions,
    found: VerifyResult,
    facts: dict[str, Any],
    encoders: Encoders,
    plan: Callable[[], EncodePlan],
) -> None:
    """Remove the damaged shards and the whole index; make the plan and the empty embedding again where damaged."""
    folder = options.folder
    if found.is_damaged:
        for path in whole_files(folder):
            path.unlink(missing_ok=True)
    for kind, number in found.shards:
        piece = piece_path(folder, kind, number)
        piece.unlink(missing_ok=True)  # first: it is what calls the shard whole
        piece.with_suffix(".safetensors").unlink(missing_ok=True)
    if store.PLAN_FILE in found.files:
        made = plan()
        if facts.get("plan_crc", made.crc) != made.crc:
            raise UserError(
                f"{folder / store.PLAN_FILE}: is damaged, and cannot be made again: the captions of the table are not "
                "those that the store was begun with; encode into another folder"
            )
        made.write(folder / store.PLAN_FILE)
    if store.EMPTY_FILE in found.files:
        _write_empty(options, encoders)


class _EncodeJob:
    """The shards of a store, and this process's share of them."""

    def __init__(
        self,
        plan: EncodePlan,
        facts: dict[str, Any],
        options: EncodeOptions,
        source: SlotDataset,
        encoders: Encoders,
        windows: Mapping[int, Mapping[str, Window]],
        place: tuple[int, int],
    ):
        self.plan, self.facts, self.options, self.source, self.encoders = plan, facts, options, source, encoders
        self.folder, self.rule, self.windows = options.folder, source.law, windows
        self._text_bytes = num_bytes(sized(store.tensors_of(facts)[store.TEXTS], source.latent, (1, 1, 1)).values())
        size = options.shard_bytes
        self.shards = {  # kind -> int64 [n, 2]
            store.LATENTS: plan.latent_shards(lambda bucket: entries_per_shard(size, self._latent_bytes(bucket))),
            store.TEXTS: plan.text_shards(entries_per_shard(size, self._text_bytes)),
        }
        (part, parts), (rank, ranks) = options.part, place
        self._first, self._stride, self._ranks = part - 1 + parts * rank, parts * ranks, ranks
        self._tried = self._good = 0
        self._first_fault: ClipFault | None = None
        self._only_bad: list[Path] = []  # pieces written before the first clip that could be read

    def run(self, progress: Callable[[int, int], None]) -> int:
        """Make what is missing of this process's share; return how much of it was there."""
        mine = {kind: list(range(len(shards)))[self._first :: self._stride] for kind, shards in self.shards.items()}
        sizes = {kind: np.diff(shards, axis=1)[:, 0] for kind, shards in self.shards.items()}
        if self.options.retry_bad:
            self._forget_bad(mine[store.LATENTS])
        if self._first == 0:
            look_for_room(self.folder, self.plan, self.shards, self._latent_bytes, self._text_bytes)
        todo = {kind: missing_pieces(self.folder, kind, numbers) for kind, numbers in mine.items()}
        total = sum(int(sizes[kind][numbers].sum()) for kind, numbers in mine.items())
        done = continued = total - sum(int(sizes[kind][numbers].sum()) for kind, numbers in todo.items())
        progress(done, total)
        for number in todo[store.TEXTS]:
            entries = self.plan.first_of_texts[slice(*self.shards[store.TEXTS][number])]
            kept = self.options.kept_dtype
            write_text_shard(self.folder, number, self.plan, entries, self.source, self.encoders, kept)
            done += len(entries)
            progress(done, total)
        self.encoders.finish_captions()
        for count in self._encode_latents(todo[store.LATENTS]):
            done += count
            progress(done, total)
        return continued

    def finish(self) -> tuple[int, int]:
        """Write the whole index if every shard is there: (shards missing, entries whose clip could not be read)."""
        of_kind = (missing_pieces(self.folder, kind, range(len(shards))) for kind, shards in self.shards.items())
        if missing := sum(map(len, of_kind)):
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
        """Write `bad.csv`, then the whole index; its last file is what says that all is there."""
        tables = {kind: store.gather_index(self.folder, kind) for kind in (store.TEXTS, store.LATENTS)}
        self._write_bad(tables[store.LATENTS].filter(pc.not_equal(tables[store.LATENTS]["reason"], "")))
        for kind, table in tables.items():
            for suffix in (".parquet", ".arrow"):  # the second is what readers look for
                write_index(table, self.folder / f"{store.INDEX_NAMES[kind]}{suffix}")
        remove_abandoned(self.folder)

    def _write_bad(self, bad: pa.Table) -> None:
        """`bad.csv`, for people: which clip, in which view, and why."""
        path = self.folder / "bad.csv"
        if not len(bad):
            path.unlink(missing_ok=True)
            return
        names = [self.source.table.written_path(row) for row in bad["row"].to_pylist()]
        with unfinished(path) as partial:
            pyarrow.csv.write_csv(pa.table({"path": names, "view": bad["view"], "reason": bad["reason"]}), partial)

    def _encode_latents(self, numbers: Sequence[int]) -> Iterator[int]:
        """Make shards one after the other; yield how many entries were added, batch by batch."""
        limit = int(machine_bytes() / 4 / self._ranks)
        patience = self.source.config.timeout_seconds or None
        ahead = self.options.num_workers, self.options.prefetch_factor
        loader = SlotLoader(self.source, *ahead, limit, frozen_seconds=patience)
        try:
            batches = iter(loader.fetch(slot for number in numbers for slot in self._slots(number)))
            for number in numbers:
                start, stop = self.shards[store.LATENTS][number].tolist()
                shard = LatentShard(number, self.plan, start, stop, self.source)
                for slot in self._slots(number):
                    batch = next(batches)
                    windows = self.windows.get(slot.bucket.shape[0], {})
                    good = shard.add(slot, batch, self.encoders, self.options.kept_dtype, windows)
                    self._count(len(slot.rows), good, batch.faults)
                    yield len(slot.rows)
                path = shard.write(self.folder)
                if not self._good:
                    self._only_bad.append(path)
            alone = self._ranks == 1 and self.options.part[1] == 1
            if self._tried and not self._good and alone and len(numbers) == len(self.shards[store.LATENTS]):
                self._refuse_all_bad()
        finally:
            loader.close()

    def _count(self, tried: int, good: int, faults: Sequence[ClipFault]) -> None:
        self._tried, self._good = self._tried + tried, self._good + good
        self._first_fault = self._first_fault or next(iter(faults), None)
        if self._tried >= _ALL_BAD and not self._good:
            self._refuse_all_bad()

    def _refuse_all_bad(self) -> None:
        for path in self._only_bad:  # so that a later call tries them again
            path.unlink(missing_ok=True)
        first = self._first_fault
        assert first is not None
        raise UserError(
            f"dataset.root: none of the first {self._tried} clips can be read (first: {first.path}: {first.reason}); "
            "check dataset.root and the paths in the clip table"
        )

    def _forget_bad(self, numbers: Sequence[int]) -> None:
        """Remove those pieces, of some shards, that name a clip which could not be read, and the whole index."""
        for number in numbers:
            path = piece_path(self.folder, store.LATENTS, number)
            if path.is_file() and any(store.read_table(path, store.INDEX_SCHEMAS[store.LATENTS])["reason"].to_pylist()):
                for whole in whole_files(self.folder):
                    whole.unlink(missing_ok=True)
                path.unlink()

    def _slots(self, number: int) -> Iterator[Slot]:
        return self.plan.slots(self.rule, *self.shards[store.LATENTS][number].tolist())

    def _latent_bytes(self, bucket: int) -> int:
        """Bytes of an entry of a bucket: its latents, those of its windows, and what its clip brings along."""
        shape, latent = self.rule.buckets[bucket].shape, self.source.latent
        kinds = sized(store.tensors_of(self.facts)[store.LATENTS], latent, shape)
        frames = latent(*shape)[1]
        windows = sum(len(window.frames) for window in self.windows.get(shape[0], {}).values())
        of_windows = num_bytes(kind for name, kind in kinds.items() if name in OF_VIDEO) // frames * windows
        return num_bytes(kinds.values()) + of_windows
