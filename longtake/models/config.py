"""`MMDiTConfig`: the `model` section of a run, under Open-Sora 2.0's key names."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from longtake.config import Section


class MMDiTConfig(Section):
    """Shape and options of the MMDiT denoiser; the defaults are the 11B text-to-video model of Open-Sora 2.0.

    `in_channels` counts the features of one video token: latent channels x patch_size^2. `use_liger_rope` selects the
    rotary layout the weights were made for: True rotates positions (j, K/2 + j) of a head ("half"), False rotates
    (2j, 2j + 1) ("interleaved"). `fused_qkv` stores q, k, v (and the MLP input of single blocks) as one projection, as
    FLUX does. `init` says how parameters start: `torch` = uniform within +-1/sqrt(fan in), `cond_in` zero;
    `zero_gate` = in addition every modulation and the last layer zero, so that each block starts as the identity.
    """

    type: Literal["flux"] = "flux"
    from_pretrained: str | None = None
    strict_load: bool = True  # False: weights missing from the file, or unknown to the model, are logged, not refused
    init: Literal["torch", "zero_gate"] = "torch"

    in_channels: PositiveInt = 64
    patch_size: PositiveInt = 2  # height and width of a patch on the latent grid; frames are never merged
    vec_in_dim: PositiveInt = 768
    context_in_dim: PositiveInt = 4096
    hidden_size: PositiveInt = 3072
    mlp_ratio: PositiveFloat = 4.0
    num_heads: PositiveInt = 24
    depth: NonNegativeInt = 19
    depth_single_blocks: NonNegativeInt = 38
    axes_dim: tuple[PositiveInt, PositiveInt, PositiveInt] = (16, 56, 56)  # channels of a head that encode t, y, x
    theta: PositiveFloat = 10000
    qkv_bias: bool = True
    guidance_embed: bool = False
    cond_embed: bool = False
    fused_qkv: bool = False
    use_liger_rope: bool = True

    attention: Literal["auto", "sdpa", "math"] = "auto"
    grad_ckpt_settings: tuple[NonNegativeInt, NonNegativeInt] | None = None  # (double, single) blocks to recompute

    @model_validator(mode="after")
    def _check_sizes(self) -> MMDiTConfig:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size} does not divide into num_heads = {self.num_heads}; "
                "choose a hidden_size that is a multiple of num_heads"
            )
        if sum(self.axes_dim) != self.head_dim:
            raise ValueError(
                f"axes_dim = {list(self.axes_dim)} sums to {sum(self.axes_dim)}; it must sum to "
                f"hidden_size / num_heads = {self.head_dim}"
            )
        if any(dim % 2 for dim in self.axes_dim):
            raise ValueError(f"axes_dim = {list(self.axes_dim)}: each entry must be even, for it rotates pairs")
        if self.in_channels % self.patch_size**2:
            raise ValueError(
                f"in_channels = {self.in_channels} must be latent channels x patch_size^2, a multiple of "
                f"{self.patch_size**2} at patch_size = {self.patch_size}"
            )
        return self

    @property
    def head_dim(self) -> int:
        """K, the width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def mlp_size(self) -> int:
        """Width of the hidden layer of every MLP."""
        return int(self.hidden_size * self.mlp_ratio)

    @property
    def latent_channels(self) -> int:
        """C, the channels of the latents that the model takes and returns."""
        return self.in_channels // self.patch_size**2

    @property
    def visual_channels(self) -> int:
        """Features of one token of the visual condition: (mask + latent) x patch_size^2."""
        return self.in_channels + self.patch_size**2
