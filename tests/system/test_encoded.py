"""A system without encoders: what a batch brings takes the place of what they would make."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from longtake.contracts import Batch, Bucket
from longtake.parallel.mesh import Mesh
from longtake.parallel.world import start_world
from longtake.system.build import build_system
from longtake.train.run_file import read_run

BUCKET = Bucket("32px", 8, "1:1", (8, 32, 32), 2)


def batch(**changes: object) -> Batch:
    draw = torch.Generator().manual_seed(0)
    found = Batch(
        bucket=BUCKET,
        video=torch.randint(0, 256, (2, 3, 8, 32, 32), dtype=torch.uint8, generator=draw),
        text=("a red circle.", "a blue square."),
        fps=torch.zeros(2),
        size=torch.zeros(2, 2, dtype=torch.int64),
        keys=np.zeros(2, np.uint64),
        weights=torch.ones(2),
        draws={"posterior": torch.randn(2, 1536, 1, 4, 4, generator=draw)},
    )
    return replace(found, **changes)


def test_a_system_for_stored_latents_has_no_encoders_and_the_same_facts(config: Path) -> None:
    run = read_run(str(config)).value
    with start_world("cpu") as world:
        whole = build_system(run, Mesh.create(run.parallel, world), world)
        bare = build_system(run, Mesh.create(run.parallel, world), world, whole.facts)
    assert bare.encoders is None
    assert bare.latent == whole.latent
    assert bare.tokens(BUCKET.shape) == whole.tokens(BUCKET.shape) == 16
    assert bare.flops(BUCKET.shape) == whole.flops(BUCKET.shape)
    assert torch.equal(bare.embed_nothing()["text"], whole.embed([""])["text"])
    online = batch()
    encoded = whole.encoders.posterior(online.video) | whole.encoders.embed(online.text)
    stored = batch(video=torch.empty(0, dtype=torch.uint8), encoded=encoded)
    assert torch.equal(bare.encode(stored), whole.encode(online))
    for name in ("text", "vector"):
        assert torch.equal(bare.conditions(stored)[name], whole.conditions(online)[name])
    with pytest.raises(AssertionError, match="built for stored latents"):
        bare.encode(online)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_random_posterior_is_drawn_from_with_the_batchs_own_numbers(config: Path, dtype: torch.dtype) -> None:
    run = read_run(str(config)).value
    with start_world("cpu") as world:
        system = build_system(run, Mesh.create(run.parallel, world), world)
    mean, std = torch.randn(2, 1536, 1, 4, 4).to(dtype), torch.rand(2, 1536, 1, 4, 4).to(dtype)
    one = batch(encoded={"mean": mean, "std": std})
    assert system.encode(one).dtype == torch.float32
    assert torch.equal(system.encode(one), mean.float() + std.float() * one.draws["posterior"])
