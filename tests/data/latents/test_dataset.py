"""Batches from a store that was written by hand: posterior moments, faults, and captions that differ."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from longtake.contracts import UserError
from longtake.data.config import DatasetConfig
from longtake.data.latents.dataset import StoredDataset
from longtake.data.latents.shard import DamagedShard, crc_of, shard_path, write_tensors
from longtake.data.latents.source import UnusableLatents, sized
from longtake.data.latents.store import (
    EMPTY_FILE,
    FORMAT_VERSION,
    INDEX_SCHEMAS,
    LATENTS,
    STORE_FILE,
    TEXTS,
    LatentStore,
    text_hash,
)
from longtake.data.tables.table import ClipTable
from longtake.random import Purpose, normals
from tests.data.made_clips import DRAWS, LATENT, make_slot
from tests.test_small_files import NO_OBJECTS, changed

SHAPE = LATENT(5, 16, 16)
CAPTIONS = ("red.", "green.", "blue.")
TENSORS = {
    "mean": {"dtype": "float32", "shape": ["C", "F", "h", "w"]},
    "std": {"dtype": "bfloat16", "shape": ["C", "F", "h", "w"]},
    "text": {"dtype": "bfloat16", "shape": [6, 8]},
    "vector": {"dtype": "float32", "shape": [8]},
}


def moments(row: int) -> dict[str, torch.Tensor]:
    return {"mean": torch.full(SHAPE, float(row)), "std": torch.full(SHAPE, 0.25 * row).bfloat16()}


def embedding(row: int) -> dict[str, torch.Tensor]:
    return {"text": torch.full((6, 8), float(row)).bfloat16(), "vector": torch.full((8,), -float(row))}


@pytest.fixture
def table(tmp_path: Path) -> ClipTable:
    """Three clips of no frame rate, whose files are not there."""
    columns = {"path": ["a.mp4", "b.mp4", "c.mp4"], "text": [text[:-1] for text in CAPTIONS]}
    columns |= {"num_frames": [9] * 3, "height": [16] * 3, "width": [16] * 3, "fps": [0.0] * 3}
    pq.write_table(pa.table(columns), tmp_path / "clips.parquet")
    return ClipTable.open(tmp_path / "clips.parquet")


@pytest.fixture
def folder(tmp_path: Path, table: ClipTable) -> Path:
    """A store of the three clips in one view; the second could not be read."""
    store = tmp_path / "store"
    for kind, made, rows in ((LATENTS, moments, (0, 2)), (TEXTS, embedding, (0, 1, 2))):
        (store / kind).mkdir(parents=True)
        stacked = {name: torch.stack([made(row)[name] for row in rows]) for name in made(0)}
        write_tensors(shard_path(store, kind, 0), stacked)
    texts = np.array([text_hash(caption) for caption in CAPTIONS], np.uint64)
    entries: dict[str, Any] = {"view": [0] * 3, "sample": table.clip_ids, "row": range(3), "bucket": [0] * 3}
    entries |= {"num_frames": [9] * 3, "height": [16] * 3, "width": [16] * 3, "fps": [0.0] * 3, "text": texts}
    entries |= {"file_bytes": [-1] * 3, "file_mtime_ns": [-1] * 3, "file_digest": [0] * 3}
    entries |= {"shard": [0, -1, 0], "place": [0, -1, 1]}
    entries |= {"crc": [crc_of(moments(0)), 0, crc_of(moments(2))], "reason": ["", "no such file", ""]}
    crcs = [crc_of(embedding(row)) for row in range(3)]
    captions = {"text": texts, "shard": [0] * 3, "place": range(3), "crc": crcs, "caption": CAPTIONS}
    for kind, columns in ((LATENTS, entries), (TEXTS, captions)):
        arrays = {name: list(values) for name, values in columns.items()}
        pq.write_table(pa.table(arrays, schema=INDEX_SCHEMAS[kind]), store / kind / "000000.parquet")
    write_tensors(store / EMPTY_FILE, {name: value[None] for name, value in embedding(9).items()})
    facts = {"longtake_format": "latent store", "longtake_format_version": FORMAT_VERSION, "buckets": ["16px/5f/1:1"]}
    facts |= {"fingerprint": {"dataset.views": 1}, "latent": asdict(LATENT), "text_length": 6, "tensors": TENSORS}
    facts |= {"made": {"table": "0", "copies": "0", "weights": {}}, "windows": {"9": {"head1": 1}}}
    (store / STORE_FILE).write_text(json.dumps(facts))
    return store


def make(folder: Path, table: ClipTable, **options: Any) -> StoredDataset:
    config = DatasetConfig(data_path=str(table.source), views=1, latents=str(folder))
    return StoredDataset(
        LatentStore.open(folder), table, config, **{"seed": 7, "stage": 0, "latent": LATENT, "draws": DRAWS} | options
    )


def test_a_batch_carries_moments_embeddings_and_the_draw_of_its_pass(folder: Path, table: ClipTable) -> None:
    slot = make_slot(table, [2, 0], pass_index=3)
    batch = make(folder, table)[slot]
    for i, row in enumerate((2, 0)):
        for name, value in (moments(row) | embedding(row)).items():
            assert torch.equal(batch.encoded[name][i], value)
            assert batch.encoded[name].dtype == value.dtype
    drawn = normals(7, 0, Purpose.POSTERIOR, 3, slot.samples, int(np.prod(SHAPE)))
    assert torch.equal(batch.draws["posterior"], torch.from_numpy(drawn).reshape(2, *SHAPE))
    assert batch.video.numel() == 0
    assert batch.faults == ()


def test_a_clip_that_could_not_be_read_keeps_its_place_at_weight_0(folder: Path, table: ClipTable) -> None:
    batch = make(folder, table)[make_slot(table, [0, 1])]
    assert batch.weights.tolist() == [1, 0]
    assert [(fault.path, fault.reason) for fault in batch.faults] == [("b.mp4", "latent store: no such file")]
    assert not batch.encoded["mean"][1].any()
    known = make(folder, table, quarantined={int(table.clip_ids[1]): 0})[make_slot(table, [0, 1])]
    assert known.weights.tolist() == [1, 0]
    assert known.faults == ()


def damage_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_damaged_latents_cost_their_sample(folder: Path, table: ClipTable) -> None:
    damage_last_byte(shard_path(folder, LATENTS, 0))  # of the second row
    batch = make(folder, table)[make_slot(table, [0, 2])]
    assert batch.weights.tolist() == [1, 0]
    assert "row 1 of latents/000000.safetensors has another checksum" in batch.faults[0].reason


def test_a_damaged_caption_costs_its_sample_and_names_the_remedy(folder: Path, table: ClipTable) -> None:
    damage_last_byte(shard_path(folder, TEXTS, 0))  # of the third caption
    batch = make(folder, table)[make_slot(table, [0, 2])]
    assert batch.weights.tolist() == [1, 0]
    assert torch.equal(batch.encoded["text"][0], embedding(0)["text"])
    assert not batch.encoded["text"][1].any()
    (fault,) = batch.faults
    assert "row 2 of texts/000000.safetensors has another checksum" in fault.reason
    assert "`longtake data encode RUN -o FOLDER --mend`" in fault.reason
    assert make(folder, table)[make_slot(table, [1])].faults[0].reason == "latent store: no such file"


def test_a_sample_whose_caption_is_not_there_is_missing(folder: Path, table: ClipTable) -> None:
    index = folder / TEXTS / "000000.parquet"
    pq.write_table(pq.read_table(index).slice(0, 2), index)
    write_tensors(
        shard_path(folder, TEXTS, 0),
        {name: torch.stack([embedding(row)[name] for row in (0, 1)]) for name in embedding(0)},
    )
    dataset = make(folder, table)
    assert (dataset.source.find(0, table.clip_ids) < 0).tolist() == [False, False, True]
    assert dict(dataset[make_slot(table, [0, 2])].encoded) == {}
    assert set(dataset[make_slot(table, [0, 1])].encoded) == set(TENSORS)


@pytest.mark.parametrize("name", ["latents/000000.parquet", "texts/000000.parquet", "index.arrow", "texts.arrow"])
@pytest.mark.parametrize("part", [0.0, 0.6])
def test_a_file_of_the_index_that_is_cut_short_is_named_with_the_remedy(folder: Path, name: str, part: float) -> None:
    path = folder / name
    if path.suffix == ".arrow":
        kind = TEXTS if path.stem == "texts" else LATENTS
        with pa.ipc.new_file(path, INDEX_SCHEMAS[kind]) as writer:
            writer.write_table(pq.read_table(folder / kind / "000000.parquet"))
        LatentStore.open(folder)
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    with pytest.raises(UserError) as refused:
        LatentStore.open(folder)
    assert str(refused.value).startswith(f"{path}: cannot be read (")
    assert "`longtake data encode RUN -o FOLDER --mend`" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_damaged_description_is_said_or_makes_no_difference(folder: Path) -> None:
    def use() -> None:
        store = LatentStore.open(folder)
        _ = store.encoders, store.kinds, store.windows(9), store.samples(0), store.latents(0)
        store.texts(0, CAPTIONS[0])
        sized(store.latent_tensors(9, ()) | store.text_tensors(), LATENT, (9, 16, 16))

    contents = [*NO_OBJECTS, *map(str.encode, map(json.dumps, changed(json.loads((folder / STORE_FILE).read_text()))))]
    sentences: list[str] = []
    for content in contents:
        (folder / STORE_FILE).write_bytes(content)
        with suppress(UnusableLatents, DamagedShard):
            try:
                use()
            except UserError as error:
                sentences.append(str(error))
    assert len(sentences) > 0.6 * len(contents)
    assert all(sentence.startswith(str(folder)) and len(sentence) < 500 for sentence in sentences)


def test_a_damaged_empty_prompt_is_said(folder: Path) -> None:
    path = folder / EMPTY_FILE
    whole = path.read_bytes()
    facts = json.loads((folder / STORE_FILE).read_text())
    crc = crc_of({name: value[None] for name, value in embedding(9).items()})
    (folder / STORE_FILE).write_text(json.dumps(facts | {"empty_crc": crc}))
    assert LatentStore.open(folder).encoders.text_length == 6
    for damaged, said in ((whole[:-1], "cannot be read"), (whole[:-1] + b"?", "another checksum than when written")):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"empty\.safetensors: .*{said}.* --mend`"):
            _ = LatentStore.open(folder).encoders


def test_a_caption_that_was_not_encoded_is_a_mistake(folder: Path, table: ClipTable) -> None:
    columns = pq.read_table(table.source)
    other = table.source.with_name("other.parquet")
    pq.write_table(columns.set_column(1, "text", [["red", "green", "yellow"]]), other)
    dataset = make(folder, ClipTable.open(other))
    dataset[make_slot(table, [0])]
    with pytest.raises(UserError, match=r"the caption of c\.mp4 is 'yellow\.' now, which is not the one"):
        dataset[make_slot(table, [2])]


def test_a_slot_with_a_sample_that_is_missing_is_made_from_its_files(folder: Path, table: ClipTable) -> None:
    index = folder / LATENTS / "000000.parquet"
    pq.write_table(pq.read_table(index).slice(0, 2), index)
    shard = shard_path(folder, LATENTS, 0)
    write_tensors(shard, {name: value[None] for name, value in moments(0).items()})
    dataset = make(folder, table)
    assert dataset.source.find(0, table.clip_ids).tolist().count(-1) == 1
    batch = dataset[make_slot(table, [0, 2])]
    assert dict(batch.encoded) == {}
    assert [fault.path for fault in batch.faults] == ["a.mp4", "c.mp4"]  # there are no files


def test_each_view_has_entries_of_its_own_and_a_view_that_the_store_has_not_is_missing(
    folder: Path, table: ClipTable
) -> None:
    first = pq.read_table(folder / LATENTS / "000000.parquet")
    numbers = {"view": [1] * 3, "shard": [1, -1, 1]}
    second = pa.table({name: numbers.get(name, first[name]) for name in first.column_names}, first.schema)
    pq.write_table(second, folder / LATENTS / "000001.parquet")
    shutil.copy(shard_path(folder, LATENTS, 0), shard_path(folder, LATENTS, 1))
    facts = json.loads((folder / STORE_FILE).read_text())
    facts["fingerprint"]["dataset.views"] = 2
    (folder / STORE_FILE).write_text(json.dumps(facts))
    store = LatentStore.open(folder)
    found = [store.find(view, table.clip_ids).tolist() for view in range(3)]
    assert found[1] == [entry + 3 for entry in found[0]]
    assert sorted(found[0]) == [0, 1, 2]
    assert found[2] == [-1] * 3
