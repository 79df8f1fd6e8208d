"""Kernels of attention are timed at what a rank's attention computes on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from longtake.contracts import Bucket
from longtake.models import Attention, AttentionChoice, build_denoiser, example_conditions, use_attention
from longtake.models import attention as attention_module
from longtake.models.attention import MaskedAttention, TemporalAttention
from longtake.parallel import BucketPeers, Mesh, ParallelConfig, start_world
from longtake.train.choices import attention_shape
from tests.plan.test_blocks import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_are_timed_at_what_attention_computes_on(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, seen = FAMILIES[family].model_copy(update={"attention": "sdpa"}), []
    latent, model = (config.latent_channels, 13, 4, 4), build_denoiser(config)
    with start_world("cpu") as world:
        peers = BucketPeers.create(Mesh.create(ParallelConfig(), world))
    facts = {"facts": SimpleNamespace(text_length=6), "latent": lambda *size: latent}
    system = SimpleNamespace(denoiser=model, mesh=peers.mesh, tokens=lambda size: model.tokens(config, latent), **facts)
    monkeypatch.setattr(attention_module, "attention", lambda q, *rest: seen.append(tuple(q.shape)) or (q, None))
    model(torch.zeros(2, *latent), torch.full((2,), 0.5), example_conditions(config, latent, 6, 2))
    shape = attention_shape(system, [Bucket("", 13, "", latent[1:], 2)], peers)
    assert (shape.batch, shape.tokens, shape.heads, shape.width) in seen
    use_attention(model, AttentionChoice("flash", "timed"), timed=True)
    left = {type(one) for one in model.modules() if isinstance(one, Attention) and one.backend == "sdpa"}
    assert left == ({TemporalAttention, MaskedAttention} if family == "stdit3" else set())  # ours, and none of a choice
