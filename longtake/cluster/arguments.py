"""The hosts and the run of a launch, from its command line: host files and lists, the words behind `--`, variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtake.config import load_config
from longtake.config.overrides import split_flags
from longtake.config.tree import dotted
from longtake.contracts import UserError
from longtake.presets import run_file

# Settings of the libraries that a run uses. Variables that describe this machine (PATH, HOME) stay here.
_FORWARDED = re.compile(
    "(NCCL|GLOO|UCX|FI|HF|TORCH|TORCHINDUCTOR|PYTORCH|WANDB|LONGTAKE)_.+|OMP_NUM_THREADS|"
    "CUDA_(VISIBLE_DEVICES|DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING)|TOKENIZERS_PARALLELISM"
)
_NAME = re.compile(r"[A-Za-z_]\w*")
_PLACE = re.compile(
    r"(?:(?P<user>[^@\s\[\]:]+)@)?(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<name>[^@\s\[\]:]+))(?::(?P<port>\d+))?"
)


def forwarded(ours: Mapping[str, str], asked: Sequence[str]) -> dict[str, str]:
    """The variables for the hosts: known settings among `ours`, and those asked for as `K=V`, or `K` for our value.
    Raises `UserError` for a `K` that we have no value of."""
    chosen = {name: value for name, value in ours.items() if _FORWARDED.fullmatch(name)}
    for words in asked:
        name, given, value = words.partition("=")
        if not _NAME.fullmatch(name):
            raise UserError(f"--env {words}: found {name!r} where a variable's name is expected; write NAME=VALUE")
        if not given and name not in ours:
            raise UserError(f"--env {name}: has no value here; write {name}=VALUE, or export it before")
        chosen[name] = value if given else ours[name]
    return chosen


def name_and_folder(words: Sequence[str], name: str | None = None) -> tuple[str, str]:
    """The name of a run (given, `exp_name` of words or file, or the file's own) and the folder in which it would train;
    empty for what does not train, and may run beside training. A folder with the date in its name cannot be known."""
    verb, run, keys, flags = read_words(words)
    path = Path(run)
    found = flags.get("exp_name") or keys.get("exp_name")
    if path.suffix not in (".py", ".toml") and len(path.parts) > 1 and "exp_name" not in flags:
        known, folder = path.name, run  # of an earlier run
    else:
        known = str(found or path.stem)
        folder = str(Path(str(flags.get("outputs") or keys.get("outputs") or "outputs")) / known)
    if verb == "train":
        return name or known, folder
    return name or (known if run == words[0] else f"{verb} {known}"), ""


def read_words(words: Sequence[str]) -> tuple[str, str, dict[str, Any], dict[str, str]]:
    """The verb (or a Python file's name), RUN, the keys of its file, and those given behind it."""
    verb, run = Path(words[0]).stem, next((word for word in words[1:] if not word.startswith("-")), words[0])
    run = run_file(run, "inference" if verb == "generate" else "train")
    flags = {dotted(flag.path): flag.text for flag in split_flags(words, lambda fault: None)}
    return verb, run, _keys_of(run), flags


def _keys_of(run: str) -> dict[str, Any]:
    """The keys of a run's file, if it is on this machine and can be read; the run reports what is wrong with it."""
    path = Path(run)
    if path.is_dir():
        path = path / "config.py"
    if not path.is_file():
        return {}
    try:
        return load_config(path, [], dict[str, Any]).tree
    except ValueError:
        return {}


@dataclass(frozen=True)
class Host:
    """One line of a host file."""

    name: str  # what ssh is given: a name, an address, or an alias of ~/.ssh/config
    user: str | None = None
    port: int | None = None
    slots: int | None = None  # processes to start there

    @property
    def label(self) -> str:
        return self.name if self.port is None else f"{self.name}:{self.port}"


def read_hosts(
    hostfile: Path | None, listed: str | None, include: str | None = None, exclude: str | None = None
) -> list[Host]:
    """The hosts of a file (lines `host`, `user@host:port` or `host slots=8`; `#` begins a comment) or of a list `a,b`,
    in that order, without those left out. Raises `UserError`."""
    if (hostfile is None) == (listed is None):
        raise UserError("launch: two lists of hosts; give either --hostfile FILE or --host a,b")
    if hostfile is not None:
        try:
            text = hostfile.read_text(encoding="utf-8-sig")  # editors may write a mark in front
        except UnicodeDecodeError:
            raise UserError(
                f"{hostfile}: is not text; a host file has one host a line, such as `node1 slots=8`"
            ) from None
        lines = [(f"{hostfile}:{number}", line) for number, line in enumerate(text.splitlines(), 1)]
    else:
        lines = [("--host", part) for part in (listed or "").split(",")]
    hosts = [_read_line(place, words) for place, line in lines if (words := line.partition("#")[0].split())]
    labels = [host.label for host in hosts]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise UserError(f"{twice[0]}: is there twice; name each host once, with slots=NUMBER for its processes")
    hosts = _choose(hosts, include, exclude)
    if not hosts:
        raise UserError(f"{hostfile or '--host'}: names no host; write one a line, such as `node1 slots=8`")
    return hosts


def _read_line(place: str, words: Sequence[str]) -> Host:
    first, *rest = words
    found = _PLACE.fullmatch(first)
    if found is None or first.startswith("-") or not first.isprintable():
        raise UserError(f"{place}: {first!r} is no host; write host, user@host or user@host:port")
    slots = None
    for word in rest:
        key, _, value = word.partition("=")
        if key not in ("slots", "max_slots") or not value.isdecimal() or int(value) < 1:
            raise UserError(f"{place}: found {word!r} behind {first}; the one thing known there is slots=NUMBER")
        slots = int(value) if key == "slots" else slots
    port = int(found["port"]) if found["port"] else None
    return Host(found["six"] or found["name"], found["user"], port, slots)


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
