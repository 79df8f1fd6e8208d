"""`longtake health RUN`: the figures of a run and its nodes, for Prometheus."""

from __future__ import annotations

import shutil
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Annotated

import typer

from longtake.cli.nodes import connect


def health(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, also of one that trains.")],
    hosts: Annotated[Path | None, typer.Option(help="File of lines `host` or `user@host:port`: its nodes too.")] = None,
    listen: Annotated[str, typer.Option(help="Where to answer, HOST:PORT.")] = "127.0.0.1:9400",
    once: Annotated[bool, typer.Option("--once", help="Print the figures instead, stragglers first.")] = False,
    files: Annotated[
        Path | None, typer.Option(help="Write Grafana's board and Prometheus's rules into this folder instead.")
    ] = None,
    python: Annotated[str, typer.Option(help="Python on the hosts, 3.8 or later.")] = "python3",
    ssh: Annotated[str, typer.Option(help="The ssh command, such as `ssh -F site_config`.")] = "ssh",
) -> None:
    """Export a run's and its nodes' metrics to Prometheus: time by rank, stragglers, data waits, goodput, errors.

    Answers http://127.0.0.1:9400/metrics until Ctrl-C, to this machine alone unless --listen says more.
    """
    from longtake.cluster.health import MONITORING, RunHealth, exposition, node_samples
    from longtake.cluster.metrics_server import exporter

    if files is not None:
        print(f"board and rules: {shutil.copytree(MONITORING, files, dirs_exist_ok=True)}")
        return
    watched, name, folder = RunHealth(run), run.resolve().name, str(run.resolve())
    with ExitStack() as stack:
        nodes = None if hosts is None else stack.enter_context(closing(connect(hosts, ssh=ssh, python=python)))

        def text() -> str:
            samples = [*watched.samples(), *(node_samples(nodes, folder) if nodes is not None else ())]
            return exposition(samples, name)

        if once:
            print(text(), end="")
            return
        server = stack.enter_context(exporter(listen, text))
        print(
            f"http://{server.server_address[0]}:{server.server_port}/metrics tells of {run}; Ctrl-C ends it", flush=True
        )
        with suppress(KeyboardInterrupt):
            server.serve_forever()
