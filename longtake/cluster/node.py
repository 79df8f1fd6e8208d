"""What `longtake nodes` and `longtake stop` run on each node: it looks around, finds this user's runs, sends signals.

Sent over ssh as `host` is, with the same greeting and frames. Each order, a JSON object on a line, has one answer.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from signal import SIGINT, SIGTERM
from typing import Any

from longtake.cluster.machine import family, launched, nvidia_smi, processes, read_words

_GPU = {  # our name: nvidia-smi's
    "index": "index",
    "power_watts": "power.draw",
    "celsius": "temperature.gpu",
    "memory_mib": "memory.used",
    "memory_total_mib": "memory.total",
    "utilization_percent": "utilization.gpu",
    "ecc_uncorrected": "ecc.errors.uncorrected.volatile.total",
    "clock_mhz": "clocks.sm",
    "clock_max_mhz": "clocks.max.sm",
}
_THROTTLING = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # since driver 535, and before
_XID = re.compile(r"^\[ *([\d.]+)\] NVRM: Xid \(([^)]*)\): (\d+)", re.MULTILINE)
_TRAINS = re.compile(r"train\w*(\.py)?|[\w.-]*train\.py")
_MODULES = re.compile(r"longtake|(torch\.distributed|accelerate)\b.*")  # that start training, behind `python -m`


def look(workdir: str) -> dict[str, Any]:
    """Return the state of the node. What it has no right to see, or has not, is None."""
    report: dict[str, Any] = {"gpus": [], "programs": []}
    if shutil.which("nvidia-smi"):
        try:
            report["gpus"] = _gpus()
            report["programs"] = [int(pid) for (pid,) in nvidia_smi("--query-compute-apps=pid")]
        except OSError as error:
            report["nvidia_smi"] = str(error)
    disk = shutil.disk_usage(workdir if os.path.isdir(workdir) else "/")
    return {**report, "xids": _xids(), "disk_free_bytes": disk.free, "disk_bytes": disk.total, **runs()}


def _gpus() -> list[dict[str, Any]]:
    query = f"--query-gpu={','.join(_GPU.values())}"
    try:
        rows = nvidia_smi(f"{query},{_THROTTLING[0]}")
    except OSError:
        rows = nvidia_smi(f"{query},{_THROTTLING[1]}")
    return [{name: _number(row[i]) for i, name in enumerate((*_GPU, "throttling"))} for row in rows]


def _number(cell: str) -> float | None:
    """Of `70 W`, `0x04` or `[N/A]`."""
    try:
        return int(cell, 16) if cell.startswith("0x") else float(cell.split()[0])
    except (ValueError, IndexError):
        return None


def _xids() -> list[dict[str, Any]] | None:
    """Return the GPUs' errors in the kernel's log, since the machine has started."""
    try:
        log = subprocess.run(["dmesg"], capture_output=True, timeout=20, check=True).stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError):
        return None
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    return [{"xid": int(xid), "gpu": gpu, "seconds_ago": now - float(at)} for at, gpu, xid in _XID.findall(log)]


def runs() -> dict[str, Any]:
    """This user's runs: those of launches by the variables that these set, others by their command lines."""
    ours = {pid: process for pid, process in processes().items() if process.user == os.getuid()}
    found: dict[object, dict[str, Any]] = {}
    launches = launched()
    for pid in ours:
        words = read_words(pid, "cmdline")
        training = _training(words)  # the same for torchrun and all that it has started
        launch, name = launches.get(pid, (tuple(training), None))
        if launch and os.path.basename("".join(words[:1])) != "srun":  # its tasks hear of an end themselves
            run = {"name": name, "words": training or words, "pids": []}
            found.setdefault(launch, run)["pids"].append(pid)
    for run in found.values():
        pids = family(ours, run["pids"])
        # A signal for the first ones alone: they pass it on, and a second one would have training stop unsaved.
        first = {pid: ours[pid].parent for pid in pids if ours[pid].parent not in pids}
        first = {parent if _is_host_program(parent) else pid for pid, parent in first.items()}
        run["pids"], run["first"] = ([[pid, ours[pid].started] for pid in sorted(some)] for some in (pids, first))
    with open("/proc/sys/kernel/random/boot_id") as file:  # the same under all names of a machine
        return {"machine": file.read().strip(), "runs": list(found.values())}


def _is_host_program(pid: int) -> bool:
    """Whether it is that of a launch, which tells the launcher what it has been asked to do."""
    return any("longtake-host" in word for word in read_words(pid, "cmdline"))


def _training(words: list[str]) -> list[str]:
    """Return the words of training on a command line of Python's, behind the launcher that has them: `train RUN
    --key value`, or a file `train*.py` and its own; none of them where it does something else."""
    if not words or not os.path.basename(words[0]).startswith("python"):
        return []
    for i, word in enumerate(words):
        if word == "-c" or (words[i - 1] == "-m" and not _MODULES.fullmatch(word)):
            return []
        if os.path.basename(word) == "longtake":
            behind = words[i + 1 :]
            if behind[:1] == ["launch"] and "--" in behind:
                end = behind.index("--")
                if any(option.startswith("--host") for option in behind[:end]):
                    return []  # it watches over others
                behind = behind[end + 1 :]
            return behind if behind and _TRAINS.fullmatch(os.path.basename(behind[0])) else []
        if word.endswith(".py"):
            return words[i:] if _TRAINS.fullmatch(os.path.basename(word)) else []
    return []


def signal(number: int, pids: list[list[int]]) -> dict[str, Any]:
    """Send it to those (number, start) that still run, and say which these are; 0 only asks. A host's program gets
    SIGINT for SIGTERM, which it would take for the end of the machine."""
    table = processes()
    alive = [[pid, started] for pid, started in pids if pid in table and table[pid].started == started]
    for pid, _ in alive:
        with suppress(ProcessLookupError):
            os.kill(pid, SIGINT if number == SIGTERM and _is_host_program(pid) else number)
    return {"alive": alive}


def main() -> None:
    """Greets, and answers orders as long as the connection lasts."""
    greeting = json.loads(sys.stdin.buffer.readline())
    os.environ.update(greeting["environment"])
    sys.stdout.buffer.write(b"\n%s\n" % greeting["nonce"].encode())
    for line in sys.stdin.buffer:
        received = time.time()
        order = json.loads(line)
        times = {"sent": order.pop("sent"), "received": received}
        try:
            report = {"hello": dict, "look": look, "runs": runs, "signal": signal}[order.pop("do")](**order)
        except OSError as error:
            report = {"fault": str(error)}
        content = json.dumps({"report": {**report, **times, "answered": time.time()}}).encode()
        sys.stdout.buffer.write(b"J %d\n" % len(content) + content)
        sys.stdout.buffer.flush()
