"""FLUX as diffusers has it: its folders are read and written, and both models give the same answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from longtake.contracts import Conditions, UserError
from longtake.models.config import MMDiTConfig
from longtake.models.layers import patchify
from longtake.models.mmdit import MMDiT
from longtake.weights.conversion import ConvertedWeights
from longtake.weights.mmdit import DIFFUSERS, FORMAT
from longtake.weights.model import ModelWeights
from tests.models.golden import random_inputs, tiny_config
from tests.weights.test_mmdit import model_of

diffusers = pytest.importorskip("diffusers")  # its models are imported where one is taken: seconds of each worker

SIZES = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 16,
    "axes_dims_rope": (4, 6, 6),
}
OURS = [(fused, half) for fused in (False, True) for half in (False, True)]


def random_flux(guidance: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(**SIZES, guidance_embeds=guidance)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def our_config(guidance: bool, fused: bool = False, half: bool = True) -> MMDiTConfig:
    return tiny_config(depth=2, guidance_embed=guidance, fused_qkv=fused, use_liger_rope=half)


@torch.no_grad()
def answer_of(flux: torch.nn.Module, x: Tensor, t: Tensor, conditions: Conditions, guidance: bool) -> Tensor:
    """Packed tokens, from the inputs of our model."""
    _, _, frames, height, width = x.shape
    axes = (torch.arange(n, dtype=torch.float32) for n in (frames, height // 2, width // 2))
    places = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
    return flux(
        hidden_states=patchify(x, 2),
        encoder_hidden_states=conditions["text"],
        pooled_projections=conditions["vector"],
        timestep=t,
        img_ids=places,
        txt_ids=torch.zeros(conditions["text"].shape[1], 3),
        guidance=conditions["guidance"] if guidance else None,
        return_dict=False,
    )[0]


@pytest.mark.parametrize("guidance", [False, True])
@pytest.mark.parametrize(("fused", "half"), OURS)
def test_a_folder_of_diffusers_gives_the_answers_of_diffusers(
    tmp_path: Path, guidance: bool, fused: bool, half: bool
) -> None:
    flux = random_flux(guidance)
    flux.save_pretrained(tmp_path / "transformer", max_shard_size="100KB")
    (tmp_path / "model_index.json").write_text("{}")  # a whole pipeline's folder
    (tmp_path / "ae.safetensors").write_bytes(b"of another part")
    config = our_config(guidance, fused, half)
    weights = ModelWeights(tmp_path, config, FORMAT)
    assert weights.layout == DIFFUSERS
    assert not weights.missing
    assert not weights.surplus
    x, t, conditions = random_inputs(config)
    ours = patchify(model_of(config, dict(weights))(x, t, conditions), 2).detach()
    theirs = answer_of(flux, x, t, conditions, guidance)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * theirs.abs().max().item())


@pytest.mark.parametrize(("fused", "half"), OURS)
def test_diffusers_reads_what_is_written_in_its_names(fused: bool, half: bool) -> None:
    config = our_config(True, fused, half)
    torch.manual_seed(1)
    model = MMDiT(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    flux = random_flux(guidance=True)
    flux.load_state_dict(ConvertedWeights(FORMAT, model.state_dict(), config, DIFFUSERS))
    x, t, conditions = random_inputs(config)
    ours = patchify(model(x, t, conditions), 2).detach()
    theirs = answer_of(flux, x, t, conditions, guidance=True)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * theirs.abs().max().item())


def test_guidance_that_the_model_does_not_embed_is_named(tmp_path: Path) -> None:
    random_flux(guidance=True).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"unknown time_text_embed\.guidance_embedder\.linear_1\.bias"):
        ModelWeights(tmp_path, our_config(guidance=False), FORMAT)
