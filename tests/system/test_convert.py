"""Published weights as Longtake's own file: complete, and taken by training and generation by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longtake.contracts import UserError
from longtake.generate import resolve_source
from longtake.system import convert_weights
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
