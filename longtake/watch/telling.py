"""Taking alarms to people: the terminal, a log in the run's folder, a command, a webhook; each once, until it ends."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from pathlib import Path

from longtake.checkpoint.runs import list_checkpoints
from longtake.track.trackers import read_lines
from longtake.train.run_file import CONFIG_FILE
from longtake.watch.alarms import Alarm

FILE = "alarms.jsonl"
_SECONDS = 30.0  # that a command or webhook may take


def read_alarms(run: Path) -> list[Alarm]:
    """Return the alarms of a run that have not ended, the oldest first, from its log."""
    found: dict[tuple[str, str], Alarm] = {}
    for of in read_lines(run / FILE) if (run / FILE).exists() else ():
        alarm = Alarm(**{key: of[key] for key in Alarm.__dataclass_fields__})
        found.pop((alarm.kind, alarm.subject), None)
        if not of["ended"]:
            found[alarm.kind, alarm.subject] = alarm
    return list(found.values())


def way_back(run: Path, alarm: Alarm) -> tuple[int, str] | None:
    """Return the step of the last whole checkpoint that is left from before an alarm, and the command that goes on
    from it; None where there is none."""
    step = alarm.checkpoint if alarm.checkpoint is not None else -1
    saved = [info for info in list_checkpoints(run) if info.complete and info.step <= step]
    if not saved:
        return None
    return saved[-1].step, shlex.join(["longtake", "train", str(run / CONFIG_FILE), "--load", str(saved[-1].path)])


def told(run: Path, alarm: Alarm) -> str:
    """Return an alarm in words, with the command that goes back while the checkpoint is there."""
    back = way_back(run, alarm)
    return str(alarm) if back is None else f"{alarm}: {back[1]}"


@dataclass
class Teller:
    """Reporter of one run's alarms; those reported are in its log, so a restart does not report them again."""

    run: Path
    say: Callable[[str], None]
    command: str | None = None  # gets the alarm as JSON on its standard input
    webhook: str | None = None  # an address that gets it by POST
    _told: dict[tuple[str, str], Alarm] = field(default_factory=dict)

    def __post_init__(self) -> None:
        log = self.run / FILE
        if log.exists() and not log.read_bytes().endswith(b"\n"):  # of a watcher that was killed as it wrote
            with log.open("a") as file:
                file.write("\n")
        self._told = {(alarm.kind, alarm.subject): alarm for alarm in read_alarms(self.run)}

    def tell(self, alarms: Sequence[Alarm]) -> bool:
        """Take what is new among the alarms of now to people, and note what has ended; whether anything is."""
        now = {(alarm.kind, alarm.subject): alarm for alarm in alarms}
        for key, alarm in now.items():
            if key not in self._told:
                text = told(self.run, alarm)
                self.say(f"ALARM {self.run}: {text}")
                self._note(alarm, text, ended=False)
        for key in self._told.keys() - now.keys():
            text = f"over: {self._told[key].kind}, of step {self._told[key].step}"
            self.say(f"{self.run}: {text}")
            self._note(self._told[key], text, ended=True)
        changed = now.keys() != self._told.keys()
        self._told = now
        return changed

    def _note(self, alarm: Alarm, said: str, ended: bool) -> None:
        line = {"time": round(time.time(), 1), "run": str(self.run), "ended": ended, "text": said} | asdict(alarm)
        text = json.dumps(line)
        with (self.run / FILE).open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        if self.command is not None:
            try:
                subprocess.run(shlex.split(self.command), input=text, text=True, timeout=_SECONDS, check=True)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self.say(f"--on-alarm {self.command!r}: {error}")
        if self.webhook is not None:
            try:
                request = urllib.request.Request(self.webhook, text.encode(), {"Content-Type": "application/json"})
                urllib.request.urlopen(request, timeout=_SECONDS).close()
            except (OSError, ValueError, HTTPException) as error:
                self.say(f"--webhook {self.webhook}: {error}")
