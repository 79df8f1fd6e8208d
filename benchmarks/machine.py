"""What a measurement was made on, and how its figures are written down; shared by all benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from longtake import __version__


def machine() -> dict[str, Any]:
    """Processor, cores, GPU, versions and commit of this measurement."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        "triton": version("triton") if find_spec("triton") else None,
        "longtake": __version__,
        "commit": commit_of(Path(__file__).parent),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def one_start(tree: Path, words: Sequence[str]) -> tuple[int, float, float]:
    """`longtake WORDS` of a checkout from its start to its end: exit status, processor seconds, wall seconds."""
    command, variables = [sys.executable, "-m", "longtake", *words], {**os.environ, "PYTHONPATH": str(tree)}
    start = time.perf_counter()
    child = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tree)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, used.ru_utime + used.ru_stime, time.perf_counter() - start


def parser_of_starts(description: str | None) -> argparse.ArgumentParser:
    """The command line of a benchmark that starts this checkout and another in turns."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout of an earlier commit")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser


def gib(number: int | None) -> str:
    """Bytes in GiB, for a table."""
    return "-" if number is None else f"{number / 2**30:.2f}"


def percent(share: float | None) -> str:
    """A share, such as MFU, for a table."""
    return "-" if share is None else f"{share:.1%}"


def print_table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """One table on standard output, columns aligned."""
    text = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[i]) for row in text) for i in range(len(head))]
    for row in text:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def write_json(path: Path | None, name: str, figures: Mapping[str, Any], program: str | None = None) -> None:
    """Writes the figures of benchmark `name` beside machine and commit; does nothing without a path. program: the file
    that made them, where that is not the benchmark of this name."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    made_by = {} if program is None else {"program": program}
    content = {"benchmark": name, **made_by, "machine": machine(), "figures": figures}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit_of(tree: Path) -> str:
    """The commit of the working tree that a folder lies in, marked where it has changes."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=tree, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip()[:12] + ("+changes" if changed.stdout.strip() else "")
