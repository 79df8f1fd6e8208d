from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from longtake.data.tables.table import ClipTable

SCRIPT = Path(__file__).parents[2] / "scripts" / "cnv" / "shard.py"


@pytest.mark.parametrize("words", [[], ["10000"], ["--k", "10000"]])
def test_the_old_words_write_shards_beside_the_table(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "videos.csv").write_text("path,text,num_frames,height,width,fps\na.mp4,a cat,9,16,16,24\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "./videos.csv", *words])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert done.value.code == 0
    assert ("k is not needed" in capsys.readouterr().err) == bool(words)
    assert ClipTable.open(tmp_path / "videos.shards").caption(0) == "a cat"
