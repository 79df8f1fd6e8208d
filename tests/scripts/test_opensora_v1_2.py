"""Open-Sora 1.2's own command lines, at the sizes of `--tiny`."""

from __future__ import annotations

from pathlib import Path

import pytest

from longtake.cli.app import run
from longtake.dialects.opensora_v1_2 import OpenSoraV12
from longtake.presets import find_preset
from longtake.train.run_file import read_run
from tests.dialects.test_v1_2_words import old_file
from tests.families.test_opensora_v1_2_folder import write_folder
from tests.train.conftest import clips  # a fixture
from tests.train.runs import metrics, steps_saved

__all__ = ["clips"]

HERE = ["--tiny", "--device", "cpu", "--num-workers", "0"]


@pytest.mark.slow
def test_a_stage_trains_hands_its_weights_to_a_file_of_ones_own_and_makes_videos(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stage = ["configs/opensora-v1-2/lambda/stage1.py", "--data-path", str(clips)]
    pixart = ["--ckpt-path", "ckpts/PixArt-Sigma-XL-2-2K-MS.pth"]
    assert run(["train", *stage, *pixart, *HERE, "--max-steps", "2"], OpenSoraV12()) == 0, capfd.readouterr().err
    first = "outputs_speedrun/001-STDiT3-XL-2"
    assert steps_saved(tmp_path / first) == [2]
    own = tmp_path / "configs" / "opensora-v1-2" / "lambda" / "stage2.py"
    own.parent.mkdir(parents=True)
    own.write_text(old_file("lambda_2") + 'exp_name = "mine"\n')
    stage = [str(own.relative_to(tmp_path)), "--data-path", str(clips), "--ckpt-path", first]
    assert run(["train", *stage, *HERE, "--max-steps", "1"], OpenSoraV12()) == 0, capfd.readouterr().err
    assert [line["step"] for line in metrics(tmp_path / "outputs" / "mine")][-1:] == [1]
    model = read_run(str(tmp_path / "outputs" / "mine" / "config.py")).value.model
    assert (model.from_pretrained, model.from_part) == (first, "model")
    again = ["--load", "outputs/mine", "--start-from-scratch", "--outputs", "again", "--data-path", str(clips)]
    assert run(["train", stage[0], *again, *HERE, "--max-steps", "2"], OpenSoraV12()) == 0, capfd.readouterr().err
    assert steps_saved(tmp_path / "again" / "mine") == [2]
    model = read_run(str(tmp_path / "again" / "mine" / "config.py")).value.model  # what does not train is of there too
    assert (model.from_pretrained, model.from_part) == ("outputs/mine", "model")
    asked = ["--prompt", "a red circle", "a blue square", "--ckpt-path", first, "--num-frames", "4s"]
    asked += ["--reference-path", "", str(next(clips.parent.rglob("*.mp4"))), "--mask-strategy", "", "0,0,0,0,2"]
    asked += ["--save-dir", "videos", "--sample-name", "mine", "--num-sampling-steps", "2", "--verbose", "2"]
    asked += ["--num-frames", "17", "--resolution", "32x32", "--aspect-ratio", "1:1"]
    place = "configs/opensora-v1-2/inference/sample.py"
    assert run(["generate", place, *asked, "--tiny", "--device", "cpu"], OpenSoraV12()) == 0, capfd.readouterr().err
    assert len(list((tmp_path / "videos").rglob("mine_*.mp4"))) == 2


def test_batch_sizes_are_searched_in_its_own_words(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["configs/opensora-v1-2/misc/bs.py", "--data-path", str(clips), "--resolution", "144p"]
    done = run(["plan", *words, *HERE, "--target-step-seconds", "0.3"], OpenSoraV12())
    said, complained = capfd.readouterr()
    assert done == 0, complained
    assert "for steps of at most 0.3 s, measured batch sizes:\nbucket_config = " in said
    assert "--resolution 144p: --tiny has resolutions of its own" in complained
    assert list(tmp_path.iterdir()) == []


def test_a_stage_goes_on_from_a_checkpoint_of_the_old_program(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stage = ["configs/opensora-v1-2/lambda/stage2.py", "--data-path", str(clips)]
    preset, data = str(find_preset("opensora_v1_2/lambda_2")), ("--dataset.data-path", str(clips))
    old = write_folder(Path("009-STDiT3-XL-2", "epoch1-global_step37"), read_run(preset, ["--tiny", *data]).value.model)
    load = ["--load", str(old), *HERE, "--max-steps", "38"]
    assert run(["train", *stage, *load], OpenSoraV12()) == 0, capfd.readouterr().err
    load[1] = str(old.parent)
    assert run(["train", *stage, *load, "--start-from-scratch"], OpenSoraV12()) == 0, capfd.readouterr().err
    saved = sorted("/".join(path.parts[1:]) for path in Path("outputs_speedrun").glob("*/epoch*"))
    runs = "001-STDiT3-XL-2/epoch2-global_step38", "002-STDiT3-XL-2/epoch0-global_step38"
    assert saved == list(runs)  # 6 micro-batches are more than pass 1 has here
