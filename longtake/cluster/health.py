"""A run and its nodes as figures for Prometheus: read from the files of the run and over ssh."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from longtake.cluster.nodes import THROTTLING, Nodes
from longtake.cluster.scores import STEPS, Scores
from longtake.contracts import UserError
from longtake.small_files import parse_json, regular
from longtake.track.trackers import METRICS_FILE
from longtake.train.health.goodput import read_seconds
from longtake.train.health.launches import read_launches

MONITORING = Path(__file__).with_name("monitoring")  # Grafana's board and Prometheus's rules
_LOST = "quarantine.jsonl"
_LATE_SECONDS = 8.0  # Prometheus itself waits for 10
METRICS = {  # all that is told, and what it means
    "longtake_step": "Steps made so far.",
    "longtake_step_timestamp_seconds": "When the last step was made, or the last start began with its first.",
    "longtake_step_seconds": f"Seconds of a step, median of the last {STEPS}.",
    "longtake_loss": "Loss of the last step.",
    "longtake_wait_ratio": "Share of a step in which the rank that waits most for data waits for it.",
    "longtake_goodput_ratio": "Share of the seconds of the run, over all its starts, in steps that count.",
    "longtake_seconds": "Seconds of the run by what they went into.",
    "longtake_skipped_steps": "Steps left out for a loss or gradient that was not finite or too large.",
    "longtake_lost_samples": "Samples that could not be loaded.",
    "longtake_launches": "Starts of the run by how they ended; `none`: goes on, or was killed.",
    "longtake_finished": "1 where the last start has come to its end or was asked to stop, else 0.",
    "longtake_host_gpu_watts": "Mean draw of a GPU of the host, as the run itself measures it.",
    "longtake_rank_seconds": "Seconds of the rank's own forwards for a step, without waiting for other ranks.",
    "longtake_rank_wait_seconds": "Seconds of a step in which the rank waits for data.",
    "longtake_rank_relative_score": f"The fastest rank's time over this rank's, medians of {STEPS} steps.",
    "longtake_rank_individual_score": f"The rank's own best time over its present one, medians of {STEPS} steps.",
    "longtake_disk_free_ratio": "Free share of the disk of a node, or (node empty) of the one that the run is on.",
    "longtake_node_up": "1 where the node has answered, else 0.",
    "longtake_node_clock_offset_seconds": "The node's clock against this machine's.",
    "longtake_node_xid_timestamp_seconds": "When a GPU last had this error (Xid) in the kernel's log.",
    "longtake_node_gpu_fault": "1 where nvidia-smi gives a complaint in place of figures, as for a lost GPU, else 0.",
    "longtake_gpu_watts": "Power draw.",
    "longtake_gpu_celsius": "Temperature.",
    "longtake_gpu_utilization_ratio": "Share of the time in which a kernel ran.",
    "longtake_gpu_memory_bytes": "Memory in use.",
    "longtake_gpu_clock_ratio": "Clock of what it could be.",
    "longtake_gpu_ecc_errors": "Uncorrected memory errors since the driver was loaded.",
    "longtake_gpu_throttled": "1 where the GPU is held back for this reason, else 0.",
}
_OF_GPU = {  # key of `node`: (metric, factor)
    "power_watts": ("longtake_gpu_watts", 1.0),
    "celsius": ("longtake_gpu_celsius", 1.0),
    "utilization_percent": ("longtake_gpu_utilization_ratio", 0.01),
    "memory_mib": ("longtake_gpu_memory_bytes", 2.0**20),
    "ecc_uncorrected": ("longtake_gpu_ecc_errors", 1.0),
}


class Figure(NamedTuple):
    name: str
    value: float
    labels: Mapping[str, object] = {}


class RunHealth:
    """What a run's folder tells, also while it trains. Steps are read once, each look reads what has come since."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._file = folder, folder / METRICS_FILE
        if not self._file.exists() and not read_launches(folder):
            raise UserError(
                f"{folder}: no run has begun its steps there; give a run's folder, such as outputs/demo/run"
            )
        self._begin(inode=0)

    def _begin(self, inode: int) -> None:
        self._inode, self._offset, self._skipped = inode, 0, 0
        self._steps: deque[dict[str, Any]] = deque(maxlen=STEPS)
        self._scores = Scores()
        self._ranks: Mapping[str, Any] = {}
        self._watts: Mapping[str, float] = {}

    def _read(self) -> None:
        """Take in new lines; all of them where the file is another one, as after a start from a checkpoint."""
        with regular(self._file).open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._offset:
                self._begin(found.st_ino)
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # it is being written
                self._offset += len(line)
                with suppress(ValueError, TypeError, KeyError, ArithmeticError):
                    self._take(parse_json(line))

    def _take(self, line: dict[str, Any]) -> None:
        self._steps.append({name: float(line.get(name, 0.0)) for name in ("step", "seconds", "wait", "loss")})
        self._skipped += bool(line.get("skipped"))
        self._watts = line.get("watts", self._watts)
        if (ranks := line.get("ranks")) and min(ranks["seconds"]) > 0:
            self._scores.add(line["step"], [seconds / ranks["tflop"] for seconds in ranks["seconds"]])
            self._ranks = ranks

    def samples(self) -> Iterator[Figure]:
        """Yield the present figures; stragglers come first among the ranks."""
        with suppress(FileNotFoundError):  # it has made no step yet
            self._read()
        launches, seconds = read_launches(self._folder), read_seconds(self._folder)
        times = [launch.time for launch in launches[-1:]]
        if self._steps:
            last, own = self._steps[-1], fmean(step["wait"] for step in self._steps)
            times.append(self._file.stat().st_mtime)
            yield Figure("longtake_step", last["step"])
            yield Figure("longtake_loss", last["loss"])
            yield Figure("longtake_step_seconds", median(step["seconds"] for step in self._steps))
            mean = fmean(step["seconds"] for step in self._steps)
            yield Figure("longtake_wait_ratio", min(1.0, max(own, *self._ranks.get("wait", [0.0])) / (mean or 1.0)))
        yield Figure("longtake_step_timestamp_seconds", max(times, default=0.0))
        yield Figure("longtake_goodput_ratio", seconds.goodput)
        yield from (Figure("longtake_seconds", value, {"part": part}) for part, value in asdict(seconds).items())
        yield Figure("longtake_skipped_steps", self._skipped)
        yield Figure("longtake_lost_samples", _num_lines(self._folder / _LOST))
        ends = Counter(launch.ended or "none" for launch in launches)
        yield from (Figure("longtake_launches", count, {"ended": ended}) for ended, count in ends.items())
        yield Figure("longtake_finished", bool(launches) and launches[-1].ended in ("done", "stopped"))
        yield from (Figure("longtake_host_gpu_watts", value, {"host": host}) for host, value in self._watts.items())
        if launches and launches[-1].processes == len(self._ranks.get("seconds", ())):  # else of a start before
            yield from self._of_ranks([host for host, count in launches[-1].hosts.items() for _ in range(count)])
        disk = shutil.disk_usage(self._folder)
        yield Figure("longtake_disk_free_ratio", disk.free / disk.total, {"node": ""})

    def _of_ranks(self, hosts: list[str]) -> Iterator[Figure]:
        figures = {
            "longtake_rank_relative_score": self._scores.relative(),
            "longtake_rank_individual_score": self._scores.individual(),
            "longtake_rank_seconds": self._ranks["seconds"],
            "longtake_rank_wait_seconds": self._ranks["wait"],
        }
        order = sorted(range(len(self._ranks["seconds"])), key=self._scores.relative().__getitem__)
        for name, values in figures.items():
            for rank in order:
                yield Figure(name, values[rank], {"rank": rank, "host": hosts[rank]})


def _num_lines(path: Path) -> int:
    with suppress(OSError):
        return regular(path).read_bytes().count(b"\n")
    return 0


def node_samples(nodes: Nodes, workdir: str) -> Iterator[Figure]:
    """How the nodes are; one that does not answer costs its own figures only."""
    for number, answer in nodes.ask_all({"do": "look", "workdir": workdir}, _LATE_SECONDS).items():
        node = {"node": nodes.labels[number]}
        yield Figure("longtake_node_up", "fault" not in answer, node)
        if "fault" in answer:
            continue
        yield Figure("longtake_node_clock_offset_seconds", answer["clock_offset_seconds"], node)
        yield Figure("longtake_node_gpu_fault", "nvidia_smi" in answer, node)
        yield Figure("longtake_disk_free_ratio", answer["disk_free_bytes"] / answer["disk_bytes"], node)
        ages: dict[tuple[str, int], float] = {}
        for error in answer["xids"] or ():
            key = error["gpu"], error["xid"]
            ages[key] = min(ages.get(key, error["seconds_ago"]), error["seconds_ago"])
        for (gpu, xid), age in ages.items():
            yield Figure("longtake_node_xid_timestamp_seconds", time.time() - age, {**node, "gpu": gpu, "xid": xid})
        for gpu in answer["gpus"]:
            yield from _of_gpu(gpu, {**node, "gpu": f"{gpu['index'] or 0:g}"})


def _of_gpu(gpu: Mapping[str, Any], labels: Mapping[str, object]) -> Iterator[Figure]:
    for key, (name, factor) in _OF_GPU.items():
        if gpu[key] is not None:
            yield Figure(name, gpu[key] * factor, labels)
    if gpu["clock_mhz"] is not None and gpu["clock_max_mhz"]:
        yield Figure("longtake_gpu_clock_ratio", gpu["clock_mhz"] / gpu["clock_max_mhz"], labels)
    if gpu["throttling"] is not None:
        for bit, reason in THROTTLING:
            yield Figure("longtake_gpu_throttled", bool(int(gpu["throttling"]) & bit), {**labels, "reason": reason})


def exposition(samples: Iterable[Figure], run: str) -> str:
    """Figures in the text format of Prometheus, version 0.0.4, each with the run's name."""
    lines: dict[str, list[str]] = {}
    for name, value, labels in samples:
        shown = ",".join(f'{key}="{_escaped(str(of))}"' for key, of in {"run": run, **labels}.items())
        lines.setdefault(name, []).append(f"{name}{{{shown}}} {float(value):.10g}\n")
    head = "# HELP {0} {1}\n# TYPE {0} gauge\n"
    return "".join(head.format(name, METRICS[name]) + "".join(of) for name, of in lines.items())


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
