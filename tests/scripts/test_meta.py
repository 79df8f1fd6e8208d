from __future__ import annotations

import csv
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from longtake.data.clips.video import write_video
from tests.data.made_clips import noise_frames

Answer = tuple[int | str | None, str, str]  # exit code, stdout, stderr
SCRIPT = Path(__file__).parents[2] / "scripts" / "cnv" / "meta.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`clips/a.mp4` and `tables/in.csv`, whose path starts from the working directory, as in Open-Sora."""
    (tmp_path / "clips").mkdir()
    (tmp_path / "tables").mkdir()
    write_video(tmp_path / "clips" / "a.mp4", noise_frames(12, 32, 48), 29.97)
    (tmp_path / "tables" / "in.csv").write_text("path,text\nclips/a.mp4,a cat\n")
    return tmp_path


@pytest.fixture
def meta(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Runs the script with `folder` as the working directory."""

    def meta(*words: str) -> Answer:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
        with pytest.raises(SystemExit) as done:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        said = capsys.readouterr()
        return done.value.code, said.out, said.err

    return meta


@pytest.mark.parametrize("workers", [[], ["--num_workers", "0"]])
def test_the_old_words_give_the_old_columns(workers: list[str], folder: Path, meta: Callable[..., Answer]) -> None:
    code, _, err = meta("--input", "tables/in.csv", "--output", "tables/out.csv", *workers)
    assert (code, err) == (0, "")
    with open(folder / "tables" / "out.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["path"], row["text"]) == ("../clips/a.mp4", "a cat")
    assert (row["num_frames"], row["height"], row["width"], row["fps"]) == ("12", "32", "48", "29.97")
    assert (float(row["aspect_ratio"]), row["resolution"]) == (pytest.approx(32 / 48), "1536")


def test_the_new_options_are_understood_too(folder: Path, meta: Callable[..., Answer]) -> None:
    words = ["--input", "tables/in.csv", "--output", "o.jsonl", "--num_workers", "0", "--root", "clips", "--strict"]
    code, _, err = meta(*words)
    assert code == 2
    assert f"relative paths start from {folder / 'clips'}" in err
