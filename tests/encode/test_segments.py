"""Clips with a caption for each segment, and masks of captions: from the table into a store and out of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from longtake.data.latents.dataset import StoredDataset
from longtake.data.latents.store import LatentStore
from longtake.data.loading.dataset import SlotDataset
from longtake.data.rules import MASK
from longtake.data.tables.mix import open_clips
from longtake.encode.auto import store_size
from longtake.encode.plan import EncodePlan
from longtake.families import registry
from longtake.families.opensora_v2 import OPENSORA_V2
from longtake.families.record import Text
from longtake.system.encoders import build_encoders
from longtake.train.run_file import read_run
from tests.data.made_clips import DRAWS
from tests.encode.stores import contents, make_store
from tests.train.runs import write_config

WRONG = 3  # a row with a caption too many


def segments(num_frames: int) -> int:
    return max(1, num_frames // 8)


@pytest.fixture
def config(tmp_path: Path, clips: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of a family that wants a caption for each 8 frames and is told which tokens count; clips share some."""
    texts = (Text("t5", "text", masked=True), Text("clip", "vector", pooled=True))
    family = replace(OPENSORA_V2, segments=lambda config: segments, texts=texts)
    monkeypatch.setitem(registry._FAMILIES, OPENSORA_V2.model, family)
    table = pq.read_table(clips)
    cells = []
    for row, count in enumerate(table["num_frames"].to_pylist()):
        needed = segments(min(count, 16)) + (row == WRONG)
        parts = ["a scene opens", f"{('red', 'blue', 'green', 'grey')[row % 4]} moves", "too much"][-needed:]
        cells.append(parts[0] if row % 2 and needed == 1 else json.dumps(parts))
    folder = tmp_path / "told"
    folder.mkdir()
    place = table.schema.get_field_index("text")
    root = [str(clips.parent / path) for path in table["path"].to_pylist()]
    table = table.set_column(place, "text", pa.array(cells)).set_column(
        table.schema.get_field_index("path"), "path", pa.array(root)
    )
    pq.write_table(table, folder / "clips.parquet")
    return write_config(tmp_path, folder / "clips.parquet")


def test_a_batch_from_the_store_has_the_captions_of_segments_and_masks_bit_for_bit(
    config: Path, tmp_path: Path
) -> None:
    make_store(config, tmp_path / "store")
    run = read_run(str(config), ["--dataset.views", "2", "--dataset.latents", str(tmp_path / "store")]).value
    store, table = LatentStore.open(tmp_path / "store"), open_clips(run.dataset)
    captions = pq.read_table(tmp_path / "store" / "texts.parquet")["caption"].to_pylist()
    assert len(set(captions)) == len(captions) < len(table), "each different caption of a segment once"
    encoders = build_encoders(run, torch.device("cpu"))
    settings = {"seed": run.seed, "stage": 0, "latent": store.encoders.latent, "draws": DRAWS}
    settings |= {"rules": run.sample_rules, "law": run.bucket_rule}
    online, stored = SlotDataset(table, run.dataset, **settings), StoredDataset(store, table, run.dataset, **settings)
    plan = EncodePlan.read(tmp_path / "store" / "plan.arrow", store.facts)
    seen = set()
    for entry in range(0, len(plan), 3):
        (slot,) = plan.slots(run.bucket_rule, entry, entry + 1)
        pixels, latents = online[slot], stored[slot]
        seen.add(slot.bucket.num_frames)
        assert latents.text == pixels.text
        assert len(pixels.text[0]) == segments(slot.bucket.num_frames)
        assert torch.equal(latents.weights, pixels.weights)
        embedded = encoders.embed(pixels.text)
        assert set(embedded) == {"text", "text" + MASK, "vector"}
        assert sum(tensor.nbytes for tensor in latents.encoded.values()) <= stored.batch_bytes(slot.bucket)
        if pixels.weights.any():
            for name, value in embedded.items():
                assert latents.encoded[name].dtype == value.dtype
                assert torch.equal(latents.encoded[name], value), name
    assert seen == {1, 8, 16}


def test_a_clip_with_a_caption_too_many_is_left_out_with_the_reason_online_and_stored(
    config: Path, tmp_path: Path
) -> None:
    make_store(config, tmp_path / "store")
    run = read_run(str(config), ["--dataset.views", "2", "--dataset.latents", str(tmp_path / "store")]).value
    store, table = LatentStore.open(tmp_path / "store"), open_clips(run.dataset)
    plan = EncodePlan.read(tmp_path / "store" / "plan.arrow", store.facts)
    entry = int(np.flatnonzero(plan.row == WRONG)[0])
    (slot,) = plan.slots(run.bucket_rule, entry, entry + 1)
    settings = {"seed": run.seed, "stage": 0, "latent": store.encoders.latent, "rules": run.sample_rules}
    needed = segments(slot.bucket.num_frames)
    for made in (SlotDataset(table, run.dataset, **settings), StoredDataset(store, table, run.dataset, **settings)):
        batch = made[slot]
        assert batch.weights.tolist() == [0]
        (fault,) = batch.faults
        assert fault.path == table.written_path(WRONG)
        assert f"captions found: {needed + 1}, needed: {needed}" in fault.reason


def test_parts_make_the_same_bytes_and_a_sample_is_there_once_all_its_captions_are(
    config: Path, tmp_path: Path
) -> None:
    options = {"shard_bytes": 2000}  # small, so that a part has some captions of a clip and lacks others
    make_store(config, tmp_path / "whole", **options)
    make_store(config, tmp_path / "parts", part=(1, 2), **options)
    half = LatentStore.open(tmp_path / "parts")
    texts = set(half._index["texts"]["text"].tolist())
    plan = EncodePlan.read(tmp_path / "parts" / "plan.arrow", half.facts)
    parts = dict(zip(plan.text.tolist(), plan.parts.to_pylist(), strict=True))
    samples, mine = half.column("sample"), half.column("view") == 0
    expected = [set(parts[int(text)]) <= texts for text in half.column("text")[mine]]
    assert (half.find(0, samples[mine]) >= 0).tolist() == expected
    assert 0 < sum(expected) < len(expected)
    make_store(config, tmp_path / "parts", part=(2, 2), **options)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_the_size_of_a_store_is_told_with_a_caption_for_each_segment(config: Path) -> None:
    run = read_run(str(config), ["--dataset.views", "2"]).value
    table = open_clips(run.dataset)
    told = store_size(run, run.dataset, run.bucket_rule, 0, table)
    captions = sum(segments(min(count, 16)) for count in table.num_frames.tolist())
    assert told.text_bytes == captions * (run.t5.max_length * run.t5.dim + run.clip.dim) * 4
