"""Files of `torch.save`: what is in them comes back, and what they state beyond their bytes is refused."""

from __future__ import annotations

import pickle
import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longtake.plain_pickle import MalformedPickle, PickledCall, read_pickle
from longtake.torch_files import MalformedFile, load_torch_file

BASE = torch.arange(20.0).view(4, 5)
VALUES: dict[str, Any] = {
    "plain": BASE,
    "transposed": BASE.T,
    "part": BASE[1:3, ::2],
    "bf16": BASE.bfloat16(),
    "float8": BASE.to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 3),
    "parameter": torch.nn.Parameter(BASE),
    "module": OrderedDict(weight=BASE, bias=BASE[0]),
    "others": [1, -(2**70), 2.5, "x", None, True, (1, (2, 3)), torch.Size([2, 3])],
}


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return found.dtype == expected.dtype and torch.equal(found.float(), expected.float())
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    return found == expected


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("zipped", [True, False])
def test_saved_values_come_back(zipped: bool, protocol: int, mapped: bool, tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    torch.save(VALUES, file, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    found = load_torch_file(file, mapped)
    assert {name: same(found[name], value) for name, value in VALUES.items()} == dict.fromkeys(VALUES, True)


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def zipped(pickled: bytes, compression: int = zipfile.ZIP_STORED, data: bytes = bytes(16)) -> bytes:
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        archive.writestr("a/data.pkl", pickled)
        archive.writestr("a/data/0", data)
    return stream.getvalue()


def tensor(offset: int = 0, size: Any = (4,), stride: Any = (1,), count: int = 4, key: str = "0") -> bytes:
    """A file whose pickle states a tensor of float32."""
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\n" + pickle.dumps(key, 2)[2:-1] + b"X\x03\0\0\0cpu"
    storage += pickle.dumps(count, 2)[2:-1] + b"tQ"
    rest = b"".join(pickle.dumps(value, 2)[2:-1] for value in (offset, size, stride, False))
    return zipped(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rest + b"}tR.")


HUGE = 10**12
FILES: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "text": lambda: b"hello",
    "zip_of_nothing": lambda: zipped(b""),
    "truncated": lambda: tensor()[:-40],
    "compressed": lambda: zipped(pickle.dumps({"a": bytes(100_000)}, 2), zipfile.ZIP_DEFLATED),
    "storage_beyond_record": lambda: tensor(count=HUGE),
    "storage_negative": lambda: tensor(count=-1),
    "storage_missing": lambda: tensor(key="1"),
    "tensor_beyond_storage": lambda: tensor(size=(5,)),
    "tensor_offset_beyond_storage": lambda: tensor(offset=1),
    "tensor_expanded": lambda: tensor(size=(HUGE,), stride=(0,)),
    "tensor_stride_beyond_storage": lambda: tensor(size=(2, 2), stride=(3, 1)),
    "tensor_stride_negative": lambda: tensor(stride=(-1,)),
    "tensor_size_negative": lambda: tensor(size=(-4,)),
    "tensor_size_text": lambda: tensor(size=("4",)),
    "tensor_size_not_a_tuple": lambda: tensor(size=4),
    "tensor_stride_short": lambda: tensor(stride=()),
    "persistent_id_of_another_kind": lambda: zipped(b"\x80\x02K\x01Q."),
    "pickle_alone": lambda: pickle.dumps({"a": 1}, 2),
    "legacy_cut": lambda: legacy()[:-8],
    "legacy_length_huge": lambda: legacy(length=2**62),
    "legacy_length_negative": lambda: legacy(length=-1),
}


def legacy(length: int = 4) -> bytes:
    stream = BytesIO()
    torch.save(torch.ones(4), stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()[:-24] + struct.pack("<q", length) + bytes(16)


@pytest.mark.parametrize("fault", FILES)
def test_file_that_states_more_than_it_holds_is_refused(fault: str, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(FILES[fault]())
    for mapped in (True, False):
        with little_memory(), pytest.raises(MalformedFile):
            load_torch_file(tmp_path / "a.pt", mapped)


def long_key(count: int) -> bytes:
    """Nested tuples, each the one before twice, as the key of a dict: to hash it takes 2 ** count steps."""
    return b"\x80\x02}K\x01" + b"2\x86" * count + b"K\x01s."


PICKLES: dict[str, bytes] = {
    "memo_index": b"\x80\x02Kr\xff\xff\xff\x7f.",
    "long_of_huge_length": b"\x80\x02\x8b\xff\xff\xff\x7f1.",
    "text_of_huge_length": b"\x80\x04\x8d" + struct.pack("<Q", 2**60) + b"a.",
    "bytes_of_huge_length": b"\x80\x04\x8e" + struct.pack("<Q", 2**60) + b"a.",
    "bytearray_of_huge_length": b"\x80\x05\x96" + struct.pack("<Q", 2**60) + b"a.",
    "frame_alone": b"\x80\x04\x95" + struct.pack("<Q", 2**60),
    "digits": b"I" + b"1" * 100_000 + b"\n.",
    "key_that_nests": long_key(64),
    "keys_that_collide": pickle.dumps({number * (2**61 - 1): 0 for number in range(1, 5000)}, 2),
    "list_as_key": b"\x80\x02}]K\x01s.",
    "items_of_a_number": b"\x80\x02K\x01K\x01K\x01s.",
    "pop_of_nothing": b"\x80\x020.",
    "mark_alone": b"\x80\x02(.",
    "get_of_nothing": b"\x80\x02h\x05.",
    "extension": b"\x80\x02\x82\x01.",
    "call_of_a_number": b"\x80\x02K\x01)R.",
    "no_end": b"\x80\x02K\x01",
    "persistent_id": b"\x80\x02K\x01Q.",
}


@pytest.mark.parametrize("fault", PICKLES)
def test_hostile_pickle_is_refused(fault: str) -> None:
    with little_memory(), pytest.raises(MalformedPickle):
        read_pickle(BytesIO(PICKLES[fault]))


@pytest.mark.parametrize("function", [bytearray, bytes, tuple, list, range, "x".__mul__])
def test_calls_are_described_and_not_made(function: Any, tmp_path: Path) -> None:
    with little_memory():
        (tmp_path / "a.pt").write_bytes(zipped(pickle.dumps({"a": Calls(function, 6_400_000_000)}, 2)))
        assert isinstance(load_torch_file(tmp_path / "a.pt")["a"], PickledCall)
