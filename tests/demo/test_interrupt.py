from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longtake.demo.place import choose_folder
from tests.demo.test_run import SMALL

# `longtake demo` with fewer clips.
PROGRAM = """
import sys
from functools import partial
import longtake.cli.demo as verb
verb.run_demo = partial(verb.run_demo, num_clips=24, num_stills=6)
from longtake.cli import main
main(["demo", *sys.argv[1:]])
"""


def start(folder: Path, *words: str, ranks: int = 1) -> subprocess.Popen[str]:
    program = folder.parent / "program.py"
    program.write_text(PROGRAM)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(program), "--folder", str(folder), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def steps(folder: Path) -> int:
    metrics = folder / "run" / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


@pytest.mark.slow
def test_ctrl_c_while_training_and_while_generating_leaves_a_demo_that_goes_on(tmp_path: Path):
    folder = tmp_path / "demo"
    go_on = f"to go on with the demo: longtake demo --folder {folder}"

    training = start(folder, *SMALL, "--max-steps", "100000", "--ckpt-every", "0")
    wait_for(lambda: steps(folder) >= 3, training)
    training.send_signal(signal.SIGINT)
    out, err = training.communicate(timeout=600)
    assert training.returncode == 130
    assert out.rstrip().endswith(go_on)
    assert "stopping after this step with a checkpoint" in err
    assert "Traceback" not in err
    trained = steps(folder)

    generating = start(folder, "--max-steps", "4", "--sampling_option.num_steps", "200")
    wait_for(lambda: (folder / ".samples.partial" / "wide").exists(), generating)
    generating.send_signal(signal.SIGINT)
    out, err = generating.communicate(timeout=600)
    assert generating.returncode == 130
    assert out.rstrip().endswith(f"interrupted\n{go_on}")
    assert "Traceback" not in err
    assert steps(folder) == trained  # training was over and is not touched

    last = start(folder, "--sampling_option.num_steps", "2")
    out, err = last.communicate(timeout=600)
    assert last.returncode == 0, err
    assert (folder / "report.html").exists()
    assert len(list((folder / "samples").rglob("prompt_*.mp4"))) == 264
    assert choose_folder(folder) == tmp_path / "demo-2"


@pytest.mark.slow
def test_two_processes_make_one_demo(tmp_path: Path):
    both = start(tmp_path / "demo", *SMALL, ranks=2)
    out, err = both.communicate(timeout=600)
    assert both.returncode == 0, err
    assert out.count("[4/4]") == 1
    assert (tmp_path / "demo" / "report.html").exists()
    assert len(list((tmp_path / "demo" / "samples").rglob("prompt_*.mp4"))) == 264
