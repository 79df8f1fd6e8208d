"""Published weights as Longtake's own file: complete, and taken by training and generation by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longtake.config.load import resolve
from longtake.contracts import UserError
from longtake.generate.source import resolve_source
from longtake.presets import find_preset
from longtake.system.config import SystemConfig
from longtake.system.convert import convert_weights
from longtake.system.export import exported_tree
from longtake.system.pretrained import open_pretrained
from longtake.train.run_file import read_run
from longtake.weights.files import open_source
from tests.generate.test_published_pipeline import write_pipeline


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    write_pipeline(folder, "CogVideoXPipeline", {"scaling_factor": 0.7}, in_channels=4)
    return folder / "published"


def test_what_a_file_lacks_is_there_and_the_rest_is_what_it_was(published: Path, tmp_path: Path) -> None:
    """A text-to-video model grown by the channels of a still, in a folder that says what it is."""
    said = convert_weights(str(published), tmp_path / "grown", ["--model.visual", "image"])
    assert any("SOURCE" not in line and "weights: from" in line for line in said)
    before, after = open_source(published), open_source(tmp_path / "grown")
    name = "transformer_blocks.0.attn1.to_q.weight"
    assert torch.equal(before[name], after[name])
    config = resolve_source(str(tmp_path / "grown"), ["--prompt", "a"]).config
    assert config.model.visual == "image"
    assert config.ae.scale_factor == 0.7
    assert config.t5.from_pretrained == f"{published}/text_encoder"


def test_it_overwrites_nothing(published: Path, tmp_path: Path) -> None:
    convert_weights(str(published), tmp_path / "one")
    with pytest.raises(UserError, match="exists already and is not overwritten"):
        convert_weights(str(published), tmp_path / "one")


def test_a_folder_of_another_programs_names_says_how_its_latents_are_scaled(tmp_path: Path) -> None:
    """The published program's own conversion does not, and its samples of converted weights need 0.7 in place of 1."""
    write_pipeline(tmp_path, "CogVideoXPipeline", {"scaling_factor": 0.7}, in_channels=4)
    more = ["--model.type", "ttt_video", "--model.mini_batch_size", "8"]
    said = convert_weights(str(tmp_path / "published"), tmp_path / "dcp", more, names="published")
    assert any("start anew" in line for line in said)
    again = {"model": {"type": "ttt_video", "from_pretrained": str(tmp_path / "dcp")}}
    config = resolve(again, [], SystemConfig, place="a run").value
    assert (config.ae.scale_factor, config.model.mini_batch_size) == (0.7, 8)
    with open_pretrained(config.model) as (weights, _):
        before = open_source(tmp_path / "published")
        name = "transformer_blocks.0.attn1.to_q.weight"
        assert torch.equal(weights[name], before[name])
    with pytest.raises(UserError, match="--as diffusers: is no folder that can be written; choose published"):
        convert_weights(str(tmp_path / "published"), tmp_path / "other", more, names="diffusers")


def test_a_denoiser_by_itself_is_converted_without_a_word_of_encoders(published: Path, tmp_path: Path) -> None:
    said = convert_weights(
        str(published / "transformer"), tmp_path / "alone", ["--model.type", "ttt_video", "--model.mixer", "ttt_linear"]
    )
    assert any("says nothing of autoencoder" in line for line in said)
    tree = exported_tree(tmp_path / "alone")
    assert set(tree) == {"model"}
    assert (tree["model"]["mini_batch_size"], tree["model"]["ttt_base_lr"]) == (16, 1.0)


def test_generation_by_a_preset_takes_the_scale_of_converted_weights_and_training_its_own(
    published: Path, tmp_path: Path
) -> None:
    """CogVideoX-5B has 0.7, TTT-Video trains with 1.0."""
    convert_weights(str(published), tmp_path / "whole", ["--model.type", "ttt_video"])
    weights = ["--model.from-pretrained", str(tmp_path / "whole")]
    source = resolve_source(str(find_preset("ttt_video/ttt_mlp_3s", "inference")), ["--prompt", "a", *weights])
    assert source.config.ae.scale_factor == 0.7
    assert source.notes == (f"ae.scale_factor = 0.7: that of {tmp_path / 'whole'}",)
    for folder in (tmp_path / "whole", published):
        flags = ["--dataset.data-path", "x.csv", "--model.from-pretrained", str(folder)]
        assert read_run(str(find_preset("ttt_video/ttt_mlp/3s")), flags).value.ae.scale_factor == 1.0
