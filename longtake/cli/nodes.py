"""`longtake nodes HOSTS` and `longtake stop HOSTS --run NAME | --all`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from longtake.cli.console import make_table, print_table
from longtake.cli.launch import here, split
from longtake.cli.options import finite
from longtake.contracts import UserError

if TYPE_CHECKING:
    from longtake.cluster.nodes import Nodes, RunOnNode

_FIRST_SECONDS = 5.0  # before the live table begins; other nodes come into it later
HEAD = ("node", "procs", "power", "temp", "memory", "clocks", "ECC", "Xid", "clock offset", "disk free", "runs")
_Hosts = Annotated[Path, typer.Argument(metavar="HOSTS", help="File of lines `host` or `user@host:port`.")]
_Include = Annotated[str | None, typer.Option(help="These hosts alone: `a,b`.")]
_Exclude = Annotated[str | None, typer.Option(help="All hosts but these: `a,b`.")]
_Python = Annotated[str, typer.Option(help="Python on the hosts, 3.8 or later; nothing else is needed there.")]
_Ssh = Annotated[str, typer.Option(help="The ssh command, such as `ssh -F site_config`.")]


def nodes(
    hosts: _Hosts,
    once: Annotated[bool, typer.Option("--once", help="One table; also where nobody watches a terminal.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="All that is known, each GPU by itself, once.")] = False,
    every: Annotated[float, typer.Option(callback=finite, min=0.1, help="Seconds between two looks.")] = 2.0,
    include: _Include = None,
    exclude: _Exclude = None,
    workdir: Annotated[str | None, typer.Option(help="Folder whose disk is shown; default: this one.")] = None,
    python: _Python = "python3",
    ssh: _Ssh = "ssh",
) -> int:
    """Show the state of many nodes: GPU processes, power, temperature, memory, errors, clocks, disk, runs.

    Exit status with --once or --json: 1 where a node has not answered.
    """
    live = not once and not as_json and sys.stdout.isatty()
    with closing(connect(hosts, include, exclude, ssh, python, _FIRST_SECONDS if live else None)) as asked:
        order = {"do": "look", "workdir": workdir or here()}
        answers = asked.ask_all(order)
        if live:
            with suppress(KeyboardInterrupt):
                _watch(asked, order, answers, every)
            return 0
        if as_json:
            print(
                json.dumps([{"node": asked.labels[number], **answer} for number, answer in answers.items()], indent=1)
            )
        else:
            from rich.console import Console

            print_table(Console(), HEAD, [row(asked.labels[n], answer) for n, answer in answers.items()], HEAD[1:3])
    return int(any("fault" in answer for answer in answers.values()))


def connect(
    hosts: Path,
    include: str | None = None,
    exclude: str | None = None,
    ssh: str = "ssh",
    python: str = "python3",
    seconds: float | None = None,
) -> Nodes:
    """Connections to the hosts of a file. `seconds`: to wait for them at most."""
    from longtake.cluster.arguments import forwarded, read_hosts
    from longtake.cluster.nodes import Nodes

    chosen = read_hosts(hosts, None, include, exclude)
    environment = forwarded(os.environ, [])
    patience = {} if seconds is None else {"seconds": seconds}
    return Nodes(chosen, split("--ssh", ssh), python, environment, **patience)


def _watch(asked: Nodes, order: Mapping[str, Any], answers: dict[int, dict[str, Any]], every: float) -> None:
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as live:
        while True:
            rows = [row(asked.labels[n], answer) for n, answer in answers.items()]
            live.update(make_table(HEAD, rows, HEAD[1:3], time.strftime("%H:%M:%S")), refresh=True)
            time.sleep(every)
            answers = asked.ask_all(order)


def row(label: str, answer: Mapping[str, Any]) -> list[str]:
    """Return the cells of a node's line under `HEAD`; `-` for what it has not, `?` for what may not be seen."""
    from longtake.cluster.nodes import runs_of

    if "fault" in answer:
        return [label, *["-"] * (len(HEAD) - 2), answer["fault"]]
    gpus, programs = answer["gpus"], answer["programs"]
    runs = runs_of({0: answer})
    known = {pid for run in runs for pid, _ in run.pids}
    said = sorted({run.name for run in runs})
    if others := len(set(programs) - known):
        said.append(f"({others} other GPU program{'s'[: others > 1]})")
    if "nvidia_smi" in answer:
        said.insert(0, answer["nvidia_smi"])
    memory, total = (sum(_known(gpus, key)) / 1024 for key in ("memory_mib", "memory_total_mib"))
    watts, celsius, ecc = (_known(gpus, key) for key in ("power_watts", "celsius", "ecc_uncorrected"))
    return [
        label,
        str(len(programs)) if gpus else "-",
        f"{sum(watts) / len(watts):.0f} W" if watts else "-",
        f"{max(celsius):.0f} C" if celsius else "-",
        f"{memory:.0f}/{total:.0f} GiB" if total else "-",
        _clocks(gpus),
        f"{sum(ecc):.0f}" if ecc else "-",
        _xids(answer["xids"]),
        f"{answer['clock_offset_seconds'] * 1e3:+.0f} ms",
        f"{answer['disk_free_bytes'] / 1e9:.0f} GB ({100 * answer['disk_free_bytes'] / answer['disk_bytes']:.0f} %)",
        ", ".join(said) or "-",
    ]


def _known(gpus: list[dict[str, Any]], key: str) -> list[float]:
    return [gpu[key] for gpu in gpus if gpu[key] is not None]


def _clocks(gpus: list[dict[str, Any]]) -> str:
    """Return the slowest GPU's clock, what it could be, and why it is less."""
    from longtake.cluster.nodes import THROTTLING

    known = [gpu for gpu in gpus if gpu["clock_mhz"] is not None and gpu["clock_max_mhz"] is not None]
    if not known:
        return "-"
    slowest = min(known, key=lambda gpu: gpu["clock_mhz"])
    masks = [int(gpu["throttling"] or 0) for gpu in gpus]
    why = [f"{name} x{count}" for bit, name in THROTTLING if (count := sum(bool(mask & bit) for mask in masks))]
    return " ".join([f"{slowest['clock_mhz']:.0f}/{slowest['clock_max_mhz']:.0f} MHz", *why])


def _xids(found: list[dict[str, Any]] | None) -> str:
    """Each error since the node has started, how often, and how long ago the last one was."""
    if not found:
        return "?" if found is None else "-"
    counts = Counter(one["xid"] for one in found)
    codes = " ".join(f"{xid} x{count}" if count > 1 else str(xid) for xid, count in sorted(counts.items()))
    minutes = min(one["seconds_ago"] for one in found) / 60
    return f"{codes} ({f'{minutes:.0f} min' if minutes < 90 else f'{minutes / 60:.0f} h'} ago)"


def stop(
    hosts: _Hosts,
    run: Annotated[str | None, typer.Option("--run", help="The run's name, as `longtake nodes` shows it.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All training runs of this user there.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before --all.")] = False,
    grace: Annotated[
        float, typer.Option(callback=finite, min=0, max=86400, help="Seconds to save and end in, before SIGKILL.")
    ] = 300.0,
    include: _Include = None,
    exclude: _Exclude = None,
    python: _Python = "python3",
    ssh: _Ssh = "ssh",
) -> int:
    """End a run on many nodes: SIGTERM, on which training saves, then SIGKILL for what is left.

    Shows its processes first; touches no others, and none of other users. Exit status: 1 where something is left, or a
    node has not answered.
    """
    from longtake.cluster.nodes import runs_of

    if (run is None) != everything:
        raise UserError("stop: name one run with --run NAME, or all of yours with --all")
    with closing(connect(hosts, include, exclude, ssh, python)) as asked:
        answers = asked.ask_all({"do": "runs"})
        runs = runs_of(answers)
        chosen = [one for one in runs if (one.trains if everything else one.name == run)]
        for number, answer in answers.items():
            if "fault" in answer:
                print(f"{asked.labels[number]}: {answer['fault']}", file=sys.stderr)
        if not chosen:
            others = ", ".join(sorted({one.name for one in runs})) or "none"
            print(f"nothing to stop: no {'training run' if everything else f'run named {run}'} (runs there: {others})")
            return int(not everything or any("fault" in answer for answer in answers.values()))
        rows = [_described(asked.labels[one.node], one) for one in chosen]
        from rich.console import Console

        print_table(Console(), ("node", "run", "processes", "command"), rows)
        if everything and not yes and not _is_confirmed(f"Stop these {len(rows)}?"):
            return 1
        print(f"SIGTERM; SIGKILL after {grace:g} s", flush=True)
        left = asked.stop(chosen, grace)
        for number in sorted({one.node for one in chosen}):
            print(
                f"{asked.labels[number]}: {'something is left, or it answers no more' if number in left else 'ended'}"
            )
    return int(bool(left) or any("fault" in answer for answer in answers.values()))


def _is_confirmed(question: str) -> bool:
    """Return the answer on the terminal. Raises `UserError` where nobody can answer."""
    try:
        return typer.confirm(question)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        raise UserError("stop --all: expected an answer, and there is no terminal; add --yes") from None


def _described(label: str, run: RunOnNode) -> list[str]:
    pids = [str(pid) for pid, _ in run.pids]
    shown = " ".join(pids[:8]) + (f" ... {len(pids)} in all" if len(pids) > 8 else "")
    return [label, run.name, shown, " ".join(run.words)]
