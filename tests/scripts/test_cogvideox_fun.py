"""CogVideoX-Fun's own command lines, as its page writes them; sizes, steps and numbers of processes are of a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from longtake.checkpoint.runs import list_checkpoints
from longtake.cli.app import run
from longtake.data.tables.rows import open_rows
from longtake.dialects.cogvideox_fun import CogVideoXFun
from longtake.system.encoders import device_dtype
from longtake.train.run_file import read_run
from longtake.weights.cogvideox import FORMAT
from longtake.weights.lora import read_adapters
from tests.dialects.fun import ROOT, spoken, write_root
from tests.train.conftest import clips  # a fixture
from tests.train.runs import exact, free_port, metrics

__all__ = ["clips"]

WORDS = (
    '--train_data_dir="" --image_sample_size=32 --video_sample_size=32 --token_sample_size=32 '
    "--video_sample_stride=1 --video_sample_n_frames=9 --train_batch_size=1 --gradient_accumulation_steps=1 "
    "--dataloader_num_workers=0 --num_train_epochs=100 --checkpointing_steps=1 --learning_rate=1e-03 --seed=42 "
    '--output_dir="out" --gradient_checkpointing --adam_weight_decay=3e-2 --adam_epsilon=1e-10 --vae_mini_batch=1 '
    "--max_grad_norm=0.05 --random_hw_adapt --training_with_video_token_length --enable_bucket --low_vram "
    "--video_repeat=1"
)
LORA = '--rank=4 --network_alpha=2 --target_name="to_q,to_k,to_v,ff.0,ff.2" --use_peft_lora --train_mode="inpaint"'
ZERO_2 = (
    "--use_deepspeed --deepspeed_config_file config/zero_stage2_config.json --deepspeed_multinode_launcher standard"
)
FULL_SHARD = (
    "--use_fsdp --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap=CogVideoXBlock "
    '--fsdp_sharding_strategy "FULL_SHARD" --fsdp_state_dict_type=SHARDED_STATE_DICT '
    '--fsdp_backward_prefetch "BACKWARD_PRE" --fsdp_cpu_ram_efficient_loading False'
)
NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="accelerate wants deepspeed installed for this line"
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
@pytest.mark.parametrize("kind", ["--use_deepspeed", "--use_fsdp", "--multi_gpu"])
def test_accelerate_without_a_gpu_asks_for_the_number_of_processes(kind: str, tmp_path: Path) -> None:
    installed = tmp_path / "accelerate"
    installed.write_text('#!/bin/sh\necho "$@"\n')
    installed.chmod(0o755)
    environment = {**os.environ, "PATH": f"{ROOT / 'scripts' / 'bin'}:{tmp_path}:{os.environ['PATH']}"}

    def launch(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["accelerate", "launch", *words], env=environment, capture_output=True, text=True)

    done = launch(kind, "train_lora.py", "--seed=1")
    assert done.returncode == 2
    assert "--num_processes" in done.stderr
    for words in ((kind, "--num_processes", "2", "train_lora.py"), ("--mixed_precision=bf16", "train_lora.py")):
        assert launch(*words).stdout.split() == ["launch", *words]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_root(tmp_path_factory.mktemp("fun"))


@pytest.fixture(scope="module")
def meta(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A list as that page has it, of whole paths, for which `train_data_dir` is empty."""
    table = open_rows(clips, as_text=True)
    rows = [row for batch in table.batches(["path", "text"]) for row in batch.to_pylist()]
    file = tmp_path_factory.mktemp("meta") / "metadata.json"
    paths = [str(clips.parent / row["path"]) for row in rows]
    listed = [
        {"file_path": path, "control_file_path": path, "text": row["text"], "type": "video"}
        for path, row in zip(paths, rows, strict=True)
    ]
    file.write_text(json.dumps(listed))
    return file


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with `scripts` and `config`."""
    for name in ("scripts", "config"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("ACCELERATE", "FSDP"))]:
        monkeypatch.delenv(name)
    return tmp_path


def words(root: Path, meta: Path, more: str) -> list[str]:
    return shlex.split(f"--pretrained_model_name_or_path={root} --train_data_meta={meta} {WORDS} {more}")


def trained(root: Path, meta: Path, more: str, script: str = "train_lora") -> int:
    """A command line in this process; its exit status."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run(["train", *words(root, meta, more), "--device", "cpu"], CogVideoXFun(script))
    finally:
        torch.set_num_threads(threads)


def beside(output: Path) -> list[str]:
    return sorted(path.name for path in output.iterdir() if not path.name.startswith("."))


def files_of(*steps: int) -> list[str]:
    return sorted(f"checkpoint-{step}{end}.safetensors" for step in steps for end in ("", "-compatible_with_comfyui"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "zero", "replicate"),
    [
        ("--multi_gpu", 3, "auto"),
        pytest.param(ZERO_2, 2, 1, marks=NEEDS_DEEPSPEED),
        (FULL_SHARD, 3, 1),
    ],
    ids=["plain", "zero_2", "fsdp"],
)
def test_a_launch_line_of_the_page_trains_on_two_processes(
    launcher: str, zero: int, replicate: int | str, place: Path, root: Path, meta: Path
) -> None:
    pytest.importorskip("accelerate")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision=bf16", "--num_processes", "2"]
    command += [*shlex.split(launcher), "--main_process_port", str(free_port())]
    command += ["scripts/cogvideox_fun/train_lora.py", *words(root, meta, f"{LORA} --max_train_steps=2")]
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=place, env=os.environ | own, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    dtype = str(device_dtype("bf16", torch.device("cpu"))).removeprefix("torch.")  # float32 without its instructions
    assert f"compute in {dtype} on cpu, 2 processes" in done.stdout
    config = read_run(str(place / "out" / "run")).value
    assert (config.parallel.zero, config.parallel.replicate, config.grad_clip) == (zero, replicate, 0.05)
    assert beside(place / "out") == [*files_of(1, 2), "run"]
    assert trained(root, meta, f"{LORA} --max_train_steps=3 --resume_from_checkpoint latest") == 0  # on one process
    assert [line["step"] for line in metrics(place / "out" / "run")] == [1, 2, 3]
    assert beside(place / "out") == [*files_of(1, 2, 3), "run"]


def test_files_of_adapters_lie_where_users_look_and_are_of_the_trained_strength(
    place: Path, root: Path, meta: Path
) -> None:
    assert trained(root, meta, f"{LORA} --max_train_steps=3 --checkpoints_total_limit 2") == 0
    assert beside(place / "out") == [*files_of(2, 3), "run"]
    model = read_run(str(place / "out" / "run")).value.model
    for name in files_of(3):
        adapters = read_adapters(FORMAT, place / "out" / name, model)
        alpha = 2.0 if "comfy" in name else 4.0  # multiplied into B for diffusers
        assert {(adapter.rank, adapter.alpha) for adapter in adapters.values()} == {(4, alpha)}
        assert len(adapters) == 5


@pytest.mark.slow
def test_a_used_folder_is_refused_and_latest_goes_on(
    place: Path, root: Path, meta: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trained(root, meta, f"{LORA} --max_train_steps=4 --output_dir whole") == 0
    assert trained(root, meta, f"{LORA} --max_train_steps=2") == 0
    assert trained(root, meta, f"{LORA} --max_train_steps=4") == 2
    assert "is used: it holds run; write --resume_from_checkpoint latest" in capsys.readouterr().err
    assert trained(root, meta, f"{LORA} --max_train_steps=4 --resume_from_checkpoint latest") == 0
    assert exact(place / "out" / "run") == exact(place / "whole" / "run")
    assert beside(place / "out") == [*files_of(1, 2, 3, 4), "run"]


def test_a_checkpoint_is_taken_by_any_of_its_names(place: Path, root: Path, meta: Path) -> None:
    assert trained(root, meta, f"{LORA} --max_train_steps=2") == 0
    for name in ("checkpoint-1", "out/checkpoint-1.safetensors", "out/run/epoch0-global_step1"):
        more = f"{LORA} --max_train_steps=2 --resume_from_checkpoint {name}"
        config, _ = spoken("train_lora", *words(root, meta, more))
        assert config.load == "out/run/epoch0-global_step1"
    assert trained(root, meta, more) == 0
    assert [info.step for info in list_checkpoints(place / "out" / "run-2")] == [2]
    assert exact(place / "out" / "run-2") == exact(place / "out" / "run")[1:]


def test_a_branch_of_a_run_leaves_the_files_of_the_first_as_they_are(place: Path, root: Path, meta: Path) -> None:
    assert trained(root, meta, f"{LORA} --max_train_steps=3") == 0
    first = {name: (place / "out" / name).read_bytes() for name in files_of(1, 2, 3)}
    branch = "--learning_rate=1e-02 --checkpoints_total_limit 1 --max_train_steps=3 --resume_from_checkpoint"
    assert trained(root, meta, f"{LORA} {branch} checkpoint-1") == 0
    assert {name: (place / "out" / name).read_bytes() for name in first} == first
    own = {name.replace("checkpoint-3", "checkpoint-3-run-2"): name for name in files_of(3)}
    assert beside(place / "out") == sorted([*first, *own, "run", "run-2"])
    assert all((place / "out" / name).read_bytes() != first[other] for name, other in own.items())
    assert trained(root, meta, f"{LORA} {branch} checkpoint-3-run-2.safetensors --max_train_steps=4") == 0
    assert [info.step for info in list_checkpoints(place / "out" / "run-2")] == [4]


def test_whole_weights_train_and_go_on(place: Path, root: Path, meta: Path) -> None:
    more = '--trainable_modules "." --trainable_modules_low_learning_rate "attn" --train_mode normal --use_ema'
    assert trained(root, meta, f"{more} --max_train_steps=2 --output_dir whole", "train") == 0
    assert trained(root, meta, f"{more} --max_train_steps=1", "train") == 0
    assert trained(root, meta, f"{more} --max_train_steps=2 --resume_from_checkpoint latest", "train") == 0
    assert exact(place / "out" / "run") == exact(place / "whole" / "run")


@pytest.mark.slow
def test_a_control_model_trains_from_text_to_video_weights(
    place: Path, meta: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = write_root(place / "base", None)
    more = '--trainable_modules "." --max_train_steps=1 --validation_prompts "a red circle" --validation_steps=1'
    assert trained(base, meta, more, "train_control") == 2
    assert "has no control video" in capsys.readouterr().err
    video = json.loads(meta.read_text())[0]["file_path"]
    assert trained(base, meta, f"{more} --validation_paths {video}", "train_control") == 0
    assert list((place / "out" / "run" / "validation").rglob("*.mp4"))
    config = read_run(str(place / "out" / "run")).value
    assert (config.model.visual, config.model.positions, config.optim.clip.steps) == ("control", "fun", 1000)


@pytest.mark.slow
def test_videos_are_made_of_the_prompts_while_a_run_trains(place: Path, root: Path, meta: Path) -> None:
    Image.new("RGB", (32, 32), (200, 30, 30)).save(place / "start.png")
    more = '--max_train_steps=1 --validation_steps=1 --validation_prompts "a red circle" "a circle"'
    assert trained(root, meta, f"{LORA} {more} --validation_paths start.png start.png") == 0
    made = place / "out" / "run" / "validation" / "step000001"
    assert len(list(made.rglob("*.mp4"))) == 2
