"""A run and its loader's processes: their deaths, their memory, and the garbage collector, change no bit of it."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from longtake.contracts import Batch, Slot, UserError
from longtake.data.loading.dataset import SlotDataset
from longtake.data.loading.loader import SlotLoader
from longtake.train import loop, record
from longtake.train.loop import collected_by_hand
from tests.data.sources import die
from tests.train.runs import PATIENCE_SECONDS, assert_same_bits, exact, metrics, train_here, write_config


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, clips: Path) -> Path:
    """The folder of a run that makes its batches by itself."""
    return train_here(write_config(tmp_path_factory.mktemp("undisturbed"), clips))[0].folder


def assert_undisturbed(folder: Path, undisturbed: Path) -> None:
    assert exact(folder) == exact(undisturbed)
    (ours,), (theirs,) = (list(path.glob("epoch*-global_step8")) for path in (folder, undisturbed))
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTRAP, marks=pytest.mark.slow)])
def test_a_run_whose_workers_are_killed_under_way_is_the_same_run(
    config: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    push, victims = record.Recorder.push, []

    def kill_one(self: record.Recorder, step: record.StepRecord) -> bool:
        if step.clock.global_step in (1, 2, 6):
            victim = next(one for one in multiprocessing.active_children() if one.name == "data worker")
            victims.append(victim.pid)
            os.kill(victim.pid, number)
            victim.join(PATIENCE_SECONDS)  # dead before the last slots are handed out: somebody must miss it
        return push(self, step)

    monkeypatch.setattr(record.Recorder, "push", kill_one)
    outcome, said = train_here(config, "--num-workers", "2")
    assert len(set(victims)) == 3
    for victim in victims:
        assert f"data worker (pid {victim}) was killed by {number.name}; another one takes its place" in said
    assert_undisturbed(outcome.folder, undisturbed)
    assert not (outcome.folder / "quarantine.jsonl").exists()


def test_a_clip_that_crashes_the_decoder_costs_that_clip(
    tmp_path: Path, config: Path, clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is the one in which another program could not read that clip."""
    read = SlotDataset.__getitem__

    def deadly(self: SlotDataset, slot: Slot) -> Batch:
        tried = [self.table.written_path(row) for row in slot.rows[slot.weights > 0].tolist()]
        if "clips/clip_00003.mp4" in tried:
            die(signal.SIGBUS)
        return read(self, slot)

    monkeypatch.setattr(SlotDataset, "__getitem__", deadly)
    outcome, _ = train_here(config, "--num-workers", "2", "--max-steps", "6")
    monkeypatch.undo()
    (line,) = [json.loads(text) for text in (outcome.folder / "quarantine.jsonl").read_text().splitlines()]
    assert line["path"] == "clips/clip_00003.mp4"
    assert line["reason"] == "reading it kills the data worker (killed by SIGBUS)"
    assert line["pass_index"] == 0

    other = write_config(tmp_path / "other", clips)
    started, _ = train_here(other, "--start-step", "99", "--epochs", "1")  # a checkpoint of step 0
    (started.folder / "quarantine.jsonl").write_text(json.dumps(line) + "\n")
    again, _ = train_here(started.folder, "--epochs", "2", "--start-epoch", "0", "--max-steps", "6")
    assert exact(again.folder) == exact(outcome.folder)


@pytest.mark.slow
def test_a_bound_on_memory_changes_no_bit(config: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = []
    close = SlotLoader.close

    def note(self: SlotLoader) -> None:
        peaks.append((self.peak_bytes, self.limit_bytes))
        close(self)

    monkeypatch.setattr(SlotLoader, "close", note)
    words = ("--num-workers", "2", "--prefetch-factor", "4", "--dataset.max-host-gb")
    free, _ = train_here(config, *words, "1")
    tight, _ = train_here(config, *words, "0.0006")
    (free_peak, free_limit), (tight_peak, tight_limit) = peaks
    assert (free_limit, tight_limit) == (1_000_000_000, 600_000)
    assert tight_peak <= tight_limit < free_peak
    for outcome in (free, tight):
        assert_undisturbed(outcome.folder, undisturbed)


# Garbage


@pytest.mark.usefixtures("own_collector")
def test_garbage_is_collected_at_the_steps_asked_for_and_at_no_other_moment(
    config: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bool]] = []
    step = 0
    push = record.Recorder.push

    def note_step(self: record.Recorder, made: record.StepRecord) -> bool:
        nonlocal step
        step = made.clock.global_step
        return push(self, made)

    def note(phase: str, info: dict) -> None:
        if phase == "start" and step:
            seen.append((step, gc.isenabled()))

    monkeypatch.setattr(record.Recorder, "push", note_step)
    monkeypatch.setattr(loop.gc, "unfreeze", lambda: gc.callbacks.remove(note))  # the end of training
    gc.callbacks.append(note)
    outcome, _ = train_here(config, "--gc-every", "3")
    monkeypatch.undo()
    gc.unfreeze()
    assert seen == [(3, False), (6, False)]
    assert gc.isenabled()
    assert_undisturbed(outcome.folder, undisturbed)


@pytest.mark.usefixtures("own_collector")
@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_given_back_as_it_was_also_after_an_error(enabled: bool) -> None:
    def fail() -> None:
        with collected_by_hand(10):
            assert not gc.isenabled()
            assert gc.get_freeze_count() > 0
            raise KeyError

    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError):
            fail()
        assert gc.isenabled() == enabled
        assert gc.get_freeze_count() == 0
        with collected_by_hand(0) as collect:
            collect(0)
            assert gc.isenabled() == enabled
            assert gc.get_freeze_count() == 0
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.usefixtures("own_collector")
def test_a_run_that_fails_gives_the_collector_back(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: SlotDataset, slot: Slot) -> Batch:
        raise UserError("ours")

    monkeypatch.setattr(SlotDataset, "__getitem__", broken)
    with pytest.raises(UserError, match="ours"):
        train_here(config, "--num-workers", "1")
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert metrics(config.parent / "outputs" / "tiny") == []
