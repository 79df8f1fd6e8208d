"""Wan's text encoder: official cleaning, ids and embeddings, from transformers' folder and from the official file."""

from __future__ import annotations

import json
import lzma
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file

from longtake.contracts import UserError
from longtake.encoders.config import UMT5EncoderConfig
from longtake.encoders.text import UMT5Encoder, build_text_encoder, cleaned
from longtake.families.record import Text
from longtake.system.encoders import _build_text

GOLDEN = Path(__file__).parents[1] / "golden" / "wan"
FOLDER = GOLDEN / "text"
IO = load(lzma.decompress((FOLDER / "io.safetensors.xz").read_bytes()))
LISTED = json.loads((FOLDER / "prompts.json").read_text(encoding="utf-8"))
PROMPTS = [row["prompt"] for row in LISTED["prompts"]]


def encoder(place: Path, **keys: Any) -> UMT5Encoder:
    section = {"from_pretrained": str(place), "dim": 24, "max_length": LISTED["length"], "dtype": "fp32", **keys}
    result = _build_text(Text("t5", "text"), UMT5EncoderConfig(**section), torch.device("cpu"), None)
    assert isinstance(result, UMT5Encoder)
    return result


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """The file as Wan publishes it, next to the denoiser's config.json and the tokenizer's folder."""
    state, names = load_file(FOLDER / "model.safetensors"), json.loads((GOLDEN / "umt5_names.json").read_text())
    torch.save({theirs: state[ours] for theirs, ours in names["umt5"]}, tmp_path / "models_t5.pth")
    shutil.copytree(FOLDER / "tokenizer", tmp_path / "google" / "umt5-xxl")
    shutil.copy(FOLDER / "config.json", tmp_path / "config.json")
    return tmp_path / "models_t5.pth"


def test_prompts_are_cleaned_and_cut_as_officially() -> None:
    text = encoder(FOLDER)
    ids, mask = text.tokenize(PROMPTS)
    assert [cleaned(prompt) for prompt in PROMPTS] == [row["cleaned"] for row in LISTED["prompts"]]
    assert torch.equal(ids, IO["ids"])
    assert torch.equal(mask, IO["mask"])
    assert torch.equal(text.mask(PROMPTS), IO["mask"].bool())
    assert [text.overflow(prompt) is not None for prompt in PROMPTS] == [len(prompt) > 200 for prompt in PROMPTS]


def test_umt5_embeddings_are_official_with_zeros_beyond_the_text(official: Path) -> None:
    for text in (encoder(FOLDER), encoder(official)):
        embeddings = text.embed(PROMPTS)
        torch.testing.assert_close(embeddings, IO["embeddings"], rtol=0, atol=2e-5)
        assert not embeddings[IO["mask"] == 0].any()
        long = encoder(FOLDER, max_length=300).embed_ids(IO["long_ids"], torch.ones_like(IO["long_ids"]))
        torch.testing.assert_close(long[0, IO["long_rows"]], IO["long_embeddings"], rtol=0, atol=2e-5)


def test_official_umt5_without_its_own_config_has_the_published_sizes(official: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "WanModel", "dim": 1536}')
    section = UMT5EncoderConfig(from_pretrained=str(official))
    text = build_text_encoder(section, tmp_path, tokenizer=False)
    assert isinstance(text, UMT5Encoder)
    assert sum(tensor.numel() for tensor in text.module.state_dict().values()) == 5_680_910_336
    with pytest.raises(UserError, match=r"lacks block\.2.* not the weights"):
        encoder(official, dim=4096)


def test_umt5_tokenizer_is_found_by_key_or_missed_with_a_fix(official: Path, tmp_path: Path) -> None:
    shutil.move(tmp_path / "google", tmp_path / "elsewhere")
    with pytest.raises(UserError, match="has no tokenizer"):
        encoder(official)
    text = encoder(official, tokenizer=str(tmp_path / "elsewhere" / "umt5-xxl"))
    assert torch.equal(text.tokenize(PROMPTS)[0], IO["ids"])


def test_umt5_pth_with_code_is_refused_and_not_run(official: Path, tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
            return Path.touch, (tmp_path / "ran",)

    torch.save(torch.load(official) | {"more": Code()}, official)
    with pytest.raises(UserError, match="expected tensors alone") as error:
        encoder(official)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()
