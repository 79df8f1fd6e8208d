"""Hosts of a launch: host files and lists, in the words that DeepSpeed and Open MPI users know."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from longtake.contracts import UserError

_PLACE = re.compile(
    r"(?:(?P<user>[^@\s\[\]:]+)@)?(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<name>[^@\s\[\]:]+))(?::(?P<port>\d+))?"
)


@dataclass(frozen=True)
class Host:
    """One line of a host file."""

    name: str  # what ssh is given: a name, an address, or an alias of ~/.ssh/config
    user: str | None = None
    port: int | None = None
    slots: int | None = None  # processes to start there

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.name if self.port is None else f"{self.name}:{self.port}"


def read_hosts(
    hostfile: Path | None, listed: str | None, include: str | None = None, exclude: str | None = None
) -> list[Host]:
    """The hosts of a file, or of a list `a,b`, in that order, without those left out. Raises `UserError`.

    A line of the file is `host`, `user@host:port` or `host slots=8`; `#` begins a comment.
    """
    if (hostfile is None) == (listed is None):
        raise UserError("launch: no hosts, or two lists of them; give either --hostfile FILE or --host a,b")
    if hostfile is not None:
        try:
            text = hostfile.read_text(encoding="utf-8-sig")  # editors may write a mark in front
        except UnicodeDecodeError:
            raise UserError(
                f"{hostfile}: is no text; a host file has one host a line, such as `node1 slots=8`"
            ) from None
        lines = [(f"{hostfile}:{number}", line) for number, line in enumerate(text.splitlines(), 1)]
    else:
        lines = [("--host", part) for part in (listed or "").split(",")]
    hosts = [_read_line(place, words) for place, line in lines if (words := line.partition("#")[0].split())]
    _refuse_doubles(hosts)
    hosts = _choose(hosts, include, exclude)
    if not hosts:
        raise UserError(f"{hostfile or '--host'}: names no host; write one a line, such as `node1 slots=8`")
    return hosts


def _read_line(place: str, words: Sequence[str]) -> Host:
    first, *rest = words
    found = _PLACE.fullmatch(first)
    if found is None or first.startswith("-"):
        raise UserError(f"{place}: {first!r} is no host; write host, user@host or user@host:port")
    slots = None
    for word in rest:
        key, _, value = word.partition("=")
        if key not in ("slots", "max_slots") or not value.isdecimal() or int(value) < 1:
            raise UserError(f"{place}: found {word!r} behind {first}; the one thing known there is slots=NUMBER")
        slots = int(value) if key == "slots" else slots
    port = int(found["port"]) if found["port"] else None
    return Host(found["six"] or found["name"], found["user"], port, slots)


def _refuse_doubles(hosts: Iterable[Host]) -> None:
    seen: set[tuple[str, int | None]] = set()
    for host in hosts:
        if (host.name, host.port) in seen:
            raise UserError(f"{host.label}: is there twice; name each host once, with slots=NUMBER for its processes")
        seen.add((host.name, host.port))


def _choose(hosts: list[Host], include: str | None, exclude: str | None) -> list[Host]:
    """The hosts that are included, without those excluded; both name them by label."""
    known = {host.label for host in hosts}
    wanted = known
    for option, words in (("--include", include), ("--exclude", exclude)):
        if words is None:
            continue
        names = {word.strip() for word in words.split(",")} - {""}
        if unknown := sorted(names - known):
            raise UserError(f"{option} {unknown[0]}: not among the hosts; choose from {', '.join(sorted(known))}")
        wanted = wanted & names if option == "--include" else wanted - names
    return [host for host in hosts if host.label in wanted]
