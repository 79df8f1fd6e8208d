"""Many nodes asked at once: how they are, which runs are on them, and the end of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

from longtake.cluster.arguments import Host, name_and_folder
from longtake.cluster.connection import Connections

_AGAIN_SECONDS = 10.0  # before another try at a node that cannot be reached
_CONNECT_SECONDS = 40.0  # ssh gives up after 30
_DEATH_SECONDS = 30.0
THROTTLING = (  # bits of nvidia-smi's mask; idling and a limit that somebody has set are no faults
    (0x4, "power cap"),
    (0x8, "slowed"),
    (0x10, "sync boost"),
    (0x20, "hot"),
    (0x40, "too hot"),
    (0x80, "power brake"),
)
Answer = dict[str, Any]  # of a node's program: see `node`; `fault` alone where there is none


@dataclass(frozen=True)
class RunOnNode:
    """A run of this user's on one node."""

    node: int
    name: str
    words: Sequence[str]
    pids: Sequence[Sequence[int]]  # (number, start)
    first: Sequence[Sequence[int]]  # of these; the others descend from them

    @property
    def trains(self) -> bool:
        name = Path(self.words[0]).name
        return name.startswith("train") or name.endswith("train.py")


class Nodes:
    """The program `node` on each of the hosts, as long as the connection lasts."""

    def __init__(
        self,
        hosts: Sequence[Host],
        ssh: Sequence[str],
        python: str,
        environment: Mapping[str, str],
        seconds: float = _CONNECT_SECONDS,
    ) -> None:
        """`seconds`: to wait for all to come up; who comes later is asked then."""
        self._connections = Connections(hosts, ssh, python)
        self.labels = self._connections.labels
        self.close = self._connections.close
        self._greeting = {"environment": dict(environment)}
        self._asked: set[int] = set()  # and have not answered yet
        self._closed: dict[int, tuple[float, str]] = {}  # when and why
        self._open(range(len(hosts)))
        self._gather(set(self._asked), seconds)

    def ask(self, orders: Mapping[int, Mapping[str, Any]], seconds: float = 20.0) -> dict[int, Answer]:
        """Return the answers to an order for each node. One that has not answered the last one yet is not
        asked anew."""
        now = time.monotonic()
        again = [n for n in orders.keys() & self._closed.keys() if now - self._closed[n][0] > _AGAIN_SECONDS]
        for number in again:
            del self._closed[number]
        self._open(again)
        fresh = orders.keys() - self._asked - self._closed.keys()
        for number in fresh:
            self._connections[number].send({**orders[number], "sent": time.time()})
        self._asked |= fresh
        answers = {number: {"fault": f"no answer within {seconds:g} s"} for number in orders}
        answers |= self._gather(fresh, seconds)
        return {
            number: {"fault": self._closed[number][1]} if number in self._closed else answers[number]
            for number in orders
        }

    def _open(self, numbers: Sequence[int]) -> None:
        self._connections.open("node", self._greeting, numbers)
        for number in numbers:
            self._connections[number].send({"do": "hello", "sent": 0})
        self._asked |= set(numbers)

    def _gather(self, nodes: set[int], seconds: float) -> dict[int, Answer]:
        """Wait for these; the answers of all that have given one meanwhile."""
        said, closed = self._connections.gather("report", nodes, seconds)
        self._asked -= said.keys() | closed.keys()
        for number, code in closed.items():
            self._closed[number] = (time.monotonic(), self._connections.why_closed(number, code))
        answers = {}
        for number, event in said.items():
            answer = event.value
            for run in answer.get("runs", []):
                run["name"] = run["name"] or name_and_folder(run["words"])[0]
            # As NTP has it: our clock before and after, theirs in between.
            there, sent = (answer.pop("received") + answer.pop("answered")) / 2, answer.pop("sent")
            if answer:  # else it has come up
                answers[number] = {**answer, "clock_offset_seconds": there - (sent + event.at) / 2}
        return answers

    def ask_all(self, order: Mapping[str, Any], seconds: float = 20.0) -> dict[int, Answer]:
        """Return the answers of all nodes to one order."""
        return self.ask(dict.fromkeys(range(len(self.labels)), order), seconds)

    def stop(self, runs: Sequence[RunOnNode], grace: float) -> set[int]:
        """End these runs: SIGTERM, and SIGKILL `grace` seconds later for what is left. Returns the nodes on which
        something is left even then, or that do not answer any more."""
        lost: set[int] = set()

        def signal(number: int, pids: Mapping[int, Sequence[Sequence[int]]]) -> dict[int, Any]:
            orders = {node: {"do": "signal", "number": number, "pids": some} for node, some in pids.items()}
            answers = self.ask(orders)
            lost.update(node for node, answer in answers.items() if "alive" not in answer)
            return {node: answer["alive"] for node, answer in answers.items() if answer.get("alive")}

        first: dict[int, list[Sequence[int]]] = {}
        left: dict[int, Any] = {}
        for run in runs:
            first.setdefault(run.node, []).extend(run.first)
            left.setdefault(run.node, []).extend(run.pids)
        signal(SIGTERM, first)
        for number, patience in ((0, grace), (SIGKILL, _DEATH_SECONDS)):
            end = time.monotonic() + patience
            while (left := signal(number, left)) and time.monotonic() < end:
                time.sleep(0.2)
            if number == 0 and left:  # what has been started meanwhile
                names = {run.name for run in runs}
                for run in runs_of(self.ask({node: {"do": "runs"} for node in left})):
                    left[run.node] += run.pids if run.name in names else []
        return lost | left.keys()


def runs_of(answers: Mapping[int, Answer]) -> list[RunOnNode]:
    """Return the runs that nodes have told of; those of a machine that has several names under the first one."""
    found: dict[object, RunOnNode] = {}
    for node, answer in answers.items():
        for run in answer.get("runs", []):
            key = (answer["machine"], str(run["first"]))
            found.setdefault(key, RunOnNode(node, run["name"], run["words"], run["pids"], run["first"]))
    return list(found.values())
