"""Every command of docs/quickstart.md runs, on small clips and tiny weights from a local stand-in of the hub."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import typer

from longtake.cli.app import app
from longtake.data.clips.video import write_video
from tests.hub_server import hub_of
from tests.pasted import Walk, walk_in
from tests.verification.releases import cogvideox

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")

# The preset's sizes, brought down to those of the tiny weights.
TINY_WEIGHTS = """
--model.num-layers 2 --model.num-attention-heads 2 --model.attention-head-dim 16 --model.out-channels 4
--model.text-embed-dim 16 --model.max-text-seq-length 10 --model.time-embed-dim 32 --model.sample-height 4
--model.sample-width 4 --model.sample-frames 9 --ae.latent-channels 4 --t5.dim 16 --t5.max-length 10
--sizes None --bucket-config "{'32px': {9: (1.0, 1)}}"
"""


def commands(section: str) -> list[str]:
    """The lines of the blocks without a language, from a heading to the next."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [line for language, block in fenced if not language for line in block.splitlines()]


@pytest.fixture
def walk(capsys: pytest.CaptureFixture[str]) -> Walk:
    return walk_in(capsys)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with four captioned clips, a host file, and access to a hub on this machine."""
    pixels = np.random.default_rng(0).integers(0, 256, (20, 72, 96, 3), np.uint8)
    here = tmp_path / "here"
    for number in range(4):
        write_video(here / "clips" / f"{number}.mp4", pixels, 12)
        (here / "clips" / f"{number}.txt").write_text("A man walks", encoding="utf-8")
    (here / "hosts").write_text("localhost slots=8\n", encoding="utf-8")
    cogvideox(tmp_path / "published")
    monkeypatch.chdir(here)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with hub_of({"zai-org/CogVideoX-2b": tmp_path / "published"}) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield here


@pytest.mark.slow
def test_the_way_to_a_model_of_own_clips_runs_as_written(place: Path, walk: Walk) -> None:
    stats, plan, train, generate, report, copy, show, export = commands("A model of your own clips")
    assert "4 of 4 clips used" in walk(stats)
    assert "step" in walk(plan)
    assert "done at step 2" in walk(tried(train) + " --tiny")
    assert "1 video in samples/video_64px" in walk(f"{generate} --num-steps 2")
    walk(report)
    assert (place / "outputs/custom/report.html").is_file()
    walk(copy)
    assert "max_steps" in walk(show)
    walk(export)
    assert (place / "my_model.safetensors").is_file()


@pytest.mark.slow
def test_the_way_to_a_lora_of_own_clips_runs_as_written(place: Path, walk: Walk) -> None:
    download, stats, plan, train, generate, export = commands("A LoRA of your own clips")
    subprocess.run([Path(sys.executable).parent / "hf", *shlex.split(download)[1:]], check=True, env=os.environ)
    small = shlex.join(shlex.split(TINY_WEIGHTS))
    assert "4 of 4 clips used" in walk(f"{stats} {small}")
    assert "of 12 GiB" in walk(f"{plan} {small}")
    assert "done at step 2" in walk(f"{tried(train)} {small} --num-workers 0 --dtype fp32")
    assert "1 video in" in walk(f"{generate} --num-steps 2")
    walk(export)
    assert (place / "my_lora.safetensors").is_file()


def test_commands_for_a_cluster_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, walk: Walk) -> None:
    """Launches are printed and not made; what asks hosts is parsed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("localhost slots=8\n", encoding="utf-8")
    verbs = typer.main.get_command(app).commands
    launched = 0
    for line in commands("On a cluster"):
        verb, *words = shlex.split(line)[1:]
        if verb == "launch":
            assert "torch" in walk(line.replace(" -- ", " --dry-run -- "))
            launched += 1
        else:
            verbs[verb].make_context(verb, words)
    assert launched == 3


def tried(line: str) -> str:
    """A training command with two steps in place of its own number."""
    return re.sub(r"--max-steps \d+", "--max-steps 2", line)
