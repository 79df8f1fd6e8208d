"""Looking inside a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longtake.checkpoint.contents import inspect
from longtake.checkpoint.save import save_checkpoint
from longtake.contracts import UserError
from longtake.system.export import export_weights

TENSORS = {
    "model.a.weight": torch.randn(3, 4),
    "model.a.half": torch.randn(3).bfloat16(),
    "model.a.scalar": torch.tensor(2.5),
    "model.a.flags": torch.tensor([True, False, True]),
    "model.a.none": torch.empty(0, 2),
    "optim.a.weight.exp_avg": torch.randn(3, 4),
}
EMA = {name.replace("model.", "ema."): tensor.clone() for name, tensor in TENSORS.items() if name[0] == "m"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path / "run", 0, 1, {**TENSORS, **EMA}, {})


def test_rows_tell_the_whole_tensors_and_totals_the_parts(saved):
    contents = inspect(saved)
    rows = {row.name: row for row in contents.rows}
    assert rows.keys() == TENSORS.keys() | EMA.keys()
    for name, tensor in TENSORS.items():
        row = rows[name]
        assert (row.shape, row.dtype, row.num_bytes) == (tuple(tensor.shape), tensor.dtype, tensor.nbytes)
    assert list(contents.totals) == ["ema", "model", "optim"]
    assert contents.totals["optim"].num_elements == 12
    assert contents.totals["model"] == contents.totals["ema"]
    assert contents.totals["model"].num_bytes == sum(t.nbytes for n, t in TENSORS.items() if n.startswith("model."))


def test_a_damaged_checkpoint_is_neither_inspected_nor_exported(saved, tmp_path):
    shard = sorted(saved.glob("*.safetensors"))[0]
    shard.write_bytes(b"\xff" * 7)
    with pytest.raises(UserError, match=f"is damaged: {shard.name} has 7 bytes"):
        inspect(saved)
    with pytest.raises(UserError, match="is damaged"):
        export_weights(saved, tmp_path / "x.safetensors")
    assert not (tmp_path / "x.safetensors").exists()
