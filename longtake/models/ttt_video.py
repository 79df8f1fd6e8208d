"""The transformer of TTT-Video: CogVideoX-5B's blocks with attention within segments, and what looks past them.

Videos have a text for each segment of three seconds. Tokens stay in segment order from first block to last. Names are
CogVideoX's; what is new in a block lies in `ttt` (`models.ttt`).

Shapes: B samples, n segments, C latent channels, F latent frames, h w latent grid, E width of the embedded timestep;
others as in `models.segments`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor, nn

from longtake import random
from longtake.contracts import Conditions, UserError
from longtake.models import layers
from longtake.models.cogvideox import AdaNorm, CogVideoX, JointBlock, Runs
from longtake.models.cogvideox_positions import THETA
from longtake.models.initial import linear_uniform
from longtake.models.plans import ANY, Exchange, Halo, SequencePlan, TensorSplit, check_conditions
from longtake.models.segments import SegmentAttention, Segments, Share, TokenRows
from longtake.models.ttt import TTT, ScanOrder, inner_flops
from longtake.models.ttt_video_config import TTTVideoConfig

EPS = 1e-6  # of norms over the width
STD = 0.02  # of initial inner networks and of what makes their rates
GATE = 0.1  # what the gates of both directions start with


@dataclass(frozen=True)
class Where:
    """Positions of the tokens, as a block needs them."""

    share: Share
    order: ScanOrder | None


class TTTVideo(nn.Module):
    """Predicts v from noised latents at timesteps 0 to 999, given as float32; 999 is noise.

    Computes in the dtype of its weights and casts its inputs itself; the timestep is cast only after its sinusoids.
    """

    blocks: ClassVar[Mapping[str, str]] = MappingProxyType({"transformer_blocks": "num_layers"})
    varying_dims: ClassVar[Mapping[str, tuple[tuple[int, ...], ...]]] = MappingProxyType(
        {"transformer_blocks": ((0, 1), (0,), (), ())}
    )
    tensor_plan: ClassVar[Mapping[str, TensorSplit]] = MappingProxyType(
        {
            f"transformer_blocks.*.{layer}": TensorSplit(kind, (), ("segment_order",))
            for layer, kind in (
                *((f"attn1.to_{one}", "column") for one in "qkv"),
                ("attn1.to_out", "row"),
                ("ff.0", "column"),
                ("ff.2", "row"),
                *((f"ttt.w{one}", "whole") for one in "qkvo"),
            )
        }
    )
    sequence_plan: ClassVar[SequencePlan] = SequencePlan(
        split=MappingProxyType({"segment_order": 1, "rows": 1}),
        gather=MappingProxyType({"proj_out": "segment_order"}),
        exchanges=MappingProxyType(
            {
                "transformer_blocks.*.attn1.attention": Halo("segment_order", "frame", tensors=3),
                "transformer_blocks.*.ttt.scan": Exchange(
                    ("segment_order",),
                    ring=False,
                    of_heads=("norm_weight", "norm_bias", "W1", "b1", "W2", "b2"),
                    by_tensor_peers=True,
                ),
            }
        ),
        entry=MappingProxyType({"enter": ("segment_order", "rows")}),
        units=MappingProxyType({"segment_order": "segment", "rows": "segment"}),
    )

    def __init__(self, config: TTTVideoConfig) -> None:
        super().__init__()
        self.config = config
        width, cells, embedded = config.hidden_size, math.prod(config.patch), config.time_embed_dim
        self.patch_embed = nn.ModuleDict(
            {
                "proj": nn.Linear(config.out_channels * cells, width),
                "text_proj": nn.Linear(config.text_embed_dim, width),
            }
        )
        self.time_embedding = layers.MLPEmbedder(width, embedded)
        quarter = config.head_dim // 4
        self.rotations = layers.RotaryPositions((quarter, quarter * 3 // 2, quarter * 3 // 2), THETA)
        self.segment_order, self.rows, self.enter = SegmentOrder(), AllRows(), Enter()
        self.transformer_blocks = nn.ModuleList(SegmentBlock(config) for _ in range(config.num_layers))
        self.norm_final = nn.LayerNorm(width, EPS)
        self.norm_out = AdaNorm(embedded, width, EPS)
        self.proj_out = nn.Linear(width, config.out_channels * cells)
        self._fan_in = {name: layer.in_features for name, layer in self.named_modules() if isinstance(layer, nn.Linear)}

    def forward(self, x: Tensor, t: Tensor, conditions: Conditions) -> Tensor:
        """Predict [B, C, F, h, w] in the weights' dtype from x [B, C, F, h, w] and t float32 [B].

        F = n segment_frames + 1. Conditions: `text` [B, n, L, text_embed_dim]; every token is attended, of any L.
        Raises `UserError` for a missing or misshapen condition, and for another F.
        """
        self._check_inputs(x, t, conditions)
        config, text = self.config, conditions["text"]
        dtype = self.proj_out.weight.dtype
        vec = self.time_embedding(layers.timestep_features(t, config.hidden_size, factor=1.0))
        grid = layers.token_grid(x.shape[2:], config.patch_size)
        segments = Segments(text.shape[2], grid[1] * grid[2], config.segment_frames)
        video = self.patch_embed["proj"](layers.patchify(x.to(dtype), config.patch_size))
        tokens = self.segment_order(segments, self.patch_embed["text_proj"](text.to(dtype)), video)
        rows = self.rows(segments, text.shape[1])
        where = self._where(rows, grid, x.device)
        tokens, rows = self.enter(tokens, rows)
        for block in self.transformer_blocks:
            tokens = block(tokens, vec, rows.runs, where)
        out = self.proj_out(self.norm_out(self.norm_final(tokens), vec))
        return layers.unpatchify(segments.part(out)[1], x.shape[2:], config.patch_size)

    def _where(self, rows: TokenRows, grid: Sequence[int], device: torch.device) -> Where:
        """Of whole segments of a video of this grid; position tables are those of all blocks."""
        config, segments = self.config, rows.segments
        rope = self.rotations(grid, device)
        of_one = layers.join_positions(segments.text, rope[:, : (segments.frames + 1) * segments.frame])
        if config.rotations == "bfloat16":
            of_one = of_one.bfloat16().float()
        is_last = rows.stop == TokenRows.whole(segments, rows.count).stop
        share = Share(segments, of_one, rows.start == 0, is_last)
        return Where(share, None if config.mixer == "none" else ScanOrder.of(config, segments, rows.count, rope))

    def _check_inputs(self, x: Tensor, t: Tensor, conditions: Conditions) -> None:
        config = self.config
        assert t.dtype == torch.float32, f"timesteps must be float32, found {t.dtype}: bf16 cannot tell them apart"
        batch, channels, *size = x.shape
        if channels != config.out_channels:
            raise UserError(
                f"model.out_channels = {config.out_channels}: the latents have {channels} channels; write "
                f"out_channels = {channels}, or choose another ae"
            )
        if refusal := config.refuses_length(size[0]):
            raise UserError(f"model: {refusal}")
        needs = self.needs(config, (channels, *size), ANY)
        check_conditions("TTT-Video", needs, conditions, batch, {"text": "pass the embeddings of a text a segment"})

    @staticmethod
    def needs(
        config: TTTVideoConfig, latent: tuple[int, int, int, int], text_tokens: int
    ) -> dict[str, tuple[int, ...]]:
        return {"text": (config.num_segments(latent[1]), text_tokens, config.text_embed_dim)}

    @staticmethod
    def units(config: TTTVideoConfig, latent: tuple[int, int, int, int], text_tokens: int) -> dict[str, int]:
        frame = math.prod(layers.token_grid(latent[1:], config.patch_size)[1:])
        return {"frame": frame, "segment": Segments(text_tokens, frame, config.segment_frames).tokens}

    @staticmethod
    def tokens(config: TTTVideoConfig, latent: tuple[int, int, int, int]) -> int:
        return math.prod(layers.token_grid(latent[1:], config.patch_size))

    @staticmethod
    def heads(config: TTTVideoConfig) -> int:
        return config.num_attention_heads

    @staticmethod
    def mixed_width(config: TTTVideoConfig) -> int:
        return config.hidden_size * (1 if config.mixer == "none" else 3)

    @staticmethod
    def traced_frames(config: TTTVideoConfig) -> tuple[int, ...]:
        return tuple(config.segment_frames * count + 1 for count in range(1, 7))

    def initial_value(self, name: str, shape: Sequence[int], seed: int) -> Tensor:
        """Return the initial value of the parameter `name`, whole, in fp32 on the default device: a function of (seed,
        name).

        Linear layers: uniform within +-1/sqrt(fan in); inner networks and the weights of their rates: normal with
        deviation 0.02, their biases zero; gates 0.1; norms one and zero. `init="zero_gate"`: as CogVideoX's.
        """
        layer, _, kind = name.rpartition(".")
        if layer.endswith("_gate"):
            return torch.full(tuple(shape), GATE)
        if kind in ("W1", "W2") or name.endswith("ttt.rate.weight"):
            values = torch.from_numpy(random.parameter_normals(seed, name, math.prod(shape)))
            return (STD * values).view(*shape).to(torch.get_default_device())
        if self.config.init == "zero_gate" and layer.endswith(CogVideoX.zero_gates):
            return torch.zeros(*shape)
        if layer in self._fan_in and not layer.endswith("ttt.rate"):
            return linear_uniform(name, shape, self._fan_in[layer], seed)
        return torch.ones(*shape) if kind.endswith("weight") else torch.zeros(*shape)

    @staticmethod
    def forward_flops(config: TTTVideoConfig, latent: tuple[int, int, int, int], text_tokens: int) -> int:
        """Floating-point operations of one forward pass of one sample, counted as `MMDiT.forward_flops` counts."""
        D, embedded, cells = config.hidden_size, config.time_embed_dim, math.prod(config.patch)
        video, count = TTTVideo.tokens(config, latent), config.num_segments(latent[1])
        segments = Segments(text_tokens, video // latent[1], config.segment_frames)
        total, seen = video + count * text_tokens, segments.tokens + segments.frame
        block = total * 24 * D**2 + 4 * count * seen**2 * D + 2 * embedded * 12 * D
        if config.mixer != "none":
            projections = 3 * D + config.num_attention_heads
            passes = 1 if config.directions == "parallel" else 2
            block += total * 2 * D * (passes * projections + 2 * D) + inner_flops(config, segments, count)
        vectors = 2 * embedded * (D + embedded + 2 * D)
        ends = (video + total) * config.out_channels * cells + count * text_tokens * config.text_embed_dim
        return config.num_layers * block + vectors + 2 * D * ends


class SegmentOrder(nn.Module):
    """text [B, n, L, D], video [B, V, D] -> [B, S, D]."""

    def forward(self, segments: Segments, text: Tensor, video: Tensor) -> Tensor:
        return segments.join(text, video)


class AllRows(nn.Module):
    """The rows of all tokens, for peers to cut as they cut these."""

    def forward(self, segments: Segments, count: int) -> TokenRows:
        return TokenRows.whole(segments, count)


class Enter(nn.Module):
    """Tokens [B, S, D] and their rows, as they go to the blocks."""

    def forward(self, tokens: Tensor, rows: TokenRows) -> tuple[Tensor, TokenRows]:
        return tokens, rows


class SegmentBlock(JointBlock):
    """A block of CogVideoX in which tokens see their segment, and through the mixer all others."""

    def __init__(self, config: TTTVideoConfig) -> None:
        super().__init__(config, SegmentAttention(config), EPS)
        self.ttt = None if config.mixer == "none" else TTT(config)

    def mix(self, x: Tensor, runs: Runs, where: Where) -> Tensor:
        x = self.attn1(x, where.share)
        return x if self.ttt is None else self.ttt(x, runs, where.order)
