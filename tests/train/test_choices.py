"""What is chosen by time is one thing on all ranks, is kept, and holds where it was made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from longtake.checkpoint import Clock, RunState
from longtake.contracts import Bucket
from longtake.models import Attention
from longtake.parallel import BucketPeers, Mesh, World, start_world
from longtake.system import System, build_system
from longtake.train import choices as module
from longtake.train.choices import Choices, choose_attention_by_time
from tests.system.test_build import system_config

BUCKETS = tuple(Bucket("32px", frames, "1:1", (frames, 32, 32), batch) for frames, batch in ((1, 4), (16, 2)))


@pytest.fixture
def world() -> Iterator[World]:
    with start_world("cpu") as world:
        yield world


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Shapes at which kernels were timed; cuDNN is always the fastest."""
    shapes: list[str] = []
    monkeypatch.setattr(
        module, "time_kernels", lambda shape, *_: shapes.append(str(shape)) or {"flash": 2.0, "cudnn": 1.0}
    )
    monkeypatch.setattr(module, "slow_on_hopper", lambda *_: None)
    monkeypatch.setattr(module, "_machine", lambda device: {"device": "a GPU", "torch": "2.11"})
    return shapes


def as_on_cuda(world: World, **changes: object) -> System:
    config = system_config(**changes)
    return replace(build_system(config, Mesh.create(config.parallel, world), world), device=torch.device("cuda"))


def launch(system: System, world: World, kept: dict) -> tuple[dict, list[str]]:
    said: list[str] = []
    choices = Choices(world, kept, said.append)
    choose_attention_by_time(system, BUCKETS, BucketPeers.create(system.mesh), choices, said.append)
    return choices.made, said


def test_attention_is_timed_once_and_the_choice_kept_with_the_run(world: World, timed: list[str]) -> None:
    system = as_on_cuda(world)
    made, said = launch(system, world, {})
    assert {one.backend for one in system.denoiser.modules() if isinstance(one, Attention)} == {"cudnn"}
    tokens = system.tokens(BUCKETS[1].shape) + system.facts.text_length
    assert timed == [f"2 x {tokens} tokens, 2 heads of 16"]
    assert said == [
        f"attention by time: cuDNN (forward and backward of {timed[0]}: FlashAttention-2 2000.00 ms, cuDNN 1000.00 ms)"
    ]
    state = RunState(Clock(), choices=made).to_json()
    again, _ = launch(as_on_cuda(world), world, state["choices"])
    assert (again, len(timed)) == (made, 1)


def test_another_gpu_or_version_chooses_anew_with_a_line(
    world: World, timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = launch(as_on_cuda(world), world, {})
    monkeypatch.setattr(module, "_machine", lambda device: {"device": "a GPU", "torch": "2.12"})
    _, said = launch(as_on_cuda(world), world, made)
    assert said[0] == "attention: chosen anew on device a GPU, torch 2.12; before it was device a GPU, torch 2.11"
    assert len(timed) == 2


def test_nothing_is_timed_for_a_run_that_is_to_repeat_itself_or_names_its_kernel(
    world: World, timed: list[str]
) -> None:
    plain = as_on_cuda(world)
    deterministic = replace(plain, config=plain.config.model_copy(update={"deterministic": True}))
    named = plain.config.model.model_copy(update={"attention": "sdpa"})
    for system in (deterministic, replace(plain, config=plain.config.model_copy(update={"model": named}))):
        assert launch(system, world, {}) == ({}, [])
    assert timed == []
