"""The transformer of CogVideoX and CogVideoX-Fun: [text | video] as one sequence through one list of blocks.

Text and video share every weight of a block but the modulation: the timestep shifts, scales and gates the rows of
either by numbers of their own. Positions are sines added to the video's tokens (2B), rotations of queries and keys
(5B, 1.5), or rotations and a learned table (5B-I2V). Parameter names are diffusers', `weights/cogvideox.py` says which
are not.

Shapes: B batch, C latent channels, F latent frames, h w latent grid, L text tokens, M video tokens, S = L + M,
D width, N heads, K = D / N head width, E width of the embedded timestep.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.contracts import Conditions, UserError
from longtake.models import layers
from longtake.models.attention import Attention
from longtake.models.cogvideox_config import CogVideoXConfig
from longtake.models.cogvideox_positions import GridRotations, LearnedPositions, SinePositions
from longtake.models.config import ModelSection
from longtake.models.initial import linear_uniform
from longtake.models.plans import ANY, Exchange, SequencePlan, TensorSplit, check_conditions

OFFSET = 2.0  # what the offset of CogVideoX 1.5 I2V is in training and sampling
EPS = 1e-5  # of norms over the width
Runs = tuple[int, ...]  # rows of text, of video, of text, ... in turn
_TEXT, _VIDEO = "patch_embed.text_proj", "patch_embed.proj"
_JOINED = (_TEXT, _VIDEO)  # the order of the joined sequence


class CogVideoX(nn.Module):
    """Predicts v from noised latents at timesteps 0 to 999, given as float32; 999 is noise.

    Computes in the dtype of its weights and casts its inputs itself; the timestep is cast only after its sinusoids.
    """

    blocks: ClassVar[Mapping[str, str]] = MappingProxyType({"transformer_blocks": "num_layers"})
    varying_dims: ClassVar[Mapping[str, tuple[tuple[int, ...], ...]]] = MappingProxyType(
        {"transformer_blocks": ((0, 1), (0,), (), (1,))}
    )  # of each argument of a block, the dims that differ from bucket to bucket
    tensor_plan: ClassVar[Mapping[str, TensorSplit]] = MappingProxyType(
        {
            f"transformer_blocks.*.{layer}": TensorSplit(kind, (), _JOINED)
            for layer, kind in (
                *((f"attn1.to_{one}", "column") for one in "qkv"),
                ("attn1.to_out", "row"),
                ("ff.0", "column"),
                ("ff.2", "row"),
            )
        }
    )
    sequence_plan: ClassVar[SequencePlan] = SequencePlan(
        split=MappingProxyType({_VIDEO: 1, _TEXT: 1, "rotations": 1, "video_positions": 1, "text_positions": 1}),
        gather=MappingProxyType({"proj_out": _VIDEO}),
        exchanges=MappingProxyType({"transformer_blocks.*.attn1.attention": Exchange(_JOINED)}),
        entry=MappingProxyType({"join": _JOINED}),
    )
    zero_gates: ClassVar[tuple[str, ...]] = ("norm1.linear", "norm2.linear", "norm_out.linear", "proj_out")

    def __init__(self, config: CogVideoXConfig) -> None:
        super().__init__()
        self.config = config
        width, cells, embedded = config.hidden_size, math.prod(config.patch), config.time_embed_dim
        self.patch_embed = nn.ModuleDict(
            {
                "proj": nn.Linear(config.in_channels * cells, width),
                "text_proj": nn.Linear(config.text_embed_dim, width),
            }
        )
        self.time_embedding = layers.MLPEmbedder(width, embedded)
        self.ofs_embedding = layers.MLPEmbedder(embedded, embedded) if config.ofs_embed_dim else None
        self.rotations = GridRotations(config) if config.use_rotary_positional_embeddings else None
        if config.use_learned_positional_embeddings:
            self.video_positions: nn.Module | None = LearnedPositions(width, config.base_grid)
            self.text_positions: nn.Module | None = LearnedPositions(width, (config.max_text_seq_length,))
        else:
            self.video_positions = None if config.use_rotary_positional_embeddings else SinePositions(config)
            self.text_positions = None
        self.join = Join()
        self.transformer_blocks = nn.ModuleList(JointBlock(config) for _ in range(config.num_layers))
        self.norm_final = nn.LayerNorm(width, EPS)
        self.norm_out = AdaNorm(embedded, width)
        self.proj_out = nn.Linear(width, config.out_channels * cells)
        self._fan_in = {name: layer.in_features for name, layer in self.named_modules() if isinstance(layer, nn.Linear)}

    def forward(self, x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        """Predict [B, C, F, h, w] in the weights' dtype from x [B, C, F, h, w] and t float32 [B].

        Any F, h, w: a grid that the patch does not divide is filled up with zeros inside and cut afterwards.
        Conditions: `text` [B, L, text_embed_dim] (every token is attended), and where the model has `visual`:
        `visual` [B, C, F, h, w] (image) or [B, 1 + C, F, h, w] (inpaint: mask, then latents), or `control`
        [B, C, F, h, w]. Raises `UserError` for a missing or misshapen condition.
        """
        config = self.config
        self._check_inputs(x, t, conditions)
        dtype = self.proj_out.weight.dtype
        vec = self.time_embedding(layers.timestep_features(t, config.hidden_size, factor=1.0))
        if self.ofs_embedding is not None:
            offset = torch.full_like(t, OFFSET)
            vec = vec + self.ofs_embedding(layers.timestep_features(offset, config.time_embed_dim, factor=1.0))
        beside = (conditions[name].to(x) for name in config.conditions if name != "text")
        folded = fold_frames(torch.cat([x, *beside], dim=1).to(dtype), config.patch[0])
        grid = layers.token_grid(folded.shape[2:], config.patch_size)
        video = self.patch_embed["proj"](layers.patchify(folded, config.patch_size))
        text = self.patch_embed["text_proj"](conditions["text"].to(dtype))
        rope = () if self.rotations is None else (layers.join_positions(text.shape[1], self.rotations(grid, x.device)),)
        places, text_places = self._instead_of_tables(grid, x.device)
        if self.video_positions is not None:
            video = video + self.video_positions(grid, x.device, *places).to(dtype)
        if self.text_positions is not None:
            text = text + self.text_positions((config.max_text_seq_length,), x.device, *text_places).to(dtype)

        tokens, runs = self.join(text, video)
        for block in self.transformer_blocks:
            tokens = block(tokens, vec, runs, *rope)
        video = self.norm_out(self.norm_final(tokens[:, runs[0] :]), vec)
        out = layers.unpatchify(self.proj_out(video), folded.shape[2:], config.patch_size)
        return out if config.patch[0] == 1 else unfold_frames(out, x.shape[2], config.patch[0])

    def _instead_of_tables(
        self, grid: Sequence[int], device: torch.device
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """At lengths other than its own diffusers has sines in place of the learned table, and nothing for text."""
        config = self.config
        if self.text_positions is None or config.positions == "fun" or grid[0] == config.base_grid[0]:
            return (), ()
        nothing = torch.zeros(1, config.max_text_seq_length, config.hidden_size, device=device)
        return (SinePositions(config)(grid, device),), (nothing,)

    def _check_inputs(self, x: Tensor, t: Tensor, conditions: Conditions) -> None:
        config = self.config
        assert t.dtype == torch.float32, f"timesteps must be float32, found {t.dtype}: bf16 cannot tell them apart"
        batch, channels, *size = x.shape
        if channels != config.out_channels:
            raise UserError(
                f"model.out_channels = {config.out_channels}: the latents have {channels} channels; write "
                f"out_channels = {channels}, or choose another ae"
            )
        text_tokens = ANY if self.text_positions is None else config.max_text_seq_length
        needs = self.needs(config, (channels, *size), text_tokens)
        check_conditions("CogVideoX", needs, conditions, batch, _REMEDIES)

    @staticmethod
    def needs(
        config: CogVideoXConfig, latent: tuple[int, int, int, int], text_tokens: int
    ) -> dict[str, tuple[int, ...]]:
        needs: dict[str, tuple[int, ...]] = {"text": (text_tokens, config.text_embed_dim)}
        if config.visual_condition is not None:
            needs[config.visual_condition] = (config.visual_channels, *latent[1:])
        return needs

    @staticmethod
    def tokens(config: CogVideoXConfig, latent: tuple[int, int, int, int]) -> int:
        return math.prod(-(-size // patch) for size, patch in zip(latent[1:], config.patch, strict=True))

    @staticmethod
    def heads(config: CogVideoXConfig) -> int:
        return config.num_attention_heads

    def initial_value(self, name: str, shape: Sequence[int], seed: int) -> Tensor:
        """Return the initial value of the parameter `name`, whole, in fp32 on the default device: a function of (seed,
        name).

        Linear layers: uniform within +-1/sqrt(fan in); norms: one and zero; learned positions: the sines of the 2B
        model, zero for text. `init="zero_gate"`: modulation and last layer zero.
        """
        layer, _, kind = name.rpartition(".")
        if layer == "video_positions":
            device = torch.get_default_device()
            return SinePositions(self.config)(self.config.base_grid, device).view(*shape)
        if layer == "text_positions":
            return torch.zeros(*shape)
        if layer not in self._fan_in:
            return torch.ones(*shape) if kind == "weight" else torch.zeros(*shape)
        if self.config.init == "zero_gate" and layer.endswith(self.zero_gates):
            return torch.zeros(*shape)
        return linear_uniform(name, shape, self._fan_in[layer], seed)

    @staticmethod
    def forward_flops(config: CogVideoXConfig, latent: tuple[int, int, int, int], text_tokens: int) -> int:
        """Floating-point operations of one forward pass of one sample, counted as `MMDiT.forward_flops` counts."""
        D, embedded, cells = config.hidden_size, config.time_embed_dim, math.prod(config.patch)
        video = CogVideoX.tokens(config, latent)
        total = video + text_tokens
        block = total * 24 * D**2 + 4 * total**2 * D + 2 * embedded * 12 * D
        vectors = 2 * embedded * (D + embedded + (2 * embedded if config.ofs_embed_dim else 0) + 2 * D)
        ends = video * (config.in_channels + config.out_channels) * cells + text_tokens * config.text_embed_dim
        return config.num_layers * block + vectors + 2 * D * ends


_REMEDIES = {
    "text": "pass the token embeddings of the prompt",
    "visual": "pass what is known of the video (zeros where nothing is) or set model.visual to None",
    "control": "give a control video (`companions.control` in generation), or set model.visual to None",
}


def fold_frames(x: Tensor, frames: int) -> Tensor:
    """[B, C, F, h, w] -> [B, C * frames, F / frames, h, w], channels in (c, t) order, F filled up with zeros."""
    if frames == 1:
        return x
    x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[2] % frames))
    return x.unflatten(2, (-1, frames)).transpose(2, 3).flatten(1, 2)


def unfold_frames(x: Tensor, num_frames: int, frames: int) -> Tensor:
    """Return the inverse of `fold_frames`, cut to so many frames."""
    whole = x.unflatten(1, (-1, frames)).transpose(2, 3).flatten(2, 3)
    return whole[:, :, :num_frames].clone()  # FSDP2 warns of views


class Join(nn.Module):
    """text [B, L, D], video [B, M, D] -> one sequence [B, S, D], and its runs."""

    def forward(self, text: Tensor, video: Tensor) -> tuple[Tensor, Runs]:
        return torch.cat([text, video], dim=1), (text.shape[1], video.shape[1])


class ExpertNorm(nn.Module):
    """LayerNorm, shifted and scaled for text and for video rows, and the gates of either."""

    def __init__(self, embedded: int, width: int, eps: float = EPS) -> None:
        super().__init__()
        self.linear = nn.Linear(embedded, 6 * width)
        self.norm = nn.LayerNorm(width, eps)

    def forward(self, tokens: Tensor, vec: Tensor, runs: Runs) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normed tokens, the gate of text rows and that of video rows [B, 1, D] for tokens [B, S, D], vec
        [B, E]."""
        modulation = self.linear(F.silu(vec)).unsqueeze(1).chunk(6, dim=-1)
        shift, scale, gate, text_shift, text_scale, text_gate = modulation
        kinds = (text_shift, text_scale), (shift, scale)
        parts = enumerate(self.norm(tokens).split(runs, 1))
        normed = torch.cat([torch.addcmul(kinds[i % 2][0], x, 1 + kinds[i % 2][1]) for i, x in parts], 1)
        return normed, text_gate, gate


def add_gated(tokens: Tensor, out: Tensor, text_gate: Tensor, gate: Tensor, runs: Runs) -> Tensor:
    """Return tokens + gate * out, with a gate for the text rows and one for the video rows."""
    parts = enumerate(zip(tokens.split(runs, 1), out.split(runs, 1), strict=True))
    return torch.cat([torch.addcmul(x, gate if i % 2 else text_gate, y) for i, (x, y) in parts], 1)


class JointAttention(nn.Module):
    """Attention over the joined sequence; queries and keys are normed over the head width, then rotated."""

    def __init__(self, config: ModelSection, kernel: type[Attention] = Attention) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(width, width) for _ in range(4))
        self.norm_q, self.norm_k = (nn.LayerNorm(config.head_dim, layers.EPS) for _ in range(2))
        self.attention = kernel(config.attention)

    def heads(self, x: Tensor, rope: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k, v [B, S, N, K] of x [B, S, D], with as many heads as the available weights hold."""
        q, k, v = (to(x).unflatten(-1, (-1, self.head_dim)) for to in (self.to_q, self.to_k, self.to_v))
        q, k = self.norm_q(q), self.norm_k(k)
        if rope is not None:
            q, k = layers.rotate_interleaved(q, rope), layers.rotate_interleaved(k, rope)
        return q, k, v

    def forward(self, x: Tensor, rope: Tensor | None) -> Tensor:
        """Map x [B, S, D] to [B, S, D]."""
        return self.to_out(self.attention(*self.heads(x, rope)).flatten(2))


class JointBlock(nn.Module):
    """Attention and MLP, each behind a modulation and before a gate."""

    def __init__(self, config: ModelSection, attention: nn.Module | None = None, eps: float = EPS) -> None:
        super().__init__()
        width = config.hidden_size
        self.norm1 = ExpertNorm(config.time_embed_dim, width, eps)
        self.attn1 = JointAttention(config) if attention is None else attention
        self.norm2 = ExpertNorm(config.time_embed_dim, width, eps)
        self.ff = layers.mlp(width, 4 * width)

    def forward(self, tokens: Tensor, vec: Tensor, runs: Runs, where: Any = None) -> Tensor:
        """Return the new tokens for tokens [B, S, D], vec [B, E] and the tokens' positions (rope [2, S, 1, K/2])."""
        x, text_gate, gate = self.norm1(tokens, vec, runs)
        tokens = add_gated(tokens, self.mix(x, runs, where), text_gate, gate, runs)
        x, text_gate, gate = self.norm2(tokens, vec, runs)
        return add_gated(tokens, self.ff(x), text_gate, gate, runs)

    def mix(self, x: Tensor, runs: Runs, where: Any) -> Tensor:
        """Mix tokens by attention, [B, S, D] -> [B, S, D]."""
        return self.attn1(x, where)


class AdaNorm(nn.Module):
    """(1 + scale) * LayerNorm(x) + shift, by the embedded timestep."""

    def __init__(self, embedded: int, width: int, eps: float = EPS) -> None:
        super().__init__()
        self.linear = nn.Linear(embedded, 2 * width)
        self.norm = nn.LayerNorm(width, eps)

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        shift, scale = self.linear(F.silu(vec)).unsqueeze(1).chunk(2, dim=-1)
        return torch.addcmul(shift, self.norm(x), 1 + scale)
