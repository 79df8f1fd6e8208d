"""Four optimiser steps of TTT-Video's own program, in `sft` and in `qkvo`: losses, norms, rates and parameters."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from torch import nn

from longtake.contracts import Conditions
from longtake.diffusion.config import VPredictionConfig
from longtake.diffusion.v_prediction import VPrediction
from longtake.models.lora import frozen_names
from longtake.presets import find_preset
from longtake.train.config import RunWithoutTable
from longtake.train.optimizer.sharded import ShardedAdamW, clip_scale
from longtake.train.run_file import read_run
from longtake.weights.ttt_video import FORMAT
from tests.models.golden_ttt_video import FOLDER, golden, golden_model


def published_names(model: nn.Module) -> dict[str, str]:
    """Name in the reference's files -> ours; of those whose rows stay together."""
    namings = FORMAT.namings
    parts = {name: namings["own"].parts_of(name) for name, _ in model.named_parameters()}
    return {f"dit.{namings['published'].place_of(of[0])[0]}": name for name, of in parts.items()}


@pytest.mark.parametrize(("case", "preset"), [("linear.sft", "ttt_mlp/3s"), ("mlp.qkvo", "ttt_linear/3s")])
def test_steps_equal_the_published_ones(case: str, preset: str) -> None:
    """The presets' groups and patterns, at the rates of the golden run."""
    with safe_open(FOLDER / "train_steps.safetensors", "pt") as file:
        info = json.loads(file.metadata()["info"])[case]
    tensors, model = golden("train_steps"), golden_model(case.split(".")[0])
    run = read_run(str(find_preset(f"ttt_video/{preset}")), [], RunWithoutTable).value
    ends, warmup = (info["steps"], info["lr_end"]), info["warmup"]
    rates = {
        name: ((0, info[peak] / warmup), (warmup - 1, info[peak]), (warmup, info[peak], info[shape]), ends)
        for name, peak, shape in (("ttt", "lr_ssm", "lr_ssm_schedule"), ("other", "lr", "lr_schedule"))
    }
    groups = [one.model_copy(update={"schedule": rates[one.name.split("_")[0]]}) for one in run.optim.groups]
    run = run.model_copy(update={"optim": run.optim.model_copy(update={"groups": tuple(groups)})})
    if run.train_only is not None:
        for name in frozen_names(model, (), run.train_only):
            model.get_parameter(name).requires_grad_(False)
    assert (run.train_only is None) == (info["adapter_method"] == "sft")
    names = published_names(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer, objective = ShardedAdamW(model, run), VPrediction(VPredictionConfig(), patch_size=2)
    clean, text = tensors[f"{case}.video"].transpose(1, 2), Conditions(text=tensors[f"{case}.text"])
    for step, logged in enumerate(info["log"]):
        drawn = {"noise": tensors[f"{case}.noises"][step].transpose(1, 2), "timestep": torch.tensor(logged["idx"])}
        noised = objective.noise(clean, drawn)
        loss = objective.loss(model(noised.x, noised.t, text), noised).mean()
        loss.backward()
        norm = optimizer.grad_square_sum().sqrt()
        assert loss.item() == pytest.approx(logged["loss"], rel=1e-4)
        assert norm.item() == pytest.approx(logged["grad_norm_before_clip"], rel=1e-4)
        now = {name: rate for name, rate in optimizer.rates(step).items() if name in logged["lr"]}
        assert now == pytest.approx(logged["lr"])
        optimizer.step(optimizer.rates(step), clip_scale(norm, run.grad_clip))
    assert {names[name] for name in info["norm_of_change"]} == set(optimizer.parameters)
    for theirs, change in info["norm_of_change"].items():
        found = (model.get_parameter(names[theirs]) - before[names[theirs]]).norm().item()
        assert found == pytest.approx(change, rel=1e-3, abs=1e-6), theirs
    for theirs in (name for name in tensors if name.startswith(f"{case}.after.")):
        own = model.get_parameter(names[theirs.removeprefix(f"{case}.after.")])
        torch.testing.assert_close(own.data.view(tensors[theirs].shape), tensors[theirs], rtol=0, atol=5e-5)
