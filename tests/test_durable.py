"""A file is whole or what it was, whatever goes wrong while it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from longtake.durable import unfinished, write_whole


def test_a_file_is_whole_or_what_it_was(tmp_path: Path) -> None:
    target = tmp_path / "pages" / "stats.html"
    write_whole(target, "first")
    with pytest.raises(UnicodeEncodeError):
        write_whole(target, "second \udc80")
    assert target.read_text() == "first"
    assert [path.name for path in target.parent.iterdir()] == ["stats.html"]


@pytest.mark.parametrize("synced", [True, False])
def test_an_unfinished_file_has_the_suffix_and_leaves_nothing_behind_an_error(synced: bool, tmp_path: Path) -> None:
    target = tmp_path / "a b.clip.mp4"
    with pytest.raises(IsADirectoryError), unfinished(target, synced) as path:  # noqa: PT012 - as users write it
        assert (path.parent, path.suffix) == (tmp_path, ".mp4")
        path.write_bytes(b"half")
        tmp_path.read_bytes()
    assert list(tmp_path.iterdir()) == []
    with unfinished(target, synced) as path:
        path.write_bytes(b"whole")
        assert not target.exists()
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a b.clip.mp4", b"whole")]
