"""SSH servers on this machine, with keys, ports and configuration of their own, and launches over them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.train.runs import PATIENCE_SECONDS, free_port

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
NAMES = ("alpha", "beta")
ROOT = Path(__file__).parents[2]
ALONE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")  # a server that sees no processes but its own

_SERVER = """
ListenAddress {address}
Port {port}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/user_key.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PermitRootLogin yes
SetEnv LONGTAKE_JOBS={folder}/jobs PATH={folder}/{name}-tools:{path}
"""
# As a shell whose start-up files print.
_TALKATIVE = """ForceCommand /bin/sh -c 'echo "Welcome to beta"; eval "$SSH_ORIGINAL_COMMAND"'\n"""
_CLIENT = """
Host {name}
    HostName {address}
    Port {port}
    UserKnownHostsFile {folder}/known_hosts
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    IdentityAgent none
"""


@dataclass(frozen=True)
class Site:
    """Where the servers are: the folder of keys, client configuration and host file."""

    folder: Path
    servers: tuple[subprocess.Popen[bytes], ...]

    @property
    def hostfile(self) -> Path:
        """All servers by name, one process each."""
        return self.folder / "hosts"

    @property
    def ssh(self) -> str:
        """The value of `--ssh`."""
        return f"ssh -F {self.folder / 'ssh_config'}"

    @property
    def jobs(self) -> Path:
        """Where the hosts keep what is said after a connection is lost. The variable marks what runs there."""
        return self.folder / "jobs"

    def tool(self, host: str, name: str, text: str) -> Path:
        """Writes a program that this host finds first on its path."""
        tool = self.folder / f"{host}-tools" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(text)
        tool.chmod(0o755)
        return tool


@contextmanager
def site(
    folder: Path,
    addresses: Mapping[str, str] = dict.fromkeys(NAMES, "127.0.0.1"),
    inside: Callable[[str], Sequence[str]] = lambda name: (),
) -> Iterator[Site]:
    """Starts a server of each name at its address, behind words that put it into a namespace of its own; ends them."""
    for name in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    public = (folder / "host_key.pub").read_text()
    if os.getuid() == 0:  # a server of root's wants this folder for the part of it that has no rights
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    servers, known, client = [], "", ""
    for name, address in addresses.items():
        port = free_port()
        known += f"[{address}]:{port} {public}"
        client += _CLIENT.format(name=name, address=address, port=port, folder=folder)
        settings = folder / f"{name}.sshd"
        talkative = _TALKATIVE if name == "beta" else ""
        server = _SERVER.format(address=address, port=port, folder=folder, name=name, path=os.environ["PATH"])
        settings.write_text(server + talkative)
        servers.append(_serve(settings, port, inside(name)))
    (folder / "known_hosts").write_text(known)
    (folder / "ssh_config").write_text(client)
    (folder / "hosts").write_text("# names of this machine\n" + "\n".join(f"{name} slots=1\n" for name in addresses))
    try:
        yield Site(folder, tuple(servers))
    finally:
        for server in servers:
            server.kill()
            server.wait()


def _serve(settings: Path, port: int, inside: Sequence[str]) -> subprocess.Popen[bytes]:
    assert SSHD is not None
    log = settings.with_suffix(".log")
    server = subprocess.Popen([*inside, SSHD, "-D", "-E", str(log), "-f", str(settings)])
    end = time.monotonic() + PATIENCE_SECONDS
    while f"port {port}" not in (log.read_text() if log.exists() else ""):
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < end
        time.sleep(0.02)
    return server


def start_launch(
    place: Site, *words: object, folder: Path, options: tuple[object, ...] = (), log: Path | None = None
) -> subprocess.Popen[str]:
    """`longtake launch` over the hosts, in `folder`; `words` stand behind `--`. `log`: a file for all that it says.

    Each test's run needs a name of its own: the hosts are this machine, and a launch is refused beside one of its name.
    """
    command = [sys.executable, "-m", "longtake", "launch", "--ssh", place.ssh, "--hostfile", str(place.hostfile)]
    command += ["--env", "PYTHONPATH", *map(str, options), "--", *map(str, words)]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "LONGTAKE_JOBS": str(place.jobs), "PYTHONPATH": str(ROOT)}
    with log.open("wb") if log else nullcontext(subprocess.PIPE) as out:
        return subprocess.Popen(command, cwd=folder, env=variables, stdout=out, stderr=out, text=True)


def processes_of_launches(place: Site) -> list[int]:
    """Everything that runs for launches of this site, at both ends."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            if int(process.name) != os.getpid() and _belongs(process, place) and _runs(process):
                found.append(int(process.name))
    return found


def programs(place: Site, word: str) -> list[int]:
    """Processes of the launches that have a word, or a part of one, on their command line; the shells around them not.

    A process may end between being found and being read; it is not among them then.
    """
    found = {number: words_of(number) for number in processes_of_launches(place)}
    return [
        number
        for number, words in found.items()
        if any(word.encode() in part for part in words) and words[0] != b"/bin/sh"
    ]


def words_of(number: int) -> list[bytes]:
    """The command line of a process; no words where it has ended."""
    try:
        return Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def _belongs(process: Path, place: Site) -> bool:
    """By the variable that the servers set, or by ssh's configuration."""
    if f"LONGTAKE_JOBS={place.jobs}".encode() in (process / "environ").read_bytes().split(b"\0"):
        return True
    return str(place.folder / "ssh_config").encode() in (process / "cmdline").read_bytes().split(b"\0")


def _runs(process: Path) -> bool:
    return (process / "stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"


def wait_for_end(place: Site, seconds: float = PATIENCE_SECONDS) -> None:
    """Waits until nothing of any launch runs; kills it, and fails, if that does not come."""
    end = time.monotonic() + seconds
    while left := processes_of_launches(place):
        if time.monotonic() > end:
            names = [b" ".join(words_of(number))[:200] for number in left]
            for number in left:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            raise AssertionError(f"left behind: {names}")
        time.sleep(0.02)
