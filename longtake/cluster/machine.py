"""What the programs on hosts, `host` and `node`, share: processes and nvidia-smi.

`connection` sends their texts over ssh, so that a host needs nothing but Python: the standard library alone, as Python
3.8 knows it.
"""

from __future__ import annotations

import glob
import os
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

_SMI_SECONDS = 120  # a driver that nobody keeps awake


class Process(NamedTuple):
    parent: int
    started: int  # in the kernel's ticks: beside its number, this makes a process out for good
    user: int


def processes() -> dict[int, Process]:
    """All that run on this machine, by number."""
    found = {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        with suppress(OSError), open(path, errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
            if fields[0] not in "ZX":
                user = os.fstat(file.fileno()).st_uid
                found[int(path.split("/")[2])] = Process(int(fields[1]), int(fields[19]), user)
    return found


def family(table: dict[int, Process], members: Iterable[int]) -> set[int]:
    """Return these processes of the table, and all that descend from them."""
    children: dict[int, list[int]] = {}
    for pid, process in table.items():
        children.setdefault(process.parent, []).append(pid)
    found: set[int] = set()
    left = list(members)
    while left:
        pid = left.pop()
        if pid not in found:
            found.add(pid)
            left += children.get(pid, [])
    return found & table.keys()


def read_words(pid: int, name: str) -> list[str]:
    """Return the command line (`cmdline`) of a process, or its variables (`environ`); none where it has ended."""
    with suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read().decode(errors="replace").split("\0")[:-1]
    return []


def launched() -> dict[int, tuple[str, str]]:
    """This user's processes that `longtake launch` has started over ssh: (the launch, the run's name)."""
    found = {}
    for pid, process in processes().items():
        if process.user == os.getuid():
            variables = dict(word.partition("=")[::2] for word in read_words(pid, "environ"))
            if "LONGTAKE_RUN" in variables:
                found[pid] = (variables.get("LONGTAKE_LAUNCH", ""), variables["LONGTAKE_RUN"])
    return found


def nvidia_smi(what: str) -> list[list[str]]:
    """Return the rows that it answers `--query-...=a,b` with. Raises `OSError` with its complaint."""
    columns = what.count(",") + 1
    command = ["nvidia-smi", what, "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS)
    except subprocess.TimeoutExpired:
        raise OSError(f"nvidia-smi: does not answer within {_SMI_SECONDS} s") from None
    if done.returncode != 0:
        said = (done.stdout + done.stderr).split("\n")
        raise OSError("nvidia-smi: " + next((line for line in said if line.strip()), f"status {done.returncode}"))
    rows = [[cell.strip() for cell in line.split(",", columns - 1)] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == columns]
