"""What docs/migrating.md says of CogVideoX-Fun is what its dialect does."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from longtake.presets import run_file
from longtake.train.config import RunConfig
from longtake.train.run_file import read_run
from tests.dialects.fun import ROOT, spoken, write_root

PAGE = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8").partition("\n## CogVideoX-Fun")[2]
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `accelerate")]
NEW = re.compile(r"`(?:torchrun --nproc_per_node \d -m )?longtake train (cogvideox_fun/\S+ .*?)`")
MODELS = {"CogVideoX-Fun-V1.1-2b-InP": "inpaint", "CogVideoX-2b": None}
ALIKE = (
    *("sizes", "lora", "condition_config", "dropout_ratio", "lr", "eps", "optim", "grad_clip", "epochs", "seed"),
    *("ckpt_every", "num_workers", "accumulation_steps", "dtype", "fps_save", "parallel", "objective", "max_steps"),
)


@pytest.fixture
def place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with published models of the page's names, and the files that the lines name."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE", "FSDP"))]:
        monkeypatch.delenv(name)
    (tmp_path / "models").mkdir()
    for name, visual in MODELS.items():
        folder = tmp_path_factory.getbasetemp() / name
        root = folder / "published" if folder.exists() else write_root(folder, visual)
        (tmp_path / "models" / name).symlink_to(root)
    (tmp_path / "config").symlink_to(ROOT / "config")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launched(line: str, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """The run that a line means, in the environment that accelerate's own parser and launcher make of it."""
    launch = pytest.importorskip("accelerate.commands.launch")
    args = launch.launch_command_parser().parse_args(shlex.split(line)[2:])
    args.num_processes, args.num_machines = args.num_processes or 1, 1
    args.num_cpu_threads_per_process, args.dynamo_backend = 1, args.dynamo_backend or "no"
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        variables = launch.prepare_deepspeed_cmd_env(args)[1]
    else:
        variables = launch.prepare_multi_gpu_env(args)
    for name, value in {**variables, "WORLD_SIZE": str(args.num_processes)}.items():
        monkeypatch.setenv(name, value)
    return spoken(Path(args.training_script).stem, *args.training_script_args)[0]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][-60:])
def test_every_line_of_the_page_is_understood(row: list[str], place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = launched(row[0].strip("`"), monkeypatch)
    assert config.model.from_pretrained in [f"models/{name}" for name in MODELS]
    assert config.dataset.data_path == "metadata.json"
    if (new := NEW.search(row[1])) is None:
        return
    run, *flags = shlex.split(new[1])
    here = read_run(run_file(run), flags).value
    for key in ALIKE:
        own, theirs = getattr(here, key), getattr(config, key)
        if key == "objective":
            own, theirs = own.snr_shift, theirs.snr_shift
        assert own == theirs, key


def test_the_page_has_lines() -> None:
    assert len(ROWS) >= 8
