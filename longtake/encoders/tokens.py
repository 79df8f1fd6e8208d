"""Captions as token ids of a fixed length. One that is too long loses words before its end, which carries its rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from longtake.data.clips.captions import caption_end


@dataclass(frozen=True)
class Overflow:
    """How a caption exceeds what an encoder takes."""

    length: int  # its tokens, special ones included
    max_length: int
    lost: str  # the words that are cut


class CaptionTokens:
    """A tokenizer that pads and cuts to a length, padding on the right.

    marks: texts that stay at the end of a caption that is cut, such as scene marks, as its rate and scores do. clean:
    done to a caption first.
    """

    def __init__(
        self, tokenizer: Any, max_length: int, marks: Sequence[str] = (), clean: Callable[[str], str] = str
    ) -> None:
        self.tokenizer, self.max_length, self.marks, self.clean = tokenizer, max_length, tuple(marks), clean

    def encode(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids and mask, both int64 `[B, max_length]`."""
        texts = [self.clean(text) for text in texts]
        found = self.tokenizer(
            texts, padding="max_length", truncation=True, max_length=self.max_length, return_tensors="pt"
        )
        ids, mask = found["input_ids"], found["attention_mask"]
        for row in (mask.sum(1) == self.max_length).nonzero()[:, 0].tolist():
            ids[row] = torch.tensor(self._cut(texts[row])[0])
        return ids, mask

    def overflow(self, text: str) -> Overflow | None:
        """How a caption is too long; None for one that fits."""
        kept, lost = self._cut(self.clean(text))
        if not lost:
            return None
        words = self.tokenizer.decode(lost, skip_special_tokens=True).strip()
        return Overflow(len(kept) + len(lost), self.max_length, words)

    def _cut(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of a caption, at most `max_length`, and those that are cut."""
        ids = self._ids(text)
        if len(ids) <= self.max_length:
            return ids, []
        end = self._ids(caption_end(text, self.marks))[self._num_leading :]
        if len(end) >= self.max_length - self._num_leading:  # no room for anything else
            end = self._ids("")[self._num_leading :]
        room = self.max_length - len(end)
        return ids[:room] + end, ids[room : len(ids) - len(end)]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, truncation=False, verbose=False)["input_ids"])

    @cached_property
    def _num_leading(self) -> int:
        """Special tokens at the beginning of every caption; at most one is at its end."""
        return max(len(self._ids("")) - 1, 0)
