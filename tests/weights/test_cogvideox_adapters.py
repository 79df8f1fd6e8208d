"""One CogVideoX adapter, as every reader takes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from longtake.contracts import Conditions
from longtake.models.lora import AdapterSize, adapt, target_layers
from longtake.weights.adapters import Adapters, tensors_of
from longtake.weights.cogvideox import FORMAT
from longtake.weights.conversion import layer_names
from longtake.weights.lora import Adapter, read_adapters, save_adapters
from tests.models.golden_cogvideox import FOLDER as GOLDEN
from tests.models.golden_cogvideox import golden_config, golden_model

TARGETS = ("to_q", "to_k", "to_v", "ff.0", "ff.2")
CONVOLUTION = ("patch_embed.proj",)  # in files; a linear layer here
SCALING = {"lora": 0.5, "rslora": 8 / 4**0.5, "dora": 0.5}


def drawn(kind: str) -> Adapters:
    """Adapters of rank 4 on the golden 2B."""
    targets = TARGETS if kind == "dora" else TARGETS + CONVOLUTION
    model, generator = golden_model("t2v_2b"), torch.Generator().manual_seed(0)
    found = {}
    for name in target_layers(model, targets, FORMAT.lora_targets, layer_names(FORMAT, model.config)):
        weight = model.get_submodule(name).weight
        a, b = (torch.randn(size, generator=generator) * 0.2 for size in ((4, weight.shape[1]), (weight.shape[0], 4)))
        lengths = weight.detach().norm(dim=1) * (1 + 0.3 * torch.rand(weight.shape[0], generator=generator))
        found[name] = Adapter(a, b, SCALING[kind], lengths if kind == "dora" else None)
    return found


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Latents [B, F, C, h, w], timesteps and text, for diffusers."""
    generator = torch.Generator().manual_seed(1)
    x, text = torch.randn(1, 3, 16, 8, 8, generator=generator), torch.randn(1, 10, 24, generator=generator)
    return x, torch.tensor([500.0]), text


def ours(file: Path) -> Tensor:
    model, (x, t, text) = golden_model("t2v_2b"), inputs()
    adapters = read_adapters(FORMAT, file, model.config)
    sizes = {name: AdapterSize(one.rank, one.scaling, one.magnitude is not None) for name, one in adapters.items()}
    adapt(model, sizes, "dense", torch.float32)
    model.load_state_dict(tensors_of(adapters), strict=False)
    return model(x.transpose(1, 2), t, Conditions(text=text)).transpose(1, 2).detach()


@pytest.mark.parametrize("kind", SCALING)
def test_our_loader_peft_and_diffusers_give_equal_outputs(kind: str, tmp_path: Path) -> None:
    diffusers, peft = pytest.importorskip("diffusers"), pytest.importorskip("peft")
    config, adapters = golden_config("t2v_2b"), drawn(kind)
    files = {"peft": tmp_path / "peft"}
    files |= {style: tmp_path / f"{style}.safetensors" for style in ("diffusers", "comfy", "fun")}
    for style, file in files.items():
        save_adapters(FORMAT, adapters, config, file, style)
    outputs = {style: ours(file) for style, file in files.items()}

    def reference() -> torch.nn.Module:
        return diffusers.CogVideoXTransformer3DModel.from_pretrained(GOLDEN / "transformer" / "t2v_2b").float().eval()

    def answer(model: torch.nn.Module) -> Tensor:
        x, t, text = inputs()
        with torch.no_grad():
            return model(hidden_states=x, encoder_hidden_states=text, timestep=t, return_dict=False)[0]

    outputs["by peft"] = answer(peft.PeftModel.from_pretrained(reference(), files["peft"]).eval())
    pipe = diffusers.CogVideoXPipeline(
        tokenizer=None, text_encoder=None, vae=None, transformer=reference(), scheduler=None
    )
    pipe.load_lora_weights(str(files["diffusers"]))
    outputs["by diffusers"] = answer(pipe.transformer)
    if kind != "dora":  # tensors alone, as programs read them that know no header
        pipe.unload_lora_weights()
        pipe.load_lora_weights(load_file(files["diffusers"]))
        outputs["by diffusers, from tensors"] = answer(pipe.transformer)
    for reader, output in outputs.items():
        torch.testing.assert_close(output, outputs["by peft"], atol=2e-5, rtol=0, msg=reader)
    assert (outputs["by peft"] - answer(reference())).abs().max() > 1e-2


def test_a_file_says_rank_and_alpha_in_tensors_and_in_its_header(tmp_path: Path) -> None:
    layers = {"fun": "lora_unet__transformer_blocks_0_attn1_to_q", "comfy": "lora_unet_blocks_0_q"}
    for style, layer in layers.items():
        file = tmp_path / f"{style}.safetensors"
        save_adapters(FORMAT, drawn("lora"), golden_config("t2v_2b"), file, style)
        with safe_open(file, "pt") as opened:
            header = opened.metadata()
            assert opened.get_tensor(f"{layer}.alpha").item() == 2.0
        assert (header["ss_network_dim"], header["ss_network_alpha"]) == ("4", "2")
