from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longtake.data import ClipTable, write_video
from tests.data.made_clips import noise_frames
from tests.data.servers import file_server
from tests.train.runs import run_command

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")


def test_probe_takes_a_url_as_root_and_a_cache_folder(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "served").mkdir()
    write_video(tmp_path / "served" / "a.mp4", noise_frames(5, 24, 32), 12)
    (tmp_path / "list.csv").write_text("path,text\na.mp4,one\nb.mp4,two\n")
    with file_server(tmp_path / "served") as server:
        words = ["data", "probe", tmp_path / "list.csv", "-o", tmp_path / "clips.parquet", "--root", server.url("")]
        code, said, _ = run_command(capsys, [*words, "--cache-dir", tmp_path / "cache", "--cache-gb", "0.5"])
        assert code == 0
        assert "1 bad file left out" in said
        assert ClipTable.open(tmp_path / "clips.parquet").location(0) == server.url("a.mp4")
    assert "cannot be fetched: no such file on the server" in (tmp_path / "clips.bad.csv").read_text()
    assert len(list((tmp_path / "cache").glob("??/*.mp4"))) == 1
