"""Submits train.py as a Slurm job, in TTT-Video's own words: flags for the job, all others are those of train.py.

python train_submitit.py --nodes=8 --partition=gpu --account=team --timeout=240 \
    --job.config_file configs/train/ttt-mlp/3s.toml --job.exp_name=first --job.dump_folder=/data/runs

Before its time is up the job saves, is requeued, and goes on. `longtake launch --slurm` does the same for every system.
"""

from __future__ import annotations

import argparse
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from longtake.cli.console import EXIT_MISTAKE, complain
from longtake.cluster.slurm import SlurmJob, require_slurm, show_job, submit
from longtake.contracts import UserError
from longtake.dialects.ttt_video import TTTVideoDialect
from longtake.train.run_file import require_startable as require_run_startable


def read_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The flags for the job, and all other words."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ngpus", type=int, default=8, help="GPUs of a node, and processes on it")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--timeout", type=int, default=20160, help="minutes until the job is requeued")
    parser.add_argument("--slurm_max_num_timeout", type=int, default=15, help="how often")
    parser.add_argument("-A", "--account", default="default")
    parser.add_argument("--partition", default="default")
    parser.add_argument("--nodelist", help="nodes to be among the job's")
    parser.add_argument("--comment")
    parser.add_argument("--dependency_job_id", help="a job that is to end first, in whatever way")
    parser.add_argument("--mem_gb", type=float, default=1400, help="of a node; 0: all that it has")
    parser.add_argument("--cpus_per_task", type=int, default=15, help="of a process")
    parser.add_argument("--gpus_per_node", type=int, help="where they are not as many as processes; 0: none")
    parser.add_argument("--dry_run", action="store_true", help="print what Slurm would be asked")
    return parser.parse_known_args(arguments)


def place_of(words: Sequence[str]) -> tuple[str, Path]:
    """`job.exp_name` and `job.dump_folder` of words for train.py, or of the file that they name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for key in ("config_file", "exp_name", "dump_folder"):
        parser.add_argument(f"--job.{key}", dest=key)
    given = vars(parser.parse_known_args(words)[0])
    written = {}
    if given["config_file"]:
        try:
            written = tomllib.loads(Path(given["config_file"]).read_text(encoding="utf-8")).get("job", {})
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise UserError(f"--job.config_file {given['config_file']}: cannot be read ({error})") from None
    name, folder = (given[key] or written.get(key) for key in ("exp_name", "dump_folder"))
    return name or "default job", Path(folder or "exp").expanduser()


def require_startable(words: Sequence[str]) -> None:
    """Raises `UserError` for words with which train.py would end at its start, hours after it was queued."""
    dialect = TTTVideoDialect(say=lambda line: None)  # the job prints its notes
    _, run, *overrides = dialect.command(["train", *words])
    require_run_startable(run, overrides, dialect)


def main(arguments: Sequence[str]) -> int:
    """Submits the job; returns the exit status."""
    flags, words = read_flags(arguments)
    try:
        name, folder = place_of(words)
        job = SlurmJob(
            words=[str(Path(__file__).with_name("train.py").resolve()), *words],
            name=name,
            logs=str(folder / "submitit_logs" / f"%j-{time.strftime('%Y%m%d-%H%M%S')}"),
            nodes=flags.nodes,
            processes=flags.ngpus,
            gpus=flags.gpus_per_node,
            cpus_per_task=flags.cpus_per_task,
            memory_gb=flags.mem_gb,
            minutes=flags.timeout,
            max_requeues=flags.slurm_max_num_timeout,
            partition=flags.partition,
            account=flags.account,
            nodelist=flags.nodelist,
            dependency=flags.dependency_job_id and f"afterany:{flags.dependency_job_id}",
            comment=flags.comment,
        )
        if flags.dry_run:
            show_job(job, sys.stdout)
        else:
            require_slurm()
            require_startable(words)
            print(f"Submitted job_id: {submit(job)}")
    except UserError as error:
        complain(str(error))
        return EXIT_MISTAKE
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
