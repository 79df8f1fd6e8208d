from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
from PIL import Image

from longtake.contracts import UserError
from longtake.data.clips.video import ClipError, read_frames, read_image, write_image, write_video
from longtake.data.probing import pool as pool_module
from longtake.data.probing.one_file import probe_file
from longtake.data.probing.pool import WorkerPool
from longtake.data.probing.probe import probe_table
from longtake.data.tables.table import ClipTable
from longtake.random import hash64
from tests.data.clips.test_video import FILES
from tests.data.made_clips import decode_all, encode, noise_frames


@pytest.mark.parametrize("name", FILES)
def test_the_numbers_are_those_of_a_full_decode(name: str, tmp_path: Path) -> None:
    path = encode(tmp_path / name, **FILES[name][0])
    info, every = probe_file(path), decode_all(path)
    assert (info.num_frames, info.height, info.width) == every.shape[:3]


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv", ".avi"])
@pytest.mark.parametrize(("fps", "expected"), [(24, 24.0), (29.97, 29.97), (12.5, 12.5)])
def test_rate_duration_and_codec_are_read(suffix: str, fps: float, expected: float, tmp_path: Path) -> None:
    write_video(tmp_path / f"a{suffix}", noise_frames(30), fps)
    info = probe_file(tmp_path / f"a{suffix}")
    assert info.fps == expected
    assert info.duration == pytest.approx(30 / fps, abs=0.05)
    assert info.codec == "h264"


def test_a_gifs_rate_follows_its_delays(tmp_path: Path) -> None:
    path = encode(tmp_path / "a.gif", "gif", count=60, pix_fmt="rgb8")
    assert probe_file(path).fps == pytest.approx(24, abs=0.1)
    pictures = [Image.fromarray(frame) for frame in noise_frames(4, 20, 30)]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=[40, 40, 40, 3000])
    assert probe_file(path).fps == 25  # the pause at the end is not part of the motion


@pytest.mark.parametrize("suffix", [".mp4", ".mov", ".mkv"])
@pytest.mark.parametrize("degrees", [90, -90, 180])
def test_sizes_are_those_of_the_upright_picture(suffix: str, degrees: int, tmp_path: Path) -> None:
    path = encode(tmp_path / f"a{suffix}", count=3, size=(32, 48), rotation=degrees)
    info = probe_file(path)
    assert (info.height, info.width) == read_frames(path, [0]).shape[1:3]


def test_stills_have_one_frame_and_no_rate(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", noise_frames(1, 20, 30)[0])
    info = probe_file(tmp_path / "a.png")
    assert (info.num_frames, info.height, info.width, info.codec) == (1, 20, 30, "png")
    assert math.isnan(info.fps)
    image = Image.fromarray(noise_frames(1, 20, 30)[0])
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.jpg", exif=exif)
    info = probe_file(tmp_path / "turned.jpg")
    assert (info.height, info.width, info.codec) == (30, 20, "jpeg")


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
def test_a_stills_size_is_that_of_the_upright_picture(suffix: str, orientation: int, tmp_path: Path) -> None:
    image = Image.fromarray(noise_frames(1, 20, 30)[0])
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(tmp_path / f"a.{suffix}", exif=exif)
    for check in (False, True):
        info = probe_file(tmp_path / f"a.{suffix}", check)
        assert (info.height, info.width) == read_image(tmp_path / f"a.{suffix}").shape[1:3]


def _broken_files(folder: Path) -> dict[str, str]:
    """Makes one file of each kind of damage; file name -> part of the reason."""

    def write(path: Path) -> Path:
        write_video(path, noise_frames(20), 24)  # the index comes first
        return path

    make: dict[str, tuple[Callable[[Path], object], str]] = {
        "missing.mp4": (lambda path: None, "no such file"),
        "empty.mp4": (lambda path: path.touch(), "the file is empty"),
        "text.mp4": (lambda path: path.write_text("hello"), "cannot be decoded"),
        "text.jpg": (lambda path: path.write_text("hello"), "not a picture of a known format"),
        "no_index.mp4": (
            lambda path: path.write_bytes(encode(path, count=5).read_bytes()[:-200]),
            "cannot be decoded",
        ),
        "cut.mp4": (
            lambda path: path.write_bytes(write(path).read_bytes()[:-200]),
            "cut short: its index reaches beyond the end of the file",
        ),
        "": (lambda path: None, "path is empty"),
    }
    for name, (action, _) in make.items():
        action(folder / name)
    return {name: reason for name, (_, reason) in make.items()}


def test_broken_files_give_their_reason(tmp_path: Path) -> None:
    for name, reason in _broken_files(tmp_path).items():
        if name:
            with pytest.raises(ClipError, match=reason):
                probe_file(tmp_path / name)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good and bad clips and `clips.csv` over them."""
    folder = tmp_path_factory.mktemp("library")
    write_video(folder / "a b ✓.mp4", noise_frames(12, 32, 48), 24)
    write_image(folder / "c.png", noise_frames(1, 20, 30)[0])
    broken = list(_broken_files(folder))
    lines = ["path,text,score_vmafmotion,note", "a b ✓.mp4,a cat,3.5,0012"]
    lines += [f"{name},broken,1,x" for name in broken]
    lines += ['c.png,"two, lines\nhere",,', "a b ✓.mp4,again,4,y"]
    (folder / "clips.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".arrow"])
def test_a_bad_file_costs_its_row_and_is_listed(suffix: str, library: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    target = tmp_path / f"out{suffix}"
    result = probe_table(library / "clips.csv", target, root=library, progress=lambda *call: calls.append(call))
    assert (result.kept, result.bad) == (3, 7)
    assert calls[-1] == (10, 10)
    listed = pyarrow.csv.read_csv(tmp_path / "out.bad.csv").to_pylist()
    assert [row["row"] for row in listed] == [1, 2, 3, 4, 5, 6, 7] == [row for row, _, _ in result.bad_rows]
    for row, (name, reason) in zip(listed, _broken_files(library).items(), strict=True):
        assert row["path"] == name
        assert reason in row["reason"]
    table = ClipTable.open(target)
    assert [Path(table.location(row)).resolve() for row in range(3)] == [
        library / name for name in ("a b ✓.mp4", "c.png", "a b ✓.mp4")
    ]
    assert [table.caption(row) for row in range(3)] == ["a cat", "two, lines\nhere", "again"]
    assert table.num_frames.tolist() == [12, 1, 12]
    np.testing.assert_array_equal(table.fps, [24, np.nan, 24])
    np.testing.assert_array_equal(table.motion_score, [3.5, np.nan, 4])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([target.name, "out.bad.csv"])


def test_extra_columns_are_kept_and_become_numbers_only_where_all_are(library: Path, tmp_path: Path) -> None:
    probe_table(library / "clips.csv", tmp_path / "out.parquet", root=library)
    columns = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    assert columns.column_names == [
        *("path", "text", "num_frames", "height", "width", "aspect_ratio", "resolution", "fps", "duration", "codec"),
        *("uneven_times", "clip_id", "score_vmafmotion", "note"),
    ]
    assert columns["note"].to_pylist() == ["0012", "", "y"]
    assert columns["score_vmafmotion"].to_pylist() == [3.5, None, 4.0]
    assert columns["aspect_ratio"].to_pylist() == [32 / 48, 20 / 30, 32 / 48]
    assert columns["resolution"].to_pylist() == [32 * 48, 600, 32 * 48]


def test_ids_do_not_change_when_a_file_goes_bad(library: Path, tmp_path: Path) -> None:
    probe_table(library / "clips.csv", tmp_path / "out.parquet", root=library)
    probed = ClipTable.open(tmp_path / "out.parquet").clip_ids
    video, still = (os.path.relpath(library / name, tmp_path) for name in ("a b ✓.mp4", "c.png"))
    assert probed.tolist() == [hash64(video, 0), hash64(still, 0), hash64(video, 1)]
    (tmp_path / "list.csv").write_text("path\nempty.mp4\nempty.mp4\nc.png\n")
    probe_table(tmp_path / "list.csv", tmp_path / "few.parquet", root=library)
    assert ClipTable.open(tmp_path / "few.parquet").clip_ids.tolist() == [hash64(still, 0)]


def test_probing_again_and_in_other_formats_gives_the_same_table(library: Path, tmp_path: Path) -> None:
    probe_table(library / "clips.csv", tmp_path / "one.parquet", root=library)
    probe_table(tmp_path / "one.parquet", tmp_path / "two.csv")
    result = probe_table(tmp_path / "two.csv", tmp_path / "three.parquet")
    assert (result.bad, result.bad_path) == (0, None)
    one, three = (pyarrow.parquet.read_table(tmp_path / f"{name}.parquet") for name in ("one", "three"))
    assert one.to_pylist() == three.to_pylist()


def test_paths_alone_are_enough(library: Path, tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path\nc.png\n")
    probe_table(tmp_path / "list.csv", tmp_path / "out.csv", root=library)
    assert ClipTable.open(tmp_path / "out.csv").caption(0) == ""


def test_strict_fails_with_the_list_and_without_a_table(library: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"7 of 10 clips cannot be used, listed in .*out\.bad\.csv \(the first: "):
        probe_table(library / "clips.csv", tmp_path / "out.parquet", root=library, strict=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.bad.csv", "out.parquet.journal"]


def test_decode_check_costs_the_rows_of_files_that_open_but_do_not_decode(library: Path, tmp_path: Path) -> None:
    data = bytearray((library / "a b ✓.mp4").read_bytes())
    data[data.index(b"mdat") + 900 :] = bytes(len(data) - data.index(b"mdat") - 900)
    (tmp_path / "damaged.mp4").write_bytes(data)
    (tmp_path / "list.csv").write_text(f"path\ndamaged.mp4\n{library / 'a b ✓.mp4'}\n")
    assert probe_table(tmp_path / "list.csv", tmp_path / "out.csv").bad == 0
    result = probe_table(tmp_path / "list.csv", tmp_path / "out.csv", decode_check=True)
    assert [(row, path) for row, path, _ in result.bad_rows] == [(0, "damaged.mp4")]


def test_a_clean_probe_removes_the_old_list_of_bad_files(library: Path, tmp_path: Path) -> None:
    (tmp_path / "out.bad.csv").touch()
    (tmp_path / "list.csv").write_text("path\nc.png\n")
    probe_table(tmp_path / "list.csv", tmp_path / "out.csv", root=library)
    assert not (tmp_path / "out.bad.csv").exists()


@pytest.mark.parametrize(
    ("source", "target", "sentence"),
    [
        ("clips.csv", "out.xlsx", "tables end in .csv, .parquet, .arrow, .json or .jsonl, not '.xlsx'"),
        ("clips.csv", "clips.csv", "would overwrite the table it is made from; give the output another name"),
        ("names.csv", "out.csv", "column path is missing (found name); it names the file of each clip"),
    ],
)
def test_wrong_arguments_are_refused_in_one_sentence(source: str, target: str, sentence: str, library: Path) -> None:
    (library / "names.csv").write_text("name\nc.png\n")
    with pytest.raises(UserError) as raised:
        probe_table(library / source, library / target)
    assert sentence in str(raised.value)


def test_processes_find_what_one_process_finds(library: Path, tmp_path: Path) -> None:
    alone = probe_table(library / "clips.csv", tmp_path / "alone.parquet", root=library)
    spread = probe_table(library / "clips.csv", tmp_path / "spread.parquet", root=library, workers=2)
    assert spread.bad_rows == alone.bad_rows
    assert (tmp_path / "alone.parquet").read_bytes() == (tmp_path / "spread.parquet").read_bytes()


def _answers(function: Callable[[str], str], arguments: list[str], workers: int) -> list[str]:
    with WorkerPool(function, workers) as pool:
        return [answer for _, answer in sorted(pool.answers(arguments))]


def _crash_on_three(argument: str) -> str:
    if argument == "3":
        os.abort()
    return argument * 2


def test_a_pool_answers_one_list_after_the_other_and_a_crash_costs_its_file_alone() -> None:
    crashed = "reading it crashed the decoder (killed by SIGABRT)"
    with WorkerPool(_crash_on_three, 2) as pool:
        for arguments in (["1", "2"], [], [str(number) for number in range(40)]):
            wanted = [crashed if argument == "3" else argument * 2 for argument in arguments]
            assert dict(pool.answers(arguments)) == dict(enumerate(wanted))


def _stop_on_three(argument: str) -> str:
    if argument == "3":
        os.kill(os.getpid(), signal.SIGSTOP)
    return argument * 2


def test_pool_replaces_a_process_that_stays_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_FROZEN_SECONDS", 0.2)
    with WorkerPool(_stop_on_three, 2) as pool:
        answers = dict(pool.answers([str(number) for number in range(40)]))
    assert answers.pop(3) == "reading it took no step for 0.2 s"
    assert answers == {number: str(number) * 2 for number in range(40) if number != 3}


def _fail(argument: str) -> str:
    raise KeyError(argument)


def test_a_mistake_of_ours_is_not_taken_for_a_bad_file() -> None:
    for workers in (0, 1):
        with pytest.raises(KeyError):
            _answers(_fail, ["1"], workers=workers)


def test_paths_are_written_so_that_they_start_from_the_targets_folder(library: Path, tmp_path: Path) -> None:
    write_image(tmp_path / "in/a.png", noise_frames(1)[0])
    absolute = str(library / "c.png")
    (tmp_path / "list.csv").write_text(f"path\nin/a.png\n{absolute}\nnowhere.png\n")
    result = probe_table(tmp_path / "list.csv", tmp_path / "sub/out.parquet")
    table = ClipTable.open(tmp_path / "sub/out.parquet")
    assert [table.written_path(row) for row in range(2)] == ["../in/a.png", absolute]
    assert table.clip_ids.tolist() == [hash64("../in/a.png", 0), hash64(absolute, 0)]
    assert result.bad_rows == ((2, "nowhere.png", "no such file"),)
    probe_table(tmp_path / "sub/out.parquet", tmp_path / "again.csv")
    again = ClipTable.open(tmp_path / "again.csv")
    assert [again.written_path(row) for row in range(2)] == ["in/a.png", absolute]
    assert again.clip_ids.tolist() == table.clip_ids.tolist(), "ids that are there are kept"


def test_a_table_without_a_usable_clip_is_refused_with_the_list(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_text("path\na.mp4\nb.mp4\n")
    with pytest.raises(UserError, match=r"list\.csv: no clip is usable, all 2 are listed .*out\.bad\.csv .*no such"):
        probe_table(tmp_path / "list.csv", tmp_path / "out.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["list.csv", "out.bad.csv"]


@pytest.mark.parametrize(
    ("table", "target", "sentence"),
    [
        ("path,path,text\nc.png,c.png,x\n", "out.csv", "there are several columns path; names of columns must differ"),
        ("path,clip_id\nc.png,7\nc.png,abc\n", "out.csv", "clip_id of row 1 is 'abc'; it must be a whole number"),
        ("path,clip_id\nc.png,-3\n", "out.csv", "clip_id of row 0 is '-3'; it must be a whole number"),
        ("path,clip_id\nc.png,\n", "out.csv", "clip_id of row 0 is empty; it must be a whole number"),
        ({"path": ["c.png"], "clip_id": ["abc"]}, "out.parquet", "clip_id of row 0 is 'abc'; it must be"),
        ({"path": ["c.png"], "clip_id": [-3]}, "out.parquet", "clip_id of row 0 is -3; it must be a whole number"),
        ({"path": ["c.png"], "clip_id": [1.5]}, "out.parquet", "column clip_id holds double; it must hold whole"),
        ({"path": [["c.png"]]}, "out.parquet", "column path holds list<element: string>; it must hold text"),
        ({"path": ["c.png"], "text": [True]}, "out.parquet", "column text holds bool; it must hold text"),
        ("path,text\n", "out.csv", "the table has no rows; list one clip a row with its path and text"),
    ],
)
def test_wrong_columns_are_refused_in_one_sentence(
    table: str | dict, target: str, sentence: str, library: Path, tmp_path: Path
) -> None:
    source = tmp_path / ("in.csv" if isinstance(table, str) else "in.parquet")
    if isinstance(table, str):
        source.write_text(table)
    else:
        pyarrow.parquet.write_table(pyarrow.table(table), source)
    with pytest.raises(UserError) as raised:
        probe_table(source, tmp_path / target, root=library)
    assert str(raised.value).startswith(f"{source}: {sentence}")
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == [source.name]
