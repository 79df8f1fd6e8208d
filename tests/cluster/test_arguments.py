from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from longtake.cluster.arguments import Host, forwarded, name_and_folder
from longtake.cluster.connection import BOOTSTRAP, program_source, ssh_command
from longtake.cluster.launch import Launch, show
from longtake.contracts import UserError
from tests.train.runs import PATIENCE_SECONDS


def test_settings_of_libraries_go_along_and_those_of_this_machine_stay():
    ours = {
        "NCCL_DEBUG": "INFO",
        "HF_HOME": "/hf",
        "CUDA_VISIBLE_DEVICES": "0",
        "PATH": "/bin",
        "HOME": "/me",
        "K": "v",
    }
    assert forwarded(ours, []) == {"NCCL_DEBUG": "INFO", "HF_HOME": "/hf", "CUDA_VISIBLE_DEVICES": "0"}
    assert forwarded(ours, ["K", "X=a=b", "NCCL_DEBUG="]) | {"K": "v", "X": "a=b", "NCCL_DEBUG": ""} == forwarded(
        ours, ["K", "X=a=b", "NCCL_DEBUG="]
    )
    with pytest.raises(UserError, match="--env GONE: has no value here"):
        forwarded(ours, ["GONE"])
    with pytest.raises(UserError, match="where a variable's name is expected"):
        forwarded(ours, ["a-b=1"])


@pytest.mark.parametrize(
    ("words", "name", "folder"),
    [
        ("train configs/stage1.py --lr 1", "stage1", "outputs/stage1"),
        ("train opensora_v2/lora --lr 1", "lora", "outputs/lora"),
        ("train --tiny x.py --exp-name mine", "mine", "outputs/mine"),
        ("train x.py --exp_name=mine --outputs /data", "mine", "/data/mine"),
        ("train outputs/mine", "mine", "outputs/mine"),
        ("scripts/diffusion/train.py x.py", "x", "outputs/x"),
        ("generate outputs/mine --prompt x", "generate mine", ""),
        ("scripts/mine.py", "mine", ""),
    ],
)
def test_a_run_is_called_as_it_calls_itself(words: str, name: str, folder: str):
    assert name_and_folder(words.split()) == (name, folder)


def test_the_name_may_stand_in_the_runs_file_or_be_given(tmp_path: Path):
    (tmp_path / "run.py").write_text('exp_name = "of_file"\noutputs = "/out"\n')
    words = ["train", str(tmp_path / "run.py")]
    assert name_and_folder(words) == ("of_file", "/out/of_file")
    assert name_and_folder(words, "given") == ("given", "/out/of_file")
    (tmp_path / "run.py").write_text("exp_name = (")
    assert name_and_folder(words)[0] == "run"


def test_a_dry_run_shows_every_hosts_command():
    shown = io.StringIO()
    planned = Launch(
        hosts=[Host("a", slots=8), Host("b", "me", 22, slots=4)],
        words=["train", "x.py", "--exp-name", "two words"],
        name="x",
        folder="outputs/x",
        workdir="/my work",
        python="/venv/bin/python",
        environment={"HF_TOKEN": "secret"},
    )
    show(planned, shown)
    first, second = shown.getvalue().splitlines()[2], shown.getvalue().splitlines()[5]
    assert "--nnodes 2 --node-rank 0 --nproc-per-node 8 --master-addr a" in first
    assert "--node-rank 1 --nproc-per-node 4 --master-addr a" in second
    assert first.endswith("-m longtake train x.py --exp-name 'two words'")
    assert "cd '/my work'" in shown.getvalue()
    assert "variables sent along: HF_TOKEN\n" in shown.getvalue()
    assert "secret" not in shown.getvalue()


def test_no_word_of_the_run_is_on_sshs_command_line_and_the_users_options_come_first():
    words = ssh_command(["ssh", "-F", "my file"], Host("node1", "me", 2200), "/with space/python")
    assert words[:3] == ["ssh", "-F", "my file"]
    assert words[-2] == "me@node1"
    assert words[words.index("-p") + 1] == "2200"
    assert words[-1].startswith("exec '/with space/python' -u -c '")
    assert shlex.split(words[-1])[:3] == ["exec", "/with space/python", "-u"]
    assert "exec ~/venv/bin/python" in ssh_command(["ssh"], Host("a"), "~/venv/bin/python")[-1]


def test_a_program_for_hosts_needs_nothing_but_python():
    greeting = {"environment": {}, "nonce": "now"}
    source = program_source("node")
    sent = b"%d\n%s%s\n" % (len(source), source, json.dumps(greeting).encode()) + b'{"do": "runs", "sent": 0}\n'
    command = [sys.executable, "-I", "-S", "-c", BOOTSTRAP]  # which finds no package at all
    done = subprocess.run(command, input=sent, capture_output=True, timeout=PATIENCE_SECONDS)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(b"\nnow\nJ ")
