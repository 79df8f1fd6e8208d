from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from longtake.contracts import LatentShape, UserError
from longtake.data.clips.video import write_image, write_video
from longtake.diffusion.known import Window
from longtake.diffusion.windows import EndWindows
from longtake.families.opensora_v2 import OPENSORA_V2
from longtake.generate.references import frame_numbers, known_pixels, reference_faults

CAUSAL = LatentShape(4, 4, 8, causal=True)
LAW = EndWindows()


def asked(kind: str, fps: float = 24.0, compat: str | None = None, latent: LatentShape = CAUSAL) -> SimpleNamespace:
    """What references read of a config."""
    quirks, ae = OPENSORA_V2.quirks_of(compat), SimpleNamespace(latent=latent)
    rules = OPENSORA_V2.rules(SimpleNamespace(quirks=quirks))
    return SimpleNamespace(kind=kind, fps_save=fps, quirks=quirks, sample_rules=rules, family=OPENSORA_V2, ae=ae)


def video(path: Path, num_frames: int, fps: float, size: tuple[int, int] = (32, 48)) -> str:
    """A clip whose frame k is grey of 3 k."""
    frames = np.repeat(np.arange(num_frames, dtype=np.uint8) * 3, size[0] * size[1] * 3)
    write_video(path, frames.reshape(num_frames, *size, 3), fps, crf=0)
    return str(path)


def picture(path: Path, height: int, width: int) -> str:
    write_image(path, np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))
    return str(path)


def numbers(path: str, config: SimpleNamespace, num_frames: int = 77) -> list[list[int]]:
    return [frame_numbers(path, w, config).tolist() for w in LAW.windows(config.kind, config.ae.latent, num_frames)]


def test_i2v_takes_the_first_or_last_frame_of_a_video(tmp_path: Path):
    clip = video(tmp_path / "c.mp4", 10, 24)
    found = {kind: numbers(clip, asked(kind)) for kind in ("i2v_head", "i2v_tail", "i2v_loop")}
    assert found == {"i2v_head": [[0]], "i2v_tail": [[9]], "i2v_loop": [[0], [9]]}


def test_v2v_takes_as_many_frames_as_were_known_in_training(tmp_path: Path):
    clip = video(tmp_path / "c.mp4", 80, 24)
    other = LatentShape(4, 4, 8, causal=False)
    assert numbers(clip, asked("v2v_head")) == [list(range(33))]
    assert numbers(clip, asked("v2v_tail_easy")) == [list(range(15, 80))]
    assert numbers(clip, asked("v2v_tail", latent=other), 72) == [list(range(48, 80))]


def test_a_video_is_taken_at_the_models_rate(tmp_path: Path):
    fast, slow, close = (video(tmp_path / f"{fps}.mp4", 80, fps) for fps in (48, 12, 23.976))
    assert numbers(fast, asked("v2v_head")) == [list(range(0, 65, 2))]
    assert numbers(fast, asked("v2v_tail")) == [list(range(15, 80, 2))]
    assert numbers(slow, asked("v2v_head"))[0][:5] == [0, 1, 1, 2, 2]
    assert numbers(close, asked("v2v_head")) == [list(range(33))]
    assert numbers(fast, asked("v2v_head", compat="opensora_v2")) == [list(range(33))]


def test_a_window_may_name_its_reference_and_begin_a_video_with_the_end_of_one(tmp_path: Path):
    first, last = video(tmp_path / "a.mp4", 10, 24), video(tmp_path / "b.mp4", 40, 24)
    window = Window(range(5), range(17), "head5", reference=1, from_end=True)
    assert frame_numbers(last, window, asked("")).tolist() == list(range(23, 40))
    (known,) = known_pixels((first, last), [window], (32, 48), asked(""))
    assert known[0, :, 0, 0].tolist() == pytest.approx([3 * k for k in range(23, 40)], abs=2)
    assert reference_faults((first,), [window], asked("")) == [
        f"ref {first!r}: is 1 of 1 references, and number 2 is needed"
    ]


def test_frames_cover_the_size_and_are_cut_at_the_centre(tmp_path: Path):
    wide = picture(tmp_path / "w.png", 32, 96)
    head = LAW.windows("i2v_head", CAUSAL, 9)
    (known,) = known_pixels((wide,), head, (32, 32), asked("i2v_head"))
    expected = np.asarray(Image.open(wide))[:, 32:64].transpose(2, 0, 1)[:, None]
    assert torch.equal(known, torch.from_numpy(expected.copy()))


def test_a_loop_begins_with_the_first_file_and_ends_with_the_last(tmp_path: Path):
    files = [picture(tmp_path / f"{n}.png", 32, 32 + 16 * n) for n in range(3)]
    head, tail = known_pixels(files, LAW.windows("i2v_loop", CAUSAL, 9), (32, 32), asked("i2v_loop"))
    for known, path in ((head, files[0]), (tail, files[2])):
        (alone,) = known_pixels((path,), LAW.windows("i2v_head", CAUSAL, 9), (32, 32), asked("i2v_head"))
        assert torch.equal(known, alone)


def test_every_fault_of_a_reference_is_a_clause_with_its_file(tmp_path: Path):
    short, still = video(tmp_path / "s.mp4", 40, 48), picture(tmp_path / "p.png", 32, 32)
    text, cut = tmp_path / "t.png", tmp_path / "cut.png"
    text.write_text("no picture")
    cut.write_bytes(Path(still).read_bytes()[:-500])
    cases = {
        (short, "v2v_head"): 'has 40 frames at 48 FPS, and cond_type = "v2v_head" takes 33 at 24 FPS, which are 65',
        (still, "v2v_tail"): 'is a still image, and cond_type = "v2v_tail" takes 33 frames of a video',
        (str(tmp_path / "gone.png"), "i2v_head"): "no such file",
        (str(text), "i2v_tail"): "not a picture",
        (str(cut), "i2v_head"): "cannot be read",
        (str(tmp_path), "i2v_loop"): "is a folder",
    }
    for (path, kind), said in cases.items():
        (fault,) = reference_faults((path,), LAW.windows(kind, CAUSAL, 77), asked(kind))
        assert fault.startswith(f"ref {path!r}: ")
        assert said in fault
    assert not reference_faults((still,), LAW.windows("i2v_loop", CAUSAL, 77), asked("i2v_loop"))


def test_a_file_that_is_gone_by_the_time_it_is_read_is_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"gone\.png'.*no such file"):
        known_pixels((str(tmp_path / "gone.png"),), LAW.windows("i2v_head", CAUSAL, 9), (32, 32), asked("i2v_head"))


def test_a_still_fills_a_masked_window_and_a_second_one_its_last_frame(tmp_path: Path):
    one = picture(tmp_path / "one.png", 32, 48)
    other = video(tmp_path / "other.mp4", 20, 24)
    window = Window(range(5), range(17), "masked", masked=True)
    size, config = (32, 48), asked("t2v")
    (still,) = known_pixels([one], [window], size, config)
    (both,) = known_pixels([one, other], [window], size, config)
    assert still.shape == both.shape == (3, 17, 32, 48)
    assert torch.equal(both[:, :-1], still[:, :1].expand(3, 16, 32, 48))
    assert torch.equal(still[:, -1], still[:, 0])
    assert both[:, -1].float().mean() == pytest.approx(57, abs=2), "its last frame"
