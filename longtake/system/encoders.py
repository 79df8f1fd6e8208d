"""The encoders of a system: found, built, filled with their weights, and placed on the device, over ranks or the host.

Which text encoders there are, and what their embeddings are called, the family says.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from longtake.contracts import Caption, UserError
from longtake.data.clips.transforms import to_unit
from longtake.data.latents.source import EncoderFacts, UnusableLatents, load_tensors
from longtake.data.latents.store import of_window
from longtake.data.rules import MASK, Companion
from longtake.encoders.autoencoder import Autoencoder, build_autoencoder
from longtake.encoders.autoencoder_config import AutoencoderSection, EncoderSection
from longtake.encoders.config import UMT5EncoderConfig, WordsConfig
from longtake.encoders.cost import EncodeCost, autoencoder_cost, seen, text_cost
from longtake.encoders.files import CheckedWeights, find_encoder
from longtake.encoders.text import LearnedTextEncoder, TextEncoder, build_text_encoder
from longtake.encoders.tokens import CaptionTokens as TokenCounts
from longtake.encoders.word_vectors import WordTokens
from longtake.families.record import Text
from longtake.hub import may_be_fetched
from longtake.models.config import LOW_NOISE_KEY
from longtake.parallel.frozen import (
    HostWeights,
    SynchronisedCalls,
    fill_frozen,
    frozen_bytes,
    frozen_mesh,
    shard_frozen,
)
from longtake.parallel.shared_work import RowShare, TileShare
from longtake.parallel.world import World
from longtake.system.config import SystemConfig
from longtake.transfer import to_device
from longtake.weights.files import WeightFiles, find_denoiser

C = TypeVar("C", bound=SystemConfig)
CaptionEncoders = Mapping[str, TextEncoder]  # by condition
CaptionTokens = TextEncoder | TokenCounts | WordTokens
CaptionCounts = Mapping[str, CaptionTokens | None]  # by section of the config
CAPTIONS_AT_ONCE = 32  # in one pass of a text encoder; those of T5-XXL wait for their micro-batches in 128 MiB
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Encoders:
    """Autoencoder and text encoders, which compute on this rank's device."""

    device: torch.device
    autoencoder: Autoencoder
    texts: tuple[Text, ...]
    of_captions: CaptionEncoders

    def posterior(self, video: Tensor) -> dict[str, Tensor]:
        """Pixels `[B, 3, T, H, W]` (bytes, or floats in [-1, 1]) -> "mean" `[B, C, F, h, w]` of the posterior and,
        where latents are drawn, "std" of the same shape; float32 on the device."""
        chunks = video.split(self.autoencoder.stream_lengths(video.shape[2]), dim=2)
        on_device = (to_unit(chunk.to(self.device, non_blocking=True)) for chunk in chunks)
        found = list(self.autoencoder.posterior_of_stream(on_device))
        return found[0] if len(found) == 1 else {name: torch.cat([one[name] for one in found], 2) for name in found[0]}

    def companions(self, kinds: Sequence[Companion], brought: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Encode auxiliary inputs in the form that a store holds: "control.mean", "control.std" of a video, numbers as
        they are, "object.mean" [B, most, C, 1, h, w] and "object.mask" of images."""
        found: dict[str, Tensor] = {}
        for one in kinds:
            given = brought[one.name]
            if one.kind == "video":
                found |= {of_window(one.name, moment): value for moment, value in self.posterior(given).items()}
            elif one.kind == "numbers":
                found[one.name] = given
            else:
                mean = self.posterior(given.flatten(0, 1))["mean"].unflatten(0, given.shape[:2])
                found |= {of_window(one.name, "mean"): mean, one.name + MASK: brought[one.name + MASK]}
        return found

    def embed(self, texts: Sequence[Caption]) -> dict[str, Tensor]:
        """Captions -> conditions by name, [B, ...] on the device, of the encoders' dtypes; "name.mask" where wanted. N
        captions for each clip give [B, N, ...]."""
        several, flat = bool(texts) and not isinstance(texts[0], str), flat_captions(texts)
        found: dict[str, Tensor] = {}
        for text in self.texts:
            encoder = self.of_captions[text.condition]
            found[text.condition] = to_device(encoder.embed(flat), self.device)
            if text.masked:
                found[text.condition + MASK] = to_device(encoder.mask(flat), self.device)
        return {name: value.unflatten(0, (len(texts), -1)) for name, value in found.items()} if several else found

    @property
    def embeds_ahead(self) -> bool:
        """True if `embed_ahead` saves time, see the function `embeds_ahead`."""
        found = self.of_captions.values()
        return embeds_ahead([one.config for one in found if isinstance(one, LearnedTextEncoder)])

    def embed_ahead(self, texts: Sequence[Caption]) -> None:
        """Embed captions that `embed` will be called with, in one forward; they are cached until the next call."""
        for encoder in self.of_captions.values():
            if isinstance(encoder, LearnedTextEncoder):
                encoder.embed_ahead(flat_captions(texts))

    def embed_nothing(self) -> dict[str, Tensor]:
        """Return the embedding of no text, one row per condition; none where it is a tensor of the denoiser."""
        found = self.embed([""])
        for text in self.texts:
            if text.empty == "zeros":
                found[text.condition] = torch.zeros_like(found[text.condition])
            if text.empty != "prompt":  # the caption's own mask stays
                found.pop(text.condition + MASK, None)
            if text.empty not in ("prompt", "zeros"):
                del found[text.condition]
        return found

    @property
    def counts(self) -> CaptionCounts:
        """Token counters of captions, by section of the config."""
        return {text.section: self.of_captions[text.condition] for text in self.texts}

    @property
    def text_length(self) -> int:
        """Tokens of an embedded caption."""
        return next((self.of_captions[text.condition].max_length for text in self.texts if not text.pooled), 0)

    def share(self, group: Callable[[], ProcessGroup | None]) -> None:
        """From now on the ranks of `group`, asked for each time (None: this rank alone), encode and decode the same
        videos and captions together."""
        if self.autoencoder.compute is not None:
            self.autoencoder.compute = TileShare(group, self.autoencoder.dtype, self.device)
        for encoder in self.of_captions.values():
            if isinstance(encoder, LearnedTextEncoder):
                # a sharded one gathers its weights from ranks of other groups too: all call it, whatever they are dealt
                is_sharded = encoder.config.placement == "sharded"
                dtype = device_dtype(encoder.config.dtype, self.device)
                encoder.compute = RowShare(group, dtype, self.device, every_rank=is_sharded)

    def finish_captions(self) -> None:
        """Finish embedding in this process; where others share a text encoder, wait until they finish too."""
        for encoder in self.of_captions.values():
            if isinstance(encoder, LearnedTextEncoder):
                encoder.finish()

    @property
    def facts(self) -> EncoderFacts:
        """Facts on the encoders for a system that does not hold them."""
        return EncoderFacts(self.autoencoder.latent, self.text_length, self.embed_nothing(), self.autoencoder.is_random)


def device_dtype(name: Literal["bf16", "fp16", "fp32"], device: torch.device) -> torch.dtype:
    """Return the dtype that a name of the config stands for: float32 where the device does not compute in the named
    one, as bf16 on a CPU without its instructions, which is several times slower than float32."""
    if name == "fp32" or (name == "fp16" and device.type != "cuda"):
        return torch.float32
    if name == "fp16":
        return torch.float16
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def flat_captions(texts: Sequence[Caption]) -> tuple[str, ...]:
    """Captions one by one, where clips may have several."""
    return tuple(part for text in texts for part in ((text,) if isinstance(text, str) else text))


def set_tf32(config: SystemConfig) -> None:
    """Set TF32 as the config states, for all of this process; PyTorch's own default is TF32 for convolutions, not for
    products."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32


def build_encoders(
    config: SystemConfig,
    device: torch.device,
    world: World | None = None,
    unequal: bool = False,
    kept: CaptionEncoders | None = None,
) -> Encoders:
    """Return the autoencoder and the text encoders that the config names, with their weights. Collective with a
    `world`.

    `world`: the processes over which a `placement` of "sharded" spreads weights; they call `embed` equally often, or,
    with `unequal`, as often as each likes and `finish_captions` in the end. `kept`: encoders of an earlier system on
    this device, reused where the config asks for the same. Raises `UserError` for files that are missing, damaged or of
    another model.
    """
    together = world is not None and world.size > 1
    texts = config.family.texts
    sections = {text.condition: getattr(config, text.section) for text in texts}
    here: dict[str, TextEncoder] = {
        name: found
        for name, found in (kept or {}).items()
        if isinstance(found, LearnedTextEncoder) and found.config == sections.get(name)
    }
    sharded = {name for name in sections.keys() - here.keys() if _placement(sections[name]) == "sharded"}
    mesh = frozen_mesh(world) if together and sharded else None

    def build() -> Encoders:
        autoencoder = _build_autoencoder(config.ae, device)
        for text in texts:
            if (name := text.condition) not in here:
                over = mesh if name in sharded else None
                here[name] = _build_text(text, sections[name], device, over)
                if unequal and over is not None:
                    here[name].joint_calls = SynchronisedCalls(over)
        return Encoders(device, autoencoder, texts, here)

    return world.on_all(build) if together else build()


def open_encoder(config: SystemConfig, key: str, device: torch.device) -> Autoencoder | TextEncoder:
    """Return the encoder of one section alone, `ae` or that of a text, with its weights. Raises `UserError`."""
    if key == "ae":
        return _build_autoencoder(config.ae, device)
    text = next(text for text in config.family.texts if text.section == key)
    return _build_text(text, getattr(config, key), device, None)


def embeds_ahead(sections: Sequence[EncoderSection]) -> bool:
    """Return whether captions of several micro-batches can be embedded together on one rank alone: by encoders with
    weights that are not sharded over ranks."""
    placements = {_placement(section) for section in sections} - {None}
    return bool(placements) and "sharded" not in placements


def _placement(section: EncoderSection) -> str | None:
    """Return the placement of an encoder's weights; None for one without weights."""
    return getattr(section, "placement", None)


def empty_texts(
    config: SystemConfig, facts: EncoderFacts, given: str | None, dropout: Mapping[str, float], device: torch.device
) -> dict[str, Tensor]:
    """`facts.empty` with what its source did not say of the empty prompt: the tensor in a file that is `given`, or what
    the text encoder makes of it, which is built for that alone; zeros where no text is dropped. On the CPU.

    dropout: shares by section. Raises `UserError` where text is dropped and nobody can say by what it is replaced.
    """
    found = dict(facts.empty)
    for text in config.family.texts:
        if (name := text.condition) in found or text.empty not in ("prompt", "zeros"):
            continue
        section, ratio = getattr(config, text.section), dropout.get(text.section, 0.0)
        place = f"dropout_ratio.{text.section} = {ratio:g}"
        shape = (1, section.dim) if text.pooled else (1, facts.text_length, section.dim)
        if given is not None and not text.pooled:
            found[name] = _given_empty(Path(given), shape)
        elif text.empty == "zeros" or not ratio:
            found[name] = torch.zeros(shape)
        elif isinstance(section, WordsConfig):
            raise UserError(
                f"{place}: the texts come from files, which say nothing of the empty prompt; name the file with its "
                f"embedding as dataset.empty_prompt, or the weights that made them as {text.section}.from_pretrained"
            )
        else:
            try:
                found[name] = _build_text(text, section, device, None).embed([""]).cpu()
            except UserError as error:
                raise UserError(f"{place}: no dataset.empty_prompt is named, and {error}") from error
    return found


def _given_empty(path: Path, shape: tuple[int, ...]) -> Tensor:
    """[1, L, D] from a file of one tensor, by whatever name."""
    place = f"dataset.empty_prompt = {str(path)!r}"
    try:
        tensor = load_tensors(path)
    except UnusableLatents as error:
        raise UserError(f"{place}: {error}; name the file of one embedded text") from error
    if isinstance(tensor, dict) and len(tensor) == 1:
        (tensor,) = tensor.values()
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) not in (shape, shape[1:]):
        size = f"a tensor of shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else "more than one tensor"
        raise UserError(f"{place}: holds {size}, and the texts of this run are {list(shape[1:])}; name another file")
    return tensor.reshape(shape)


def encoder_sections(config: SystemConfig) -> tuple[str, ...]:
    """Return the keys of the encoders that the model uses: the autoencoder, then those of text."""
    return "ae", *(text.section for text in config.family.texts)


def find_encoders(config: SystemConfig) -> None:
    """Look for the files of all encoders, here and on the hub, largest last. Raises `UserError` that names every one
    that is missing."""
    first, *texts = encoder_sections(config)
    raise_missing(_missing_encoders(config, (first, *reversed(texts)), lambda name: True))


def _missing_encoders(config: SystemConfig, keys: Sequence[str], is_wanted: Callable[[str], bool]) -> list[str]:
    """Return a sentence for each encoder whose files are missing, of those whose name is wanted."""
    faults = []
    for key in keys:
        section = getattr(config, key)
        if (name := getattr(section, "from_pretrained", None)) is not None and is_wanted(name):
            try:
                find_encoder(name, f"{key}.from_pretrained", section.cache_dir)
            except UserError as error:
                faults.append(str(error))
    return faults


def denoiser_keys(config: SystemConfig) -> dict[str, str]:
    """Return the keys that name the weights of denoisers, with their values."""
    named = {"model.from_pretrained": config.model.from_pretrained}
    if config.low_noise is not None:
        named[LOW_NOISE_KEY] = config.low_noise.from_pretrained
    return {key: spec for key, spec in named.items() if spec is not None}


def missing_files(config: SystemConfig, with_encoders: bool = True) -> list[str]:
    """Return a sentence for each of the denoiser's and the encoders' files that is neither here nor on the hub.
    Nothing is downloaded: what the hub may have is left to `find_encoders`."""
    faults = []
    for key, spec in denoiser_keys(config).items():
        if not glob.has_magic(spec) and not may_be_fetched(spec):
            try:
                find_denoiser(spec, key)
            except UserError as error:
                faults.append(str(error))
    keys = encoder_sections(config) if with_encoders else ()
    return faults + _missing_encoders(config, keys, lambda name: not may_be_fetched(name))


def raise_missing(faults: Sequence[str]) -> None:
    """Raise `UserError` of these sentences, a line each, if there are any."""
    if faults:
        raise UserError("\n  ".join(faults))


def encoders_on_host(config: C) -> C:
    """Return the config with every encoder that would lie on the device for good in the host's memory between
    its uses."""
    sections = {name: getattr(config, name) for name in encoder_sections(config)}
    resident = {name: section for name, section in sections.items() if _placement(section) == "resident"}
    moved = {name: section.model_copy(update={"placement": "offloaded"}) for name, section in resident.items()}
    return config.model_copy(update=moved)


def refuse_sharded_text(config: SystemConfig, missing: int) -> None:
    """Raise `UserError` where ranks would call a sharded text encoder unequally often, and wait for ever: where
    samples are `missing` in the latent store, which are embedded as they come."""
    for text in config.family.texts if missing else ():
        if _placement(getattr(config, text.section)) == "sharded":
            raise UserError(
                f'{text.section}.placement = "sharded": {missing} samples are missing in dataset.latents, so ranks '
                f'would embed different numbers of captions and wait; write {text.section}.placement = "offloaded", or '
                "complete the store by `longtake data encode RUN -o FOLDER`"
            )


def _build_autoencoder(config: AutoencoderSection, device: torch.device) -> Autoencoder:
    autoencoder = build_autoencoder(config, device_dtype(getattr(config, "dtype", "fp32"), device))
    shapes = _shapes(nn.ModuleDict({**autoencoder.encoding, **autoencoder.decoding}))
    if not shapes:
        return autoencoder
    path = find_encoder(config.from_pretrained, "ae.from_pretrained", config.cache_dir)
    files = WeightFiles(path)
    weights = CheckedWeights(files, autoencoder.names(files), shapes, path, "ae")

    def place(parts: Mapping[str, nn.Module]) -> None:
        # a single layer is worth no copy
        away = [part for part in parts.values() if _placement(config) == "offloaded" and any(part.children())]
        fill_frozen(nn.ModuleDict(parts), weights, _CPU if away else device)
        for part in parts.values():
            if part in away:
                HostWeights(part, [part], device)
            else:
                part.to(device)

    def load_decoder() -> None:
        del autoencoder.load_decoder
        place(autoencoder.decoding)

    place(autoencoder.encoding)
    autoencoder.load_decoder = load_decoder
    return autoencoder


def _build_text(text: Text, config: Any, device: torch.device, mesh: DeviceMesh | None) -> TextEncoder:
    if isinstance(config, WordsConfig):
        return build_text_encoder(config, pooled=text.pooled)
    place = find_encoder(config.from_pretrained, f"{text.section}.from_pretrained", config.cache_dir)
    folder = place if place.is_dir() else place.parent
    if place != folder and not isinstance(config, UMT5EncoderConfig):
        raise UserError(
            f"{text.section}.from_pretrained = {config.from_pretrained!r}: is a file; name the folder that holds "
            "config.json, the tokenizer and the weights"
        )
    encoder = build_text_encoder(config, folder, device_dtype(config.dtype, device), device)
    assert isinstance(encoder, LearnedTextEncoder)
    files = WeightFiles(place)
    weights = CheckedWeights(files, encoder.names(files), _shapes(encoder.module), place, "its config.json")
    if mesh is not None:
        shard_frozen(encoder.module, encoder.units, mesh)
    offloaded = config.placement == "offloaded"
    fill_frozen(encoder.module, weights, _CPU if offloaded else device)
    if offloaded:
        HostWeights(encoder.module, encoder.units, device)
    encoder.after_filling()
    return encoder


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def encoder_bytes(config: SystemConfig, ranks_per_node: int = 1, decodes: bool = False) -> dict[str, int]:
    """Bytes of the frozen weights on one GPU, by section, at their placement and dtype.

    Counted on the meta device: nothing is read but a `config.json` that lies in a local folder; without one the
    published sizes are taken. `decodes`: the autoencoder's decoder too.
    """
    parts = [(size, many) for size, encodes, many in seen(config.ae)["parts"].values() if encodes or decodes]
    away = [size for size, many in parts if many and _placement(config.ae) == "offloaded"]  # they run in turn
    found = {"ae": sum(size for size, _ in parts) - sum(away) + max(away, default=0)}
    for text in config.family.texts:
        section = getattr(config, text.section)
        numbers = seen(section)
        found[text.section] = frozen_bytes(
            numbers["units"], numbers["rest"], _placement(section) or "resident", ranks_per_node
        )
    return found


def encoding_costs(config: SystemConfig, shape: tuple[int, int, int], batch: int) -> dict[str, EncodeCost]:
    """Return the cost of encoding a micro-batch of (T, H, W) pixels and its captions, by section; reads only what
    `encoder_bytes` reads."""
    captions = batch * captions_of_sample(config, shape[0])
    return {"ae": autoencoder_cost(config.ae, shape, batch), **captions_costs(config, captions)}


def companions_costs(config: SystemConfig, shape: tuple[int, int, int], batch: int) -> list[EncodeCost]:
    """Return the costs of encoding the auxiliary inputs of a micro-batch's clips: control videos, reference images."""
    pixels = {"video": shape, "stills": (1, *shape[1:])}
    found = [one for one in config.sample_rules.companions if one.kind in pixels]
    return [autoencoder_cost(config.ae, pixels[one.kind], batch * one.most) for one in found]


def captions_costs(config: SystemConfig, captions: int) -> dict[str, EncodeCost]:
    """Return the cost of embedding so many captions, by section."""
    sections = [text.section for text in config.family.texts]
    return {name: text_cost(seen(getattr(config, name)), captions) for name in sections}


def captions_of_sample(config: SystemConfig, num_frames: int) -> int:
    """Captions that a sample of so many frames has."""
    segments = config.sample_rules.segments
    return 1 if segments is None else segments(num_frames)


def embedding_bytes(config: SystemConfig) -> int:
    """Bytes of one caption as its encoders return it; words are embedded on the host."""
    return sum(seen(getattr(config, text.section)).get("result", 0) for text in config.family.texts)
