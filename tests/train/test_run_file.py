"""Stages of a curriculum: in turn, each from the weights of the one before, and going on where it stopped."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from longtake.checkpoint.contents import inspect
from longtake.checkpoint.folder import read_state
from longtake.checkpoint.runs import list_checkpoints
from longtake.checkpoint.state import RunState
from longtake.config.load import load_config
from longtake.contracts import UserError
from longtake.system.export import export_adapters, export_model
from longtake.train.config import RunConfig
from longtake.train.curriculum import EXIT_OTHER_WORLD, note_done, read_done, train_all
from longtake.train.run import train
from longtake.train.run_file import CommandLine, read_curriculum, read_run
from tests.train.runs import finish, kill, metrics, on_one_thread, start, train_here, wait_until, write_config

STAGES = """
_base_ = "tiny.py"
exp_name = "lessons"
stages = [
    dict(name="still", bucket_config={"32px": {"_delete_": True, 1: (1.0, 4)}}, max_steps=2),
    dict(name="video", lr=1e-3, max_steps=3),
    dict(name="more", run="other.py", max_steps=1),
]
"""


def weights(folder: Path) -> list[bytes]:
    """All tensors of a checkpoint, as the bytes of their files."""
    return sorted(file.read_bytes() for file in folder.rglob("*.safetensors"))


@pytest.fixture
def lessons(tmp_path: Path, clips: Path) -> Path:
    """The file of three stages; their folders will be in `tmp_path / "outputs" / "lessons"`."""
    write_config(tmp_path, clips)
    (tmp_path / "other.py").write_text('_base_ = "tiny.py"\nkeep_n_latest = 5\n', encoding="utf-8")
    (tmp_path / "lessons.py").write_text(STAGES, encoding="utf-8")
    return tmp_path / "lessons.py"


def run(path: Path, *words: str) -> tuple[int, str]:
    return on_one_thread(train_all, path, *words)


def checkpoint(path: Path, stage: str) -> Path:
    return list_checkpoints(path.parent / "outputs" / "lessons" / stage)[-1].path


def test_stages_run_in_turn_each_from_the_weights_of_the_one_before_and_only_once(lessons: Path):
    code, said = run(lessons)
    assert code == 0
    steps = {name: read_state(checkpoint(lessons, name))["clock"]["global_step"] for name in ("still", "video", "more")}
    assert steps == {"still": 2, "video": 3, "more": 1}
    for before, after in (("still", "video"), ("video", "more")):
        assert f"from {checkpoint(lessons, before)}" in said
        own = read_run(str(checkpoint(lessons, after).parent)).value
        assert own.model.from_pretrained == str(checkpoint(lessons, before))
    assert [read_run(str(checkpoint(lessons, name).parent)).value.stage_number for name in steps] == [0, 1, 2]
    code, said = run(lessons)
    assert code == 0
    assert said.count(": done, ") == 3
    assert "run folder" not in said


def test_a_curriculum_goes_on_within_the_stage_where_it_stopped(lessons: Path, monkeypatch: pytest.MonkeyPatch):
    whole, _ = run(lessons)
    folder = lessons.parent / "outputs"
    folder.rename(lessons.parent / "kept")

    def cut_off(config, *rest, **named):  # the second stage ends a step early, as by a signal
        if config.exp_name != "video":
            return train(config, *rest, **named)
        outcome = train(config.model_copy(update={"max_steps": 2}), *rest, **named)
        return type(outcome)(outcome.folder, outcome.checkpoint, outcome.clock, stopped=True)

    monkeypatch.setattr("longtake.train.curriculum.train", cut_off)
    assert run(lessons)[0] == 130
    monkeypatch.undo()
    code, said = run(lessons)
    assert (whole, code) == (0, 0)
    assert "stage still: done" in said
    assert f"starts from {folder / 'lessons' / 'video' / 'epoch0-global_step2'}, step 2" in said
    kept = lessons.parent / "kept" / "lessons" / "more" / "epoch0-global_step1"
    assert weights(checkpoint(lessons, "more")) == weights(kept)


def test_a_stage_that_was_killed_before_its_first_checkpoint_begins_anew_in_its_folder(
    lessons: Path, monkeypatch: pytest.MonkeyPatch
):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("longtake.train.run.Trainer.run", killed)
    with pytest.raises(KeyboardInterrupt):
        run(lessons)
    monkeypatch.undo()
    folder = lessons.parent / "outputs" / "lessons"
    assert not list_checkpoints(folder / "still")
    assert run(lessons, "--stage", "still")[0] == 0
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["still"]
    assert [line["step"] for line in metrics(folder / "still")] == [1, 2]


LORA_STAGES = """
_base_ = "tiny.py"
exp_name = "lessons"
lora = dict(rank=2, alpha=4)
ckpt_every = 1
stages = [
    dict(name="begin", max_steps=2),
    dict(name="same", max_steps=2),
    dict(name="other", lora=dict(rank=3, dora=True), max_steps=2),
    dict(name="full", lora=None, max_steps=3),
]
"""


@pytest.fixture
def adapting(lessons: Path) -> Path:
    """The file of four stages, three of which train adapters."""
    lessons.write_text(LORA_STAGES, encoding="utf-8")
    return lessons


def test_adapters_go_on_in_a_stage_of_the_same_and_are_merged_for_any_other(adapting: Path):
    code, said = run(adapting)
    assert code == 0
    begin, same, other = (checkpoint(adapting, name) for name in ("begin", "same", "other"))
    assert f"weights: those under the adapters of {begin}, whose averaged adapters go on training" in said
    assert f"weights: with the averaged adapters merged into them, from {same}" in said
    assert f"weights: with the averaged adapters merged into them, from {other}" in said
    digests = [read_state(folder)["frozen"]["digest"] for folder in (begin, same, other)]
    assert digests[0] == digests[1] != digests[2]
    assert RunState.read(checkpoint(adapting, "full")).frozen is None, "all weights train"


@pytest.mark.slow
def test_stages_with_adapters_go_on_after_a_kill_as_if_there_had_been_none(adapting: Path):
    assert run(adapting, "--cpu-threads", "1")[0] == 0
    whole = {name: weights(checkpoint(adapting, name)) for name in ("same", "other", "full")}
    outputs = adapting.parent / "outputs"
    for killed, step in (("same", 1), ("full", 2)):
        outputs.rename(adapting.parent / f"before {killed}")
        process = start("train", adapting, "--cpu-threads", "1")
        wanted = outputs / "lessons" / killed / f"epoch0-global_step{step}" / "COMPLETE"
        wait_until(process, wanted.exists)
        kill(process)
        code, said = run(adapting, "--cpu-threads", "1")
        assert code == 0
        assert "stage begin: done" in said
        assert {name: weights(checkpoint(adapting, name)) for name in whole} == whole


@pytest.mark.slow
def test_two_processes_go_on_from_the_adapters_of_one(adapting: Path):
    run(adapting, "--stage", "begin", "--slots-per-step", "4")
    code, out, err = finish(start("train", adapting, "--slots-per-step", "4", processes=2))
    assert code == 0, err
    assert "stage begin: done" in out
    assert out.count("averaged adapters merged into them, from") == 2
    two = [line["loss"] for line in metrics(adapting.parent / "outputs" / "lessons" / "full")]
    assert run(adapting, "--exp-name", "alone", "--slots-per-step", "4")[0] == 0
    alone = [line["loss"] for line in metrics(adapting.parent / "outputs" / "alone" / "full")]
    assert two == pytest.approx(alone, rel=1e-4)


def test_a_file_of_adapters_is_where_the_first_stage_starts_and_no_other(adapting: Path, tmp_path: Path):
    run(adapting, "--stage", "begin")
    file = export_adapters(str(checkpoint(adapting, "begin")), tmp_path / "a.safetensors", "comfy")
    base = export_model(str(trained_whole(tmp_path)), tmp_path / "base.safetensors")
    text = LORA_STAGES.replace("alpha=4", f"alpha=4, from_pretrained={str(file)!r}").replace('"lessons"', '"again"')
    adapting.write_text(text, encoding="utf-8")
    for stage in ("begin", "same"):
        assert run(adapting, "--stage", stage, *(["--model.from-pretrained", str(base)] * (stage == "begin")))[0] == 0
    folder = adapting.parent / "outputs" / "again" / "same"
    assert read_run(str(folder)).value.lora.from_pretrained is None
    sizes = {row.name: row.shape for row in inspect(list_checkpoints(folder)[-1].path).rows if row.part == "model"}
    assert sizes["model.single_blocks.0.linear1.lora_a"][0] == 2


def trained_whole(folder: Path) -> Path:
    """The folder of a run of one step that trained all weights."""
    return train_here(folder / "tiny.py", "--exp-name", "whole", "--max-steps", "1")[0].folder


def test_one_stage_can_be_run_by_name(lessons: Path):
    assert run(lessons, "--stage", "still")[0] == 0
    folder = lessons.parent / "outputs" / "lessons"
    assert sorted(json.loads((folder / "stages.json").read_text(encoding="utf-8"))) == ["still"]
    with pytest.raises(UserError, match=r"--stage more: starts from stage video, which is not done in .*lessons"):
        run(lessons, "--stage", "more")


def test_weights_of_the_command_line_are_for_the_first_stage(lessons: Path):
    run(lessons, "--stage", "still")
    first = str(checkpoint(lessons, "still"))
    code, said = run(lessons, "--exp-name", "again", "--model.from-pretrained", first)
    assert code == 0
    assert said.count(f"from {first}") == 1


def test_a_stage_that_does_not_fit_the_processes_ends_with_its_launch_line(lessons: Path):
    text = lessons.read_text(encoding="utf-8")
    lessons.write_text(text.replace("lr=1e-3", "parallel=dict(sequence=2)"), encoding="utf-8")
    code, said = run(lessons, "--lr", "2e-3")
    assert code == EXIT_OTHER_WORLD
    assert "stage video: parallel.sequence = 2: 1 process does not divide by 2; write 1, or start 2 processes" in said
    assert f"to go on: torchrun --nproc_per_node 2 -m longtake train {lessons} --lr 2e-3" in said
    assert read_state(checkpoint(lessons, "still"))["clock"]["global_step"] == 2


@pytest.mark.slow
def test_two_processes_run_the_stages_that_one_process_left(lessons: Path):
    text = lessons.read_text(encoding="utf-8")
    lessons.write_text(text.replace("lr=1e-3", "parallel=dict(sequence=2)"), encoding="utf-8")
    run(lessons)
    code, out, err = finish(start("train", lessons, processes=2))
    assert code == 0, err
    assert "stage still: done" in out
    assert out.count("done at step") == 2


def test_each_stage_has_a_store_of_its_own_where_latents_are_auto(tmp_path: Path, clips: Path) -> None:
    table = shutil.copy(clips, tmp_path / "clips.parquet")
    write_config(tmp_path, clips, dataset={"data_path": str(table), "root": str(clips.parent), "views": 1})
    stages = '[dict(name="one", max_steps=1), dict(name="two", max_steps=1)]'
    (tmp_path / "lessons.py").write_text(f'_base_ = "tiny.py"\nstages = {stages}\n', encoding="utf-8")
    code, said = run(tmp_path / "lessons.py", "--dataset.latents", "auto")
    assert code == 0
    assert said.count("no encoder is loaded") == 2
    assert {path.name for path in tmp_path.glob("*.latents")} == {"clips.latents", "clips.stage1.latents"}


def test_stages_can_be_planned_and_shown(lessons: Path):
    config = read_run(str(lessons), ["--stage", "video", "--lr", "5e-4"]).value
    assert (config.max_steps, config.lr) == (3, 5e-4)
    assert config.stage_number == 1  # decides the draws of a plan's buckets and of a latent store, as in training
    assert read_run(str(lessons), ["--stage=more"]).value.keep_n_latest == 5
    with pytest.raises(UserError, match="has stages; write --stage and one of still, video, more"):
        read_run(str(lessons))
    with pytest.raises(UserError, match=r"--stage dance: is no stage of .*; write --stage and one of still"):
        read_run(str(lessons), ["--stage", "dance"])
    with pytest.raises(UserError, match=r"tiny.py has no stages"):
        read_run(str(lessons.parent / "tiny.py"), ["--stage", "still"])


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("[]", r"stages = \[\]: a list is expected"),
        ("[3]", r"stages\[0\] = 3: a dict is expected"),
        ("[dict(max_steps=1)]", r"stages\[0\].name = None: must be a plain folder name"),
        ('[dict(name="a/b")]', r"stages\[0\].name = 'a/b'"),
        ('[dict(name="a"), dict(name="a")]', "two stages are called a"),
        ('[dict(name="a", run="gone.py")]', r"stages\[0\].run = 'gone.py': no such file"),
        ('[dict(name="a", max_step=1)]', "max_step = 1 .*stage a.*did you mean max_steps"),
        ('[dict(name="a", load="latest")]', "load = 'latest': each stage starts from the one before"),
    ],
)
def test_stages_written_wrongly_are_told_in_one_sentence(lessons: Path, written: str, sentence: str):
    lessons.write_text(f'_base_ = "tiny.py"\nstages = {written}\n', encoding="utf-8")
    with pytest.raises(UserError, match=sentence):
        run(lessons)
    assert not (lessons.parent / "outputs").exists()


@pytest.mark.parametrize(
    "lines",
    [
        'stages = [dict(name="a", run="other.py", bucket_config={"32px": _one})]',
        'stages = [dict(name="a", run="other.py", bucket_config={"32px": _one}), dict(name="b", run="other.py")]',
        'bucket_config = {"32px": _one}\nstages = [dict(name="a", run="other.py")]',
    ],
)
def test_a_stage_replaces_what_is_below_it_where_its_file_says_so(lessons: Path, lines: str):
    """As under `_base_`: it trains on its own buckets alone, not on those of the run file too."""
    below = load_config(lessons.parent / "other.py", [], RunConfig).tree["bucket_config"]
    assert below["32px"].keys() > {1}
    lessons.write_text(lines.replace("_one", '{"_delete_": True, 1: (1.0, 3)}'), encoding="utf-8")
    curriculum = read_curriculum(str(lessons))
    resolved = curriculum.resolve(curriculum.stage("a"), CommandLine.read([]), RunConfig)
    assert resolved.tree["bucket_config"] == {"32px": {1: (1.0, 3)}}


def test_stages_that_end_at_the_same_time_are_all_noted(tmp_path: Path):
    names = [f"stage {number}" for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: [note_done(tmp_path, name, f"{name}/{i}") for i in range(5)], names))
    assert read_done(tmp_path) == {name: f"{name}/4" for name in names}
