"""The mixer of TTT-Video: an inner network that learns along the video, from its start and from its end.

What the network reads at a token it has learned from all tokens before, of every segment (arXiv 2504.05298,
2407.04620). Both directions share all weights; a gate adds what each gives.

Shapes: B samples, S tokens in segment order, l those at hand, D width, N heads, K head width; see `segments`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longtake.contracts import UserError
from longtake.models import layers
from longtake.models.cogvideox import Runs, add_gated
from longtake.models.segments import Segments
from longtake.models.ttt_scan import scan_flops, ttt_scan
from longtake.models.ttt_video_config import TTTVideoConfig

Direction = Literal["forward", "backward", "both"]
EPS = 1e-6  # of the norm behind the network
TARGET_EPS = 1e-16  # beside a variance
MLP_RATIO = 4  # hidden layer of an inner MLP over the width of a head


@dataclass(frozen=True)
class ScanOrder:
    """Order in which the network scans the tokens of a video, and the positions that it assumes for them.

    Backward, the video is reversed token by token, the texts as wholes; positions are those of the reversed video. Of
    segments in reverse the first is the one with a frame more.
    """

    mini_batch: int  # tokens of an update
    rope: Tensor  # fp32 [2, S, 1, K/2], in the order of the scan, either way
    backward: Tensor  # [S], for each place in the backward scan the token that comes there
    places: Tensor  # [S], its inverse
    misread: Tensor | None  # [S], whose rate each place in a scan gets, where that is another's; per query [S, b]

    @classmethod
    def of(cls, config: TTTVideoConfig, segments: Segments, count: int, rope: Tensor) -> ScanOrder:
        """`rope`: fp32 [2, V, K/2] of the video's tokens; `count`: segments."""
        origin = rope.new_zeros(2, count, segments.text, rope.shape[-1])
        origin[0] = 1
        whole = segments.join(origin, rope).unsqueeze(2)
        tokens = torch.arange(whole.shape[1], device=rope.device)
        text, video = segments.part(tokens[None])
        backward = segments.join(text.flip(1), video.flip(1))[0]
        places = torch.empty_like(backward).scatter_(0, backward, tokens)
        mini_batch = _mini_batch(config, segments, count)
        misread = None
        if config.rates != "aligned" and count > 1:
            misread = _misread(config.rates, segments, count, mini_batch, tokens)
        return cls(mini_batch, whole, backward, places, misread)


def _mini_batch(config: TTTVideoConfig, segments: Segments, count: int) -> int:
    if config.mixer != "large_chunk":
        return config.mini_batch_size
    if config.chunk == "frame":
        return segments.frame
    if config.chunk == "segment":
        return -(-(count * segments.tokens + segments.frame) // max(1, count))  # an image has none
    return config.chunk


def inner_flops(config: TTTVideoConfig, segments: Segments, count: int) -> int:
    """Floating-point operations of the products of a network that learns along so many segments, both ways."""
    width, tokens = config.head_dim, count * segments.tokens + segments.frame
    hidden = 0 if config.mixer == "ttt_linear" else MLP_RATIO * width
    sizes = config.num_attention_heads, width, hidden, _mini_batch(config, segments, count)
    return 2 * scan_flops(1, tokens, *sizes)


def _misread(rates: str, segments: Segments, count: int, mini_batch: int, tokens: Tensor) -> Tensor:
    """Whose rate the published program gives to the token at each place of a scan: its GPU kernels [S], its PyTorch
    operations to each token for each query of its mini-batch [S, b].

    Rates are a matrix for each mini-batch of [texts | video], with the same row for each of its tokens; rows are put
    in segment order, columns stay, and kernels read the last row of what is then a mini-batch.
    """
    if len(tokens) % mini_batch:
        raise UserError(
            f'model.rates = "{rates}": {len(tokens)} tokens do not divide into mini-batches of {mini_batch}, as the '
            "published program needs; choose another length of texts, or aligned rates"
        )
    texts = tokens[: count * segments.text].view(1, count, -1)
    joined = segments.join(texts, tokens[None, count * segments.text :])[0]  # place in the scan -> in [texts | video]
    places = torch.empty_like(joined).scatter_(0, joined, tokens)
    rows = places[joined[:, None] // mini_batch * mini_batch + tokens[:mini_batch]]
    return rows if rates == "per_query" else rows[mini_batch - 1 :: mini_batch].flatten()


class _Reordered(torch.autograd.Function):
    """x [B, S, ...] at other places: place i gets token `order[i]`; `places` is the inverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        return x.index_select(1, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(1, ctx.saved_tensors[0]), None, None


class Scan(nn.Module):
    """The inner network of each head, how it begins, and what it is to learn: from keys the values less the keys, of
    which a norm, which it shares, makes a target."""

    def __init__(self, config: TTTVideoConfig) -> None:
        super().__init__()
        heads, width = config.num_attention_heads, config.head_dim
        self.base_rate, self.eps = config.ttt_base_lr, config.inner_eps
        self.norm_weight = nn.Parameter(torch.empty(heads, width))
        self.norm_bias = nn.Parameter(torch.empty(heads, width))
        hidden = width if config.mixer == "ttt_linear" else MLP_RATIO * width
        self.W1 = nn.Parameter(torch.empty(heads, width, hidden))
        self.b1 = nn.Parameter(torch.empty(heads, 1, hidden))
        if config.mixer != "ttt_linear":
            self.W2 = nn.Parameter(torch.empty(heads, hidden, width))
            self.b2 = nn.Parameter(torch.empty(heads, 1, width))

    @property
    def state(self) -> tuple[Tensor, ...]:
        return (self.W1, self.b1, self.W2, self.b2) if hasattr(self, "W2") else (self.W1, self.b1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rate: Tensor, order: ScanOrder, direction: Direction) -> Tensor:
        """q, k, v [B, S, N, K] as projected, rate [B, S, N, 1] before the sigmoid -> [B, S, N, K]; for `both`
        directions [B, S, N, 2 K]."""
        heads = q, k, v, rate
        turned = (
            () if direction == "forward" else tuple(_Reordered.apply(x, order.backward, order.places) for x in heads)
        )
        if direction == "both":
            turned = tuple(torch.cat(pair) for pair in zip(heads, turned, strict=True))
        out = self._in_order(*(turned or heads), order)
        if direction == "forward":
            return out
        if direction == "backward":
            return _Reordered.apply(out, order.places, order.backward)
        out, turned = out.chunk(2)
        return torch.cat([out, _Reordered.apply(turned, order.places, order.backward)], -1)

    def _in_order(self, q: Tensor, k: Tensor, v: Tensor, rate: Tensor, order: ScanOrder) -> Tensor:
        q, k = (layers.rotate_interleaved(F.normalize(x, dim=-1, eps=1e-12), order.rope) for x in (q, k))
        steps = rate.squeeze(-1).to(torch.promote_types(rate.dtype, torch.float32)).sigmoid()
        steps = steps * (self.base_rate / (q.shape[-1] * order.mini_batch))
        if order.misread is not None:
            steps = steps[:, order.misread]  # [B, S, N], per query [B, S, b, N]
            steps = steps.mT if order.misread.dim() > 1 else steps
        target = _target(k, v, self.norm_weight, self.norm_bias)
        norm = self.norm_weight, self.norm_bias
        return ttt_scan(q, k, target, steps, *norm, self.state, order.mini_batch, eps=self.eps)


def _target(k: Tensor, v: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return weight * (d - mean) / std + bias with d = v - k and std of K - 1 degrees of freedom: [B, S, N, K].

    By the kernel of a norm, of which backward wants little memory; the published program has 1e-8 beside std.
    """
    width = k.shape[-1]
    d = F.layer_norm(v - k, (width,), eps=TARGET_EPS)
    return torch.addcmul(bias, weight * ((width - 1) / width) ** 0.5, d)


class DirectionGate(nn.Module):
    """tokens + tanh(gate) * out, with a gate for text and one for video, [D] each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.text, self.video = (nn.Parameter(torch.empty(width)) for _ in range(2))

    def forward(self, tokens: Tensor, out: Tensor, runs: Runs) -> Tensor:
        return add_gated(tokens, out, self.text.tanh(), self.video.tanh(), runs)


class TTT(nn.Module):
    """Adds to tokens what an inner network gives that has learned along them: forward, then backward."""

    def __init__(self, config: TTTVideoConfig) -> None:
        super().__init__()
        width, self.head_dim = config.hidden_size, config.head_dim
        self.is_parallel = config.directions == "parallel"
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in range(4))
        self.rate = nn.Linear(width, config.num_attention_heads)
        self.scan = Scan(config)
        self.post_norm = nn.LayerNorm(width, EPS)
        self.forward_gate, self.backward_gate = DirectionGate(width), DirectionGate(width)

    def forward(self, tokens: Tensor, runs: Runs, order: ScanOrder) -> Tensor:
        """Map tokens [B, l, D] to [B, l, D]."""
        if not self.is_parallel:
            tokens = self.forward_gate(tokens, self.one_way(tokens, order, "forward"), runs)
            return self.backward_gate(tokens, self.one_way(tokens, order, "backward"), runs)
        ahead, back = self.scan(*self.heads(tokens), order, "both").chunk(2, -1)
        tokens = self.forward_gate(tokens, self.joined(ahead), runs)
        return self.backward_gate(tokens, self.joined(back), runs)

    def one_way(self, tokens: Tensor, order: ScanOrder, direction: Direction) -> Tensor:
        """Return the layer without its gate."""
        return self.joined(self.scan(*self.heads(tokens), order, direction))

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v [B, l, N, K], and what makes the inner learning rate [B, l, N, 1]."""
        q, k, v = (to(x).unflatten(-1, (-1, self.head_dim)) for to in (self.wq, self.wk, self.wv))
        return q, k, v, self.rate(x).unsqueeze(-1)

    def joined(self, heads: Tensor) -> Tensor:
        return self.wo(self.post_norm(heads.flatten(2)))
