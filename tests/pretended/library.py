"""Builds the fake CUDA device (`device.cpp`) against this PyTorch's headers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import torch


class CannotBuild(Exception):
    """This machine has no use for the fake device, or nothing to build it with."""


def build_library(folder: Path) -> Path:
    """Writes `device.so` into a folder. Raises `CannotBuild`."""
    if sys.platform != "linux" or torch.version.cuda is not None or shutil.which("g++") is None:
        raise CannotBuild("needs Linux, g++ and a PyTorch without CUDA")
    torch_folder, library = Path(torch.__file__).parent, folder / "device.so"
    options = ["-O0", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}"]
    linked = [f"-L{torch_folder / 'lib'}", f"-Wl,-rpath,{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu"]
    command = ["g++", *options, str(Path(__file__).with_name("device.cpp")), "-o", str(library), *linked]
    built = subprocess.run(command, capture_output=True, text=True)
    if built.returncode != 0:
        raise CannotBuild(f"this g++ cannot build against PyTorch's headers: {built.stderr[:300]}")
    return library
