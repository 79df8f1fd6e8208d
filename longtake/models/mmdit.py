"""The MMDiT of FLUX and Open-Sora 2.0: text and video tokens in one attention, as rectified-flow denoiser.

Double-stream blocks give text and video their own weights and one joint attention; single-stream blocks then run the
joined sequence (text first) through shared weights, attention and MLP side by side. Timestep, pooled text and, if
embedded, guidance shift, scale and gate every block (adaLN). Parameter names are those of Open-Sora 2.0's files.

Shapes: B batch, C latent channels, F latent frames, h w latent grid, L text tokens, M video tokens, S = L + M,
D width, N heads, K = D / N head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.contracts import Conditions, UserError
from longtake.models import layers
from longtake.models.attention import Attention
from longtake.models.config import MMDiTConfig
from longtake.models.initial import linear_uniform
from longtake.models.plans import ANY, Exchange, SequencePlan, TensorSplit, check_conditions

TIME_FEATURES = 256
_QKV = ("hidden_size", "hidden_size", "hidden_size")
_JOINED = ("txt_in", "img_in")  # the order of the joined sequence


class MMDiT(nn.Module):
    """Predicts from noised latents what the objective asks for; t = 1 is noise, t = 0 data, in fp32 throughout.

    Computes in the dtype of its weights and casts its inputs itself; the timestep is cast only after its sinusoids.
    """

    blocks: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"double_blocks": "depth", "single_blocks": "depth_single_blocks"}
    )
    varying_dims: ClassVar[Mapping[str, tuple[tuple[int, ...], ...]]] = MappingProxyType(
        {"double_blocks": ((0, 1), (0, 1), (0,), (1,)), "single_blocks": ((0, 1), (0,), (1,))}
    )  # of each argument of a block, the dims that differ from bucket to bucket
    tensor_plan: ClassVar[Mapping[str, TensorSplit]] = MappingProxyType(
        {
            **{
                f"double_blocks.*.{stream}_{layer}": TensorSplit(kind, parts, (f"{stream}_in",))
                for stream in ("img", "txt")
                for layer, kind, parts in (
                    *((f"attn.{one}_proj", "column", ()) for one in "qkv"),
                    ("attn.qkv", "column", _QKV),
                    ("attn.proj", "row", ()),
                    ("mlp.0", "column", ()),
                    ("mlp.2", "row", ()),
                )
            },
            "single_blocks.*.q_proj": TensorSplit("column", (), _JOINED),
            "single_blocks.*.k_proj": TensorSplit("column", (), _JOINED),
            "single_blocks.*.v_mlp": TensorSplit("column", ("hidden_size", "mlp_size"), _JOINED),
            "single_blocks.*.linear1": TensorSplit("column", (*_QKV, "mlp_size"), _JOINED),
            "single_blocks.*.linear2": TensorSplit("row", ("hidden_size", "mlp_size"), _JOINED),
        }
    )
    sequence_plan: ClassVar[SequencePlan] = SequencePlan(
        split=MappingProxyType({"img_in": 1, "cond_in": 1, "txt_in": 1, "positions": 1}),
        gather=MappingProxyType({"final_layer": "img_in"}),
        exchanges=MappingProxyType(
            {"double_blocks.*.attention": Exchange(_JOINED), "single_blocks.*.attention": Exchange(_JOINED)}
        ),
        entry=MappingProxyType({"double_blocks.0": ("img_in", "txt_in")}),
    )
    zero_gates: ClassVar[tuple[str, ...]] = ("_mod.lin", ".modulation.lin", "adaLN_modulation.1", "final_layer.linear")

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.img_in = nn.Linear(config.in_channels, width)
        self.time_in = layers.MLPEmbedder(TIME_FEATURES, width)
        self.vector_in = layers.MLPEmbedder(config.vec_in_dim, width)
        self.guidance_in = layers.MLPEmbedder(TIME_FEATURES, width) if config.guidance_embed else None
        self.cond_in = nn.Linear(config.visual_channels, width) if config.cond_embed else None
        self.txt_in = nn.Linear(config.context_in_dim, width)
        self.positions = layers.RotaryPositions(config.axes_dim, config.theta)
        self.double_blocks = nn.ModuleList(DoubleBlock(config) for _ in range(config.depth))
        self.single_blocks = nn.ModuleList(SingleBlock(config) for _ in range(config.depth_single_blocks))
        self.final_layer = FinalLayer(width, config.in_channels)
        self._fan_in = {name: layer.in_features for name, layer in self.named_modules() if isinstance(layer, nn.Linear)}

    def forward(self, x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        """Predict [B, C, F, h, w] in the weights' dtype from x [B, C, F, h, w] and t float32 [B] in [0, 1].

        Any F, h, w: a grid that the patch does not divide is filled up with zeros inside and cut afterwards.
        Conditions: `text` [B, L, context_in_dim] (every token is attended), `vector` [B, vec_in_dim], `guidance` [B]
        where guidance_embed, and `visual` [B, 1 + C, F, h, w], mask then latents, where cond_embed; a text-to-video
        caller of such a model passes zeros. Raises `UserError` for a missing or misshapen condition.
        """
        config = self.config
        self._check_inputs(x, t, conditions)
        dtype, patch = self.img_in.weight.dtype, config.patch_size

        vec = self.time_in(layers.timestep_features(t, TIME_FEATURES)) + self.vector_in(conditions["vector"])
        if self.guidance_in is not None:
            vec = vec + self.guidance_in(layers.timestep_features(conditions["guidance"].float(), TIME_FEATURES))
        img = self.img_in(layers.patchify(x.to(dtype), patch))
        if self.cond_in is not None:
            img = img + self.cond_in(layers.patchify(conditions["visual"].to(dtype), patch))
        txt = self.txt_in(conditions["text"].to(dtype))
        rope = layers.join_positions(txt.shape[1], self.positions(layers.token_grid(x.shape[2:], patch), x.device))

        for block in self.double_blocks:
            img, txt = block(img, txt, vec, rope)
        tokens = torch.cat([txt, img], dim=1)
        for block in self.single_blocks:
            tokens = block(tokens, vec, rope)
        out = self.final_layer(tokens[:, txt.shape[1] :], vec)
        return layers.unpatchify(out, x.shape[2:], patch)

    def _check_inputs(self, x: Tensor, t: Tensor, conditions: Conditions) -> None:
        config = self.config
        assert t.dtype == torch.float32, f"timesteps must be float32, found {t.dtype}: bf16 cannot tell them apart"
        batch, channels, *size = x.shape
        if channels != config.latent_channels:
            raise UserError(
                f"model.in_channels = {config.in_channels}: the latents have {channels} channels; at patch_size "
                f"{config.patch_size} the model needs in_channels = {channels * config.patch_size**2}"
            )
        check_conditions("MMDiT", self.needs(config, (channels, *size), ANY), conditions, batch, _REMEDIES)

    @staticmethod
    def needs(config: MMDiTConfig, latent: tuple[int, int, int, int], text_tokens: int) -> dict[str, tuple[int, ...]]:
        channels, *size = latent
        needs: dict[str, tuple[int, ...]] = {
            "text": (text_tokens, config.context_in_dim),
            "vector": (config.vec_in_dim,),
        }
        if config.guidance_embed:
            needs["guidance"] = ()
        if config.cond_embed:
            needs["visual"] = (1 + channels, *size)
        return needs

    @staticmethod
    def tokens(config: MMDiTConfig, latent: tuple[int, int, int, int]) -> int:
        return math.prod(layers.token_grid(latent[1:], config.patch_size))

    @staticmethod
    def heads(config: MMDiTConfig) -> int:
        return config.num_heads

    def initial_value(self, name: str, shape: Sequence[int], seed: int) -> Tensor:
        """Return the initial value of the parameter `name`, whole, in fp32 on the default device: a function of (seed,
        name).

        Linear layers: uniform within +-1/sqrt(fan in); norm scales: one; `cond_in`: zero, so that a model that learns
        conditions starts as one without. `init="zero_gate"`: modulation and last layer zero as well (DiT's adaLN-zero,
        Peebles & Xie 2023).
        """
        layer, _, kind = name.rpartition(".")
        if kind == "scale":
            return torch.ones(*shape)
        if layer == "cond_in" or (self.config.init == "zero_gate" and layer.endswith(self.zero_gates)):
            return torch.zeros(*shape)
        return linear_uniform(name, shape, self._fan_in[layer], seed)

    @staticmethod
    def forward_flops(config: MMDiTConfig, latent: tuple[int, int, int, int], text_tokens: int) -> int:
        """Floating-point operations of one forward pass of one sample with latents (C, F, h, w).

        A product [m, k] x [k, n] counts 2mkn. Linear layers: 2 * inputs * outputs for every token, modulations and
        embedders once a sample. Attention over S tokens: 4 S^2 D a block, full (nothing is masked). Norms, activations
        and softmax are left out. Training costs three times this, recomputation not counted.
        """
        D, mlp = config.hidden_size, config.mlp_size
        video = MMDiT.tokens(config, latent)
        total = video + text_tokens
        block = total * 2 * D * (4 * D + 2 * mlp) + 4 * total**2 * D  # q, k, v, output, MLP; attention: in either kind
        modulations = (12 * config.depth + 3 * config.depth_single_blocks + 2) * D  # features; 2: the last layer's
        num_embedded = 2 if config.guidance_embed else 1
        vectors = 2 * D * (num_embedded * (TIME_FEATURES + D) + config.vec_in_dim + D + modulations)
        ends = 2 * config.in_channels + (config.visual_channels if config.cond_embed else 0)
        num_blocks = config.depth + config.depth_single_blocks
        return num_blocks * block + vectors + video * 2 * D * ends + text_tokens * 2 * D * config.context_in_dim


_REMEDIES = {
    "text": "pass the token embeddings of the prompt",
    "vector": "pass the pooled embedding of the prompt",
    "guidance": "pass a guidance scale for each sample or set model.guidance_embed to False",
    "visual": "pass mask and latents of the known frames (zeros where there are none) or set model.cond_embed to False",
}


class Modulation(nn.Module):
    """Linear(SiLU(vec)), cut into `num` tensors [B, 1, D]: shift, scale, gate, in threes."""

    def __init__(self, width: int, num: int) -> None:
        super().__init__()
        self.num = num
        self.lin = nn.Linear(width, num * width)

    def forward(self, vec: Tensor) -> tuple[Tensor, ...]:
        return self.lin(F.silu(vec)).unsqueeze(1).chunk(self.num, dim=-1)


class QKNorm(nn.Module):
    """RMS norms of queries and keys over the head width, each with its own scale."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.query_norm = layers.RMSNorm(head_dim)
        self.key_norm = layers.RMSNorm(head_dim)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q, k [B, L, N, K] -> the same, normed."""
        return self.query_norm(q), self.key_norm(k)


class StreamProjections(nn.Module):
    """One stream's way into the joint attention (`forward`) and out of it (`proj`)."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.head_dim = config.head_dim
        if config.fused_qkv:
            self.qkv = nn.Linear(width, 3 * width, bias=config.qkv_bias)
        else:
            self.q_proj = nn.Linear(width, width, bias=config.qkv_bias)
            self.k_proj = nn.Linear(width, width, bias=config.qkv_bias)
            self.v_proj = nn.Linear(width, width, bias=config.qkv_bias)
        self.fused = config.fused_qkv
        self.norm = QKNorm(config.head_dim)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k (both normed) and v [B, L, N, K] of x [B, L, D]; N counts the heads in this rank's weights."""
        if self.fused:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (heads.unflatten(-1, (-1, self.head_dim)) for heads in (q, k, v))
        q, k = self.norm(q, k)
        return q, k, v


class DoubleBlock(nn.Module):
    """Text and video keep their own weights and meet in one attention, text first; then an MLP for each."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        self.img_mod = Modulation(config.hidden_size, 6)
        self.img_attn = StreamProjections(config)
        self.img_mlp = layers.mlp(config.hidden_size, config.mlp_size)
        self.txt_mod = Modulation(config.hidden_size, 6)
        self.txt_attn = StreamProjections(config)
        self.txt_mlp = layers.mlp(config.hidden_size, config.mlp_size)
        self.attention = Attention(config.attention)
        self.rotate = layers.rotate_half if config.use_liger_rope else layers.rotate_interleaved

    def forward(self, img: Tensor, txt: Tensor, vec: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new img and txt for img [B, M, D], txt [B, L, D], vec [B, D], rope [2, S, 1, K/2]."""
        img_shift1, img_scale1, img_gate1, img_shift2, img_scale2, img_gate2 = self.img_mod(vec)
        txt_shift1, txt_scale1, txt_gate1, txt_shift2, txt_scale2, txt_gate2 = self.txt_mod(vec)

        img_q, img_k, img_v = self.img_attn(layers.modulate(img, img_shift1, img_scale1))
        txt_q, txt_k, txt_v = self.txt_attn(layers.modulate(txt, txt_shift1, txt_scale1))
        q = self.rotate(torch.cat([txt_q, img_q], dim=1), rope)
        k = self.rotate(torch.cat([txt_k, img_k], dim=1), rope)
        v = torch.cat([txt_v, img_v], dim=1)
        out = self.attention(q, k, v).flatten(2)
        txt_out, img_out = out.split([txt_q.shape[1], img_q.shape[1]], dim=1)

        img = layers.add_gated(img, img_gate1, self.img_attn.proj(img_out))
        img = layers.add_gated(img, img_gate2, self.img_mlp(layers.modulate(img, img_shift2, img_scale2)))
        txt = layers.add_gated(txt, txt_gate1, self.txt_attn.proj(txt_out))
        txt = layers.add_gated(txt, txt_gate2, self.txt_mlp(layers.modulate(txt, txt_shift2, txt_scale2)))
        return img, txt


class SingleBlock(nn.Module):
    """One set of weights for the joined sequence; attention and MLP read the same input and share the way out."""

    def __init__(self, config: MMDiTConfig) -> None:
        super().__init__()
        width, hidden = config.hidden_size, config.mlp_size
        self.head_dim = config.head_dim
        self.part_sizes = (width, width, width, hidden)
        if config.fused_qkv:
            self.linear1 = nn.Linear(width, sum(self.part_sizes))
        else:
            self.q_proj = nn.Linear(width, width)
            self.k_proj = nn.Linear(width, width)
            self.v_mlp = nn.Linear(width, width + hidden)
        self.fused = config.fused_qkv
        self.linear2 = nn.Linear(width + hidden, width)
        self.norm = QKNorm(config.head_dim)
        self.modulation = Modulation(width, 3)
        self.attention = Attention(config.attention)
        self.rotate = layers.rotate_half if config.use_liger_rope else layers.rotate_interleaved

    def forward(self, tokens: Tensor, vec: Tensor, rope: Tensor) -> Tensor:
        """Return the new tokens for tokens [B, S, D], vec [B, D], rope [2, S, 1, K/2]."""
        shift, scale, gate = self.modulation(vec)
        q, k, v, hidden = self._project(layers.modulate(tokens, shift, scale))
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        q, k = self.norm(q, k)
        q, k = self.rotate(q, rope), self.rotate(k, rope)
        out = self.attention(q, k, v).flatten(2)
        out = self.linear2(torch.cat([out, F.gelu(hidden, approximate="tanh")], dim=-1))
        return layers.add_gated(tokens, gate, out)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k, v [B, S, D] and the MLP's input for x [B, S, D]; narrower where the available weights are a
        shard."""
        if self.fused:
            joined = self.linear1(x)
            whole = sum(self.part_sizes)
            return joined.split([size * joined.shape[-1] // whole for size in self.part_sizes], dim=-1)
        q, k, joined = self.q_proj(x), self.k_proj(x), self.v_mlp(x)
        return q, k, *joined.split([q.shape[-1], joined.shape[-1] - q.shape[-1]], dim=-1)


class FinalLayer(nn.Module):
    """adaLN, then a linear layer from tokens [B, M, D] to patches [B, M, in_channels]."""

    def __init__(self, width: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out_features)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(vec).unsqueeze(1).chunk(2, dim=-1)
        return self.linear(layers.modulate(x, shift, scale))
