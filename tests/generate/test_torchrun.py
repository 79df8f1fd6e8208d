from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from longtake.generate import read_video
from longtake.train import Outcome

PROMPTS = ["a red circle moves left", "a blue square moves up", "a green triangle moves down"]


def launch(num_ranks: int, run: Outcome, prompts: Path, target: Path) -> str:
    words = [
        "-m",
        "longtake",
        "generate",
        str(run.folder),
        "--prompts",
        str(prompts),
        "--save-dir",
        str(target),
        "--grid",
    ]
    if num_ranks > 1:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_number_of_processes_does_not_change_a_video(run: Outcome, tmp_path: Path):
    prompts = tmp_path / "p.csv"
    prompts.write_text("name,text\n" + "".join(f"same,{text}\n" for text in PROMPTS))
    for ranks in (1, 2):
        said = launch(ranks, run, prompts, tmp_path / f"by{ranks}")
        assert said.count("3 videos in") == 1  # rank 0 speaks, the other is silent
    alone, shared = (sorted((tmp_path / f"by{ranks}" / "video_32px").iterdir()) for ranks in (1, 2))
    assert [path.name for path in alone] == [path.name for path in shared]
    assert len(alone) == 7  # three videos, three prompts, one sheet
    for a, b in zip(alone, shared, strict=True):
        if a.suffix == ".mp4":
            assert np.abs(read_video(a).astype(int) - read_video(b)).max() <= 2
        elif a.suffix == ".txt":
            assert a.read_text() == b.read_text()
