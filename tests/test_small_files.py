"""No content of a small file of ours ends a command in anything but one sentence, or hangs it, or fills its memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.checkpoint.folder import read_state, verify
from longtake.checkpoint.runs import list_checkpoints
from longtake.checkpoint.save import save_checkpoint
from longtake.contracts import ClipFault, UserError
from longtake.data.loading.quarantine import append_quarantine, read_quarantine
from longtake.data.tables.convert import make_shards
from longtake.data.tables.rows import open_rows
from longtake.small_files import parse_json, read_small
from longtake.track.config import TrackingConfig
from longtake.track.trackers import TrackedRun, Trackers, read_lines
from longtake.train.curriculum import read_done
from longtake.train.health.goodput import Stopwatch

Read = Callable[[Path], object]
WRONG = (None, True, -1, 10**30, 1e308, "x", "\ud800", [], {}, [[]], {"a": []})
NO_OBJECTS = (b"", b"\xff\xfe", b"[" * 100_000, b'{"a": ' * 100_000, b"[]", b"3", b'"x"', b"null", b'{"a": Infinity}')


def of_checkpoint(folder: Path) -> tuple[Path, Read]:
    def read(file: Path) -> None:
        verify(file.parent)
        list_checkpoints(file.parents[1])
        read_state(file.parent)

    return save_checkpoint(folder, 0, 1, {"model.w": torch.ones(4)}, {"clock": 1}) / "COMPLETE", read


def of_shards(folder: Path) -> tuple[Path, Read]:
    (folder / "c.csv").write_text("path,text,num_frames,height,width,fps\na.mp4,a,9,16,16,24\n")
    file = make_shards(folder / "c.csv", folder / "c.shards").folder / "index.json"
    return file, lambda file: [*open_rows(file.parent).chunks()] if file.parent.name == "c.shards" else None


def of_goodput(folder: Path) -> tuple[Path, Read]:
    watch = Stopwatch(folder, {}, 0.0, True, True)
    watch.write()
    return folder / "goodput.json", lambda file: Stopwatch(file.parent, {}, 0.0, True, True)


def of_stages(folder: Path) -> tuple[Path, Read]:
    (folder / "stages.json").write_text(json.dumps({"one": "epoch0-global_step1"}))
    return folder / "stages.json", lambda file: read_done(file.parent)


def of_quarantine(folder: Path) -> tuple[Path, Read]:
    append_quarantine(folder / "quarantine.jsonl", [ClipFault("a.mp4", 3, 0, "no such file")])
    return folder / "quarantine.jsonl", read_quarantine


def of_metrics(folder: Path) -> tuple[Path, Read]:
    def read(file: Path) -> None:
        read_lines(file)
        Trackers(TrackedRun(file.parent, TrackingConfig(tensorboard=False), resume_step=5)).close()

    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5, "bits": "3f000000"}\n')
    return folder / "metrics.jsonl", read


def changed(data: Any) -> Iterator[Any]:
    """The data with each value in it, at any depth, replaced by a wrong one, or left out."""
    for key in list(data) if isinstance(data, dict) else ():
        yield {name: value for name, value in data.items() if name != key}
        yield from ({**data, key: wrong} for wrong in WRONG)
        yield from ({**data, key: inner} for inner in changed(data[key]))


@pytest.mark.parametrize("made", [of_checkpoint, of_shards, of_goodput, of_stages, of_quarantine, of_metrics])
def test_whatever_a_file_says_is_read_or_refused_in_one_sentence(made: Callable, tmp_path: Path) -> None:
    file, read = made(tmp_path)
    whole = file.read_bytes()
    read(file)
    contents = [*NO_OBJECTS, *(json.dumps(other).encode() for other in changed(json.loads(whole)))]
    assert len(contents) >= 20
    sentences: list[str] = []
    for content in contents:
        file.write_bytes(content + b"\n")
        try:
            read(file)
        except UserError as error:
            sentences.append(str(error))
    assert not any("\n" in sentence or len(sentence) > 1000 for sentence in sentences)
    file.write_bytes(whole)
    read(file)


def test_a_pipe_a_device_and_a_file_without_end_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "large").write_bytes(bytes(100))
    for name, why in (("pipe", "no regular file"), ("zero", "no regular file"), ("large", "too large")):
        with pytest.raises(ValueError, match=why):
            read_small(tmp_path / name, most_bytes=99)
    for text in ("NaN", "[-Infinity]", "[" * 100_000):
        with pytest.raises(ValueError):
            parse_json(text)
