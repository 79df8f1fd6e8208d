"""The hosts and the run of a launch, from its command line: host files and lists, the words behind `--`, variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longtake.config.load import load_config
from longtake.config.overrides import split_flags
from longtake.config.tree import dotted
from longtake.contracts import UserError
from longtake.presets import run_file

# Settings of the libraries that a run uses. Variables that describe this machine (PATH, HOME) stay here.
_FORWARDED = re.compile(
    "(NCCL|GLOO|UCX|FI|HF|TORCH|TORCHINDUCTOR|PYTORCH|WANDB|LONGTAKE)_.+|OMP_NUM_THREADS|"
    "CUDA_(VISIBLE_DEVICES|DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING)|TOKENIZERS_PARALLELISM"
)
_SLOTS = frozenset({"slots", "slot", "count", "cpu", "cpus"})  # Open MPI's names of one number
_MOST_SLOTS = frozenset({"max_slots", "slots_max"})
_SSH_PORT, _FIRST_PORT = 22, 1024  # `node1:8` of Hydra has 8 processes: no other ssh server listens below the latter
_NAME = re.compile(r"[A-Za-z_]\w*")
_PLACE = re.compile(
    r"(?:(?P<user>[^@\s\[\]:]+)@)?(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<name>[\w%][^@\s\[\]:,]*))(?::(?P<port>\d+))?"
)


def forwarded(ours: Mapping[str, str], asked: Sequence[str]) -> dict[str, str]:
    """Return the variables for the hosts: known settings among `ours`, and those asked for as `K=V`, or `K` for our
    value. Raises `UserError` for a `K` that we have no value of."""
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
    """Return the name of a run (given, `exp_name` of words or file, or the file's own) and the folder in which it
    would train; empty for what does not train, and may run beside training. A folder with the date in its name
    cannot be known."""
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
    """Return the verb (or a Python file's name), RUN, the keys of its file, and those given behind it."""
    verb, run = Path(words[0]).stem, next((word for word in words[1:] if not word.startswith("-")), words[0])
    run = run_file(run, "inference" if verb == "generate" else "train")
    flags = {dotted(flag.path): flag.text for flag in split_flags(words, lambda fault: None)}
    return verb, run, _keys_of(run), flags


def _keys_of(run: str) -> dict[str, Any]:
    """Return the keys of a run's file, if it is on this machine and can be read; the run reports what is
    wrong with it."""
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
    """Return the hosts of a file (lines `host`, `user@host:port` or `host slots=8`; `#` begins a comment) or of a
    list `a,b`, in that order, without those left out. Raises `UserError`."""
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
    hosts = [host for place, line in lines for host in _read_line(place, line.partition("#")[0])]
    labels = [host.label for host in hosts]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise UserError(f"{twice[0]}: is there twice; name each host once, with slots=NUMBER for its processes")
    hosts = _choose(hosts, include, exclude)
    if not hosts:
        raise UserError(f"{hostfile or '--host'}: names no host; write one a line, such as `node1 slots=8`")
    return hosts


def _read_line(place: str, line: str) -> list[Host]:
    """Return the hosts of a line: `node1 slots=8`, Hydra's `node1:8`, or several, `node1,node2`; none of an
    empty one."""
    words = re.sub(r"\s*([=,])\s*", r"\1", line).split()
    if not words:
        return []
    names, *rest = words
    slots, most, user = None, None, None
    for word in rest:
        key, _, value = word.partition("=")
        key = key.replace("-", "_")
        if key in ("username", "user_name") and _NAME.fullmatch(value):
            user = value
        elif key in _SLOTS | _MOST_SLOTS and value.isdecimal() and len(value) < 9 and int(value) > 0:
            slots, most = (int(value), most) if key in _SLOTS else (slots, int(value))
        else:
            raise UserError(
                f"{place}: found {word!r} behind {names}; expected slots=NUMBER; write a line such as `node1 slots=8`"
            )
    if slots is not None and most is not None and slots > most:
        raise UserError(f"{place}: slots={slots} is more than max-slots={most}; write one of the two")
    return [_read_host(place, name, slots, user) for name in names.split(",") if name]


def _read_host(place: str, text: str, slots: int | None, user: str | None) -> Host:
    parts = _PLACE.fullmatch(text)
    if parts is None or text.startswith("-") or not text.isprintable():
        raise UserError(f"{place}: {text!r} is no host; write host, user@host or user@host:port")
    number = parts["port"]
    if number is not None and (len(number) > 5 or not 0 < int(number) < 1 << 16):
        raise UserError(f"{place}: {text!r} has no port from 1 to 65535; write host, host:port or host slots=8")
    port = None if number is None else int(number)
    if port is not None and port < _FIRST_PORT and port != _SSH_PORT:
        if slots not in (None, port):
            raise UserError(f"{place}: {text!r} says {port} processes, and slots={slots}; keep one of the two")
        slots, port = port, None
    return Host(parts["six"] or parts["name"], parts["user"] or user, port, slots)


def _choose(hosts: list[Host], include: str | None, exclude: str | None) -> list[Host]:
    """Return the hosts that are included, without those excluded; both name them by label."""
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
