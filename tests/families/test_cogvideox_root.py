"""The folder of a whole published CogVideoX says by itself what a run is made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longtake.train import RunConfig
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


def test_what_is_written_goes_before(base: Path) -> None:
    assert read(base, objective={"snr_shift": 2.0}).objective.snr_shift == 2.0
    t5 = read(base, t5={"type": "words", "dim": T5_DIM}).t5
    assert (t5.type, t5.max_length) == ("words", 16)
    assert read(base, ae={"scale_factor": 3.0}).ae.scale_factor == 3.0
    assert read(base).model_dump() == RunConfig(**read(base).model_dump()).model_dump()
