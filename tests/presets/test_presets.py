"""Presets by name, from any folder: found, inherited from, copied."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from longtake.config.faults import ConfigError
from longtake.config.load import load_config
from longtake.contracts import UserError
from longtake.generate.read import read_generation
from longtake.presets import FOLDER, Preset, find_preset, presets
from longtake.train.config import RunWithoutTable
from longtake.train.run_file import read_curriculum, read_run, words_of_stages
from tests.train.runs import train_here

ALL = list(presets())
STAGE_1 = FOLDER / "opensora_v2" / "train" / "stage1.py"
VIDEOS = FOLDER / "opensora_v2" / "inference" / "256px.py"

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is an empty one."""
    monkeypatch.chdir(tmp_path)


def resolved(path: Path, kind: str) -> list[dict[str, object]]:
    """What a run file says, of each of its stages."""
    if kind == "inference":
        return [read_generation(path, []).tree]
    curriculum = read_curriculum(str(path))
    # Runs of a file with stages are called like the file.
    words = [[]] if curriculum is None else [["--stage", stage.name] for stage in curriculum.stages]
    return [{**read_run(str(path), flags, RunWithoutTable).tree, "exp_name": None} for flags in words]


@pytest.mark.parametrize("preset", ALL, ids=lambda preset: preset.name)
def test_a_preset_has_its_names(preset: Preset) -> None:
    path = preset.path.relative_to(FOLDER)
    for name in (preset.name, f"{preset.name}.py", str(path), str(path.with_suffix("")), f"configs/{path}"):
        assert find_preset(name, preset.kind) == preset.path


def test_other_names_are_none() -> None:
    for name in ("", "stage1", "opensora_v2", "opensora_v2/", "../data/shapes", "__init__", str(STAGE_1), "a\0b"):
        assert find_preset(name) is None, name


def test_the_folder_of_the_kind_is_looked_in_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("train", "inference"):
        (tmp_path / "family" / kind).mkdir(parents=True)
        (tmp_path / "family" / kind / "both.py").touch()
    monkeypatch.setattr("longtake.presets.FOLDER", tmp_path)
    for kind in ("train", "inference"):
        assert find_preset("family/both", kind) == tmp_path / "family" / kind / "both.py"


def test_they_are_listed_with_what_they_are_for_and_their_gpus(longtake) -> None:
    code, out, _ = longtake("preset")
    assert longtake("preset", "list") == (code, out, "")
    head, *lines = out.splitlines()
    assert (code, head.split()) == (0, ["preset", "verb", "GPUs", "what"])
    assert [line.split()[0] for line in lines] == [preset.name for preset in ALL]
    (line,) = (line for line in lines if line.startswith("opensora_v2/lora_24gb "))
    said = "train 1 x 4090 LoRA on one GPU of 24 GB: the blocks' frozen weights in 4 bits, T5 in host memory."
    assert " ".join(line.split()).endswith(said)
    assert all(preset.gpus for preset in ALL if preset.path.parent == STAGE_1.parent)


VERBS = {  # what is asked for RUN, by the words of the verb
    "longtake.train.curriculum.train_all": [("train",)],
    "longtake.train.run_file.read_run": [("plan",), ("data", "encode"), ("config", "show")],
    "longtake.train.preview.read_previewed": [("data", "stats", "clips.csv", "--run")],
    "longtake.generate.source.resolve_source": [("generate",)],
    "longtake.generate.read.read_generation": [("config", "show")],
}


@pytest.mark.parametrize(("asked", "verb"), [(asked, verb) for asked, verbs in VERBS.items() for verb in verbs])
def test_every_verb_takes_a_preset_by_name_and_a_file_of_ones_own_first(
    mistake, monkeypatch: pytest.MonkeyPatch, asked: str, verb: tuple[str, ...]
) -> None:
    def refuse(run: object, *arguments: object, **options: object) -> None:
        raise UserError(str(run))

    monkeypatch.setattr(asked, refuse)
    preset, text = (VIDEOS, 'prompt = "x"') if "generat" in asked else (STAGE_1, "")
    assert mistake(*verb, f"opensora_v2/{preset.stem}") == str(preset)
    own = Path("opensora_v2") / preset.name
    assert mistake(*verb, own) == str(preset)
    own.parent.mkdir()
    own.write_text(text)
    assert mistake(*verb, own) == str(own)


def test_a_run_in_outputs_is_ones_own_for_generation(mistake) -> None:
    Path("outputs/opensora_v2/256px").mkdir(parents=True)
    assert "holds no checkpoint" in mistake("generate", "opensora_v2/256px", "--prompt", "x")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("train", "opensora_v2/stge1"), "opensora_v2/stage1"),
        (("plan", "stage2.py"), "opensora_v2/stage2"),
        (("train", "costum"), "custom"),
        (("config", "show", "configs/diffusion/train/stage1.py"), "opensora_v2/stage1"),
        (("data", "stats", "clips.csv", "--run", "opensora_v2/stage_1"), "opensora_v2/stage1"),
        (("generate", "configs/opensora_v2/inference/256p.py"), "opensora_v2/256px"),
        (("preset", "copy", "opensora_v2/lora24gb"), "opensora_v2/lora_24gb"),
    ],
)
def test_a_near_miss_names_the_nearest(mistake, words: tuple[str, ...], meant: str) -> None:
    assert meant in mistake(*words)


def test_what_is_far_from_all_is_left_to_the_verb(mistake) -> None:
    assert "preset" not in mistake("train", "my_run.py")
    assert "`longtake preset` lists them" in mistake("preset", "copy", "mine")
    for verb in (("train",), ("plan",), ("config", "show"), ("generate",)):
        assert "`longtake preset` lists the presets" in mistake(*verb, "nope")


@pytest.mark.parametrize("preset", ALL, ids=lambda preset: preset.name)
def test_a_copy_says_what_the_preset_says(longtake, preset: Preset) -> None:
    assert longtake("preset", "copy", preset.name, "runs/mine.py") == (0, "runs/mine.py\n", "")
    copy = Path("runs/mine.py")
    assert resolved(copy, preset.kind) == resolved(preset.path, preset.kind)
    text = copy.read_text()
    assert "configs/" not in text
    assert f" {preset.name} " not in text, "its commands are about the copy"


def test_what_presets_have_as_their_base_is_copied_too(longtake) -> None:
    assert longtake("preset", "copy", "configs/opensora_v2/parts.py", "mine/") == (0, "mine/parts.py\n", "")
    copy, parts = load_config("mine/parts.py", [], dict[str, object]), find_preset("opensora_v2/parts")
    assert copy.tree == load_config(parts, [], dict[str, object]).tree


def test_a_copy_is_changed_and_trains(longtake, clips: Path, tmp_path: Path) -> None:
    longtake("preset", "copy", "opensora_v2/lora_24gb")
    copy = Path("lora_24gb.py")
    copy.write_text(copy.read_text() + "lr = 3e-4\n")
    outcome, _ = train_here(copy, "--tiny", "--dataset.data-path", str(clips), "--outputs", "out", "--max-steps", "1")
    assert outcome.clock.global_step == 1
    assert read_run(str(outcome.folder)).value.lr == 3e-4


def test_a_copy_overwrites_nothing(mistake) -> None:
    Path("custom.py").write_text("lr = 1")
    assert "not overwritten" in mistake("preset", "copy", "custom")
    assert "ends in .py; write mine.py, or mine.toml/ for a folder" in mistake("preset", "copy", "custom", "mine.toml")
    assert Path("custom.py").read_text() == "lr = 1"


def test_a_preset_is_a_base_of_ones_own_file_unless_there_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text('_base_ = "opensora_v2/stage1"\nlr = 1e-6\n')
    run = read_run("mine.py", [], RunWithoutTable).value
    assert (run.lr, run.ckpt_every) == (1e-6, 2000)
    (tmp_path / "mine.py").write_text('_base_ = "opensora_v2/stage1.py"')
    (tmp_path / "opensora_v2").mkdir()
    (tmp_path / "opensora_v2" / "stage1.py").write_text("lr = 1e-3")
    assert load_config("mine.py", [], dict[str, object]).tree == {"lr": 1e-3}
    (tmp_path / "mine.py").write_text('_base_ = "opensora_v2/stage9"')
    with pytest.raises(ConfigError, match="or is a preset"):
        read_run("mine.py", [], RunWithoutTable)


def test_a_bare_preset_is_planned_and_shown_without_clips(longtake, mistake) -> None:
    code, out, _ = longtake("plan", "opensora_v2/lora")
    assert (code, "clips: not counted" in out, "--dataset.data-path" in out) == (0, True, True)
    assert "parameters on 1 x h100, " in out  # the preset's own GPUs
    assert "parameters on 2 x h200, " in longtake("plan", "opensora_v2/lora", "--gpus", 2, "--gpu", "h200")[1]
    assert "\ndataset.data_path = None  # default\n" in longtake("config", "show", "opensora_v2/lora")[1]
    assert "neither is given" in mistake("train", "opensora_v2/lora")
    assert "both are given" in mistake("plan", "custom", "--dataset.mix", "[('a.csv', 1)]")


def test_every_preset_of_training_but_the_demos_is_fast_by_default() -> None:
    slow = {}
    for preset in ALL:
        if preset.kind != "train" or preset.name.startswith("demo/"):
            continue
        curriculum = read_curriculum(str(preset.path))
        for words in [[]] if curriculum is None else [["--stage", stage.name] for stage in curriculum.stages]:
            run = read_run(str(preset.path), words, RunWithoutTable).value
            kept = run.model.recompute == "auto" or (run.model.recompute, run.model.grad_ckpt_settings) == (None, None)
            found = run.compile, run.parallel.zero, kept
            if found != ("auto", 3, True):
                slow[preset.name] = found
    assert slow == {}


@pytest.mark.parametrize("preset", [one for one in ALL if one.kind == "train"], ids=lambda one: one.name)
def test_first_lines_say_whether_latents_are_stored_or_the_autoencoder_is_online(preset: Preset) -> None:
    head = re.split(r"^(?!#)|^#  ", preset.path.read_text(encoding="utf-8"), maxsplit=1, flags=re.MULTILINE)[0]
    for words in words_of_stages(str(preset.path), []):
        config = read_run(str(preset.path), words, RunWithoutTable).value
        if config.ae.type in ("pixel", "linear"):
            continue
        assert ("online" in head, "uncompiled" in head) == (config.dataset.latents is None, not config.ae.compile)
