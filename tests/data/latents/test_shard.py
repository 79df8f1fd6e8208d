"""A shard is whole or absent; its rows are read one at a time and checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from longtake.data.latents.shard import DamagedShard, Shards, crc_of, read_header, shard_path, write_tensors

ROWS = {
    "mean": torch.arange(4 * 6, dtype=torch.float32).reshape(4, 2, 3),
    "std": torch.linspace(0, 1, 4 * 5, dtype=torch.float32).reshape(4, 5).bfloat16(),
}


def row(number: int) -> dict[str, Tensor]:
    return {name: value[number] for name, value in ROWS.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "latents").mkdir()
    write_tensors(shard_path(tmp_path, "latents", 5), ROWS)
    return tmp_path


def test_each_row_comes_back_with_its_type_and_shape(folder: Path) -> None:
    shards = Shards(folder)
    for number in (2, 0, 3):
        found = shards.read("latents", 5, number, crc_of(row(number)))
        assert found.keys() == ROWS.keys()
        assert all(
            torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in row(number).items()
        )
    assert shards.fault("latents", 5, 4) is None


def test_a_wrong_checksum_a_row_too_many_and_a_missing_file_are_said(folder: Path) -> None:
    shards = Shards(folder)
    with pytest.raises(DamagedShard, match=r"row 1 of latents/000005.safetensors has another checksum"):
        shards.read("latents", 5, 1, crc_of(row(1)) ^ 1)
    with pytest.raises(DamagedShard, match="cut short"):
        shards.read("latents", 5, 4, 0)
    with pytest.raises(DamagedShard, match=r"latents/000006.safetensors cannot be read"):
        shards.read("latents", 6, 0, 0)
    assert shards.fault("latents", 5, 3) == "latents/000005.safetensors has not the 3 rows that the index names"


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x04\0\0\0\0\0\0\0null", b"\x02\0\0\0\0\0\0\0{]"])
def test_another_file_is_no_shard(folder: Path, content: bytes) -> None:
    path = shard_path(folder, "latents", 5)
    path.write_bytes(content)
    with pytest.raises(DamagedShard):
        read_header(path)
    assert "cannot be read" in (Shards(folder).fault("latents", 5, 4) or "")


def test_a_write_that_fails_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        write_tensors(tmp_path / "no folder" / "a.safetensors", ROWS)
    same = torch.zeros(4)
    with pytest.raises(RuntimeError):  # two names of one memory are refused by the format
        write_tensors(tmp_path / "a.safetensors", {"a": same, "b": same})
    assert not list(tmp_path.iterdir())
