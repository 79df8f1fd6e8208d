"""A job for Slurm without Slurm: what would be asked of it, and a requeue by submitit's executor for this machine."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longtake.cluster.slurm import SlurmJob, resumable, submit
from longtake.contracts import UserError
from tests.cluster.servers import ROOT
from tests.train.runs import PATIENCE_SECONDS, assert_one_sentence, run_command

Capture = pytest.CaptureFixture[str]


STARTABLE = """
dataset = dict(data_path="clips.parquet")
bucket_config = {"32px": {1: (1.0, 1)}}
model = dict(in_channels=1536, patch_size=1, vec_in_dim=128, context_in_dim=128)
"""


def test_dry_run_checks_what_submission_checks(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb").teardown()  # settings are read once in a process
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no_login"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(STARTABLE)
    words = ["launch", "--slurm", "--nproc-per-node", 1, "--dry-run", "--", "train", "tiny.py"]
    assert run_command(capsys, words)[0] == 0
    for more, said in ((["--wandb"], "wandb login"), (["--lrr", "1"], "lrr")):
        code, out, error = run_command(capsys, [*words, *more])
        assert_one_sentence(code, error, said)
        assert "tasks_per_node = 1" in out


def test_a_dry_run_says_what_slurm_is_asked(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(f"exp_name = 'of_file'\noutputs = '/out'\n{STARTABLE}")
    options = ["--nodes", 8, "--nproc-per-node", 8, "--time", 20160, "-A", "team", "-p", "gpu", "--sbatch", "qos=high"]
    code, out, error = run_command(capsys, ["launch", *options, "--slurm", "--dry-run", "--", "train", "tiny.py"])
    assert (code, error) == (0, "")
    said = dict(line.split(" = ") for line in out.splitlines() if " = " in line)
    asked = ("name", "nodes", "tasks_per_node", "gpus_per_node", "timeout_min", "slurm_account", "slurm_partition")
    assert [said[key] for key in asked] == ["of_file", "8", "8", "8", "20160", "team", "gpu"]
    assert said["slurm_additional_parameters"] == "{'requeue': True, 'signal': 'USR1@120', 'qos': 'high'}"
    assert said["folder"].startswith("/out/submitit_logs/%j-")
    assert out.endswith("-m longtake train tiny.py --resume auto\n")


def test_the_words_of_train_submitit(tmp_path: Path) -> None:
    config = tmp_path / "3s.toml"
    config.write_text("[job]\nexp_name = 'of file'\ndump_folder = '/dump'\n")
    words = [f"--job.config_file={config}", "--job.exp_name=first", "--checkpoint.resume", "--wandb.disable"]
    words.append(f"--training.jsonl_paths={tmp_path / 'clips.jsonl'}")
    (tmp_path / "clips.jsonl").touch()
    flags = ["--nodes=4", "--partition=gpu", "-A", "team", "--timeout=240", "--dependency_job_id", "7", "--mem_gb=1"]
    command = [sys.executable, ROOT / "train_submitit.py", *flags, *words, "--dry_run"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS).stdout
    said = dict(line.split(" = ") for line in out.splitlines() if " = " in line)
    asked = ("name", "nodes", "tasks_per_node", "cpus_per_task", "mem_gb", "timeout_min", "max_num_timeout")
    assert [said[key] for key in asked] == ["first", "4", "8", "15", "1.0", "240", "15"]
    assert [said[f"slurm_{key}"] for key in ("partition", "account", "dependency")] == ["gpu", "team", "afterany:7"]
    assert said["folder"].startswith("/dump/submitit_logs/%j-")
    assert out.endswith(f"{ROOT / 'train.py'} {' '.join(words)}\n")


@pytest.mark.parametrize(
    ("file", "words", "added"),
    [
        ("", "--lr 1", "--exp_name named --resume auto"),
        ("", "--exp_name other", "--resume auto"),
        ("exp_name = 'other'\nload = 'x'\n", "", ""),
        ("exp_name = 'other'\n", "--load x", ""),
        ("exp_name = 'other'\n", "--resume auto", ""),
        ("exp_name = 'other'\nstages = [dict(name='a'), dict(name='b')]\n", "", ""),
    ],
)
def test_the_same_words_go_on(tmp_path: Path, file: str, words: str, added: str) -> None:
    run = tmp_path / "run.py"
    run.write_text(file)
    given = ["train", str(run), *words.split()]
    assert resumable(given, "named") == [*given, *added.split()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--slurm", "--", "train", "custom"], "--nproc-per-node"),
        (["--slurm", "--nproc-per-node", "1"], "launch: found nothing behind --"),
        (["--slurm", "--nproc-per-node", "1", "--host", "a", "--", "train", "custom"], "No such option: --host"),
        (["--slurm", "--nproc-per-node", "1", "--", "train", "custom"], "--slurm: no sbatch on this machine"),
    ],
)
def test_a_mistake_is_one_sentence(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    monkeypatch.setenv("PATH", "")
    code, _, error = run_command(capsys, ["launch", *words])
    assert_one_sentence(code, error, said)


def test_a_job_that_slurm_refuses_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sbatch", "srun"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpu' >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    job = SlurmJob(["train", "x.py"], "x", str(tmp_path / "%j"), partition="gpu")
    with pytest.raises(UserError, match=r"no job was submitted \(sbatch: error: invalid partition"):
        submit(job)


@pytest.fixture
def slurm_noting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Slurm that notes what it is asked, on a machine without a login to Weights & Biases."""
    wandb, noted = pytest.importorskip("wandb"), tmp_path / "asked"
    for name in ("sbatch", "srun"):
        (tmp_path / name).write_text(f"#!/bin/sh\necho x >> {noted}\necho Submitted batch job 7\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    wandb.teardown()  # settings are read once in a process
    return noted


def submitted(capsys: Capture, folder: Path, flags: list[str], script: bool) -> tuple[int, str]:
    """Exit status and errors of a submission, by `train_submitit.py` or by `longtake launch`."""
    table = folder / "clips.csv"
    table.write_text("path,text,num_frames,height,width,fps\n")
    if script:
        keys = [f"--training.jsonl_paths={table}", f"--job.dump_folder={folder}"]
        config = f"--job.config_file={ROOT / 'configs/train/ttt-mlp/3s.toml'}"
        code = runpy.run_path(str(ROOT / "train_submitit.py"))["main"]([config, *keys, *flags])
        return code, capsys.readouterr().err
    run = ["train", "opensora_v2/stage1", "--dataset.data-path", str(table), "--outputs", str(folder), *flags]
    code, _, error = run_command(capsys, ["launch", "--slurm", "--nproc-per-node", 1, "--", *run])
    return code, error


@pytest.mark.parametrize(
    ("flags", "script", "named"),
    [
        (["--wandb"], False, "wandb login"),
        (["--wandb", "--lrr", "1"], False, "lrr"),
        ([], True, "--wandb.disable"),
        (["--wandb.projekt=x", "--wandb.disable"], True, "projekt"),
    ],
)
def test_job_that_would_end_at_its_start_is_not_submitted(
    capsys: Capture, slurm_noting: Path, flags: list[str], script: bool, named: str
) -> None:
    code, error = submitted(capsys, slurm_noting.parent, flags, script)
    assert_one_sentence(code, error, named)
    assert not slurm_noting.exists()


@pytest.mark.parametrize(
    ("flags", "script", "variable"),
    [
        ([], False, None),
        (["--wandb"], False, ("WANDB_MODE", "offline")),
        (["--wandb"], False, ("WANDB_API_KEY", "0" * 40)),
        (["--wandb"], False, ("NETRC", "{folder}/login")),
        (["--wandb.disable"], True, None),
    ],
)
def test_job_that_can_log_or_need_not_is_submitted(
    capsys: Capture,
    slurm_noting: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    script: bool,
    variable: tuple[str, str] | None,
) -> None:
    folder = slurm_noting.parent
    (folder / "login").write_text(f"machine api.wandb.ai\nlogin user\npassword {'0' * 40}\n")
    if variable is not None:
        monkeypatch.setenv(variable[0], variable[1].format(folder=folder))
    assert submitted(capsys, folder, flags, script) == (0, "")
    assert slurm_noting.exists()


def test_script_of_slurm_names_the_run_alike_on_every_day(tmp_path: Path) -> None:
    (tmp_path / "python").write_text('#!/bin/sh\necho "$@" >&2; echo Submitted job_id: 7\n')
    (tmp_path / "date").write_text("#!/bin/sh\necho some-day\n")
    for name in ("python", "date"):
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    asked = subprocess.run(
        ["bash", ROOT / "scripts/train_submitit.sh"], env=environment, capture_output=True, text=True, check=True
    ).stderr
    assert "--job.exp_name=" in asked
    assert "some-day" not in asked


# A run that saves and ends: asked by a signal in its first start, or of itself.
PROGRAM = """
import os, pathlib, signal, sys, time

for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda *_: sys.exit(130))
started = pathlib.Path(sys.argv[1]) / f"{os.environ['RANK']}-of-{os.environ['WORLD_SIZE']}"
restarted = started.exists()
with started.open("a") as file:
    print(os.getpid(), file=file)
if not restarted:
    time.sleep(60 if len(sys.argv) > 2 else 0)
    sys.exit(130)
"""


@pytest.mark.parametrize(
    ("asked_by", "requeues", "starts"),
    [(signal.SIGUSR1, 1, 2), (signal.SIGUSR1, 0, 1), (signal.SIGTERM, 1, 1), (None, 1, 2)],
    ids=["time is up", "too often", "scancel", "time_limit"],
)
def test_a_job_that_has_saved_is_started_again(
    tmp_path: Path, asked_by: signal.Signals | None, requeues: int, starts: int
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words, logs = [str(program), str(tmp_path), *["wait"] * (asked_by is not None)], str(tmp_path / "%j")
    job = SlurmJob(words, "x", logs, processes=2, minutes=1, max_requeues=requeues)
    started = [tmp_path / f"{rank}-of-2" for rank in (0, 1)]
    number = submit(job, "local")
    wait_for(lambda: all(file.exists() and file.read_text() for file in started))
    for file in started if asked_by else ():
        os.kill(int(file.read_text()), asked_by)
    wait_for(lambda: not Path(f"/proc/{number}").exists() or os.waitpid(int(number), os.WNOHANG)[0] != 0)
    assert [len(file.read_text().split()) for file in started] == [starts, starts]
    said = (tmp_path / number / f"{number}_0_log.out").read_text()
    assert ("timed-out too many times" in said) == (requeues == 0)


def wait_for(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.05)
