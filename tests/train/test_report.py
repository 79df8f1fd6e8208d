"""The report of a run, from what lies in its folder."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from longtake.contracts import ClipFault, UserError
from longtake.data.clips.video import write_image, write_video
from longtake.data.loading.quarantine import append_quarantine
from longtake.train.report import RunRecord, _curves, read_record, sample_films, write_report
from tests.pages import Page

CONFIG = """
dataset = dict(data_path="clips.csv")
bucket_config = {"32px": {1: (1.0, 4), 8: (1.0, 3)}}
max_steps = 60
model = dict(in_channels=6144, context_in_dim=128, vec_in_dim=128)
lr = 0.003
"""
BUCKETS = {
    "format_version": 1,
    **{"pass": 2, "clips": 40, "used": 30, "samples": 60, "micro_batches": 16, "fillers": 1, "steps": 4},
    **{"frames_cut": 0.25, "area_cut": 0.1},
    "buckets": {
        "32px/8f/1:1": {
            **{"shape": [8, 32, 32], "batch_size": 4, "clips": 30, "samples": 60, "micro_batches": 15, "fillers": 0},
            **{"frames_cut": 0.25, "area_cut": 0.1},
        }
    },
    "unused": {"too_short": {"clips": 10, "reason": "too <short>", "example_rows": [1, 2]}},
}
SECONDS = {"steps": 60.0, "start": 20.0, "again": 10.0, "save": 5.0, "wait": 5.0, "skipped": 0.0, "goodput": 0.6}


def record(folder: Path, **changes: object) -> RunRecord:
    """That of a run of 60 steps whose last is left out, with one lost clip; `changes`: other contents of files."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {"step": step, "loss": 2 / step, "grad_norm": 0.1, "lr": 0.003, "samples": 4, "seconds": 1.0}
        | {"buckets": {"32px/8f/1:1" if step % 2 else "32px/1f/1:1": 2 / step}}
        for step in range(1, 61)
    ]
    lines[0] |= {"buckets": {"32px/8f/1:1": 2.0, "32px/1f/1:1": 2.0}, "drawn": {"32px/8f/1:1": 1, "32px/1f/1:1": 3}}
    lines[1] |= {"buckets": {"32px/8f/1:1": 1.0, "32px/1f/1:1": 1.0}, "pass": 1}
    lines[-1] |= {"loss": "NaN", "skipped": True}
    files = {"config.py": CONFIG, "bucket_report.json": json.dumps(BUCKETS), "goodput.json": json.dumps(SECONDS)}
    files["metrics.jsonl"] = "".join(json.dumps(line) + "\n" for line in lines)
    for name, content in (files | changes).items():
        if content is not None:
            (folder / name).write_text(str(content), encoding="utf-8")
    if not changes:
        append_quarantine(folder / "quarantine.jsonl", [ClipFault("a <bad> clip.mp4", 7, 0, "the file is empty")])
    return read_record(folder)


def page(of: RunRecord, samples: Path | None = None) -> Page:
    write_report(of.folder / "report.html", of, samples)
    return Page((of.folder / "report.html").read_text(encoding="utf-8"))


def test_a_report_tells_what_was_trained_on_and_what_was_lost(tmp_path: Path) -> None:
    found = page(record(tmp_path / "run"))
    texts = found.texts
    figures = {texts[at + 1]: texts[at] for at in range(2, 14, 2)}
    assert figures == {
        "steps, of 60": "60",
        "samples trained on": "236",  # the last step is left out
        "loss, mean of the last 25 steps": f"{np.mean([2 / step for step in range(36, 60)]):.5f}".rstrip("0"),
        "trained for": "1 min 40 s",
        "of the time was spent training": "60 %",
        "samples that could not be loaded": "1",
    }
    data = found.section("Data")
    assert data[0] == (
        "Samples trained on: 236; samples that could not be loaded: 1; steps left out for a loss or gradient that was "
        "not finite or too large: 1."
    )
    assert "10 unused: too <short> (rows 1, 2, ...)" in data
    assert {"a <bad> clip.mp4", "the file is empty"} <= set(data)
    assert found.bars[3] == [("30 used", 75.0), ("10 unused: too <short> (rows 1, 2, ...)", 25.0)]
    assert "232 in pass 0, 4 in pass 1" in data, "not those of the last launch alone"
    at = data.index("steps with it") + 1
    assert data[at : at + 9] == [
        *("32px/8f/1:1", "117", "30"),
        *("32px/1f/1:1", "115", "29"),
        *("several in one step", "4", "1"),
    ]


def test_the_parts_of_the_time_add_up(tmp_path: Path) -> None:
    found = page(record(tmp_path / "run"))
    (parts,) = [bar for bar in found.bars if bar and bar[0][0].startswith("steps that count")]
    shares = [60, 20, 10, 5, 5]
    names = ["steps that count 60 s", "starting 20 s", "steps made again 10 s", "saving 5 s", "waiting for data 5 s"]
    assert parts == list(zip(names, map(float, shares), strict=True))
    assert [text for text in found.section("Time") if text in names] == names


def test_settings_are_those_that_differ_and_then_all(tmp_path: Path) -> None:
    settings = page(record(tmp_path / "run")).section("Settings")
    table = settings[: settings.index("all of config.py")]
    keys = [key for key in ("dataset.data_path", "bucket_config", "lr", "max_steps", "eps") if key in table]
    assert keys == ["dataset.data_path", "bucket_config", "lr", "max_steps"]
    assert table[table.index("lr") + 1] == "0.003"
    assert CONFIG.strip() in settings


def test_samples_play_beside_their_prompts(tmp_path: Path) -> None:
    of, folder = record(tmp_path / "run"), tmp_path / "samples" / "video_32px"
    frames = np.random.default_rng(0).integers(0, 256, (16, 32, 48, 3), np.uint8)
    write_video(folder / "prompt_0000.mp4", frames, 8)
    (folder / "prompt_0000.txt").write_text("<a sea>\n")
    write_image(folder / "prompt_0001.png", frames[0])
    write_image(folder / "grid.png", frames[0])
    (folder / "prompt_0002.mp4").write_bytes(b"")
    found = page(of, tmp_path / "samples")
    assert [(alt, picture.size) for alt, picture in found.pictures] == [
        ("<a sea>", (16 * 48, 32)),
        ("prompt_0001.png", (48, 32)),
    ]
    assert "cannot be read: the file is empty" in found.section("Samples")
    with pytest.raises(UserError, match="none: no such folder"):
        page(of, tmp_path / "none")


def test_a_run_before_its_first_step_has_a_report(tmp_path: Path) -> None:
    of = record(tmp_path / "run", **{"metrics.jsonl": None, "bucket_report.json": None, "goodput.json": None})
    found = page(of)
    assert found.texts.count("Too few steps for a curve.") == 4
    assert of.step == of.samples == of.total_seconds == 0


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("bucket_report.json", "[1]"),
        ("bucket_report.json", '{"buckets": {"a": 1}, "unused": {}}'),
        ("bucket_report.json", json.dumps(BUCKETS | {"clips": "many"})),
        ("quarantine.jsonl", "half a\nline\n"),
    ],
)
def test_a_damaged_file_is_named_in_a_sentence(tmp_path: Path, name: str, content: str) -> None:
    with pytest.raises(UserError, match=rf"^\S*{name}"):
        record(tmp_path / "run", **{name: content})


def test_odd_values_in_metrics_are_left_out(tmp_path: Path) -> None:
    values = [{}, {"loss": [1]}, {"loss": "x", "samples": "many", "buckets": 3}, {"loss": 1.0}, {"loss": 2.0}]
    lines = [json.dumps({"step": step} | value) for step, value in enumerate(values)]
    of = record(tmp_path / "run", **{"metrics.jsonl": "\n".join(lines)})
    assert "by step, logarithmic, and the mean of the last 25; 2 without a finite value left out" in page(of).texts
    assert (of.step, of.samples) == (4, 0)
    assert not math.isnan(of.total_seconds)


def test_report_learning_rate_is_drawn_as_it_was_and_the_loss_by_its_mean() -> None:
    lines = [{"step": step, "loss": 1.0 + step % 2, "lr": 1e-4 * (step > 50)} for step in range(100)]
    drawn = _curves(SimpleNamespace(lines=lines, validations=[]))
    loss, rate = (re.search(rf"<h3>{name}.*?</h3>", drawn, re.DOTALL) for name in ("loss", "learning rate"))
    assert loss is not None
    assert rate is not None
    assert "mean of the last" in loss[0]
    assert "mean of the last" not in rate[0]


def test_report_videos_of_a_validation_have_their_step(tmp_path: Path) -> None:
    for folder in ("step000500", "step000000", "samples"):
        (tmp_path / folder).mkdir()
        write_image(tmp_path / folder / "a.png", np.zeros((8, 8, 3), np.uint8))
    captions = [re.findall(r"<span>(.*?)</span>", film) for film in sample_films(tmp_path)]
    assert captions == [["a.png"], ["a.png", "step 0"], ["a.png", "step 500"]]
