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


def test_server_without_a_login_keeps_videos_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "outputs/007-STDiT3-XL-2").mkdir(parents=True)

    def tracked(*words: str) -> tuple[str, bool]:
        words = watch_words(["--expnums", "7", *words])
        return words[words.index("--wandb") + 1], "no login" in capsys.readouterr().err

    assert tracked() == ("False", True)
    assert tracked("--compute_only") == ("False", False)
    assert tracked("--save_to", "new") == ("True", False)  # asked for: its absence is an error
    (tmp_path / "netrc").write_text(f"machine api.wandb.ai login user password {40 * 'x'}\n")
    assert tracked() == ("True", False)


def test_flags_of_watch_and_keys_of_a_run_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs/007-STDiT3-XL-2").mkdir(parents=True)
    words = watch_words(["--expnums", "7", "--tiny", "--once", "--validation.clips", "16"])
    assert words[-3:] == ["--once", "--validation.clips", "16"]
    assert "--validation.sampling_option.resolution" not in words
    assert Path(words[words.index("--validation.prompts") + 1]).read_text().count("\n") == 8
    for typo, meant in (("--prset", "--preset"), ("--compute_onyl", "--compute_only"), ("--save_too", "--save_to")):
        with pytest.raises(UserError, match=f"did you mean {meant}"):
            watch_words(["--expnums", "7", typo])
    words = watch_words(["--expnums", "7", "--last_step", "400"])
    assert words[words.index("--pick") + 1] == "last:400"
    with pytest.raises(UserError, match="'400'"):
        watch_words(["--last_step", "--expnums", "7", "--compute_only", "400"])
