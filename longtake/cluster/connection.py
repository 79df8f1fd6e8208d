"""One ssh connection: the host's program at its far end, orders to it, reports and output from it."""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from longtake.cluster.arguments import Host
from longtake.cluster.output import Output

# Nobody types a password for 64 hosts, and a host that does not answer must not hold up the others. A master connection
# of the user's is used but none is made: it would outlive the launch.
SSH_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": "30",
    "ServerAliveInterval": "15",
    "ServerAliveCountMax": "4",
    "ControlMaster": "no",
    "ClearAllForwardings": "yes",
    "LogLevel": "ERROR",
}
# Reads the host's program and runs it. No character in it has a meaning to any shell inside single quotes. Modules are
# not looked for in the home folder, where the command starts.
_BOOTSTRAP = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; b = sys.stdin.buffer; "
    'exec(compile(b.read(int(b.readline())), "longtake-host", "exec"), {"__name__": "__main__"})'
)
_LONGEST_NOISE = 1 << 20  # bytes that start-up files of a shell may print


class Event(NamedTuple):
    host: int
    kind: str  # a key of the host's JSON frames, or "closed" with ssh's exit code, or "signal"
    value: Any


def ssh_command(ssh: Sequence[str], host: Host, python: str) -> list[str]:
    """The words that start the host's program; nothing of the run is in them, since `ps` shows them to everybody."""
    words = [*ssh, "-T"]
    for name, value in SSH_OPTIONS.items():
        words += ["-o", f"{name}={value}"]
    if host.port is not None:
        words += ["-p", str(host.port)]
    target = host.name if host.user is None else f"{host.user}@{host.name}"
    home = "~/" if python.startswith("~/") else ""  # the shell there is to see this
    program = home + shlex.quote(python.removeprefix(home))
    return [*words, "--", target, f"exec {program} -u -c {shlex.quote(_BOOTSTRAP)}"]


class Connection:
    """Starts ssh at once. What the host reports arrives in `events`, what torchrun prints there goes to `output`."""

    def __init__(self, number: int, command: Sequence[str], events: SimpleQueue[Event], output: Output) -> None:
        self.number = number
        self._events, self._output = events, output
        self._nonce = secrets.token_hex(16)
        self._words: deque[bytes] = deque(maxlen=20)  # of ssh and shell, before there is a report
        self.reported = False
        # In a session of its own: Ctrl-C in the terminal must reach the launcher, which lets the hosts end in order.
        self._ssh = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        self._error_reader = threading.Thread(target=self._read_errors, daemon=True)
        self._error_reader.start()
        threading.Thread(target=self._read, daemon=True).start()

    def greet(self, greeting: Mapping[str, Any]) -> None:
        """Sends the host's program and what it has to look at."""
        source = (Path(__file__).parent / "host.py").read_bytes()
        self._write(b"%d\n" % len(source) + source)
        self.send({**greeting, "nonce": self._nonce})

    def send(self, order: Mapping[str, Any]) -> None:
        """Sends an order; nothing happens where the connection is lost, which an event reports."""
        self._write(json.dumps(order).encode() + b"\n")

    def close(self) -> None:
        """Lets the host end: before torchrun runs at once, else as after a lost connection."""
        with suppress(OSError):
            self._ssh.stdin.close()

    def wait(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._ssh.wait(seconds)

    def abandon(self) -> None:
        """Ends ssh. A host that is still there notices it."""
        self._ssh.kill()

    @property
    def complaint(self) -> str:
        """The last thing that ssh, or the shell at the far end, has said."""
        lines = [line.decode(errors="replace").strip() for line in self._words if line.strip()]
        return lines[-1] if lines else ""

    def _write(self, content: bytes) -> None:
        with suppress(OSError, ValueError):  # where it is gone, the reader reports it
            self._ssh.stdin.write(content)
            self._ssh.stdin.flush()

    def _read(self) -> None:
        try:
            self._read_frames()
        except (ValueError, OSError) as error:  # what speaks there is not the host's program
            self._words.append(f"{type(error).__name__}: {error}".encode())
            self._ssh.kill()
        code = self._ssh.wait()
        self._error_reader.join(timeout=5)  # its last words first
        self._output.flush(self.number)
        self._events.put(Event(self.number, "closed", code))

    def _read_frames(self) -> None:
        stream = self._ssh.stdout
        wanted, passed, line = self._nonce.encode() + b"\n", 0, b""
        while line != wanted:  # what start-up files print comes before
            self._words.append(line)
            line = stream.readline(_LONGEST_NOISE)
            passed += len(line)
            if not line or passed > _LONGEST_NOISE:
                return
        while header := stream.readline(64):
            kind, length = header.decode().split()
            content = stream.read(int(length))
            if len(content) < int(length):
                return
            if kind == "J":
                for key, value in json.loads(content).items():
                    self.reported |= key == "report"
                    self._events.put(Event(self.number, key, value))
            else:
                self._output.write(self.number, kind, content)

    def _read_errors(self) -> None:
        for line in self._ssh.stderr:
            if self.reported:
                self._output.write(self.number, "E", line)
            else:
                self._words.append(line)
