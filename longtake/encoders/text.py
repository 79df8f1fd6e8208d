"""Text encoders through transformers: T5 v1.1's encoder (a sequence of tokens) and CLIP's text half (one vector)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from longtake.contracts import UserError, in_one_line
from longtake.encoders.config import ClipEncoderConfig, T5EncoderConfig
from longtake.encoders.extras import needs_extra

# What `config.json` of google/t5-v1_1-xxl and the text part of openai/clip-vit-large-patch14 say: for forecasts where
# the files are not at hand.
T5_XXL = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
CLIP_L = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
}
TOKENIZER_FILES = ("tokenizer.json", "spiece.model", "vocab.json")  # one of them is enough


# (captions, what embeds some of them, the shape of one embedding) -> the embeddings of all, [B, *shape]
ComputeCaptions = Callable[[Sequence[str], Callable[[Sequence[str]], Tensor], tuple[int, ...]], Tensor]


def compute_captions(texts: Sequence[str], embed: Callable[[Sequence[str]], Tensor], shape: tuple[int, ...]) -> Tensor:
    """All of them, here."""
    return embed(texts)


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """No gradients, but ordinary tensors: sharded weights are written in place, which inference tensors refuse."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Turns(Protocol):
    """What lets ranks that embed unequally often call a sharded encoder together."""

    def begin(self) -> None:
        """Of one call."""
        ...

    def finish(self, stand_in: Callable[[], object]) -> None:
        """Stands in as long as others call."""
        ...


class T5Encoder(nn.Module):
    """Captions -> token embeddings. `module` is transformers' T5 stack; `folder` has its tokenizer.

    `turns`, where set: ranks share the weights and embed unequally often, so each says `finish` when it has done its
    part. The empty prompt is embedded once, by all together, and kept. `compute` may be replaced by one that shares
    captions with other ranks.
    """

    def __init__(self, config: T5EncoderConfig, module: nn.Module, folder: Path | None, device: torch.device) -> None:
        super().__init__()
        self.config, self.dim, self.max_length, self.device = config, config.dim, config.max_length, device
        self.module = module
        self.tokenizer = None if folder is None else _load_tokenizer(folder, "t5")
        self.turns: Turns | None = None
        self.compute: ComputeCaptions = compute_captions
        self._empty: Tensor | None = None

    @property
    def units(self) -> list[nn.Module]:
        """The blocks that are sharded, or brought to the device, one by one."""
        return list(self.module.block)

    def embed_tokens(self, texts: Sequence[str]) -> Tensor:
        """Captions -> `[B, max_length, dim]` in the compute dtype, on the device.

        A caption ends with the end-of-sequence token, cut to `max_length` tokens with it, and is padded to that
        length. Padding is attended to and embedded like words unless `mask` is set.
        """
        if self.turns is None:
            return self._embed_all(texts)
        if tuple(texts) == ("",) and self._empty is not None:
            return self._empty
        self.turns.begin()
        found = self._embed_all(texts)
        if tuple(texts) == ("",):
            self._empty = found
        return found

    def finish(self) -> None:
        """This rank has no more captions to embed; returns when no other has any."""
        if self.turns is not None:
            self.turns.finish(lambda: self._embed([""]))

    def _embed_all(self, texts: Sequence[str]) -> Tensor:
        with outside_inference_mode():
            return self.compute(texts, self._embed, (self.max_length, self.dim))

    def _embed(self, texts: Sequence[str]) -> Tensor:
        with outside_inference_mode():
            ids, mask = _tokenize(self.tokenizer, texts, self.max_length, self.device)
            if not self.config.mask:
                return self.module(input_ids=ids).last_hidden_state
            return self.module(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None]


class ClipEncoder(nn.Module):
    """Captions -> one vector each. `module` is transformers' CLIP text model; `folder` has its tokenizer.

    `compute`: as of `T5Encoder`.
    """

    def __init__(self, config: ClipEncoderConfig, module: nn.Module, folder: Path | None, device: torch.device) -> None:
        super().__init__()
        self.config, self.dim, self.max_length, self.device = config, config.dim, config.max_length, device
        self.module = module
        self.tokenizer = None if folder is None else _load_tokenizer(folder, "clip")
        self.compute: ComputeCaptions = compute_captions

    @property
    def units(self) -> list[nn.Module]:
        """The blocks that are brought to the device one by one."""
        return list(self.module.encoder.layers)

    def embed_pooled(self, texts: Sequence[str]) -> Tensor:
        """Captions -> `[B, dim]` in the compute dtype, on the device: the normed state at the end-of-text token.

        A caption is cut to `max_length` tokens, begin and end among them. Attention is causal, so padding, which comes
        after the end, changes nothing.
        """
        with outside_inference_mode():
            return self.compute(texts, self._embed, (self.dim,))

    def _embed(self, texts: Sequence[str]) -> Tensor:
        ids, _ = _tokenize(self.tokenizer, texts, self.max_length, self.device)
        return self.module(input_ids=ids).pooler_output


def t5_module(facts: Mapping[str, Any]) -> nn.Module:
    """transformers' T5 encoder stack of a `config.json`, on the current default device."""
    with needs_extra("t5.type", "text_embedder"):
        from transformers import T5Config, T5EncoderModel
    return T5EncoderModel(T5Config.from_dict(dict(facts))).encoder


def clip_module(facts: Mapping[str, Any]) -> nn.Module:
    """transformers' CLIP text model of a `config.json`, on the current default device."""
    with needs_extra("clip.type", "text_embedder"):
        from transformers import CLIPTextConfig, CLIPTextModel
    model = CLIPTextModel(CLIPTextConfig.from_dict(dict(facts)))
    return getattr(model, "text_model", model)  # up to transformers 4 the layers lie one level lower


def fill_positions(module: nn.Module) -> None:
    """Writes the numbers 0, 1 … into CLIP's `position_ids`, which are no part of its weights."""
    ids = module.embeddings.position_ids
    ids.copy_(torch.arange(ids.shape[-1]).expand_as(ids))


class T5Names(Mapping[str, Tensor]):
    """A T5 checkpoint, whole or of the encoder alone, under the names of the encoder stack."""

    def __init__(self, files: Mapping[str, Tensor]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> Tensor:
        return self._files[self._theirs(name)]

    def _theirs(self, name: str) -> str:
        if name == "embed_tokens.weight" and "shared.weight" in self._files:
            return "shared.weight"
        return f"encoder.{name}"

    def __contains__(self, name: object) -> bool:
        return self._theirs(str(name)) in self._files

    def __iter__(self) -> Iterator[str]:
        """Only what the encoder stack has; the decoder and the head of a whole checkpoint are of no use here."""
        names = (name.removeprefix("encoder.") for name in self._files if name.startswith("encoder."))
        yield from dict.fromkeys(["embed_tokens.weight", *names])

    def __len__(self) -> int:
        return sum(1 for _ in self)


class ClipNames(Mapping[str, Tensor]):
    """A CLIP checkpoint, whole or of the text half alone, under the names of the text model."""

    _PREFIX = "text_model."

    def __init__(self, files: Mapping[str, Tensor]) -> None:
        self._files = files
        prefixed = any(name.startswith(self._PREFIX) for name in files)
        self._prefix = self._PREFIX if prefixed else ""

    def __getitem__(self, name: str) -> Tensor:
        return self._files[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        """Without the image half, the projections and the table of positions that old files carry."""
        for name in self._files:
            if name.startswith(self._prefix) and not name.endswith("position_ids"):
                yield name.removeprefix(self._prefix)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def read_architecture(folder: Path, config: T5EncoderConfig | ClipEncoderConfig, section: str) -> dict[str, Any]:
    """The model's `config.json` as plain data. Raises `UserError` where it is missing, damaged or of another width."""
    path = folder / "config.json"
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if section == "clip":
            facts = facts.get("text_config") or facts
        width = int(facts["d_model" if section == "t5" else "hidden_size"])
    except FileNotFoundError:
        raise UserError(f"{path}: is not there; copy it from {section}'s weights into that folder") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: is no description of {'a T5' if section == 't5' else 'a CLIP'} model") from None
    if width != config.dim:
        raise UserError(
            f"{section}.dim = {config.dim}: the weights in {folder} have {width}; write {section}.dim = {width}"
        )
    positions = facts.get("max_position_embeddings", 77)
    if section == "clip" and config.max_length > positions:
        raise UserError(
            f"clip.max_length = {config.max_length}: the weights have {positions} positions; choose at most {positions}"
        )
    return facts


def _load_tokenizer(folder: Path, section: str) -> Any:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            f"{folder}: has no tokenizer (one of {', '.join(TOKENIZER_FILES)}); copy the files of the whole repository "
            f"that {section}'s weights come from"
        )
    with needs_extra(f"{section}.type", "text_embedder"):
        from transformers import AutoTokenizer

        if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
            import sentencepiece  # noqa: F401 (transformers reads `spiece.model` with it)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError, ImportError, KeyError) as error:
        raise UserError(
            f"{folder}: its tokenizer cannot be read ({in_one_line(error)}); copy its files again"
        ) from None


def _tokenize(tokenizer: Any, texts: Sequence[str], length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask, both int64 `[B, length]`, on the device."""
    assert tokenizer is not None, "built without a tokenizer"
    found = tokenizer(list(texts), padding="max_length", truncation=True, max_length=length, return_tensors="pt")
    pair = found["input_ids"], found["attention_mask"]
    if device.type == "cuda":
        pair = tuple(tensor.pin_memory() for tensor in pair)
    ids, mask = (tensor.to(device, non_blocking=True) for tensor in pair)
    return ids, mask
