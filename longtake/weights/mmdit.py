"""MMDiT weights in foreign layouts: made into ours and back, tensor by tensor.

`mmdit_names` has the tables of names. Beside these, q and k have two orders of the channels inside each head:
`interleaved` weights rotate channels (2j, 2j + 1), `half` weights rotate (j, K/2 + j). new[j] = old[2j],
new[K/2 + j] = old[2j + 1], applied to the rows of q and k, their biases and the scales of their norms, turns
interleaved weights into half ones that give the same outputs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from longtake.contracts import UserError
from longtake.durable import write_whole
from longtake.hub import find_files
from longtake.models import MMDiTConfig
from longtake.weights.files import TensorSource, WeightFiles, save_weights
from longtake.weights.mmdit_names import (
    OPEN_SORA_V2,
    ROPE_KEY,
    Layout,
    Rope,
    detect_layout,
    file_tensors,
    is_of_heads,
    layout_of,
    projection_table,
    state_shapes,
)

__all__ = [
    "OPEN_SORA_V2",
    "ROPE_KEY",
    "Layout",
    "MMDiTWeights",
    "Piece",
    "Rope",
    "assemble",
    "convert",
    "detect_layout",
    "diffusers_config",
    "find_denoiser",
    "layout_of",
    "load_mmdit",
    "open_source",
    "plan_conversion",
    "projection_table",
    "reorder_heads",
    "save_mmdit",
    "state_shapes",
    "to_open_sora",
]

# What a folder of a denoiser on the hub may be: diffusers' pipeline, its transformer alone, or one exported here.
_FOLDERS = (
    ("model_index.json", "transformer/*.json", "transformer/*.safetensors"),
    ("config.json", "diffusion_pytorch_model*.json", "diffusion_pytorch_model*.safetensors"),
    ("model.safetensors.index.json", "model*.safetensors"),
)
_GROWN = ("cond_in.weight", "cond_in.bias")  # what a text-to-video model lacks for known frames


@dataclass(frozen=True)
class Piece:
    """Rows `start:stop` of a source tensor (all of it if None); `heads`: reorder the channels of each head."""

    source: str
    rows: tuple[int, int] | None = None
    heads: bool = False


def plan_conversion(config: MMDiTConfig, source: Layout, target: Layout) -> dict[str, tuple[Piece, ...]]:
    """For each tensor of a model in layout `target`: the pieces of `source` tensors that make up its rows."""
    located: dict[str, tuple[str, int, int]] = {}  # part -> tensor of the source, first row, end
    given = file_tensors(config, source.names)
    for name, rows in given.items():
        start = 0
        for part, count in rows.parts:
            located[part] = (name, start, start + count)
            start += count
    plan = {}
    for name, rows in file_tensors(config, target.names).items():
        pieces: list[Piece] = []
        for part, _ in rows.parts:
            tensor, start, stop = located[part]
            heads = source.rope != target.rope and is_of_heads(part)
            last = pieces[-1] if pieces else None
            if last and last.rows and (last.source, last.rows[1], last.heads) == (tensor, start, heads):
                pieces[-1] = Piece(tensor, (last.rows[0], stop), heads)
            else:
                pieces.append(Piece(tensor, (start, stop), heads))
        plan[name] = tuple(
            Piece(p.source, None if p.rows == (0, given[p.source].shape[0]) else p.rows, p.heads) for p in pieces
        )
    return plan


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

    `source`: a safetensors file, a folder of them (diffusers' with a `transformer` folder in it, and an old Open-Sora
    checkpoint with a `model` folder, too), or tensors that are open already. `rope`: the file's order of head channels
    where its family and metadata do not tell. All names and shapes are compared at once, before any data is read.

    With `config.grow_cond_in`, a file without `cond_in` gives zeros for it: the model starts as the text-to-video model
    that it is. `notes` says so, and what was left out, one line each.

    Raises `UserError` naming the tensors that the model lacks (`surplus`) or the file lacks (`missing`); with
    `config.strict_load` False these are noted and kept as attributes instead, and missing ones are not in the mapping.
    A tensor of another size is refused in any case, and whole numbers when they are read.
    """

    def __init__(
        self, source: str | os.PathLike[str] | TensorSource, config: MMDiTConfig, rope: Rope | None = None
    ) -> None:
        self.files = open_source(source) if isinstance(source, (str, os.PathLike)) else source
        self.config = config
        self.notes: list[str] = []
        place = str(self.files.path)
        names = set(self.files)
        found = detect_layout(names, place, self.files.metadata)
        self.layout = Layout(found.names, rope or found.rope)
        self._plan = plan_conversion(config, self.layout, layout_of(config))
        used = {piece.source for pieces in self._plan.values() for piece in pieces}
        self.grown = _GROWN if config.grow_cond_in and not names & set(_GROWN) else ()
        self.missing = sorted(used - names - set(self.grown))
        self.surplus = sorted(names - used)
        if self.grown:
            self.notes.append(f"{place} has no cond_in: it starts at zero (model.grow_cond_in)")
        self._judge_differences(place)
        absent = {*self.missing, *self.grown}
        self._plan = {n: pieces for n, pieces in self._plan.items() if not absent & {p.source for p in pieces}}
        self._check_sizes(place)

    def __getitem__(self, name: str) -> Tensor:
        if name in self.grown:
            return torch.zeros(state_shapes(self.config)[name])
        found = assemble(self._plan[name], self.files, self.config.head_dim, layout_of(self.config).rope)
        if not found.is_floating_point():
            kind = str(found.dtype).removeprefix("torch.")
            raise UserError(
                f"{self.files.path}: {self._plan[name][0].source} is kept as {kind}, "
                "which are codes of quantised weights; give the weights in bf16 or float32"
            )
        return found

    def __iter__(self) -> Iterator[str]:
        yield from self._plan
        yield from self.grown

    def __len__(self) -> int:
        return len(self._plan) + len(self.grown)

    def _judge_differences(self, place: str) -> None:
        faults = _differences(self.missing, self.surplus)
        if not faults:
            return
        said = f"{place}: does not fit the model: {'; '.join(faults)}"
        if not self.config.strict_load:
            start = "; what is missing starts at random" if self.missing else ""
            self.notes.append(f"{said}; passed over (model.strict_load is False){start}")
            return
        if not self.missing and set(self.surplus) == set(_GROWN):
            raise UserError(
                f"{said}; it is an image-to-video model: set model.cond_embed to True to keep that, or "
                "model.strict_load to False to go on as a text-to-video model"
            )
        if not self.surplus and set(self.missing) == set(_GROWN):
            raise UserError(
                f"{said}; it is a text-to-video model: set model.grow_cond_in to True to start cond_in at zero, or "
                "model.cond_embed to False"
            )
        raise UserError(
            f"{said}; change model.cond_embed, guidance_embed, depth or depth_single_blocks to match, or set "
            "model.strict_load to False to go on without"
        )

    def _check_sizes(self, place: str) -> None:
        wanted = file_tensors(self.config, self.layout.names)
        for name in sorted({piece.source for pieces in self._plan.values() for piece in pieces}):
            if (found := self.files.shape(name)) != wanted[name].shape:
                raise UserError(
                    f"{place}: {name} has shape {list(found)}, the model needs {list(wanted[name].shape)}; "
                    "make the sizes of the model section those of the file"
                )


def open_source(path: str | os.PathLike[str]) -> WeightFiles:
    """The denoiser's files at a path: those in it, or in the folder that diffusers and Open-Sora keep it in.

    A folder of a whole diffusers pipeline (`model_index.json`) has its denoiser in `transformer`; a checkpoint folder
    of Open-Sora in `model`. Raises `UserError` as `WeightFiles`.
    """
    folder = Path(path).expanduser()
    if (folder / "model_index.json").is_file():
        return WeightFiles(folder / "transformer")
    if folder.is_dir() and not any(folder.glob("*.safetensors")) and (folder / "model").is_dir():
        return WeightFiles(folder / "model")
    return WeightFiles(folder)


def find_denoiser(name: str) -> Path:
    """The local file or folder that `model.from_pretrained` stands for: a path, or a name on the Hugging Face hub.

    `owner/name` is a folder of diffusers or an export; `owner/name/file.safetensors` one file. Raises `UserError` as
    `find_files`.
    """
    return find_files(name, "model.from_pretrained", _FOLDERS)


def load_mmdit(
    source: str | os.PathLike[str] | TensorSource, config: MMDiTConfig, rope: Rope | None = None
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
    """Write a model's state dict in the given layout (`save_weights` says how files are named); returns the files.

    Under diffusers' names a folder is one that `FluxTransformer2DModel.from_pretrained` reads, `config.json` included.
    Raises `UserError` where that model has no place for what this one has.
    """
    if target.names != "diffusers":
        return save_weights(convert(state, config, target), path, {ROPE_KEY: target.rope}, max_shard_bytes)
    settings = json.dumps(diffusers_config(config), indent=2) + "\n"
    tensors = convert(state, config, target)
    files = save_weights(tensors, path, {ROPE_KEY: target.rope}, max_shard_bytes, "diffusion_pytorch_model")
    if Path(path).suffix == ".safetensors":
        return files
    write_whole(Path(path).expanduser() / "config.json", settings)
    return [*files, Path(path).expanduser() / "config.json"]


def diffusers_config(config: MMDiTConfig) -> dict[str, object]:
    """The settings of diffusers' `FluxTransformer2DModel` of the same sizes. Raises `UserError` where it has none."""
    fixed = {"theta": 10000, "mlp_ratio": 4.0, "qkv_bias": True, "cond_embed": False}
    for key, value in fixed.items():
        if (found := getattr(config, key)) != value:
            raise UserError(
                f"model.{key} = {found}: diffusers' FLUX has {value} only; save in Open-Sora's or FLUX's names instead"
            )
    return {
        "_class_name": "FluxTransformer2DModel",
        "patch_size": 1,
        "in_channels": config.in_channels,
        "num_layers": config.depth,
        "num_single_layers": config.depth_single_blocks,
        "attention_head_dim": config.head_dim,
        "num_attention_heads": config.num_heads,
        "joint_attention_dim": config.context_in_dim,
        "pooled_projection_dim": config.vec_in_dim,
        "guidance_embeds": config.guidance_embed,
        "axes_dims_rope": list(config.axes_dim),
    }


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
