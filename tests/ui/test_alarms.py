"""Alarms stand where a person looks first: in the list of runs, and above a run's curves, with the way back."""

from __future__ import annotations

import re
import shlex
import shutil
from html import unescape
from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.ui.queue import Queue
from longtake.ui.roots import Roots
from longtake.ui.runs import Runs
from longtake.watch.alarms import Alarm
from longtake.watch.telling import FILE, Teller
from tests.generate.runs import write_config
from tests.train.runs import train_here

NAN = Alarm("nan", 3, "5 of the last 11 losses are not finite", "lower lr <now>", 2)
BUCKET = Alarm("bucket", 3, "its loss rises", "look at its clips", None, "32px/8f/1:1")


def test_a_run_shows_what_goes_wrong_and_the_way_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = train_here(write_config(tmp_path), "--ckpt-every", "1")[0].folder
    page = Runs(Roots.of([tmp_path]), Queue(tmp_path / "queue"))
    longer = tmp_path / "longer"
    longer.mkdir()
    (longer / "config.py").write_text((run / "config.py").read_text() + "\nmax_steps = 5\n")
    with pytest.raises(UserError, match=r"until step 4: .*max_steps = 5"):  # the run's end and schedule stay
        page.go_on(str(longer), "4")
    assert "--max-steps" not in page.go_on(str(longer), "5")
    assert page.go_on(str(longer), "6").endswith("--max-steps 6")
    shutil.rmtree(longer)
    assert page.names() == [("outputs/run", str(run))]
    assert 'class="alarm"' not in page.shown(str(run))
    teller, before = Teller(run, lambda line: None), page.stamp(str(run))
    teller.tell([NAN, BUCKET])
    with (run / FILE).open("a") as file:
        file.write('{"kind": "mo')  # a line that is being written, or never was
    assert page.names() == [("outputs/run · ALARM: nan, bucket", str(run))]
    assert page.stamp(str(run)) != before  # so the open page draws it
    shown = unescape(re.sub("<[^>]*>", " ", page.shown(str(run))))
    for words in ("nan since step 3", NAN.reason, NAN.advice, "bucket of 32px/8f/1:1", BUCKET.advice, "No checkpoint"):
        assert words in shown
    command = re.search(r"Go back to step 2: +(longtake train .*)", shown)
    assert command is not None
    _, _, config, *words = shlex.split(command[1])
    again, said = train_here(Path(config), *words)
    assert "step 2\n" in re.sub(r" +\n", "\n", said)
    assert again.folder != run
    assert again.clock.global_step == 3
    Teller(run, lambda line: None).tell([])
    assert page.names()[-1] == ("outputs/run", str(run))
    assert "since step" not in page.shown(str(run))
