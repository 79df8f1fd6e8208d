"""The folder of a whole published CogVideoX says by itself what a run is made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.models.cogvideox_config import published_config, section_of
from longtake.presets import run_file
from longtake.train.config import RunConfig, RunWithoutTable
from longtake.train.run_file import read_run
from tests.encoders.tiny_weights import T5_DIM
from tests.generate.test_published_pipeline import write_pipeline

RUN = {"dataset": {"data_path": "x.csv"}, "bucket_config": {"64px": {9: (1.0, 1)}}}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of CogVideoX."""
    folder = tmp_path_factory.mktemp("base")
    write_pipeline(folder, "CogVideoXPipeline", {"scaling_factor": 0.7, "invert_scale_latents": True}, in_channels=4)
    return folder / "published"


@pytest.fixture
def fun(base: Path, tmp_path: Path) -> Path:
    """The same as CogVideoX-Fun has it; no weights."""
    for name in ("transformer/config.json", "vae/config.json", "scheduler/scheduler_config.json"):
        facts = json.loads((base / name).read_text())
        if name.startswith("transformer"):
            facts |= {"add_noise_in_inpaint_model": False, "in_channels": 9}
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps(facts))
    return tmp_path


def read(root: Path, **keys: object) -> RunConfig:
    model = {"from_pretrained": str(root)}
    return RunConfig(**{**RUN, "model": model, **keys})


def test_one_folder_is_enough(base: Path) -> None:
    config = read(base)
    assert (config.model.type, config.model.visual, config.model.num_layers) == ("cogvideox", None, 1)
    assert (config.ae.type, config.ae.from_pretrained) == ("cogvideox_vae", str(base / "vae"))
    assert (config.ae.scale_factor, config.ae.invert_scale_latents) == (0.7, True)
    assert (config.t5.from_pretrained, config.t5.dim) == (str(base / "text_encoder"), T5_DIM)
    assert (config.t5.max_length, config.objective.snr_shift) == (226, 3.0)


def test_a_folder_of_fun_means_its_schedule_and_its_decoder(fun: Path) -> None:
    config = read(fun)
    assert (config.model.visual, config.model.positions) == ("inpaint", "fun")
    assert (config.objective.snr_shift, config.ae.invert_scale_latents, config.ae.first_latent_alone) == (
        1.0,
        False,
        True,
    )


def test_a_control_folder_is_of_fun_though_it_does_not_say_so(fun: Path) -> None:
    file = fun / "transformer" / "config.json"
    facts = json.loads(file.read_text()) | {"in_channels": 8}
    del facts["add_noise_in_inpaint_model"]
    file.write_text(json.dumps(facts))
    config = read(fun)
    assert (config.model.visual, config.model.positions, config.objective.snr_shift) == ("control", "fun", 1.0)
    for positions in ("fun", "diffusers"):  # a run's own folder says which it has
        own = config.model.model_copy(update={"positions": positions})
        assert section_of(published_config(own), "here")["positions"] == positions


def test_what_is_written_goes_before(base: Path) -> None:
    assert read(base, objective={"snr_shift": 2.0}).objective.snr_shift == 2.0
    t5 = read(base, t5={"type": "words", "dim": T5_DIM}).t5
    assert (t5.type, t5.max_length) == ("words", 16)
    assert read(base, ae={"scale_factor": 3.0}).ae.scale_factor == 3.0
    assert read(base).model_dump() == RunConfig(**read(base).model_dump()).model_dump()


def test_a_folder_counts_upon_a_preset_of_another_model(base: Path, fun: Path, tmp_path: Path) -> None:
    def named(preset: str, root: Path, *flags: str) -> RunConfig:
        start = ("--model.from_pretrained", str(root), "--dataset.data-path", "x.csv")
        return read_run(run_file(preset), (*start, *flags)).value

    config = named("cogvideox_fun/lora_2b_inp", fun)
    assert (config.model.num_layers, config.model.visual, config.lora.rank) == (1, "inpaint", 64)
    assert (config.ae.from_pretrained, config.ae.scale_factor) == (f"{fun}/vae", 0.7)
    assert (config.t5.dim, config.t5.placement) == (T5_DIM, "offloaded")
    assert config.objective.from_pretrained == f"{fun}/scheduler"
    config = named("cogvideox_fun/control", base, "--ae.scale_factor", "3", "--objective.snr_shift", "2")
    assert (config.model.visual, config.model.positions, config.model.num_layers) == ("control", "fun", 1)
    assert (config.ae.scale_factor, config.ae.invert_scale_latents, config.objective.snr_shift) == (3.0, True, 2.0)


def test_a_folder_of_another_schedule_is_refused_in_a_sentence(fun: Path) -> None:
    file = fun / "scheduler" / "scheduler_config.json"
    file.write_text(file.read_text().replace("v_prediction", "epsilon"))
    with pytest.raises(UserError, match="prediction_type is 'epsilon' there, and only 'v_prediction'"):
        read_run(run_file("cogvideox_fun/lora_2b"), ("--model.from_pretrained", str(fun)), RunWithoutTable)
