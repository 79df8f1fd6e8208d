"""Every start of a run: when, from which step, on which nodes, and how it ended, a line each in `launches.jsonl`."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longtake.contracts import UserError
from longtake.durable import naming
from longtake.small_files import parse_json, read_small

if TYPE_CHECKING:
    from longtake.parallel.world import World

FILE = "launches.jsonl"
_MOST_WORDS = 300  # characters of a failure


@dataclass(frozen=True)
class LaunchRecord:
    """One start of a run."""

    time: float  # seconds since 1970
    step: int  # that it began at
    hosts: Mapping[str, int]  # processes on each node
    device: str
    ended: str | None = None  # done, stopped, failed, hung; None: nothing was said, as by a kill, or it goes on
    host: str | None = None  # where the first failure was told
    why: str | None = None

    @property
    def processes(self) -> int:
        return sum(self.hosts.values())


@contextmanager
def noted_launch(folder: Path, world: World, device: str, step: int, reports: Path) -> Iterator[None]:
    """Write down that a launch makes steps from `step` on, and any failure inside; `reports`: of a hang. Collective.

    Each process that fails says so, for the one that is the cause is not known there; the first line counts.
    """
    hosts = Counter(world.gather(socket.gethostname()))
    if world.is_main:
        _append(folder, {"step": step, "hosts": hosts, "device": device, "reports": reports.name})
    try:
        yield
    except BaseException as error:
        if world.is_main or not isinstance(error, UserError):  # which is raised on all ranks
            why = f"{type(error).__name__}: {error}" if not isinstance(error, UserError) else str(error)
            with suppress(OSError):
                failed = {"ended": "failed", "host": socket.gethostname(), "rank": world.rank}
                _append(folder, failed | {"why": why[:_MOST_WORDS]})
        raise


def note_end(folder: Path, stopped: bool) -> None:
    """Write down on rank 0 that a launch has ended well."""
    _append(folder, {"ended": "stopped" if stopped else "done"})


def _append(folder: Path, line: Mapping[str, Any]) -> None:
    with naming(folder / FILE), (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": round(time.time(), 1), **line}) + "\n")


def read_launches(folder: Path) -> list[LaunchRecord]:
    """Return the launches of a run's folder, oldest first; what is damaged is left out."""
    found: list[LaunchRecord] = []
    with suppress(OSError, ValueError):
        for text in read_small(folder / FILE).decode("utf-8", "replace").splitlines():
            with suppress(ValueError, TypeError, KeyError, IndexError):
                line = parse_json(text)
                if "ended" not in line:
                    hosts = {str(host): int(count) for host, count in line["hosts"].items()}
                    hung = "hung" if (folder / line["reports"]).is_dir() else None
                    found.append(LaunchRecord(float(line["time"]), int(line["step"]), hosts, str(line["device"]), hung))
                elif found[-1].ended is None:
                    told = {key: line[key] for key in ("ended", "host", "why") if isinstance(line.get(key), str)}
                    found[-1] = replace(found[-1], **told)
    return found
