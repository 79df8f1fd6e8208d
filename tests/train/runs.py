"""A tiny run for the tests: its config file, the command lines that start it, and what it leaves behind."""

from __future__ import annotations

import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from longtake.checkpoint.runs import list_checkpoints
from longtake.track.trackers import METRICS_FILE, read_lines
from longtake.train.run import Outcome, train_run
from tests.forks import Forked, started_by

T = TypeVar("T")
# Widths are chosen so that 4 ranks get shards of unequal size: 18 values of a head's norm make 5, 5, 5 and 3.
CONFIG = """
exp_name = "tiny"
seed = 7
dtype = "fp32"
device = "cpu"

dataset = dict(data_path={table!r}, cache_mb=16)
bucket_config = {{"32px": {{1: (1.0, 4), 8: (1.0, 3), 16: (1.0, 2)}}}}

ae = dict(type="pixel", temporal=8, spatial=8)
t5 = dict(type="words", dim=16, max_length=8)
clip = dict(type="words", dim=16, max_length=8)
model = dict(
    type="flux",
    in_channels=1536,
    patch_size=1,
    hidden_size=36,
    num_heads=2,
    axes_dim=(6, 6, 6),
    depth=1,
    depth_single_blocks=1,
    vec_in_dim=16,
    context_in_dim=16,
    fused_qkv=True,
)
objective = dict(predict="clean", shift=None)
dropout_ratio = dict(t5=0.1, clip=0.1)

outputs = {outputs!r}
lr = 3e-3
eps = 1e-8
warmup_steps = 2
ema_decay = 0.9
max_steps = 8
slots_per_step = 4
num_workers = 0
log_every = 2
tensorboard = False
"""
STEPS_PER_PASS = 4  # 40 samples in 16 micro-batches; test_data.py holds it
PATIENCE_SECONDS = 150  # for anything a subprocess does: a busy machine must not fail a test
PORTS = range(20_000, 32_000)  # below those that systems give to connections, and to whoever asks for any

# `longtake`, whose training waits for a signal once it has made so many steps.
PAUSING = """
import os, sys, time
from longtake.cli import main
from longtake.train import loop

forward_backward = loop.Trainer.forward_backward


def pausing(self, *args):
    first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    while first_start and self.clock.global_step >= {step} and not self.stop.asked:
        time.sleep(0.01)
    return forward_backward(self, *args)


loop.Trainer.forward_backward = pausing
{more}
main(sys.argv[1:])
"""


def write_config(folder: Path, table: Path, **changes: Any) -> Path:
    """`folder/tiny.py`, with its outputs in `folder/outputs`; `changes` are appended as assignments."""
    folder.mkdir(parents=True, exist_ok=True)
    text = CONFIG.format(table=str(table), outputs=str(folder / "outputs"))
    text += "".join(f"{name} = {value!r}\n" for name, value in changes.items())
    path = folder / "tiny.py"
    path.write_text(text, encoding="utf-8")
    return path


def train_here(run: Path, *overrides: str) -> tuple[Outcome, str]:
    """A run in this process, on one thread: how it ended and what it printed, whose lines no width cuts."""
    return on_one_thread(train_run, run, *overrides)


def on_one_thread(train: Callable[[str, Sequence[str], Console], T], run: Path, *overrides: str) -> tuple[T, str]:
    """What `train` returns of a run and what it prints; PyTorch computes on one thread meanwhile."""
    said = io.StringIO()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(str(run), overrides, Console(file=said, soft_wrap=True)), said.getvalue()
    finally:
        torch.set_num_threads(threads)


def start(
    *words: object,
    processes: int = 0,
    launch: Sequence[str] = (),
    program: Sequence[str] = ("-m", "longtake"),
    fresh: bool = False,
) -> subprocess.Popen[str]:
    """`python -m longtake ...` on one thread, in a process group of its own; with `processes` under `torchrun *launch`.

    It is a fork of the tests' server, and so are torchrun's workers; `fresh`: interpreters that start from nothing, for
    tests of how they start, end and take a signal.
    """
    command = [sys.executable, *program, *map(str, words)]
    if processes:
        launcher = [sys.executable, "-m", "torch.distributed.run" if fresh else "tests.torchrun"]
        launcher += [*launch, "--nproc_per_node", str(processes), "--rdzv_id", "none" if fresh else str(uuid.uuid4())]
        command = [*launcher, "--master_addr", "127.0.0.1", "--master_port", str(free_port()), *command[1:]]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return (subprocess.Popen if fresh else Forked)(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def pausing(folder: Path, step: int, more: str = "") -> tuple[str]:
    """A `program` for `start`: the run cannot be over before it is signalled, however late that is.

    It makes `step` steps and waits there until it is asked to stop, or killed; what torchrun starts in its place goes
    on. `more`: lines that are run before it begins.
    """
    program = folder / f"pausing_at_{step}.py"
    program.write_text(PAUSING.format(step=step, more=more), encoding="utf-8")
    return (str(program),)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process; it is killed, and the test fails, if it does not end."""
    try:
        out, error = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        kill(process)
        out, error = process.communicate()
        raise AssertionError(f"still running after {PATIENCE_SECONDS} s:\n{out}\n{error}") from None
    return process.returncode, out, error


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL for the process, its group and all it has started, as a power cut would have it.

    torchrun puts its workers into sessions of their own: the group alone would let them train to the end.
    """
    workers = _descendants(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
    process.wait()


def _descendants(number: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")
            parent = started_by(name.partition("(")[2]) or int(fields.split()[1])
            children[parent].append(int(stat.parent.name))
    found = list(children[number])
    for child in found:  # grows while it is gone through
        found += children[child]
    return found


def wait_until(process: subprocess.Popen[str], ready: Callable[[], bool]) -> None:
    """Polls until `ready`; fails with the process's words if it ends before, or in `PATIENCE_SECONDS`."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not ready():
        if process.poll() is not None or time.monotonic() > end:
            kill(process)
            out, error = process.communicate()
            raise AssertionError(f"never came so far (exit code {process.returncode}):\n{out}\n{error}")
        time.sleep(0.005)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`; none before the file is there."""
    file = folder / METRICS_FILE
    return read_lines(file) if file.exists() else []


def exact(folder: Path) -> list[tuple[int, str, str]]:
    """What must repeat bit by bit, a step: its number, the digest of its samples, the bits of its loss."""
    return [(line["step"], line["digest"], line["loss_bits"]) for line in metrics(folder)]


def shards(checkpoint: Path) -> dict[tuple[str, str], Tensor]:
    """Every tensor, or part of one, in a checkpoint by its file and name."""
    found: dict[tuple[str, str], Tensor] = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        found |= {(file.name, name): tensor for name, tensor in load_file(file).items()}
    return found


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint that one process wrote, by name."""
    return {name: tensor for (_, name), tensor in shards(checkpoint).items()}


def assert_same_bits(first: Path, second: Path) -> None:
    """Two checkpoints hold the same tensors, bit by bit: weights, averages, optimizer."""
    ours, theirs = shards(first), shards(second)
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, f"{len(different)} of {len(ours)} tensors differ: {different[:3]}"


def steps_saved(folder: Path) -> list[int]:
    """The steps of the complete checkpoints of a run."""
    return [info.step for info in list_checkpoints(folder) if info.complete]


def state_of(checkpoint: Path) -> dict[str, Any]:
    """`run.json` of a checkpoint."""
    return json.loads((checkpoint / "run.json").read_text(encoding="utf-8"))


def free_port() -> int:
    """A port of this machine that nobody listens on.

    Who asked for it opens it seconds later. One that the system chose might be a connection's by then.
    """
    while True:
        port = random.SystemRandom().choice(PORTS)
        with suppress(OSError), socket.socket() as one:
            one.bind(("", port))
            return port


def sentences(text: str) -> list[str]:
    """The lines of stderr that Longtake's command has put there."""
    return re.findall(r"^longtake.*$", text, re.MULTILINE)


def assert_one_sentence(code: int, error: str, *parts: str, exit_code: int = 2) -> None:
    """A mistake ended as it should: its exit code, one sentence with every one of `parts` in it, no traceback."""
    assert "Traceback" not in error, error
    said = sentences(error)
    assert len(said) == 1, error
    for part in parts:
        assert part in said[0], f"{part!r} is not in: {said[0]}"
    assert code == exit_code


def run_command(capsys: Any, words: Sequence[object]) -> tuple[int, str, str]:
    """The `longtake` command in this process: exit code, stdout, stderr."""
    from longtake.cli import main

    code: int | str | None = 0
    try:
        main([str(word) for word in words])
    except SystemExit as exit:
        code = exit.code
    said = capsys.readouterr()
    assert isinstance(code, int)
    return code, said.out, said.err
