"""A shard is whole or absent; its rows are read one at a time and checked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from longtake.data.latents.shard import (
    DamagedShard,
    LatentShards,
    crc_of,
    shard_path,
    unpadded,
    write_tensors,
)

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
    shards = LatentShards(folder)
    for number in (2, 0, 3):
        found = shards.read("latents", 5, number, crc_of(row(number)))
        assert found.keys() == ROWS.keys()
        assert all(
            torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in row(number).items()
        )
    assert shards.fault("latents", 5, 4) is None


def test_a_wrong_checksum_a_row_too_many_and_a_missing_file_are_said(folder: Path) -> None:
    shards = LatentShards(folder)
    with pytest.raises(DamagedShard, match=r"row 1 of latents/000005.safetensors has another checksum"):
        shards.read("latents", 5, 1, crc_of(row(1)) ^ 1)
    with pytest.raises(DamagedShard, match="cut short"):
        shards.read("latents", 5, 4, 0)
    with pytest.raises(DamagedShard, match=r"latents/000006.safetensors is cut short or cannot be read"):
        shards.read("latents", 6, 0, 0)
    assert shards.fault("latents", 5, 3) == "latents/000005.safetensors does not have the 3 rows that the index names"


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x04\0\0\0\0\0\0\0null", b"\x02\0\0\0\0\0\0\0{]"])
def test_another_file_is_no_shard(folder: Path, content: bytes) -> None:
    path = shard_path(folder, "latents", 5)
    path.write_bytes(content)
    with pytest.raises(DamagedShard):
        LatentShards(folder).read("latents", 5, 0, crc_of(row(0)))
    assert "cannot be read" in (LatentShards(folder).fault("latents", 5, 4) or "")


def test_a_write_that_fails_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "no folder").touch()
    with pytest.raises(OSError):
        write_tensors(tmp_path / "no folder" / "a.safetensors", ROWS)
    (tmp_path / "no folder").unlink()
    assert not list(tmp_path.iterdir())


def test_a_file_is_what_the_library_writes_and_follows_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for umask, mode in ((0o022, 0o644), (0o007, 0o660)):
        before = os.umask(umask)
        try:
            write_tensors(path, ROWS)
        finally:
            os.umask(before)
        assert path.stat().st_mode & 0o777 == mode
    assert path.read_bytes() == save(ROWS)


def test_a_shard_of_other_tensors_than_the_store_says_is_damaged(folder: Path) -> None:
    wanted = {"latents": {"mean": {"dtype": "float32", "shape": [2, 3]}, "std": {"dtype": "float16", "shape": [5]}}}
    with pytest.raises(DamagedShard, match="its 'std' is not what the store holds"):
        LatentShards(folder, wanted).read("latents", 5, 0, crc_of(row(0)))
    path = shard_path(folder, "latents", 5)
    path.write_bytes(path.read_bytes().replace(b"[4,2,3]", b"[4,2,9]"))
    with pytest.raises(DamagedShard, match="cannot be read"):
        LatentShards(folder).read("latents", 5, 0, crc_of(row(0)))


def test_captions_are_kept_without_their_padding_and_come_back_bit_by_bit(tmp_path: Path) -> None:
    text = torch.zeros(4, 5, 2, dtype=torch.bfloat16)
    text[0, :3], text[1, :5], text[2, 1] = 1.5, torch.randn(5, 2).bfloat16(), -0.0
    given = {"text": text, "vector": torch.randn(4, 3)}
    wanted = {"text": {"dtype": "bfloat16", "shape": [5, 2]}, "vector": {"dtype": "float32", "shape": [3]}}
    write_tensors(shard_path(tmp_path, "texts", 0), kept := unpadded(given))
    assert kept["text.ends"].tolist() == [3, 8, 10, 10]
    shards = LatentShards(tmp_path, {"texts": wanted})
    for row in range(4):
        entry = {name: value[row] for name, value in given.items()}
        assert crc_of(shards.read("texts", 0, row, crc_of(entry))) == crc_of(entry)
    assert shards.fault("texts", 0, 4) is None
    assert shards.fault("texts", 0, 3) is not None
    write_tensors(shard_path(tmp_path, "texts", 1), given)  # as Longtake kept them before
    assert torch.equal(shards.read("texts", 1, 2, crc_of({n: v[2] for n, v in given.items()}))["text"], text[2])
