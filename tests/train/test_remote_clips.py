"""Training on clips that lie on a server, against the same clips as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.servers import file_server
from tests.train.runs import exact, train_here, write_config

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")


def test_clips_on_a_server_train_like_files(clips: Path, tmp_path: Path) -> None:
    plain, _ = train_here(write_config(tmp_path / "files", clips, max_steps=4))
    with file_server(clips.parent) as server:
        run = write_config(tmp_path / "served", clips, max_steps=4, num_workers=2)
        served, _ = train_here(run, "--dataset.root", server.url(""), "--dataset.cache_dir", str(tmp_path / "cache"))
    assert list((tmp_path / "cache").glob("??/*.mp4")), "they came over the net"
    assert len(exact(plain.folder)) == 4
    assert exact(served.folder) == exact(plain.folder)
