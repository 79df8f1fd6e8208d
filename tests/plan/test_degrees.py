"""A plan of a run whose buckets have sequence degrees of their own."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.parallel.world import World
from longtake.plan.machine import Machine
from longtake.plan.probe import ProbeStep, probe_entries
from longtake.plan.remedies import find_remedies
from longtake.plan.report import entry_head, entry_rows, layout_words, plan_json
from longtake.plan.run import RunPlan, plan_run
from longtake.track.devices import gpu_named
from longtake.train.optimizer.update import WeightUpdate
from tests.plan.runs import run_config, write_table
from tests.ranks import Facts, on_ranks

SHORT, LONG = "64px/8f", "64px/16f"
OWN = {"sequence": 4, "bucket_sequence": {"64px": {8: 1}}}
TOGETHER = {"sequence": 4}


def planned(parallel: dict, mib: float | None = None, gpus: int = 4, **changes: object) -> RunPlan:
    gpu = gpu_named("h100")
    machine = Machine(gpu) if mib is None else Machine(replace(gpu, memory_gib=mib / 1024), headroom=0)
    return plan_run(run_config(parallel=parallel, **changes), gpus, machine)


def entries(plan: RunPlan) -> dict:
    return {entry.name: entry for entry in plan.entries}


def test_an_entry_needs_what_it_needs_on_a_mesh_of_its_own_degree() -> None:
    own, alone, together = entries(planned(OWN)), entries(planned({})), entries(planned(TOGETHER))
    assert (own[SHORT].sequence, own[SHORT].slot_size) == (1, 4)
    assert (own[LONG].sequence, own[LONG].slot_size) == (4, 1)
    for one, other in ((own[SHORT], alone[SHORT]), (own[LONG], together[LONG])):
        assert one.memory == other.memory
        assert one.time == other.time
        assert one.largest_batch == other.largest_batch
    assert own[SHORT].memory.activations > together[SHORT].memory.activations


def test_auto_gives_no_gpu_more_tokens_than_the_largest_entry() -> None:
    found = entries(
        planned({"sequence": 4, "bucket_sequence": "auto"}, bucket_config={"64px": {8: (1, 1), 16: (1, 4)}})
    )
    assert (found[SHORT].sequence, found[LONG].sequence) == (1, 4)
    assert found[SHORT].memory.activations <= found[LONG].memory.activations


def test_the_pass_is_counted_in_slots_of_each_entrys_size(tmp_path: Path) -> None:
    table = write_table(tmp_path, [(16, 64, 64)] * 6 + [(8, 64, 64)] * 40)
    found = planned(OWN, dataset={"data_path": str(table)}, max_steps=None, epochs=1)
    assert found.report is not None
    assert {b.bucket.num_frames: b.micro_batches for b in found.report.buckets} == {8: 10, 16: 3}
    assert found.forecast.steps == 3 + 3  # ten micro-batches, four of them side by side; one slot a step
    update = found.forecast.seconds_per_pass - 3 * sum(entry.time.seconds for entry in found.entries)
    assert 0 < 1000 * update < 6


def test_a_plan_says_degrees_where_they_differ() -> None:
    own, together = planned(OWN), planned(TOGETHER)
    assert "sequence" not in entry_head(together)
    column = entry_head(own).index("sequence")
    assert {row[0]: row[column] for row in entry_rows(own)} == {SHORT: "1", LONG: "4"}
    assert "4 / sequence micro-batches of a bucket side by side" in layout_words(own)
    data = json.loads(json.dumps(plan_json(own)))
    assert data["layout"]["bucket_sequence"] == {SHORT: 1, LONG: 4}
    assert data["buckets"][SHORT]["slot_size"] == 4


def test_more_peers_are_proposed_for_an_entry_that_does_not_fit() -> None:
    batches = {"64px": {8: (1.0, 64), 16: (1.0, 2)}}
    most = {
        degree: planned({"sequence": 4, "bucket_sequence": {"64px": {8: degree}}}, bucket_config=batches)
        for degree in (1, 2, 4)
    }
    need = {degree: entries(plan)[SHORT].memory.total / 2**20 for degree, plan in most.items()}
    assert need[1] > need[2] > need[4]
    found = planned(OWN, (need[1] + need[2]) / 2, bucket_config=batches)
    words = {remedy.words: remedy for remedy in find_remedies(found)}
    remedy = words["parallel.bucket_sequence.64px.8 = 2"]
    assert not remedy.same_steps
    tight = planned(
        {"sequence": 4, "bucket_sequence": {"64px": {8: 2}}}, (need[1] + need[2]) / 2, bucket_config=batches
    )
    assert not tight.misfits


def test_peers_are_proposed_with_degrees_of_their_own_for_short_entries() -> None:
    batches = {"64px": {8: (1.0, 1), 16: (1.0, 64)}}
    need = [entries(planned({"sequence": n}, bucket_config=batches))[LONG].memory.total / 2**20 for n in (1, 2)]
    found = planned({}, sum(need) / 2, bucket_config=batches)
    words = {remedy.words: remedy for remedy in find_remedies(found)}
    plain = words["parallel.sequence = 2"]
    own = words['parallel.sequence = 2 with parallel.bucket_sequence = "auto"']
    assert own.slower < plain.slower
    assert not planned({"sequence": 2, "bucket_sequence": "auto"}, sum(need) / 2, bucket_config=batches).misfits


def test_a_degree_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match=r"parallel.bucket_sequence.64px.8 = 3: does not divide parallel.sequence = 4"):
        planned({"sequence": 4, "bucket_sequence": {"64px": {8: 3}}})


def probed(world: World) -> Facts:
    """The degrees at which real steps of both entries run on two peers."""
    parallel = {"sequence": 2, "bucket_sequence": {"64px": {8: 1}}}
    batches = {"64px": {8: (1.0, 1), 16: (1.0, 1)}}
    model = {"hidden_size": 64, "axes_dim": (4, 6, 6), "depth": 1, "depth_single_blocks": 1}
    config = run_config(parallel=parallel, bucket_config=batches, model=model, device="cpu", cpu_threads=1)
    plan = plan_run(config, 2, Machine(gpu_named("h100")))
    step = ProbeStep(plan, config, world, lambda denoiser: WeightUpdate(denoiser, config).at_rate_zero)
    degrees: list[int] = []
    step.system.denoiser.register_forward_hook(lambda *_: degrees.append(step.system.cut.peers.sequence))
    found = probe_entries(plan, step.measure, memory_known=False)
    return {"degrees": degrees, "fit": [one.largest is not None for one in found]}


def test_a_probe_runs_each_entry_at_its_degree(tmp_path: Path) -> None:
    for facts in on_ranks(2, tmp_path, {"probed": probed}):
        assert facts["probed"] == {"degrees": [2, 2, 1], "fit": [True, True]}  # the first is the warm-up
