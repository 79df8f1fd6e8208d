"""A run as a Slurm job, through submitit: it saves before its time is up, is requeued, and goes on.

Each process is a task of the job: Slurm's signal then reaches every rank without a torchrun between, which kills what
it is not told to wait for and ends with a status of its own, and `srun --kill-on-bad-exit` ends all when one fails.
"""

from __future__ import annotations

import os
import runpy
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from longtake.cluster.arguments import read_words
from longtake.contracts import EXIT_INTERRUPTED, UserError

_WARNING = signal.SIGUSR1  # training takes it, its workers do not hear it; submitit's own choice is SIGUSR2
_SETUP = (
    "export SUBMITIT_PREEMPT_SIGNAL=USR1",
    "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}",
)  # the latter as torchrun


@dataclass(frozen=True)
class SlurmJob:
    """A job as it was asked for."""

    words: Sequence[str]  # that each task runs: `train RUN --key value`, or a Python file and its words
    name: str
    logs: str  # folder on a disk that all nodes share; %j is the number of the job
    nodes: int = 1
    processes: int = 8  # on each node
    gpus: int | None = None  # on each node; None: one for each process
    cpus_per_task: int = 8
    memory_gb: float = 0  # on each node; 0: all that it has
    minutes: int = 1440
    warning_seconds: int = 120  # before the end of that time
    max_requeues: int = 15
    partition: str | None = None
    account: str | None = None
    nodelist: str | None = None
    dependency: str | None = None
    comment: str | None = None
    more: Mapping[str, str | bool] = field(default_factory=dict)  # options of sbatch

    def parameters(self) -> dict[str, Any]:
        """What submitit's executor is told."""
        gpus = self.processes if self.gpus is None else self.gpus
        return {
            "name": self.name,
            "nodes": self.nodes,
            "tasks_per_node": self.processes,
            "gpus_per_node": gpus or None,
            "cpus_per_task": self.cpus_per_task,
            "mem_gb": self.memory_gb,
            "timeout_min": self.minutes,
            "slurm_partition": self.partition,
            "slurm_account": self.account,
            "slurm_nodelist": self.nodelist,
            "slurm_dependency": self.dependency,
            "slurm_comment": self.comment,
            # srun forgets the latter option of sbatch
            "slurm_srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={self.cpus_per_task}"],
            "slurm_additional_parameters": {"requeue": True, "signal": f"USR1@{self.warning_seconds}", **self.more},
        }


def resumable(words: Sequence[str], name: str) -> list[str]:
    """Words that go on when they are run again: `train` gets a name where RUN has none, and `--resume auto` where
    nothing says what to start from (RUN that is a folder or has stages goes on by itself)."""
    _, run, keys, flags = read_words(words)
    if words[0] != "train" or Path(run).is_dir():
        return list(words)
    set_keys = {key for key in keys if keys[key] is not None} | flags.keys()
    more = [] if "exp_name" in set_keys else ["--exp_name", name]
    if not set_keys & {"resume", "load", "stages"}:
        more += ["--resume", "auto"]
    return [*words, *more]


def show_job(job: SlurmJob, out: TextIO) -> None:
    """Print what would be asked of Slurm."""
    for name, value in job.parameters().items():
        if value is not None:
            print(f"{name} = {value}", file=out)
    print(f"max_num_timeout = {job.max_requeues}\nfolder = {job.logs}", file=out)
    program = [] if job.words[0].endswith(".py") else ["-m", "longtake"]
    print(f"each task: {shlex.join([sys.executable, *program, *job.words])}", file=out)


def require_slurm() -> None:
    """Raise `UserError` where jobs cannot be submitted from."""
    if missing := [name for name in ("sbatch", "srun") if shutil.which(name) is None]:
        raise UserError(f"--slurm: no {missing[0]} on this machine; launch from a node where jobs can be submitted")


def submit(job: SlurmJob, cluster: str = "slurm") -> str:
    """Hands the job to Slurm, or another `cluster` of submitit's, and returns its number. Raises `UserError`."""
    try:
        import submitit
    except ImportError:
        raise UserError("--slurm: submitit is not installed; pip install '.[slurm]' in Longtake's folder") from None
    if cluster == "slurm":
        require_slurm()
    refused = (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError)
    place = {name: os.environ[name] for name in ("SLURM_CONF",) if name in os.environ}
    with submitit.helpers.clean_env():  # of the variables of a job inside which this may run
        os.environ |= place
        executor = submitit.AutoExecutor(job.logs, cluster, **{f"{cluster}_max_num_timeout": job.max_requeues})
        marks = f"export LONGTAKE_RUN={shlex.quote(job.name)} LONGTAKE_LAUNCH=slurm-$SLURM_JOB_ID"  # for `node`
        executor.update_parameters(**job.parameters(), **{f"{cluster}_setup": [*_SETUP, marks]})
        try:
            return str(executor.submit(SlurmTask(job.words)).job_id)
        except refused as error:
            said = " ".join(str(error).split())
            raise UserError(f"--slurm: no job was submitted ({said}); mend the option that it names") from None


@dataclass(frozen=True)
class SlurmTask:
    """What each process of the job runs. Ends with SystemExit."""

    words: Sequence[str]

    def __call__(self) -> None:
        requeue = signal.getsignal(_WARNING)  # by submitit: it saves nothing itself, and asks Slurm
        heard, told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(told, warn_on_full_buffer=False)  # whoever takes a signal, its number is written there
        for number in (signal.SIGTERM, _WARNING):
            signal.signal(number, signal.SIG_DFL)  # for `longtake` to take
        _join()
        code = _run(list(self.words))
        signals = set()
        with suppress(BlockingIOError):
            signals.update(os.read(heard, 4096))
        if code == EXIT_INTERRUPTED:
            if os.environ["RANK"] != "0":
                code = 0  # a failure would have srun kill the first one
            elif _WARNING in signals or not signals & {signal.SIGTERM, signal.SIGINT}:  # the latter: by `time_limit`
                requeue(_WARNING, None)
        sys.exit(code)

    def checkpoint(self) -> Any:
        """What the job runs when it has been requeued."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def _join() -> None:
    """Set the variables that torchrun would. A requeued job is a restart to them, and so goes on in its own folder."""
    import submitit
    from submitit.helpers import TorchDistributedEnvironment

    job = submitit.JobEnvironment()
    TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
    os.environ |= {
        "GROUP_RANK": str(job.node),
        "GROUP_WORLD_SIZE": str(job.num_nodes),
        "TORCHELASTIC_RUN_ID": f"slurm-{job.job_id}",
        "TORCHELASTIC_RESTART_COUNT": os.environ.get("SLURM_RESTART_COUNT", "0"),
    }


def _run(words: list[str]) -> int:
    """Run `longtake` or a Python file in this process; return the exit status."""
    try:
        if words[0].endswith(".py"):
            sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
        else:
            sys.argv = ["longtake", *words]
            runpy.run_module("longtake", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0
