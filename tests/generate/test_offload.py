"""`offload_model`: every part is on the device only while it works."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from longtake.encoders.config import WordsConfig
from longtake.generate.config import GenerateConfig
from longtake.generate.run import open_system
from longtake.generate.source import GenerationSource, resolve_source
from longtake.parallel.offloaded_weights import OffloadedWeights
from longtake.parallel.shard import local_tensor
from longtake.parallel.world import World, start_world
from longtake.system.build import System, with_low_noise
from longtake.system.encoders import encoders_on_host
from tests.encoders.conftest import described, weights
from tests.generate.on_peers import make, tiny_system, tiny_tree

__all__ = ["described", "weights"]
CPU = torch.device("cpu")
PRESETS = Path(__file__).parents[2] / "configs" / "opensora_v2" / "inference"


def on_device(module: nn.Module) -> bool:
    return all(local_tensor(p).untyped_storage().nbytes() for p in module.parameters())


def watch(system: System) -> list[tuple[str, bool]]:
    """(part that works, whether the denoiser is on the device then), one for each forward."""
    seen: list[tuple[str, bool]] = []
    model = system.autoencoder.model
    text, pooled = (system.encoders.of_captions[name].module for name in ("text", "vector"))
    parts = {"t5": text, "clip": pooled, "decoder": model.decoder, "denoiser": system.denoiser}
    for name, part in parts.items():
        part.register_forward_pre_hook(lambda *_, name=name: seen.append((name, on_device(system.denoiser))))
    return seen


def test_the_denoiser_is_there_only_while_it_denoises(described: dict[str, Any], world: World) -> None:
    plain = tiny_system(described, world)
    wanted = make(plain, "still")
    system = replace(plain, offloaded_weights=OffloadedWeights(plain.denoiser, CPU))
    seen = watch(system)
    assert not on_device(system.denoiser)
    for _ in range(2):
        seen.clear()
        assert torch.equal(make(system, "still"), wanted)
        order = list(dict.fromkeys(seen))
        assert order == [("t5", False), ("clip", False), ("denoiser", True), ("decoder", False)]
    with pytest.raises(ValueError, match="stopped"), system.denoising():
        raise ValueError("stopped")
    assert not on_device(system.denoiser)


def test_encoders_are_with_the_host_and_a_sharded_one_stays_sharded(described: dict[str, Any]) -> None:
    config = GenerateConfig.model_validate(tiny_tree(described))
    found = encoders_on_host(config)
    assert {name: getattr(found, name).placement for name in ("ae", "t5", "clip")} == dict.fromkeys(
        ("ae", "t5", "clip"), "offloaded"
    )
    assert found.t5.content() == config.t5.content()  # the same embeddings
    sharded = config.model_copy(update={"t5": config.t5.model_copy(update={"placement": "sharded"})})
    assert encoders_on_host(sharded).t5.placement == "sharded"
    words = config.model_copy(update={"t5": WordsConfig(dim=config.t5.dim)})
    assert encoders_on_host(words).t5 == words.t5  # has no weights


def test_an_offloaded_generation_makes_the_same_video(described: dict[str, Any], world: World) -> None:
    made = []
    for offload in (False, True):
        config = GenerateConfig.model_validate({**tiny_tree(described), "offload_model": offload})
        system = open_system(GenerationSource(config, None), world, lambda text: None)
        assert system.config.t5.placement == ("offloaded" if offload else "resident")
        made.append(make(system, "wide"))
    assert torch.equal(*made)


def test_a_second_denoiser_of_any_family_works_below_its_boundary(described: dict[str, Any], world: World) -> None:
    plain = tiny_system(described, world)
    wanted = make(plain, "still")
    config = GenerateConfig.model_validate({**tiny_tree(described), "low_noise": {"boundary": 0.5}})
    system = with_low_noise(replace(plain, config=config), world)
    used = {True: 0, False: 0}
    for expert in system.experts:
        is_first = expert is system
        expert.denoiser.load_state_dict(plain.denoiser.state_dict())
        expert.denoiser.register_forward_pre_hook(lambda *_, key=is_first: used.update({key: used[key] + 1}))
    assert torch.equal(make(system, "still"), wanted)
    assert min(used.values()) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_never_holds_more_than_the_largest_part(described: dict[str, Any]) -> None:
    width = {"hidden_size": 768, "num_heads": 12, "axes_dim": (16, 24, 24), "depth": 2, "depth_single_blocks": 2}
    tree = tiny_tree(described)
    tree |= {"device": "cuda", "model": {**tree["model"], **width}}
    peaks, held = [], []
    with start_world("cuda") as gpu:
        for offload in (False, True):
            config = GenerateConfig.model_validate({**tree, "offload_model": offload})
            system = open_system(GenerationSource(config, None), gpu, lambda text: None)
            make(system, "still")
            held.append(torch.cuda.memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            system.embed(["a red circle"])
            system.autoencoder.decode(torch.zeros(1, 4, 1, 6, 16, device="cuda"), 1)
            peaks.append(torch.cuda.max_memory_allocated())
            size = sum(local_tensor(p).numel() * p.element_size() for p in system.denoiser.parameters())
            del system
            gpu.free_memory()
    assert size > 2**27
    assert held[1] <= held[0] - 0.95 * size
    assert peaks[1] <= peaks[0] - 0.9 * size


def test_weights_are_float32_where_the_compute_is(world: World) -> None:
    words = ["--tiny", "--prompt", "x", "--dtype", "fp32", "--device", "cpu"]
    source = resolve_source(str(PRESETS / "256px.py"), words)
    assert source.config.master_dtype == "bf16", "the preset's own"
    system = open_system(source, world, lambda line: None)
    assert {p.dtype for p in system.denoiser.parameters()} == {torch.float32}
