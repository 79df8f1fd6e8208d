"""The weights of a checkpoint under plain names: read as a mapping, or written as one file or a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from longtake.checkpoint.contents import TensorRow, read_metadata, rows_of
from longtake.checkpoint.folder import FROZEN_FOLDER, check_all, damage_sentence, verify
from longtake.checkpoint.layout import bytes_of, safetensors_head
from longtake.checkpoint.runs import held
from longtake.checkpoint.state import RunState
from longtake.contracts import UserError
from longtake.durable import sync_file, unfinished, unfinished_folder, write_whole
from longtake.parallel import World

EXPORT_BYTES = 5 * 10**9  # of one file of a folder, as Hugging Face's libraries have it
INDEX_FILE = "model.safetensors.index.json"
SavedTensor = tuple[TensorRow, Metadata]  # a tensor, and the files that its shards are in


def export_safetensors(
    folder: str | Path,
    target: str | Path,
    part: str = "ema",
    metadata: Mapping[str, str] | None = None,
    max_file_bytes: int = EXPORT_BYTES,
) -> Path:
    """Write the weights of a checkpoint with plain parameter names, and return `target`.

    A `target` that ends in `.safetensors` becomes one file. Any other becomes a new folder in Hugging Face's layout:
    `model.safetensors`, or, above `max_file_bytes`, `model-00001-of-0000N.safetensors` and an index, each file within
    the bound unless a single tensor exceeds it.

    `part`: `ema` (falls back to `model` where the run kept no EMA) or `model`. `metadata`: strings for the header of
    each file, beside `format` and `part`. Dtypes stay as saved. One tensor at a time is in memory. `target` appears
    only when it is whole; a run in progress does not remove the checkpoint meanwhile. What the run did not train comes
    from its `frozen/`; where that has a file of its own, the export holds the trained weights alone and names the file
    as `frozen_source`. Raises UserError where the checkpoint is damaged or has no such part, or a folder `target`
    is not empty; OSError.
    """
    folder, target = Path(folder), Path(target)
    with held(folder):
        if faults := verify(folder):
            raise UserError(damage_sentence(folder, faults))
        found, header = choose_tensors(folder, part)
        header |= metadata or {}
        if target.suffix == ".safetensors":
            with unfinished(target) as partial:
                _write_file(partial, found, header)
        elif target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UserError(f"{target}: exists already and is not overwritten; choose another name")
        else:
            with unfinished_folder(target) as partial:
                _write_folder(partial, found, header, max_file_bytes)
    return target


def choose_tensors(folder: Path, part: str) -> tuple[list[SavedTensor], dict[str, str]]:
    """The tensors to write, and what the header says of them."""
    saved = read_metadata(folder)
    rows = rows_of(saved)
    chosen = [row for row in rows if row.part == part] or [row for row in rows if row.part == "model"] * (part == "ema")
    if not chosen:
        parts = ", ".join(sorted({row.part for row in rows}))
        raise UserError(f"{folder}: has no part '{part}'; choose one of {parts}")
    found = [(row, saved) for row in chosen]
    header = {"format": "pt", "part": chosen[0].part}
    frozen = RunState.read(folder).frozen
    if frozen is not None and frozen.source is None:
        found += _frozen_rows(folder.parent / FROZEN_FOLDER)
    elif frozen is not None:
        header["frozen_source"] = frozen.source
    return found, header


def _frozen_rows(folder: Path) -> list[SavedTensor]:
    """The tensors that a run did not train. Raises UserError where their folder is damaged."""
    if faults := verify(folder):
        raise UserError(damage_sentence(folder, faults))
    saved = read_metadata(folder)
    return [(row, saved) for row in rows_of(saved)]


def _write_folder(folder: Path, found: Sequence[SavedTensor], header: Mapping[str, str], limit: int) -> None:
    """The files of Hugging Face's layout, and their index where there are several."""
    shares = _deal(found, limit)
    if len(shares) == 1:
        _write_file(folder / "model.safetensors", found, header)
        sync_file(folder / "model.safetensors")
        return
    weight_map = {}
    for number, share in enumerate(shares, 1):
        name = f"model-{number:05d}-of-{len(shares):05d}.safetensors"
        _write_file(folder / name, share, header)
        sync_file(folder / name)
        weight_map |= {plain_name(row): name for row, _ in share}
    total = sum(row.num_bytes for row, _ in found)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_whole(folder / INDEX_FILE, json.dumps(index, indent=1) + "\n")


def _deal(found: Sequence[SavedTensor], limit: int) -> list[list[SavedTensor]]:
    """The tensors of each file, by name."""
    shares: list[list[SavedTensor]] = [[]]
    size = 0
    for source in sorted(found, key=lambda source: plain_name(source[0])):
        if shares[-1] and size + source[0].num_bytes > limit:
            shares.append([])
            size = 0
        shares[-1].append(source)
        size += source[0].num_bytes
    return shares


def _write_file(path: Path, found: Sequence[SavedTensor], header: Mapping[str, str]) -> None:
    """One safetensors file."""
    found = sorted(found, key=lambda source: (-source[0].dtype.itemsize, plain_name(source[0])))  # no holes
    with path.open("wb") as stream:
        stream.write(safetensors_head([(plain_name(row), row.dtype, row.shape) for row, _ in found], header))
        for row, saved in found:
            stream.write(memoryview(bytes_of(assemble(row, saved)).numpy()))


def plain_name(row: TensorRow) -> str:
    """Its name without the part."""
    return row.name.split(".", 1)[1]


def assemble(row: TensorRow, saved: Metadata) -> Tensor:
    """The whole tensor out of its shards, on the CPU."""
    whole = torch.empty(row.shape, dtype=row.dtype)
    for chunk in saved.state_dict_metadata[row.name].chunks:
        place = saved.storage_data[MetadataIndex(row.name, chunk.offsets)]
        with safe_open(place.relative_path, framework="pt") as file:
            index = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[index] = file.get_tensor(row.name)
    return whole


class CheckpointWeights(Mapping[str, Tensor]):
    """The EMA weights of a checkpoint, or the weights themselves where the run kept no EMA; whole, on the CPU.

    Collective: the ranks share out the files and compare them with their checksums first. `folder[name]` reads one
    tensor. `part` says which weights they are, "ema" or "model". What the run did not train comes from its `frozen/`.
    `metadata`: what a file would say of them in its header. `wanted`: the part, "model" for the weights themselves in
    any case. Raises `UserError` where the checkpoint is damaged, or holds only a part of the model's weights, since
    those that its run did not train have a file of their own; with `partly` it is read all the same.
    """

    def __init__(
        self,
        folder: str | Path,
        metadata: Mapping[str, str] | None = None,
        wanted: str = "ema",
        partly: bool = False,
    ) -> None:
        self.path = Path(folder)
        if faults := check_all(self.path, World.here()):
            raise UserError(damage_sentence(self.path, faults))
        found, header = choose_tensors(self.path, wanted)
        if "frozen_source" in header and not partly:
            raise UserError(
                f"{self.path}: holds only what was trained upon {header['frozen_source']}; give that as "
                "model.from_pretrained, or an export with both in it"
            )
        self.part = header["part"]
        self.metadata: Mapping[str, str] = metadata or {}
        self._rows = {plain_name(row): (row, saved) for row, saved in found}

    def __getitem__(self, name: str) -> Tensor:
        return assemble(*self._rows[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, whole, from the file headers."""
        return self._rows[name][0].shape
