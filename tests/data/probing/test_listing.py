"""A folder is read as it is meant: every real file once, its caption found, and what is not used is counted."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from longtake.contracts import UserError
from longtake.data.clips.video import read_frames, read_image, write_image, write_video
from longtake.data.config import DatasetConfig
from longtake.data.probing.listing import list_clips
from longtake.data.probing.one_file import probe_file
from longtake.data.probing.probe import probe_table
from longtake.data.tables.captions import FromFiles, edit_captions
from longtake.data.tables.mix import open_clips
from longtake.data.tables.rows import folder_notes
from longtake.data.tables.table import caption_lines
from tests.data.made_clips import noise_frames


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


def listed(folder: Path) -> list[str]:
    return list_clips(folder).clips["path"].to_pylist()


def captions(folder: Path) -> dict[str, str]:
    clips = list_clips(folder).clips
    return dict(zip(clips["path"].to_pylist(), clips["text"].to_pylist(), strict=True))


def test_folder_links_give_every_real_file_once(tmp_path: Path) -> None:
    folder, other = tmp_path / "set", tmp_path / "other"
    touch(folder, "z/a.mp4", "z/b.mp4")
    touch(other, "c.mp4", "deep/d.mp4")
    for link, target in {
        "loop": folder,
        "z/up": tmp_path,
        "a_first": folder / "z",
        "more": other,
        "more_again": other,
        "some": other / "deep",
    }.items():
        (folder / link).symlink_to(target, target_is_directory=True)
    (folder / "b_link.mp4").symlink_to(folder / "z" / "b.mp4")
    (folder / "d_link.mp4").symlink_to(other / "deep" / "d.mp4")
    (folder / "e_link.mp4").symlink_to(tmp_path / "nowhere.mp4")
    (folder / "z" / "hard_link.mp4").hardlink_to(folder / "z" / "b.mp4")
    clips = listed(folder)
    assert len({os.path.realpath(folder / path) for path in clips}) == len(clips) == 5
    assert {"z/a.mp4", "z/b.mp4", "more/c.mp4", "e_link.mp4"} < set(clips)
    notes = " ".join(list_clips(folder).notes)
    assert all(name in notes for name in ("loop", "z/up", "b_link.mp4", "z/hard_link.mp4"))


@pytest.mark.parametrize(
    ("unused", "words"),
    [
        (["a.heic", "b.HEIC"], ["2 .heic", "a.heic"]),
        (["a.jxl"], ["1 .jxl"]),
        (["a.cr2", "b.svg"], ["1 .cr2", "1 .svg"]),
        (["@eaDir/x.mp4/SHOT.webp", "@eaDir/y.jpg/SYNO.jpg"], ["1 .webp", "1 .jpg", "@eaDir"]),
        (["#recycle/old.mp4", "__MACOSX/x.mp4"], ["2 .mp4"]),
        (["x.webp", "X.jpg"], ["1 .webp", "1 .jpg"]),
        (["new.mp4.part", "new.mkv.crdownload"], ["1 .part", "1 .crdownload"]),
        (["._x.mp4"], ["1 .mp4"]),
        (["x.lrv", "x.THM"], ["1 .lrv", "1 .thm"]),
        (["notes.txt", "x_caption.txt", "x.json", "x.caption"], ["4 text files", "notes.txt"]),
    ],
)
def test_folder_media_that_is_not_used_is_counted_by_suffix(
    tmp_path: Path, unused: list[str], words: list[str]
) -> None:
    touch(tmp_path, "x.mp4", *unused)
    assert listed(tmp_path) == ["x.mp4"]
    notes = " ".join(list_clips(tmp_path).notes)
    assert all(word in notes for word in words)


def test_folder_of_media_that_nothing_reads_is_rejected_with_their_count(tmp_path: Path) -> None:
    touch(tmp_path, "a.heic", "b.heic")
    with pytest.raises(UserError, match=r"2 \.heic not used \(a\.heic, b\.heic\)"):
        list_clips(tmp_path)


def test_folder_without_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "a.mp4", "closed/b.mp4")
    scandir = os.scandir

    def refusing(place: str) -> os.ScandirIterator:
        if str(place).endswith("closed"):
            raise PermissionError(13, "Permission denied", place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refusing)
    (note,) = list_clips(tmp_path).notes
    assert note == "folder closed is not used: Permission denied"


def test_folder_file_name_that_is_not_utf8_costs_its_file(tmp_path: Path) -> None:
    touch(tmp_path, "a.mp4")
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.mp4"))).write_bytes(b"x")
    assert listed(tmp_path) == ["a.mp4"]
    assert "caf\\xe9.mp4" in " ".join(list_clips(tmp_path).notes)


@pytest.mark.parametrize("name", ["x.txt", "x.mp4.txt", "x.TXT", "X.txt", "x.MP4.Txt"])
def test_caption_file_is_found_by_near_names(tmp_path: Path, name: str) -> None:
    touch(tmp_path, "x.mp4")
    (tmp_path / name).write_text("a cat")
    assert captions(tmp_path) == {"x.mp4": "a cat"}
    assert list_clips(tmp_path).notes == []
    table = tmp_path / "clips.csv"
    table.write_text("path,text\nx.mp4,old\n")
    edit_captions(table, [FromFiles()])
    assert "a cat" in table.read_text()


def test_caption_file_name_in_another_unicode_form_is_found(tmp_path: Path) -> None:
    touch(tmp_path, unicodedata.normalize("NFC", "café.mp4"))
    (tmp_path / unicodedata.normalize("NFD", "café.txt")).write_text("a cat")
    assert [*captions(tmp_path).values()] == ["a cat"]


def test_picture_with_a_caption_of_its_own_is_no_preview(tmp_path: Path) -> None:
    touch(tmp_path, "x.mp4", "x.jpg")
    (tmp_path / "x.txt").write_text("a film")
    (tmp_path / "x.jpg.txt").write_text("a picture")
    assert captions(tmp_path) == {"x.jpg": "a picture", "x.mp4": "a film"}


ENCODED = {
    "utf-8": ("é".encode(), "é"),
    "utf-8 with mark": ("é\r\n".encode("utf-8-sig"), "é"),
    "utf-16": ("é".encode("utf-16"), "é"),
    "utf-16 big endian": (b"\xfe\xff" + "é".encode("utf-16-be"), "é"),
    "utf-32": ("é".encode("utf-32"), "é"),
    "windows-1252": ("a dog\u2019s".encode("cp1252"), None),
    "latin-1": ("é".encode("latin-1"), None),
    "gbk": ("在雪地里".encode("gbk"), None),
    "utf-16 without mark": ("a cat".encode("utf-16-le"), None),
    "utf-16 cut short": ("a cat".encode("utf-16")[:-1], None),
}


def test_caption_in_another_encoding_costs_its_clip_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for name, (data, _) in ENCODED.items():
        write_image(folder / f"{name}.png", noise_frames(1, 16, 24)[0])
        (folder / f"{name}.txt").write_bytes(data)
    write_image(folder / "folder.png", noise_frames(1, 16, 24)[0])
    (folder / "folder.txt").mkdir()
    good = {f"{name}.png": text for name, (_, text) in ENCODED.items() if text is not None}
    lost = [name for name, (_, text) in ENCODED.items() if text is None] + ["folder"]
    table = open_clips(DatasetConfig(data_path=str(folder)))
    assert {table.written_path(row): table.caption(row) for row in range(len(table))} == good
    bad = (folder / ".longtake.bad.csv").read_text()
    assert all(f"{name}.txt" in bad for name in lost)
    assert f"{len(lost)} files cannot be used" in caption_lines([table], None)
    result = probe_table(folder, tmp_path / "clips.parquet")
    assert sorted(path for _, path, _ in result.bad_rows) == sorted(f"{name}.png" for name in lost)
    # A caption that is fixed brings its clip back.
    (folder / "latin-1.txt").write_text("é")
    assert len(open_clips(DatasetConfig(data_path=str(folder)))) == len(good) + 1


def test_caption_file_that_cannot_be_read_leaves_the_caption_of_a_table(tmp_path: Path) -> None:
    (tmp_path / "clips.csv").write_text("path,text\na.mp4,red\nb.mp4,blue\n")
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    (tmp_path / "b.txt").write_text("green")
    files = FromFiles()
    assert edit_captions(tmp_path / "clips.csv", [files]) == (1, 2)
    assert [Path(clip).name for clip in files.unread] == ["a.mp4"]


def test_notes_of_a_folder_are_given_at_every_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_video(tmp_path / "a.mp4", noise_frames(5, 32, 48), 8)
    for name in ("b.png", "c.png", "d.png", "e.png"):
        write_image(tmp_path / name, noise_frames(1, 16, 24)[0])
    touch(tmp_path, "f.heic")
    for _ in range(2):
        table = open_clips(DatasetConfig(data_path=str(tmp_path)))
        lines = caption_lines([table], None).splitlines()
        assert "empty for 5 of 5 clips (a.mp4, b.png, c.png and 2 more)" in lines[0]
        assert "1 .heic not used (f.heic)" in lines[1]
    assert folder_notes(table.source)


@pytest.mark.parametrize("suffix", [".jfif", ".avif", ".jpe", ".tga", ".jp2", ".pnm"])
def test_pictures_that_pillow_reads_are_clips(tmp_path: Path, suffix: str) -> None:
    kinds = {".jfif": "jpeg", ".jpe": "jpeg", ".avif": "avif", ".tga": "tga", ".jp2": "jpeg2000", ".pnm": "ppm"}
    Image.fromarray(np.full((32, 48, 3), 99, np.uint8)).save(tmp_path / f"a{suffix}", kinds[suffix])
    assert listed(tmp_path) == [f"a{suffix}"]
    assert (probe_file(tmp_path / f"a{suffix}").height, read_image(tmp_path / f"a{suffix}").shape[-3:-1]) == (
        32,
        (32, 48),
    )


@pytest.mark.parametrize(
    ("suffix", "kind", "codec"),
    [(".y4m", "yuv4mpegpipe", "wrapped_avframe"), (".h264", "h264", "libx264"), (".vob", "vob", "mpeg2video"),
     (".m2v", "mpeg2video", "mpeg2video"), (".f4v", "f4v", "libx264"), (".nut", "nut", "libx264")],
)  # fmt: skip
def test_videos_that_ffmpeg_reads_are_clips(tmp_path: Path, suffix: str, kind: str, codec: str) -> None:
    path = tmp_path / f"a{suffix}"
    with av.open(str(path), "w", format=kind) as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for frame in noise_frames(7, 48, 64):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    assert listed(tmp_path) == [f"a{suffix}"]
    info = probe_file(path)
    assert (info.num_frames, info.height, info.width) == (7, 48, 64)
    assert read_frames(path, np.arange(7)).shape == (7, 48, 64, 3)
