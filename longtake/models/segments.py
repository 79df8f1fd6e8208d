"""A video as segments that share a frame with their neighbours, and attention within each of them (arXiv 2504.05298).

Tokens stand in segment order: text_0, frames 0 .. a, text_1, frames a + 1 .. 2a, ... Attention of segment i sees
text_i and frames a i .. a (i + 1), where positions start anew; what two segments make of a frame is averaged.

Shapes: B samples, n segments of a latent frames and one frame before them, P tokens of a frame, L text tokens of a
segment, S = n L + (n a + 1) P tokens, l those of whole segments at hand, D width, N heads, K head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, pairwise

import torch
from torch import Tensor

from longtake.models import layers
from longtake.models.attention import Attention
from longtake.models.cogvideox import JointAttention, Runs
from longtake.models.config import ModelSection


@dataclass(frozen=True)
class Segments:
    """The lengths of the segments of a video."""

    text: int  # L
    frame: int  # P
    frames: int  # a

    @property
    def tokens(self) -> int:
        """Of a segment, without the frame that it shares with the one before."""
        return self.text + self.frames * self.frame

    def join(self, text: Tensor, video: Tensor) -> Tensor:
        """Interleave text [B, n, L, ...] and video [B, (n a + 1) P, ...] to [B, S, ...] in segment order."""
        step = self.frames * self.frame
        parts = video.split([self.frame + step, *[step] * (text.shape[1] - 1)], 1)
        return torch.cat(list(chain.from_iterable(zip(text.unbind(1), parts, strict=True))), 1)

    def part(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inverse of `join`."""
        step, count = self.frames * self.frame, tokens.shape[1] // self.tokens
        parts = tokens.split([self.text, self.frame + step, *[self.text, step] * (count - 1)], 1)
        return torch.stack(parts[::2], 1), torch.cat(parts[1::2], 1)


@dataclass(frozen=True)
class TokenRows:
    """Tokens `start` to `stop` of n segments. Peers cut it as they cut a tensor [B, S, ...]."""

    segments: Segments
    count: int  # n
    start: int
    stop: int

    @classmethod
    def whole(cls, segments: Segments, count: int) -> TokenRows:
        return cls(segments, count, 0, count * segments.tokens + segments.frame)

    @property
    def shape(self) -> tuple[int, int]:
        return 1, self.stop - self.start

    def narrow(self, dim: int, start: int, length: int) -> TokenRows:
        assert dim == 1
        return replace(self, start=self.start + start, stop=self.start + start + length)

    def clone(self) -> TokenRows:
        return self

    @property
    def runs(self) -> Runs:
        """Tokens of text, of video, of text, ... in turn."""
        of, whole = self.segments, TokenRows.whole(self.segments, self.count)
        texts = [0, *(of.frame + i * of.tokens for i in range(1, self.count))]
        bounds = [*chain.from_iterable((text, text + of.text) for text in texts), whole.stop]
        inside = [min(max(bound, self.start), self.stop) for bound in bounds]
        runs = [stop - start for start, stop in pairwise(inside)]
        seen = [i for i, run in enumerate(runs) if run] or [0]
        first = seen[0] // 2 * 2
        return tuple(runs[first : max(seen[-1], first + 1) + 1])  # of each kind one at least, for its parameters


@dataclass(frozen=True)
class Share:
    """Whole segments at hand, and what attention within them has to know."""

    segments: Segments
    rope: Tensor  # fp32 [2, L + (a + 1) P, 1, K/2], of one segment
    is_first: bool  # the video begins with them
    is_last: bool  # the video ends with them


class AttentionInSegments(Attention):
    """q, k, v [B, l, N, K] -> [B, l, N, K]: attention of each segment, all of them in the batch.

    Where the video does not begin with the share at hand, the frame before it is in front of q, k, v and the result:
    half of what it gets.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, share: Share) -> Tensor:
        count = q.shape[1] // share.segments.tokens
        if not count:
            return q
        is_whole = count == 1 and share.is_first and share.is_last  # nothing to lay out anew
        if not is_whole:
            q, k, v = (_fold(x, count, share) for x in (q, k, v))
        q, k = layers.rotate_interleaved(q, share.rope), layers.rotate_interleaved(k, share.rope)
        out = super().forward(q, k, v)
        return out if is_whole else _unfold(out, count, share)


def _fold(x: Tensor, count: int, share: Share) -> Tensor:
    """[B, l, N, K] -> [B n, L + (a + 1) P, N, K]: text, the frame before, frames."""
    lengths = share.segments
    own = [lengths.text, (lengths.frames - 1) * lengths.frame, lengths.frame]
    if share.is_first:
        text, before, *parts = x.split([lengths.text, lengths.frame, *own[1:], *own * (count - 1)], 1)
        parts = [text, *parts]
    else:
        before, *parts = x.split([lengths.frame, *own * count], 1)
    rows = []
    for text, between, last in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        rows += [text, before, between, last]
        before = last
    return torch.cat(rows, 1).unflatten(1, (count, -1)).flatten(0, 1)


def _unfold(out: Tensor, count: int, share: Share) -> Tensor:
    """[B n, L + (a + 1) P, N, K] -> [B, l, N, K], the mean of both where a frame was in two segments."""
    lengths = share.segments
    own = [lengths.text, lengths.frame, (lengths.frames - 1) * lengths.frame, lengths.frame]
    parts = out.unflatten(0, (-1, count)).flatten(1, 2).split(own * count, 1)
    segments = [parts[i : i + 4] for i in range(0, len(parts), 4)]
    lasts = [(last + before) * 0.5 for (*_, last), (_, before, *_) in pairwise(segments)]
    lasts.append(segments[-1][3] if share.is_last else segments[-1][3] * 0.5)
    rows = [[text, between, last] for (text, _, between, _), last in zip(segments, lasts, strict=True)]
    first = segments[0][1]
    if share.is_first:
        rows[0].insert(1, first)
    else:
        rows[0].insert(0, first * 0.5)
    return torch.cat(list(chain.from_iterable(rows)), 1)


class SegmentAttention(JointAttention):
    """Attention within segments, with the layers of CogVideoX's."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__(config, AttentionInSegments)

    def forward(self, x: Tensor, share: Share) -> Tensor:
        """Map x [B, l, D] to [B, l, D]."""
        return self.to_out(self.attention(*self.heads(x), share).flatten(2))
