"""Open-Sora 2.0's own command lines, as its pages write them; only sizes, steps and the launcher's port are added."""

from __future__ import annotations

import csv
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest

from longtake.data.shapes import make_shapes
from longtake.data.tables.table import ClipTable
from longtake.train.run_file import read_run
from tests import forks

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with `scripts`, and a table of clips whose paths start from it."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "scripts").symlink_to(ROOT / "scripts")
    made = make_shapes(folder / "made", num_clips=12, num_stills=4)
    with made.open(newline="") as file:
        rows = [(f"made/{row['path']}", row["text"]) for row in csv.DictReader(file)]
    (folder / "tables").mkdir()
    with (folder / "tables" / "videos.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "text"), *rows])
    return folder


def shell(place: Path, line: str, fresh: bool = False) -> str:
    """Runs a line of torchrun as a shell does, globs and all; it must succeed. Returns what it prints.

    `fresh`: the shell itself runs it; else it says its words, which processes with torch loaded take.
    """
    words = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "CUDA_VISIBLE_DEVICES": ""}
    words["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    line = line.replace("torchrun ", "torchrun --standalone ")
    options = {"cwd": place, "env": os.environ | words, "timeout": 600}
    said = ["bash", "-c", line if fresh else f"printf '%s\\0' {line}"]
    done = subprocess.run(said, capture_output=True, text=True, **options)
    if not fresh:
        _, *rest = done.stdout.split("\0")[:-1]
        done = forks.run([sys.executable, "-m", "tests.torchrun", *rest], **options)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def python(place: Path, line: str) -> int | str | None:
    """Runs `python SCRIPT ...` in this process. Returns its exit status."""
    _, script, *words = shlex.split(line)
    with pytest.MonkeyPatch.context() as patch, chdir(place):
        patch.setattr(sys, "argv", [script, *words])
        with pytest.raises(SystemExit) as done:
            runpy.run_path(script, run_name="__main__")
    return done.value.code


@pytest.fixture(scope="module")
def table(place: Path) -> str:
    """The table with sizes."""
    line = "python scripts/cnv/meta.py --input tables/videos.csv --output tables/meta.csv --num_workers 0"
    assert python(place, line) == 0
    return "tables/meta.csv"


@pytest.fixture(scope="module")
def run(place: Path, table: str) -> str:
    """What training says; the run is `outputs/run`."""
    return shell(
        place,
        "torchrun --nproc_per_node 2 scripts/diffusion/train.py configs/diffusion/train/stage1_i2v.py "
        f"--dataset.data-path {table} --lr 3e-5 --async-io True --grad_ckpt_setting '(1, 2)' "
        "--grad_ckpt_buffer_size 1048576 --exp-name run --ckpt-every 1 --tiny --max-steps 2",
    )


def test_training_runs_as_written(place: Path, run: str) -> None:
    assert re.search(r"^configs/diffusion/train/stage1_i2v.py: read as .*opensora_v2/train/stage1_i2v.py$", run, re.M)
    assert run.count("elements of bf16 there") == 1  # rank 0 speaks
    assert "2 processes" in run
    assert "done at step 2; checkpoint: outputs/run/epoch0-global_step2" in run
    config = read_run(str(place / "outputs" / "run")).value
    assert (config.lr, config.optim.lr, config.async_io) == (3e-5, 3e-5, True)
    assert (config.model.grad_ckpt_settings, config.model.grad_ckpt_buffer_size) == ((1, 2), 2 * 2**20)


@pytest.mark.slow
@pytest.mark.usefixtures("run")
def test_a_run_starts_from_another_ones_checkpoint_at_a_place_of_its_own(place: Path, table: str) -> None:
    said = shell(
        place,
        "torchrun --nproc_per_node 1 scripts/diffusion/train.py configs/diffusion/train/stage2_i2v.py "
        f"--dataset.data-path {table} --load outputs/run/epoch*-global_step* --start-step 0 --start-epoch 0 "
        "--dataset.memory_efficient True --exp-name next --tiny --max-steps 3",
        fresh=True,
    )
    assert "--load: outputs/run/epoch0-global_step2, the newest of 2" in said
    assert "starts from outputs/run/epoch0-global_step2, step 2" in said
    assert "done at step 3" in said


@pytest.mark.usefixtures("run")
def test_inference_runs_as_written(place: Path) -> None:
    said = shell(
        place,
        "torchrun --nproc_per_node 1 scripts/diffusion/inference.py configs/diffusion/inference/t2i2v_256px.py "
        '--save-dir samples --prompt "raining, sea" --model.from_pretrained outputs/run/epoch*-global_step* --tiny',
    )
    assert "from outputs/run/epoch0-global_step2" in said
    (video,) = (place / "samples").glob("video_*/*.mp4")
    assert "raining, sea" in video.with_suffix(".txt").read_text()
    assert len(list((place / "samples" / "generated_condition").glob("*.png"))) == 1


@pytest.mark.usefixtures("run")
def test_prompts_of_a_table_with_the_old_flags(place: Path) -> None:
    (place / "prompts.csv").write_text('text,name\n"raining, sea",rain\na red circle,circle\n')
    code = python(
        place,
        "python scripts/diffusion/inference.py configs/diffusion/inference/256px.py --save-dir table "
        "--dataset.data-path prompts.csv --ckpt_path outputs/run/epoch0-global_step1 --num_frames 5 --num_steps 2 "
        "--aspect_ratio 1:1 --guidance 5 --motion-score 4 --tiny",
    )
    assert code == 0
    assert sorted(path.stem for path in (place / "table").glob("*/*.mp4")) == ["circle", "rain"]


def test_shards_beside_the_table(place: Path, table: str) -> None:
    assert python(place, f"python scripts/cnv/shard.py {table}") == 0
    assert len(ClipTable.open(place / "tables" / "meta.shards")) == 16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["image", "stage1", "stage2", "stage2_i2v", "demo"])
def test_every_stage_trains_as_written(name: str, place: Path, table: str) -> None:
    said = shell(
        place,
        f"torchrun --nproc_per_node 2 scripts/diffusion/train.py configs/diffusion/train/{name}.py "
        f"--dataset.data-path {table} --wandb True --async-io True --exp-name {name} --tiny --max-steps 2",
    )
    assert "done at step 2" in said
    assert list((place / "outputs" / name / "wandb").glob("offline-run-*"))


@pytest.mark.slow
@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("name", ["256px", "768px", "256px_tp", "t2i2v_256px", "t2i2v_768px"])
def test_every_inference_runs_as_written(name: str, place: Path) -> None:
    said = shell(
        place,
        f"torchrun --nproc_per_node 2 scripts/diffusion/inference.py configs/diffusion/inference/{name}.py "
        f'--save-dir {name} --prompt "raining, sea" --model.from_pretrained outputs/run/epoch*-global_step* --tiny',
    )
    assert "1 video in" in said
    assert len(list((place / name).glob("video_*/*.mp4"))) == 1


def test_a_mistake_is_one_sentence(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "python scripts/diffusion/train.py configs/diffusion/train/high_compression.py --dataset.data-path x.csv"
    assert python(place, line) == 2
    said = capsys.readouterr().err
    assert said.startswith("longtake: configs/diffusion/train/high_compression.py: is for the high-compression")
    assert said.count("\n") == 1
