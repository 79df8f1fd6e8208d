"""Starting one run on many hosts: look, agree on a rendezvous, start, and end together."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty
from typing import Any, TextIO

from longtake.cluster import nccl, readiness
from longtake.cluster.arguments import Host
from longtake.cluster.connection import Connections, Event, ssh_command
from longtake.cluster.diagnosis import MISTAKE, USER_MISTAKE, HostEnd
from longtake.contracts import EXIT_INTERRUPTED, UserError
from longtake.parallel.world import LOST_PEER
from longtake.processes import taken_signals

_BEAT_SECONDS = 15.0
_PATIENCE_SECONDS = 120.0  # of a host that hears no beat
_LOOK_SECONDS = 180.0  # for all hosts, which look at the same time; a cold network disk is slow
_FAILED_GRACE_SECONDS = 30.0  # after a host has failed nothing more can be saved
_FAILED_TOGETHER_SECONDS = 2.0  # hosts that end so soon after the first one have failed too
_OVERTIME_SECONDS = 60.0  # for a host to end what it had to end
_LEAVE_SECONDS = 5.0
_USER = -1  # the "host" of signals
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@dataclass(frozen=True)
class Launch:
    """A launch as it was asked for."""

    hosts: Sequence[Host]
    words: Sequence[str]  # `train RUN --key value`, or a Python file and its words
    name: str  # of the run; one of a name on a host at a time
    folder: str  # that the run would write to, as far as is known before it starts
    workdir: str
    python: str = sys.executable
    processes: int | None = None  # on each host; None: the host's slots, or its GPUs
    environment: Mapping[str, str] = field(default_factory=dict)
    ssh: Sequence[str] = ("ssh",)
    torchrun: Sequence[str] = ()  # further options of torchrun
    master_address: str | None = None
    master_port: int = 0  # 0: one that is free
    grace: float = 300.0
    force: bool = False
    job: str | None = None  # its id, where this start is not its first

    def processes_of(self, host: Host, report: readiness.Report | None = None) -> int | None:
        """Return the number of processes to start on a host; None where nothing says."""
        return self.processes or host.slots or len((report or {}).get("gpus", [])) or None

    def command(self, rank: int, processes: object, address: str, port: object, job: str) -> list[str]:
        """torchrun's words for the host of this rank, behind the Python that runs them."""
        words = ["-m", "torch.distributed.run", "--nnodes", len(self.hosts), "--node-rank", rank]
        words += ["--nproc-per-node", processes, "--master-addr", address, "--master-port", port, "--rdzv-id", job]
        words += ["--shutdown-timeout", round(self.grace), *self.torchrun]
        program = [] if self.words[0].endswith(".py") else ["-m", "longtake"]
        return [str(word) for word in (*words, *program, *self.words)]


def say(sentence: str) -> None:
    """A line of the launch's own."""
    print(f"longtake launch: {sentence}", file=sys.stderr, flush=True)


def show(launch: Launch, out: TextIO) -> None:
    """Print what would be run on each host; nothing is connected."""
    address = launch.master_address or (launch.hosts[0].name if len(launch.hosts) > 1 else "127.0.0.1")
    for rank, host in enumerate(launch.hosts):
        ssh = ssh_command(launch.ssh, host, launch.python)
        words = launch.command(rank, launch.processes_of(host) or "GPUS", address, launch.master_port or "PORT", "JOB")
        print(f"[{host.label}] {shlex.join(ssh[:-1])}", file=out)
        print(f"[{host.label}]   cd {shlex.quote(launch.workdir)}", file=out)
        print(f"[{host.label}]   {shlex.join([launch.python, *words])}", file=out)
    if launch.environment:
        print(f"variables sent along: {', '.join(sorted(launch.environment))}", file=out)


class Launcher:
    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.hosts = Connections(launch.hosts, launch.ssh, launch.python)
        self.labels, self.events, self.output = self.hosts.labels, self.hosts.events, self.hosts.output
        self.job = launch.job or f"{time.strftime('%y%m%d%H%M%S')}-{time.time_ns() % 1_000_000_000:09d}"
        self.reports: dict[int, readiness.Report] = {}
        self.forcible: set[int] = set()  # hosts whose faults --force overlooks
        self.open: set[int] = set()
        self.ended: dict[int, int | None] = {}  # torchrun's exit codes; None: the connection was lost before
        self.failures: list[tuple[float, int]] = []  # (time, host), in the order of arrival
        self.signals = 0
        self.interrupted = False  # before anything had failed
        self.next_beat = 0.0
        self.end_at: float | None = None  # when hosts that have not ended are given up

    def run(self) -> int:
        """Start the run on all hosts and wait for its end; return the exit code.

        0: all hosts ended well. 130: interrupted, and all have ended. Else that of the process that failed first.
        Raises `UserError` with everything that stands against the launch; nothing has been started then.
        """
        # SIGHUP under `nohup` does not ask for an end
        asking = set(_SIGNALS) - ({signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set())
        with taken_signals(asking, self._hear, once=False):
            try:
                self._connect()
                self._agree()
                self._follow()
            except KeyboardInterrupt:
                say("interrupted; nothing was started")
                return EXIT_INTERRUPTED
            finally:
                self.hosts.close(_LEAVE_SECONDS)
        return self._conclude()

    def _hear(self, number: int) -> None:
        self.events.put(Event(_USER, "signal", number, time.time()))

    # --- before the start

    def _connect(self) -> None:
        launch = self.launch
        greeting = {
            "launch": self.job,
            "hosts": len(launch.hosts),
            "name": launch.name,
            "folder": launch.folder,
            "workdir": launch.workdir,
            "environment": {
                **launch.environment,
                "PYTHONUNBUFFERED": "1",
                "LONGTAKE_LAUNCH": self.job,  # by these two, `node` finds the run's processes
                "LONGTAKE_RUN": launch.name,
            },
            "grace": launch.grace,
            "patience": _PATIENCE_SECONDS,
        }
        self.hosts.open("host", greeting)
        self.open = set(range(len(self.labels)))
        self.reports, closed = self._gather("report", self.open)
        faults = {number: self.hosts.why_closed(number, code) for number, code in closed.items()}
        silent = self.open - self.reports.keys() - faults.keys()
        faults |= dict.fromkeys(silent, "did not answer in time; is its disk or network slow?")
        self._refuse(faults | self._judge())

    def _gather(self, kind: str, hosts: set[int]) -> tuple[dict[int, Any], dict[int, int]]:
        said, closed = self.hosts.gather(kind, hosts, _LOOK_SECONDS, self._beat)
        return {number: event.value for number, event in said.items()}, closed

    def _judge(self) -> dict[int, str]:
        """What the reports say against the launch. Without --force that is more."""
        launch, faults = self.launch, {}
        whole: dict[int, readiness.Report] = {}
        for number, report in sorted(self.reports.items()):
            if fault := readiness.lacks(report, launch.workdir):
                faults[number] = fault
            elif launch.processes_of(launch.hosts[number], report) is None:
                faults[number] = "nothing says how many processes to start; give --nproc-per-node, or slots=NUMBER"
            else:
                whole[number] = report
        if not whole:
            return faults
        first = min(whole)
        if line := readiness.other_code(whole[first], readiness.installed_here()):
            say(f"{self.labels[first]} {line}")
        visible = launch.environment.get("CUDA_VISIBLE_DEVICES")
        taken = {}
        for number, report in whole.items():
            processes = launch.processes_of(launch.hosts[number], report)
            gpus = readiness.used_gpus(report, processes, visible)
            taken[self.labels[number]] = (report, gpus)
            found = [
                readiness.differs(report, whole[first], self.labels[first]),
                readiness.busy(report, gpus),
                readiness.same_run(report, launch.name),
            ]
            if fault := "; ".join(filter(None, found)):
                faults[number] = fault
                self.forcible.add(number)
        if launch.force:
            for number in sorted(faults.keys() & whole.keys()):
                say(f"--force, in spite of {self.labels[number]}: {faults.pop(number)}")
        for label, fault in readiness.shared_gpus(taken):
            faults.setdefault(self.labels.index(label), fault)
        return faults

    def _refuse(self, faults: Mapping[int, str]) -> None:
        if not faults:
            return
        lines = [f"{self.labels[number]}: {fault}" for number, fault in sorted(faults.items())]
        tail = ["--force launches all the same"] if faults.keys() <= self.forcible else []
        raise UserError("\n  ".join(["nothing was started", *lines, *tail]))

    def _agree(self) -> None:
        """Find address and port of the rendezvous on the first host, sees that the others reach it, and start all."""
        launch = self.launch
        address = self._master_address()
        port = self._ask([0], {"do": "listen", "port": launch.master_port}, "listen").get(0)
        if not isinstance(port, int):
            self._refuse({0: f"port {launch.master_port} cannot be opened: {port}; choose another with --master-port"})
        others = list(range(1, len(launch.hosts)))
        reached = self._ask(others, {"do": "reach", "address": address, "port": port}, "reach")
        where = f"does not reach {self.labels[0]} at {address} port {port}"
        remedy = "look at the firewall, or choose with --master-addr and --master-port"
        self._refuse({number: f"{where}: {fault}; {remedy}" for number, fault in reached.items() if fault})
        for number, host in enumerate(launch.hosts):
            processes = launch.processes_of(host, self.reports[number])
            self.hosts[number].send(
                {"do": "start", "command": launch.command(number, processes, address, port, self.job)}
            )

    def _master_address(self) -> str:
        """Where the first host is reached by the others: the address at which its SSH server was reached."""
        if self.launch.master_address is not None or len(self.launch.hosts) == 1:
            return self.launch.master_address or "127.0.0.1"
        own, *others = (self.reports[number]["address"] for number in range(len(self.launch.hosts)))
        if own in ("", "UNKNOWN") or "%" in own or (_is_loopback(own) and not all(map(_is_loopback, others))):
            found = own or "nothing"
            self._refuse({0: f"its address seems to be {found}, where others cannot reach it; give --master-addr"})
        return own

    def _ask(self, hosts: Sequence[int], order: Mapping[str, Any], kind: str) -> dict[int, Any]:
        for number in hosts:
            self.hosts[number].send(order)
        said, closed = self._gather(kind, set(hosts))
        self._refuse(dict.fromkeys((set(hosts) - said.keys()) | closed.keys(), "the connection was lost"))
        return said

    # --- while it runs

    def _follow(self) -> None:
        """Until every connection is closed: counts ends, passes signals on."""
        hosts = ", ".join(self.labels[:8]) + (" ..." if len(self.labels) > 8 else "")
        say(f"{self.launch.name} starts on {len(self.labels)} host{'s'[: len(self.labels) > 1]}: {hosts}")
        for line in nccl.explain(self.labels, self.reports, self.launch.environment):
            say(line)
        while self.open:
            self._beat()
            if self.end_at is not None and time.monotonic() > self.end_at:
                for number in self.open:
                    self.hosts[number].abandon()
            if self.output.closed and not self.signals:  # nobody reads: `longtake launch ... | head`
                self._hear(signal.SIGPIPE)
            with suppress(Empty):
                self._take(self.events.get(timeout=1.0))

    def _beat(self) -> None:
        """Says from time to time that we live; to hosts that have reported, since the others do not listen yet."""
        if (now := time.monotonic()) >= self.next_beat:
            self.next_beat = now + _BEAT_SECONDS
            for number in sorted(self.open):
                if self.hosts[number].reported:
                    self.hosts[number].send({"do": "beat"})

    def _take(self, event: Event) -> None:
        if event.kind == "signal" or (event.kind == "stopped" and not self.signals):
            self._interrupt()
        elif event.kind == "ended":
            self.ended[event.host] = event.value
            self.open.discard(event.host)
            self.output.flush(event.host)
            self.hosts[event.host].close()
            if event.value != 0:
                self._fail(event.host)
        elif event.kind == "failed":
            say(f"{self.labels[event.host]}: {event.value}")
        elif event.kind == "closed":
            self.open.discard(event.host)
            if event.host not in self.ended:  # else it is the end of what has ended
                self.ended[event.host] = None
                self._fail(event.host)

    def _fail(self, host: int) -> None:
        """A host has not ended well: the first one has the others stop, unless they do already."""
        self.failures.append((time.monotonic(), host))
        if not self.signals and len(self.failures) == 1:
            if self.open:
                say(f"{self.labels[host]} has failed; stopping the others")
            self._stop_all(min(self.launch.grace, _FAILED_GRACE_SECONDS))

    def _interrupt(self) -> None:
        self.signals += 1
        if self.signals == 1:
            self.interrupted = not self.failures
            grace = self.launch.grace
            say(f"stopping all hosts, which have {grace:g} s to save; once more (Ctrl-C) kills them")
            self._stop_all(grace)
        elif self.signals == 2:
            say("killing what runs on all hosts")
            self._send_all({"do": "kill"})
            self.end_at = time.monotonic() + _OVERTIME_SECONDS
        else:
            self.end_at = 0.0

    def _stop_all(self, grace: float) -> None:
        self._send_all({"do": "stop", "grace": grace})
        self.end_at = time.monotonic() + grace + _OVERTIME_SECONDS

    def _send_all(self, order: Mapping[str, Any]) -> None:
        for number in sorted(self.open):
            self.hosts[number].send(order)

    # --- after the end

    def _conclude(self) -> int:
        """Says which hosts failed and how; returns the exit code."""
        if not self.failures:
            return 0
        if self.interrupted:
            lost = sorted(self.labels[host] for host, code in self.ended.items() if code is None)
            outcome = f"the connection was lost to {', '.join(lost)}" if lost else "all hosts have ended"
            say(f"interrupted; {outcome}")
            return EXIT_INTERRUPTED
        first, cause = self.failures[0]
        own = [
            host
            for when, host in self.failures
            if when - first < _FAILED_TOGETHER_SECONDS and (host == cause or self.output.failed_rank(host))
        ]
        own.sort(key=self._is_consequence)  # stable: else in the order of arrival
        for host in own:
            if host == own[0] or not self._is_consequence(host):
                say(self._describe(host))
        failed = self.output.failed_rank(own[0])
        code = failed[1] if failed is not None else self.ended[own[0]]
        return 1 if code is None else code if code > 0 else 128 - code

    def ends(self) -> list[HostEnd]:
        """How the hosts that did not end well ended, in the order of arrival; none where nothing failed by itself."""
        if self.interrupted or not self.failures:
            return []
        first, found = self.failures[0][0], []
        for when, host in self.failures:
            failed = self.output.failed_rank(host)
            code = self.ended[host] if failed is None else failed[1]
            soon = when - first < _FAILED_TOGETHER_SECONDS
            found.append(HostEnd(self.labels[host], code, self.output.lines(host), soon))
        return found

    def _is_consequence(self, host: int) -> bool:
        return any(LOST_PEER in line for line in self.output.last_words(host))

    def _describe(self, host: int) -> str:
        label, code, failed = self.labels[host], self.ended[host], self.output.failed_rank(host)
        if code is None:
            what = "the connection was lost; what runs there ends by itself"
            if complaint := self.hosts[host].complaint:
                what += f" ({complaint})"
        elif failed is None:
            what = f"torchrun ended with {_end_of(code)}"
        else:
            what = f"rank {failed[0]} ended with {_end_of(failed[1])}"
        lines = self.output.last_words(host)
        if failed is not None and failed[1] == USER_MISTAKE and any(map(MISTAKE.match, lines)):
            lines = []  # it has just been printed, in whole
        return "\n  ".join([f"{label}: {what}" + ("; its last lines:" if lines else ""), *lines])


def _end_of(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
