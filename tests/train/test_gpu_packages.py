"""A machine with a GPU image and the recorded wheels has all packages that training from a Parquet table imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Clips and tables, the autoencoders' and T5's modules, a training by Open-Sora 1.2, whose captions are cleaned, and one
# with Wan's own encoders
CODE = """
import sys, json
from importlib import import_module
from importlib.util import find_spec
assert not find_spec("duckdb")
sys.path.insert(0, "benchmarks/gpu_jobs")
import clips
import_module("diffusers").AutoencoderKLHunyuanVideo
import_module("transformers").T5EncoderModel
from longtake.cli import main
try:
    main(json.loads(sys.argv[2]))
except SystemExit as end:
    assert not end.code
from tests.verification.releases import wan, write_run
folder = clips.folder / "wan"
folder.mkdir()
main(["train", str(write_run(folder, wan(folder))), *json.loads(sys.argv[3])])
"""


def test_training_imports_what_a_gpu_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import gpu_packages

    common = ["--dataset.data-path", f"{tmp_path}/clips.parquet", "--device", "cpu", "--max-steps", "1"]
    common += ["--outputs", f"{tmp_path}/runs"]
    run = ["train", "opensora_v1_2/stage1", *common, "--tiny", "--num-workers", "1", "--exp_name", "run"]
    line = [sys.executable, "-c", CODE, str(tmp_path), json.dumps(run), json.dumps([*common, "--exp_name", "wan"])]
    environment = {**os.environ, **gpu_packages.hiding()}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("run", "wan"):
        assert list((tmp_path / "runs" / name).glob("epoch*")), done.stdout
