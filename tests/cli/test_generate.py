from __future__ import annotations

from pathlib import Path

import pytest

from longtake.train import Outcome

RED = "a red circle [moves] left, slowly"


def test_a_run_makes_videos_and_says_where_they_are(longtake, run: Outcome, tmp_path: Path):
    code, out, err = longtake("generate", run.folder, "--prompt", RED, "--save-dir", tmp_path, "--grid")
    folder = tmp_path / "video_32px"
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"weights: averaged (ema), from {run.checkpoint}",
        f"1 video in {folder}",
        f"contact sheet: {folder / 'grid.png'}",
        f"{folder / 'prompt_0000.mp4'}  seed 7  {RED}",
    ]
    assert {path.name for path in folder.iterdir()} == {"grid.png", "prompt_0000.mp4", "prompt_0000.txt"}


def test_prompts_stay_text_whatever_they_look_like(longtake, run: Outcome, tmp_path: Path):
    for number, prompt in enumerate(("123", "true", "a: b = c", "-1", "un été")):
        code, out, err = longtake("generate", run.folder, "--prompt", prompt, "--save-dir", tmp_path / str(number))
        assert (code, err) == (0, "")
        assert out.endswith(f"  {prompt}\n")


def test_an_exported_file_makes_videos_by_itself(longtake, run: Outcome, tmp_path: Path):
    file = tmp_path / "weights.safetensors"
    assert longtake("checkpoint", "export", run.folder, file)[0] == 0
    code, out, _ = longtake("generate", file, "--prompt", RED, "--save-dir", tmp_path / "made")
    assert code == 0
    assert out.startswith(f"weights: from {file}\n")
    assert (tmp_path / "made" / "video_32px" / "prompt_0000.mp4").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "nothing to generate"),
        (("--prompts", "gone.txt"), "prompts = 'gone.txt': cannot be read (No such file or directory)"),
        (("--prompt", RED, "--sampling_option.aspect_ratio", "wide"), "aspect ratio 'wide'"),
        (("--prompt", RED, "--sampling_option.num_frames", "12"), "12 frames do not divide into whole blocks"),
        (("--prompt", RED, "--sampling-option.num-frame", "8"), "did you mean sampling_option.num_frames?"),
        (("--prompt", RED, "--batch-size", "0"), "batch_size = 0 (--batch_size)"),
    ],
)
def test_mistakes_are_one_sentence(mistake, run: Outcome, tmp_path: Path, flags: tuple[str, ...], said: str):
    assert said in mistake("generate", run.folder, "--save-dir", tmp_path / "made", *flags)
    assert not (tmp_path / "made").exists()


def test_a_folder_that_cannot_be_made_is_named(mistake, run: Outcome, tmp_path: Path):
    (tmp_path / "taken").write_text("a file")
    said = mistake("generate", run.folder, "--prompt", RED, "--save-dir", tmp_path / "taken")
    assert str(tmp_path / "taken") in said
