"""What a launch runs on each host: it looks around, starts torchrun, watches over it and leaves no process behind.

The launcher sends the text of this file, of `machine` and of `nccl` over ssh to `python -c`, so that a host needs
nothing but Python to say what it lacks. Hence the standard library alone, and nothing else from Longtake.

Both sides talk over the connection's stdin and stdout. Launcher to host: JSON objects, a line each; the first comes
with this text, the next ones only after the report. Host to launcher: the greeting's `nonce` on a line of its own
(whatever a shell's start-up files print comes before it), then frames `KIND LENGTH\\n` and as many bytes, of kind O
(torchrun's stdout), E (its stderr) or J (JSON). One thread does it all, and waits for nothing
but all of it at once.
"""

from __future__ import annotations

import ctypes
import fcntl
import glob
import json
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from longtake.cluster.machine import family, launched, nvidia_smi, processes
from longtake.cluster.nccl import derive

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
_LEFTOVER_SECONDS = 5.0  # between SIGTERM and SIGKILL for what torchrun has left behind
_DEATH_SECONDS = 30.0  # a process that waits for a disk or a driver dies late
_FLUSH_SECONDS = 10.0
_LOGS_KEPT_SECONDS = 7 * 86400
_TICK_SECONDS = 0.1
_BYTES_AHEAD = 1 << 20  # output waiting for the connection before torchrun has to wait
_CHUNK = 1 << 16
_PROBE_SECONDS = 120  # a cold network disk

# Runs in the environment and folder of the training processes: what they would import.
_PROBE = """
import hashlib, importlib.metadata, importlib.util, json, pathlib, sys
found = {"python": list(sys.version_info[:3])}
try:
    import longtake
    found["longtake"] = longtake.__version__
    root = pathlib.Path(longtake.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\\0" + path.read_bytes() + b"\\0")
    found["code"], found["root"] = digest.hexdigest(), str(root)
except ImportError:
    pass
if importlib.util.find_spec("torch"):
    found["torch"] = next((one.version for one in importlib.metadata.distributions(name="torch")), "unknown")
print(json.dumps(found))
"""


def look(greeting: dict[str, Any]) -> dict[str, Any]:
    """What the launcher wants to know before it starts anything."""
    report = {"address": (os.environ.get("SSH_CONNECTION", "").split() + [""] * 3)[2]}
    try:
        os.chdir(greeting["workdir"])
    except OSError as error:
        return {**report, "workdir": error.strerror}
    report.update(_probe())
    report.update(_devices())
    others = {pid: name for pid, (launch, name) in launched().items() if launch != greeting["launch"]}
    report["same"] = sorted(pid for pid, name in others.items() if name == greeting["name"])
    report["folders"] = _folders_in_use(greeting["folder"])
    if greeting["hosts"] > 1 and report.get("gpus"):
        derived = derive([address for (address,) in nvidia_smi("--query-gpu=pci.bus_id")], report["address"])
        report["nccl"] = {name: row for name, row in derived.items() if name not in os.environ}
        os.environ.update({name: value for name, (value, _) in report["nccl"].items()})
    return report


def _probe() -> dict[str, Any]:
    try:
        done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_SECONDS)
        return json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {"probe": f"{type(error).__name__}: {error}"}


def _devices() -> dict[str, Any]:
    """GPUs of this host and the programs on them, as nvidia-smi knows them; nothing where it is missing."""
    if shutil.which("nvidia-smi") is None:
        return {}
    try:
        numbers = {uuid: int(index) for index, uuid in nvidia_smi("--query-gpu=index,uuid") if index.isdigit()}
        programs = nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory,process_name")
    except OSError:
        return {"gpus": [], "programs": []}
    return {
        "gpus": [[index, uuid] for uuid, index in numbers.items()],
        "programs": [
            {"gpu": numbers.get(uuid), "pid": pid, "memory": memory, "program": program}
            for uuid, pid, memory, program in programs
        ],
    }


def _folders_in_use(folder: str) -> list[str]:
    """Run folders of the name, also those of its stages, in which some launch is training: it holds their lock."""
    used, ours = [], glob.escape(folder)
    for path in [folder, *sorted(glob.glob(ours + "-[0-9]*") + glob.glob(ours + "/*/"))] if folder else []:
        with suppress(OSError), open(os.path.join(path, ".lock"), "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                used.append(path)
    return used


class Wire:
    """The way back to the launcher. It never blocks; once it is broken, output goes to a file on this host."""

    def __init__(self, launch: str) -> None:
        self.broken = False
        self._log_name = f"{launch}-{os.getpid()}.log"
        self.waiting = bytearray()  # above `_BYTES_AHEAD`, torchrun has to wait
        os.set_blocking(1, False)

    def greet(self, nonce: str) -> None:
        """End whatever a shell has printed before."""
        self.waiting += b"\n%s\n" % nonce.encode()

    def send(self, kind: str, content: bytes) -> None:
        """Queues a frame and writes what the connection takes."""
        if self.broken:
            if kind != "J" and content:
                with suppress(OSError), open(os.path.join(_logs_folder(), self._log_name), "ab") as file:
                    file.write(content)
            return
        self.waiting += b"%s %d\n" % (kind.encode(), len(content)) + content
        self.flush()

    def tell(self, **message: object) -> None:
        self.send("J", json.dumps(message).encode())

    def flush(self) -> None:
        """Write what the connection takes now."""
        try:
            while self.waiting:
                del self.waiting[: os.write(1, self.waiting[:_CHUNK])]
        except BlockingIOError:
            pass
        except OSError:
            self.cut()

    def cut(self) -> None:
        """The launcher is gone: nobody reads any more, even if the connection still takes bytes."""
        self.broken = True
        self.waiting.clear()

    def drain(self) -> None:
        """Wait until all is written, for some seconds."""
        end = time.monotonic() + _FLUSH_SECONDS
        while self.waiting and time.monotonic() < end:
            select.select([], [1], [], 1.0)
            self.flush()


def _logs_folder() -> str:
    """In /tmp, since home folders may be on many hosts; forgets old logs there. Raises `OSError`."""
    folder = os.environ.get("LONGTAKE_JOBS") or f"/tmp/longtake-jobs-{os.getuid()}"
    os.makedirs(folder, mode=0o700, exist_ok=True)
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    for path in glob.glob(os.path.join(folder, "*.log")):
        if time.time() - os.stat(path).st_mtime > _LOGS_KEPT_SECONDS:
            os.unlink(path)
    return folder


class TorchrunJob:
    """torchrun and all that it has started. Every descendant stays one of this process (a subreaper), so none is lost,
    although workers have sessions of their own; and torchrun gets SIGTERM if this process is killed."""

    def __init__(self, command: list[str]) -> None:
        libc = ctypes.CDLL(None)
        with suppress(AttributeError):  # Linux alone has it
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

        def tie_to_parent() -> None:  # between fork and exec, in a process of one thread
            with suppress(AttributeError):
                libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=tie_to_parent,
        )
        self.kernel_kills = _kernel_kills()  # until now
        self.pipes = {self.process.stdout.fileno(): "O", self.process.stderr.fileno(): "E"}
        self._kill_at: float | None = None
        self._asked = False

    def stop(self, grace: float) -> None:
        """Asks torchrun to end (it passes SIGTERM on to its workers), and kills all of it `grace` seconds later.
        Another call can only make that earlier: a second SIGTERM would have a run stop without a checkpoint."""
        end = time.monotonic() + grace
        self._kill_at = end if self._kill_at is None else min(end, self._kill_at)
        if not self._asked and self.process.poll() is None:
            self._asked = True
            self.process.send_signal(signal.SIGTERM)

    def tick(self) -> None:
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        _signal_all(signal.SIGKILL)

    def sweep(self) -> None:
        """End what torchrun, which has ended, has left behind."""
        end = time.monotonic() + _LEFTOVER_SECONDS
        if _signal_all(signal.SIGTERM):
            while _descendants() and time.monotonic() < end:
                time.sleep(0.02)
            while _signal_all(signal.SIGKILL) and time.monotonic() < end + _DEATH_SECONDS:
                time.sleep(0.02)

    def read(self, pipe: int) -> bytes:
        """What the pipe holds; at its end it is left out from then on."""
        content = os.read(pipe, _CHUNK)
        if not content:
            del self.pipes[pipe]
        return content


def _descendants() -> set[int]:
    """Return the processes that descend from this one and still run."""
    return family(processes(), [os.getpid()]) - {os.getpid()}


def _kernel_kills() -> int:
    """Return the processes that the kernel has ended for want of memory, since the machine has started."""
    with open("/proc/vmstat") as file:
        return int(dict(line.split() for line in file).get("oom_kill", 0))


def _signal_all(number: int) -> set[int]:
    found = _descendants()
    for pid in found:
        with suppress(OSError):
            os.kill(pid, number)
    return found


class Watch:
    """The loop: orders in, output back, until torchrun has ended."""

    def __init__(self, wire: Wire, grace: float, patience: float) -> None:
        """`grace`: seconds to end in once the launcher is gone. `patience`: so long without a word, and it is."""
        self.wire, self.grace, self.patience = wire, grace, patience
        self.job: TorchrunJob | None = None
        self._orders = bytearray()
        self._connected = True
        self._hung_up = 0  # by a signal: the connection has ended, the host shuts down, or `longtake stop`
        self._heard = time.monotonic()
        self._listener: socket.socket | None = None
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hang_up)

    def run(self) -> None:
        """Follows orders until torchrun has ended, or the launcher is gone before it was started."""
        while self._connected or self.job:
            self._wait()
            if self._connected and (self._hung_up or time.monotonic() - self._heard > self.patience):
                if self._hung_up == signal.SIGINT:
                    self.wire.tell(stopped=True)
                self._leave()
            if self.job is None:
                continue
            self.job.tick()
            if self.job.process.poll() is not None:
                self._finish()
                return

    def _wait(self) -> None:
        pipes = list(self.job.pipes) if self.job and len(self.wire.waiting) <= _BYTES_AHEAD else []
        reads = pipes + ([0] if self._connected else [])
        ready, _, _ = select.select(reads, [1] if self.wire.waiting else [], [], _TICK_SECONDS)
        self.wire.flush()
        for descriptor in ready:
            if descriptor == 0:
                self._listen_to_launcher()
            else:
                self.wire.send(self.job.pipes[descriptor], self.job.read(descriptor))

    def _listen_to_launcher(self) -> None:
        content = os.read(0, _CHUNK)
        if not content:
            self.wire.cut()
            self._leave()
            return
        self._heard = time.monotonic()
        self._orders += content
        while b"\n" in self._orders:
            line, _, rest = bytes(self._orders).partition(b"\n")
            self._orders = bytearray(rest)
            self._obey(json.loads(line))

    def _obey(self, order: dict[str, Any]) -> None:
        do = order["do"]
        if do == "listen":
            self._listen(order["port"])
        elif do == "reach":
            self._reach(order["address"], order["port"])
        elif do == "start":
            self._start(order["command"])
        elif do == "beat":
            pass  # it lives
        elif self.job is None:  # nothing to stop
            self._leave()
        elif do == "stop":
            self.job.stop(order["grace"])
        elif do == "kill":
            self.job.kill()

    def _listen(self, port: int) -> None:
        try:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            self._listener = socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)
        except OSError as error:
            self.wire.tell(listen=error.strerror)
        else:
            self.wire.tell(listen=self._listener.getsockname()[1])

    def _reach(self, address: str, port: int) -> None:
        try:
            socket.create_connection((address, port), timeout=10).close()
        except OSError as error:
            self.wire.tell(reach=error.strerror or str(error))
        else:
            self.wire.tell(reach="")

    def _start(self, command: list[str]) -> None:
        if self._listener is not None:
            self._listener.close()
        try:
            self.job = TorchrunJob([sys.executable, *command])
        except OSError as error:
            self.wire.tell(failed=f"{sys.executable}: {error.strerror}")
            self._connected = False

    def _leave(self) -> None:
        """The launcher, or the way to it, is gone."""
        self._connected = False
        if self.job is not None:
            self.job.stop(self.grace)

    def _hang_up(self, number: int, frame: object) -> None:
        self._hung_up = number

    def _finish(self) -> None:
        self.job.sweep()
        end = time.monotonic() + 1.0  # pipes may be held by a process that was let go on purpose: there is none
        while self.job.pipes and time.monotonic() < end:
            ready, _, _ = select.select(list(self.job.pipes), [], [], 0.1)
            for descriptor in ready:
                self.wire.send(self.job.pipes[descriptor], self.job.read(descriptor))
        if _kernel_kills() > self.job.kernel_kills:
            self.wire.send("E", b"the kernel has ended a process on this host: out of memory\n")
        self.wire.tell(ended=self.job.process.returncode)


def main() -> None:
    """Greets, reports, and follows orders."""
    greeting = json.loads(sys.stdin.buffer.readline())
    os.environ.update(greeting["environment"])
    wire = Wire(greeting["launch"])
    wire.greet(greeting["nonce"])
    try:
        report = look(greeting)
    except OSError as error:
        report = {"probe": f"{error.filename}: {error.strerror}" if error.filename else str(error)}
    wire.tell(report=report)
    Watch(wire, greeting["grace"], greeting["patience"]).run()
    wire.drain()
