"""A Slurm of four nodes on this machine, with daemons, ports and configuration of its own."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.train.runs import free_port

NODES = tuple(f"longtake-n{number}" for number in range(4))
ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 300

_CONF = """
ClusterName=longtake
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
ReturnToService=2
SlurmdTimeout=12
KillWait=60
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE
"""
_NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2\n"


def missing() -> str | None:
    """Why there can be no Slurm here; None where there can."""
    for program in ("munged", "slurmctld", "slurmd", "sbatch"):
        if shutil.which(program) is None:
            return f"no {program} here; tools/install_slurm.sh installs it"
    try:
        for name in NODES:
            socket.gethostbyname(name)
    except OSError:
        return f"{name} has no address; tools/install_slurm.sh gives it one"
    return None


@dataclass
class Slurm:
    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), "PYTHONPATH": str(ROOT)}

    def start(self, name: str, *command: str) -> None:
        """Starts a daemon in the foreground, as a process of this one."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(command, env=self.variables, stdout=log, stderr=log)

    def start_node(self, name: str) -> None:
        self.start(name, "slurmd", "-D", "-N", name)

    def ask(self, *words: str) -> str:
        """What a program of Slurm's prints."""
        return subprocess.run(
            words, env=self.variables, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        ).stdout

    def nodes_of(self, facts: dict[str, str]) -> list[str]:
        return self.ask("scontrol", "show", "hostnames", facts["NodeList"]).split()

    def launch(self, *words: object, nodes: int, options: tuple[object, ...] = ()) -> Job:
        """`longtake launch --slurm`, one process on each of the nodes; `words` stand behind `--`."""
        command = ["launch", "--slurm", "--nodes", nodes, "--nproc-per-node", 1, "--gpus-per-node", 0]
        command += ["--cpus-per-task", 1, *options, "--", *words]
        line = [sys.executable, "-m", "longtake", *map(str, command)]
        done = subprocess.run(
            line, env=self.variables, cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )
        found = re.fullmatch(r"Submitted job_id: (\d+)\noutput: (.*)\n", done.stdout)
        assert found, done.stdout + done.stderr
        return Job(self, found[1], self.folder / found[2])


@dataclass(frozen=True)
class Job:
    slurm: Slurm
    number: str
    logs: Path

    def facts(self) -> dict[str, str]:
        """What `scontrol` says of the job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.slurm.ask("scontrol", "show", "job", self.number)))

    def output(self, rank: int = 0) -> str:
        files = (self.logs / f"{self.number}_{rank}_log.{kind}" for kind in ("out", "err"))
        return "".join(file.read_text() for file in files if file.exists())

    def process(self, rank: int) -> int:
        """The process of a rank."""
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (place / "environ").read_bytes().split(b"\0")
                wanted = {f"SLURM_JOB_ID={self.number}".encode(), f"SLURM_PROCID={rank}".encode()}
                if wanted <= set(variables) and b"submitit.core._submit" in (place / "cmdline").read_bytes():
                    return int(place.name)
        raise AssertionError(f"rank {rank} does not run")

    def wait(self, ready: Callable[[dict[str, str]], bool], seconds: float = PATIENCE_SECONDS) -> dict[str, str]:
        """Polls until the facts are so. A job that waits for its turn after it was requeued, has it at once."""
        end = time.monotonic() + seconds
        while not ready(facts := self.facts()):
            assert time.monotonic() < end, f"{facts}\n{self.output()}"
            if facts.get("Reason") == "BeginTime":
                self.slurm.ask("scontrol", "update", f"jobid={self.number}", "starttime=now")
            time.sleep(0.5)
        return facts

    def wait_until_gone(self) -> None:
        """Waits until no process of the job runs."""
        _wait(lambda: not self.slurm.ask("squeue", "-h", "-j", self.number))

    def finish(self) -> str:
        """Waits for the job's end and returns its state."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return self.wait(lambda facts: facts.get("JobState") in over)["JobState"]


@contextmanager
def slurm_here(folder: Path) -> Iterator[Slurm]:
    """Starts the daemons; ends them, and their jobs."""
    slurm = Slurm(folder)
    host, user = socket.gethostname(), getpass.getuser()
    conf = _CONF.format(host=host, user=user, folder=folder, port=free_port())
    for name in NODES:
        (folder / name).mkdir()
        conf += _NODE.format(name=name, host=host, port=free_port())
    (folder / "state").mkdir()
    (folder / "slurm.conf").write_text(conf)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    names = {"socket": "munge.socket", "key-file": key.name, "pid-file": "munge.pid", "log-file": "munge.log"}
    names["seed-file"] = "munge.seed"
    slurm.start("munged", "munged", "--foreground", "--force", *(f"--{k}={folder / v}" for k, v in names.items()))
    try:
        _wait(lambda: (folder / "munge.socket").exists())
        slurm.start("slurmctld", "slurmctld", "-D")
        for name in NODES:
            slurm.start_node(name)
        _wait(lambda: slurm.ask("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split() == list(NODES))
        yield slurm
        slurm.ask("scancel", "--user", user, "--signal", "KILL", "--full")
        slurm.ask("scancel", "--user", user)
        _wait(lambda: not slurm.ask("squeue", "-h"))
    finally:
        for daemon in reversed(slurm.daemons.values()):
            daemon.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()


def _wait(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.2)
