"""Open-Sora 1.2's datautil, as Lambda's data pages use it."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from longtake.data.shapes import make_shapes
from tests.dialects.speech import ROOT
from tools.datasets.datautil import CONDITIONS, REFUSED, main


def test_it_fills_in_a_table_and_leaves_out_what_the_flags_say(tmp_path: Path) -> None:
    table = make_shapes(tmp_path, num_clips=6, num_stills=2)
    text = table.read_text().splitlines()
    path, _, rest = text[1].partition(",")
    table.write_text("\n".join([text[0], f"{path}," + "," * rest.count(","), *text[2:]]) + "\n")
    assert main([str(table), "--info", "--remove-empty-caption", "--fmin", "2"]) == 0
    with (tmp_path / "clips_info_noempty_fmin2.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5
    assert all(row["text"] and int(row["num_frames"]) > 1 and int(row["height"]) for row in rows)
    assert all((tmp_path / row["path"]).is_file() for row in rows)
    assert main([str(table), str(tmp_path / "clips_info.csv"), "--vid-only", "--output", "x.csv", "--shuffle"]) == 2


@pytest.mark.parametrize("flag", [[], ["--clean-caption"], ["--fsmax", "50"]])
def test_what_is_not_here_is_said(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["x.csv", *flag]) == 2
    assert ("is not here; " if flag else "there is nothing to do") in capsys.readouterr().err


def test_numbers_and_tables_are_those_that_are_written(tmp_path: Path) -> None:
    (tmp_path / "clips.csv").write_text("path,text,resolution,aes\na.mp4,a,2073601,5.0\nb.mp4,b,2073600,-1\n")
    assert main([str(tmp_path / "cl*.csv"), "--hwmax", "2073600"]) == 0
    with (tmp_path / "clips_hwmax2073600.csv").open(newline="") as file:
        assert [row["path"] for row in csv.DictReader(file)] == ["b.mp4"]
    assert main([str(tmp_path / "clips_hwmax2073600.csv"), "--aesmin", "0"]) == 0
    assert (tmp_path / "clips_hwmax2073600_aesmin0.0.csv").read_text().count("\n") == 1


def test_every_flag_is_on_the_page_of_migrating() -> None:
    page = (ROOT / "docs" / "migrating.md").read_text().partition("\n## Open-Sora 1.2")[2]
    words = {f"--{name.replace('_', '-')}" for name in (*CONDITIONS, *REFUSED)}
    assert sorted(words - set(re.findall(r"`(--[\w-]+)", page))) == []
