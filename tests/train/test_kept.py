"""A run of an earlier version resumes: `kept/` is a checkpoint of commit 9127a13 and the steps made from there.

Their losses are by today's weights of short micro-batches, which that commit counted like full ones.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from longtake.checkpoint import RunState, Samples, inspect
from longtake.data import probe_table
from longtake.data.shapes import make_shapes
from tests.train.runs import metrics, train_here

KEPT = Path(__file__).parent / "kept"


def test_a_checkpoint_of_an_earlier_version_goes_on_as_it_would_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    probe_table(make_shapes(tmp_path / "clips", num_clips=2, num_stills=8), tmp_path / "clips" / "clips.parquet")
    run = Path(shutil.copytree(KEPT, tmp_path / "outputs" / "kept"))
    state = RunState.read(run / "epoch0-global_step2")
    assert (state.clock.global_step, state.samples, state.slots_per_step) == (2, Samples(7, 0), 2)
    assert state.data is not None
    assert state.seconds["start"] > 0
    outcome, _ = train_here(run, "--max-steps", "5")
    expected = json.loads((KEPT / "steps.json").read_text(encoding="utf-8"))
    made = [{key: line[key] for key in expected[0]} for line in metrics(outcome.folder)]
    assert made == [step | {"loss": pytest.approx(step["loss"], rel=1e-4)} for step in expected]
    assert RunState.read(outcome.checkpoint).clock.global_step == 5
    before, after = (inspect(path).rows for path in (run / "epoch0-global_step2", outcome.checkpoint))
    assert before == after  # an average of another name would have begun anew, in silence
