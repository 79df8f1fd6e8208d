"""Text encoders through transformers: T5 v1.1 and UMT5 (token sequences), and CLIP's text half (one vector)."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import ftfy
import torch
from torch import Tensor, nn

from longtake.contracts import UserError, in_one_line
from longtake.encoders.config import (
    ClipEncoderConfig,
    PooledEncoderConfig,
    T5EncoderConfig,
    TextEncoderConfig,
    UMT5EncoderConfig,
    WordsConfig,
)
from longtake.encoders.extras import needs_extra
from longtake.encoders.files import clip_names, t5_names, umt5_names
from longtake.encoders.tokens import CaptionTokens, Overflow
from longtake.encoders.word_vectors import WordEncoder
from longtake.hub import find_files, published_facts
from longtake.small_files import parse_json, read_small
from longtake.transfer import to_device

if TYPE_CHECKING:
    from longtake.parallel.frozen import SynchronisedCalls

# From `config.json` of google/t5-v1_1-xxl and of the text model of openai/clip-vit-large-patch14, for forecasts without
# the files.
T5_XXL = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
UMT5_XXL = {**T5_XXL, "vocab_size": 256384}  # google/umt5-xxl
CLIP_L = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
}
TOKENIZER_FILES = ("tokenizer.json", "spiece.model", "vocab.json")  # one of them is enough

_TOKENIZERS = (("tokenizer*.json", "special_tokens_map.json", "spiece.model"),)  # on the hub

# (captions, what embeds some of them, the shape of one embedding) -> the embeddings of all, [B, *shape]
ComputeCaptions = Callable[[Sequence[str], Callable[[Sequence[str]], Tensor], tuple[int, ...]], Tensor]


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """No gradients, but ordinary tensors: sharded weights are written in place, which inference tensors refuse."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class LearnedTextEncoder(nn.Module, ABC):
    """A text encoder with weights: `module` is transformers' model; `folder` has its tokenizer.

    `joint_calls` is set where the weights are sharded: each rank calls `finish` after its last caption, and the empty
    prompt is embedded once, by all ranks, and cached. `compute` may be replaced by one that shares captions with other
    ranks.
    """

    SECTION: ClassVar[str]  # of the run's config
    names: ClassVar[Callable[[Collection[str]], dict[str, str]]]  # name in `module` -> name in a published checkpoint

    def __init__(self, config: Any, module: nn.Module, folder: Path | None, device: torch.device) -> None:
        super().__init__()
        self.config, self.dim, self.max_length, self.device = config, config.dim, config.max_length, device
        self.module = module
        self.tokens = None if folder is None else open_tokens(config, folder, self.SECTION)
        if self.tokens is not None and (new := getattr(config, "new_tokens", ())):
            rows, num_tokens = module.get_input_embeddings().num_embeddings, len(self.tokens.tokenizer)
            if num_tokens > rows:
                raise UserError(
                    f"{self.SECTION}.new_tokens: with {len(new)} more the tokenizer has {num_tokens} tokens, "
                    f"and the weights {rows}; name fewer"
                )
        self.joint_calls: SynchronisedCalls | None = None
        self.compute: ComputeCaptions = lambda texts, embed, shape: embed(texts)
        self._empty: Tensor | None = None
        self._ahead: dict[str, Tensor] = {}  # captions embedded ahead of their micro-batches

    @property
    @abstractmethod
    def units(self) -> list[nn.Module]:
        """The blocks that are sharded, or brought to the device, one by one."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of the embedding of one caption."""

    def after_filling(self) -> None:
        """Called once the weights are loaded."""

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Captions -> `[B, *shape]` in the compute dtype, on the device."""
        is_empty = self.joint_calls is not None and tuple(texts) == ("",)
        if is_empty and self._empty is not None:
            return self._empty
        if self.joint_calls is not None:
            self.joint_calls.begin()
        with outside_inference_mode():
            each = {text: row for row, text in enumerate(dict.fromkeys(texts))}  # repeated ones are embedded once
            if each.keys() <= self._ahead.keys():
                return torch.stack([self._ahead[text] for text in texts])
            found = self.compute(list(each), self._embed, self.shape)
            if len(each) < len(texts):
                found = torch.stack([found[each[text]] for text in texts])
        if is_empty:
            self._empty = found
        return found

    def embed_ahead(self, texts: Sequence[str]) -> None:
        """Embeds captions that `embed` will be asked for, in one pass; it finds them until the next call. Not where
        others take part in a pass."""
        self._ahead = {}
        self._ahead = dict(zip(distinct := list(dict.fromkeys(texts)), self.embed(distinct), strict=True))

    def finish(self) -> None:
        """To be called when this rank has no more captions to embed; returns when no rank has."""
        if self.joint_calls is not None:
            with outside_inference_mode():
                self.joint_calls.finish(lambda: self._embed([""]))

    def mask(self, texts: Sequence[str]) -> Tensor:
        """bool `[B, max_length]` on the device: True at a caption's tokens, the end token included."""
        return self.tokenize(texts)[1].bool()

    @abstractmethod
    def embed_ids(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Token ids and mask, int64 `[B, max_length]` -> `[B, *shape]`."""

    def _embed(self, texts: Sequence[str]) -> Tensor:
        return self.embed_ids(*self.tokenize(texts))

    def overflow(self, text: str) -> Overflow | None:
        """How a caption is too long, see `CaptionTokens`."""
        return self._own_tokens.overflow(text)

    @property
    def _own_tokens(self) -> CaptionTokens:
        assert self.tokens is not None, "built without a tokenizer"
        return self.tokens

    def tokenize(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Token ids and mask, both int64 `[B, max_length]`, on the device."""
        ids, mask = self._own_tokens.encode(texts)
        return to_device(ids, self.device), to_device(mask, self.device)


class T5Encoder(LearnedTextEncoder):
    """Captions -> token embeddings `[B, max_length, dim]`, by the encoder half of a T5.

    A caption ends with the end-of-sequence token, cut to `max_length` tokens with it, and is padded to that length.
    Padding is attended to and embedded like words unless the config's `mask` is set.
    """

    SECTION = "t5"
    names = staticmethod(t5_names)

    @property
    def units(self) -> list[nn.Module]:
        return list(self.module.block)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.max_length, self.dim

    def embed_ids(self, ids: Tensor, mask: Tensor) -> Tensor:
        if not self.config.mask:
            return self.module(input_ids=ids).last_hidden_state
        is_padding = mask == 0
        states = self.module(input_ids=ids, attention_mask=self._attention_mask(is_padding)).last_hidden_state
        return states.masked_fill(is_padding[..., None], 0.0)  # a product would leave zeros of both signs

    def _attention_mask(self, is_padding: Tensor) -> Tensor:
        """Return the mask in a form whose values transformers does not read, because the host would wait for the
        device.

        From version 5 on `T5Stack` asks whether a mask `[B, L]` hides anything at all, and adds one of four dimensions
        to the scores as it is. Version 4 takes only `[B, L]`, and reads no values.
        """
        from transformers import __version__

        if int(__version__.partition(".")[0]) < 5:
            return ~is_padding
        bias = torch.zeros(is_padding.shape, dtype=self.module.dtype, device=is_padding.device)
        return bias.masked_fill_(is_padding, torch.finfo(bias.dtype).min)[:, None, None]


class UMT5Encoder(T5Encoder):
    """The same by the encoder half of a UMT5, of cleaned captions; padding is hidden and embedded as zeros."""

    names = staticmethod(umt5_names)


class ClipEncoder(LearnedTextEncoder):
    """Captions -> one vector each `[B, dim]`, by the text half of a CLIP: the normed state at the end-of-text token.

    A caption is cut to `max_length` tokens, begin and end among them. Attention is causal, so padding, which comes
    after the end, changes nothing.
    """

    SECTION = "clip"
    names = staticmethod(clip_names)

    @property
    def units(self) -> list[nn.Module]:
        return list(self.module.encoder.layers)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.dim,)

    def after_filling(self) -> None:
        """Write the numbers 0, 1 … into CLIP's `position_ids`, which are no part of its weights."""
        ids = self.module.embeddings.position_ids
        ids.copy_(torch.arange(ids.shape[-1]).expand_as(ids))

    def embed_ids(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.module(input_ids=ids).pooler_output


TextEncoder = WordEncoder | LearnedTextEncoder


def build_text_encoder(
    config: TextEncoderConfig | PooledEncoderConfig,
    folder: Path | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    tokenizer: bool = True,
    pooled: bool = False,
) -> TextEncoder:
    """Return the text encoder that a section describes; a learned one on the meta device, of `dtype`, to be filled.

    `folder` has its `config.json` and, unless `tokenizer` is False, its tokenizer; without a folder the published sizes
    are taken, for what needs no more than these. `device` is where it will compute. `pooled`: which of the two an
    encoder that can do both gives. Raises `UserError` for a folder that does not have them.
    """
    if isinstance(config, WordsConfig):
        return WordEncoder(config.dim, config.max_length, pooled)
    build, encoder = _KINDS[type(config)]
    facts = text_facts(config, folder)
    with torch.device("meta"):
        module = build(facts).to(dtype).requires_grad_(False).eval()
    return encoder(config, module, folder if tokenizer else None, torch.device(device))


def t5_module(facts: Mapping[str, Any]) -> nn.Module:
    """transformers' T5 encoder stack of a `config.json`, on the current default device."""
    with needs_extra("t5.type", "text_embedder"):
        from transformers import T5Config, T5EncoderModel
    return T5EncoderModel(T5Config.from_dict(dict(facts))).encoder


def umt5_module(facts: Mapping[str, Any]) -> nn.Module:
    """transformers' UMT5 encoder stack of a `config.json`, on the current default device."""
    with needs_extra("t5.type", "umt5"):
        from transformers import UMT5Config, UMT5EncoderModel
    return UMT5EncoderModel(UMT5Config.from_dict(dict(facts))).encoder


def clip_module(facts: Mapping[str, Any]) -> nn.Module:
    """transformers' CLIP text model of a `config.json`, on the current default device."""
    with needs_extra("clip.type", "text_embedder"):
        from transformers import CLIPTextConfig, CLIPTextModel
    model = CLIPTextModel(CLIPTextConfig.from_dict(dict(facts)))
    return getattr(model, "text_model", model)  # up to transformers 4 the layers lie one level lower


_KINDS: dict[type, tuple[Callable[[Mapping[str, Any]], nn.Module], type[LearnedTextEncoder]]] = {
    T5EncoderConfig: (t5_module, T5Encoder),
    UMT5EncoderConfig: (umt5_module, UMT5Encoder),
    ClipEncoderConfig: (clip_module, ClipEncoder),
}


def text_facts(config: T5EncoderConfig | UMT5EncoderConfig | ClipEncoderConfig, folder: Path | None) -> dict[str, Any]:
    """Return the `config.json` of a text encoder's folder; without one the published sizes, at the width of the config.

    An official UMT5 is one file, next to which the config.json may be that of the denoiser: then the published sizes.
    Raises `UserError` where it is missing, damaged or of another width.
    """
    is_t5, is_umt5 = not isinstance(config, ClipEncoderConfig), isinstance(config, UMT5EncoderConfig)
    section, width_key, published = ("t5", "d_model", T5_XXL) if is_t5 else ("clip", "hidden_size", CLIP_L)
    if is_umt5:
        published = UMT5_XXL
        if folder is not None and Path(config.from_pretrained).suffix and not _describes_umt5(folder):
            folder = None
    if folder is None:
        return {**published, width_key: config.dim}
    path = folder / "config.json"
    try:
        facts = parse_json(read_small(path))
        if not is_t5:
            facts = facts.get("text_config") or facts
        width = int(facts[width_key])
    except FileNotFoundError:
        raise UserError(f"{path}: is not there; copy it from {section}'s weights into that folder") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: does not describe a {section.upper()} model") from None
    if width != config.dim:
        raise UserError(
            f"{section}.dim = {config.dim}: the weights in {folder} have {width}; write {section}.dim = {width}"
        )
    positions = facts.get("max_position_embeddings", 77)
    if not is_t5 and config.max_length > positions:
        raise UserError(
            f"clip.max_length = {config.max_length}: the weights have {positions} positions; choose at most {positions}"
        )
    return facts


def _describes_umt5(folder: Path) -> bool:
    facts = published_facts(str(folder))
    return facts is not None and facts.get("model_type") == "umt5"


def open_tokens(
    config: T5EncoderConfig | UMT5EncoderConfig | ClipEncoderConfig, folder: Path, section: str
) -> CaptionTokens:
    """Return the tokenizer of a text encoder, without its weights. Raises `UserError` for a folder without one."""
    if (named := getattr(config, "tokenizer", None)) is not None:
        folder = find_files(named, f"{section}.tokenizer", _TOKENIZERS, config.cache_dir)
    tokenizer, new = _load_tokenizer(folder, section), getattr(config, "new_tokens", ())
    if new:
        tokenizer.add_tokens(list(new))
    clean = cleaned if isinstance(config, UMT5EncoderConfig) else str
    return CaptionTokens(tokenizer, config.max_length, new, clean)


def cleaned(text: str) -> str:
    """Return a caption as Wan cleans it: broken Unicode fixed, HTML entities resolved, runs of white space made one
    blank."""
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(text.split())


def _load_tokenizer(folder: Path, section: str) -> Any:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        # as in a diffusers pipeline; as in Wan's own folders
        for other in (folder.parent / "tokenizer", folder / "google" / "umt5-xxl", folder / "tokenizer"):
            if any((other / name).is_file() for name in TOKENIZER_FILES):
                return _load_tokenizer(other, section)
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
