"""Videos that several processes make together, for the tests to compare with those of one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longtake.config.load import resolve
from longtake.generate.config import GenerateConfig
from longtake.generate.sample import Request, pixel_shape, sample_videos
from longtake.parallel.mesh import Mesh
from longtake.parallel.shard import local_tensor, own_part
from longtake.parallel.world import World, start_world
from longtake.system.build import System, build_system
from tests.encoders.tiny_weights import CLIP_DIM, T5_DIM
from tests.precision import system_in_float64

Facts = dict[str, Any]
MODEL = {"in_channels": 16, "patch_size": 2, "context_in_dim": T5_DIM, "vec_in_dim": CLIP_DIM}
MODEL |= {"hidden_size": 48, "num_heads": 4, "axes_dim": (4, 4, 4), "depth": 1, "depth_single_blocks": 1}
# video tokens: 3 x 3 x 7, 1 x 3 x 8, 1 x 5 x 5; with 9 of text, so that two processes have unequal shares of most
SIZES = {"wide": ("2.39:1", 9), "still": ("16:9", 1), "square": ("1:1", 1)}


def tiny_tree(described: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a small system with learned encoders."""
    tiles = {"ae": {**described["ae"], "sample_size": 32}, "t5": {**described["t5"], "max_length": 9}}
    return {**described, **tiles, "model": MODEL, "dtype": "fp32", "seed": 3}


def tiny_system(described: Mapping[str, Any], world: World, *overrides: str) -> System:
    """It, every weight of which counts, equal on every mesh."""
    config = resolve(tiny_tree(described), list(overrides), GenerateConfig).value
    system = build_system(config, Mesh.create(config.parallel, world), world)
    stir(system.denoiser)
    return system


def stir(model: nn.Module) -> None:
    """Adds to each parameter numbers that follow from its place among all."""
    for i, parameter in enumerate(model.parameters()):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i))
        local_tensor(parameter).data.add_(0.1 * own_part(noise, parameter))


def make(system: System, name: str, **options: Any) -> Tensor:
    """The video `[1, 3, T, H, W]` of one of `SIZES`."""
    ratio, frames = SIZES[name]
    option = system.config.sampling_option.model_copy(
        update={"resolution": "80px", "aspect_ratio": ratio, "num_frames": frames, "num_steps": 3} | options
    )
    pixel_shape(system, option)
    return sample_videos(system, [Request("a red circle moves left", 5, "blue")], option)


def make_mixed(described: Mapping[str, Any], folder: Path, world: World, *overrides: str, exact: bool = False) -> Facts:
    """Two videos, each on a rank of its own where there are two: the first begins with a known frame. Saved by seed;
    how often each rank ran the model. `exact`: in float64."""
    system = tiny_system(described, world, "--model.cond_embed", "True", *overrides)
    calls: list[int] = []
    system.denoiser.register_forward_pre_hook(lambda module, args: calls.append(len(args[0])))
    frame = torch.rand(3, 1, 48, 128, generator=torch.Generator().manual_seed(0)) * 2 - 1
    places = system.law.given("i2v_head", system.latent, (5, 48, 128))
    known = {"places": places, "known": (frame,)}
    requests = [Request("a red circle moves left", 5, "blue", **known), Request("a green square", 6, "blue")]
    option = system.config.sampling_option.model_copy(
        update={"resolution": "80px", "aspect_ratio": "16:9", "num_frames": 5, "num_steps": 3, "text_osci": True}
    )
    with system_in_float64(system) if exact else nullcontext():
        for request in requests[world.rank :: world.size]:
            torch.save(sample_videos(system, [request], option), folder / f"{request.seed}.pt")
    return {"calls": calls}


def make_exact(described: Mapping[str, Any]) -> dict[str, Tensor]:
    """`make_sizes` of one process, computed in float64."""
    with start_world("cpu") as world:
        system = tiny_system(described, world)
        with system_in_float64(system):
            return make_sizes(system)


def make_sizes(system: System) -> dict[str, Tensor]:
    """The video of every size, and the posterior of one of them."""
    videos = {name: make(system, name) for name in SIZES}
    return videos | {"moments": system.encoders.posterior(videos["wide"])["mean"]}


def make_all(described: Mapping[str, Any], folder: Path, meshes: Mapping[str, list[str]], world: World) -> Facts:
    """All sizes on each mesh, saved as `{mesh}-{rank}.pt`; how many tiles each rank has computed."""
    counts = {}
    for mesh, overrides in meshes.items():
        system = tiny_system(described, world, *overrides)
        calls: list[int] = []
        system.autoencoder.model.decoder.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        torch.save(make_sizes(system), folder / f"{mesh}-{world.rank}.pt")
        counts[mesh] = len(calls)
    return counts
