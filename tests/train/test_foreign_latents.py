"""Latents and embeddings of another program, named by a JSONL: they train as the encoders' own, and run no code."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from longtake.contracts import Slot, UserError
from longtake.data.clips.video import write_video
from longtake.data.latents.dataset import StoredDataset
from longtake.data.latents.source import read_list
from longtake.data.loading.dataset import SlotDataset
from longtake.data.probing.probe import probe_table
from longtake.data.tables.mix import open_clips
from longtake.data.tables.table import ClipTable
from longtake.families import registry
from longtake.families.opensora_v2 import OPENSORA_V2
from longtake.system.encoders import build_encoders
from longtake.train.config import RunConfig
from longtake.train.run_file import read_run
from tests.data.made_clips import noise_frames
from tests.families.everything import EVERYTHING
from tests.families.runs import write_family
from tests.train.runs import exact, train_here, write_config

COUNT = 8
Tensors = Mapping[str, torch.Tensor]
FRAMES = {"opensora_v2": 16, "everything": 17}


@pytest.fixture
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Clips as long as their bucket, and beside them what the encoders make of them, in files of another form."""
    sources = {"*.jsonl": "tests.families.everything:open_list"}
    family = replace(getattr(request, "param", OPENSORA_V2), sources=sources, bucket_rule=None)  # all clips of one size
    monkeypatch.setitem(registry._FAMILIES, family.model, family)
    for row in range(COUNT):
        write_video(tmp_path / f"{row}.mp4", noise_frames(FRAMES[family.name], 32, 32, seed=row), 12)
    columns = {"path": [f"{row}.mp4" for row in range(COUNT)], "text": [f"clip {row}" for row in range(COUNT)]}
    pq.write_table(pa.table(columns), tmp_path / "list.parquet")
    probe_table(tmp_path / "list.parquet", tmp_path / "clips.parquet")
    changes = {"bucket_config": {"32px_ar1:1": {FRAMES[family.name]: (1.0, 2)}}}
    if family.name == "everything":  # nothing is known: the program in question has no latents of windows
        config = write_family(tmp_path, tmp_path / "clips.parquet", "everything", **changes, condition_config=None)
    else:
        config = write_config(tmp_path, tmp_path / "clips.parquet", **changes)
    run = read_run(str(config)).value
    table, encoders = open_clips(run.dataset, run.sample_rules.columns), build_encoders(run, torch.device("cpu"))
    options = {"latent": encoders.autoencoder.latent, "rules": run.sample_rules}
    online, clips = SlotDataset(table, run.dataset, seed=0, stage=0, **options), {}
    for row in range(COUNT):
        batch = online[slot_of(run, table, row)]
        found = encoders.posterior(batch.video) | encoders.companions(run.sample_rules.companions, batch.companions)
        tensors = (found, encoders.embed(batch.text))
        clips[str(row)] = tuple({name: value[0] for name, value in one.items()} for one in tensors)
    write_list(tmp_path, clips, encoders.embed_nothing())
    return config


def write_clip(folder: Path, name: str, latents: Tensors, texts: Tensors) -> dict[str, str]:
    """The files of one clip, `latents` [C, F, h, w]; its line."""
    torch.save({key: value.transpose(0, 1).contiguous() for key, value in latents.items()}, folder / f"{name}.pt")
    save_file({key: value.contiguous() for key, value in texts.items()}, folder / f"{name}.safetensors")
    return {"clip": f"{name}.mp4", "vid_emb": f"{name}.pt", "text_emb": f"{name}.safetensors"}


def write_list(folder: Path, clips: Mapping[str, tuple[Tensors, Tensors]], empty: Tensors) -> None:
    """`embeddings.jsonl` and its files."""
    lines = [write_clip(folder, name, *clip) for name, clip in clips.items()]
    torch.save(dict(empty), folder / "empty.pt")
    (folder / "embeddings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def slot_of(run: RunConfig, table: ClipTable, row: int) -> Slot:
    bucket, rows = replace(run.bucket_rule.buckets[0], batch_size=1), np.array([row])
    return Slot(bucket, 0, rows, table.clip_ids[rows], table.clip_ids[rows], np.ones(1, np.float32))


def train(config: Path, name: str, *words: str) -> list[tuple[int, str, str]]:
    words = ("--exp_name", name, "--dataset.views", "1", "--max_steps", "3", *words)
    return exact(train_here(config, *words)[0].folder)


def stored(config: Path, folder: Path) -> tuple[RunConfig, ClipTable, StoredDataset]:
    words = ["--dataset.views", "1", "--dataset.latents", str(folder / "embeddings.jsonl")]
    run = read_run(str(config), words).value
    table = open_clips(run.dataset, run.sample_rules.columns)
    source = run.family.source_of("embeddings.jsonl")(run, table)
    options = {"seed": run.seed, "stage": 0, "latent": source.encoders.latent, "rules": run.sample_rules}
    return run, table, StoredDataset(source, table, run.dataset, **options)


@pytest.mark.parametrize("config", [OPENSORA_V2, EVERYTHING], indirect=True, ids=lambda family: family.name)
def test_a_run_from_anothers_files_is_the_run_with_encoders(config: Path, tmp_path: Path) -> None:
    listed = ("--dataset.latents", str(tmp_path / "embeddings.jsonl"))
    assert train(config, "listed", *listed) == train(config, "online")


def test_clips_that_are_not_listed_are_counted_and_refused_or_encoded_here(config: Path, tmp_path: Path) -> None:
    path = tmp_path / "embeddings.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-3]))
    with pytest.raises(UserError, match=r"embeddings\.jsonl'?: 3 of the 8 samples that the run asks for are not in it"):
        train(config, "refused", "--dataset.latents", str(path))
    words = ("--dataset.latents", str(path), "--dataset.latents_missing", "online")
    assert train(config, "some", *words) == train(config, "online")


class Code:
    """Runs code when a plain unpickler reads it."""

    def __reduce__(self) -> tuple:
        return partial(Path.touch), (Path("ran"),)


def test_files_that_cannot_be_used_cost_their_clips_and_nothing_in_them_is_run(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run, table, dataset = stored(config, tmp_path)
    (tmp_path / "0.pt").unlink()
    (tmp_path / "1.pt").write_bytes(pickle.dumps(Code(), 2))
    torch.save({"mean": torch.zeros(3, 5, 4, 4)}, tmp_path / "2.pt")
    torch.save({"mean": 1}, tmp_path / "3.pt")
    (tmp_path / "4.safetensors").write_bytes(b"none")
    save_file({"text": torch.zeros(8, 16)}, tmp_path / "5.safetensors")
    reasons = [dataset[slot_of(run, table, row)].faults[0].reason for row in range(6)]
    expected = [
        "no such file",
        "as plain tensors",
        "needs [",
        "of another form",
        "cannot be read",
        "'vector' is missing",
    ]
    for reason, part in zip(reasons, expected, strict=True):
        assert part in reason
    assert not (tmp_path / "ran").exists()
    assert dataset[slot_of(run, table, 6)].weights.tolist() == [1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"clip": "a"}\n\n{"clip": \n', "list.jsonl:3: not JSON"),
        ('{"clip": "a"}\n{"clip": "a"}\n', "clip = 'a' occurs twice"),
        ("[1]\n", "list.jsonl:1: a list"),
        (None, "cannot be read"),
    ],
)
def test_a_list_that_is_none_is_said_in_a_sentence(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "list.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=said):
        read_list(path, "clip", ["a"])
