from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from longtake.contracts import UserError
from longtake.data.probing.one_file import probe_file
from longtake.data.tables.table import ClipTable
from longtake.demo import run as module
from longtake.demo.run import DemoOutcome
from longtake.demo.start import run_demo
from longtake.train.report import read_record
from tests.pages import Page

# The demo's own config, made small: it is trained for a moment only.
SMALL = [
    *("--model.depth", "1", "--model.depth_single_blocks", "1", "--model.hidden_size", "32", "--model.num_heads", "1"),
    *("--max-steps", "3", "--num-workers", "0", "--sampling_option.num_steps", "2", "--device", "cpu"),
]


def demo(folder: Path, *overrides: str) -> tuple[DemoOutcome, str]:
    """A tiny demo, and what it said."""
    said = io.StringIO()
    outcome = run_demo(folder, Console(file=said, soft_wrap=True), [*SMALL, *overrides], num_clips=24, num_stills=6)
    return outcome, said.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoOutcome, str]:
    return demo(tmp_path_factory.mktemp("outputs") / "demo")


@pytest.fixture(scope="module")
def page(finished: tuple[DemoOutcome, str]) -> Page:
    return Page(finished[0].report.read_text())


def test_clips_are_real_files_listed_in_a_probed_table(finished: tuple[DemoOutcome, str]):
    table = ClipTable.open(finished[0].folder / "clips" / "clips.parquet")
    assert len(table) == 30
    assert probe_file(table.location(0)).codec == "h264"
    assert probe_file(table.location(29)).codec == "png"
    assert table.caption(0).startswith("a ")


def test_training_leaves_a_run_that_can_go_on(finished: tuple[DemoOutcome, str]):
    run = finished[0].run
    assert set(finished[0].seconds) == {"make and probe the clips", "train", "generate and judge"}
    assert run.folder == finished[0].folder / "run"
    assert run.clock.global_step == 3
    assert {"config.py", "metrics.jsonl", "bucket_report.json"} <= {path.name for path in run.folder.iterdir()}


def test_every_kind_of_video_is_generated_and_judged(finished: tuple[DemoOutcome, str]):
    outcome, _ = finished
    counts = {name: accuracy.count for name, accuracy in outcome.accuracy.items()}
    assert counts == {
        "main": 60,
        "wide": 60,
        "long": 60,
        "wide_long": 60,
        "heldout": 12,
        "heldout_long": 12,
        "stills": 6,
    }
    assert not (outcome.folder / ".samples.partial").exists()
    for kind in module.kinds(read_record(outcome.run.folder).config):
        files = sorted((outcome.folder / "samples" / kind.name).glob("*/prompt_*"))
        videos = [path for path in files if path.suffix in (".mp4", ".png")]
        told = [path.with_suffix(".txt").read_text().strip().removesuffix(" 8 FPS.") for path in videos]
        assert told == [f"{prompt}." for prompt in kind.prompts]
        info = probe_file(videos[0])
        assert (info.num_frames, info.width) == (kind.num_frames, 40 if kind.aspect_ratio == "2:1" else 32)
        assert (videos[0].parent / "grid.png").exists()


def test_the_report_shows_everything_and_asks_for_nothing(finished: tuple[DemoOutcome, str], page: Page):
    kinds = {kind.title: kind for kind in module.kinds(read_record(finished[0].run.folder).config)}
    shown = [kind for kind in kinds.values() for _ in range(kind.num_shown)]
    assert len(page.pictures) == len(shown)
    for (_, strip), kind in zip(page.pictures, shown, strict=True):
        assert strip.width == kind.num_frames * (40 if kind.aspect_ratio == "2:1" else 32)
    accuracy = page.section("Accuracy")
    assert all(title in accuracy for title in kinds)
    assert {"32px/1f/3:2", "32px/8f/2:1"} <= set(page.section("Data"))
    assert any(text.startswith("generate and judge ") for text in page.section("Parts of the demo"))
    assert any(text.startswith("longtake generate ") for text in page.section("Go on"))


def test_the_terminal_is_told_the_steps_the_accuracy_and_where_to_look(finished: tuple[DemoOutcome, str]):
    outcome, said = finished
    assert re.findall(r"\[\d/4\]", said) == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert "names the colour of 100 %, the shape of 100 % and the direction of 100 % of them correctly" in said
    assert "Main bucket: 32 x 32, 8 frames" in said
    assert said.rstrip().endswith(f"open in a browser: {outcome.report}")
    assert max(len(line) for line in said.splitlines()) < 300


def test_a_finished_demo_is_never_overwritten(
    finished: tuple[DemoOutcome, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = finished[0].folder
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}

    def stop(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "make_shapes", stop)
    outcome, _ = demo(folder)
    assert outcome.folder == folder.with_name("demo-2")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_an_interrupted_demo_says_how_to_go_on_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder, whole = tmp_path / "demo", {}
    for step, call in (("make_shapes", 0), ("probe_table", 0), ("train", 0), ("generate", 2), ("write_report", 0)):
        calls, real = [], getattr(module, step)

        def stop(*arguments: object, _calls: list = calls, _real: Any = real, _call: int = call, **options: object):
            _calls.append(None)
            if len(_calls) > _call:
                raise KeyboardInterrupt
            return _real(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(module, step, stop)
            outcome, said = demo(folder)
        assert outcome.stopped
        assert not (folder / "report.html").exists()
        assert said.endswith(f"interrupted\nto go on with the demo: longtake demo --folder {folder}\n")
        clips = {path: path.stat().st_mtime_ns for path in folder.rglob("clip_*.mp4")}
        assert whole in ({}, clips)  # what was whole is not made again
        whole = clips if step in ("train", "generate") else {}

    outcome = run_demo(folder, Console(quiet=True))
    assert not outcome.stopped
    assert outcome.folder == folder
    assert outcome.run.clock.global_step == 3  # what was asked for is remembered
    assert outcome.accuracy["main"].count == 60
    assert len(list((folder / "samples" / "main" / "video_32px").glob("*.mp4"))) == 60
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("clip_*.mp4")} == clips
    assert (folder / "samples-2").is_dir()  # the videos of a report that was never written are kept


def test_the_time_of_an_interrupted_part_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def stop(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "probe_table", stop)
    first, _ = demo(tmp_path / "demo")
    second, _ = demo(tmp_path / "demo")
    part = "make and probe the clips"
    assert 0 < first.seconds[part] < second.seconds[part]
    assert json.loads((tmp_path / "demo" / "demo.json").read_text())["seconds"] == second.seconds


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["--lrr", "1"], "did you mean lr?"),
        (["--outputs", "x"], "--outputs: the demo makes its own clips and folders; choose the place with --folder"),
        (["--dataset.data-path=x"], "--dataset.data-path: the demo makes its own clips"),
    ],
)
def test_a_mistake_in_the_overrides_is_found_before_anything_is_made(tmp_path: Path, overrides: list[str], said: str):
    with pytest.raises(UserError) as caught:
        demo(tmp_path / "demo", *overrides)
    assert said in str(caught.value)
    assert list(tmp_path.iterdir()) == []
