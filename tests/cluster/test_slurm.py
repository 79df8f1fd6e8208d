"""`longtake launch --slurm` on a real Slurm, four nodes on this machine: `make cluster`.

Each job is compared bit by bit with one that nobody disturbed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest

from longtake.cluster import node
from tests.cluster.slurm import ROOT, Job, Slurm, missing, slurm_here
from tests.scripts.test_ttt_video import listed
from tests.train.runs import PATIENCE_SECONDS, assert_same_bits, exact, metrics, pausing, steps_saved, write_config

STEPS = 18
SAVED_EVERY = 5
PAUSE = 7  # steps that a job makes before it waits to be asked to stop, in its first start
WRITTEN = 6  # steps in its metrics then

# `longtake`, whose steps take seconds in the first start of a job: it is under way for a minute.
SLOW = """
import os, sys, time
from longtake.cli import main
from longtake.train import loop

forward_backward = loop.Trainer.forward_backward


def slow(self, *args):
    if "SLURM_RESTART_COUNT" not in os.environ and self.clock.global_step >= 4:
        time.sleep(5)
    return forward_backward(self, *args)


loop.Trainer.forward_backward = slow
main(sys.argv[1:])
"""

__all__ = ["listed"]
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm_here(tmp_path_factory.mktemp("slurm")) as running:
        yield running


Undisturbed = Callable[[int], Path]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, clips: Path, slurm: Slurm) -> Undisturbed:
    """The folder of a job on so many nodes that nobody disturbed."""
    folders: dict[int, Path] = {}

    def folder_on(nodes: int) -> Path:
        if nodes not in folders:
            config = write_run(tmp_path_factory.mktemp("undisturbed"), clips)
            job = slurm.launch("train", config, nodes=nodes)
            assert job.finish() == "COMPLETED", job.output()
            folders[nodes] = run_folder(config)
        return folders[nodes]

    return folder_on


@pytest.fixture
def config(tmp_path: Path, clips: Path) -> Path:
    return write_run(tmp_path, clips)


def write_run(folder: Path, clips: Path) -> Path:
    return write_config(folder, clips, max_steps=STEPS, ckpt_every=SAVED_EVERY)


def run_folder(config: Path) -> Path:
    return config.parent / "outputs" / "tiny"


def wait_for_pause(job: Job, folder: Path) -> None:
    job.wait(lambda facts: facts["JobState"] == "RUNNING" and len(metrics(folder)) >= WRITTEN)


def saved_when_asked(folder: Path) -> int:
    """The step of a checkpoint that was made because the job was to end."""
    saved = steps_saved(folder)[-1]
    assert PAUSE < saved < 2 * SAVED_EVERY
    return saved


def assert_undisturbed(folder: Path, other: Path) -> None:
    """One folder, every step's samples and loss, and all tensors at the end, bit by bit."""
    assert [path.name for path in folder.parent.glob("tiny*")] == ["tiny"]
    assert exact(folder) == exact(other)
    last = f"*-global_step{STEPS}"
    assert_same_bits(next(folder.glob(last)), next(other.glob(last)))


def test_a_job_on_four_nodes(undisturbed: Undisturbed, found: dict[str, Any]) -> None:
    begin = time.monotonic()
    folder = undisturbed(4)
    assert [line["step"] for line in metrics(folder)] == list(range(1, STEPS + 1))
    found["4 nodes"] = {"state": "COMPLETED", "steps": STEPS, "seconds": round(time.monotonic() - begin)}


def test_before_its_time_is_up_a_job_saves_and_is_requeued(
    slurm: Slurm, config: Path, undisturbed: Undisturbed, found: dict[str, Any]
) -> None:
    other, folder = undisturbed(4), run_folder(config)
    program = pausing(config.parent, PAUSE)
    # Slurm gives the signal up to a minute early
    options = ("--time", 3, "--save-seconds", 60)
    begin = time.monotonic()
    job = slurm.launch(*program, "train", config, "--resume", "auto", nodes=4, options=options)
    wait_for_pause(job, folder)
    job.wait(lambda facts: facts["Restarts"] == "1")
    requeued = round(time.monotonic() - begin)
    saved = saved_when_asked(folder)
    assert job.finish() == "COMPLETED", job.output()
    assert_undisturbed(folder, other)
    found["requeued before the time limit"] = {
        "limit_seconds": 180,
        "requeued_after_seconds": requeued,
        "saved_at_step": saved,
        "restarts": 1,
        "steps_and_weights": "bit for bit those of the undisturbed job",
    }


def test_scancel_ends_with_a_checkpoint_and_a_new_job_of_that_name_goes_on(
    slurm: Slurm, config: Path, undisturbed: Undisturbed, found: dict[str, Any]
) -> None:
    other, folder = undisturbed(4), run_folder(config)
    job = slurm.launch(*pausing(config.parent, PAUSE), "train", config, nodes=4)
    wait_for_pause(job, folder)
    slurm.ask("scancel", job.number)
    assert job.finish() == "CANCELLED"
    job.wait_until_gone()
    saved = saved_when_asked(folder)
    second = slurm.launch("train", config, nodes=4)
    assert second.finish() == "COMPLETED", second.output()
    assert_undisturbed(folder, other)
    found["scancel"] = {"state": "CANCELLED", "saved_at_step": saved, "next_job": "goes on, bit for bit"}


def test_a_killed_process_ends_the_job_at_once(slurm: Slurm, config: Path, found: dict[str, Any]) -> None:
    folder = run_folder(config)
    job = slurm.launch(*pausing(config.parent, PAUSE), "train", config, nodes=4)
    wait_for_pause(job, folder)
    begin = time.monotonic()
    os.kill(job.process(3), 9)
    assert job.finish() == "FAILED"
    job.wait_until_gone()
    found["kill -9 of a process"] = {"state": "FAILED", "over_after_seconds": round(time.monotonic() - begin)}


@pytest.mark.parametrize("place", [0, 2], ids=["first", "last"])
def test_a_job_outlives_the_daemon_of_a_node(
    slurm: Slurm, config: Path, undisturbed: Undisturbed, found: dict[str, Any], place: int
) -> None:
    other, folder = undisturbed(3), run_folder(config)
    program = config.parent / "slow.py"
    program.write_text(SLOW, encoding="utf-8")
    job = slurm.launch(program, "train", config, nodes=3)
    facts = job.wait(lambda facts: facts["JobState"] == "RUNNING" and len(metrics(folder)) >= 4)
    lost = slurm.nodes_of(facts)[place]
    begin = time.monotonic()
    slurm.daemons[lost].kill()
    facts = job.wait(lambda facts: facts["Restarts"] == "1" and facts["JobState"] == "RUNNING")
    again = round(time.monotonic() - begin)
    before = steps_saved(folder)[-1]
    assert before < STEPS
    assert lost not in slurm.nodes_of(facts)
    assert job.finish() == "COMPLETED", job.output()
    slurm.daemons[lost].wait()
    slurm.start_node(lost)
    assert_undisturbed(folder, other)
    found[f"kill -9 of the slurmd of the {'last' if place else 'first'} node"] = {
        "runs_again_after_seconds": again,
        "from_step": before,
        "on": "the other nodes",
        "steps_and_weights": "bit for bit those of the undisturbed job",
    }


def test_the_published_script_starts_a_job_that_goes_on_by_its_name(
    slurm: Slurm, tmp_path: Path, listed: Path, found: dict[str, Any]
) -> None:
    folder, steps = tmp_path / "mine", 40
    variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SLURM_PARTITION": "main"}
    variables |= {"NUM_NODES": "2", "EXP_NAME": "mine", "DUMP_FOLDER": str(tmp_path)}
    flags = ["--ngpus=1", "--gpus_per_node=0", "--mem_gb=0", "--cpus_per_task=1", "--tiny", "--num-workers", "0"]
    flags += [
        "--training.jsonl_paths",
        str(listed / "clips.jsonl"),
        "--training.empty_prompt",
        str(listed / "empty.pt"),
    ]
    flags += ["--parallelism.dp_replicate=1", "--parallelism.dp_sharding=2", "--parallelism.tp_sharding=1"]
    flags += [
        f"--training.steps={steps}",
        "--training.global_batch_size=2",
        "--wandb.disable",
        "--wandb.log_interval=1",
    ]
    command = ["bash", str(ROOT / "scripts" / "train_submitit.sh"), *flags]
    done = subprocess.run(
        command, env=slurm.variables | variables, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    said = re.fullmatch(r"Submitted job_id: (\d+)\nJob id: \1\n", done.stdout)
    assert said, done.stdout + done.stderr
    job = Job(slurm, said[1], next(tmp_path.glob("submitit_logs/*")))
    job.wait(lambda facts: len(metrics(folder)) >= 2)
    slurm.ask("scancel", "--signal", "USR1", job.number)
    job.wait(lambda facts: facts["Restarts"] == "1")
    saved = steps_saved(folder)[-1]
    assert 2 <= saved < steps
    assert job.finish() == "COMPLETED", job.output()
    assert [line["step"] for line in metrics(folder)] == list(range(1, steps + 1))
    found["scripts/train_submitit.sh"] = {"state": "COMPLETED", "restarts": 1, "from_step": saved, "steps": steps}


def test_a_job_is_shown_by_its_name_and_stopped_as_other_runs_are(
    slurm: Slurm, config: Path, found: dict[str, Any]
) -> None:
    folder = run_folder(config)
    job = slurm.launch(*pausing(config.parent, PAUSE), "train", config, nodes=2)
    wait_for_pause(job, folder)
    name = job.facts()["JobName"]
    (run,) = [one for one in node.runs()["runs"] if one["name"] == name]
    assert [pid for pid, _ in run["first"]] == sorted(job.process(rank) for rank in range(2))
    assert node.signal(SIGTERM, run["first"])["alive"] == run["first"]
    job.finish()
    job.wait_until_gone()
    found["longtake stop of a job"] = {"shown_as": name, "saved_at_step": saved_when_asked(folder)}
