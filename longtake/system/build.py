"""Putting a system together from its config: the one place where training and generation begin."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from longtake.contracts import Batch, Conditions, LatentShape
from longtake.data import EncoderFacts, to_unit
from longtake.diffusion import RectifiedFlow
from longtake.encoders import PixelAutoencoder, WordEncoder, build_autoencoder, build_text_encoder
from longtake.models import build_denoiser
from longtake.parallel import (
    Mesh,
    World,
    cut_model,
    initialise_sharded,
    local_tensor,
    offloads,
    own_part,
    remat_blocks,
    shard_model,
    tune_host,
)
from longtake.system.config import SystemConfig
from longtake.weights import MMDiTWeights


@dataclass(frozen=True)
class Encoders:
    """Autoencoder and text encoders on this rank's device."""

    device: torch.device
    autoencoder: PixelAutoencoder
    text: WordEncoder  # token sequence
    pooled: WordEncoder  # pooled vector

    def moments(self, video: Tensor) -> dict[str, Tensor]:
        """Pixels `[B, 3, T, H, W]` (bytes, or floats in [-1, 1]) -> "mean" `[B, C, F, h, w]` of the posterior.

        An autoencoder that draws its latents adds "std", of the same shape. On the device, float32.
        """
        return {"mean": self.autoencoder.encode(to_unit(video.to(self.device, non_blocking=True)))}

    def embed(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Captions -> "text" `[B, L, Dt]` and "vector" `[B, Dv]` on the device."""
        tokens, _ = self.text.encode(tuple(texts))
        _, vector = self.pooled.encode(tuple(texts))
        return {
            "text": tokens.to(self.device, non_blocking=True),
            "vector": vector.to(self.device, non_blocking=True),
        }

    @property
    def facts(self) -> EncoderFacts:
        """What a system needs to know of them when it does not hold them."""
        return EncoderFacts(self.autoencoder.latent, self.text.max_length, self.embed([""]))


@dataclass(frozen=True)
class System:
    """The parts of one model, placed on this rank's device."""

    config: SystemConfig
    mesh: Mesh
    device: torch.device
    dtype: torch.dtype  # of the denoiser's compute
    denoiser: nn.Module  # sharded over the mesh, float32 masters
    encoders: Encoders | None  # None: training reads latents and embeddings from a store
    facts: EncoderFacts  # of the encoders, whether they are here or not
    objective: RectifiedFlow

    def frozen(self) -> dict[str, Tensor]:
        """The denoiser's parameters that are not trained, by the names they have in a checkpoint."""
        return {f"model.{name}": p.data for name, p in self.denoiser.named_parameters() if not p.requires_grad}

    @property
    def autoencoder(self) -> PixelAutoencoder:
        """The autoencoder, of a system that holds one."""
        assert self.encoders is not None, "this system was built for stored latents"
        return self.encoders.autoencoder

    @property
    def latent(self) -> LatentShape:
        """How pixels map to latents."""
        return self.facts.latent

    def embed(self, texts: list[str] | tuple[str, ...]) -> Conditions:
        """Captions -> text conditions on the device; `guidance` is filled where the model wants one."""
        assert self.encoders is not None, "this system was built for stored embeddings"
        return self._conditions(self.encoders.embed(texts))

    def embed_empty(self) -> Conditions:
        """The text conditions of the empty prompt, one row."""
        return self._conditions(self.facts.empty)

    def encode(self, batch: Batch) -> Tensor:
        """The latents of a batch: float32 `[B, C, F, h, w]` on the device, from its pixels or as it brings them.

        Where the autoencoder's posterior is random, the draw is the batch's own.
        """
        if batch.encoded:
            moments = {name: batch.encoded[name] for name in ("mean", "std") if name in batch.encoded}
        else:
            assert self.encoders is not None, "this system was built for stored latents"
            moments = self.encoders.moments(batch.video)
        mean = moments["mean"].to(self.device, non_blocking=True).float()
        if "std" not in moments:
            return mean
        std = moments["std"].to(self.device, non_blocking=True).float()
        return mean + std * batch.draws["posterior"].to(self.device, non_blocking=True)

    def conditions(self, batch: Batch) -> Conditions:
        """The text conditions of a batch, from its captions or as it brings them."""
        return self._conditions(batch.encoded) if batch.encoded else self.embed(batch.text)

    def _conditions(self, embedded: Mapping[str, Tensor]) -> Conditions:
        text = embedded["text"].to(self.device, non_blocking=True).float()
        vector = embedded["vector"].to(self.device, non_blocking=True).float()
        guidance = torch.full((len(text),), self.config.guidance) if self.config.model.guidance_embed else None
        return Conditions(text=text, vector=vector, guidance=None if guidance is None else guidance.to(self.device))

    def blank_visual(self, conditions: Conditions, latents: Tensor) -> Conditions:
        """Adds the all-zero visual condition (nothing is known) where the model wants one."""
        if not self.config.model.cond_embed:
            return conditions
        b, c, f, h, w = latents.shape
        visual = torch.zeros(b, c + 1, f, h, w, device=latents.device)
        return replace(conditions, visual=visual)

    def flops(self, pixels: tuple[int, int, int]) -> int:
        """Forward FLOPs of the denoiser for one sample of `(T, H, W)` pixels (its documented formula)."""
        shape = self.latent(*pixels)
        return type(self.denoiser).forward_flops(self.config.model, shape, self.facts.text_length)

    def tokens(self, pixels: tuple[int, int, int]) -> int:
        """Video tokens of one sample of `(T, H, W)` pixels."""
        _, f, h, w = self.latent(*pixels)
        p = self.config.model.patch_size
        return f * -(-h // p) * -(-w // p)


def compute_dtype(config: SystemConfig, device: torch.device) -> torch.dtype:
    """bf16 where it is asked for and the device computes in it, else float32.

    On a CPU without bf16 instructions bf16 is emulated and several times slower than float32.
    """
    if config.dtype == "fp32":
        return torch.float32
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def build_encoders(config: SystemConfig, device: torch.device) -> Encoders:
    """The autoencoder and the text encoders that the config names."""
    autoencoder = build_autoencoder(config.ae)
    return Encoders(device, autoencoder, build_text_encoder(config.t5), build_text_encoder(config.clip))


def build_system(config: SystemConfig, mesh: Mesh, world: World, stored: EncoderFacts | None = None) -> System:
    """Builds the model on the meta device, cuts it over the mesh, fills it (initial values, then
    `model.from_pretrained`).

    `stored`: what a latent store says of the encoders that made it; none are built then.
    """
    if world.device.type == "cpu":
        tune_host(config.cpu_threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with fixed workspaces
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    dtype = compute_dtype(config, world.device)
    with torch.device("meta"):
        denoiser = build_denoiser(config.model)
    cut = cut_model(denoiser, mesh)
    if config.model.grad_ckpt_settings is not None:
        remat_blocks(denoiser, config.model.grad_ckpt_settings, cut)
    shard_model(denoiser, mesh, dtype)
    initialise_sharded(denoiser, torch.device("cpu") if offloads(mesh) else world.device, config.seed)
    if config.model.from_pretrained:
        load_pretrained(denoiser, config)
    encoders = build_encoders(config, world.device) if stored is None else None
    return System(
        config=config,
        mesh=mesh,
        device=world.device,
        dtype=dtype,
        denoiser=denoiser,
        encoders=encoders,
        facts=stored if encoders is None else encoders.facts,
        objective=RectifiedFlow(config.objective, config.model.patch_size, config.compat),
    )


@torch.no_grad()
def load_pretrained(denoiser: nn.Module, config: SystemConfig) -> None:
    """Fills the denoiser from `model.from_pretrained` (a safetensors file or a folder of them)."""
    state = MMDiTWeights(config.model.from_pretrained, config.model)  # one tensor at a time is in memory
    for name, parameter in denoiser.named_parameters():
        if name in state:
            local_tensor(parameter).copy_(own_part(state[name], parameter))
