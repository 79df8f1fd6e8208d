"""Known frames in a store: which windows lie in it, what they hold, and that they are guarded like all else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longtake.contracts import UserError
from longtake.data.latents.dataset import StoredDataset
from longtake.data.latents.store import LatentStore
from longtake.data.loading.dataset import SlotDataset
from longtake.data.probing.probe import probe_table
from longtake.encode.plan import encode_inputs, make_plan
from longtake.encode.verify import verify_store
from longtake.system.encoders import build_encoders
from longtake.system.examples import windows_of
from longtake.train.config import RunConfig
from longtake.train.run_file import read_run
from tests.data.made_clips import encode
from tests.encode.stores import contents, make_store, open_table
from tests.encoders.conftest import described, weights
from tests.encoders.tiny_weights import CLIP_DIM, T5_DIM
from tests.train.runs import exact, train_here, write_config

__all__ = ["described", "weights"]
EMBED = ("--model.cond_embed", "True", "--condition_config.t2v", "1")
LOOP = (*EMBED, "--condition_config.i2v_loop", "1")
ROOT = Path(__file__).parents[2]


def test_windows_lie_with_the_clips_that_are_long_enough(config: Path, tmp_path: Path) -> None:
    make_store(config, tmp_path / "store", *LOOP)
    store = LatentStore.open(tmp_path / "store")
    assert store.kinds == ("i2v_loop",)
    assert [dict(store.windows(frames)) for frames in (1, 8, 16)] == [{}, {}, {"head1": 1, "tail1": 1}]
    found = set()
    for bucket, shard in zip(store.column("bucket").tolist(), store.column("shard").tolist(), strict=True):
        frames = int(store.buckets[bucket].split("/")[1].removesuffix("f"))
        found.add(frames)
        tensors = load_file(tmp_path / "store" / "latents" / f"{shard:06d}.safetensors")
        assert set(tensors) == {"mean", *(f"{window}.mean" for window in store.windows(frames))}
        for window, count in store.windows(frames).items():
            assert tensors[f"{window}.mean"].nbytes * 2 == tensors["mean"].nbytes * count, "of 2 latent frames"
    assert found == {1, 8, 16}


def test_a_window_is_what_the_encoders_make_of_its_pixels_alone(config: Path, tmp_path: Path) -> None:
    make_store(config, tmp_path / "store", *LOOP)
    run, opened = read_config(config, *LOOP), LatentStore.open(tmp_path / "store")
    settings: dict[str, Any] = {"seed": run.seed, "stage": 0, "latent": opened.encoders.latent}
    online = SlotDataset(open_table(config), run.dataset, **settings)
    stored = StoredDataset(opened, open_table(config), run.dataset, **settings, windows={16: ("tail1",)})
    inputs = encode_inputs(run.seed, run.dataset, run.bucket_rule, open_table(config), 0)
    plan = make_plan(inputs, online.texts)
    (slot,) = plan.slots(inputs.rule, 0, 2, 2)  # the plan begins with the longest clips
    batch = stored[replace(slot, weights=slot.weights * [1, 0])]
    assert {name for name in batch.encoded if "." in name} == {"tail1.mean"}, "no more than was asked for"
    last = build_encoders(run, torch.device("cpu")).posterior(online[slot].video[:1, :, -1:])["mean"]
    assert torch.equal(batch.encoded["tail1.mean"][:1], last)
    assert not batch.encoded["tail1.mean"][1].any(), "a filler has none"
    assert stored.batch_bytes(slot.bucket) >= sum(tensor.nbytes for tensor in batch.encoded.values())


def read_config(config: Path, *words: str) -> RunConfig:
    return read_run(str(config), ["--dataset.views", "2", *words]).value


def test_parts_and_interruptions_make_the_same_bytes(config: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    make_store(config, tmp_path / "whole", *LOOP)
    with pytest.raises(KeyboardInterrupt):
        make_store(config, tmp_path / "parts", *LOOP, part=(1, 2), progress=interrupt)
    for part in ((2, 2), (1, 2)):
        make_store(config, tmp_path / "parts", *LOOP, part=part)
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_a_store_begun_with_other_kinds_is_left_alone(config: Path, tmp_path: Path) -> None:
    make_store(config, tmp_path / "plain", part=(1, 2))
    with pytest.raises(UserError, match=r"kinds is \[\"i2v_loop\"\] here and nothing in the store"):
        make_store(config, tmp_path / "plain", *LOOP)
    make_store(config, tmp_path / "store", *LOOP, part=(1, 2))
    with pytest.raises(UserError, match=r"kinds is \[\"i2v_tail\"\] here and \[\"i2v_loop\"\] in the store"):
        make_store(config, tmp_path / "store", *EMBED, "--condition_config.i2v_tail", "1")


def test_a_store_made_before_there_were_windows_is_read_and_gone_on_with(config: Path, tmp_path: Path) -> None:
    make_store(config, tmp_path / "store", part=(1, 2))
    path = tmp_path / "store" / "store.json"
    facts = json.loads(path.read_text(encoding="utf-8"))
    del facts["windows"]
    path.write_text(json.dumps(facts), encoding="utf-8")
    assert LatentStore.open(tmp_path / "store").windows(16) == {}
    before = contents(tmp_path / "store")
    make_store(config, tmp_path / "store")
    make_store(config, tmp_path / "anew")
    after = contents(tmp_path / "store")
    assert after == contents(tmp_path / "anew")
    first = {name for name in before if name.endswith(".safetensors")}
    assert first < {name for name in after if name.endswith(".safetensors")}, "the second part was added to the first"


def test_a_flipped_bit_of_a_window_is_found_and_mended(config: Path, tmp_path: Path) -> None:
    make_store(config, tmp_path / "store", *LOOP)
    sound = contents(tmp_path / "store")
    path = min((tmp_path / "store" / "latents").glob("*.safetensors"))
    tensors = load_file(path)
    tensors["tail1.mean"].view(torch.uint8).flatten()[0] ^= 1
    save_file(tensors, path)
    found = verify_store(tmp_path / "store", open_table(config))
    assert len(found.damaged) == 1
    assert list(found.shards) == [("latents", int(path.stem))]
    make_store(config, tmp_path / "store", *LOOP, mend=found)
    assert contents(tmp_path / "store") == sound


KINDS = ("i2v_head", "i2v_tail", "i2v_loop", "v2v_head", "v2v_tail")


@pytest.mark.slow
def test_a_causal_autoencoder_with_a_random_posterior_trains_the_same_from_a_store(
    tmp_path: Path, described: dict[str, Any]
) -> None:
    """Of 10 latent frames (37 of a clip) the v2v kinds know 9; one sample to a batch and one thread: bit by bit."""
    for number in range(6):
        encode(tmp_path / f"{number}.mp4", count=40 + number, size=(32, 32))
    rows = "".join(f"{number}.mp4,a red circle\n" for number in range(6))
    (tmp_path / "clips.csv").write_text("path,text\n" + rows, encoding="utf-8")
    probe_table(tmp_path / "clips.csv", tmp_path / "clips.parquet")
    sizes = {"in_channels": 16, "patch_size": 2, "context_in_dim": T5_DIM, "vec_in_dim": CLIP_DIM, "cond_embed": True}
    sizes |= {"hidden_size": 36, "num_heads": 2, "axes_dim": (6, 6, 6), "depth": 1, "depth_single_blocks": 1}
    kinds = dict.fromkeys(KINDS, 1.0)
    buckets = {"32px": {5: (0.5, 1), 37: (1.0, 1)}}
    changes = {
        "model": sizes,
        "objective": {"predict": "velocity"},
        "bucket_config": buckets,
        "max_steps": 6,
        "cpu_threads": 1,
    }
    run = write_config(
        tmp_path, tmp_path / "clips.parquet", **described, **changes, condition_config=kinds, slots_per_step=1
    )
    assert make_store(run, tmp_path / "store").bad == 0
    assert dict(LatentStore.open(tmp_path / "store").windows(37)) == {"head1": 1, "tail1": 1, "head9": 9, "tail9": 9}
    views = ("--dataset.views", "2")
    online, _ = train_here(run, *views, "--exp-name", "online")
    stored, said = train_here(run, *views, "--dataset.latents", str(tmp_path / "store"), "--exp-name", "stored")
    assert "no encoder is loaded" in said
    assert exact(stored.folder) == exact(online.folder)


def test_the_page_says_what_the_presets_windows_cost() -> None:
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    for stage in ("stage1_i2v", "stage2_i2v"):
        run = read_run(
            str(ROOT / "configs" / "opensora_v2" / "train" / f"{stage}.py"), ["--dataset.data-path", "x"]
        ).value
        latent = run.ae.latent
        windows = windows_of(run, run.condition_config, run.bucket_rule.buckets, latent)
        for length in (33, 129):
            shape = next(bucket.shape for bucket in run.bucket_rule.buckets if bucket.shape[0] == length)
            frames = latent(*shape)[1]
            more = sum(len(window.frames) for window in windows[length].values())
            assert f"| {length} | {frames} | {more} | {100 * more / frames:.0f} % |" in page, (stage, length)
