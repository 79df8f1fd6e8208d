"""The transformer of Wan 2.1 and 2.2: self-attention over all video tokens, then cross-attention to the text.

The timestep shifts, scales and gates self-attention and MLP by numbers that all blocks share, to which each adds a
table. Queries and keys are normed over all heads together. Parameter names are those of the authors' files, whose
`blocks` are `transformer_blocks` here.

Shapes: B batch, C latent channels, F latent frames, h w latent grid, M video tokens, L text rows, P CLIP tokens,
D width, N heads, K = D / N head width, R times of a sample (1, or 2 where frames are given).
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
from longtake.models.initial import linear_uniform, normal
from longtake.models.plans import ANY, Exchange, SequencePlan, TensorSplit, check_conditions
from longtake.models.wan_config import WanConfig

THETA = 10000.0
POSITIONS = 1024  # per axis; beyond them nothing is defined
IMAGE_EPS = 1e-5  # of norms over CLIP tokens
_VIDEO, _GIVEN = "patch_embedding", "given_tokens"
_LAYERS = {  # of a block -> how tensor parallelism cuts them; the text's keys and values run over rows that all have
    **{f"self_attn.{layer}": ("column", (), (_VIDEO,)) for layer in "qkv"},
    "self_attn.o": ("row", (), (_VIDEO,)),
    "cross_attn.q": ("column", (), (_VIDEO,)),
    **{f"cross_attn.{layer}": ("column", (), ()) for layer in ("k", "v", "k_img", "v_img")},
    "cross_attn.o": ("row", (), (_VIDEO,)),
    "ffn.0": ("column", (), (_VIDEO,)),
    "ffn.2": ("row", (), (_VIDEO,)),
}


class Wan(nn.Module):
    """Predicts noise - x0 from noised latents at times 0 to 1000, given as float32; 1000 is noise.

    Linear layers compute in the dtype of the weights; times, modulations, norms and the sums over blocks in float32.
    """

    blocks: ClassVar[Mapping[str, str]] = MappingProxyType({"transformer_blocks": "num_layers"})
    varying_dims: ClassVar[Mapping[str, tuple[tuple[int, ...], ...]]] = MappingProxyType(
        {"transformer_blocks": ((0, 1), (0,), (0,), (1,), (0, 1))}
    )  # of each argument of a block, the dims that differ from bucket to bucket
    tensor_plan: ClassVar[Mapping[str, TensorSplit]] = MappingProxyType(
        {f"transformer_blocks.*.{layer}": TensorSplit(*how) for layer, how in _LAYERS.items()}
    )
    tensor_norms: ClassVar[tuple[str, ...]] = (
        *(f"transformer_blocks.*.{attention}.norm_{one}" for attention in ("self_attn", "cross_attn") for one in "qk"),
        "transformer_blocks.*.cross_attn.norm_k_img",
    )
    sequence_plan: ClassVar[SequencePlan] = SequencePlan(
        split=MappingProxyType({_VIDEO: 1, _GIVEN: 1, "positions": 1}),
        gather=MappingProxyType({"head": _VIDEO}),
        exchanges=MappingProxyType({"transformer_blocks.*.self_attn.attention": Exchange((_VIDEO,))}),
        entry=MappingProxyType({"enter": (_VIDEO, _GIVEN)}),
    )

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.patch_embedding = PatchEmbedding(config)
        self.text_embedding = layers.mlp(config.text_dim, width, width)
        self.time_embedding = nn.Sequential(nn.Linear(config.freq_dim, width), nn.SiLU(), nn.Linear(width, width))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.img_emb = None if config.image_dim is None else ImageEmbedding(config)
        self.positions = layers.RotaryPositions(config.axes_dim, THETA)
        self.given_tokens = nn.Identity()
        self.enter = EnterTokens()
        self.transformer_blocks = nn.ModuleList(WanBlock(config) for _ in range(config.num_layers))
        self.head = WanHead(config)
        self._linear = layers.linear_sizes(self)

    def forward(self, x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        """x [B, C, F, h, w], t float32 [B] -> prediction float32 [B, C, F, h, w] (float64 for weights in it).

        Any F, h, w: a grid that the patch does not divide is filled up with zeros inside and cut afterwards.
        Conditions: `text` [B, L, text_dim], filled up with zero rows to `text_len`, all attended to (rows that its mask
        [B, L] leaves out are zeros too); where the model has them `visual` [B, 4 + C, F, h, w], mask then latents of
        given frames, and `image` [B, P, image_dim], CLIP tokens; optional: `x_mask` bool [B, F], False where a frame is
        given: its tokens are at time 0. Raises `UserError` for a missing or misshapen condition.
        """
        config, size = self.config, x.shape[2:]
        self._check_inputs(x, t, conditions)
        joined = torch.cat([x, conditions["visual"].to(x)], dim=1) if config.visual_channels else x
        grid = layers.token_grid(size, config.patch[1])

        # times: of given frames 0
        made = conditions.get("x_mask")
        times = t[:, None] if made is None else torch.stack([t, torch.zeros_like(t)], dim=1)
        features = time_features(times, config.freq_dim)
        vec = in_float32(self.time_embedding, features)
        numbers = in_float32(self.time_projection, vec).unflatten(-1, (6, -1))

        # text, and CLIP tokens in front of it
        context = self.text_embedding(self._text_rows(conditions))
        if self.img_emb is not None:
            context = torch.cat([self.img_emb(conditions["image"]), context], dim=1)

        # video tokens
        tokens = self.patch_embedding(joined)
        rope = self.positions(grid, x.device).unsqueeze(2)
        given: tuple[Tensor, ...] = ()
        if made is not None:
            of_frames = ~made[:, :, None].expand(-1, -1, grid[1] * grid[2])
            given = (self.given_tokens(of_frames.flatten(1)[..., None]),)
        tokens, *given = self.enter(tokens, *given)
        for block in self.transformer_blocks:
            tokens = block(tokens, numbers, context, rope, *given)
        out = self.head(tokens, vec, *given)

        # features of a patch have their channel last
        out = out.unflatten(-1, (config.patch[1] ** 2, -1)).transpose(-1, -2).flatten(-2)
        return layers.unpatchify(out, size, config.patch[1])

    def _text_rows(self, conditions: Conditions) -> Tensor:
        """[B, text_len, text_dim] in the weights' dtype."""
        text, mask = conditions["text"], conditions.masks.get("text")
        if mask is not None:
            text = text.where(mask[..., None], 0.0)
        rows = F.pad(text, (0, 0, 0, self.config.text_len - text.shape[1]))
        return rows.to(self.text_embedding[0].weight.dtype)

    def _check_inputs(self, x: Tensor, t: Tensor, conditions: Conditions) -> None:
        config = self.config
        assert t.dtype == torch.float32, f"timesteps must be float32, found {t.dtype}: bf16 cannot tell them apart"
        batch, channels, *size = x.shape
        if channels != config.out_channels:
            raise UserError(
                f"model.out_channels = {config.out_channels}: the latents have {channels} channels; choose another ae "
                "or a model made for it"
            )
        if max(grid := layers.token_grid(size, config.patch[1])) > POSITIONS:
            raise UserError(
                f"latents of {size[0]} x {size[1]} x {size[2]}: they have {max(grid)} tokens along an axis, and the "
                f"Wan model has positions for {POSITIONS}; choose a smaller or shorter video"
            )
        check_conditions("Wan", self.needs(config, (channels, *size), ANY), conditions, batch, _REMEDIES)
        if (rows := conditions["text"].shape[1]) > config.text_len:
            raise UserError(
                f"condition `text` has {rows} rows, the model {config.text_len}; cut the captions to "
                f"t5.max_length = {config.text_len}"
            )

    @staticmethod
    def needs(config: WanConfig, latent: tuple[int, int, int, int], text_tokens: int) -> dict[str, tuple[int, ...]]:
        needs: dict[str, tuple[int, ...]] = {"text": (text_tokens, config.text_dim)}
        if config.visual_channels:
            needs["visual"] = (config.visual_channels, *latent[1:])
        if config.image_dim is not None:
            needs["image"] = (config.image_tokens, config.image_dim)
        return needs

    @staticmethod
    def tokens(config: WanConfig, latent: tuple[int, int, int, int]) -> int:
        return math.prod(layers.token_grid(latent[1:], config.patch[1]))

    @staticmethod
    def heads(config: WanConfig) -> int:
        return config.num_attention_heads

    def initial_value(self, name: str, shape: Sequence[int], seed: int) -> Tensor:
        """Return the initial value of the parameter `name`, whole, in fp32 on the default device: a function of (seed,
        name).

        As published: linear layers Xavier-uniform with zero bias, but for those of text and time, which are normal;
        modulations normal; the last layer zero.
        """
        layer, _, kind = name.rpartition(".")
        if kind == "modulation":
            return normal(name, shape, self.config.hidden_size**-0.5, seed)
        if layer == "patch_embedding":
            fan_in = math.prod(shape[1:]) if kind == "weight" else math.prod(self.patch_embedding.weight.shape[1:])
            return linear_uniform(name, shape, (fan_in + shape[0]) / 6 if kind == "weight" else fan_in, seed)
        if kind == "emb_pos" or kind == "bias" or name == "head.head.weight":
            return torch.zeros(*shape)
        if layer not in self._linear:
            return torch.ones(*shape)
        if layer.startswith(("text_embedding.", "time_embedding.")):
            return normal(name, shape, 0.02, seed)
        return linear_uniform(name, shape, sum(self._linear[layer]) / 6, seed)

    @staticmethod
    def forward_flops(config: WanConfig, latent: tuple[int, int, int, int], text_tokens: int) -> int:
        """Floating-point operations of one forward pass of one sample, counted as `MMDiT.forward_flops` counts."""
        D, video, images = config.hidden_size, Wan.tokens(config, latent), config.image_tokens
        rows = config.text_len + images  # that the cross-attention reads
        linear = 2 * D * (video * (6 * D + 2 * config.ffn_dim) + rows * 2 * D)
        block = linear + 4 * video * D * (video + rows)
        vectors = 2 * D * (config.freq_dim + 7 * D)
        text = config.text_len * (config.text_dim + D)
        image = images * (config.image_dim * (config.image_dim + D) if config.image_dim else 0)
        cells = math.prod(config.patch)
        ends = video * (config.in_channels + config.out_channels) * cells * D + text * D + image
        return config.num_layers * block + vectors + 2 * ends


_REMEDIES = {
    "text": "pass the token embeddings of the prompt",
    "visual": "pass mask and latents of the given frames (zeros where nothing is given)",
    "image": "pass the CLIP tokens of the first frame",
}


def time_features(t: Tensor, dim: int) -> Tensor:
    """Cosines, then sines, of t * 10000^(-2i / dim): float32 [..., dim], formed in float64. In float32 they are off by
    4e-5 at t = 1000."""
    half = dim // 2
    freqs = THETA ** (-torch.arange(half, dtype=torch.float64, device=t.device) / half)
    angles = t.double()[..., None] * freqs
    return torch.cat([angles.cos(), angles.sin()], dim=-1).float()


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for weights in it."""
    return torch.promote_types(dtype, torch.float32)


def in_float32(sequence: nn.Sequential, x: Tensor) -> Tensor:
    """Return the output of a sequence of layers, computed in float32 whatever the dtype of its weights."""
    for layer in sequence:
        if isinstance(layer, nn.Linear):
            x = linear_in_float32(layer, x)
        else:
            x = layer(x)
    return x


def linear_in_float32(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return a layer with adapters or quantized weights computes as it does elsewhere."""
    if type(layer) is not nn.Linear:
        return layer(x).to(x)
    dtype = wide(layer.weight.dtype)
    return F.linear(x.to(dtype), layer.weight.to(dtype), layer.bias.to(dtype))


def of_tokens(numbers: Tensor, given: Tensor | None) -> Tensor:
    """Numbers [B, R, D] of each time -> [B, 1, D], or [B, M, D] where `given`, bool [B, M, 1], has the second time."""
    return numbers[:, :1] if given is None else torch.where(given, numbers[:, 1:], numbers[:, :1])


class EnterTokens(nn.Module):
    """Where tensor-parallel ranks begin to share the tokens of a sequence shard."""

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors


class PatchEmbedding(nn.Conv3d):
    """Latents [B, C, F, h, w] -> tokens float32 [B, M, D]: a convolution, as its weight is published, made as a
    matmul."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__(config.in_channels, config.hidden_size, config.patch, stride=config.patch)

    def forward(self, x: Tensor) -> Tensor:
        patches = layers.patchify(x.to(self.weight.dtype), self.stride[1])
        return F.linear(patches, self.weight.flatten(1), self.bias).to(wide(self.weight.dtype))


class ImageEmbedding(nn.Module):
    """CLIP tokens [B, P, image_dim] -> [B, P, D]; those of two images get positions first."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        assert config.image_dim is not None
        width, length = config.image_dim, config.pos_embed_seq_len
        self.emb_pos = None if length is None else nn.Parameter(torch.empty(1, length, width))
        self.proj = nn.Sequential(
            nn.LayerNorm(width, IMAGE_EPS),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, config.hidden_size),
            nn.LayerNorm(config.hidden_size, IMAGE_EPS),
        )

    def forward(self, image: Tensor) -> Tensor:
        dtype = self.proj[1].weight.dtype
        if self.emb_pos is not None:
            image = image + self.emb_pos
        return self.proj(image.to(dtype))


class WanSelfAttention(nn.Module):
    """Attention over all video tokens; queries and keys are normed over the whole width, then rotated."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(width, eps=layers.EPS) for _ in range(2))
        self.attention = Attention(config.attention)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """x [B, M, D], rope [2, M, 1, K/2] -> [B, M, D]; heads are as many as the rank's weights hold."""
        q, k, v = self.norm_q(self.q(x)), self.norm_k(self.k(x)), self.v(x)
        q, k, v = (heads.unflatten(-1, (-1, self.head_dim)) for heads in (q, k, v))
        q, k = layers.rotate_interleaved(q, rope), layers.rotate_interleaved(k, rope)
        return self.o(self.attention(q, k, v).flatten(2))


class WanCrossAttention(nn.Module):
    """Attention to the text, plus attention to CLIP tokens, which have keys and values of their own."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        width, self.head_dim, self.num_images = config.hidden_size, config.head_dim, config.image_tokens
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.norm_q, self.norm_k = (nn.RMSNorm(width, eps=layers.EPS) for _ in range(2))
        if self.num_images:
            self.k_img, self.v_img = (nn.Linear(width, width) for _ in range(2))
            self.norm_k_img = nn.RMSNorm(width, eps=layers.EPS)
        self.attention = Attention(config.attention)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """x [B, M, D], context [B, P + L, D] -> [B, M, D]."""
        image, text = context[:, : self.num_images], context[:, self.num_images :]
        q, k, v = self.norm_q(self.q(x)), self.norm_k(self.k(text)), self.v(text)
        q, k, v = (heads.unflatten(-1, (-1, self.head_dim)) for heads in (q, k, v))
        out = self.attention(q, k, v)
        if self.num_images:
            k, v = self.norm_k_img(self.k_img(image)), self.v_img(image)
            k, v = (heads.unflatten(-1, (-1, self.head_dim)) for heads in (k, v))
            out = out + self.attention(q, k, v)
        return self.o(out.flatten(2))


class WanBlock(nn.Module):
    """Self-attention and MLP, each after a modulation and in front of a gate; between them cross-attention with
    neither."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.modulation = nn.Parameter(torch.empty(1, 6, width))
        self.self_attn = WanSelfAttention(config)
        self.norm3 = nn.LayerNorm(width, layers.EPS)
        self.cross_attn = WanCrossAttention(config)
        self.ffn = layers.mlp(width, config.ffn_dim)

    def forward(self, x: Tensor, numbers: Tensor, context: Tensor, rope: Tensor, given: Tensor | None = None) -> Tensor:
        """x float32 [B, M, D], numbers float32 [B, R, 6, D], context [B, P + L, D], rope [2, M, 1, K/2], given bool
        [B, M, 1] -> new x."""
        dtype = self.norm3.weight.dtype  # those of the linear layers may be quantized
        rows = (self.modulation + numbers).unbind(2)
        shift1, scale1, gate1, shift2, scale2, gate2 = (of_tokens(row, given) for row in rows)
        x = layers.add_gated(x, gate1, self.self_attn(layers.modulate(x, shift1, scale1).to(dtype), rope).to(x))
        normed = F.layer_norm(x, (x.shape[-1],), self.norm3.weight.to(x), self.norm3.bias.to(x), layers.EPS)
        x = x + self.cross_attn(normed.to(dtype), context)
        return layers.add_gated(x, gate2, self.ffn(layers.modulate(x, shift2, scale2).to(dtype)).to(x))


class WanHead(nn.Module):
    """A modulation, then a linear layer in float32: tokens [B, M, D] -> patches [B, M, cells * out_channels]."""

    def __init__(self, config: WanConfig) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.empty(1, 2, config.hidden_size))
        self.head = nn.Linear(config.hidden_size, math.prod(config.patch) * config.out_channels)

    def forward(self, x: Tensor, vec: Tensor, given: Tensor | None = None) -> Tensor:
        """x float32 [B, M, D], vec float32 [B, R, D]."""
        rows = (self.modulation + vec.unsqueeze(2)).unbind(2)
        shift, scale = (of_tokens(row, given) for row in rows)
        return linear_in_float32(self.head, layers.modulate(x, shift, scale))
