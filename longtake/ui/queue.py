"""Queue of commands, stored in a folder: `0001/job.json`, `log.txt`, and `exit`, the status.

A command goes on when the page ends, and the page that is opened next finds it. The line that is shown is the line that
is run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from longtake import locks
from longtake.contracts import UserError, visible
from longtake.durable import write_whole
from longtake.small_files import parse_json

PROGRESS = "LONGTAKE_PROGRESS"  # the variable that has `longtake generate` tell its progress line by line
_SECONDS = 0.5  # between two looks at what runs
# The shell outlives the signals that end the command, and writes its status down, with or without the page.
_SHELL = 'trap : TERM INT; "$@"; echo $? > "$0"'
_PROGRESS = re.compile(r"(?:step |^)(\d[\d.]*)(?:/| of )(\d+)(?: videos|\s|$)")
_LAST_BYTES = 20_000
_MAX_ARGUMENT_BYTES = 100_000  # Linux takes 128 KiB per argument


@dataclass(frozen=True)
class QueuedCommand:
    folder: Path
    kind: str  # "generate" or "train"
    words: tuple[str, ...]  # behind `longtake`
    about: Mapping[str, Any] = field(default_factory=dict)
    state: str = "waiting"  # then running, stopping; at the end done, failed or stopped
    made: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    pid: int = 0
    born: str = ""  # of the process, lest another one has its number

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def command(self) -> str:
        return shlex.join(("longtake", *self.words))

    @property
    def is_over(self) -> bool:
        return self.state in ("done", "failed", "stopped")

    def log(self) -> str:
        """Return the end of what it printed."""
        try:
            with (self.folder / "log.txt").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
                return file.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def progress(self) -> tuple[float, float] | None:
        """(done, total) as the last line of its kind says."""
        for line in reversed(self.log().splitlines()):
            if found := _PROGRESS.search(line):
                return float(found[1]), float(found[2])
        return None

    def seconds(self) -> float:
        return (self.ended or time.time()) - self.started if self.started else 0.0

    def write(self) -> None:
        kept = {key: value for key, value in asdict(self).items() if key != "folder"}
        write_whole(self.folder / "job.json", json.dumps(kept, indent=1) + "\n", synced=False)


class Queue:
    """The commands of a folder. One page at a time runs them."""

    def __init__(self, folder: Path):
        """Raise `UserError` where another page has the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._lock, self._children = folder, threading.RLock(), dict[int, subprocess.Popen[bytes]]()
        self._held = (folder / "lock").open("a")
        try:
            locks.flock(self._held, locks.LOCK_EX | locks.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{folder}: another `longtake ui` is open here; use that one, or another root") from None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="queue")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """No further command is started; the one that runs goes on."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._held.close()

    def jobs(self) -> list[QueuedCommand]:
        """Return the jobs in the order in which they were queued."""
        found = (_read(path) for path in sorted(self.folder.glob("[0-9]*/job.json")))
        return [job for job in found if job is not None]

    def job(self, name: str) -> QueuedCommand | None:
        return next((job for job in self.jobs() if job.name == name), None)

    def add(self, kind: str, words: Sequence[str], about: Mapping[str, Any] | None = None) -> QueuedCommand:
        """Append a command. Raises `UserError` for an argument that no process can be given."""
        for word in words:
            _check_argument(word)
        with self._lock:
            taken = [int(path.name) for path in self.folder.glob("[0-9]*") if path.name.isdecimal()]
            folder = self.folder / f"{max(taken, default=0) + 1:04d}"
            folder.mkdir()
            job = QueuedCommand(folder, kind, tuple(words), about or {}, made=time.time())
            job.write()
            return job

    def stop(self, name: str) -> str:
        """Take a command off the queue, or ask it to end (SIGTERM: a training saves); a second time ends it."""
        with self._lock:
            job = self.job(name)
            if job is None or job.is_over:
                return "nothing to stop"
            if job.state == "waiting":
                replace(job, state="stopped", ended=time.time()).write()
                return "taken off the queue"
            again = job.state == "stopping"
            if job.born and _born(job.pid) == job.born:
                os.killpg(job.pid, signal.SIGKILL if again else signal.SIGTERM)
            replace(job, state="stopping").write()
            return "ended" if again else "asked to end; once more ends it at once"

    def look(self) -> None:
        """One turn: what has ended is written down, and the next one started."""
        with self._lock:
            for job in self.jobs():
                if job.state in ("running", "stopping"):
                    self._attempt(self._end, job)
            for job in self.jobs():
                if job.state in ("running", "stopping"):
                    return
                if job.state == "waiting":
                    self._attempt(self._begin, job)
                    return

    def _attempt(self, step: Callable[[QueuedCommand], object], job: QueuedCommand) -> None:
        """Run one step of a job. Whatever it raises fails this job alone, with the reason at the end of its log."""
        try:
            step(job)
        except Exception as error:
            with (job.folder / "log.txt").open("a", encoding="utf-8", errors="replace") as log:
                log.write(f"\n{type(error).__name__}: {error}\n")
            replace(job, state="failed", ended=time.time()).write()

    def _begin(self, job: QueuedCommand) -> None:
        command = ["sh", "-c", _SHELL, str(job.folder / "exit"), sys.executable, "-m", "longtake", *job.words]
        environment = {**os.environ, PROGRESS: "1", "PYTHONUNBUFFERED": "1"}
        with (job.folder / "log.txt").open("wb") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        self._children[child.pid] = child
        replace(job, state="running", started=time.time(), pid=child.pid, born=_born(child.pid)).write()

    def _end(self, job: QueuedCommand) -> None:
        """Write down how a job ended, once it has."""
        if (child := self._children.get(job.pid)) is not None:
            child.poll()
        status = job.folder / "exit"
        lives = bool(job.born) and _born(job.pid) == job.born
        if not status.exists() and lives and (child is None or child.returncode is None):
            return
        code = status.read_text().strip() if status.exists() else ""
        state = "done" if code == "0" else "stopped" if job.state == "stopping" or code == "130" else "failed"
        replace(job, state=state, ended=time.time()).write()

    def _run(self) -> None:
        while not self._over.wait(_SECONDS):
            try:
                self.look()
            except OSError as error:  # a full disk, say: the next turn may find room
                print(f"queue: {error}", file=sys.stderr)


def _read(path: Path) -> QueuedCommand | None:
    try:
        kept = _encodable(parse_json(path.read_bytes()))
        return QueuedCommand(path.parent, **{**kept, "words": tuple(map(str, kept["words"]))})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _encodable(value: Any) -> Any:
    """Plain data with ? in place of lone surrogates, which JSON can spell and no page can show."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list) else value


def _check_argument(text: str) -> None:
    """Raise `UserError` for text that cannot be an argument of a process."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > _MAX_ARGUMENT_BYTES:
        raise UserError(
            f"{visible(text[:40])}…: expected at most {_MAX_ARGUMENT_BYTES:,} bytes, got {size:,}; shorten it"
        )
    bad = next((i for i, c in enumerate(text) if c == "\0" or "\ud800" <= c <= "\udfff"), None)
    if bad is not None:
        raise UserError(
            f"{visible(text[max(0, bad - 20) : bad + 20])}: character {bad + 1} is half of a character, such as of an "
            "emoji that was cut, or a NUL; delete it"
        )


def _born(pid: int) -> str:
    """Return the start time of a process, in system ticks; empty where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "" if Path("/proc/self/stat").exists() else _lives(pid)
    return text.rpartition(")")[2].split()[19]


def _lives(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except OSError:
        return ""
    return "lives"
