"""`longtake data shard, filter, merge, split, stats`, on a probed table of six clips and three stills."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from longtake.data.probing.probe import probe_table
from longtake.data.shapes import make_shapes
from longtake.data.tables.table import ClipTable
from tests.pages import Page
from tests.train.runs import write_config


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    shapes = make_shapes(folder, num_clips=6, num_stills=3)
    return probe_table(shapes, folder / "clips.parquet").target


@pytest.fixture
def table(made: Path, tmp_path: Path) -> Path:
    """`clips.parquet` beside its clips, in a folder of the test's own."""
    shutil.copytree(made.parent / "clips", tmp_path / "clips")
    return Path(shutil.copy(made, tmp_path / "clips.parquet"))


def test_one_argument_is_enough_to_shard(longtake, table: Path):
    code, out, err = longtake("data", "shard", table)
    assert (code, err) == (0, "")
    assert out.startswith(f"9 rows in {table.with_suffix('.shards')}, ")
    shards = ClipTable.open(table.with_suffix(".shards"))
    assert shards.fingerprint == ClipTable.open(table).fingerprint
    assert Path(shards.location(0)).is_file()
    other = table.parent / "other" / "place"
    code, out, _ = longtake("data", "shard", table.with_suffix(".shards"), "-o", other)
    assert code == 0
    assert Path(ClipTable.open(other).location(0)).is_file()


def test_rows_that_no_run_uses_are_said(longtake, tmp_path: Path):
    lines = ["path,text,num_frames,height,width,fps", "a.mp4,a,0,16,16,24", "b.mp4,b,9,16,16,24"]
    (tmp_path / "clips.csv").write_text("\n".join(lines) + "\n")
    code, out, _ = longtake("data", "shard", tmp_path / "clips.csv")
    assert code == 0
    assert "warning: 1 rows cannot be used, and no run uses them" in out


def test_filter_says_how_many_of_how_many_are_kept(longtake, mistake, table: Path):
    target = table.parent / "out" / "videos.csv"
    where = "resolution >= 900 AND num_frames > 1"
    code, out, _ = longtake("data", "filter", table, "-o", target, "--where", where)
    left = "left out: 3 stills: the condition is false\n"
    assert (code, out) == (0, f"6 of 9 rows kept, in {target}\n{left}")
    assert all(Path(ClipTable.open(target).location(row)).is_file() for row in range(6))
    both = ("--where", "resolution >= 900 OR true -- all", "--where", "num_frames = 1")
    assert longtake("data", "filter", table, "-o", table.parent / "stills.csv", *both)[1].startswith("3 of 9 rows kept")
    said = mistake("data", "filter", table, "-o", target, "--where", "beauty > 3")
    assert "beauty" in said
    assert "are path, text, num_frames, height, width" in said
    assert "no such file" in mistake("data", "filter", table.with_name("no.csv"), "-o", target, "--where", "true")


def test_the_parts_of_a_probe_merge_to_the_whole(longtake, mistake, made: Path, table: Path):
    source = made.with_suffix(".csv")
    target = table.parent / "p.parquet"
    for part in (1, 2, 3):
        assert longtake("data", "probe", source, "-o", target, "--part", f"{part}/3")[0] == 0
    parts = sorted(table.parent.glob("p.part-*.parquet"))
    code, out, _ = longtake("data", "merge", *parts, "-o", target)
    assert (code, out) == (0, f"9 rows of 3 tables in {target}\n")
    whole = ClipTable.open(probe_table(source, table.parent / "whole.parquet").target)
    assert ClipTable.open(target).fingerprint == whole.fingerprint
    assert "--repeated first" in mistake("data", "merge", target, *parts, "-o", table.parent / "twice.csv")
    code, out, _ = longtake("data", "merge", target, *parts, "-o", table.parent / "t.csv", "--repeated", "first")
    left = "left out: 9 rows: their clip id is that of an earlier one\n"
    assert (code, out) == (0, f"9 rows of 4 tables in {table.parent / 't.csv'}\n{left}")


def test_split_names_what_went_where(longtake, mistake, table: Path):
    train, val = table.with_name("train.parquet"), table.with_name("val.jsonl")
    code, out, _ = longtake("data", "split", table, "-o", train, "-o", val, "--fractions", "0.5,0.5")
    assert code == 0
    counts = [len(ClipTable.open(part)) for part in (train, val)]
    assert out == f"{counts[0]} of 9 rows in {train}\n{counts[1]} of 9 rows in {val}\n"
    assert sum(counts) == 9
    said = mistake("data", "split", table, "-o", train, "--fractions", "half")
    assert said == "--fractions half: expected numbers with commas between, such as 0.98,0.02"
    assert "1 for 2 outputs" in mistake("data", "split", table, "-o", train, "-o", val, "--fractions", "1")


def test_stats_on_the_terminal(longtake, table: Path):
    code, out, _ = longtake("data", "stats", table)
    assert code == 0
    words = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip()}
    assert (words["rows"], words["videos"], words["stills"]) == (["9"], ["6"], ["3"])
    assert words["num_frames"][:2] == ["0", "1"]
    assert "codec" in words


def test_stats_with_a_run_and_a_page(longtake, mistake, table: Path):
    config = write_config(table.parent / "run", table)
    page = table.parent / "pages" / "stats.html"
    (table.parent / "clips" / "clip_00003.mp4").write_bytes(b"")
    code, out, _ = longtake("data", "stats", table, "--html", page, "--run", config, "--frames", 9)
    assert code == 0
    assert "clips used" in out
    assert "micro-batches" in out
    found = Page(page.read_text())
    assert len(found.pictures) == 8
    assert "cannot be read: the file is empty" in found.texts
    assert {"samples", "time kept", "picture kept"} <= set(found.section("Buckets"))
    assert found.bars[0] == [("9 used", 100.0)]
    assert not list((table.parent / "run").glob("outputs/*")), "no run is begun"
    assert "none.py" in mistake("data", "stats", table, "--run", table.parent / "none.py")


def test_stats_take_a_run_without_a_table_and_without_a_model_that_fits(longtake, mistake, table: Path):
    run = table.parent / "run.py"
    run.write_text('bucket_config = {"32px": {1: (1.0, 4), 8: (1.0, 3)}}\nmodel = dict(in_channels=64)\n')
    code, out, err = longtake("data", "stats", table, "--run", run)
    assert (code, err) == (0, "")
    assert "9 clips" in out
    code, fewer, _ = longtake("data", "stats", table, "--run", run, "--bucket_config.32px.1", "[0.0, 4]")
    assert code == 0
    assert fewer != out
    run.write_text(run.read_text() + 'dataset = dict(mix=[("no.csv", 1.0)])\n')
    assert longtake("data", "stats", table, "--run", run)[:2] == (0, out)
    assert "bucket_konfig" in mistake("data", "stats", table, "--run", run, "--bucket_konfig", "3")
    assert "no option --htlm" in mistake("data", "stats", table, "--htlm", "page.html")


def test_frames_of_remote_clips_are_kept_where_the_user_says(longtake, mistake, table: Path):
    fsspec = pytest.importorskip("fsspec")
    page, cache = table.with_name("stats.html"), table.with_name("cache")
    for file in (table.parent / "clips").iterdir():
        fsspec.filesystem("memory").pipe(f"/{table.parent.name}/clips/{file.name}", file.read_bytes())
    roots = ("--root", f"memory://{table.parent.name}", "--cache-dir", cache, "--cache-gb", "1")
    code, _, err = longtake("data", "stats", table, "--html", page, *roots)
    assert (code, err) == (0, "")
    assert len(Page(page.read_text()).pictures) == 9
    assert any(cache.rglob("*")), "fetched files lie in --cache-dir"
    assert "--cache-gb -1: must be a size" in mistake("data", "stats", table, "--cache-gb", "-1")
    assert "no such folder" in mistake("data", "stats", table, "--html", page, "--root", table.with_name("none"))


def test_a_folder_of_clips_has_stats_as_it_is_and_is_told_how_to_become_a_table(longtake, mistake, table: Path):
    page = table.with_name("stats.html")
    code, out, _ = longtake("data", "stats", table.parent / "clips", "--run", "demo/shapes", "--html", page)
    assert (code, out.split()[:2]) == (0, ["rows", "9"])
    assert "micro-batches" in out
    assert len(Page(page.read_text()).pictures) == 9
    assert "longtake data probe" in mistake("data", "filter", table.parent, "-o", "x.csv", "--where", "true")


@pytest.mark.parametrize("root", [None, "."])
def test_the_command_that_is_suggested_for_a_list_makes_a_table_that_trains(
    longtake, mistake, table: Path, monkeypatch, root: str | None
):
    """Of a list whose name has a blank and whose suggested name is taken, with paths from `root`."""
    monkeypatch.chdir(table.parent)
    (table.parent / "lists").mkdir()
    start = "" if root else "../"
    rows = [f"{start}clips/{file.name},A caption" for file in sorted((table.parent / "clips").iterdir())]
    (table.parent / "lists" / "my clips.csv").write_text("\n".join(["path,text", *rows]) + "\n", encoding="utf-8")
    (table.parent / "my clips.parquet").write_bytes(b"another table")
    run = write_config(table.parent / "run", table.parent / "lists" / "my clips.csv")
    flags = ["--dataset.root", root] if root else []
    said = mistake("train", run, *flags)
    (command,) = re.findall("`(.*?)`", said)
    assert longtake(*shlex.split(command)[1:])[0] == 0
    assert (table.parent / "my clips.parquet").read_bytes() == b"another table"
    code, out, err = longtake("data", "stats", "my clips.probed.parquet", "--html", "stats.html")
    pictures = Page((table.parent / "stats.html").read_text()).pictures
    assert (code, err, len(pictures)) == (0, "", 9), out
