"""The Dockerfile builds from what is in the repository, and keeps the rules of hadolint."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments) pairs, continued lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines())]


def arguments_of(instruction: str) -> list[str]:
    return [rest for name, rest in instructions() if name == instruction]


def test_the_image_has_one_stage_on_a_pinned_cuda_base() -> None:
    (base,) = arguments_of("FROM")
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-base-ubuntu24\.04", base)


def test_the_image_leaves_no_package_caches_and_no_root_user() -> None:
    for command in arguments_of("RUN"):
        assert ("apt-get install" in command) == ("rm -rf /var/lib/apt/lists/*" in command)
        assert ("pip install" in command) == ("--no-cache-dir" in command)
    assert arguments_of("USER")[-1].split(":")[0] not in ("root", "0")


def test_what_the_image_copies_is_in_the_repository_and_not_ignored() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [source for line in arguments_of("COPY") for source in line.split()[:-1]]
    assert sorted(sources) == sorted(allowed)
    assert all((ROOT / source).exists() for source in sources)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {project["readme"], *project["license-files"], "pyproject.toml", "longtake"}
    assert all(any(fnmatch.fnmatch(name, source) for source in sources) for name in needed)


def test_the_image_installs_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extras,) = re.findall(r"/src\[([\w,]+)\]", " ".join(arguments_of("RUN")))
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()


def test_hadolint_finds_nothing() -> None:
    program = shutil.which("hadolint") or shutil.which("hadolint", path=Path(sys.executable).parent)
    if program is None:
        pytest.skip("hadolint is not installed: no wheel for this machine")
    done = subprocess.run([program, str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
