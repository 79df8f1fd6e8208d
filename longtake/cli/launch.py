"""`longtake launch [--hostfile HOSTS | --slurm] [options] -- train RUN [--key value ...]`."""

from __future__ import annotations

import os
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longtake.api.source import found_run
from longtake.cli.console import complain
from longtake.cli.options import finite
from longtake.contracts import UserError
from longtake.presets import find_preset

if TYPE_CHECKING:
    from longtake.cluster.slurm import SlurmJob
    from longtake.config.load import Dialect

_Processes = Annotated[
    int | None,
    typer.Option(
        "--nproc-per-node",
        "--nproc_per_node",
        min=1,
        help="Processes on each host; else its slots, else its GPUs.",
        show_default=False,
    ),
]
_Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- VERB RUN [--key value ...]", help="What each process runs.", show_default=False),
]
_Name = Annotated[str | None, typer.Option(help="The run's name; default: exp_name, or that of RUN.")]
_DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be run.")]
SLURM = "launch --slurm"  # the name of the second verb


def with_verb(words: list[str]) -> list[str]:
    """Return a command line whose first word is the verb that is meant: with `--slurm` launching has options of its
    own."""
    options = words[1 : [*words, "--"].index("--")]
    if words[:1] != ["launch"] or "--slurm" not in options:
        return words
    return [SLURM, *(word for word in options if word != "--slurm"), *words[1 + len(options) :]]


def launch(
    words: _Words = None,
    hostfile: Annotated[Path | None, typer.Option(help="Lines `host slots=8` or `user@host:port`.")] = None,
    host: Annotated[str | None, typer.Option(help="Hosts in place of a file: `a,b`.")] = None,
    include: Annotated[str | None, typer.Option(help="These hosts alone: `a,b`.")] = None,
    exclude: Annotated[str | None, typer.Option(help="All hosts but these: `a,b`.")] = None,
    processes: _Processes = None,
    name: _Name = None,
    workdir: Annotated[str | None, typer.Option(help="Folder on the hosts; default: this one.")] = None,
    python: Annotated[str, typer.Option(help="Python on the hosts.")] = sys.executable,
    env: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, or NAME to send the value it has here.")] = None,
    ssh: Annotated[str, typer.Option(help="The ssh command, such as `ssh -F site_config`.")] = "ssh",
    torchrun: Annotated[str, typer.Option(help="More options of torchrun, in one word.")] = "",
    master_address: Annotated[
        str | None, typer.Option("--master-addr", help="The first host as the others reach it.")
    ] = None,
    master_port: Annotated[int, typer.Option(min=0, max=65535, help="Its port; 0: a free one.")] = 0,
    grace: Annotated[
        float, typer.Option(callback=finite, min=0, max=86400, help="Seconds to save and end in after Ctrl-C.")
    ] = 300.0,
    restarts: Annotated[int, typer.Option(min=0, help="After failures that pass; lost hosts are left out.")] = 3,
    force: Annotated[
        bool, typer.Option("--force", help="In spite of busy GPUs, a run of that name, differing versions.")
    ] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="A Slurm job instead; see `launch --slurm --help`.")] = False,
    dry_run: _DryRun = False,
) -> int:
    """Start one run on many hosts with torchrun, over ssh: `longtake launch --hostfile hosts -- train RUN`.

    Without hosts, on the GPUs of this machine: `longtake launch --nproc-per-node 8 -- train RUN`. On a cluster with
    Slurm: `longtake launch --slurm --help`.

    Looks at all hosts first. Their lines come with the host in front. When one fails, all are stopped, and the exit
    status is that of the process that failed first. Ctrl-C has all save and stop; a second one kills them.
    """
    from longtake.cluster.arguments import forwarded, read_hosts
    from longtake.cluster.launch import Launch, show
    from longtake.cluster.restarts import launch_again_and_again

    words = _checked(words or [])
    if hostfile is None and host is None:
        _check_run(words)
        return _on_this_machine(words, processes, split("--torchrun", torchrun), grace, dry_run)
    run_name, folder = name_and_folder(words, name)
    planned = Launch(
        hosts=read_hosts(hostfile, host, include, exclude),
        words=words,
        name=run_name,
        folder=folder,
        workdir=workdir or here(),
        python=python,
        processes=processes,
        environment=forwarded(os.environ, env or []),
        ssh=split("--ssh", ssh),
        torchrun=split("--torchrun", torchrun),
        master_address=master_address,
        master_port=master_port,
        grace=grace,
        force=force,
    )
    if dry_run:
        show(planned, sys.stdout)
        return 0
    if workdir is None and not force and (found := _training(words)) is not None:  # else hosts have other files
        from longtake.train.config import RunWithoutTable
        from longtake.train.run_file import read_run, words_of_stages

        source, overrides, dialect = found
        for chosen in words_of_stages(source, overrides, dialect):
            read_run(source, chosen, RunWithoutTable, dialect)
    return launch_again_and_again(planned, restarts)


def launch_on_slurm(
    processes: Annotated[int, typer.Option("--nproc-per-node", "--nproc_per_node", min=1, help="On each node.")],
    words: _Words = None,
    nodes: Annotated[int, typer.Option("--nodes", "-N", min=1)] = 1,
    gpus: Annotated[
        int | None,
        typer.Option("--gpus-per-node", min=0, help="0: no GPU; default: one a process.", show_default=False),
    ] = None,
    cpus: Annotated[int, typer.Option("--cpus-per-task", "-c", min=1, help="Of each process.")] = 8,
    memory: Annotated[float, typer.Option("--mem-gb", min=0, callback=finite, help="Of each node; 0: all of it.")] = 0,
    minutes: Annotated[int, typer.Option("--time", "-t", min=1, help="Minutes until the job is requeued.")] = 1440,
    warning: Annotated[int, typer.Option("--save-seconds", min=1, help="To save in before that time is up.")] = 120,
    requeues: Annotated[int, typer.Option("--max-requeues", min=0, help="Of a job whose time was up.")] = 15,
    partition: Annotated[str | None, typer.Option("--partition", "-p")] = None,
    account: Annotated[str | None, typer.Option("--account", "-A")] = None,
    nodelist: Annotated[str | None, typer.Option("--nodelist", "-w", help="Nodes to be among the job's.")] = None,
    dependency: Annotated[str | None, typer.Option("--dependency", "-d", help="Such as `afterok:1234`.")] = None,
    comment: Annotated[str | None, typer.Option("--comment")] = None,
    sbatch: Annotated[list[str] | None, typer.Option(help="More options of sbatch: `qos=high`, `exclusive`.")] = None,
    logs: Annotated[
        str | None, typer.Option(help="Folder of the job's output; default: submitit_logs beside the run.")
    ] = None,
    name: _Name = None,
    dry_run: _DryRun = False,
) -> int:
    """Submit one run as a Slurm job: `longtake launch --slurm --nodes 2 --nproc-per-node 8 -- train RUN`.

    Before its time is up the job saves a checkpoint, is requeued, and goes on; `scancel` has it save and end. The
    working folder and the environment of this command are those of the job.
    """
    from longtake.cluster.slurm import SlurmJob, require_slurm, resumable, show_job

    words = _checked(words or [])
    _check_run(words)
    run_name, folder = name_and_folder(words, name)
    beside = Path(folder or "outputs/run").parent / "submitit_logs"
    given = (word.partition("=") for word in sbatch or [])
    job = SlurmJob(
        words=resumable(words, run_name),
        name=run_name,
        logs=logs or str(beside / f"%j-{time.strftime('%Y%m%d-%H%M%S')}"),
        nodes=nodes,
        processes=processes,
        gpus=gpus,
        cpus_per_task=cpus,
        memory_gb=memory,
        minutes=minutes,
        warning_seconds=warning,
        max_requeues=requeues,
        partition=partition,
        account=account,
        nodelist=nodelist,
        dependency=dependency,
        comment=comment,
        more={key.lstrip("-"): value if equals else True for key, equals, value in given},
    )
    if dry_run:
        show_job(job, sys.stdout)
    else:
        require_slurm()
    if (found := _training(words)) is not None:  # a mistake would end the job hours after it was queued
        from longtake.train.run_file import require_startable

        require_startable(*found)
    if not dry_run:
        _submit(job)
    return 0


def _submit(job: SlurmJob) -> None:
    from longtake.cluster.slurm import submit

    number = submit(job)
    print(f"Submitted job_id: {number}\noutput: {job.logs.replace('%j', number)}")


def _on_this_machine(words: list[str], processes: int | None, options: list[str], grace: float, dry_run: bool) -> int:
    from longtake.cluster.here import launch_here

    if dry_run:
        program = [] if words[0].endswith(".py") else ["-m", "longtake"]
        print(shlex.join(["torchrun", "--nproc-per-node", str(processes or "auto"), *options, *program, *words]))
        return 0
    return launch_here(words, processes, options, grace, complain)


def _checked(words: list[str]) -> list[str]:
    if not words or words[0] == "launch" or words[0].startswith("-"):
        found = words[0] if words else "nothing"
        raise UserError(f"launch: found {found} behind --; write `longtake launch --hostfile FILE -- train RUN`")
    return words


def _check_run(words: list[str]) -> None:
    """Raise `UserError` for a RUN that is not on this machine."""
    verb, run = words[0], next((word for word in words[1:] if not word.startswith("-")), None)
    if run is not None and verb in ("train", "generate"):
        found_run(run, "inference" if verb == "generate" else "train")


def _training(words: list[str]) -> tuple[str, list[str], Dialect | None] | None:
    """RUN, overrides and dialect of a training whose RUN is on this machine. Raises `UserError`."""
    from longtake.dialects.written import written_in

    if words[0] != "train":
        from longtake.dialects.scripts import script_run

        return script_run(words)
    position = next((index for index, word in enumerate(words[1:], 1) if not word.startswith("-")), None)
    if position is None:
        raise UserError("launch: found nothing where RUN is expected; write it after train")
    if not Path(words[position]).exists() and find_preset(words[position]) is None:  # it may be on the hosts
        return None
    source, overrides = found_run(words[position]), words[1:position] + words[position + 1 :]
    return source, overrides, written_in(source, overrides)


def name_and_folder(words: list[str], name: str | None) -> tuple[str, str]:
    """As `cluster.name_and_folder`; of a script of another system as its dialect has them."""
    from longtake.cluster.arguments import name_and_folder as parse_name_and_folder
    from longtake.dialects.scripts import script_run

    if words[0].endswith(".py") and (found := script_run(words)) is not None:
        from longtake.train.config import RunWithoutTable
        from longtake.train.folder import new_name
        from longtake.train.run_file import read_run, words_of_stages

        source, overrides, dialect = found
        chosen, *_ = words_of_stages(source, overrides, dialect)
        config = read_run(source, chosen, RunWithoutTable, dialect).value
        known = new_name(config, source)
        return name or known, str(Path(config.outputs) / known)
    return parse_name_and_folder(words, name)


def here() -> str:
    """Return the current folder, by the name under which the shell knows it: behind links, hosts may have
    other disks."""
    named = os.environ.get("PWD", "")
    return named if named and Path(named).is_dir() and os.path.samefile(named, ".") else os.getcwd()


def split(option: str, words: str) -> list[str]:
    try:
        found = shlex.split(words)
    except ValueError as error:
        raise UserError(f"{option} {words}: {error}; quote as in a shell") from None
    if not found and option == "--ssh":
        raise UserError("--ssh: is empty; give the command, such as ssh")
    return found
