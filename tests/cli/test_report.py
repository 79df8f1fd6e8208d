"""`longtake report RUN` on a run that was trained, and the commands that its page ends with."""

from __future__ import annotations

import re
import shlex
import shutil
from html import unescape
from pathlib import Path

import pytest

from longtake.train.run import Outcome
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


def test_two_runs_are_compared_and_what_they_are_to_show_is_kept(longtake, mistake, folder: Path, run: Outcome):
    other = Path(shutil.copytree(run.folder, folder.with_name("other")))
    assert longtake("train", other, "--max-steps", run.clock.global_step + 2, "--lr", "0.001")[0] == 0
    code, out, err = longtake("report", folder, other, "--note", "we test if a lower rate helps")
    assert (code, out, err) == (0, f"page: {folder / 'comparison.html'}\n", "")
    found = Page((folder / "comparison.html").read_text(encoding="utf-8"))
    assert found.texts[0] == "my run · other"
    steps = found.texts.index("steps")
    assert found.texts[steps + 1 : steps + 3] == [str(run.clock.global_step), str(run.clock.global_step + 2)]
    differ = found.section("Settings that differ")
    assert differ[differ.index("lr") + 2] == "0.001"
    assert longtake("report", other, folder, "-o", folder / "again.html")[0] == 0
    for page in (folder / "again.html", folder / "comparison.html"):
        assert "we test if a lower rate helps" in Page(page.read_text(encoding="utf-8")).texts
    assert longtake("report", other)[0] == 0
    assert "we test if a lower rate helps" in Page((other / "report.html").read_text(encoding="utf-8")).texts
    assert "is given twice" in mistake("report", folder, other, folder)
    assert "is no folder of a run" in mistake("report", folder, other / "config.py")
    assert "--samples" in mistake("report", folder, other, "--samples", folder)
    (other / "metrics.jsonl").unlink()
    assert "other: has made no step yet" in mistake("report", folder, other)


def test_mistakes_are_one_sentence(longtake, mistake, folder: Path):
    assert "is no folder of a run" in mistake("report", folder / "config.py")
    assert "no config.py in it" in mistake("report", folder.parent.parent)
    assert "holds the runs my run" in mistake("report", folder.parent)
    assert "none: no such folder" in mistake("report", folder, "--samples", folder / "none")
    assert not (folder / "report.html").exists()
    page = folder.parent / "page.html"
    assert longtake("report", folder, "-o", page)[0] == 0
    assert page.exists()
