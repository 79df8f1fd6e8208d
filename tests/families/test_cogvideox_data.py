"""Runs of CogVideoX on the data modes of CogVideoX-Fun: resumed, in two worlds, from a store, changed in the middle."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from longtake.parallel.world import World
from longtake.train.run import train
from longtake.train.run_file import read_run
from tests.cli.conftest import longtake
from tests.families.test_cogvideox import SIZES
from tests.ranks import Facts, on_ranks
from tests.train.conftest import clips  # a fixture
from tests.train.runs import exact, metrics, train_here, write_config

__all__ = ["clips", "longtake"]

MODES = {
    "video_sample_size": 24,
    "image_sample_size": 36,
    "token_sample_size": 32,
    "video_sample_n_frames": 9,
    "video_sample_stride": 1,
    "random_hw_adapt": True,
    "training_with_video_token_length": True,
    "random_frame_crop": True,
    "random_ratio_crop": True,
    "keep_all_node_same_token_length": True,
    "batch_size": 2,
}


@pytest.fixture(scope="module")
def run(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which every mode that draws is on, over a list as CogVideoX-Fun reads it."""
    folder = tmp_path_factory.mktemp("modes")
    table = pq.read_table(clips).select(["path", "text"])
    rows = [{"file_path": row["path"], "text": row["text"]} for row in table.to_pylist()]
    (folder / "meta.json").write_text(json.dumps(rows))
    path = write_config(folder, folder / "meta.json")
    text = path.read_text().replace("model = dict(", "_unused = dict(").replace("objective = dict(", "_too = dict(")
    text = text.replace("bucket_config = {", "_buckets = {").replace("ae = dict(", "_ae = dict(")
    text = text.replace("dataset = dict(", f"dataset = dict(root={str(clips.parent)!r}, video_repeat=2, ")
    own: dict[str, Any] = {
        "model": {**SIZES, "out_channels": 192, "sample_frames": 9},
        "ae": {"type": "pixel", "temporal": 1, "spatial": 8},
        "dropout_ratio": {"t5": 0.2},
        "sizes": MODES,
    }
    path.write_text(text + "".join(f"{key} = {value!r}\n" for key, value in own.items()))
    return path


@pytest.fixture(scope="module")
def whole(run: Path) -> Path:
    return train_here(run, "--exp_name", "whole", "--max_steps", "4")[0].folder


def test_a_run_with_every_random_mode_resumes_as_if_it_had_not_stopped(run: Path, whole: Path) -> None:
    cut, _ = train_here(run, "--exp_name", "cut", "--max_steps", "2")
    train_here(cut.folder, "--max_steps", "4")
    assert exact(cut.folder) == exact(whole)
    report = json.loads((whole / "bucket_report.json").read_text())
    assert {shape["shape"][0] for shape in report["buckets"].values()} >= {1, 5, 9}
    assert len({name.split("/")[0] for name in report["buckets"]}) == 2
    assert report["unused"] == {}


def losses_of(run: str, words: tuple[str, ...], world: World) -> Facts:
    config = read_run(run, words).value
    train(config, world, run, Console(file=io.StringIO()))
    return {"lines": metrics(Path(config.outputs) / config.exp_name)}


def test_another_world_goes_on_with_the_same_samples(run: Path, whole: Path, tmp_path: Path) -> None:
    cut, _ = train_here(run, "--exp_name", "one", "--max_steps", "2")
    words = ("--max_steps", "4")
    first, second = on_ranks(2, tmp_path, {"two": partial(losses_of, str(cut.folder), words)})
    assert first == second
    lines = first["two"]["lines"]
    assert [line["digest"] for line in lines] == [line["digest"] for line in metrics(whole)]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in metrics(whole)], rel=1e-4)


@pytest.mark.parametrize("words", [(), ("--sizes.crop", "none", "--sizes.random-ratio-crop", "False")])
def test_a_run_from_a_store_is_the_run_that_encodes(
    longtake: Any, run: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    words = (*words, "--dataset.views", "2")
    code, _, err = longtake("data", "encode", run, *words, "-o", tmp_path / "store")
    assert code == 0, err
    words = (*words, "--max_steps", "2", "--outputs", str(tmp_path))
    online, _ = train_here(run, "--exp_name", "online", *words)
    stored, _ = train_here(run, "--exp_name", "stored", *words, "--dataset.latents", str(tmp_path / "store"))
    assert exact(stored.folder) == exact(online.folder)


def test_modes_change_in_the_middle_of_a_pass_and_give_way_to_a_table(run: Path) -> None:
    cut, _ = train_here(run, "--exp_name", "changed", "--max_steps", "2")
    train_here(cut.folder, "--max_steps", "3", "--sizes.random_frame_crop", "False")
    _, said = train_here(
        cut.folder, "--max_steps", "4", "--sizes", "None", "--bucket_config", "{'24px': {1: (1.0, 2), 5: (1.0, 2)}}"
    )
    assert "passed earlier in this pass, under other settings" in said
    assert len(metrics(cut.folder)) == 4


def test_it_is_previewed_generated_from_and_made_tiny(
    longtake: Any, clips: Path, run: Path, whole: Path, tmp_path: Path
) -> None:
    code, out, err = longtake("data", "stats", run.parent / "meta.json", "--root", clips.parent, "--run", run)
    assert code == 0, err
    assert "24px/9f/1.00" in out
    words = ("--prompt", "a red circle", "--num-steps", 1, "--save-dir", tmp_path)
    code, out, err = longtake("generate", whole, *words)
    assert code == 0, err
    assert "24px, 9 frames, as in the run's sizes" in " ".join((out + err).split())
    train_here(run, "--exp_name", "tiny", "--max_steps", "1", "--tiny")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("bucket_config = {'24px': {1: (1.0, 1)}}", "sizes says the buckets already; leave one of the two out"),
        ("sizes = None", "at least one resolution is expected"),
        ("sizes = dict(random_hw_adapt=True, enable_bucket=False)", "acts with enable_bucket = True only"),
        ("dataset = dict(data_path='t', balance=False)", "acts through dataset.balance"),
        ("model = dict(type='flux')", "this model has no bucket law of its own; give a bucket_config in its place"),
        ("model = dict(type='flux')\nsizes = dict(type='cogvideox_fun')", "is a bucket law of other models than this"),
    ],
)
def test_what_cannot_be_is_answered_with_a_sentence(run: Path, tmp_path: Path, changes: str, said: str) -> None:
    path = tmp_path / "run.py"
    path.write_text(f"{run.read_text()}{changes}\n")
    with pytest.raises(ValueError, match=said):
        _ = read_run(str(path), ()).value.bucket_rule
