"""TTT-Video's own command lines, as its scripts write them; sizes, steps and numbers of processes are of a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from longtake.cli.app import run
from longtake.dialects.ttt_video import TTTVideoDialect
from longtake.generate.run import read_video
from longtake.system.export import exported_tree
from longtake.weights.files import open_source
from tests.generate.test_published_pipeline import write_pipeline
from tests.hub_server import hub_of
from tests.train.runs import metrics, steps_saved

ROOT = Path(__file__).resolve().parents[2]
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # where the scripts find python and torchrun
SEGMENTS, FRAMES, SIDE, TOKENS, WIDTH, CHANNELS = 2, 17, 8, 16, 64, 192  # of --tiny, latents and their texts


@pytest.fixture(scope="module")
def listed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A list of embedded clips at the sizes of --tiny, and the embedding of the empty prompt."""
    folder, lines = tmp_path_factory.mktemp("embedded"), []
    numbers = torch.Generator().manual_seed(0)
    for clip in range(4):
        torch.save(torch.randn(FRAMES, 2 * CHANNELS, SIDE, SIDE, generator=numbers).bfloat16(), folder / f"{clip}.pt")
        texts = [f"{clip}_{segment}.pt" for segment in range(SEGMENTS)]
        for name in texts:
            torch.save(torch.randn(TOKENS, WIDTH, generator=numbers).bfloat16(), folder / name)
        lines.append(json.dumps({"vid_emb": f"{clip}.pt", "text_chunk_emb": texts}))
    torch.save(torch.zeros(TOKENS, WIDTH).bfloat16(), folder / "empty.pt")
    (folder / "clips.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def words(listed: Path, folder: Path, *more: str) -> list[str]:
    own = ["--job.config_file", "configs/train/ttt-mlp/9s.toml", "--training.jsonl_paths", str(listed / "clips.jsonl")]
    own += ["--training.empty_prompt", str(listed / "empty.pt"), f"--job.dump_folder={folder}", "--wandb.disable"]
    own += ["--job.exp_name=story", "--training.global_batch_size=2", "--checkpoint.interval=2", "--num-workers", "0"]
    return ["--tiny", *own, *more]


def test_it_trains_goes_on_and_makes_a_video(
    listed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    flags = words(listed, tmp_path, "--checkpoint.resume")
    assert run(["train", *flags, "--training.steps=2"], TTTVideoDialect()) == 0
    assert run(["train", *flags, "--training.steps=4"], TTTVideoDialect()) == 0
    assert [line["step"] for line in metrics(tmp_path / "story")] == [1, 2, 3, 4]
    assert steps_saved(tmp_path / "story") == [2, 4]
    story = [{"text": "a boat leaves", "neg_text": "blurry"}, {"text": "it rains", "requires_scene_transition": True}]
    (tmp_path / "story.json").write_text(json.dumps([story]))
    asked = ["--tiny", "--job.config_file", "configs/eval/ttt-mlp/9s.toml", "--job.exp_name=made", "--wandb.disable"]
    asked += ["--eval.input_file", str(tmp_path / "story.json"), f"--eval.output_dir={tmp_path}"]
    asked += [f"--checkpoint.init_state_dir={tmp_path / 'story'}", "--eval.num_denoising_steps=2", "--wandb.alert"]
    assert run(["generate", *asked], TTTVideoDialect()) == 0, capfd.readouterr().err
    (video,) = (tmp_path / "made").rglob("*.mp4")
    assert len(read_video(video)) == FRAMES


def test_published_keys_alone_train(
    listed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Neither T5 nor the embedding of the empty prompt: lists of embedded clips need none of the two."""
    monkeypatch.chdir(ROOT)
    flags = words(listed, tmp_path, "--training.steps=1", f"--training.dataset_path={listed}")
    at = flags.index("--training.empty_prompt")
    assert run(["train", *flags[:at], *flags[at + 2 :]], TTTVideoDialect()) == 0, capfd.readouterr().err
    assert [line["step"] for line in metrics(tmp_path / "story")] == [1]


@pytest.mark.slow
def test_the_script_of_one_machine_runs_as_it_is_written(listed: Path, tmp_path: Path) -> None:
    """Two processes on a CPU; what the script leaves to its user is given behind it, and in the environment."""
    environment = {
        **os.environ,
        "PATH": PATH,
        "NUM_GPUS": "2",
        "EXP_NAME": "mine",
        "CONFIG_FILE": "./configs/train/ttt-mlp/9s.toml",
    }
    flags = ["--tiny", "--training.jsonl_paths", str(listed / "clips.jsonl"), f"--job.dump_folder={tmp_path}"]
    flags += ["--training.empty_prompt", str(listed / "empty.pt"), "--training.steps=2", "--num-workers", "0"]
    command = ["bash", str(ROOT / "scripts" / "train_singlenode.sh"), *flags]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line["step"] for line in metrics(tmp_path / "mine")] == [1, 2]
    assert (tmp_path / "mine" / "run.json").exists() or steps_saved(tmp_path / "mine") == [2]


@pytest.mark.slow
def test_weights_are_converted_from_the_hub_by_the_published_script(tmp_path: Path) -> None:
    """CogVideoX's own tensors stay what they are, TTT-Video's begin, and the folder knows its scale of latents."""
    write_pipeline(tmp_path, "CogVideoXPipeline", {"scaling_factor": 0.7}, in_channels=4)
    with hub_of({"THUDM/CogVideoX-5b": tmp_path / "published"}) as address:
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        environment |= {
            "PATH": PATH,
            "HF_ENDPOINT": address,
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": "1",
        }
        environment |= {"FINAL_SAVE_PATH": str(tmp_path / "weights"), "SSM_TYPE": "ttt_linear"}
        command = ["bash", str(ROOT / "scripts" / "convert_weights_from_hf.sh")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert again.returncode != 0
    assert "is there already" in again.stderr
    before, after = open_source(tmp_path / "published"), open_source(tmp_path / "weights")
    same = {name for name in before if name in after and before.shape(name) == after.shape(name)}
    assert len(same) >= 20  # the others have names of ours
    assert all(torch.equal(before[name], after[name]) for name in same)
    assert any(".ttt." in name for name in after)
    tree = exported_tree(tmp_path / "weights")
    assert (tree["model"]["mixer"], tree["ae"]["scale_factor"]) == ("ttt_linear", 0.7)
