"""A file is whole or what it was, whatever goes wrong while it is written."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake import durable
from longtake.durable import unfinished, unfinished_folder, write_whole
from longtake.weights.files import save_weights


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


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077], ids=oct)
def test_the_umask_decides_who_may_read_a_file(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "ours.json", "{}")
        save_weights({"a": torch.zeros(1)}, tmp_path / "weights.safetensors")
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == dict.fromkeys(
        ("ours.json", "weights.safetensors"), 0o666 & ~umask
    )


def test_a_file_is_on_disk_before_it_has_its_name_and_the_name_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[str, str]] = []
    monkeypatch.setattr(durable, "_writer", lambda: "me")
    fsync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda f: (order.append(("sync", os.readlink(f"/proc/self/fd/{f}"))), fsync(f)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append(("name", str(b))), rename(a, b)))
    write_whole(tmp_path / "file", "content")
    with unfinished_folder(tmp_path / "folder"):
        pass
    file, folder = (str(tmp_path / f".{name}.me.partial") for name in ("file", "folder"))
    here = ("sync", str(tmp_path))
    assert order[:3] == [("sync", file), ("name", str(tmp_path / "file")), here]
    assert order[3:] == [("sync", folder), ("name", str(tmp_path / "folder")), here]


def test_a_folder_replaces_one_with_files_and_an_empty_one(tmp_path: Path) -> None:
    for content in ("first", "second"):
        with unfinished_folder(tmp_path / "folder") as folder:
            (folder / content).touch()
        assert [path.name for path in (tmp_path / "folder").iterdir()] == [content]
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("make", [unfinished, unfinished_folder])
def test_two_writers_of_one_name_do_not_meet(make: Callable[..., Any], tmp_path: Path) -> None:
    """As two containers with one folder, whose processes have the same number; the last to end stays."""
    with make(tmp_path / "target") as first:
        with make(tmp_path / "target") as second:
            (second / "second" if second.is_dir() else second).write_text("second")
        (first / "first" if first.is_dir() else first).write_text("first")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    left = tmp_path / "target"
    assert (left / "first" if left.is_dir() else left).read_text() == "first"


@pytest.mark.parametrize("make", [unfinished, unfinished_folder])
def test_a_full_disk_is_told_with_its_place_and_leaves_nothing(make: Callable[..., Any], tmp_path: Path) -> None:
    def write() -> None:
        with make(tmp_path / "here" / "target") as partial:
            file = partial / "inside" if partial.is_dir() else partial
            file.write_bytes(b"x" * 2000)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=r"No space .*\(0.002 MB of it were written, .* free\); make room") as caught:
        write()
    assert caught.value.filename == str(tmp_path / "here" / "target")
    assert list((tmp_path / "here").iterdir()) == []


def test_all_that_is_renamed_goes_through_durable() -> None:
    package = Path(durable.__file__).parent
    renames = re.compile(r"os\.(replace|renames?)\(|shutil\.move\(|\.rename\(")
    found = [path for path in package.rglob("*.py") if renames.search(path.read_text(encoding="utf-8"))]
    assert found == [Path(durable.__file__)]
