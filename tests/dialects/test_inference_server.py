"""The command line of the tutorial's inference server becomes one of `longtake watch`."""

from __future__ import annotations

from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.dialects.opensora_v1_2.server import watch_words


def test_numbers_presets_and_flags_become_a_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("outputs/007-STDiT3-XL-2", "outputs_speedrun/656-STDiT3-XL-2"):
        (tmp_path / name).mkdir(parents=True)
    words = watch_words(["--expnums", "656", "7", "--preset", "high4s", "--last_step", "--save_to", "new"])
    assert words[:3] == ["watch", "outputs_speedrun/656-STDiT3-XL-2", "outputs/007-STDiT3-XL-2"]
    said = dict(zip(words[3::2], words[4::2], strict=True))
    assert said["--validation.sampling_option.num_frames"] == "102"
    assert said["--validation.sampling_option.resolution"] == "720p"
    chosen = [said[key] for key in ("--validation.ema", "--pick", "--wandb-run", "--wandb")]
    assert chosen == ["False", "last", "new", "True"]
    (tmp_path / "numbers.txt").write_text("7\n656\n")
    assert watch_words(["--expnums", "numbers.txt", "--compute_only"])[1:3] == [words[2], words[1]]
    with pytest.raises(UserError, match=r"--expnums 8: there is no outputs_speedrun/008-\*"):
        watch_words(["--expnums", "8"])
