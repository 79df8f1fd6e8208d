"""A system from its config: what it is made of, how it embeds and encodes, what does not fit together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longtake.config.load import resolve
from longtake.contracts import Batch, Bucket, UserError
from longtake.diffusion.objective import build_objective
from longtake.parallel.mesh import Mesh
from longtake.parallel.shard import local_tensor
from longtake.parallel.world import World, start_world
from longtake.random import Purpose
from longtake.system.build import build_system
from longtake.system.config import SystemConfig
from longtake.system.encoders import device_dtype
from longtake.system.examples import wanted_draws
from longtake.system.export import export_model, exported_tree, system_part
from tests.train.runs import tensors, train_here

MODEL = {
    "in_channels": 3 * 4 * 8 * 8,
    "patch_size": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "axes_dim": (4, 6, 6),
    "depth": 1,
    "depth_single_blocks": 1,
    "vec_in_dim": 8,
    "context_in_dim": 16,
}
TREE = {
    "model": MODEL,
    "ae": {"temporal": 4, "spatial": 8},
    "t5": {"dim": 16, "max_length": 5},
    "clip": {"dim": 8, "max_length": 5},
    "dtype": "fp32",
    "device": "cpu",
}


def system_config(**changes: Any) -> SystemConfig:
    return resolve({**TREE, **changes}, [], SystemConfig).value


@pytest.fixture
def world() -> Iterator[World]:
    with start_world("cpu") as world:
        yield world


@pytest.mark.parametrize(("master", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_masters_have_their_own_dtype_whatever_the_run_computes_in(
    world: World, master: str, expected: torch.dtype
) -> None:
    for dtype in ("fp32", "bf16"):
        config = system_config(dtype=dtype, master_dtype=master)
        denoiser = build_system(config, Mesh.create(config.parallel, world), world).denoiser
        assert {p.dtype for p in denoiser.parameters()} == {expected}


def test_no_two_draws_of_a_sample_share_a_purpose() -> None:
    config = system_config()
    draws = wanted_draws(config, build_objective(config.objective, 1, frozenset()).draws, posterior=True)
    purposes = [draw.purpose for draw in (draws | dict(config.law_of_family.draws)).values()]
    assert len(set(purposes)) == len(purposes) >= 5
    assert draws["dropout"].purpose == Purpose.DROPOUT


def test_weights_are_a_function_of_the_seed(world: World) -> None:
    first, same, other = (
        build_system(config, Mesh.create(config.parallel, world), world).denoiser
        for config in (system_config(), system_config(), system_config(seed=1))
    )
    for (name, p), q, r in zip(first.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q.full_tensor())
        assert p.dtype == torch.float32
        if name == "img_in.weight":
            assert not torch.equal(p.full_tensor(), r.full_tensor())


def test_captions_become_the_conditions_the_model_wants(world: World) -> None:
    config = system_config(model={**MODEL, "guidance_embed": True, "cond_embed": True})
    system = build_system(config, Mesh.create(config.parallel, world), world)
    conditions = system.embed(["a red circle", ""])
    assert conditions["text"].shape == (2, 5, 16)
    assert conditions["vector"].shape == (2, 8)
    assert conditions["guidance"].tolist() == [4.0, 4.0]
    latents = torch.zeros(2, *system.latent(8, 24, 32))
    example = system.example_conditions((8, 24, 32), 2)
    assert set(example) == set(config.model.conditions) == {"text", "vector", "guidance", "visual"}
    assert example["visual"].shape == (2, 769, *latents.shape[2:])
    assert system.denoiser(latents, torch.ones(2), example).shape == latents.shape


def test_a_model_without_them_gets_no_guidance_and_no_visual_condition(world: World) -> None:
    config = system_config()
    system = build_system(config, Mesh.create(config.parallel, world), world)
    assert set(system.embed(["x"])) == set(system.example_conditions((8, 16, 16), 1)) == {"text", "vector"}
    assert system.law is None


def test_bytes_of_a_batch_become_latents(world: World) -> None:
    config = system_config()
    system = build_system(config, Mesh.create(config.parallel, world), world)
    bucket = Bucket("16px", 4, "1:1", (4, 16, 16), 2)
    video = torch.full((2, 3, 4, 16, 16), 255, dtype=torch.uint8)
    batch = Batch(bucket, video, ("", ""), torch.zeros(2), torch.zeros(2, 2), np.zeros(2, np.uint64), torch.ones(2), {})
    latents = system.encode(batch)
    assert latents.shape == (2, 768, 1, 2, 2)
    assert latents.dtype == torch.float32
    assert (latents == 1).all()


def test_tokens_and_flops_follow_the_latent_grid(world: World) -> None:
    config = system_config()
    system = build_system(config, Mesh.create(config.parallel, world), world)
    assert system.tokens((8, 16, 24)) == 2 * 2 * 3
    assert system.tokens((1, 16, 24)) == 2 * 3
    assert system.flops((8, 16, 24)) == type(system.denoiser).forward_flops(config.model, (768, 2, 2, 3), 5)


def test_masters_can_be_kept_in_the_compute_dtype(world: World) -> None:
    configs = [system_config(master_dtype=dtype) for dtype in ("bf16", "fp32")]
    systems = [build_system(config, Mesh.create(config.parallel, world), world) for config in configs]
    replace(systems[1], dtype=torch.bfloat16).keep_compute_dtype()
    systems[1].keep_compute_dtype()  # float32 computes in what it has
    weights = [{name: local_tensor(p) for name, p in one.denoiser.named_parameters()} for one in systems]
    assert all(value.dtype == torch.bfloat16 for value in weights[1].values())
    assert all(torch.equal(value, weights[0][name]) for name, value in weights[1].items())
    x, t = torch.rand(1, *systems[0].latent(8, 32, 32)), torch.tensor([0.5])
    conditions = [one.embed([""]) for one in systems]
    with torch.no_grad():
        outputs = [one.denoiser(x, t, c) for one, c in zip(systems, conditions, strict=True)]
    assert torch.equal(*outputs)


def test_float32_is_float32_everywhere() -> None:
    assert device_dtype("fp32", torch.device("cpu")) == torch.float32


def test_bf16_falls_back_to_float32_where_it_would_be_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_bf16, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda has_bf16=has_bf16: has_bf16)
        assert device_dtype("bf16", torch.device("cpu")) == dtype


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ae": {"temporal": 8, "spatial": 8}}, "write model.in_channels = 1536"),
        ({"t5": {"dim": 8, "max_length": 5}}, "model.context_in_dim is 16"),
        ({"clip": {"dim": 16, "max_length": 5}}, "model.vec_in_dim is 8"),
    ],
    ids=str,
)
def test_parts_that_do_not_fit_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        system_config(**changes)
    assert said in str(refused.value)


def test_sides_of_buckets_are_whole_tokens() -> None:
    assert system_config().size_divisor == 8
    assert system_config(ae_spatial_compression=32).size_divisor == 32


def test_an_exported_model_carries_its_config(config: Path, tmp_path: Path) -> None:
    outcome, _ = train_here(config, "--max-steps", "2")
    for part in ("ema", "model"):
        file = export_model(str(outcome.folder), tmp_path / f"{part}.safetensors", part)
        tree = exported_tree(file)
        assert tree["model"]["hidden_size"] == 36
        assert "lr" not in tree
        assert resolve(system_part(tree), [], SystemConfig).value.seed == 7
        saved = tensors(outcome.checkpoint)
        assert torch.equal(_first_tensor(file, "img_in.bias"), saved[f"{part}.img_in.bias"])


def _first_tensor(file: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as reader:
        return reader.get_tensor(name)


def test_a_file_without_a_config_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match="holds no Longtake config"):
        exported_tree(tmp_path / "x.safetensors")
    (tmp_path / "y.safetensors").write_bytes(b"no")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        exported_tree(tmp_path / "y.safetensors")
