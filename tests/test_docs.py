"""Documentation that is made from the code says what the code says, and its worked examples work."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from longtake.data.clips.video import write_image, write_video
from tests import conftest
from tests.pasted import Walk, walk_in

ROOT = Path(__file__).parent.parent


def blocks(section: str) -> list[tuple[str, str]]:
    """The fenced blocks of a section of docs/data.md: (language or nothing, text)."""
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    (text,) = re.findall(rf"^## {section}.*?\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    return re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("tool", ["config_keys", "cli_reference", "migrating_tables", "verified_table"])
def test_a_reference_page_is_what_its_tool_writes(tool: str) -> None:
    check = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_a_page_begins_with_its_use_and_a_command(page: Path) -> None:
    """A sentence, then a block with a full command, before the first heading of a section."""
    _, _, body = page.read_text(encoding="utf-8").partition("\n\n")
    opening, _, _ = body.partition("\n## ")
    sentence, _, block = opening.partition("```\n")
    assert re.match(r"[A-Z][^.:]+[.:]", sentence), "a sentence first"
    assert re.search(r"^([A-Z_]+=\S+ )*(longtake|torchrun|make|pip|python3?) ", block, re.MULTILINE)


def test_the_tests_that_developers_are_pointed_to_are_there() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (*ROOT.glob("docs/*.md"), ROOT / "Makefile")]
    named = {name.removeprefix("tests/") for page in pages for name in re.findall(r"[\w/]*\btest_\w+\.py", page)}
    assert len(named) > 20
    named |= {*conftest.DEAR, *conftest.WORLDS}
    assert [name for name in sorted(named) if not (ROOT / "tests" / name).exists()] == []


def test_the_worked_run_file_is_the_one_that_is_shipped() -> None:
    (shown,) = [text for language, text in blocks("In short") if language == "python"]
    assert shown == (ROOT / "configs" / "custom.py").read_text(encoding="utf-8")


def test_the_data_commands_of_the_worked_example_do_what_the_page_says(folder: Path, walk: Walk) -> None:
    (*data, train) = _commands()
    assert [words.split()[2] for words in data] == ["probe", "stats", "filter"]
    assert train.startswith("longtake train run.py")
    probed, counted, filtered = map(walk, data)
    assert "6 clips in pexels.parquet" in probed
    assert "1 bad file" in probed
    assert "micro-batches" in counted
    assert "micro-batches" in (folder / "stats.html").read_text(encoding="utf-8")
    assert "5 of 6 rows kept, in good.parquet" in filtered
    assert "max_steps = 10 " in walk(train.replace("train", "config show"))


@pytest.mark.slow
def test_the_worked_example_trains_as_written(folder: Path, walk: Walk) -> None:
    said = [walk(line) for line in _commands()]
    assert "captions: column text, empty for 0 of 5 clips" in said[-1]
    assert "done at step 10" in said[-1]


@pytest.mark.slow
def test_the_way_from_own_clips_to_a_video_from_an_image_works_as_written(
    tmp_path: Path, walk: Walk, monkeypatch
) -> None:
    page = (ROOT / "docs" / "generate.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## From an image on.*?\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    probe, train, from_image, from_text, grow = [
        line
        for block in re.findall(r"^```\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 72, 96, 3), np.uint8)
    for number in range(4):
        write_video(tmp_path / f"{number}.mp4", pixels, 12)
    write_image(tmp_path / "first.png", pixels[0])
    (tmp_path / "clips.csv").write_text("path,text\n" + "".join(f"{n}.mp4,A man walks\n" for n in range(4)))
    assert "4 clips in clips.parquet" in walk(probe)
    assert "done at step 2" in walk(train + " --tiny --max-steps 2")
    for line in (from_image, from_text):
        assert "1 video in samples/" in walk(line + " --num-steps 2")
    walk("longtake train custom --dataset.data-path clips.parquet --tiny --max-steps 2")
    assert "it starts at zero" in walk(grow + " --tiny --max-steps 2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a reader who has the page's table, with some clips more, and its run file."""
    (_, table), (_, run), _ = blocks("In short")
    rows = list(csv.reader(table.splitlines()))
    texts = ["no", *(f"A caption that says enough, {number}" for number in range(3))]
    rows += [[f"videos/{number}.mp4", text] for number, text in enumerate(texts)]
    pixels = np.random.default_rng(0).integers(0, 256, (64, 72, 128, 3), np.uint8)
    for path, _ in rows[1:]:
        write_video(tmp_path / path, pixels, 25)
    with open(tmp_path / "pexels.csv", "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([*rows, ["videos/missing.mp4", "A clip that was never downloaded"]])
    (tmp_path / "run.py").write_text(run, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def walk(capsys: pytest.CaptureFixture[str]) -> Walk:
    return walk_in(capsys)


def _commands() -> list[str]:
    return blocks("In short")[-1][1].splitlines()
