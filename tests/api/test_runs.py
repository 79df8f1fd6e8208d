"""`Run`: keys, plans, training that leaves its process as it was, own objectives, generation with frames."""

from __future__ import annotations

import gc
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import longtake
from longtake.checkpoint.state import RunState
from longtake.data.clips.video import read_frames, read_image
from longtake.train.custom_objective import describe_objective
from tests.api.objectives import Failing, Huber


def process_state() -> dict[str, Any]:
    """What a training changes in its process and has to restore."""
    return {
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "collects": gc.isenabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "tf32": torch.backends.cudnn.allow_tf32,
        "group": dist.is_initialized(),
        "variables": dict(os.environ),
    }


def losses(run: longtake.Run) -> list[float]:
    lines = (Path(run.source) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def test_set_reaches_nested_keys_and_leaves_the_run_as_it_was(run: longtake.Run) -> None:
    changed = run.set({"dataset.cache_mb": 8, "objective.shift": None, "wandb": False}, exp_name="its 'name'")
    assert (changed.config.dataset.cache_mb, changed.config.exp_name) == (8, "its 'name'")
    assert run.config.exp_name == "tiny"


def test_settle_gives_every_key_with_its_origin(run: longtake.Run) -> None:
    rows = {row.key: row for row in run.set(lr=0.5).settle()}
    assert (rows["lr"].value, rows["lr"].origin) == (0.5, "--lr")
    assert rows["seed"].origin.endswith("tiny.py:3")
    assert rows["grad_clip"].origin == "default"


def test_error_of_a_wrong_value_has_place_found_expected_and_fix(run: longtake.Run) -> None:
    with pytest.raises(longtake.Error) as raised:
        _ = run.set(lr="fast", max_steps=-1).config
    assert (raised.value.place, raised.value.found) == ("lr", '"fast"')
    assert "number" in raised.value.expected
    assert "max_steps" in str(raised.value)
    with pytest.raises(longtake.Error) as raised:
        longtake.Run.preset("demo/shape")
    assert raised.value.place == "demo/shape"
    assert raised.value.fix == "write demo/shapes"
    with pytest.raises(longtake.Error, match="object"):
        run.set(lr=object())


def test_plan_of_a_tiny_run_fits_and_its_figures_are_those_of_the_json(run: longtake.Run) -> None:
    plan = run.plan(gpus=2, gpu="h200")
    data = plan.to_json()
    assert plan.fits
    assert plan.remedies == ()
    assert (data["gpus"], data["stage"]["step_seconds"]) == (2, plan.step_seconds)
    assert 0 < plan.memory_gib < 1
    assert "h200" in str(plan).lower()


@pytest.mark.slow
def test_plan_of_a_preset_forecasts_its_gpus_and_a_smaller_gpu_gets_remedies() -> None:
    run = longtake.Run.preset("opensora_v2/stage1")
    plan = run.plan(gpus=8, gpu="h200")
    assert plan.fits
    assert plan.remedies == ()
    assert 0 < plan.memory_gib < 141
    assert plan.to_json()["gpus"] == 8
    tight = run.plan(gpus=8, gpu="4090")
    assert not tight.fits
    with pytest.raises(longtake.Error):
        tight.check()


def test_two_trainings_in_a_process_leave_it_as_it_was(run: longtake.Run) -> None:
    before = process_state()
    first = run.set(max_steps=2, cpu_threads=1, deterministic=True).train()
    assert process_state() == before
    second = run.set(max_steps=2, cpu_threads=1, deterministic=True).train()
    assert process_state() == before
    assert first.source != second.source
    assert losses(first) == losses(second)
    assert first.checkpoint is not None
    assert first.checkpoint.name.endswith("step2")


def test_exception_of_an_objective_passes_unchanged_and_names_the_last_checkpoint(run: longtake.Run) -> None:
    before = process_state()
    Failing.calls = 0
    with pytest.raises(KeyError) as raised:
        run.set(max_steps=4, ckpt_every=1, cpu_threads=1).train(objective=Failing)
    assert raised.value is Failing.error
    (folder,) = Path(run.config.outputs).iterdir()
    checkpoint = longtake.Run.load(folder).checkpoint
    assert raised.value.__notes__ == [f"last checkpoint of the run: {checkpoint}"]
    assert process_state() == before


def test_training_with_a_process_group_of_the_user_is_refused_and_leaves_it(run: longtake.Run) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(longtake.Error, match="destroy_process_group"):
            run.train()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
    assert not Path(run.config.outputs).exists()


def test_own_objective_is_recorded_and_its_resume_needs_it(run: longtake.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run.set(max_steps=2).train()
    own = run.set(max_steps=2).train(objective=Huber)
    assert losses(own) != losses(plain)
    assert own.checkpoint is not None
    saved = RunState.read(own.checkpoint).objective
    assert saved is not None
    assert saved.name == "tests.api.objectives.Huber"
    for other in (None, Failing):
        with pytest.raises(longtake.Error, match=r"expected tests\.api\.objectives\.Huber"):
            own.set(max_steps=3).train(objective=other)
    with pytest.raises(longtake.Error, match="that of the config"):
        plain.set(max_steps=3).train(objective=Huber)
    assert losses(own.set(max_steps=3).train(objective=Huber))[:2] == losses(own)[:2]
    monkeypatch.setattr("inspect.getsource", lambda of: "another source")
    with pytest.raises(longtake.Error, match="with another source"):
        own.set(max_steps=4).train(objective=Huber)


@pytest.mark.parametrize("objective", [longtake.Run, len, longtake.Run.train])
def test_objective_of_another_kind_is_refused_before_a_folder_is_made(run: longtake.Run, objective: Any) -> None:
    with pytest.raises(longtake.Error, match="Objective"):
        run.train(objective=objective)
    assert not Path(run.config.outputs).exists()


def test_generate_gives_the_frames_of_its_files(run: longtake.Run, tmp_path: Path) -> None:
    trained = run.set(max_steps=1).train()
    before = process_state()
    values = {"sampling_option.num_frames": 8, "sampling_option.num_steps": 2, "batch_size": 2}
    videos = trained.generate(["a red square", "a blue circle", "a dot"], values, save_dir=str(tmp_path / "made"))
    assert process_state() == before
    assert [video.prompt for video in videos] == ["a red square", "a blue circle", "a dot"]
    for video in videos:
        assert video.frames.dtype == torch.uint8
        assert video.frames.shape == read_frames(video.path).shape
    assert not torch.equal(videos[0].frames, videos[1].frames)
    (image,) = trained.generate("a dot", values | {"sampling_option.num_frames": 1}, save_dir=str(tmp_path / "made"))
    assert torch.equal(image.frames[0], torch.from_numpy(read_image(image.path))[0])


def test_generate_of_an_unknown_key_writes_nothing(run: longtake.Run, tmp_path: Path) -> None:
    trained = run.set(max_steps=1).train()
    with pytest.raises(longtake.Error, match="num_stepz"):
        trained.generate("a dot", {"sampling_option.num_stepz": 2}, save_dir=str(tmp_path / "made"))
    assert not (tmp_path / "made").exists()


def test_own_objective_of_a_run_with_two_denoisers_is_refused(run: longtake.Run) -> None:
    config = run.config.model_copy(update={"low_noise": object()})
    with pytest.raises(longtake.Error, match="low_noise"):
        describe_objective(Huber, config)
