"""The verb itself: what it refuses before it connects to anybody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from longtake.cli.launch import name_and_folder
from tests.dialects.speech import ROOT
from tests.train.runs import assert_one_sentence, run_command

Capture = pytest.CaptureFixture[str]


def test_it_explains_itself(capsys: Capture):
    code, out, error = run_command(capsys, ["launch", "--help"])
    assert (code, error) == (0, "")
    assert "Usage: longtake launch" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "a"], "launch: found nothing behind --"),
        (["--host", "a", "--", "--lr", "1"], "launch: found --lr behind --"),
        (["--host", "a", "--", "launch", "x"], "launch: found launch behind --"),
        (["--hostfile", "h", "--host", "a", "--", "train", "x.py"], "either --hostfile FILE or --host a,b"),
        (["--hostfile", "gone", "--", "train", "x.py"], "gone: No such file or directory"),
        (["--host", "a,a", "--", "train", "x.py"], "a: is there twice"),
        (["--host", "a", "--ssh", "", "--", "train", "x.py"], "--ssh: is empty"),
        (["--host", "a\x1b", "--", "train", "x.py"], "is no host"),
        (["--host", "a", "--ssh", "ssh 'x", "--", "train", "x.py"], "--ssh ssh 'x: No closing quotation"),
        (["--host", "a", "--ssh", "gone-ssh", "--", "train", "x.py"], "--ssh gone-ssh: no such program here"),
        (["--host", "a", "--nproc-per-node", "0", "--", "train", "x.py"], "--nproc-per-node"),
        (["--host", "a", "--grace", "inf", "--", "train", "x.py"], "--grace"),
    ],
)
def test_a_mistake_is_one_sentence(capsys: Capture, words: list[str], said: str):
    code, _, error = run_command(capsys, ["launch", *words])
    assert_one_sentence(code, error, said)


def test_a_dry_run_needs_no_host(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", os.fspath(tmp_path))
    (tmp_path / "hosts").write_text("node1 slots=8\nnode2 slots=8\n")
    options = ["--hostfile", "hosts", "--nproc_per_node", "4", "--master-port", "29500", "--dry-run"]
    words = ["launch", *options, "--", "train", "x.py", "--lr", "1", "--tiny"]
    code, out, error = run_command(capsys, words)
    assert (code, error) == (0, "")
    assert out.count("--nnodes 2") == 2
    assert out.count("--nproc-per-node 4 --master-addr node1 --master-port 29500") == 2
    assert out.count("-m longtake train x.py --lr 1 --tiny\n") == 2
    assert f"[node2]   cd {tmp_path}" in out


def test_mistake_in_the_run_is_found_before_hosts_are_asked(capsys: Capture) -> None:
    words = [
        "launch",
        "--host",
        "a",
        "--ssh",
        "gone-ssh",
        "--",
        "train",
        "opensora_v2/stage1",
        "--dataset.data-path",
        "x",
    ]
    assert_one_sentence(*run_command(capsys, [*words, "--lr", "abc"])[::2], "--lr")
    assert_one_sentence(*run_command(capsys, words)[::2], "--ssh gone-ssh")
    forced = [*words[:1], "--force", *words[1:], "--lr", "abc"]  # the hosts may have other files
    assert_one_sentence(*run_command(capsys, forced)[::2], "--ssh gone-ssh")


@pytest.mark.parametrize(
    ("script", "words", "name", "folder"),
    [
        ("train.py", "--job.config_file configs/train/ttt-mlp/9s.toml --job.dump_folder=/d", "cogvideo-mlp-9s", "/d"),
        ("scripts/cogvideox_fun/train_lora.py", "--tiny --train_data_meta x.json --output_dir o", "run", "o"),
        ("scripts/diffusion/train.py", "configs/diffusion/train/image.py", "image", "outputs"),
    ],
)
def test_script_of_another_system_is_called_as_its_run(
    script: str, words: str, name: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    flags = ["--training.jsonl_paths=x.jsonl"] * (script == "train.py")
    assert name_and_folder([script, *words.split(), *flags], None) == (name, f"{folder}/{name}")


def test_here_a_run_that_is_misspelt_is_found_before_anything_starts(capsys: Capture) -> None:
    code, _, error = run_command(capsys, ["launch", "--dry-run", "--", "train", "opensora_v2/stge1"])
    assert_one_sentence(code, error, "did you mean the preset")


def test_two_dashes_stay_a_mistake_for_other_verbs(capsys: Capture):
    assert_one_sentence(*run_command(capsys, ["train", "x.py", "--", "1"])[::2], "--: a name is missing")
