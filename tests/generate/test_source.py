from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from longtake.checkpoint.contents import inspect
from longtake.config.dump import dump_config
from longtake.contracts import UserError
from longtake.generate.run import generate_from, open_system, read_video
from longtake.generate.source import check_loaded, load_weights, resolve_source
from longtake.parallel.shard import local_tensor
from longtake.parallel.world import World
from longtake.presets import find_preset
from longtake.system.export import export_model, trained_shapes
from longtake.train.run import Outcome
from longtake.train.run_file import read_run
from tests.train.runs import run_command


def weights(run: str, world: World, *flags: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The weights that a generation from `run` would use, and what was said of them."""
    said: list[str] = []
    system = open_system(resolve_source(run, flags), world, said.append)
    return {name: local_tensor(p).clone() for name, p in system.denoiser.named_parameters()}, said


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_a_checkpoint_a_glob_and_latest_name_the_same_weights(
    run: Outcome, world: World, monkeypatch: pytest.MonkeyPatch
):
    expected, _ = weights(str(run.folder), world)
    monkeypatch.chdir(run.folder.parent.parent)
    for name in (str(run.checkpoint), f"{run.folder}*", f"{run.folder}/epoch*", "latest", "run"):
        assert resolve_source(name, []).checkpoint.resolve() == run.checkpoint.resolve()
    assert same(weights("latest", world)[0], expected)


def test_averaged_weights_are_the_default_and_raw_ones_the_choice(run: Outcome, world: World):
    averaged, said = weights(str(run.folder), world)
    raw, said_raw = weights(str(run.folder), world, "--ema", "False")
    assert not same(averaged, raw)
    assert "averaged (ema)" in said[0]
    assert "as trained" in said_raw[0]


def test_an_exported_file_is_enough_by_itself(run: Outcome, world: World, tmp_path: Path):
    for part, flags in (("ema", []), ("model", ["--ema", "False"])):
        file = export_model(str(run.folder), tmp_path / f"{part}.safetensors", part)
        assert same(weights(str(file), world)[0], weights(str(run.folder), world, *flags)[0])
    sampling = [resolve_source(str(place), []).config.sampling_option for place in (file, run.folder)]
    assert sampling[0] == sampling[1]


@pytest.fixture
def unsized(run: Outcome, tmp_path: Path) -> Path:
    """The folder of a run whose file does not say how large its videos are; its buckets have 8 and 16 frames."""
    folder = tmp_path / "unsized"
    shutil.copytree(run.folder, folder)
    text = (folder / "config.py").read_text()
    for said in ('resolution="32px"', 'aspect_ratio="1:1"', "num_frames=8"):
        assert said in text
        text = text.replace(said, f"{said.partition('=')[0]}=None")
    text, count = re.subn(
        r"(?m)^bucket_config = .*$", 'bucket_config = {"32px": {1: (1, 4), 8: (1, 4), 16: (1, 2)}}', text
    )
    assert count == 1
    (folder / "config.py").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("flags", "size", "note"),
    [
        ("", ("32px", "16:9", 16), "32px, 16 frames, as {}; --resolution, --num-frames choose others"),
        ("--num-frames 8", ("32px", "16:9", 8), "32px, as {}; --resolution chooses another"),
        ("--resolution 64px", ("64px", "16:9", 16), "16 frames, as {}; --num-frames chooses another"),
        ("--sampling-option.resolution 64px --num-frames 1 --aspect-ratio 1:1", ("64px", "1:1", 1), None),
        ("--tiny", ("32px", "16:9", 16), None),
    ],
)
def test_a_run_is_sampled_at_the_size_that_it_trained(unsized: Path, flags: str, size: tuple, note: str | None):
    for place in (unsized, next(unsized.glob("epoch*"))):
        source = resolve_source(str(place), flags.split())
        option = source.config.sampling_option
        assert (option.resolution, option.aspect_ratio, option.num_frames, option.num_steps) == (*size, 3)
        notes = tuple(line for line in source.notes if "not trained" not in line)
        assert notes == (() if note is None else (note.format("in the run's bucket_config"),))


def test_a_size_that_the_run_says_is_kept_without_a_word(run: Outcome):
    source = resolve_source(str(run.folder), [])
    assert (source.config.sampling_option.num_frames, source.notes) == (8, ())


def test_a_ratio_that_is_the_only_one_of_the_buckets_is_taken(unsized: Path):
    text = (unsized / "config.py").read_text()
    (unsized / "config.py").write_text(text.replace('"32px": {', '"32px_ar1:1": {'))
    source = resolve_source(str(unsized), ["--num-frames", "8"])
    assert (source.config.sampling_option.resolution, source.config.sampling_option.aspect_ratio) == ("32px", "1:1")
    assert source.notes[0].startswith("32px, 1:1, as in the run's bucket_config; --resolution, --aspect-ratio choose")


def test_a_mistake_in_a_size_names_the_buckets_it_is_from(unsized: Path):
    with pytest.raises(UserError, match="unknown_key"):
        resolve_source(str(unsized), ["--unknown_key", "1"])
    (unsized / "config.py").write_text((unsized / "config.py").read_text().replace("16: (1, 2)", "16: 2"))
    with pytest.raises(UserError, match=r"bucket_config\.32px\.16 = 2: \(keep probability, batch size\)"):
        resolve_source(str(unsized), [])


def test_an_exported_file_keeps_the_size_that_its_run_trained(unsized: Path, tmp_path: Path):
    file = export_model(str(unsized), tmp_path / "w.safetensors")
    source = resolve_source(str(file), [])
    assert source.config.sampling_option == resolve_source(str(unsized), []).config.sampling_option
    assert source.notes == ()


def test_the_size_is_told_before_anything_is_made(unsized: Path, world: World, tmp_path: Path):
    said: list[str] = []
    source = resolve_source(str(unsized), ["--prompt", "x", "--save-dir", str(tmp_path / "made"), "--num-steps", "1"])
    (video,) = generate_from(source, world, said.append)
    assert said[0] == source.notes[0]
    assert said[1].startswith("weights: ")
    assert read_video(video.path).shape == (16, 24, 40, 3)


def test_a_config_file_takes_weights_from_a_file(run: Outcome, world: World, tmp_path: Path):
    file = export_model(str(run.folder), tmp_path / "w.safetensors")
    config = tmp_path / "sample.py"
    config.write_text(dump_config(resolve_source(str(run.folder), []).config))
    expected, _ = weights(str(run.folder), world)
    assert same(weights(str(config), world, "--model.from_pretrained", str(file))[0], expected)
    assert not same(weights(str(config), world)[0], expected)


def test_how_training_was_spread_out_does_not_bind_a_generation(run: Outcome, tmp_path: Path):
    folder = tmp_path / "run"
    shutil.copytree(run.folder, folder)
    text = (folder / "config.py").read_text()
    assert "shard=" in text
    (folder / "config.py").write_text(text.replace('shard="auto"', "shard=8"))
    assert resolve_source(str(folder), []).config.parallel.shard == "auto"


def test_a_run_without_average_falls_back_to_its_weights(run: Outcome, world: World, monkeypatch: pytest.MonkeyPatch):
    def without_average(folder: Path) -> SimpleNamespace:
        rows = [row for row in inspect(folder).rows if row.part != "ema"]
        return SimpleNamespace(totals={row.part: None for row in rows}, rows=rows)

    monkeypatch.setattr("longtake.generate.source.inspect", without_average)
    source = resolve_source(str(run.folder), [])
    system = open_system(resolve_source(str(run.folder), ["--ema", "False"]), world, lambda text: None)
    assert load_weights(system, source.checkpoint, ema=True) == "model"


def test_what_is_no_source_is_refused_in_one_sentence(run: Outcome, tmp_path: Path):
    foreign = tmp_path / "foreign.safetensors"
    save_file({"x": torch.zeros(2)}, foreign)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not safetensors")
    lonely = tmp_path / "lonely"
    shutil.copytree(run.checkpoint, lonely / run.checkpoint.name)
    cases = {
        str(foreign): "holds no Longtake config",
        str(broken): "cannot be read as safetensors",
        str(tmp_path / "gone.safetensors"): "No such file",
        str(tmp_path / "gone.py"): "gone.py",
        str(tmp_path / "gone"): "nothing is there",
        str(lonely): "no config.py beside the checkpoint",
    }
    for name, said in cases.items():
        with pytest.raises(UserError) as caught:
            resolve_source(name, [])
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_strength_is_refused_where_no_adapters_lie_upon_the_weights(run: Outcome, tmp_path: Path):
    file = export_model(str(run.folder), tmp_path / "w.safetensors")
    config = tmp_path / "sample.py"
    config.write_text(dump_config(resolve_source(str(run.folder), []).config))
    for source in (run.folder, file, config):
        for flags in (["--lora-scale", "0.5"], ["--lora-scale", "1"], ["--lora-scale", "0.5", "--tiny"]):
            with pytest.raises(UserError, match=r"lora\.strength = .* \(--lora\.strength\): there are no adapters"):
                resolve_source(str(source), flags)
        resolve_source(str(source), ["--lora", "a.safetensors", "--lora-scale", "0.5"])
    config.write_text(config.read_text() + "lora = dict(strength=0.5)\n")
    with pytest.raises(UserError, match=r"lora\.strength = 0\.5 \(.*sample\.py:\d+\): there are no adapters"):
        resolve_source(str(config), [])


def test_checkpoint_with_nan_is_refused_by_name(tmp_path: Path) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    check_loaded(layers, tmp_path)
    layers[1].bias.data[0] = float("nan")
    with pytest.raises(UserError, match=r"1\.bias holds 1 values"):
        check_loaded(layers, tmp_path)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--num-frames", "1"], None),
        ([], None),
        (["--num-frames", "16"], "16 x 32 x 32"),
        (["--resolution", "64px", "--num-frames", "8"], "8 x 64 x 64"),
    ],
)
def test_shape_that_the_run_never_trained_is_named_with_those_it_did(
    run: Outcome, flags: list[str], named: str | None
) -> None:
    notes = resolve_source(str(run.folder), ["--aspect-ratio", "1:1", *flags] if flags else []).notes
    lines = [note for note in notes if "not trained" in note]
    assert len(lines) == (named is not None)
    for line in lines:
        assert line.startswith(str(named))
        assert "32px (1, 8 frames of " in line


def test_missing_weights_and_encoders_are_named_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("model.from_pretrained", "ae.from_pretrained", "t5.from_pretrained")
    places = [tmp_path / f"gone{number}.safetensors" for number, _ in enumerate(keys)]
    flags = [word for key, place in zip(keys, places, strict=True) for word in (f"--{key}", str(place))]
    words = ["generate", "opensora_v2/256px", "--prompt", "x", *flags, "--clip.from_pretrained", str(tmp_path)]
    code, _, error = run_command(capsys, words)
    assert code == 2
    named = [[place.name for place in places if place.name in line] for line in error.splitlines()]
    assert named == [[place.name] for place in places]


def test_exported_file_names_shapes_that_its_run_never_trained(run: Outcome, tmp_path: Path) -> None:
    file = export_model(str(run.folder), tmp_path / "model.safetensors")
    assert not [note for note in resolve_source(str(file), []).notes if "not trained" in note]
    (line,) = resolve_source(str(file), ["--aspect-ratio", "1:1", "--num-frames", "16"]).notes
    assert line.startswith("16 x 32 x 32: the run has not trained in that length; it trained on 32px (1, 8 frames of ")


def test_rows_of_prompts_name_shapes_that_the_run_never_trained(run: Outcome, tmp_path: Path) -> None:
    table = tmp_path / "prompts.csv"
    table.write_text("text,num_frames,resolution\na,8,32px\nb,16,32px\nc,8,64px\nd,16,32px\n")
    notes = resolve_source(str(run.folder), ["--prompts", str(table), "--aspect-ratio", "1:1"]).notes
    lines = [note.partition(":")[0] for note in notes if "not trained" in note]
    assert lines == ["8 x 64 x 64", "16 x 32 x 32"]


@pytest.mark.parametrize("preset", ["cogvideox_fun/lora_2b", "ttt_video/ttt_mlp/9s"])
def test_trained_shapes_of_every_bucket_law_are_known(preset: str) -> None:
    config = read_run(str(find_preset(preset)), ["--dataset.data-path", "clips.jsonl"]).value
    found = set().union(*trained_shapes(config.model_dump(mode="json")).values())
    assert found >= {bucket.shape for bucket in config.bucket_rule.buckets}
    assert max(shape[0] for shape in found) == max(bucket.num_frames for bucket in config.bucket_rule.buckets)
