"""What rows of a table of prompts ask of the family with everything: masks, strengths, edits, chains of clips."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from longtake.contracts import UserError
from longtake.data.clips.transforms import resize_crop
from longtake.data.clips.video import read_frames, write_image, write_video
from longtake.generate import run as running
from longtake.generate.checks import check_request
from longtake.generate.run import generate, open_system
from longtake.generate.source import resolve_source
from longtake.parallel.world import start_world
from tests.families.runs import SIZES, registered
from tests.families.test_known import SHAPE, clean_of, run, video_of
from tests.train.conftest import clips
from tests.train.runs import train_here

__all__ = ["clips", "registered", "run"]


def files(folder: Path) -> None:
    """A video, and a mask whose left half is to be made."""
    pixels = video_of(2).permute(1, 2, 3, 0).numpy()
    write_video(folder / "clip.mp4", pixels, 24)
    mask = np.zeros((32, 32, 3), np.uint8)
    mask[:, :16] = 255
    write_image(folder / "mask.png", mask)


def latents_of(frames: np.ndarray) -> Tensor:
    """Of uint8 [T, H, W, 3], without the first, which the autoencoder does not give back."""
    return clean_of(torch.from_numpy(frames).permute(3, 0, 1, 2))[:, 1:]


def made_by(table: str, run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[np.ndarray]:
    files(folder)
    (folder / "t.csv").write_text(table)
    written: list[np.ndarray] = []

    @contextmanager
    def writer(path: Path, size: tuple[int, ...], fps: float) -> Iterator[Callable[[np.ndarray], None]]:
        parts: list[np.ndarray] = []
        yield parts.append
        written.append(np.concatenate(parts))

    monkeypatch.setattr(running, "video_writer", writer)
    size = ("--resolution", "32px", "--aspect-ratio", "1:1", "--num-frames", "17", "--num-steps", "3")
    words = (*words, "--prompts", str(folder / "t.csv"), "--save-dir", str(folder / "made"), *size)
    source = resolve_source(str(run), words)
    with start_world("cpu") as world:
        generate(open_system(source, world), source.config, world)
    return written


def test_rows_of_a_table_ask_for_masks_strengths_and_further_clips(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = train_here(run, "--max_steps", "1")[0].folder
    table = "text,ref,mask,strength,edit_ratio,carries\na sea,clip.mp4,mask.png,,,\na storm,,,,0.5,first\n"
    table += "a shore,clip.mp4,,0,,\na lake,clip.mp4,mask.png,,0.9,\n"
    chain, same, edited_late = made_by(table, folder, tmp_path, monkeypatch, "--cond-type", "inpaint")
    given = resize_crop(read_frames(tmp_path / "clip.mp4"), SHAPE[1:]).permute(1, 2, 3, 0).numpy()
    changed = {
        name: (latents_of(frames) - latents_of(given)).abs().amax((0, 1, 2))
        for name, frames in {"same": same, "chain": chain[:17], "late": edited_late}.items()
    }
    assert changed["same"].max() < 1 / 127, "it begins without noise"
    assert changed["chain"][2:].max() < 1 / 127, "the right half is given"
    assert changed["chain"][:2].min() > 0.05
    assert changed["late"].min() > 0.05, "it is made anew from 0.9 on"
    assert len(chain) == 17 + 16
    texts = [path.read_text() for path in (tmp_path / "made").rglob("*.txt")]
    assert sorted(texts) == ["a lake\n", "a sea\na storm\n", "a shore\n"]


@pytest.mark.parametrize(
    ("kind", "row", "said"),
    [
        ("inpaint", "x,clip.mp4,,,,first", "carries stands in row 1, which has no video above it"),
        ("inpaint", "x,clip.mp4,,,,\ny,clip.mp4,,,,first", "ref is given in row 2, which carries on the video above"),
        (
            "inpaint",
            "x,clip.mp4,,,,\ny,,,,,last",
            'carries = "last": choose one of none, box, first, edit, inpaint in row 2',
        ),
        ("inpaint", "x,clip.mp4,,,2,", "edit_ratio in row 1 is '2', not a number from 0 to 1"),
        ("still", "x,,,,,\ny,,,,,none", 'carries = "none": a still has no further clips in row 2'),
        ("inpaint", "x,clip.mp4,none.png,,,", "none.png': "),
        ("edit", "x,clip.mp4,mask.png,,,", 'mask.png\': cond_type = "edit" takes none in row 1'),
        ("none", "x,,,0.5,,", "strength = 0.5: there is no ref to begin from in row 1"),
    ],
)
def test_what_a_row_cannot_have_is_said_before_a_model_is_built(
    run: Path, tmp_path: Path, kind: str, row: str, said: str
) -> None:
    files(tmp_path)
    (tmp_path / "t.csv").write_text(f"text,ref,mask,strength,edit_ratio,carries\n{row}\n")
    parts = "".join(
        f"{key} = {value!r}\n" for key, value in SIZES["everything"].items() if key in ("model", "objective", "ae")
    )
    (tmp_path / "gen.py").write_text(parts + 't5 = dict(type="words", dim=16)\n')
    words = (
        "--prompts",
        str(tmp_path / "t.csv"),
        *(("--num-frames", "1") if kind == "still" else ("--cond-type", kind, "--num-frames", "17")),
    )
    with pytest.raises(UserError) as refused:
        check_request(resolve_source(str(tmp_path / "gen.py"), words).config)
    assert said in str(refused.value)
