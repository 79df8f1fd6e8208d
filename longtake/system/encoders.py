"""The encoders of a system: found, built, filled with their weights, and placed on the device, over ranks or the host.

Captions become embeddings, and pixels moments of latents, in `Encoders` only: for training, encoding ahead of time and
generation alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from longtake.config import Section
from longtake.contracts import UserError, in_one_line
from longtake.data import EncoderFacts, to_unit
from longtake.encoders import (
    Autoencoder,
    AutoencoderConfig,
    CheckedWeights,
    ClipEncoder,
    ClipEncoderConfig,
    ClipNames,
    EncodeCost,
    EncoderSection,
    KLAutoencoder,
    PixelConfig,
    PooledEncoder,
    PooledEncoderConfig,
    Renamed,
    T5Encoder,
    T5EncoderConfig,
    T5Names,
    TextEncoder,
    TextEncoderConfig,
    WordsConfig,
    autoencoder_cost,
    build_autoencoder,
    build_text_encoder,
    fill_positions,
    find_encoder,
    text_cost,
    text_facts,
)
from longtake.parallel import (
    HostWeights,
    PieceShare,
    RowShare,
    Turns,
    World,
    fill_frozen,
    frozen_bytes,
    frozen_mesh,
    shard_frozen,
)
from longtake.weights import WeightFiles

C = TypeVar("C", bound=Section)
K = TypeVar("K", TextEncoder, PooledEncoder)
CaptionEncoders = tuple[TextEncoder, PooledEncoder]
_CPU = torch.device("cpu")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class EncodersConfig(Protocol):
    """What encoders read of a run's config."""

    ae: AutoencoderConfig
    t5: TextEncoderConfig
    clip: PooledEncoderConfig


@dataclass(frozen=True)
class Encoders:
    """Autoencoder and text encoders, which compute on this rank's device."""

    device: torch.device
    autoencoder: Autoencoder
    text: TextEncoder  # token sequence
    pooled: PooledEncoder  # pooled vector

    def moments(self, video: Tensor) -> dict[str, Tensor]:
        """Pixels `[B, 3, T, H, W]` (bytes, or floats in [-1, 1]) -> "mean" `[B, C, F, h, w]` of the posterior.

        An autoencoder that draws its latents adds "std", of the same shape. On the device, float32.
        """
        return self.autoencoder.moments(to_unit(video.to(self.device, non_blocking=True)))

    def embed(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Captions -> "text" `[B, L, Dt]` and "vector" `[B, Dv]` on the device, of the encoders' dtypes."""
        return {
            "text": self.text.embed_tokens(tuple(texts)).to(self.device, non_blocking=True),
            "vector": self.pooled.embed_pooled(tuple(texts)).to(self.device, non_blocking=True),
        }

    @property
    def of_captions(self) -> CaptionEncoders:
        """Those of text, without the autoencoder."""
        return self.text, self.pooled

    def share(self, group: Callable[[], ProcessGroup | None]) -> None:
        """From now on the ranks of `group` encode and decode together, the same videos and captions at the same time.

        `group` is asked for each time; None: this rank is alone. Of a text encoder without weights each has its own.
        """
        if isinstance(self.autoencoder, KLAutoencoder):
            self.autoencoder.compute = PieceShare(group, self.autoencoder.dtype, self.device)
        for encoder in (self.text, self.pooled):
            if isinstance(encoder, T5Encoder | ClipEncoder):
                # a sharded one gathers its weights from ranks of other groups too: all call it, whatever they are dealt
                is_sharded = encoder.config.placement == "sharded"
                dtype = device_dtype(encoder.config.dtype, self.device)
                encoder.compute = RowShare(group, dtype, self.device, every_rank=is_sharded)

    def finish_captions(self) -> None:
        """This process has no more captions to embed; where others share its text encoder, waits until none has."""
        if isinstance(self.text, T5Encoder):
            self.text.finish()

    @property
    def facts(self) -> EncoderFacts:
        """What a system needs to know of them when it does not hold them."""
        return EncoderFacts(self.autoencoder.latent, self.text.max_length, self.embed([""]), self.autoencoder.is_random)


def device_dtype(name: Literal["bf16", "fp16", "fp32"], device: torch.device) -> torch.dtype:
    """The dtype that a name of the config stands for: float32 where the device does not compute in the named one.

    On a CPU without bf16 instructions bf16 is emulated and several times slower than float32.
    """
    if name == "fp32" or (name == "fp16" and device.type != "cuda"):
        return torch.float32
    if name == "fp16":
        return torch.float16
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def build_encoders(
    config: EncodersConfig,
    device: torch.device,
    world: World | None = None,
    unequal: bool = False,
    kept: CaptionEncoders | None = None,
) -> Encoders:
    """The autoencoder and the text encoders that the config names, with their weights.

    `world`: the processes of a run, over which `t5.placement = "sharded"` spreads the weights; collective then. They
    call `embed` equally often, or, with `unequal`, each as often as it likes and `finish_captions` after the last time.
    Without a world each process holds a whole encoder. `kept`: of an earlier system of this process, on this device;
    they serve again where the config asks for the same. Raises `UserError` for files that are missing, damaged or of
    another model.
    """
    together = world is not None and world.size > 1
    text, pooled = kept or (None, None)
    text, pooled = _if_described(text, config.t5), _if_described(pooled, config.clip)
    is_sharded = together and text is None and getattr(config.t5, "placement", "") == "sharded"
    mesh = frozen_mesh(world) if is_sharded else None

    def build() -> Encoders:
        autoencoder, tokens = _build_autoencoder(config.ae, device), text or _build_text(config.t5, device, mesh)
        if unequal and mesh is not None:
            tokens.turns = Turns(mesh)
        return Encoders(device, autoencoder, tokens, pooled or _build_pooled(config.clip, device))

    return world.on_all(build) if together else build()


def _if_described(kept: K | None, config: TextEncoderConfig | PooledEncoderConfig) -> K | None:
    """An encoder with weights, if it is the one that the config describes; else None."""
    return kept if isinstance(kept, T5Encoder | ClipEncoder) and kept.config == config else None


def find_encoders(config: EncodersConfig) -> None:
    """Looks for the files of all encoders, here and on the hub, which is asked for the largest last.

    Raises `UserError` where one is missing.
    """
    for key in ("ae", "clip", "t5"):
        section = getattr(config, key)
        if (name := getattr(section, "from_pretrained", None)) is not None:
            find_encoder(name, f"{key}.from_pretrained", section.cache_dir)


def encoders_on_host(config: C) -> C:
    """The config with every encoder that would lie on the device for good in the host's memory between its uses."""
    sections = {name: getattr(config, name) for name in ("ae", "t5", "clip")}
    moved = {
        name: section.model_copy(update={"placement": "offloaded"})
        for name, section in sections.items()
        if getattr(section, "placement", None) == "resident"
    }
    return config.model_copy(update=moved)


def refuse_sharded_text(config: TextEncoderConfig, missing: int) -> None:
    """Raises `UserError` where ranks would call a sharded text encoder unequally often, and wait for ever.

    missing: samples that a run's latent store has not, which are embedded as they come.
    """
    if missing and getattr(config, "placement", "") == "sharded":
        raise UserError(
            f't5.placement = "sharded": {missing} samples are missing in dataset.latents, so ranks would embed '
            'different numbers of captions and wait; write t5.placement = "offloaded", or complete the store by '
            "`longtake data encode`"
        )


def _build_autoencoder(config: AutoencoderConfig, device: torch.device) -> Autoencoder:
    if isinstance(config, PixelConfig):
        return build_autoencoder(config)
    path = find_encoder(config.from_pretrained, "ae.from_pretrained", config.cache_dir)
    autoencoder = build_autoencoder(config, device_dtype(config.dtype, device))
    assert isinstance(autoencoder, KLAutoencoder)
    shapes = _shapes(autoencoder.model)
    weights = CheckedWeights(Renamed(WeightFiles(path), list(shapes), config.type), shapes, path, "ae")

    def place(parts: Mapping[str, nn.Module], largest: str) -> None:
        module = nn.ModuleDict(parts)
        if config.placement == "offloaded":
            fill_frozen(module, weights, _CPU)
            HostWeights(module, [module[largest]], device)
        else:
            fill_frozen(module, weights, device)

    place(autoencoder.encoding, "encoder")
    autoencoder.load_decoder = lambda: place(autoencoder.decoding, "decoder")
    return autoencoder


def _build_text(config: TextEncoderConfig, device: torch.device, mesh: DeviceMesh | None) -> TextEncoder:
    if isinstance(config, WordsConfig):
        return build_text_encoder(config)
    folder = _folder(config, "t5")
    encoder = build_text_encoder(config, folder, device_dtype(config.dtype, device), device)
    assert isinstance(encoder, T5Encoder)
    weights = CheckedWeights(T5Names(_open_weights(folder)), _shapes(encoder.module), folder, "its config.json")
    if mesh is not None:
        shard_frozen(encoder.module, encoder.units, mesh)
    _fill(encoder, weights, config.placement, device)
    return encoder


def _build_pooled(config: PooledEncoderConfig, device: torch.device) -> PooledEncoder:
    if isinstance(config, WordsConfig):
        return build_text_encoder(config)
    folder = _folder(config, "clip")
    encoder = build_text_encoder(config, folder, device_dtype(config.dtype, device), device)
    assert isinstance(encoder, ClipEncoder)
    weights = CheckedWeights(ClipNames(_open_weights(folder)), _shapes(encoder.module), folder, "its config.json")
    _fill(encoder, weights, config.placement, device)
    fill_positions(encoder.module)
    return encoder


def _fill(
    encoder: T5Encoder | ClipEncoder, weights: Mapping[str, Tensor], placement: str, device: torch.device
) -> None:
    offloaded = placement == "offloaded"
    fill_frozen(encoder.module, weights, _CPU if offloaded else device)
    if offloaded:
        HostWeights(encoder.module, encoder.units, device)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _folder(config: T5EncoderConfig | ClipEncoderConfig, section: str) -> Path:
    folder = find_encoder(config.from_pretrained, f"{section}.from_pretrained", config.cache_dir)
    if not folder.is_dir():
        raise UserError(
            f"{section}.from_pretrained = {config.from_pretrained!r}: is a file; name the folder that holds "
            "config.json, the tokenizer and the weights"
        )
    return folder


def _open_weights(folder: Path) -> Mapping[str, Tensor]:
    """The tensors of a folder: safetensors, or PyTorch's `.bin` files where there is nothing else."""
    if not any(folder.glob("*.safetensors")) and any(folder.glob("pytorch_model*.bin")):
        return _BinFiles(folder)
    return WeightFiles(folder)


class _BinFiles(Mapping[str, Tensor]):
    """`pytorch_model*.bin`, mapped into memory and read by PyTorch's own unpickler of tensors, which runs no code."""

    def __init__(self, folder: Path) -> None:
        self._tensors: dict[str, Tensor] = {}
        for path in sorted(folder.glob("pytorch_model*.bin")):
            try:
                self._tensors |= torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except Exception as error:  # whatever the unpickler meets in a file that is none
                raise UserError(
                    f"{path}: cannot be read as plain tensors ({in_one_line(error)}); convert it to .safetensors where "
                    "you trust it"
                ) from None

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def encoder_bytes(config: EncodersConfig, ranks_per_node: int = 1, decodes: bool = False) -> dict[str, int]:
    """Bytes of the frozen weights on one GPU, by section ("ae", "t5", "clip"), at their placement and dtype.

    Counted on the meta device: nothing is read but a `config.json` that lies in a local folder; without one the
    published sizes are taken. `decodes`: the autoencoder's decoder too.
    """
    found = {"ae": 0, "t5": 0, "clip": 0}
    if not isinstance(config.ae, PixelConfig):
        autoencoder = build_autoencoder(config.ae, _DTYPES[config.ae.dtype])
        parts = autoencoder.encoding | (autoencoder.decoding if decodes else {})
        sizes = {name: _size(part) for name, part in parts.items()}
        units = [size for name, size in sizes.items() if name in ("encoder", "decoder")]
        rest = sum(sizes.values()) - sum(units)
        if config.ae.placement == "offloaded":
            found["ae"] = max(units) + rest  # encoder and decoder never run together
        else:
            found["ae"] = sum(sizes.values())
    for key, section in (("t5", config.t5), ("clip", config.clip)):
        if isinstance(section, WordsConfig):
            continue
        encoder = build_text_encoder(section, _described(section), _DTYPES[section.dtype], tokenizer=False)
        units = [_size(unit) for unit in encoder.units]
        found[key] = frozen_bytes(units, _size(encoder.module) - sum(units), section.placement, ranks_per_node)
    return found


def encoding_costs(config: EncodersConfig, shape: tuple[int, int, int], batch: int) -> dict[str, EncodeCost]:
    """What encoding a micro-batch of (T, H, W) pixels and its captions costs, by section; nothing is read but what
    `encoder_bytes` reads."""
    found = {"ae": autoencoder_cost(config.ae, shape, batch, _itemsize(config.ae))}
    for key, section in (("t5", config.t5), ("clip", config.clip)):
        if isinstance(section, WordsConfig):
            found[key] = EncodeCost()
        else:
            facts = text_facts(section, _described(section))
            found[key] = text_cost(facts, key, section.max_length, batch, _itemsize(section))
    return found


def _described(section: T5EncoderConfig | ClipEncoderConfig) -> Path | None:
    """The local folder that says how large a text encoder is; None where there is none."""
    local = Path(section.from_pretrained).expanduser()
    return local if (local / "config.json").is_file() else None


def _itemsize(section: EncoderSection) -> int:
    return _DTYPES[getattr(section, "dtype", "fp32")].itemsize


def _size(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.state_dict().values())
