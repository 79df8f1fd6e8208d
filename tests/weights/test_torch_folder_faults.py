"""Folders of PyTorch's distributed checkpoint whose `.metadata` states what the files do not hold."""

from __future__ import annotations

import pickle
import tracemalloc
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from longtake.contracts import UserError
from longtake.weights.torch_folder import METADATA, TorchFolder, save_torch_folder, tiles

Change = Callable[[Any], Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tensor `a` [4, 3] in two chunks of two rows."""
    rows = torch.arange(12.0).view(2, 2, 3)
    save_torch_folder({"0": rows[0], "1": rows[1]}, tmp_path / "out")
    read = pickle.loads((tmp_path / "out" / METADATA).read_bytes())
    offsets = [torch.Size([0, 0]), torch.Size([2, 0])]
    chunks = [ChunkStorageMetadata(offset, torch.Size([2, 3])) for offset in offsets]
    places = {MetadataIndex("a", offsets[int(index.fqn)]): place for index, place in read.storage_data.items()}
    described = {"a": TensorStorageMetadata(read.state_dict_metadata["0"].properties, torch.Size([4, 3]), chunks)}
    (tmp_path / "out" / METADATA).write_bytes(pickle.dumps(Metadata(described, None, places)))
    return tmp_path / "out"


def test_chunks_are_put_together(folder: Path) -> None:
    assert torch.equal(TorchFolder(folder)["a"], torch.arange(12.0).view(4, 3))


def changed(**values: Any) -> Change:
    """A change of fields of the tensor's description."""

    def change(read: Any) -> None:
        for name, value in values.items():
            setattr(read.state_dict_metadata["a"], name, value)

    return change


def boxes(*pairs: tuple[tuple[int, ...], tuple[int, ...]]) -> Change:
    return changed(chunks=[ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in pairs])


def place(**values: Any) -> Change:
    """A change of fields of the second chunk's place."""

    def change(read: Any) -> None:
        for name, value in values.items():
            setattr(list(read.storage_data.values())[1], name, value)

    return change


def same_bytes(read: Any) -> None:
    first, second = read.storage_data.values()
    second.offset, second.length = first.offset, first.length


FAULTS: dict[str, Change] = {
    "half_twice": boxes(((0, 0), (2, 3)), ((0, 0), (2, 3))),
    "half_alone": boxes(((0, 0), (2, 3))),
    "overlap": boxes(((0, 0), (3, 3)), ((1, 0), (2, 3))),
    "overlap_and_gap": boxes(((0, 0), (2, 3)), ((1, 0), (2, 3))),
    "beyond": boxes(((0, 0), (2, 3)), ((3, 0), (2, 3))),
    "other_dims": boxes(((0,), (2,)), ((2,), (2,))),
    "no_chunks": boxes(),
    "huge_shape": changed(size=torch.Size([10**12, 3])),
    "negative_shape": changed(size=(-4, 3)),
    "text_shape": changed(size="43"),
    "list_of_other_things": changed(chunks=[1, 2]),
    "chunks_not_a_list": changed(chunks=5),
    "properties_not_an_object": changed(properties=5),
    "value_of_another_kind": lambda read: read.state_dict_metadata.update(b=7),
    "table_of_another_kind": lambda read: setattr(read, "state_dict_metadata", [1]),
    "places_of_another_kind": lambda read: setattr(read, "storage_data", {1: 2}),
    "no_places": lambda read: read.storage_data.clear(),
    "place_negative": place(offset=-1),
    "place_text": place(offset="1"),
    "place_of_huge_length": place(length=2**60),
    "place_beyond_the_file": place(offset=2**40),
    "place_in_another_folder": place(relative_path="../__0_0.distcp"),
    "place_in_no_file": place(relative_path="other.distcp"),
    "place_not_text": place(relative_path=5),
    "two_chunks_in_the_same_bytes": same_bytes,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_metadata_that_does_not_describe_its_files_is_refused(fault: str, folder: Path) -> None:
    read = pickle.loads((folder / METADATA).read_bytes())
    FAULTS[fault](read)
    (folder / METADATA).write_bytes(pickle.dumps(read))
    with pytest.raises(UserError) as caught:
        TorchFolder(folder)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("value", [torch.ones(3, 2), torch.ones(2, 3, dtype=torch.int32), {"a": 1}, torch.ones(2, 3)])
def test_chunk_of_another_size_dtype_or_kind_is_refused(value: Any, folder: Path) -> None:
    file = folder / "__0_0.distcp"
    read = pickle.loads((folder / METADATA).read_bytes())
    with file.open("ab") as stream:
        start = stream.tell()
        torch.save(value.double() if torch.is_tensor(value) and value.shape == (2, 3) else value, stream)
        length = stream.tell() - start
    place(offset=start, length=length)(read)
    (folder / METADATA).write_bytes(pickle.dumps(read))
    with pytest.raises(UserError, match="is not of the size and dtype"):
        TorchFolder(folder)["a"]


@pytest.mark.parametrize(
    "content", [b"\x80\x02Kr\xff\xff\xff\x7f.", b"\x80\x04\x8e" + bytes(7) + b"\x10a.", b"", b"N."]
)
def test_metadata_of_a_few_bytes_takes_little_memory(content: bytes, folder: Path) -> None:
    (folder / METADATA).write_bytes(content)
    tracemalloc.start()
    with pytest.raises(UserError):
        TorchFolder(folder)
    assert tracemalloc.get_traced_memory()[1] < 128 << 20
    tracemalloc.stop()


def test_boxes_tile_a_shape_only_without_overlap_or_gap() -> None:
    halves = [((0, 0), (2, 4)), ((2, 0), (2, 4))]
    quarters = [((row, column), (2, 2)) for row, column in product((0, 2), repeat=2)]
    assert tiles((4, 4), halves)
    assert tiles((4, 4), quarters)
    assert tiles((4, 4), [*halves, ((1, 1), (0, 2))])
    assert tiles((), [((), ())])
    assert tiles((0, 3), [])
    for first, second, third, fourth in product(product(range(3), repeat=2), repeat=4):
        found = [(first, (2, 2)), (second, (2, 2)), (third, (2, 2)), (fourth, (2, 2))]
        assert tiles((4, 4), found) == (sorted(found) == quarters)
