"""Saving in a run: in the background or not, what is kept, what is not trained, signals, restarts by torchrun."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longtake.checkpoint.contents import inspect
from longtake.checkpoint.folder import verify
from longtake.checkpoint.frozen import keep_frozen
from longtake.contracts import UserError
from longtake.system.build import System
from longtake.train import run, saving
from tests.train.runs import (
    PATIENCE_SECONDS,
    _descendants,
    assert_same_bits,
    exact,
    finish,
    kill,
    metrics,
    pausing,
    start,
    state_of,
    steps_saved,
    train_here,
    wait_until,
    write_config,
)


def test_both_ways_of_saving_give_the_same_checkpoints(tmp_path: Path, clips: Path) -> None:
    folders = []
    for name, async_io in (("beside", True), ("waiting", False)):
        config = write_config(tmp_path / name, clips, ckpt_every=3, async_io=async_io)
        folders.append(train_here(config)[0].folder)
    assert steps_saved(folders[0]) == steps_saved(folders[1]) == [3, 6, 8]
    for path in folders[0].glob("epoch*"):
        assert verify(path) == []
        assert_same_bits(path, folders[1] / path.name)


@pytest.mark.parametrize("async_io", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_newest_and_every_so_many_are_kept(tmp_path: Path, clips: Path, async_io: bool) -> None:
    config = write_config(tmp_path, clips, ckpt_every=1, keep_n_latest=2, keep_every=3, async_io=async_io)
    assert steps_saved(train_here(config)[0].folder) == [3, 6, 7, 8]


@pytest.mark.parametrize("async_io", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_disk_without_room_for_the_next_checkpoint_is_told_before_the_first_step_and_after_each(
    config: Path, async_io: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([1e3, 1e12, 1e3])  # at the start, after the first save, after the second
    monkeypatch.setattr(saving.shutil, "disk_usage", lambda _: SimpleNamespace(free=next(free)))
    _, said = train_here(config, "--ckpt-every", "4", "--async-io", str(async_io), "--log-every", "1")
    warned = [line for line in said.splitlines() if "1e-06 GB are free there and the next checkpoint needs" in line]
    assert len(warned) == 2
    assert said.index(warned[0]) < said.index("step 1/8")


def test_a_disk_that_is_full_when_a_line_of_metrics_is_due_is_told_with_its_place(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.TextIOWrapper):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opened(path: Path, *args: Any, **more: Any) -> Any:
        return Full(io.FileIO(path, "a"), **more) if path.name == "metrics.jsonl" else real(path, *args, **more)

    real = Path.open
    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(OSError, match="No space left") as caught:
        train_here(config)
    assert caught.value.filename == str(config.parent / "outputs" / "tiny" / "metrics.jsonl")


def test_a_writer_that_dies_ends_the_run_with_a_sentence(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from longtake.checkpoint import background

    answer = background._WriterProcess.answer

    def dies_at_the_second(self: Any) -> dict:
        self.answers = getattr(self, "answers", 0) + 1
        if self.answers == 3:  # of two for each checkpoint
            self._process.kill()
        return answer(self)

    monkeypatch.setattr(background._WriterProcess, "answer", dies_at_the_second)
    monkeypatch.setattr(background._WriterProcess, "send", _slow(background._WriterProcess.send))
    with pytest.raises(UserError, match="was not saved: its background writer ended"):
        train_here(config, "--ckpt-every", "2", "--max-steps", "100")
    assert steps_saved(config.parent / "outputs" / "tiny") == [2]


def _slow(send: Any) -> Any:
    def sends(self: Any, request: Any) -> None:
        if getattr(self, "sent", 0):
            os.kill(self._process.pid, signal.SIGSTOP)
        self.sent = 1
        send(self, request)

    return sends


def freeze(monkeypatch: pytest.MonkeyPatch, value: float | None = None) -> None:
    """All runs from here on train the last layer alone; `value` changes what is frozen."""
    build = run.build_system

    def frozen(*args: Any, restored: bool = False, **given: Any) -> System:
        system = build(*args, **given)  # as if not restored: what is frozen only here has its first values
        for name, p in system.denoiser.named_parameters():
            p.requires_grad_(name.startswith("final_layer"))
            if value is not None and not p.requires_grad:
                p.data.fill_(value)
        return system

    monkeypatch.setattr(run, "build_system", frozen)


def test_a_run_saves_only_what_it_trains(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freeze(monkeypatch)
    outcome, _ = train_here(config, "--ckpt-every", "4")
    names = {row.name for row in inspect(outcome.checkpoint).rows}
    assert names
    assert all(name.split(".", 1)[1].startswith("final_layer") for name in names)
    assert verify(outcome.folder / "frozen") == []
    assert state_of(outcome.checkpoint)["frozen"]["source"] is None


def test_a_run_with_frozen_parts_goes_on_bit_by_bit(
    tmp_path: Path, clips: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freeze(monkeypatch)
    whole = train_here(write_config(tmp_path / "whole", clips))[0]
    config = write_config(tmp_path / "cut", clips)
    train_here(config, "--max-steps", "4")
    freeze(monkeypatch, value=0.5)  # the frozen weights come from the folder, not from where the model began
    resumed = train_here(config, "--resume", "auto")[0]
    assert exact(resumed.folder) == exact(whole.folder)
    assert_same_bits(resumed.checkpoint, whole.checkpoint)


def test_other_frozen_weights_of_the_same_source_are_refused(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    freeze(monkeypatch)
    with monkeypatch.context() as patch:  # a source that gives what the model begins with
        source = "a.safetensors"
        patch.setattr(
            run, "keep_frozen", lambda folder, frozen, _, show, prefix: keep_frozen(folder, frozen, source, show)
        )
        train_here(config, "--max-steps", "2")
    freeze(monkeypatch, value=0.5)
    with pytest.raises(UserError, match=r"trained on frozen weights of digest .*a.safetensors.*the run has"):
        train_here(config, "--resume", "auto")


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_what_was_made_since_the_last_checkpoint(tmp_path: Path, clips: Path) -> None:
    settings = {"max_steps": 60, "ckpt_every": 5}
    config = write_config(tmp_path / "whole", clips, **settings)
    assert finish(start("train", config, processes=2))[0] == 0
    whole = tmp_path / "whole" / "outputs" / "tiny"
    config = write_config(tmp_path / "cut", clips, **settings)
    folder = tmp_path / "cut" / "outputs" / "tiny"
    again = ("--max-restarts", "2")
    process = start("train", config, processes=2, launch=again, program=pausing(config.parent, 14))
    wait_until(process, lambda: len(metrics(folder)) >= 12)
    saved = steps_saved(folder)[-1]
    os.kill(_descendants(process.pid)[1], signal.SIGKILL)  # what torchrun itself has started comes first
    code, out, error = finish(process)
    assert code == 0, error
    assert f"step {saved}" in out or f"step {saved + 5}" in out
    assert not (folder.parent / "tiny-2").exists()
    assert exact(folder) == exact(whole)
    assert_same_bits(*(max(f.glob("epoch*-global_step60")) for f in (folder, whole)))


def _command(process: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes()
    return b""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_no_writer_outlives_a_run_that_is_killed(tmp_path: Path, clips: Path) -> None:
    config = write_config(tmp_path, clips, ckpt_every=2, max_steps=1000)
    folder = tmp_path / "outputs" / "tiny"
    process = start("train", config)
    wait_until(process, lambda: bool(steps_saved(folder)))
    writers = [p for p in _descendants(process.pid) if b"writer.py" in _command(p)]
    assert writers
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    end = time.monotonic() + PATIENCE_SECONDS
    while any(b"writer.py" in _command(p) for p in writers):
        assert time.monotonic() < end
        time.sleep(0.01)
    kill(process)
