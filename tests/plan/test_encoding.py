"""Encoders in a plan: what they hold, what they take, and where they are none."""

from __future__ import annotations

from typing import Any

import pytest

from longtake.contracts import Bucket
from longtake.encoders.autoencoder_config import HunyuanVAEConfig
from longtake.encoders.config import T5EncoderConfig
from longtake.encoders.cost import EncodeCost, autoencoder_cost, seen, text_cost
from longtake.plan import work
from longtake.plan.layout import Layout
from longtake.plan.machine import Machine
from longtake.plan.memory import forecast_memory
from longtake.plan.report import entry_head, entry_rows, plan_json
from longtake.plan.run import RunPlan, plan_run
from longtake.plan.work import read_layout, read_work
from longtake.presets import find_preset
from longtake.track.devices import gpu_named
from longtake.train.config import RunWithoutTable
from longtake.train.run_file import read_run
from tests.plan.runs import run_config

MACHINE = Machine(gpu_named("h200"), efficiency=0.4)
LEARNED: dict[str, Any] = {
    "ae": {"type": "hunyuan_vae"},
    "t5": {"type": "text_embedder"},
    "clip": {"type": "text_embedder"},
    "bucket_config": {"256px": {1: (1.0, 45), 33: (1.0, 12), 129: (1.0, 3)}, "768px": {65: (1.0, 1)}},
}
MODEL = {"in_channels": 64, "patch_size": 2, "context_in_dim": 4096, "vec_in_dim": 768}
EMBEDDED = 512 * 4096 * 2 + 768 * 2  # bytes of a caption by T5 and CLIP
CONTROL = ("cogvideox_fun/full_2b", "cogvideox_fun/control")
RATE = MACHINE.gpu.peak_flops * 0.4


def video_cost(bucket: Bucket, batch: int) -> EncodeCost:
    return autoencoder_cost(HunyuanVAEConfig(), bucket.shape, batch)


def caption_cost(batch: int) -> EncodeCost:
    return text_cost(seen(T5EncoderConfig()), batch)


def planned(gpus: int = 8, **changes: Any) -> RunPlan:
    return plan_run(run_config(**{**LEARNED, "model": MODEL, **changes}), gpus, MACHINE)


def test_a_table_says_what_encoding_takes() -> None:
    plan = planned()
    head = entry_head(plan)
    for entry, row in zip(plan.entries, entry_rows(plan), strict=True):
        batch = entry.bucket.batch_size
        video, text = video_cost(entry.bucket, batch), caption_cost(batch)
        assert entry.time.encoding == pytest.approx((video.flops + text.flops) / RATE, rel=0.01)  # CLIP is small
        assert entry.encoding_bytes >= max(video.rank_bytes(), text.rank_bytes())
        assert entry.memory.total >= entry.encoding_bytes + entry.memory.encoders
        assert row[head.index("encode GiB")] == f"{entry.encoding_bytes / 2**30:.2f}"
        assert row[head.index("encode s")] == f"{entry.time.encoding:.3g}"
        found = plan_json(plan)["buckets"][entry.name]
        assert found["encoding_bytes"] == entry.encoding_bytes
        assert found["seconds"]["encoding"] == entry.time.encoding
        assert found["seconds"]["total"] > found["seconds"]["encoding"]


def test_encoding_can_be_the_worst_moment() -> None:
    small = {**MODEL, "hidden_size": 64, "num_heads": 2, "axes_dim": (8, 12, 12), "depth": 1, "depth_single_blocks": 1}
    plan = planned(model=small)
    longest = next(entry for entry in plan.entries if entry.name == "256px/129f")
    assert longest.memory.activations == longest.encoding_bytes


def test_peers_share_a_video_and_one_of_them_embeds_its_caption() -> None:
    alone, shared = (planned(parallel={"sequence": sequence}).entries[0] for sequence in (1, 4))
    assert alone.name == shared.name == "768px/65f"
    video, text = video_cost(alone.bucket, 1), caption_cost(1)
    assert shared.time.encoding == pytest.approx((video.rank_flops(4) + text.flops) / RATE, rel=0.01)
    assert alone.time.encoding == pytest.approx((video.flops + text.flops) / RATE, rel=0.01)
    assert alone.encoding_bytes == shared.encoding_bytes + EMBEDDED  # which waits where no peer shares it


def test_peers_share_captions_by_their_number() -> None:
    still = {"bucket_config": {"64px": {1: (1.0, 45)}}}
    degrees = ((1, 1, 45), (4, 1, 12), (2, 4, 6))
    for sequence, tensor, captions in degrees:
        (entry,) = planned(**still, parallel={"sequence": sequence, "tensor": tensor}).entries
        video, text = video_cost(entry.bucket, 45).rank_flops(sequence * tensor), caption_cost(captions)
        assert entry.time.encoding == pytest.approx((video + text.flops) / RATE, rel=0.01)
        embeddings = 45 * 512 * 4096 * (2 + 4)  # of all captions, which every rank has in the end
        assert entry.encoding_bytes == pytest.approx(max(text.rank_bytes(), embeddings), rel=0.01)
        assert entry.memory.encoders == planned(**still).entries[0].memory.encoders


def test_the_forecast_of_the_stage_has_it_in() -> None:
    with_encoders, stored = planned(), planned(dataset={"latents": "store", "views": 2})
    seconds = [entry.time.encoding for entry in with_encoders.entries]
    more = with_encoders.forecast.step_seconds - stored.forecast.step_seconds
    assert more == pytest.approx(sum(seconds) / len(seconds), rel=0.01)


def test_stored_latents_and_folded_pixels_take_nothing() -> None:
    for plan in (planned(dataset={"latents": "store", "views": 2}), plan_run(run_config(), 1, MACHINE)):
        assert not plan.encodes
        assert "encode s" not in entry_head(plan)
        assert {entry.time.encoding for entry in plan.entries} == {0.0}
        assert {entry.memory.encoders for entry in plan.entries} == {0}


def test_a_store_that_is_filled_up_on_the_way_still_needs_the_memory() -> None:
    some = planned(dataset={"latents": "store", "views": 2, "latents_missing": "online"})
    assert not some.encodes
    for apart, ahead in zip(some.entries, planned().entries, strict=True):
        waiting = ahead.bucket.batch_size * EMBEDDED
        assert ahead.encoding_bytes == apart.encoding_bytes + waiting


def test_captions_that_are_embedded_ahead_wait_throughout_the_step() -> None:
    found = {}
    for placement in ("resident", "sharded"):
        t5 = {"type": "text_embedder", "placement": placement}
        work = read_work(run_config(**{**LEARNED, "model": MODEL, "t5": t5}))
        long, still = (next(b for b in work.entries if b.batch_size == size) for size in (3, 45))
        for count in (1, 2):
            layout = Layout(micro_batches=count)
            found[placement, count] = [work.captions_ahead(bucket, layout) for bucket in (long, still)]
        assert work.captions_ahead(long, Layout(sequence=2)) == 0
    # those of two micro-batches go into one pass as far as it takes them
    assert (found["resident", 1], found["resident", 2]) == ([3, 45], [32, 45])
    assert found["sharded", 1] == found["sharded", 2] == [0, 0]
    without, waiting = (work.micro_batch(long, ahead=ahead) for ahead in (0, 32))
    assert waiting.waiting_bytes == 32 * EMBEDDED
    less, more = (forecast_memory(work.model, sizes, Layout()).total for sizes in (without, waiting))
    assert more == less + 32 * EMBEDDED


def test_a_control_video_is_encoded_as_its_clip_is() -> None:
    words = ("--dataset.data-path", "clips.parquet")
    runs = (read_run(str(find_preset(name)), words, RunWithoutTable).value for name in CONTROL)
    alone, with_control = (read_work(run).encoder_work(run.bucket_rule.buckets[0], 1, 1) for run in runs)
    assert with_control.convolutions == 2 * alone.convolutions > 0
    assert with_control.products == alone.products


def test_a_probe_leaves_encoders_out() -> None:
    config = run_config(**{**LEARNED, "model": MODEL})
    work, layout = read_work(config), read_layout(config, 1, 8)
    bare = read_work(
        config.model_copy(update={"dataset": config.dataset.model_copy(update={"latents": "store", "views": 2})})
    )
    for bucket in work.entries:
        assert work.memory(bucket, layout, encodes=False) == bare.memory(bucket, layout)


def test_captions_are_counted_once_for_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of entries: a plan of 1,025 took two minutes when each forecast counted those of all."""
    counted: list[int] = []
    monkeypatch.setattr(work, "captions_of_sample", lambda _, frames: counted.append(frames) or 1)
    planned()
    assert sorted(counted) == [1, 33, 65, 129]
