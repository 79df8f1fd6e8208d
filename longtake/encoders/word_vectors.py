"""A text encoder without parameters: each word has a fixed random vector, shared by all captions that use it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
import torch
from torch import Tensor

from longtake.data.clips.captions import caption_end
from longtake.encoders.tokens import Overflow
from longtake.random import parameter_normals

_WORD = re.compile(r"[\w']+")
_CACHE_CAPTIONS = 4096


class WordTokens:
    """Captions as at most `max_length` words, lower-case."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length

    def cut(self, text: str) -> tuple[list[str], list[str]]:
        """Return the words of a caption that are used, those of its rate and scores among them; and those
        that are cut."""
        words = _WORD.findall(text.lower())
        if len(words) <= self.max_length:
            return words, []
        num_end = len(_WORD.findall(caption_end(text).lower()))
        num_end = num_end if num_end < self.max_length else 0
        room, end = self.max_length - num_end, len(words) - num_end
        return words[:room] + words[end:], words[room:end]

    def overflow(self, text: str) -> Overflow | None:
        """How a caption is too long; None for one that fits."""
        kept, lost = self.cut(text)
        return Overflow(len(kept) + len(lost), self.max_length, " ".join(lost)) if lost else None


class WordEncoder:
    """Words -> standard normal vectors drawn by the word's own hash, plus half a vector drawn by its position.

    It needs no training and no download and is the same in every process. It knows nothing of meaning: two words are
    as far apart as any other two.
    """

    def __init__(self, dim: int, max_length: int, pooled: bool = False) -> None:
        """pooled: `embed` gives one vector for a caption, not one for each word."""
        self.dim, self.max_length, self.pooled = dim, max_length, pooled
        self.tokens = WordTokens(max_length)
        self._vector = cache(self._drawn)
        self._embedded = lru_cache(_CACHE_CAPTIONS)(self._embed)

    def encode(self, texts: list[str] | tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Captions -> tokens float32 `[B, max_length, dim]` (zeros after the last word) and pooled float32 `[B, dim]`.

        Pooled is the sum of the caption's word vectors divided by the root of their number: unit variance again.
        """
        pairs = [self._embedded(text) for text in texts]
        return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Return the tokens alone, or the pooled vectors."""
        return self.encode(tuple(texts))[self.pooled]

    def mask(self, texts: Sequence[str]) -> Tensor:
        """bool `[B, max_length]`: True where a caption has a word; of an empty one the first place counts."""
        counts = [max(1, min(len(_WORD.findall(text.lower())), self.max_length)) for text in texts]
        return torch.arange(self.max_length) < torch.tensor(counts)[:, None]

    def overflow(self, text: str) -> Overflow | None:
        """How a caption is too long; None for one that fits."""
        return self.tokens.overflow(text)

    def _embed(self, text: str) -> tuple[Tensor, Tensor]:
        words, _ = self.tokens.cut(text)
        tokens = np.zeros((self.max_length, self.dim), np.float32)
        pooled = np.zeros(self.dim, np.float32)
        for i, word in enumerate(words):
            vector = self._vector(f"word:{word}")
            tokens[i] = vector + 0.5 * self._vector(f"position:{i}")
            pooled += vector / np.sqrt(np.float32(len(words)))
        return torch.from_numpy(tokens), torch.from_numpy(pooled)

    def _drawn(self, name: str) -> np.ndarray:
        return parameter_normals(0, f"words.{self.dim}.{name}", self.dim)
