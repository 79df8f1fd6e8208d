"""What a wheel installs is enough: presets are in it, and are found, shown, copied and trained from any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOT_IN_A_TREE = shutil.ignore_patterns(".*", "outputs", "build", "dist", "*.egg-info", "__pycache__", "tests", "shared")


@pytest.mark.slow
def test_presets_are_used_from_a_wheel_in_an_environment_of_its_own(tmp_path: Path, clips: Path) -> None:
    """Nothing is downloaded: the environment sees the libraries of this one by a path, but no editable install."""
    shutil.copytree(ROOT, tmp_path / "tree", symlinks=True, ignore=NOT_IN_A_TREE)
    build = "from setuptools.build_meta import build_wheel; build_wheel('../wheels')"
    run([sys.executable, "-c", build], tmp_path / "tree")
    (wheel,) = (tmp_path / "wheels").glob("longtake-*.whl")
    own = tmp_path / "own"
    run([sys.executable, "-m", "venv", "--without-pip", str(own)], tmp_path)
    paths = {name: sysconfig.get_path(name, "venv", {"base": str(own)}) for name in ("purelib", "scripts")}
    python = str(Path(paths["scripts"]) / "python")
    shutil.unpack_archive(wheel, paths["purelib"], "zip")
    Path(paths["purelib"], "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")

    folder = tmp_path / "anywhere"
    folder.mkdir()
    command = [python, "-m", "longtake"]
    assert run([python, "-c", "import longtake; print(longtake.__file__)"], folder).startswith(str(own))
    assert "opensora_v2/stage1 " in run([*command, "preset"], folder)
    assert "lr = 5e-05  #" in run([*command, "config", "show", "opensora_v2/stage1"], folder)
    tiny = ["--tiny", "--max-steps", "1", "--dataset.data-path", str(clips)]
    assert "done at step 1" in run([*command, "train", "opensora_v2/stage2_i2v", *tiny], folder)
    run([*command, "preset", "copy", "opensora_v2/lora"], folder)
    assert "done at step 1" in run([*command, "train", "lora.py", *tiny], folder)


def run(words: Sequence[str], folder: Path) -> str:
    """What a program prints; it must end well."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
