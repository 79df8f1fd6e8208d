"""A machine with a GPU image and the recorded wheels has all packages that training from a Parquet table imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Clips and tables, a training by Open-Sora 1.2, whose captions are cleaned, and the autoencoders' and T5's modules
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
main(json.loads(sys.argv[2]))
"""


def test_training_imports_what_a_gpu_machine_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import gpu_packages

    run = ["train", "opensora_v1_2/stage1", "--dataset.data-path", f"{tmp_path}/clips.parquet", "--tiny"]
    run += ["--device", "cpu", "--max-steps", "1", "--num-workers", "1", "--outputs", f"{tmp_path}/runs"]
    run += ["--exp-name", "run"]
    environment = {**os.environ, **gpu_packages.hiding()}
    line = [sys.executable, "-c", CODE, str(tmp_path), json.dumps(run)]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "runs/run").glob("epoch*")), done.stdout
