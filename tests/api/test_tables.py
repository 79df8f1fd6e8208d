"""`probe` and `Table`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import longtake
from longtake.data.shapes import make_shapes


def test_probe_writes_a_table_and_lists_the_bad_file(tmp_path: Path) -> None:
    made = make_shapes(tmp_path, seed=1, num_clips=2, num_stills=1)
    (tmp_path / "broken.mp4").write_bytes(b"not a video")
    source = tmp_path / "list.csv"
    source.write_text(made.read_text(encoding="utf-8"), encoding="utf-8")
    with source.open("a", encoding="utf-8") as file:
        cells = ["broken.mp4"] + [""] * made.read_text(encoding="utf-8").splitlines()[0].count(",")
        file.write(",".join(cells) + "\n")
    table = longtake.probe(source, tmp_path / "clips.parquet")
    assert len(table) == 3
    assert [(row, path) for row, path, _ in table.bad] == [(3, "broken.mp4")]
    assert table.stats.rows == 3
    assert all(Path(path).is_file() and caption for path, caption in table)


def test_probe_without_a_usable_clip_writes_no_table(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path,text\nmissing.mp4,nothing\n", encoding="utf-8")
    with pytest.raises(longtake.Error):
        longtake.probe(tmp_path / "list.csv", tmp_path / "clips.parquet")
    assert not (tmp_path / "clips.parquet").exists()
    with pytest.raises(longtake.Error) as raised:
        longtake.Table(tmp_path / "clips.parquet")
    assert raised.value.place == str(tmp_path / "clips.parquet")


def test_package_exports_at_most_twelve_names_and_loads_none_of_them() -> None:
    assert len(longtake.__all__) <= 12
    packages = {path.name for path in Path(longtake.__file__).parent.iterdir() if path.is_dir()}
    assert not packages & set(longtake.__all__)
    for name in longtake.__all__:
        assert getattr(longtake, name) is not None
    code = "import sys, longtake; print(*[name for name in sys.modules if name.startswith('longtake.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["longtake._version"]
