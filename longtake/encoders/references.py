"""Autoencoders and text encoders of diffusers and transformers as references for ours, from the same files.

Both sides compute in float32, without tiles. A reference takes what ours takes and gives what ours gives, scaled
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from longtake.encoders.autoencoder import Autoencoder
from longtake.encoders.autoencoder_config import (
    Autoencoder2DConfig,
    AutoencoderSection,
    CogVideoXVAEConfig,
    HunyuanVAEConfig,
)
from longtake.encoders.cogvideox import diffusers_cogvideox
from longtake.encoders.config import ClipEncoderConfig, T5EncoderConfig, UMT5EncoderConfig
from longtake.encoders.extras import needs_extra
from longtake.encoders.kl import KLAutoencoder, diffusers_hunyuan, image_module
from longtake.encoders.opensora_v1_2 import OpenSoraAutoencoder, diffusers_spatial
from longtake.encoders.opensora_v1_2_config import OpenSoraVAEConfig
from longtake.encoders.text import LearnedTextEncoder, text_facts
from longtake.encoders.wan import wan_module
from longtake.encoders.wan_config import WanVAEConfig

# Keys by which ours departs from the library, for memory or as another program has it; unset, the two are equal.
_DEPARTURES = {
    HunyuanVAEConfig: {"use_spatial_tiling": False, "use_temporal_tiling": False},
    CogVideoXVAEConfig: {"use_tiling": False, "encode_frames": None, "first_latent_alone": False},
    Autoencoder2DConfig: {},
    OpenSoraVAEConfig: {},
    WanVAEConfig: {"use_tiling": False},
}
Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class AutoencoderReference:
    """A library's autoencoder: `encode` and `decode` give what `ours_encode` and `ours_decode` give."""

    name: str
    module: nn.Module
    encode: Callable[[Tensor], Outputs]  # video [B, 3, T, H, W]
    decode: Callable[[Tensor], Tensor]  # of the "mean" that `ours_encode` gives
    ours_encode: Callable[[Tensor], Outputs]
    ours_decode: Callable[[Tensor, int], Tensor]  # with the number of frames


def plain_section(section: AutoencoderSection) -> AutoencoderSection:
    """Return the section of an autoencoder as a reference has it: in float32, without what only saves memory."""
    changes: dict[str, Any] = {"dtype": "fp32", "compile": False, "placement": "resident", "posterior": "sample"}
    changes |= _DEPARTURES.get(type(section), {})
    keys = type(section).model_fields
    return section.model_copy(update={key: value for key, value in changes.items() if key in keys})


def autoencoder_reference(
    section: AutoencoderSection, ours: Autoencoder, files: Mapping[str, Tensor]
) -> AutoencoderReference | None:
    """Return the library's autoencoder with the tensors of `files`; None where no library has the class. Of
    Open-Sora 1.2's the part that codes single frames is compared, the one in time has no class."""
    if isinstance(section, OpenSoraVAEConfig):
        return _spatial_reference(section, ours, files)
    builders = {
        HunyuanVAEConfig: diffusers_hunyuan,
        CogVideoXVAEConfig: diffusers_cogvideox,
        Autoencoder2DConfig: image_module,
        WanVAEConfig: wan_module,
    }
    if (build := builders.get(type(section))) is None:
        return None
    assert isinstance(ours, KLAutoencoder)
    module = _filled(build(section), files, ours.names(files))

    def encode(video: Tensor) -> Outputs:
        shift, scale = ours.scaling(video)
        if isinstance(section, Autoencoder2DConfig):
            posteriors = [module.encode(frame).latent_dist for frame in video.unbind(2)]
            mean, std = (torch.stack([getattr(one, name) for one in posteriors], 2) for name in ("mean", "std"))
        else:
            posterior = module.encode(video).latent_dist
            mean, std = posterior.mean, posterior.std
        return {"mean": (mean - shift) * scale, "std": std * scale}

    def decode(latents: Tensor) -> Tensor:
        shift, scale = ours.scaling(latents)
        z = latents / scale + shift
        if isinstance(section, Autoencoder2DConfig):
            return torch.stack([module.decode(frame).sample for frame in z.unbind(2)], 2).clamp(-1, 1)
        return module.decode(z).sample.clamp(-1, 1)

    name = f"diffusers {type(module).__name__}"
    return AutoencoderReference(name, module, encode, decode, ours.posterior, ours.decode)


def _spatial_reference(
    section: OpenSoraVAEConfig, ours: Autoencoder, files: Mapping[str, Tensor]
) -> AutoencoderReference:
    assert isinstance(ours, OpenSoraAutoencoder)
    inner = {"spatial_encoder": "encoder", "spatial_quant": "quant_conv"}
    inner |= {"spatial_decoder": "decoder", "spatial_post_quant": "post_quant_conv"}
    names = {}
    for name, theirs in ours.names(files).items():
        part, _, rest = name.partition(".")
        if part in inner:
            names[f"{inner[part]}.{rest}"] = theirs
    module = _filled(diffusers_spatial(section), files, names)

    def encode(video: Tensor) -> Outputs:
        frames = [module.encode(frame).latent_dist.mean for frame in video.unbind(2)]
        return {"mean": torch.stack(frames, 2)}

    def ours_encode(video: Tensor) -> Outputs:
        return {"mean": ours.frame_moments(video).chunk(2, dim=1)[0]}

    def ours_decode(latents: Tensor, num_frames: int) -> Tensor:
        ours.load_decoder()
        frames = [ours.parts.spatial_decoder(ours.parts.spatial_post_quant(one)) for one in latents.unbind(2)]
        return torch.stack(frames, 2)

    def decode(latents: Tensor) -> Tensor:
        return torch.stack([module.decode(frame).sample for frame in latents.unbind(2)], 2)

    return AutoencoderReference(
        "diffusers AutoencoderKL (of single frames)", module, encode, decode, ours_encode, ours_decode
    )


def _filled(module: nn.Module, files: Mapping[str, Tensor], names: Mapping[str, str]) -> nn.Module:
    """Return the module with tensors of `files`, `names` saying which is which; convolutions of one pixel may be
    matrices."""
    own = module.state_dict()
    module.load_state_dict({name: files[theirs].reshape(own[name].shape) for name, theirs in names.items()})
    return module.float().eval().requires_grad_(False)


@dataclass(frozen=True)
class TextReference:
    """A library's text encoder: token ids and mask -> what ours embeds them as."""

    name: str
    module: nn.Module
    embed_ids: Callable[[Tensor, Tensor], Tensor]


def text_reference(
    section: T5EncoderConfig | UMT5EncoderConfig | ClipEncoderConfig,
    ours: LearnedTextEncoder,
    place: Path,
    files: Mapping[str, Tensor],
) -> TextReference:
    """transformers' own model, read from the folder `place` by transformers; filled with the tensors of `files` where
    that is one file, as Wan publishes its UMT5, which transformers does not read."""
    with needs_extra("t5.type", section.type):
        from transformers import CLIPTextModel, T5EncoderModel, UMT5Config, UMT5EncoderModel
    kinds = {T5EncoderConfig: T5EncoderModel, UMT5EncoderConfig: UMT5EncoderModel, ClipEncoderConfig: CLIPTextModel}
    kind = kinds[type(section)]
    if place.is_dir():
        module = kind.from_pretrained(place, dtype=torch.float32, local_files_only=True)
    else:
        assert isinstance(section, UMT5EncoderConfig)
        with torch.device("meta"):
            module = kind(UMT5Config.from_dict(text_facts(section, place.parent)))
        tensors = {name: files[theirs].float() for name, theirs in ours.names(files).items()}
        module.encoder.load_state_dict(tensors, assign=True)
        module.set_input_embeddings(module.encoder.embed_tokens)
    module = module.eval().requires_grad_(False)

    def embed_ids(ids: Tensor, mask: Tensor) -> Tensor:
        if isinstance(section, ClipEncoderConfig):
            return module(input_ids=ids).pooler_output
        if not section.mask:
            return module(input_ids=ids).last_hidden_state
        return module(input_ids=ids, attention_mask=mask).last_hidden_state.masked_fill(mask[..., None] == 0, 0.0)

    return TextReference(f"transformers {kind.__name__}", module, embed_ids)
