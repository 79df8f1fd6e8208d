"""Saving in the background: what is copied is what is saved; failures reach the run; nothing survives its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import longtake
from longtake.checkpoint.background import BackgroundSaver
from longtake.checkpoint.folder import read_state, verify
from longtake.checkpoint.load import load_tensors
from longtake.checkpoint.runs import list_checkpoints
from longtake.checkpoint.save import save_checkpoint
from longtake.checkpoint.writer import write_shard
from longtake.contracts import UserError
from tests.forks import Forked, on_processes
from tests.train.runs import PATIENCE_SECONDS


def some_tensors(value: float = 1.0) -> dict[str, Tensor]:
    return {
        "model.w": torch.full((3, 4), value),
        "model.transposed": torch.arange(12.0).reshape(3, 4).t() * value,
        "ema.w": torch.full((5,), value, dtype=torch.bfloat16),
        "optim.w.step": torch.tensor(value),
        "optim.none": torch.empty(0, 2),
    }


@pytest.fixture
def saver() -> Iterator[BackgroundSaver]:
    made = BackgroundSaver()
    yield made
    made.close(0.0)


def writer_of(saver: BackgroundSaver) -> int:
    assert saver._writer is not None
    return saver._writer._process.pid


def test_what_is_saved_is_what_was_there_when_save_returned(saver: BackgroundSaver, tmp_path: Path) -> None:
    tensors = some_tensors()
    path = saver.save(tmp_path / "run", 0, 1, tensors, {"clock": 1})
    for tensor in tensors.values():
        tensor.zero_()
    saver.wait()
    into = some_tensors(0.0)
    load_tensors(path, into)
    assert all(torch.equal(into[name], tensor) for name, tensor in some_tensors().items())
    assert read_state(path) == {"clock": 1}
    assert verify(path) == []


def test_files_are_the_same_as_those_of_a_save_that_the_run_waits_for(saver: BackgroundSaver, tmp_path: Path) -> None:
    ours = saver.save(tmp_path / "ours", 2, 7, some_tensors(), {"x": [1, "é"]})
    saver.wait()
    theirs = save_checkpoint(tmp_path / "theirs", 2, 7, some_tensors(), {"x": [1, "é"]})
    assert {p.name for p in ours.iterdir()} == {p.name for p in theirs.iterdir()}
    for path in theirs.iterdir():
        if path.name != "COMPLETE":
            assert (ours / path.name).read_bytes() == path.read_bytes()
    markers = [json.loads((folder / "COMPLETE").read_text()) for folder in (ours, theirs)]
    assert markers[0]["files"] == markers[1]["files"]


def test_saves_follow_each_other_in_one_process_and_then_runs_after_each(
    saver: BackgroundSaver, tmp_path: Path
) -> None:
    seen: list[int] = []
    processes = set()
    for step in (1, 2, 3):
        saver.save(tmp_path, 0, step, some_tensors(step), {}, then=lambda: seen.append(len(list_checkpoints(tmp_path))))
        processes.add(writer_of(saver))
    saver.wait()
    assert len(processes) == 1
    assert seen == [1, 2, 3]
    assert [info.step for info in list_checkpoints(tmp_path) if info.complete] == [1, 2, 3]


def test_tensors_that_grow_get_a_larger_memory_file(saver: BackgroundSaver, tmp_path: Path) -> None:
    saver.save(tmp_path, 0, 1, some_tensors(), {})
    larger = {"model.w": torch.randn(300_000)}
    path = saver.save(tmp_path, 0, 2, larger, {})
    saver.wait()
    into = {"model.w": torch.zeros(300_000)}
    load_tensors(path, into)
    assert torch.equal(into["model.w"], larger["model.w"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_copy_on_a_gpu_is_that_of_the_moment_into_pinned_memory(saver: BackgroundSaver, tmp_path: Path) -> None:
    values = torch.randn(1 << 22)
    tensors = {"model.w": values.cuda(), "model.turned": values.reshape(2048, 2048).cuda().t(), "optim.step": values[0]}
    for _ in range(2):  # the second time into memory that is there
        path = saver.save(tmp_path, 0, len(list(tmp_path.iterdir())), tensors, {})
        assert saver._staging._pinned
        tensors["model.w"].zero_()
        tensors["model.turned"].add_(1)
        saver.wait()
        into = {name: torch.empty(tensor.shape) for name, tensor in tensors.items()}
        load_tensors(path, into)
        assert torch.equal(into["model.w"], values)
        assert torch.equal(into["model.turned"], values.reshape(2048, 2048).t())
        tensors["model.w"].copy_(values)
        tensors["model.turned"].copy_(values.reshape(2048, 2048).t())


def test_a_save_that_the_run_waits_for_holds_one_copy_at_a_time(tmp_path: Path) -> None:
    alive: list[int] = []

    def pieces() -> Iterator[memoryview]:
        for number in range(4):
            alive.append(number)
            yield memoryview(bytes([number]))

    class Watched:
        def __iter__(self) -> Iterator[memoryview]:
            for piece in pieces():
                written = (tmp_path / "shard").stat().st_size
                assert written == 8 + alive[-1]  # all that came before is written
                yield piece

    assert write_shard(tmp_path / "shard", b"a" * 8, Watched())["num_bytes"] == 12


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def slow_writer(folder: Path, action: str) -> Path:
    """A writer that does something of its own before each fsync."""
    program = folder / "slow.py"
    program.write_text(
        "import errno, os, runpy, sys, time\n"
        "sync = os.fsync\n"
        "def slow(descriptor):\n"
        f"    {action}\n"
        "    sync(descriptor)\n"
        "os.fsync = slow\n"
        f"sys.argv[0] = {longtake.checkpoint.writer.__file__!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n",
        encoding="utf-8",
    )
    return program


def test_a_disk_that_is_full_is_one_sentence_and_the_last_checkpoint_stays(
    saver: BackgroundSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = saver.save(tmp_path, 0, 1, some_tensors(), {})
    saver.wait()
    program = slow_writer(tmp_path, "raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))")
    saver.close(0.0)
    with monkeypatch.context() as patch:
        patch.setattr("longtake.checkpoint.writer.__file__", str(program))
        saver.save(tmp_path, 0, 2, some_tensors(), {})
        wait_for(lambda: saver.failed)
        with pytest.raises(UserError, match=r"global_step2: the disk is full .* earlier checkpoints are untouched"):
            saver.save(tmp_path, 0, 3, some_tensors(), {})
    assert verify(last) == []
    assert [path.name for path in tmp_path.glob("epoch*")] == [last.name]
    saver.save(tmp_path, 0, 3, some_tensors(), {})  # there is room again
    saver.wait()
    assert [info.step for info in list_checkpoints(tmp_path)] == [1, 3]


def test_a_writer_that_is_killed_is_told_and_leaves_nothing(saver: BackgroundSaver, tmp_path: Path) -> None:
    saver.save(tmp_path, 0, 1, some_tensors(), {})
    saver.wait()
    os.kill(writer_of(saver), signal.SIGSTOP)
    saver.save(tmp_path, 0, 2, some_tensors(), {})
    os.kill(writer_of(saver), signal.SIGKILL)
    wait_for(lambda: saver.failed)
    with pytest.raises(UserError, match=r"was not saved: its background writer ended \(killed by SIGKILL\)"):
        saver.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["epoch0-global_step1"]


KILLED = """
    import os, signal, sys, torch
    from longtake.checkpoint.background import BackgroundSaver; from longtake.checkpoint import writer
    writer.__file__ = sys.argv[2]
    saver = BackgroundSaver()
    saver.save(sys.argv[1], 0, 1, {"model.w": torch.ones(3)}, {})
    print(saver._writer._process.pid, flush=True)
    while not any(os.path.getsize(f) for f in (d.path for p in os.scandir(sys.argv[1]) for d in os.scandir(p))):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the system ends the writer with its parent on Linux only")
def test_the_writer_of_a_killed_run_is_dead_too(tmp_path: Path) -> None:
    program = slow_writer(tmp_path, "time.sleep(3600)")  # it does not look at its input meanwhile
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "run"), str(program)]
    killed = Forked(command, stdout=subprocess.PIPE, text=True)  # stderr is the writer's too, which might stay
    out, _ = killed.communicate()
    assert killed.returncode == -9
    end = time.monotonic() + PATIENCE_SECONDS
    while (alive := Path(f"/proc/{int(out)}/cmdline").exists()) and time.monotonic() < end:
        time.sleep(0.01)
    if alive:
        os.kill(int(out), signal.SIGKILL)
    assert not alive


def play(rank: int, folder: Path) -> None:
    """One of two processes: a save that works, then one that rank 1's disk refuses; facts into `facts<rank>.json`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=120), world_size=2, rank=rank)
    mesh = init_device_mesh("cpu", (2,))
    tensors = {"model.cut": distribute_tensor(torch.arange(21.0).reshape(7, 3), mesh, [Shard(0)])}
    tensors["model.whole"] = torch.arange(4.0)
    saver = BackgroundSaver()
    path = saver.save(folder / "run", 0, 1, tensors, {"ranks": 2})
    tensors["model.cut"].to_local().zero_()
    saver.wait()
    load_tensors(path, tensors)
    facts: dict[str, object] = {"cut": tensors["model.cut"].full_tensor().tolist(), "faults": verify(path)}
    if rank == 1:
        os.kill(saver._writer._process.pid, signal.SIGSTOP)  # so that it cannot be done before it dies
    saver.save(folder / "run", 0, 2, tensors, {})
    if rank == 1:
        saver._writer._process.kill()
        wait_for(lambda: saver.failed)
    try:
        saver.wait()
    except UserError as error:
        facts["error"] = str(error)
    saver.save(folder / "run", 0, 3, tensors, {})
    saver.wait()
    saver.close(0.0)
    facts["steps"] = [info.step for info in list_checkpoints(folder / "run") if info.complete]
    dist.barrier()
    dist.destroy_process_group()
    (folder / f"facts{rank}.json").write_text(json.dumps(facts))


def test_ranks_save_and_fail_together(tmp_path: Path) -> None:
    on_processes(play, 2, tmp_path)
    for rank in range(2):
        facts = json.loads((tmp_path / f"facts{rank}.json").read_text())
        assert facts["cut"] == torch.arange(21.0).reshape(7, 3).tolist()
        assert facts["faults"] == []
        assert "global_step2: was not saved" in facts["error"]
        assert facts["steps"] == [1, 3]
    assert not list((tmp_path / "run").glob("*.partial"))
