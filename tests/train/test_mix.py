"""A run over several tables with weights, with captions from two columns, in an order balanced by predicted time."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from longtake.checkpoint.folder import read_state
from tests.train.runs import metrics, train_here, write_config


def test_a_mix_trains_and_its_cost_constants_stay_those_of_the_first_launch(tmp_path: Path, clips: Path) -> None:
    table = pq.read_table(clips)
    table = table.append_column("short", pa.array(["a shape"] * len(table)))
    paths = []
    for name, rows in (("first", table.slice(0, 20)), ("second", table.slice(20))):
        pq.write_table(rows, tmp_path / f"{name}.parquet")
        paths.append(str(tmp_path / f"{name}.parquet"))
    dataset = {
        "mix": [(paths[0], 2.0), (paths[1], 1.0)],
        "root": str(clips.parent),
        "captions": {"text": 0.5, "short": 0.5},
    }
    config = write_config(tmp_path, clips, dataset=dataset, epochs=1, max_steps=100)
    whole, said = train_here(config)
    assert "40 of 40 clips used" in said
    assert whole.clock.samples == 2 * 20 + 20
    cost = read_state(whole.checkpoint)["data"]["cost"]
    assert cost["side_by_side"] == 4
    assert min(cost["per_sample"], cost["linear"], cost["quadratic"]) > 0

    again = write_config(tmp_path / "b", clips, dataset=dataset | {"cost": (1.0, 2.0, 0.5)}, epochs=1, max_steps=2)
    stopped, _ = train_here(again)
    ended, _ = train_here(stopped.folder, "--max_steps", "4", "--dataset.cost", "None")
    kept = read_state(ended.checkpoint)["data"]
    assert (kept["cost"]["linear"], kept["eras"]) == (2.0, [])
    assert [line["step"] for line in metrics(ended.folder)] == [1, 2, 3, 4]
