"""Alarms reach a webhook; one that fails or hangs costs a line on the terminal, and nothing else."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from longtake.watch import telling
from longtake.watch.alarms import Alarm
from tests.served import Handler, served
from tests.train.runs import PATIENCE_SECONDS, assert_one_sentence, free_port, run_command

ALARM = Alarm("nan", 7, "5 of the last 11 losses are not finite", "lower lr", 6)


class Hook(Handler):
    heard: list[dict]
    given_up = threading.Event()

    def do_POST(self) -> None:
        self.heard.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.path == "/slow":
            self.given_up.wait(PATIENCE_SECONDS)
        if self.path == "/noise":
            self.wfile.write(b"noise\r\n\r\n")
            return
        self.send_response(500 if self.path == "/broken" else 204)
        self.end_headers()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    Hook.heard = []
    with served(Hook) as address:
        yield address


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("/good", None),
        ("/broken", "HTTP Error 500"),
        ("/slow", "timed out"),
        ("/noise", "noise"),
        (None, "refused"),
    ],
)
def test_a_webhook_gets_each_alarm_once_whatever_it_answers(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | None, complaint: str | None
) -> None:
    monkeypatch.setattr(telling, "_SECONDS", 0.3 if path == "/slow" else PATIENCE_SECONDS)
    Hook.heard.clear()
    Hook.given_up.clear()
    said: list[str] = []
    place = address + path if path else f"http://127.0.0.1:{free_port()}"
    for _ in range(2):  # the second as after a restart
        telling.Teller(tmp_path, said.append, webhook=place).tell([ALARM])
    Hook.given_up.set()
    assert len(Hook.heard) == (path is not None)
    for heard in Hook.heard:
        assert (heard["kind"], heard["checkpoint"], heard["ended"]) == ("nan", 6, False)
        assert "go back to the checkpoint of step 6" in heard["text"]
    assert len((tmp_path / telling.FILE).read_text().splitlines()) == 1
    complaints = [line for line in said if line.startswith("--webhook")]
    assert len(complaints) == (complaint is not None)
    if complaint is not None:
        assert complaint in complaints[0]


def test_what_is_no_address_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, error = run_command(capsys, ["watch", tmp_path, "--webhook", "hooks.example.org"])
    assert_one_sentence(code, error, "--webhook hooks.example.org: is no address")
