"""A run that is killed again and again, beside the same run undisturbed: equal, bit by bit?

python benchmarks/chaos.py                     200 kills of 2 processes
python benchmarks/chaos.py --kills 20 --processes 4
python benchmarks/chaos.py --tiny              3 kills, to see that it runs

A kill is SIGKILL for the launcher and every process below it at once, as a power cut would have it, at a random
moment: some milliseconds after a random step, inside a save (its working folder is there), or while the processes
start. Then the run is started again with `--resume auto`. At the end the digest of the samples and the bits of the
loss of every step, and every byte of the last checkpoint's tensors, are compared with the undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from machine import print_table, write_json

from longtake.checkpoint.runs import list_checkpoints
from longtake.data.probing.probe import probe_table
from longtake.data.shapes import make_shapes
from longtake.track.trackers import METRICS_FILE, read_lines

CONFIG = """
exp_name = "chaos"
seed = 7
dtype = "fp32"
device = "cpu"
dataset = dict(data_path={table!r}, cache_mb=16)
bucket_config = {{"32px": {{1: (1.0, 4), 8: (1.0, 3), 16: (1.0, 2)}}}}
ae = dict(type="pixel", temporal=8, spatial=8)
t5 = dict(type="words", dim=16, max_length=8)
clip = dict(type="words", dim=16, max_length=8)
model = dict(
    type="flux", in_channels=1536, patch_size=1, hidden_size=36, num_heads=2, axes_dim=(6, 6, 6), depth=1,
    depth_single_blocks=1, vec_in_dim=16, context_in_dim=16, fused_qkv=True,
)
objective = dict(predict="clean", shift=None)
dropout_ratio = dict(t5=0.1, clip=0.1)
outputs = {outputs!r}
lr = 3e-3
eps = 1e-8
ema_decay = 0.9
slots_per_step = 4
num_workers = 0
tensorboard = False
max_steps = {steps}
ckpt_every = {every}
keep_n_latest = 2
"""
SAVED_EVERY = 3
STEPS_A_KILL = 4  # the run is this long for each kill, up to
MOST_STEPS = 220  # a run that is over before it was killed often enough is made once more, from its start
MOMENTS = ("after a step", "inside a save", "while starting")
PATIENCE_SECONDS = 240
_TAIL_BYTES = 1 << 14


class Chaos:
    """One run and its killer."""

    def __init__(self, folder: Path, table: Path, processes: int, steps: int, seed: int) -> None:
        folder.mkdir(parents=True)
        self.config, self.run, self.processes = folder / "chaos.py", folder / "outputs" / "chaos", processes
        text = CONFIG.format(table=str(table), outputs=str(folder / "outputs"), steps=steps, every=SAVED_EVERY)
        self.config.write_text(text, encoding="utf-8")
        self.steps, self.random = steps, random.Random(seed)

    def launch(self) -> subprocess.Popen[bytes]:
        """Starts the run, or starts it again."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(self.processes)]
        launcher += ["--master_addr", "127.0.0.1", "--master_port", str(_free_port()), "-m", "longtake"]
        return subprocess.Popen(
            [*launcher, "train", str(self.config), "--resume", "auto"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=(self.config.parent / "errors.txt").open("ab"),
            start_new_session=True,
        )

    def finish(self) -> None:
        """Runs to the end. Raises RuntimeError, with what the run said, where it ends badly."""
        if code := self.launch().wait(timeout=PATIENCE_SECONDS + self.steps):
            said = (self.config.parent / "errors.txt").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"the run ended with exit code {code}:\n{said[-4000:]}")

    def kill_once(self) -> str | None:
        """Starts the run and kills it; the moment that was met, or None where the run came to its end before."""
        moment = self.random.choices(MOMENTS, (5, 4, 1))[0]
        begun, process = self.made(), self.launch()
        if moment == "while starting":
            time.sleep(self.random.uniform(0.5, 5.0))
        else:
            target = begun + self.random.randint(1, 2 * SAVED_EVERY)
            if not self._wait(process, lambda: self.made() >= target or self.made() >= self.steps - 1):
                return None
            if moment == "inside a save" and not self._wait(process, self.saves):
                return None
            time.sleep(self.random.uniform(0.0, 0.03))
        if moment == "after a step" and self.saves():
            moment = "inside a save"
        ended = process.poll() is not None
        _kill(process)
        return None if ended else moment

    def made(self) -> int:
        """The last step in the run's file of steps."""
        line = _last_line(self.run / METRICS_FILE)
        return line["step"] if line else 0

    def saves(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(self.run.glob("*.partial"))

    def _wait(self, process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> bool:
        end = time.monotonic() + PATIENCE_SECONDS
        while not ready():
            if process.poll() is not None or time.monotonic() > end:
                return False
            time.sleep(0.002)
        return True


def main() -> None:
    """Kills, compares and prints one table; exit status 1 where the runs differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="how often the run is killed")
    parser.add_argument("--processes", type=int, default=2, help="of the run")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--tiny", action="store_true", help="3 kills")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    kills = 3 if arguments.tiny else arguments.kills
    with tempfile.TemporaryDirectory() as place:
        figures = measure(Path(place), kills, arguments.processes, arguments.seed)
    met = figures["moments"]
    head = (
        "kills",
        "processes",
        *MOMENTS,
        "runs",
        "steps",
        "steps made again",
        "same steps",
        "same weights",
        "seconds",
    )
    cells = (
        figures["kills"],
        figures["processes"],
        *(met[moment] for moment in MOMENTS),
        figures["runs"],
        figures["steps"],
    )
    same = (figures["steps_again"], figures["same_steps"], figures["same_weights"], f"{figures['seconds']:.0f}")
    print_table(head, [(*cells, *same)])
    write_json(arguments.json, "chaos", {"tiny": arguments.tiny, **figures})
    if not (figures["same_steps"] and figures["same_weights"]):
        sys.exit("the killed run is not the undisturbed one")


def measure(place: Path, kills: int, processes: int, seed: int) -> dict:
    """Both runs, and what differs between them."""
    start = time.perf_counter()
    made = make_shapes(place / "clips", num_clips=32, num_stills=8)
    table = place / "clips" / "clips.parquet"
    probe_table(made, table)
    steps = min(20 + STEPS_A_KILL * kills, MOST_STEPS)
    calm = Chaos(place / "calm", table, processes, steps, seed)
    calm.finish()
    met: dict[str, int] = defaultdict(int)
    again, runs, same_steps, same_weights = 0, 0, len(_exact(calm.run)) == steps, True
    while (before := sum(met.values())) < kills:
        killed = Chaos(place / f"killed{runs}", table, processes, steps, seed + runs)
        again += _kill_until(killed, kills - before, met)
        if sum(met.values()) == before:
            raise RuntimeError("the run was over before it could be killed; make it longer (MOST_STEPS)")
        killed.finish()
        runs += 1
        same_steps &= _exact(killed.run) == _exact(calm.run)
        same_weights &= _shards(killed.run) == _shards(calm.run)
    return {
        "kills": sum(met.values()),
        "processes": processes,
        "moments": {moment: met[moment] for moment in MOMENTS},
        "runs": runs,
        "steps": steps * runs,
        "steps_again": again,
        "same_steps": same_steps,
        "same_weights": same_weights,
        "seconds": time.perf_counter() - start,
    }


def _kill_until(run: Chaos, times: int, met: dict[str, int]) -> int:
    """Kills a run so often, or until it is over; counts the moments in `met`; returns the steps made in vain."""
    again = 0
    for _ in range(times):
        moment = run.kill_once()
        if moment is None:
            break
        met[moment] += 1
        again += max(0, run.made() - max((info.step for info in _complete(run.run)), default=0))
    return again


def _lines(run: Path) -> list[dict]:
    with suppress(OSError, ValueError):
        return list(read_lines(run / METRICS_FILE))
    return []


def _last_line(file: Path) -> dict | None:
    """The last whole line, without reading the file through: the killer asks all the time."""
    with suppress(OSError, ValueError), file.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
        for line in reversed(stream.read().split(b"\n")[:-1]):
            with suppress(ValueError):
                return json.loads(line)
    return None


def _exact(run: Path) -> list[tuple]:
    return [(line["step"], line["digest"], line["loss_bits"]) for line in _lines(run)]


def _complete(run: Path) -> list:
    return [info for info in list_checkpoints(run) if info.complete]


def _shards(run: Path) -> dict[str, bytes]:
    """The bytes of the tensor files of the last checkpoint, by name."""
    last = _complete(run)[-1].path
    return {path.name: path.read_bytes() for path in sorted(last.glob("*.safetensors"))}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL for a process and all below it; torchrun's workers have sessions of their own."""
    children: dict[int, list[int]] = defaultdict(list)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            children[int(fields[1])].append(int(stat.parent.name))
    doomed = [process.pid]
    for number in doomed:  # grows while it is gone through
        doomed += children[number]
    for number in doomed:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


if __name__ == "__main__":
    main()
