"""Windows: `--help`, `plan` and `config` work natively; any other verb names WSL2."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.runs import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]

# Runs a command line without what Python has on POSIX systems alone; libraries have chosen their modules by then.
WITHOUT_POSIX = """
import ctypes, os, signal, sys
sys.path.insert(0, sys.argv.pop(1))
import asyncio, multiprocessing.context, subprocess, tempfile, torch, typer, rich.console
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGKILL", "SIGALRM", "ITIMER_REAL", "pthread_sigmask", "setitimer"):
    delattr(signal, name)
for name in ("fork", "killpg", "getuid", "geteuid", "sched_getaffinity", "sysconf", "O_NONBLOCK", "pread", "setsid"):
    delattr(os, name)
for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None
def installed(address):  # 16 GiB, in KiB
    address._obj.value = 1 << 24
class windll:
    class kernel32:
        GetPhysicallyInstalledSystemMemory = installed
ctypes.windll = windll
from longtake.cli import app, main
app.is_windows = lambda: True
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "line",
    ["train run.py", "demo", "generate x --prompt a", "data stats clips.csv", "checkpoint list x", "launch -- train x"],
)
def test_a_verb_on_windows_is_refused_with_wsl2_named(
    monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., str], line: str
) -> None:
    monkeypatch.setattr("longtake.cli.app.is_windows", lambda: True)
    message = mistake(*line.split())
    assert message.startswith(f"longtake {line.split()[0]}: ")
    assert "WSL2" in message


@pytest.mark.parametrize("line", ["--help", "train --help", "data probe --help", "--version"])
def test_help_on_windows_is_printed(
    monkeypatch: pytest.MonkeyPatch, longtake: Callable[..., tuple[int, str, str]], line: str
) -> None:
    monkeypatch.setattr("longtake.cli.app.is_windows", lambda: True)
    code, out, err = longtake(*line.split())
    assert (code, err) == (0, "")
    assert "longtake" in out


@pytest.mark.parametrize("line", ["config show {home}/tiny.py", "plan {home}/tiny.py --gpus 1 --gpu h100"])
def test_plan_and_config_need_no_posix_module(home: Path, tmp_path: Path, line: str) -> None:
    words = line.format(home=home).split()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX, str(ROOT), *words],
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
