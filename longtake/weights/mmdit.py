"""MMDiT weights in foreign layouts: their names to ours and back, as one table.

Two layouts of names (Linear weights [out, in]; all other names agree):

    split  Open-Sora 2.0:  q_proj, k_proj, v_proj; single blocks q_proj, k_proj, v_mlp (value rows, then MLP rows)
    fused  FLUX (BFL):     qkv;                    single blocks linear1 (q, k, v, MLP rows)

and two orders of the channels inside each head of q and k: `interleaved` weights rotate channels (2j, 2j + 1), `half`
weights rotate (j, K/2 + j). new[j] = old[2j], new[K/2 + j] = old[2j + 1], applied to the rows of q and k, their biases
and the scales of their norms, turns interleaved weights into half ones that give the same outputs. Names do not show
the order: files written here say it in their metadata, others are taken to follow their family (split files half, as
Open-Sora 2.0 ships them; fused files interleaved, as FLUX does) unless the caller knows better.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from longtake.contracts import UserError
from longtake.models import MMDiT, MMDiTConfig
from longtake.weights.files import WeightFiles, save_weights

Names = Literal["split", "fused"]
Rope = Literal["half", "interleaved"]
ROPE_KEY = "longtake.rope"  # metadata entry of files written here

_log = logging.getLogger(__name__)

# Which parts make up which projection, in order of rows. Parts: q, k, v of width D, m (MLP input) of width mlp_size.
_DOUBLE = {"split": {"q_proj": "q", "k_proj": "k", "v_proj": "v"}, "fused": {"qkv": "qkv"}}
_SINGLE = {"split": {"q_proj": "q", "k_proj": "k", "v_mlp": "vm"}, "fused": {"linear1": "qkvm"}}


@dataclass(frozen=True)
class Layout:
    """How a state dict is written down: its names, and the order of channels in the heads of q and k."""

    names: Names
    rope: Rope


OPEN_SORA_V2 = Layout("split", "half")
FLUX = Layout("fused", "interleaved")


@dataclass(frozen=True)
class Piece:
    """Rows `start:stop` of a source tensor (all of it if None); `heads`: reorder the channels of each head."""

    source: str
    rows: tuple[int, int] | None = None
    heads: bool = False


def layout_of(config: MMDiTConfig) -> Layout:
    """The layout in which a model of this config keeps its own weights."""
    return Layout("fused" if config.fused_qkv else "split", "half" if config.use_liger_rope else "interleaved")


def detect_layout(names: Sequence[str], place: str, metadata: Mapping[str, str] | None = None) -> Layout:
    """The layout of a state dict with these tensor names; `place` names it in a fault.

    Raises `UserError` where the names are not those of an MMDiT.
    """
    joined = {name.split(".")[-2] for name in names if name.startswith(("double_blocks.", "single_blocks."))}
    if "img_in.weight" not in names:
        if any(name.startswith(("transformer_blocks.", "single_transformer_blocks.")) for name in names):
            raise UserError(
                f"{place}: has the tensor names of diffusers, which are not read yet; give the file in "
                "Black Forest Labs' or Open-Sora 2.0's names"
            )
        raise UserError(
            f"{place}: holds no MMDiT weights (no tensor img_in.weight); give an Open-Sora 2.0 or FLUX file"
        )
    fused = bool(joined & {"qkv", "linear1"})
    if fused and joined & {"q_proj", "v_mlp"}:
        raise UserError(f"{place}: mixes fused (qkv, linear1) and split (q_proj, v_mlp) tensors; give one or the other")
    names_layout: Names = "fused" if fused else "split"
    rope = (metadata or {}).get(ROPE_KEY, FLUX.rope if fused else OPEN_SORA_V2.rope)
    if rope not in ("half", "interleaved"):
        raise UserError(f"{place}: its metadata says {ROPE_KEY} = {rope!r}; it must be half or interleaved")
    return Layout(names_layout, rope)


def state_shapes(config: MMDiTConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors, in the model's order; nothing is allocated."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in MMDiT(config).state_dict().items()}


def plan_conversion(config: MMDiTConfig, source: Layout, target: Layout) -> dict[str, tuple[Piece, ...]]:
    """For each tensor of a model in layout `target`: the pieces of `source` tensors that make up its rows.

    The sizes come from `config`; its own `fused_qkv` and `use_liger_rope` are not looked at.
    """
    reorder = source.rope != target.rope
    plan: dict[str, tuple[Piece, ...]] = {}
    for name in state_shapes(config.model_copy(update={"fused_qkv": target.names == "fused"})):
        block, table = _projection_table(name)
        layer, _, kind = name.removeprefix(block).rpartition(".")
        if layer in table[target.names]:
            parts = table[target.names][layer]
            located = _locate_parts(table[source.names], block, kind, config)
            pieces = (located[part] for part in parts)
            plan[name] = _merge(
                [Piece(p.source, p.rows, reorder and part in "qk") for p, part in zip(pieces, parts, strict=True)]
            )
        else:
            plan[name] = (Piece(name, heads=reorder and kind == "scale"),)
    return plan


def _projection_table(name: str) -> tuple[str, dict[str, dict[str, str]]]:
    """The prefix under which a parameter's projections lie, and their table; ("", empty tables) outside of blocks."""
    parts = name.split(".")
    if parts[0] == "double_blocks" and parts[2].endswith("_attn"):
        return ".".join(parts[:3]) + ".", _DOUBLE
    if parts[0] == "single_blocks":
        return ".".join(parts[:2]) + ".", _SINGLE
    return "", {"split": {}, "fused": {}}


def _locate_parts(layers: Mapping[str, str], block: str, kind: str, config: MMDiTConfig) -> dict[str, Piece]:
    """Where each part (q, k, v, m) of a block lies: tensor and rows."""
    located = {}
    for layer, parts in layers.items():
        start = 0
        for part in parts:
            stop = start + (config.mlp_size if part == "m" else config.hidden_size)
            located[part] = Piece(f"{block}{layer}.{kind}", (start, stop))
            start = stop
        if len(parts) == 1:
            located[parts] = Piece(f"{block}{layer}.{kind}")
    return located


def _merge(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Join pieces that follow each other in one tensor and are treated alike, so that rows are not cut needlessly."""
    merged = [pieces[0]]
    for piece in pieces[1:]:
        last = merged[-1]
        follows = piece.source == last.source and piece.heads == last.heads
        if follows and piece.rows and last.rows and piece.rows[0] == last.rows[1]:
            merged[-1] = Piece(last.source, (last.rows[0], piece.rows[1]), last.heads)
        else:
            merged.append(piece)
    return tuple(merged)


def assemble(pieces: Sequence[Piece], source: Mapping[str, Tensor], head_dim: int, target: Rope) -> Tensor:
    """One tensor from its pieces: rows cut, heads reordered where a piece says so, and joined."""
    parts = []
    for piece in pieces:
        part = source[piece.source]
        if piece.rows is not None:
            part = part[slice(*piece.rows)]
        parts.append(reorder_heads(part, head_dim, target) if piece.heads else part)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def reorder_heads(x: Tensor, head_dim: int, target: Rope) -> Tensor:
    """Turn the rows [N * K, ...] of a q or k projection (or a norm scale [K]) into the other rotary layout."""
    heads = x.unflatten(0, (-1, head_dim))
    if target == "half":
        pairs = heads.unflatten(1, (head_dim // 2, 2)).transpose(1, 2)
    else:
        pairs = heads.unflatten(1, (2, head_dim // 2)).transpose(1, 2)
    return pairs.flatten(1, 2).flatten(0, 1)


class MMDiTWeights(Mapping[str, Tensor]):
    """The tensors of a file under the names of a model of `config`, each made when it is asked for.

    `source`: a safetensors file, a folder of them, or an open `WeightFiles`. `rope`: the file's order of head channels
    where its family and metadata do not tell. All names and shapes are compared at once, before any data is read.

    Raises `UserError` naming the tensors that the model lacks (`surplus`) or the file lacks (`missing`); with
    `config.strict_load` False these are logged and kept as attributes instead, and missing ones are not in the mapping.
    A tensor of another size is refused in any case.
    """

    def __init__(
        self, source: str | os.PathLike[str] | WeightFiles, config: MMDiTConfig, rope: Rope | None = None
    ) -> None:
        self.files = source if isinstance(source, WeightFiles) else WeightFiles(source)
        self.config = config
        place = str(self.files.path)
        found = detect_layout(list(self.files), place, self.files.metadata)
        self.layout = Layout(found.names, rope or found.rope)
        self._plan = plan_conversion(config, self.layout, layout_of(config))
        used = {piece.source for pieces in self._plan.values() for piece in pieces}
        self.missing = sorted(used - set(self.files))
        self.surplus = sorted(set(self.files) - used)
        faults = _differences(self.missing, self.surplus)
        if faults and config.strict_load:
            raise UserError(
                f"{place}: does not fit the model: {'; '.join(faults)}; change model.cond_embed, guidance_embed, "
                "depth or depth_single_blocks to match, or set model.strict_load to False to go on without"
            )
        if faults:
            _log.warning("%s: %s", place, "; ".join(faults))
        absent = set(self.missing)
        self._plan = {n: pieces for n, pieces in self._plan.items() if not absent & {p.source for p in pieces}}
        self._check_sizes(place)

    def __getitem__(self, name: str) -> Tensor:
        return assemble(self._plan[name], self.files, self.config.head_dim, layout_of(self.config).rope)

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan)

    def __len__(self) -> int:
        return len(self._plan)

    def _check_sizes(self, place: str) -> None:
        wanted = state_shapes(self.config.model_copy(update={"fused_qkv": self.layout.names == "fused"}))
        for name in sorted({piece.source for pieces in self._plan.values() for piece in pieces}):
            found = self.files.shape(name)
            if found != wanted[name]:
                raise UserError(
                    f"{place}: {name} has shape {list(found)}, the model needs {list(wanted[name])}; "
                    "make the sizes of the model section those of the file"
                )


def load_mmdit(
    source: str | os.PathLike[str] | WeightFiles, config: MMDiTConfig, rope: Rope | None = None
) -> dict[str, Tensor]:
    """All tensors of a file under the model's names, on the CPU, in the file's dtype; see `MMDiTWeights`.

    For models too large to hold twice, go through `MMDiTWeights` one tensor at a time.
    """
    return dict(MMDiTWeights(source, config, rope))


def convert(state: Mapping[str, Tensor], config: MMDiTConfig, target: Layout) -> dict[str, Tensor]:
    """A whole state dict of a model of `config`, written in another layout: the inverse of loading it.

    Tensors that are alike in both layouts share the memory of `state`.
    """
    plan = plan_conversion(config, layout_of(config), target)
    faults = _differences(
        sorted({p.source for pieces in plan.values() for p in pieces} - set(state)),
        sorted(set(state) - {p.source for pieces in plan.values() for p in pieces}),
    )
    if faults:
        raise UserError(f"the state dict does not fit its model config: {'; '.join(faults)}")
    return {name: assemble(pieces, state, config.head_dim, target.rope) for name, pieces in plan.items()}


def to_open_sora(state: Mapping[str, Tensor], config: MMDiTConfig) -> dict[str, Tensor]:
    """A model's state dict under Open-Sora 2.0's names, with half-split heads, as its released file has them."""
    return convert(state, config, OPEN_SORA_V2)


def save_mmdit(
    state: Mapping[str, Tensor],
    config: MMDiTConfig,
    path: str | os.PathLike[str],
    target: Layout = OPEN_SORA_V2,
    max_shard_bytes: int = 5 * 2**30,
) -> list[Path]:
    """Write a model's state dict in the given layout (`save_weights` says how files are named); returns the files."""
    return save_weights(convert(state, config, target), path, {ROPE_KEY: target.rope}, max_shard_bytes)


def _differences(missing: Sequence[str], surplus: Sequence[str]) -> list[str]:
    faults = []
    if missing:
        faults.append(f"missing {_enumerate(missing)}")
    if surplus:
        faults.append(f"unknown {_enumerate(surplus)}")
    return faults


def _enumerate(names: Sequence[str]) -> str:
    """Every name, block numbers of like tensors drawn together: `double_blocks.{0..18}.img_mod.lin.weight`."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for name in names:
        head, _, rest = name.partition(".")
        number, _, tail = rest.partition(".")
        key = (head, "*", tail) if head.endswith("_blocks") and number.isdigit() else (name, "", "")
        groups.setdefault(key, []).append(int(number) if key[1] else 0)
    texts = []
    for (head, star, tail), numbers in groups.items():
        texts.append(f"{head}.{_ranges(numbers)}.{tail}" if star else head)
    return ", ".join(texts)


def _ranges(numbers: list[int]) -> str:
    numbers = sorted(numbers)
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return "{" + ",".join(map(str, numbers)) + "}"
