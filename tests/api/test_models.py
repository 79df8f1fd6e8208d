"""`load`, `Model` and `batches`: the loss and the order of training, weights and adapters on disk."""

from __future__ import annotations

import gc
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import longtake
from longtake.buckets.dealing import step_digest
from longtake.system.export import export_adapters, export_merged
from tests.api.objectives import Huber
from tests.api.test_runs import process_state

LORA = {"lora": {"rank": 4}}


def metrics(run: longtake.Run) -> list[dict[str, Any]]:
    lines = (Path(run.source) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if "digest" in line]


@pytest.mark.parametrize("objective", [None, Huber])
def test_batches_and_their_loss_are_those_of_the_training(run: longtake.Run, objective: Any) -> None:
    before = process_state()
    run = run.set(max_steps=8, lr=1e-12, warmup_steps=0)  # weights stay, so every loss of the log can be computed
    model = longtake.load(run, objective)
    digests: list[str] = []
    losses: list[float] = []
    with torch.no_grad():
        for epoch in range(2):
            for step in longtake.batches(run, epoch, objective).steps():
                step_batches = list(step.batches)
                assert [b.keys.tolist() for b in step_batches] == [slot.keys.tolist() for slot in step.slots]
                digests.append(f"{step_digest(step.slots):016x}")
                losses.append(float(sum(map(model.loss, step_batches))) / step.loss_divisor)
    assert process_state() == before
    logged = metrics(run.train(objective=objective))
    assert digests == [line["digest"] for line in logged]
    assert losses == pytest.approx([line["loss"] for line in logged], rel=1e-5)


def test_own_loop_lowers_the_loss_without_a_process_group(run: longtake.Run) -> None:
    model = longtake.load(run)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    means = []
    for epoch in range(3):
        losses = []
        for batch in longtake.batches(run, epoch):
            loss = model.loss(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
    assert not dist.is_initialized()
    assert means[2] < means[0]


def test_batches_that_are_left_early_end_their_workers(run: longtake.Run) -> None:
    for batch in longtake.batches(run.set(num_workers=1)):
        assert batch.video.shape[0] == batch.bucket.batch_size
        break
    gc.collect()
    assert not multiprocessing.active_children()


def test_batches_of_a_wrong_epoch_or_of_latents_to_be_made_are_refused(run: longtake.Run) -> None:
    with pytest.raises(longtake.Error, match="epoch = -1"):
        longtake.batches(run, epoch=-1)
    with pytest.raises(longtake.Error, match=r"dataset\.latents"):
        next(iter(longtake.batches(run.set({"dataset.latents": "auto"}))))


def test_saved_weights_load_equal_and_are_not_overwritten(run: longtake.Run, tmp_path: Path) -> None:
    trained = run.set(max_steps=2, ema_decay=None).train()
    model = longtake.load(trained.source)
    assert not torch.equal(model.parameters()[0], longtake.load(run).parameters()[0])
    path = model.save(tmp_path / "weights.safetensors")
    again = longtake.load(path)
    for (name, one), (_, other) in zip(
        model.denoiser.named_parameters(), again.denoiser.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    content = path.read_bytes()
    with pytest.raises(longtake.Error):
        model.save(path)
    assert path.read_bytes() == content


def test_adapter_on_the_base_equals_the_trained_run_and_saves_merged(run: longtake.Run, tmp_path: Path) -> None:
    base = longtake.load(run).save(tmp_path / "base.safetensors")
    start = run.set({"model.from_pretrained": base})
    trained = start.set(LORA, max_steps=3, ema_decay=None, lr=0.1).train()
    assert trained.checkpoint is not None
    adapters = export_adapters(str(trained.checkpoint), tmp_path / "adapters", "peft", part="model")
    whole = longtake.load(export_merged(str(trained.checkpoint), tmp_path / "merged.safetensors", part="model"))
    model = longtake.load(start)
    batch = next(iter(longtake.batches(run)))
    with torch.no_grad():
        plain = model.loss(batch)
        model.load_adapter(adapters)
        adapted = model.loss(batch)
        assert adapted != plain
        torch.testing.assert_close(adapted, longtake.load(trained).loss(batch))
        saved = longtake.load(model.save(tmp_path / "own.safetensors"))
    for name, weight in whole.denoiser.named_parameters():
        torch.testing.assert_close(saved.denoiser.get_parameter(name), weight, msg=name)
    with pytest.raises(longtake.Error, match="without adapters"):
        model.load_adapter(adapters)


def test_load_of_a_missing_file_names_it(tmp_path: Path) -> None:
    for path in (tmp_path / "none.safetensors", tmp_path / "none"):
        with pytest.raises(longtake.Error, match="none"):
            longtake.load(path)
