from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from longtake.demo.place import choose_folder
from tests.demo.test_run import SMALL
from tests.train.runs import start, wait_until

# `longtake demo` with fewer clips.
PROGRAM = """
import sys
from functools import partial
from longtake.demo import start as demo
demo.run_demo = partial(demo.run_demo, num_clips=24, num_stills=6)
from longtake.cli import main
main(["demo", *sys.argv[1:]])
"""


def start_demo(folder: Path, *words: str, processes: int = 0) -> subprocess.Popen[str]:
    program = folder.parent / "program.py"
    program.write_text(PROGRAM)
    return start("--folder", folder, *words, processes=processes, program=(str(program),))


def steps(folder: Path) -> int:
    metrics = folder / "run" / "metrics.jsonl"
    return len(metrics.read_text().splitlines()) if metrics.exists() else 0


@pytest.mark.slow
def test_ctrl_c_while_training_and_while_generating_leaves_a_demo_that_goes_on(tmp_path: Path):
    folder = tmp_path / "demo"
    go_on = f"to go on with the demo: longtake demo --folder {folder}"

    training = start_demo(folder, *SMALL, "--max-steps", "100000", "--ckpt-every", "0")
    wait_until(training, lambda: steps(folder) >= 3)
    training.send_signal(signal.SIGINT)
    out, err = training.communicate(timeout=600)
    assert training.returncode == 130
    assert out.rstrip().endswith(go_on)
    assert "stopping after this step with a checkpoint" in err
    assert "Traceback" not in err
    trained = steps(folder)

    generating = start_demo(folder, "--max-steps", "4", "--sampling_option.num_steps", "200")
    wait_until(generating, (folder / ".samples.partial" / "wide").exists)
    generating.send_signal(signal.SIGINT)
    out, err = generating.communicate(timeout=600)
    assert generating.returncode == 130
    assert out.rstrip().endswith(f"interrupted\n{go_on}")
    assert "Traceback" not in err
    assert steps(folder) == trained  # training was over and is not touched

    last = start_demo(folder, "--sampling_option.num_steps", "2")
    out, err = last.communicate(timeout=600)
    assert last.returncode == 0, err
    assert (folder / "report.html").exists()
    assert len(list((folder / "samples").rglob("prompt_*.mp4"))) == 264
    assert choose_folder(folder) == tmp_path / "demo-2"


@pytest.mark.slow
def test_two_processes_make_one_demo(tmp_path: Path):
    both = start_demo(tmp_path / "demo", *SMALL, processes=2)
    out, err = both.communicate(timeout=600)
    assert both.returncode == 0, err
    assert out.count("[4/4]") == 1
    assert (tmp_path / "demo" / "report.html").exists()
    assert len(list((tmp_path / "demo" / "samples").rglob("prompt_*.mp4"))) == 264
