"""Nodes in network namespaces of this machine, on one bridge; some with a stand-in for torch, which costs little."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

_BRIDGE, _NET = "longtake0", "10.213.7"
# In torchrun's place: it holds on to the rendezvous of the run, as a rank would, and ends with it.
_TORCHRUN = """
import signal, socket, sys, time
value = lambda key: sys.argv[sys.argv.index(key) + 1]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
place, end = (value("--master-addr"), int(value("--master-port"))), time.monotonic() + 900
while True:
    try:
        rendezvous = socket.create_connection(place, timeout=10)
        break
    except OSError:
        assert time.monotonic() < end
        time.sleep(0.2)
rendezvous.settimeout(None)
print("light worker of node rank", value("--node-rank"), flush=True)
try:
    rendezvous.recv(1)
except ConnectionError:
    pass
"""


def missing() -> str | None:
    """Why there can be no namespaces here; None where there can."""
    if os.getuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "no ip here; tools/install_slurm.sh installs it"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return None if done.returncode == 0 else f"no network namespaces here: {done.stderr.strip()}"


def ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@contextmanager
def network(names: Sequence[str]) -> Iterator[dict[str, str]]:
    """A namespace of each name, on a bridge to which this machine belongs: their addresses. Ends what runs in them."""
    _remove(names)  # what a run that was killed has left
    try:
        ip("link", "add", _BRIDGE, "type", "bridge")
        ip("address", "add", f"{_NET}.1/24", "dev", _BRIDGE)
        ip("link", "set", _BRIDGE, "up")
        addresses = {name: f"{_NET}.{10 + number}" for number, name in enumerate(names)}
        for name, address in addresses.items():
            ip("netns", "add", name)
            ip("link", "add", f"lt-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"lt-{name}", "master", _BRIDGE, "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield addresses
    finally:
        _remove(names)


def _remove(names: Sequence[str]) -> None:
    for name in names:
        with suppress(subprocess.CalledProcessError):  # there is none
            send(name, signal.SIGKILL)
            ip("netns", "delete", name)
    with suppress(subprocess.CalledProcessError):
        ip("link", "delete", _BRIDGE)


def send(name: str, number: int) -> None:
    """A signal to all that runs in a namespace."""
    for pid in ip("netns", "pids", name).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), number)


def cut_power(name: str) -> None:
    """Nobody hears of the end of what runs there."""
    ip("-n", name, "link", "set", "eth0", "down")
    send(name, signal.SIGKILL)


def light_python(folder: Path) -> Path:
    """A Python with the stand-in for torch, and nothing else."""
    python = folder / "light" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(python.parents[1])], check=True)
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    told = packages / f"torch-{version('torch')}.dist-info" / "METADATA"
    told.parent.mkdir()
    told.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version('torch')}\n")
    (packages / "torch" / "distributed").mkdir(parents=True)
    (packages / "torch" / "__init__.py").touch()
    (packages / "torch" / "distributed" / "__init__.py").touch()
    (packages / "torch" / "distributed" / "run.py").write_text(_TORCHRUN)
    return python
