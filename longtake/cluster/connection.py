"""ssh connections: a program at each far end, orders to it, reports and output from it."""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from longtake.cluster.arguments import Host
from longtake.cluster.output import Output
from longtake.contracts import UserError

# Nobody types a password for 64 hosts, and a host that does not answer must not hold up the others. A master connection
# of the user's is used but none is made: it would outlive the launch.
_SSH_OPTIONS = (
    "BatchMode=yes ConnectTimeout=30 ServerAliveInterval=15 ServerAliveCountMax=4 ControlMaster=no "
    "ClearAllForwardings=yes LogLevel=ERROR"
)
# Reads the program and runs it. No character in it has a meaning to any shell inside single quotes. Modules are
# not looked for in the home folder, where the command starts.
BOOTSTRAP = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; b = sys.stdin.buffer; "
    'exec(compile(b.read(int(b.readline())), "longtake-host", "exec"), {"__name__": "__main__"})'
)
# The program and the modules that it imports, by the names that they have here.
_SOURCE = """
import sys, types
for name, text in {texts!r}:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
module.main()
"""
_LONGEST_NOISE = 1 << 20  # bytes that start-up files of a shell may print


class Event(NamedTuple):
    host: int
    kind: str  # a key of the host's JSON frames, or "closed" with ssh's exit code, or "signal"
    value: Any
    at: float  # by our clock


def ssh_command(ssh: Sequence[str], host: Host, python: str) -> list[str]:
    """Return the words that start the host's program; nothing of the run is in them, since `ps` shows them to
    everybody."""
    words = [*ssh, "-T", *(f"-o{option}" for option in _SSH_OPTIONS.split())]
    if host.port is not None:
        words += ["-p", str(host.port)]
    target = host.name if host.user is None else f"{host.user}@{host.name}"
    home = "~/" if python.startswith("~/") else ""  # the shell there is to see this
    program = home + shlex.quote(python.removeprefix(home))
    return [*words, "--", target, f"exec {program} -u -c {shlex.quote(BOOTSTRAP)}"]


def program_source(program: str) -> bytes:
    """Return the text of a program for hosts, with the modules that it may import."""
    files = ((name, Path(__file__).with_name(f"{name}.py")) for name in ("machine", "nccl", program))
    texts = [(f"{__package__}.{name}", file.read_text(encoding="utf-8")) for name, file in files]
    return _SOURCE.format(texts=texts).encode()


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

    def greet(self, program: str, greeting: Mapping[str, Any]) -> None:
        """Send a program, `host` or `node`, and what it has to look at."""
        source = program_source(program)
        self._write(b"%d\n" % len(source) + source)
        self.send({**greeting, "nonce": self._nonce})

    def send(self, order: Mapping[str, Any]) -> None:
        """Send an order; nothing happens where the connection is lost, which an event reports."""
        self._write(json.dumps(order).encode() + b"\n")

    def close(self) -> None:
        """Lets the host end: before torchrun runs at once, else as after a lost connection."""
        with suppress(OSError):
            self._ssh.stdin.close()

    def wait(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._ssh.wait(seconds)

    def abandon(self) -> None:
        """End ssh. A host that is still there notices it."""
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
        self._events.put(Event(self.number, "closed", code, time.time()))

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
                    self._events.put(Event(self.number, key, value, time.time()))
            else:
                self._output.write(self.number, kind, content)

    def _read_errors(self) -> None:
        for line in self._ssh.stderr:
            if self.reported:
                self._output.write(self.number, "E", line)
            else:
                self._words.append(line)


class Connections:
    """One connection to each host of a list; what all of them report arrives in `events`."""

    def __init__(self, hosts: Sequence[Host], ssh: Sequence[str], python: str) -> None:
        self.labels = [host.label for host in hosts]
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.output = Output(self.labels, sys.stdout.buffer, sys.stderr.buffer)
        self.python = python
        self._commands = [ssh_command(ssh, host, python) for host in hosts]
        self._each: dict[int, Connection] = {}

    def __getitem__(self, number: int) -> Connection:
        return self._each[number]

    def open(self, program: str, greeting: Mapping[str, Any], numbers: Sequence[int] | None = None) -> None:
        """Start the program on these hosts, or all of them. Raises `UserError` where ssh cannot be started."""
        for number in range(len(self.labels)) if numbers is None else numbers:
            command = self._commands[number]
            try:
                self._each[number] = Connection(number, command, self.events, self.output)
            except FileNotFoundError:
                raise UserError(f"--ssh {command[0]}: no such program here; install OpenSSH's client") from None
            self._each[number].greet(program, greeting)

    def gather(
        self, kind: str, hosts: set[int], seconds: float, meanwhile: Callable[[], object] = lambda: None
    ) -> tuple[dict[int, Event], dict[int, int]]:
        """Wait for one word of each host, and take what others have said: (what they said, ssh's exit code of those
        that are gone instead). Raises KeyboardInterrupt on a signal among the events."""
        said: dict[int, Event] = {}
        closed: dict[int, int] = {}
        end = time.monotonic() + seconds
        while True:
            meanwhile()
            left = max(0.0, end - time.monotonic()) if hosts - said.keys() - closed.keys() else 0.0
            try:
                event = self.events.get(timeout=min(left, 1.0))
            except Empty:
                if left == 0.0:
                    return said, closed
                continue
            if event.kind == "signal":
                raise KeyboardInterrupt
            if event.kind == "closed":
                closed[event.host] = event.value
            elif event.kind == kind:
                said[event.host] = event

    def why_closed(self, number: int, code: int) -> str:
        """Why a host has reported nothing, as ssh, or the shell behind it, says."""
        said = self._each[number].complaint
        if code == 255:
            return f"cannot be reached: {said or 'ssh says nothing'}"
        return f"cannot run {self.python}: {said or f'exit code {code}'}; choose another with --python"

    def close(self, seconds: float = 1.0) -> None:
        """Lets all programs end, which have these seconds to be gone."""
        for connection in self._each.values():
            connection.close()
        end = time.monotonic() + seconds
        for connection in self._each.values():
            connection.wait(max(0.0, end - time.monotonic()))
            connection.abandon()
