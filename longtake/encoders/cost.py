"""What it costs to encode a micro-batch: FLOPs, and activations at the worst moment, seen by tracing the real encoders.

An encoder on the meta device runs a few pieces (a tile, a frame, a few captions); what others take follows by the law
of their sizes. Weights are not counted, nor what kernels take as scratch. To import what builds the published encoders
takes 3 s, so what was seen of them lies in `published.json`, which `tools/encoder_costs.py` writes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from math import ceil, prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from longtake.contracts import UserError
from longtake.encoders.autoencoder import Autoencoder, build_autoencoder
from longtake.encoders.autoencoder_config import AutoencoderSection, CogVideoXVAEConfig, HunyuanVAEConfig
from longtake.encoders.cogvideox import CogVideoXAutoencoder
from longtake.encoders.config import WordsConfig
from longtake.encoders.kl import HunyuanAutoencoder
from longtake.encoders.text import LearnedTextEncoder, build_text_encoder, text_facts
from longtake.encoders.wan import WanAutoencoder
from longtake.encoders.wan_config import WanVAEConfig
from longtake.models.law import fit
from longtake.models.trace import Trace
from longtake.parallel.shared_work import Tile, deal
from longtake.small_files import digest_of_code, remembered

Shape = tuple[int, int, int]  # frames, rows, columns
Numbers = Mapping[str, Any]
PUBLISHED = Path(__file__).with_name("published.json")
_TRACED = ((33, 128, 128), (1, 256, 256), (129, 256, 256), (17, 192, 192), (61, 256, 256), (1, 64, 64), (9, 128, 256))
_WHOLE = 65 * 256 * 256  # pixels of a piece above which convolutions are cut in time: its bytes follow no simple law
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# of a section, what changes neither FLOPs nor bytes of a piece
_BESIDE = {"from_pretrained", "cache_dir", "placement", "compile", "shardformer", "posterior", "scale_factor"}
_BESIDE |= {"shift_factor", "use_spatial_tiling", "use_temporal_tiling", "sample_size", "sample_tsize"}
_BESIDE |= {"tile_overlap_factor", "new_tokens", "tokenizer", "mini_batch", "use_tiling", "tile_height", "tile_width"}
_BESIDE |= {"tile_overlap_height", "tile_overlap_width", "invert_scale_latents", "first_latent_alone"}
_BESIDE |= {"blend_chunks", "spatial_scale", "latent_shift", "latent_scale"}
_BESIDE |= {"latents_mean", "latents_std"}


@dataclass(frozen=True)
class EncodeCost:
    """Of one micro-batch on the ranks that share it."""

    piece_flops: tuple[int, ...] = ()  # of the pieces that ranks can share: tiles, captions
    bytes_of: Callable[[int], int] = lambda pieces: 0  # on a rank that computes so many of them
    input_bytes: int = 0  # of what is encoded, which every rank holds meanwhile

    @property
    def flops(self) -> int:
        """Of all ranks together."""
        return sum(self.piece_flops)

    def rank_flops(self, ranks: int) -> int:
        """Of the rank that has most to do, where pieces are dealt out over so many."""
        load = [0] * ranks
        for flops, owner in zip(self.piece_flops, deal(self.piece_flops, ranks), strict=True):
            load[owner] += flops
        return max(load)

    def rank_bytes(self, ranks: int = 1) -> int:
        """Of that rank."""
        return self.input_bytes + self.bytes_of(ceil(len(self.piece_flops) / ranks))


def autoencoder_cost(section: AutoencoderSection, shape: Shape, batch: int) -> EncodeCost:
    """Return the cost of encoding `batch` samples of (T, H, W) pixels, in pieces as they will run. The frames of a
    chunk of a stream are there as bytes, and as float32 before and after; an autoencoder that learned nothing takes
    no more."""
    frames = (1 + 2 * torch.float32.itemsize) * batch * 3 * prod(first_chunks(section, shape)[0])
    numbers = seen(section)
    if not numbers["parts"]:
        return EncodeCost(input_bytes=frames)
    pieces = _shapes(section, shape, 1) * batch
    if batch > 1 and _shapes(section, shape, 2) != pieces[: 2 * len(pieces) // batch]:  # several samples in a piece
        pieces = _shapes(section, shape, batch)
    counts = Counter(pieces)
    flops = {piece: piece[0] * _flops(section, _sizes(piece)) for piece in counts}
    numbers_made = sum(prod(piece) * count for piece, count in counts.items())
    results = _DTYPES[getattr(section, "dtype", "fp32")].itemsize * numbers_made
    together = max(piece[0] for piece in counts)

    def num_bytes(_: int) -> int:
        (prepared, first), (_, most) = (_bytes_of_a_sample(section, part) for part in first_chunks(section, shape))
        caches = (batch - together) * (most - first)  # of samples in turn, from chunk to chunk
        return batch * prepared + results + max(together * most + caches, results)

    return EncodeCost(tuple(map(flops.__getitem__, pieces)), num_bytes, frames)


def text_cost(numbers: Numbers, batch: int) -> EncodeCost:
    """Return the cost of `batch` captions of an encoder of which these numbers were seen."""
    if not numbers["flops"]:
        return EncodeCost()
    slope, least = numbers["bytes"]
    results = batch * (numbers["result"] + numbers["result"] * torch.float32.itemsize // numbers["itemsize"])
    # results: which every rank has in the end
    return EncodeCost((numbers["flops"],) * batch, lambda captions: max(slope * captions + least, results))


@lru_cache(maxsize=16)
def seen(section: Any) -> Numbers:
    """What was seen of the encoder of a section, see `look_at_autoencoder` and `look_at_text`: of a published one
    before, of others now."""
    if isinstance(section, WordsConfig):
        return {"units": [], "rest": 0, "flops": 0}
    known = _published().get(json.dumps(facts_of(section), sort_keys=True))
    if known is not None:
        return known
    return look(section)


def look(section: Any) -> dict[str, Any]:
    """What a trace says of the encoder of a section."""
    return (look_at_autoencoder if isinstance(section, AutoencoderSection) else look_at_text)(on_meta(section))


@cache
def _published() -> dict[str, Numbers]:
    listed = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return {json.dumps(one["facts"], sort_keys=True): one["seen"] for one in listed}


def facts_of(section: Any) -> dict[str, Any]:
    """All that the numbers of an encoder depend on, fit for JSON."""
    own = section.model_dump(mode="json", exclude=_BESIDE)
    return own if isinstance(section, AutoencoderSection) else own | text_facts(section, _folder(section))


def _folder(section: Any) -> Path | None:
    """Return the local folder of a text encoder's weights, where there is one."""
    local = Path(section.from_pretrained).expanduser()
    return local if (local / "config.json").is_file() else None


@lru_cache(maxsize=16)
def on_meta(section: Any) -> Any:
    """Return the encoder of a section on the meta device, for counting."""
    dtype = _DTYPES[getattr(section, "dtype", "fp32")]
    if getattr(section, "compile", False):
        section = section.model_copy(update={"compile": False})  # the trace would see nothing of compiled layers
    if isinstance(section, AutoencoderSection):
        return build_autoencoder(section, dtype)
    return build_text_encoder(section, _folder(section), dtype, tokenizer=False)


def _size(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.state_dict().values())


def look_at_text(encoder: LearnedTextEncoder) -> dict[str, Any]:
    """By a trace: bytes of each of its units and of the rest; FLOPs and bytes of the embedding of a caption, bytes at
    the worst moment for each caption and beside them."""

    def measure(sizes: tuple[int, ...]) -> dict[str, int]:
        ids = torch.zeros(*sizes, encoder.max_length, dtype=torch.long, device="meta")
        with torch.no_grad(), Trace(encoder, ids) as trace:
            out = encoder.embed_ids(ids, torch.ones_like(ids))
        return {"flops": trace.flops, "bytes": trace.peak, "result": out.nbytes}

    law = fit(((2,), (4,)), measure, lambda sizes: (sizes[0], 1), tolerance=1e-9)
    one, two = law((1,)), law((2,))
    slope = round(two["bytes"] - one["bytes"])
    units = [_size(unit) for unit in encoder.units]
    return {
        "units": units,
        "rest": _size(encoder.module) - sum(units),
        "flops": round(one["flops"]),
        "bytes": [slope, round(one["bytes"]) - slope],
        "result": round(one["result"]),
        "itemsize": encoder.module.dtype.itemsize,
    }


def look_at_autoencoder(autoencoder: Autoencoder) -> dict[str, Any]:
    """By a trace: bytes of each part by whether it is needed for encoding, and whether it has several layers; factors
    of the FLOPs of a piece, and of its bytes at the worst moment where these follow a law."""
    parts = {
        name: [_size(part), int(encodes), int(any(part.children()))]
        for encodes, of in ((True, autoencoder.encoding), (False, autoencoder.decoding))
        for name, part in of.items()
    }
    if not autoencoder.encoding:
        return {"parts": parts}
    pieces: dict[tuple[int, ...], tuple[Tensor, Tile]] = {}  # with the video that they are cut from
    small: list[tuple[int, ...]] = []
    for frames, *sides in _TRACED:
        has_length = autoencoder.config.has_length(frames)
        shape = (frames if has_length else frames + 7, *sides)  # 4k+1 frames, or whole blocks of 4 or 8
        try:
            autoencoder.check(*shape)
        except UserError:
            continue
        video = torch.empty(1, 3, *shape, device="meta")
        piece = pieces_of(autoencoder, video)[0]
        pieces.setdefault(_sizes(piece.shape), (video, piece))
        small += [_sizes(piece.shape)] * (prod(shape) < _WHOLE)

    @cache
    def measure(sizes: tuple[int, ...]) -> dict[str, int]:
        video, piece = pieces[sizes]
        with torch.no_grad(), Trace(*autoencoder.encoding.values(), video) as trace:
            piece.run()
        return {"flops": trace.flops, "bytes": trace.peak}

    flops = fit(tuple(pieces), lambda sizes: {"flops": measure(sizes)["flops"]}, _flops_terms, tolerance=1e-9)
    held = fit(tuple(small), lambda sizes: {"bytes": measure(sizes)["bytes"]}, _bytes_terms)
    most = max(map(prod, small), default=0) if held.holds else 0
    return {"parts": parts, "flops": flops.factors[:, 0].tolist(), "bytes": held.factors[:, 0].tolist(), "most": most}


def _flops_terms(sizes: tuple[int, ...]) -> tuple[int, ...]:
    frames, cells = sizes
    return frames * cells, cells, frames * cells**2, (frames * cells) ** 2, cells**2


def _bytes_terms(sizes: tuple[int, ...]) -> tuple[int, ...]:
    frames, cells = sizes
    return frames * cells, cells, frames, 1


@lru_cache(maxsize=4096)
def _flops(section: Any, sizes: tuple[int, ...]) -> int:
    return round(float(np.dot(_flops_terms(sizes), seen(section)["flops"])))


@lru_cache(maxsize=8192)
def _shapes(section: Any, shape: Shape, batch: int) -> tuple[tuple[int, ...], ...]:
    """Of the results of the pieces."""
    return tuple(piece.shape for piece in pieces_of(_cutter(section), torch.empty(batch, 3, *shape, device="meta")))


@lru_cache(maxsize=8)
def _cutter(section: Any) -> Any:
    """Return an autoencoder that says which pieces there are; it may be without the layers that would compute them."""
    if isinstance(section, HunyuanVAEConfig):
        return HunyuanAutoencoder(section, nn.Module(), _DTYPES[section.dtype])
    if isinstance(section, CogVideoXVAEConfig):
        return CogVideoXAutoencoder(section, nn.Module(), _DTYPES[section.dtype])
    if isinstance(section, WanVAEConfig):
        return WanAutoencoder(section, nn.Module(), _DTYPES[section.dtype])
    return on_meta(section)


class _Reached(Exception):
    """Ends an encoding before any piece of it is computed."""


def pieces_of(autoencoder: Any, video: Tensor) -> list[Tile]:
    """Return the pieces of an encoding; all of it, where the autoencoder computes none."""
    if autoencoder.compute is None:
        latents = len(video), *autoencoder.latent(*video.shape[2:])
        return [Tile(partial(autoencoder.posterior, video), latents)]
    found: list[Tile] = []

    def see(pieces: Sequence[Tile]) -> NoReturn:
        found.extend(pieces)
        raise _Reached

    before, autoencoder.compute = autoencoder.compute, see
    try:
        autoencoder.posterior(video)
    except _Reached:
        pass
    finally:
        autoencoder.compute = before
    return found


def _sizes(piece: Sequence[int]) -> tuple[int, int]:
    """Frames of a piece's result, and cells of each: `[B, C, f, h, w]`, or `[B, C, h, w]` of a frame."""
    *_, height, width = piece
    return prod(piece[2:-2]), height * width


@lru_cache(maxsize=8192)
def _bytes_of_a_sample(section: Any, shape: Shape) -> tuple[int, int]:
    """Bytes that are made before the first piece of one sample runs, and at the worst moment of the largest."""
    video = torch.empty(1, 3, *shape, device="meta")
    with torch.no_grad(), Trace(video) as trace:
        pieces = pieces_of(_cutter(section), video)
        prepared = trace.live
    del pieces
    numbers, sizes = seen(section), largest_piece(section, shape)
    if prod(sizes) <= numbers["most"] and first_chunks(section, shape)[0] == shape:  # the law is that of one chunk
        return prepared, round(float(np.dot(_bytes_terms(sizes), numbers["bytes"])))
    frames, cells = sizes
    if (per_cell := numbers.get("per_cell", {}).get(str(frames))) is not None:
        return prepared, per_cell * cells
    known = numbers.get("pieces", {}).get(f"{frames}x{cells}")
    return prepared, peak_of_piece(section, shape) if known is None else known


def first_chunks(section: Any, shape: Shape) -> tuple[Shape, Shape]:
    """Return the first chunk of a stream, and the first two: the second meets what the first left, and later ones
    are like it."""
    lengths = _cutter(section).stream_lengths(shape[0])
    return (lengths[0], *shape[1:]), (sum(lengths[:2]), *shape[1:])


def largest_piece(section: Any, shape: Shape) -> tuple[int, int]:
    """Frames and cells of each, of the result of the largest piece of one sample."""
    return _sizes(max(_shapes(section, shape, 1), key=prod))


def peak_of_piece(section: Any, shape: Shape) -> int:
    """Bytes at the worst moment of the largest piece of one sample, by a trace; those of our autoencoders are kept in
    the user's cache."""
    peaks, sizes = _peaks(section), largest_piece(section, shape)

    def look() -> int:
        autoencoder, video = on_meta(section), torch.empty(1, 3, *shape, device="meta")
        with torch.no_grad(), Trace(*autoencoder.encoding.values(), video) as trace:
            largest = max(pieces_of(autoencoder, video), key=lambda piece: prod(piece.shape))
            prepared = trace.peak = trace.live
            largest.run()
            return trace.peak - prepared

    if sizes not in peaks and type(section).AUTOENCODER.startswith("longtake."):
        facts = torch.__version__, facts_of(section), sizes, digest_of_code("encoders/*.py", "models/trace.py")
        peaks[sizes] = remembered("encoded_pieces", look, *facts)
    elif sizes not in peaks:
        peaks[sizes] = look()
    return peaks[sizes]


@lru_cache(maxsize=8)
def _peaks(section: Any) -> dict[tuple[int, int], int]:
    """Bytes at the worst moment of pieces, by the sizes of their results: filled as they are asked for."""
    return {}
