"""The word encoder: fixed vectors by the words themselves."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
import torch

from longtake.encoders.config import WordsConfig
from longtake.encoders.text import build_text_encoder
from longtake.encoders.word_vectors import WordEncoder

PROGRAM = """
import hashlib
from longtake.encoders.word_vectors import WordEncoder
tokens, pooled = WordEncoder(16, 4).encode(["a red circle", ""])
print(hashlib.sha256(tokens.numpy().tobytes() + pooled.numpy().tobytes()).hexdigest())
"""


def test_another_process_makes_the_same_bits() -> None:
    tokens, pooled = WordEncoder(16, 4).encode(["a red circle", ""])
    ours = hashlib.sha256(tokens.numpy().tobytes() + pooled.numpy().tobytes()).hexdigest()
    theirs = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout.strip()
    assert ours == theirs


def test_shapes_and_padding() -> None:
    tokens, pooled = WordEncoder(16, 6).encode(("a red circle", "a b c d e f g h"))
    assert tokens.shape == (2, 6, 16)
    assert pooled.shape == (2, 16)
    assert tokens.dtype == pooled.dtype == torch.float32
    assert not tokens[0, 3:].any()
    assert tokens[1].any(dim=1).all()


def test_captions_that_share_a_word_share_its_vector() -> None:
    encoder = WordEncoder(64, 8)
    (red_circle, red_square, circle_red), _ = encoder.encode(["red circle", "red square", "circle red"])
    assert torch.equal(red_circle[0], red_square[0])
    assert not torch.equal(red_circle[1], red_square[1])
    # In another place a word has another half of a vector added: what is left is equal.
    moved = red_circle[0] - circle_red[1]
    assert torch.allclose(moved, red_square[0] - circle_red[1])
    assert moved.std() < 1.2 * (0.5**2 + 0.5**2) ** 0.5


def test_pooled_embeddings_do_not_depend_on_the_order_of_words() -> None:
    _, pooled = WordEncoder(64, 8).encode(["red circle moves", "moves circle red"])
    torch.testing.assert_close(pooled[0], pooled[1])


def test_embeddings_have_unit_variance() -> None:
    tokens, pooled = WordEncoder(4096, 8).encode(["one two three four"])
    assert pooled.std() == pytest.approx(1, abs=0.05)
    assert tokens[0, 0].std() == pytest.approx((1 + 0.25) ** 0.5, abs=0.05)


def test_the_empty_prompt_is_zero() -> None:
    tokens, pooled = WordEncoder(16, 4).encode([""])
    assert not tokens.any()
    assert not pooled.any()


def test_case_and_punctuation_do_not_matter() -> None:
    tokens, _ = WordEncoder(16, 4).encode(["A red circle.", "a red, circle"])
    assert torch.equal(tokens[0], tokens[1])


def test_the_config_section_builds_it() -> None:
    encoder = build_text_encoder(WordsConfig(dim=32, max_length=5))
    assert (encoder.dim, encoder.max_length) == (32, 5)
