"""What stands against a launch, by what the hosts have reported: all of it together, each host by name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import longtake

_OLDEST_PYTHON = (3, 11)
Report = Mapping[str, Any]  # of a host's program: see `host.look`


def lacks(report: Report, workdir: str) -> str | None:
    """What a host misses to run anything; None where it has all."""
    if "workdir" in report:
        return f"working directory {workdir}: {report['workdir']}; choose another with --workdir"
    if "probe" in report:
        return f"cannot be looked at: {report['probe']}"
    if tuple(report["python"]) < _OLDEST_PYTHON:
        return f"Python {'.'.join(map(str, report['python']))} found, 3.11 or later is needed; choose one with --python"
    if missing := [name for name in ("longtake", "torch") if name not in report]:
        return f"its Python has no {' and no '.join(missing)}; choose another with --python, or install it there"
    return None


def differs(report: Report, first: Report, first_label: str) -> str | None:
    """How a host's software is another than the first one's."""
    for name in ("longtake", "torch"):
        if report[name] != first[name]:
            return f"{name} {report[name]} found, {first_label} has {first[name]}"
    if report.get("code") != first.get("code"):
        return f"the files of longtake are others than on {first_label}, although of one version"
    return None


def installed_here() -> dict[str, str]:
    """Version and digest of the Longtake that launches, as a host's probe reports its own."""
    root = Path(longtake.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return {"longtake": longtake.__version__, "code": digest.hexdigest(), "root": str(root)}


def other_code(report: Report, here: Mapping[str, str]) -> str | None:
    """Return a line where a host runs another Longtake than the one that launches; None where they are the same."""
    if report.get("code") == here["code"]:
        return None
    version = "other files of the same version" if report["longtake"] == here["longtake"] else report["longtake"]
    place = report.get("root", "its Python")
    return (
        f"runs the longtake in {place} ({version}), not {here['root']} ({here['longtake']}), "
        "which launches; install the same one there, or choose its Python with --python"
    )


def used_gpus(report: Report, processes: int, visible: str | None) -> list[int] | None:
    """Indices of the GPUs that a launch takes: those of CUDA_VISIBLE_DEVICES, or the first ones; None where unknown."""
    if "gpus" not in report:
        return None
    numbers = {uuid: index for index, uuid in report["gpus"]}
    if visible is None:
        return sorted(numbers.values())[:processes]
    chosen = []
    for word in visible.split(","):
        word = word.strip()
        matches = [index for uuid, index in numbers.items() if word and uuid.startswith(word)]
        chosen += [int(word)] if word.isdecimal() else matches[:1]
    return chosen[:processes]


def busy(report: Report, gpus: Sequence[int] | None) -> str | None:
    """Who computes on the GPUs of a launch."""
    found = [one for one in report["programs"] if one["gpu"] is None or one["gpu"] in gpus] if gpus is not None else []
    if not found:
        return None
    users = [f"GPU {one['gpu']} by {one['program']} (pid {one['pid']}, {one['memory']})" for one in found[:4]]
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return f"in use: {', '.join(users)}{more}"


def same_run(report: Report, name: str) -> str | None:
    """Whether a run of the name is there already."""
    if report["same"]:
        return f"a run named {name} is there (pid {report['same'][0]}); `longtake stop` ends it"
    if report["folders"]:
        return f"a run is training in {report['folders'][0]}"
    return None


def shared_gpus(taken: Mapping[str, tuple[Report, Sequence[int] | None]]) -> list[tuple[str, str]]:
    """Hosts that would compute on a GPU of one before them: two names of one machine."""
    owners: dict[str, str] = {}
    faults = []
    for label, (report, gpus) in taken.items():
        uuids = [uuid for index, uuid in report.get("gpus", []) if index in (gpus or [])]
        if double := [uuid for uuid in uuids if uuid in owners]:
            faults.append((label, f"has the GPUs of {owners[double[0]]}: both are names of one machine"))
        owners |= {uuid: label for uuid in uuids if uuid not in owners}
    return faults
