from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longtake.data.clips.video import write_video
from longtake.data.tables.table import ClipTable
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


def test_a_protocol_that_nobody_knows_ends_the_run_at_once(tmp_path: Path, mistake: Any) -> None:
    (tmp_path / "list.csv").write_text("path\na.mp4\nb.mp4\n")
    said = mistake("data", "probe", tmp_path / "list.csv", "-o", tmp_path / "t.csv", "--root", "foo://bucket")
    assert "foo:// is not a protocol that fsspec knows" in said
    assert "--root" in said
    assert [path.name for path in tmp_path.iterdir()] == ["list.csv"]


def test_names_below_a_web_address_are_names_of_files(tmp_path: Path, capsys: Any) -> None:
    names = ["a#b.mp4", "p%20q.mp4", "q?x=1.mp4", "a b.mp4", "ünï+(1).mp4"]
    (tmp_path / "served").mkdir()
    for name in names:
        write_video(tmp_path / "served" / name, noise_frames(3, 24, 32), 12)
    (tmp_path / "list.csv").write_text("path,text\n" + "".join(f"{name},x\n" for name in names), encoding="utf-8")
    with file_server(tmp_path / "served") as server:
        words = ["data", "probe", tmp_path / "list.csv", "-o", tmp_path / "clips.csv", "--root", server.url("")]
        code, said, _ = run_command(capsys, [*words, "--cache-dir", tmp_path / "cache"])
        assert (code, said) == (0, f"5 clips in {tmp_path / 'clips.csv'}\n")
        again = ["data", "probe", tmp_path / "clips.csv", "-o", tmp_path / "again.csv"]  # whole URLs, as written
        code, said, _ = run_command(capsys, [*again, "--cache-dir", tmp_path / "other"])
        assert (code, said) == (0, f"5 clips in {tmp_path / 'again.csv'}\n")
