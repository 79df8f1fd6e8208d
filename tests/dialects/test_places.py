from __future__ import annotations

from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.dialects.opensora_v2 import OpenSora
from longtake.presets import FOLDER
from tests.dialects.speech import ROOT, Heard, refusal, training, write

TRAIN = ("image", "stage1", "stage2", "stage1_i2v", "stage2_i2v", "demo")
INFERENCE = ("256px", "768px", "t2i2v_256px", "t2i2v_768px")


def found(run: str, *flags: str, verb: str = "train") -> tuple[list[str], Heard]:
    heard = Heard()
    return OpenSora(heard.lines.append).command([verb, run, *flags])[1:], heard


@pytest.mark.parametrize("here", ["repository", "elsewhere"])
@pytest.mark.parametrize(
    ("folder", "name"), [*(("train", name) for name in TRAIN), *(("inference", name) for name in INFERENCE)]
)
def test_an_old_path_is_found_in_its_new_place(
    folder: str, name: str, here: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT if here == "repository" else tmp_path)
    (run,), heard = found(f"configs/diffusion/{folder}/{name}.py")
    assert Path(run).resolve() == FOLDER / "opensora_v2" / folder / f"{name}.py"
    assert Path(run).is_absolute() == (here == "elsewhere")
    assert heard.lines == [f"configs/diffusion/{folder}/{name}.py: read as {run}"]


def test_a_file_of_ones_own_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "diffusion" / "train").mkdir(parents=True)
    write(tmp_path / "configs" / "diffusion" / "train", "lr = 1", "stage1")
    assert found("configs/diffusion/train/stage1.py") == (["configs/diffusion/train/stage1.py"], Heard())
    assert found("outputs/run")[0] == ["outputs/run"]


def test_a_file_of_ones_own_may_have_an_old_file_as_its_base(tmp_path: Path) -> None:
    folder = tmp_path / "configs" / "diffusion" / "train"
    folder.mkdir(parents=True)
    text = "_base_ = ['image.py']\nplugin_config = dict(sp_size=2)\nlr = 3e-5\noptim = dict(cls='HybridAdam', lr=lr)"
    config, _ = training(write(folder, text))
    assert (config.parallel.sequence, config.optim.lr, config.ae.type) == (2, 3e-5, "hunyuan_vae")
    up = write(tmp_path, "_base_ = 'configs/diffusion/train/../train/stage2.py'")
    assert training(up)[0].parallel.sequence == 4
    assert "which does not exist" in refusal(training, write(folder, "_base_ = 'images.py'"))


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("configs/diffusion/train/high_compression.py", "high-compression autoencoder.*choose stage1_i2v.py"),
        ("configs/diffusion/inference/high_compression.py", "high-compression autoencoder.*choose t2i2v_768px.py"),
        ("configs/diffusion/inference/plugins/sp.py", "is a part of run files"),
        ("configs/vae/train/video_dc_ae.py", "trains an autoencoder"),
        ("configs/diffusion/train/stage9.py", "has no stage9.py; there are curriculum.py, demo.py"),
    ],
)
def test_a_file_that_is_not_here_is_refused_in_a_sentence(run: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        found(run)


def test_tensor_peers_of_an_old_file_are_as_many_as_the_processes_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    (run, *flags), _ = found("configs/diffusion/inference/256px_tp.py", "--prompt", "sea", verb="generate")
    assert Path(run).name == "256px.py"
    assert flags == ["--parallel.tensor", "4", "--prompt", "sea"]


def test_of_several_checkpoints_that_a_shell_has_put_the_newest_counts() -> None:
    folders = [f"outputs/run/epoch{epoch}-global_step{step}" for epoch, step in ((0, 900), (0, 1000), (1, 950))]
    for flag in ("--load", "--model.from_pretrained", "--model.from-pretrained", "--ckpt-path"):
        (_, *flags), heard = found("x.py", flag, *folders, "--start-step", "0")
        assert flags == [flag, folders[1], "--start-step", "0"]
        assert heard.lines == [f"{flag}: {folders[1]}, the newest of 3"]
    assert found("x.py", "--load", *folders[:1], "--wandb")[0] == ["x.py", "--load", folders[0], "--wandb"]
    assert found("x.py", "--prompt", "a", "b")[0] == ["x.py", "--prompt", "a", "b"]  # a mistake, and said as such


def test_the_weights_of_an_old_checkpoint_are_below_it(tmp_path: Path) -> None:
    for step in (900, 1000):
        old = tmp_path / "run" / f"epoch0-global_step{step}"
        (old / "model").mkdir(parents=True)
        (old / "running_states.json").write_text("{}")
    config, heard = training("configs/diffusion/train/stage1.py", "--model.from_pretrained", f"{tmp_path}/run/epoch*")
    assert config.model.from_pretrained == str(old / "model")
    assert str(old / "model") in heard.of("model.from_pretrained")
    said = refusal(training, "configs/diffusion/train/stage1.py", "--load", f"{tmp_path}/run/epoch0-global_step900")
    assert "states are of another program; start from its weights: --model.from_pretrained" in said


def test_text_encoders_that_were_downloaded_with_the_weights_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpts" / "google" / "t5-v1_1-xxl").mkdir(parents=True)
    config, heard = training("configs/diffusion/train/stage1.py")
    assert config.t5.from_pretrained == "ckpts/google/t5-v1_1-xxl"
    assert config.clip.from_pretrained == "openai/clip-vit-large-patch14"
    assert "found in ckpts/google/t5-v1_1-xxl" in heard.of("t5.from_pretrained")
    assert training("configs/diffusion/train/stage1.py", "--tiny")[0].t5.type == "words"


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_paths_of_an_old_table_start_from_the_working_directory(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("videos", "tables"):
        (tmp_path / folder).mkdir()
    (tmp_path / "videos" / "a.mp4").write_bytes(b"")
    table = tmp_path / "tables" / f"clips.{suffix}"

    def root(path: str) -> str | None:
        if suffix == "csv":
            table.write_text(f"path,text\n{path},a cat\n")
        else:
            import pyarrow as pa
            from pyarrow import parquet

            parquet.write_table(pa.table({"path": [path], "text": ["a cat"]}), table)
        return training("configs/diffusion/train/stage1.py", "--dataset.data-path", f"tables/clips.{suffix}")[
            0
        ].dataset.root

    assert root("videos/a.mp4") == str(tmp_path)
    assert root("../videos/a.mp4") is None
    assert root(str(tmp_path / "videos" / "a.mp4")) is None
    assert root("nowhere.mp4") is None
