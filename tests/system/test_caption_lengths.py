"""Captions that are too long are counted before a run, and named in a generation."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from longtake.data.config import DatasetConfig
from longtake.data.rules import SampleRules
from longtake.data.tables.mix import open_clips
from longtake.encoders.config import T5EncoderConfig, WordsConfig
from longtake.families.record import Text
from longtake.system import caption_lengths
from longtake.system.caption_lengths import caption_length_lines, lost_words


def config_of(folder: Path, captions: list[str], segments: bool = False, **sections: object) -> SimpleNamespace:
    rows = "".join(
        json.dumps({"path": f"{i}.mp4", "text": text, "num_frames": 9, "height": 32, "width": 32, "fps": 8}) + "\n"
        for i, text in enumerate(captions)
    )
    (folder / "clips.jsonl").write_text(rows)
    rules = SampleRules(caption="rate", segments=(lambda frames: 2) if segments else None)
    sections = {"t5": WordsConfig(max_length=6)} | sections
    family = SimpleNamespace(texts=tuple(Text(name, name) for name in sections))
    dataset = DatasetConfig(data_path=str(folder / "clips.jsonl"))
    return SimpleNamespace(dataset=dataset, sample_rules=rules, family=family, **sections)


def lines_of(config: SimpleNamespace) -> list[str]:
    return caption_length_lines(config, open_clips(config.dataset))


def test_captions_too_long_are_counted_with_their_excess(tmp_path: Path) -> None:
    texts = ["a cat", "a cat walks on", "a cat walks on the roof", ""]  # 2 words of rate are added
    (line,) = lines_of(config_of(tmp_path, texts, clip=WordsConfig(max_length=20)))
    assert "1 of 3" in line
    assert "6 tokens that t5 takes, by 2 (median) to 2" in line
    assert lines_of(config_of(tmp_path, texts[:2])) == []


def test_captions_of_segments_are_counted_one_by_one(tmp_path: Path) -> None:
    texts = ['["a cat", "a cat walks on the roof"]', '["a dog", "a dog"]']
    (line,) = lines_of(config_of(tmp_path, texts, segments=True))
    assert "1 of 4" in line


def test_captions_several_where_one_is_needed_are_named(tmp_path: Path) -> None:
    (line,) = lines_of(config_of(tmp_path, ['["a cat", "a dog"]', '["a cat"]', "[red] cat"]))
    assert "1 clips cannot be used" in line
    assert "0.mp4: captions found: 2, needed: 1" in line


def test_captions_are_sampled_evenly_above_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caption_lengths, "MOST_CAPTIONS", 3)
    (line,) = lines_of(config_of(tmp_path, ["a cat walks on the roof"] * 9))
    assert "3 of 3 (of 3 clips, evenly spread)" in line


def test_captions_without_a_tokenizer_on_this_machine_are_not_counted(tmp_path: Path) -> None:
    (line,) = lines_of(config_of(tmp_path, ["a cat"], t5=T5EncoderConfig(from_pretrained=str(tmp_path / "t5"))))
    assert "its tokenizer is not here" in line


def test_prompts_too_long_are_named_with_the_words_they_lose(tmp_path: Path) -> None:
    config = config_of(tmp_path, ["x"])
    counts = caption_lengths.open_counts(config)
    prompts = ["a cat walks on the roof. 24 FPS.", "a cat. 24 FPS.", ("a dog", "a dog runs along the long beach")]
    first, second = lost_words(config, counts, prompts)
    assert "'the roof'" in first
    assert "'beach'" in second
