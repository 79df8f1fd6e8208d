"""`longtake data encode` as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.runs import assert_one_sentence, run_command

Capture = pytest.CaptureFixture[str]


def test_parts_say_what_is_left_and_the_last_one_how_to_train(config: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ("data", "encode", config, "--dataset.views", 2, "--dataset.latents", tmp_path / "store", "--shard-mb", 0.1)
    code, out, _ = run_command(capsys, (*words, "--part", "1/2"))
    assert code == 0
    assert "this part is done; " in out
    assert "shards are other parts' to make" in out
    code, out, _ = run_command(capsys, (*words, "--part", "2/2"))
    assert code == 0
    assert f"80 samples in 2 views and 40 captions in {tmp_path / 'store'}" in out
    assert f"train with --dataset.views 2 --dataset.latents {tmp_path / 'store'}" in out
    code, out, _ = run_command(capsys, words)
    assert "120 samples and captions were encoded before" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "dataset.views = 0"),
        (("--dataset.views", 2, "--part", "3/2"), "--part 3/2: parts are counted from 1"),
        (("--dataset.views", 2, "--part", "0/2"), "--part 0/2: parts are counted from 1"),
        (("--dataset.views", 2, "--part", "half"), "--part half: expected I/N"),
        (("--dataset.views", 2, "--store-dtype", "int4"), "--store-dtype"),
        (("--dataset.view", 2), "dataset.views"),
        (("--dataset.views", 2, "--verify"), "no store.json in it"),
    ],
)
def test_mistakes_are_one_sentence(
    config: Path, tmp_path: Path, capsys: Capture, words: tuple[object, ...], said: str
) -> None:
    code, _, error = run_command(capsys, ("data", "encode", config, "-o", tmp_path / "store", *words))
    assert_one_sentence(code, error, said)
    assert not (tmp_path / "store").exists()
