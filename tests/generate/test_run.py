from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from longtake.contracts import UserError
from longtake.data.probing.one_file import probe_file
from longtake.generate.checks import check_request
from longtake.generate.requests import claim_path
from longtake.generate.run import read_video, stream_batch
from longtake.generate.source import resolve_source
from tests.generate.runs import keep_written

RED = "a red circle moves left"
BLUE = "a blue square moves up"


def test_a_video_is_written_as_h264_with_its_prompt_beside_it(make, tmp_path: Path):
    (video,) = make("--prompt", RED)
    info = probe_file(video.path)
    assert video.path == tmp_path / "made" / "video_32px" / "prompt_0000.mp4"
    assert (info.codec, info.num_frames, info.height, info.width, info.fps) == ("h264", 8, 32, 32, 8.0)
    assert video.path.with_suffix(".txt").read_text() == f"{RED}. 8 FPS.\n"


def test_a_still_is_written_as_png(make, tmp_path: Path):
    (video,) = make("--prompt", "a red circle", "--sampling_option.num_frames", "1")
    assert video.path == tmp_path / "made" / "image_32px" / "prompt_0000.png"
    assert read_video(video.path).shape == (1, 32, 32, 3)


def test_nothing_is_ever_overwritten(make):
    first = make("--prompt", RED, "--grid")[0].path
    before = first.read_bytes()
    second = make("--prompt", BLUE, "--grid")[0].path
    assert second.name == "prompt_0000-2.mp4"
    assert first.read_bytes() == before
    assert {path.name for path in first.parent.glob("grid*")} == {"grid.png", "grid-2.png"}


def test_each_prompt_may_have_a_folder(make, tmp_path: Path):
    prompts = tmp_path / "p.txt"
    prompts.write_text(f"a\n{RED}\n{BLUE}\n")
    asked = "--prompts", str(prompts), "--start-index", "1", "--prompt_folders"
    first, second = (make(*asked) for _ in range(2))
    folder = tmp_path / "made" / "prompt-1"
    assert first[0].path == folder / "000000.mp4"
    assert first[1].path == tmp_path / "made" / "prompt-2" / "000000.mp4"
    assert second[0].path == folder / "000000-2.mp4"
    assert {path.name for path in folder.glob("*.txt")} == {"prompt.txt", "000000-2.txt"}
    assert (folder / "prompt.txt").read_text() == f"{RED}. 8 FPS.\n"


def test_a_name_that_another_generation_takes_meanwhile_is_not_overwritten(
    make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    theirs = tmp_path / "made" / "video_32px" / "prompt_0000.mp4"

    def sample(*given):
        theirs.write_bytes(b"theirs")
        return stream_batch(*given)

    monkeypatch.setattr("longtake.generate.run.stream_batch", sample)
    (video,) = make("--prompt", RED)
    assert theirs.read_bytes() == b"theirs"
    assert video.path.name == "prompt_0000-2.mp4"
    assert video.path.with_suffix(".txt").read_text() == f"{RED}. 8 FPS.\n"
    assert read_video(video.path).shape == (8, 32, 32, 3)


def test_two_generations_cannot_claim_one_name(tmp_path: Path):
    claimed = [claim_path(tmp_path / "v1.5.mp4").name for _ in range(3)]
    assert claimed == ["v1.5.mp4", "v1.5-2.mp4", "v1.5-3.mp4"]


def test_a_video_that_cannot_be_written_leaves_nothing(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*given):
        raise OSError(28, "No space left on device", "prompt_0000.mp4")

    monkeypatch.setattr("longtake.generate.run.video_writer", refuse)
    with pytest.raises(OSError, match="No space left"):
        make("--prompt", RED)
    assert list((tmp_path / "made" / "video_32px").iterdir()) == []


def test_two_prompts_of_one_name_get_two_files(make, tmp_path: Path):
    table = tmp_path / "p.csv"
    table.write_text(f"name,text\nsame,{RED}\nsame,{BLUE}\n")
    videos = make("--prompts", str(table))
    assert [video.path.name for video in videos] == ["same.mp4", "same-2.mp4"]
    assert [video.path.with_suffix(".txt").read_text() for video in videos] == [
        f"{RED}. 8 FPS.\n",
        f"{BLUE}. 8 FPS.\n",
    ]


def test_each_video_has_a_seed_of_its_own_from_the_first_on(make):
    videos = make("--prompt", f"[{RED!r}, {BLUE!r}]", "--num-sample", "2", "--sampling_option.seed", "40")
    assert [(v.prompt.text, v.seed) for v in videos] == [(RED, 40), (RED, 41), (BLUE, 42), (BLUE, 43)]
    assert [v.path.name for v in videos] == [
        "prompt_0000_0.mp4",
        "prompt_0000_1.mp4",
        "prompt_0001_0.mp4",
        "prompt_0001_1.mp4",
    ]


def test_the_batch_size_does_not_change_a_video(make, monkeypatch: pytest.MonkeyPatch):
    """By the frames that go to the encoder: H.264 makes several units of one unit of rounding."""
    written = keep_written(monkeypatch)
    prompts = f"[{RED!r}, {BLUE!r}, 'a green triangle moves down']"
    one_by_one = make("--prompt", prompts, "--batch-size", "1")
    together = make("--prompt", prompts, "--batch-size", "2")
    assert [video.seed for video in one_by_one] == [video.seed for video in together]
    assert len(written) == 6
    for a, b in zip(one_by_one, together, strict=True):
        assert np.abs(written[a.path].astype(int) - written[b.path]).max() <= 1


def test_only_as_many_prompts_as_asked_for_are_used(make):
    (video,) = make("--prompt", f"[{RED!r}, {BLUE!r}]", "--num-samples", "1")
    assert video.path.with_suffix(".txt").read_text() == f"{RED}. 8 FPS.\n"
    assert sorted(path.name for path in video.path.parent.iterdir()) == ["prompt_0000.mp4", "prompt_0000.txt"]


def test_a_negative_prompt_from_the_table_or_the_run_changes_the_video(make, tmp_path: Path):
    table = tmp_path / "p.csv"
    table.write_text(f"text,neg\n{RED},\n")
    (plain,) = make("--prompts", str(table))
    (whole_run,) = make("--prompts", str(table), "--negative-prompt", BLUE)
    table.write_text(f"text,neg\n{RED},{BLUE}\n")
    (its_own,) = make("--prompts", str(table), "--negative-prompt", "something else")
    assert (read_video(plain.path) != read_video(whole_run.path)).any()
    assert (read_video(its_own.path) == read_video(whole_run.path)).all()


def test_the_contact_sheet_shows_all_videos(make):
    folder = make("--prompt", f"[{RED!r}, {BLUE!r}]", "--grid")[0].path.parent
    with Image.open(folder / "grid.png") as sheet:
        assert sheet.width > 6 * 96
        assert sheet.height > 2 * 96


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "nothing to generate"),
        (["--prompt", RED, "--sampling_option.aspect_ratio", "wide"], "aspect ratio 'wide'"),
        (["--prompt", RED, "--sampling_option.resolution", "8px8"], "resolution '8px8'"),
    ],
)
def test_a_mistake_is_found_before_a_model_is_built(run, flags: list[str], said: str):
    with pytest.raises(UserError, match=said):
        check_request(resolve_source(str(run.folder), flags).config)


def test_frames_that_the_autoencoder_cannot_make_are_refused(make):
    with pytest.raises(UserError, match=r"ae\.temporal = 8: 9 frames do not divide"):
        make("--prompt", RED, "--sampling_option.num_frames", "9")
