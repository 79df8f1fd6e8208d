"""TTT-Video from a config file: trained, resumed, in stages, sampled from storyboards, planned, encoded, exported."""

from __future__ import annotations

import io
import json
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from longtake.config.faults import ConfigError
from longtake.data.clips.video import read_frames
from longtake.families.registry import published_sections
from longtake.models.ttt_video_config import TTTVideoConfig
from longtake.presets import run_file
from longtake.system.pretrained import open_pretrained
from longtake.train.curriculum import train_all
from longtake.train.run_file import read_run
from tests.cli.conftest import longtake
from tests.families.runs import SEGMENT, write_scenes
from tests.train.runs import exact, metrics, train_here

__all__ = ["longtake"]

RUN = """
seed = 7
dtype = "fp32"
device = "cpu"
dataset = dict(data_path={table!r}, views=1)
bucket_config = {{"32px_ar1:1": {{9: (1.0, 2), 17: (1.0, 2)}}}}
ae = dict(type="pixel", temporal=1, spatial=8)
t5 = dict(type="words", dim=16, max_length=5)
model = dict(
    type="ttt_video",
    num_layers=1,
    num_attention_heads=2,
    attention_head_dim=16,
    out_channels=192,
    text_embed_dim=16,
    time_embed_dim=16,
    segment_frames=8,
    mini_batch_size=4,
)
objective = dict(uniform_sampling=True)
dropout_ratio = dict(t5=0.2)
outputs = {outputs!r}
lr = 3e-3
eps = 1e-8
max_steps = 4
slots_per_step = 2
num_workers = 0
tensorboard = False
fps_save = 16
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ttt_video")
    path = folder / "run.py"
    path.write_text(RUN.format(table=str(write_scenes(folder / "clips", 9, 17)), outputs=str(folder / "outputs")))
    return path


@pytest.fixture(scope="module")
def whole(run: Path) -> Path:
    return train_here(run, "--exp_name", "whole")[0].folder


def test_it_trains_and_resumes_as_if_it_had_not_stopped(run: Path, whole: Path) -> None:
    cut, said = train_here(run, "--exp_name", "cut", "--max_steps", "2")
    _, again = train_here(cut.folder, "--max_steps", "4")
    from_scratch = "weights: none given, the model starts from scratch by seed 7; model.from_pretrained takes some"
    assert (said.count(from_scratch), again.count(from_scratch)) == (1, 0)
    assert exact(cut.folder) == exact(whole)
    assert all(line["loss"] > 0 for line in metrics(whole))


STAGES = """
_base_ = "run.py"
exp_name = {name!r}
stages = [
    dict(
        name="one",
        dataset=dict(data_path={one!r}),
        bucket_config={{"32px_ar1:1": {{"_delete_": True, 9: (1.0, 2)}}}},
    ),
    dict(
        name="two",
        dataset=dict(data_path={two!r}),
        bucket_config={{"32px_ar1:1": {{"_delete_": True, 17: (1.0, 2)}}}},
        train_only=("transformer_blocks.*.attn1", "transformer_blocks.*.ttt"),
    ),
]
max_steps = 2
"""


@pytest.mark.slow
def test_a_curriculum_of_lengths_stops_and_goes_on_as_if_it_had_not(run: Path, tmp_path: Path) -> None:
    tables = {"one": str(write_scenes(tmp_path / "one", 9)), "two": str(write_scenes(tmp_path / "two", 17))}
    folders = {}
    for name in ("straight", "cut"):
        path = run.with_name(f"{name}.py")
        path.write_text(STAGES.format(name=name, **tables))
        for words in ([],) if name == "straight" else (["--stage", "one"], ["--stage", "two", "--max_steps", "1"], []):
            quiet = Console(file=io.StringIO())
            assert train_all(str(path), words, quiet) == 0
            if "two" in words:  # as if it had been stopped there
                (run.parent / "outputs" / name / "stages.json").write_text(json.dumps(done(run, name, "one")))
        folders[name] = run.parent / "outputs" / name
    for stage in tables:
        assert exact(folders["cut"] / stage) == exact(folders["straight"] / stage)
        assert len(metrics(folders["cut"] / stage)) == 2


def done(run: Path, name: str, *stages: str) -> dict[str, str]:
    noted = json.loads((run.parent / "outputs" / name / "stages.json").read_text())
    return {stage: noted[stage] for stage in stages}


def test_a_clip_of_another_number_of_texts_is_left_out_with_the_reason(run: Path, tmp_path: Path) -> None:
    clips = write_scenes(tmp_path / "clips", 9, 17)
    table = pq.read_table(clips)
    texts = ['["too", "many"]', *table["text"].to_pylist()[1:]]
    pq.write_table(table.set_column(table.column_names.index("text"), "text", [texts]), clips)
    words = ("--dataset.data_path", str(clips), "--outputs", str(tmp_path), "--epochs", "1")
    _, said = train_here(run, "--exp_name", "wrong", *words)
    assert "left out 0.mp4: captions found: 2, needed: 1, for a sample of 9 frames" in said


def test_a_run_from_a_store_is_the_run_that_encodes(longtake: Any, run: Path, tmp_path: Path) -> None:
    code, _, err = longtake("data", "encode", run, "-o", tmp_path / "store")
    assert code == 0, err
    words = ("--max_steps", "2", "--outputs", str(tmp_path))
    online, _ = train_here(run, "--exp_name", "online", *words)
    stored, _ = train_here(run, "--exp_name", "stored", *words, "--dataset.latents", str(tmp_path / "store"))
    assert exact(stored.folder) == exact(online.folder)


STORY = [
    [{"text": "a red boat"}, {"text": "it rains", "requires_scene_transition": True, "neg_text": "blurry"}],
    [{"text": "a cat"}, {"text": "it waits"}],
]


def test_it_generates_storyboards_from_a_run_and_from_an_export(longtake: Any, whole: Path, tmp_path: Path) -> None:
    (tmp_path / "story.json").write_text(json.dumps(STORY))
    assert longtake("checkpoint", "export", whole, tmp_path / "w.safetensors")[0] == 0
    made = []
    for name, source in (("of_run", whole), ("of_file", tmp_path / "w.safetensors")):
        words = ("--prompts", tmp_path / "story.json", "--num-steps", 2, "--save-dir", tmp_path / name)
        words += ("--resolution", "32px", "--aspect-ratio", "1:1", "--num-frames", 17)
        code, _, err = longtake("generate", source, *words)
        assert code == 0, err
        made.append([path.read_bytes() for path in sorted((tmp_path / name).rglob("*.mp4"))])
    assert len(made[0]) == 2
    assert made[0] == made[1]
    (first, *_) = sorted((tmp_path / "of_run").rglob("*.txt"))
    assert json.loads(first.read_text()) == ["a red boat<end_scene>", "<start_scene>it rains"]
    code, _, err = longtake("generate", whole, *words[:6], *words[6:-1], 9)
    assert code != 0
    assert "captions found: 2, needed: 1, for a sample in row 1" in " ".join(err.split())


def test_a_video_of_one_segment_is_made_of_one_prompt(longtake: Any, whole: Path, tmp_path: Path) -> None:
    words = ("--prompt", "a red boat", "--num-steps", 2, "--save-dir", tmp_path, "--num-frames", 9)
    code, _, err = longtake("generate", whole, *words)
    assert code == 0, err
    (video,) = tmp_path.rglob("*.mp4")
    assert len(read_frames(video)) == 9


def test_quirks_say_keys_that_a_run_leaves_out(run: Path) -> None:
    keys = ("model.rates", "model.rotations", "model.inner_eps", "sampling_option.guidance_rule")

    def of(*words: str) -> list[Any]:
        return [attrgetter(key)(read_run(str(run), list(words)).value) for key in keys]

    assert of() == ["aligned", "float32", 1e-8, "dynamic_by_step"]
    assert of("--compat", "ttt_video") == ["last_row", "bfloat16", 1e-6, "dynamic"]
    assert of("--compat", "last_row_rates") == ["last_row", "float32", 1e-8, "dynamic_by_step"]
    assert of("--compat", "per_query_rates") == ["per_query", "float32", 1e-8, "dynamic_by_step"]
    assert of("--compat", "ttt_video", "--model.rates", "aligned") == ["aligned", "bfloat16", 1e-6, "dynamic"]
    with pytest.raises(ConfigError, match=r"is no quirk of this model's family"):
        of("--compat", "opensora_v2")


@pytest.mark.parametrize("kind", [pytest.param("mlp", marks=pytest.mark.slow), "linear"])
def test_a_preset_trains_and_is_planned_at_tiny(longtake: Any, kind: str, tmp_path: Path) -> None:
    clips = write_scenes(tmp_path / "clips", 17, side=64)
    words = ("--dataset.data-path", str(clips), "--outputs", str(tmp_path), "--max-steps", "1", "--slots-per-step", "1")
    outcome, _ = train_here(run_file(f"ttt_video/ttt_{kind}/9s"), "--tiny", *words, "--parallel.replicate", "1")
    (line,) = metrics(outcome.folder)
    assert np.isfinite(line["loss"])
    assert set(line["rates"]) >= {"ttt_no_wd", "ttt_wd", "other_no_wd", "other_wd"}
    words = ("--tiny", "--gpus", 1, "--gpu", "h100", "--dataset.data-path", clips)
    code, out, err = longtake("plan", f"ttt_video/ttt_{kind}/9s", *words)
    assert code == 0, err
    assert "64px/17f" in out


def test_weights_go_to_a_folder_of_the_published_program_and_back(longtake: Any, whole: Path, tmp_path: Path) -> None:
    assert longtake("checkpoint", "export", whole, tmp_path / "theirs", "--as", "published")[0] == 0
    sections = published_sections({"model": {"type": "ttt_video", "from_pretrained": str(tmp_path / "theirs")}})
    assert sections is not None
    assert (sections[1]["ae"]["type"], sections[1]["model"]["segment_frames"]) == ("pixel", SEGMENT)
    model = TTTVideoConfig(**{**sections[1]["model"], "from_pretrained": str(whole)})
    with open_pretrained(model) as (run, _):
        own = dict(run)
    with open_pretrained(model.model_copy(update={"from_pretrained": str(tmp_path / "theirs")})) as (theirs, _):
        assert own.keys() == theirs.keys()
        assert all(torch.equal(theirs[name], value) for name, value in own.items())
