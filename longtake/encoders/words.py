"""A text encoder without parameters: each word has a fixed random vector, shared by all captions that use it."""

from __future__ import annotations

import re
from collections import OrderedDict

import numpy as np
import torch
from torch import Tensor

from longtake.random import parameter_normals

_WORD = re.compile(r"[\w']+")
_CACHE_CAPTIONS = 4096


class WordEncoder:
    """Words -> standard normal vectors drawn by the word's own hash, plus half a vector drawn by its position.

    It needs no training and no download and is the same in every process. It knows nothing of meaning: two words are
    as far apart as any other two.
    """

    def __init__(self, dim: int, max_length: int) -> None:
        self.dim, self.max_length = dim, max_length
        self._words: dict[str, np.ndarray] = {}
        self._cache: OrderedDict[str, tuple[Tensor, Tensor]] = OrderedDict()

    def encode(self, texts: list[str] | tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Captions -> tokens float32 `[B, max_length, dim]` (zeros after the last word) and pooled float32 `[B, dim]`.

        Pooled is the sum of the caption's word vectors divided by the root of their number: unit variance again.
        """
        pairs = [self._embed(text) for text in texts]
        return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])

    def embed_tokens(self, texts: list[str] | tuple[str, ...]) -> Tensor:
        """The tokens alone."""
        return self.encode(texts)[0]

    def embed_pooled(self, texts: list[str] | tuple[str, ...]) -> Tensor:
        """The pooled vectors alone."""
        return self.encode(texts)[1]

    def _embed(self, text: str) -> tuple[Tensor, Tensor]:
        if text in self._cache:
            self._cache.move_to_end(text)
            return self._cache[text]
        words = _WORD.findall(text.lower())[: self.max_length]
        tokens = np.zeros((self.max_length, self.dim), np.float32)
        pooled = np.zeros(self.dim, np.float32)
        for i, word in enumerate(words):
            vector = self._vector(f"word:{word}")
            tokens[i] = vector + 0.5 * self._vector(f"position:{i}")
            pooled += vector / np.sqrt(np.float32(len(words)))
        pair = torch.from_numpy(tokens), torch.from_numpy(pooled)
        self._cache[text] = pair
        if len(self._cache) > _CACHE_CAPTIONS:
            self._cache.popitem(last=False)
        return pair

    def _vector(self, name: str) -> np.ndarray:
        if name not in self._words:
            self._words[name] = parameter_normals(0, f"words.{self.dim}.{name}", self.dim)
        return self._words[name]
