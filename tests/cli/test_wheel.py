"""The wheel holds all of the package, and works in an environment outside the clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys, setuptools.build_meta as backend; print(backend.build_wheel(sys.argv[1]))"
# The demo's own config, made small: the clips are all of them, the model is trained for a moment only.
SMALL_DEMO = """
--model.depth 1 --model.depth_single_blocks 1 --model.hidden_size 32 --model.num_heads 1 --max-steps 2 --num-workers 0
--sampling_option.num_steps 2 --device cpu
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of `python -m build`, by the same backend; of a copy, because the build writes into the sources."""
    place = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    shutil.copytree(ROOT / "longtake", place / "longtake", ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(place / "dist")], cwd=place, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return place / "dist" / done.stdout.splitlines()[-1]


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("longtake/")}
    files = (path for path in (ROOT / "longtake").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert packed == {path.relative_to(ROOT).as_posix() for path in files}


@pytest.mark.slow
def test_the_demo_of_an_installed_wheel_runs_outside_the_clone(wheel: Path, tmp_path: Path) -> None:
    """An environment of its own, which sees the packages that Longtake needs but no Longtake besides the wheel's."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=600)
    python = tmp_path / "venv/bin/python"
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: object) -> str:
        done = subprocess.run(
            [str(word) for word in words],
            cwd=tmp_path / "empty",
            env=variables,
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    (tmp_path / "empty").mkdir()
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "needed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    found = run(python, "-c", "import longtake; print(longtake.__file__)").strip()
    assert Path(found).is_relative_to(packages)

    longtake = tmp_path / "venv/bin/longtake"
    assert "opensora_v2/stage1" in run(longtake, "preset")
    run(longtake, "demo", *SMALL_DEMO.split())
    assert (tmp_path / "empty/outputs/demo/report.html").is_file()
