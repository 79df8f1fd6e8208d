"""`longtake report RUN` on a run that was trained, and the commands that its page ends with."""

from __future__ import annotations

import re
import shlex
import shutil
from html import unescape
from pathlib import Path

import pytest

from longtake.train import Outcome
from tests.pages import Page


@pytest.fixture
def folder(run: Outcome, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run's folder that a test may train on."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(run.folder, tmp_path / "outputs" / "my run"))


def test_every_command_of_a_report_works_and_the_next_report_shows_the_video(longtake, folder: Path):
    assert longtake("report", folder)[:2] == (0, f"page: {folder / 'report.html'}\n")
    text = (folder / "report.html").read_text(encoding="utf-8")
    before = Page(text)
    assert "Samples" not in before.texts
    assert {"Curves", "Data", "Time", "Settings", "Go on"} <= set(before.texts)
    commands = [shlex.split(unescape(line)) for line in re.findall(r"<code>(longtake .*?)</code>", text)]
    verbs = [words[1] for words in commands]
    assert verbs == ["train", "generate", "checkpoint", "report", "config"]
    for words in commands:
        fast = ["--sampling-option.num-steps", "1"] if words[1] == "generate" else []
        code, out, err = longtake(*words[1:], *fast)
        assert code == 0, f"{words}\n{out}\n{err}"
    after = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert len(after.pictures) == 1
    steps = [page.texts[page.texts.index("samples trained on") - 3] for page in (before, after)]
    assert int(steps[1]) == 2 * int(steps[0])


def test_mistakes_are_one_sentence(longtake, mistake, folder: Path):
    assert "is no folder of a run" in mistake("report", folder / "config.py")
    assert "no config.py in it" in mistake("report", folder.parent.parent)
    assert "holds the runs my run" in mistake("report", folder.parent)
    assert "none: no such folder" in mistake("report", folder, "--samples", folder / "none")
    assert not (folder / "report.html").exists()
    page = folder.parent / "page.html"
    assert longtake("report", folder, "-o", page)[0] == 0
    assert page.exists()
