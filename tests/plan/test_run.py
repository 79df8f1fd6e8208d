from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.pages import money, number
from longtake.parallel.world import start_world
from longtake.plan import blocks
from longtake.plan.batches import _most
from longtake.plan.failures import forecast_failures
from longtake.plan.machine import CPU, Machine
from longtake.plan.page import write_html
from longtake.plan.remedies import find_remedies, refuse_misfits
from longtake.plan.report import batches_words, layout_words, plan_json, stage_words
from longtake.plan.run import EntryPlan, RunPlan, forecast_run, plan_run
from longtake.plan.speed import update_seconds
from longtake.system.build import compiles
from longtake.track.devices import gpu_named
from tests.pages import Page
from tests.plan.runs import run_config, write_table

MACHINE = Machine(gpu_named("h100"))


def machine_of(mib: float) -> Machine:
    """A machine of which a run may use so much memory."""
    return Machine(replace(gpu_named("h100"), memory_gib=mib / 1024), headroom=0)


def plan(machine: Machine = MACHINE, gpus: int = 4, **changes: object) -> RunPlan:
    return plan_run(run_config(**changes), gpus, machine)


def needed_mib(**changes: object) -> float:
    """The most that an entry of a run needs."""
    return max(entry.memory.total for entry in plan(**changes).entries) / 2**20


def test_each_entry_is_planned_at_its_ratio_of_most_tokens() -> None:
    found = {entry.name: entry for entry in plan().entries}
    assert set(found) == {"64px/8f", "64px/16f"}
    for entry in found.values():
        assert entry.tokens == max(
            plan().work.tokens(bucket)
            for bucket in plan().work.rule.buckets
            if bucket.num_frames == entry.bucket.num_frames
        )
    assert found["64px/16f"].tokens == 2 * found["64px/8f"].tokens


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    machine = machine_of(2 * needed_mib())
    found = plan(machine)
    for entry in found.entries:
        assert 0 < entry.largest_batch < 4096
        assert found.work.memory(entry.bucket, found.layout, entry.largest_batch).total <= machine.usable_bytes
        assert found.work.memory(entry.bucket, found.layout, entry.largest_batch + 1).total > machine.usable_bytes


def test_suggested_batches_take_no_longer_than_the_longest_entry_at_its_own() -> None:
    found = plan(machine_of(2 * needed_mib()))
    longest = max(found.entries, key=lambda entry: entry.tokens)
    assert longest.suggested_batch == longest.largest_batch
    limit = found.work.time(longest.bucket, found.layout, found.machine, longest.largest_batch).seconds
    for entry in found.entries:
        assert 0 < entry.suggested_batch <= entry.largest_batch
        assert (
            found.work.time(entry.bucket, found.layout, found.machine, entry.suggested_batch).seconds <= limit * 1.001
        )


def test_under_a_target_the_suggested_batches_fit_and_keep_to_it() -> None:
    config, machine = run_config(accumulation_steps=3), machine_of(3 * needed_mib())
    shortest = plan_run(config, 2, machine).entries[0].time.seconds
    for target in (3.5 * shortest, 5 * shortest, 1e6):
        found = plan_run(config, 2, machine, target)
        for entry in found.entries:
            batch = entry.suggested_batch

            def step(batch: int, entry: EntryPlan = entry, found: RunPlan = found) -> float:
                update = update_seconds(found.work.model, found.layout, machine)
                return 3 * found.work.time(entry.bucket, found.layout, machine, batch).seconds + update

            assert step(batch) <= target
            assert batch == entry.largest_batch or step(batch + 1) > target


def test_batch_sizes_of_a_target_can_be_pasted_and_name_what_misses_it() -> None:
    table = {"64px": {8: (1.0, 4), 16: ((0.5, 0.3), 2), 24: (0.0, None)}}
    found = plan_run(run_config(bucket_config=table), 1, MACHINE, 0.05)
    batch = {entry.bucket.num_frames: entry.suggested_batch for entry in found.entries}
    words = batches_words(found).partition("bucket_config = ")[2]
    pasted = {8: (1.0, batch[8]), 16: ((0.5, 0.3), batch[16]), 24: (0.0, None)}
    assert ast.literal_eval(words) == {"64px": pasted}
    assert plan_json(found)["target_step_seconds"] == 0.05
    late = batches_words(plan_run(run_config(bucket_config=table), 1, MACHINE, 1e-4))
    assert late.endswith("longer with one sample, which is what they have: 64px/16f, 64px/8f")
    assert "8: (1.0, 1), 16: ((0.5, 0.3), 1)" in late


def test_the_table_gives_the_length_of_the_stage(tmp_path: Path) -> None:
    table = write_table(tmp_path, [(16, 64, 64)] * 10 + [(8, 64, 64)] * 9 + [(4, 64, 64)] + [(8, 16, 16)])
    found = plan(gpus=2, dataset={"data_path": str(table)}, max_steps=None, epochs=3)
    assert found.report is not None
    assert found.report.num_used == 19  # one is too short, one too small
    assert {entry.name: entry.samples for entry in found.entries} == {"64px/8f": 9, "64px/16f": 10}
    forecast = found.forecast
    assert forecast.steps_per_pass == found.report.num_steps == 4  # 5 + 3 micro-batches, 2 a step
    assert forecast.steps == 12
    assert forecast.seconds_per_pass == pytest.approx(4 * forecast.step_seconds)
    assert forecast.gpu_hours == pytest.approx(12 * forecast.step_seconds * 2 / 3600)
    shorter = plan(gpus=2, dataset={"data_path": str(table)}, max_steps=5, epochs=3)
    assert shorter.forecast.steps == 5


def test_a_step_takes_no_less_than_its_longest_micro_batch(tmp_path: Path) -> None:
    table = write_table(tmp_path, [(16, 64, 64)] * 2 + [(8, 64, 64)] * 2)
    for gpus, slots in ((8, None), (8, 2), (2, 2)):  # more GPUs than micro-batches, than slots, neither
        found = plan(gpus=gpus, dataset={"data_path": str(table)}, slots_per_step=slots)
        longest = max(entry.time.seconds for entry in found.entries)
        assert found.report.num_steps == 1
        assert longest < found.forecast.step_seconds < 1.1 * longest


def test_a_table_that_is_not_there_is_said_and_the_rest_is_planned() -> None:
    found = plan()
    assert found.report is None
    assert "nowhere.csv" in (found.no_report or "")
    assert found.forecast.steps == 100
    assert all(entry.samples is None for entry in found.entries)


def test_an_entry_without_clips_does_not_make_a_run_unfit(tmp_path: Path) -> None:
    table = write_table(tmp_path, [(8, 64, 64)] * 8)
    buckets = {"64px": {8: (1.0, 4), 16: (1.0, 4000)}}
    machine = machine_of(4 * needed_mib())
    assert plan(machine, bucket_config=buckets).misfits
    assert not plan(machine, bucket_config=buckets, dataset={"data_path": str(table)}).misfits


def test_more_buckets_are_planned_from_the_same_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[tuple[int, ...]] = []
    numbers = blocks.TracedBlocks.numbers
    monkeypatch.setattr(blocks.TracedBlocks, "numbers", lambda run, point: traced.append(point) or numbers(run, point))
    for cached in (blocks._traced_blocks, blocks._law, blocks._count_blocks):
        cached.cache_clear()
    plan(bucket_config={"64px": {8: (1.0, 4), 16: (1.0, 2)}})
    assert 4 <= len(traced) <= 24
    few = list(traced)
    lengths = {frames: (1.0, batch) for batch, frames in enumerate(range(8, 137, 8), 1)}
    plan(bucket_config={"64px": lengths, "128px": lengths})
    assert traced == few


def test_weights_states_and_nothing_of_a_batch_are_shared_out_among_the_gpus() -> None:
    two, eight = (plan(gpus=gpus).entries[0].memory for gpus in (2, 8))
    assert (two.weights, two.optimizer) == pytest.approx((4 * eight.weights, 4 * eight.optimizer), rel=0.02)
    assert two.activations == eight.activations


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"parallel": {"tensor": 3}}, "4 processes do not divide by 3"),
        ({"parallel": {"tensor": 4}, "model": {"num_heads": 2, "axes_dim": (32, 48, 48)}}, "2 attention heads"),
        ({"bucket_config": {"64px": {12: (1.0, 1)}}}, "12 frames do not divide"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(changes: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        plan(**changes)


def test_a_plan_for_a_cpu_leaves_out_what_a_run_on_one_leaves_out() -> None:
    gpu = gpu_named("h100")
    changes = {"compile": "auto", "model": {"recompute": "auto"}}
    there, here = (plan(Machine(one), 1, **changes) for one in (gpu, replace(gpu, name=CPU)))
    with start_world("cpu") as world:
        assert here.layout.compiled is compiles(run_config(**changes), world)[0] is False
    assert there.layout.compiled
    assert ({entry.level for entry in here.entries}, {entry.level for entry in there.entries}) == ({"full"}, {"none"})
    first = [forecast_failures(one).restart - one.forecast.step_seconds for one in (here, there)]
    assert first[1] > first[0]  # which waits for no compiler
    assert plan(Machine(replace(gpu, name=CPU)), 1, **changes | {"compile": True}).layout.compiled


@pytest.mark.slow
def test_remedies_are_found_where_no_level_fits() -> None:
    changes = {"compile": True, "model": {"recompute": "auto"}}
    found = plan(machine_of(0.8 * needed_mib(**changes)), **changes)
    assert {entry.level for entry in found.misfits} == {"full"}
    assert find_remedies(found)


def test_offloaded_weights_are_counted_in_the_hosts_memory() -> None:
    found = plan(parallel={"cpu_offload": True}, ema_decay=0.99)
    kept = plan(ema_decay=0.99).entries[0].memory
    assert found.host_bytes == kept.weights + kept.optimizer + kept.ema + kept.weights  # gradients as large as weights
    assert plan().host_bytes == 0


def test_gpus_must_fill_nodes() -> None:
    with pytest.raises(UserError, match="--gpus 12: does not fill nodes of 8"):
        plan(gpus=12)


def test_what_does_not_fit_is_refused_with_a_change_that_does() -> None:
    machine = machine_of(0.8 * needed_mib())
    found = plan(machine)
    assert found.misfits
    with pytest.raises(UserError, match=r"bucket_config.64px.\d+: a micro-batch of \d .* cheapest change that fits"):
        refuse_misfits(found)
    remedies = find_remedies(found)
    assert remedies
    assert remedies[0].same_steps
    assert [r.slower for r in remedies if r.same_steps] == sorted(r.slower for r in remedies if r.same_steps)


def test_recomputation_is_no_more_than_needed() -> None:
    buckets = {"64px": {8: (1.0, 4), 16: (1.0, 64)}}
    machine = machine_of(0.6 * needed_mib(bucket_config=buckets))
    found = plan(machine, bucket_config=buckets)
    words = next(r.words for r in find_remedies(found) if r.words.endswith(")"))
    counts = tuple(int(part) for part in words.split("(")[1].rstrip(")").split(","))

    def again(counts: tuple[int, int]) -> RunPlan:
        return forecast_run(found.work, replace(found.layout, remat=counts, level="selective"), machine)

    assert not again(counts).misfits
    for fewer in ((counts[0] - 1, counts[1]), (counts[0], counts[1] - 1)):
        if min(fewer) >= 0:
            assert again(fewer).misfits


def test_every_change_that_is_named_makes_the_run_fit_when_it_is_made() -> None:
    machine = machine_of(0.8 * needed_mib(parallel={"zero": 2, "replicate": 2}))
    found = plan(machine, parallel={"zero": 2, "replicate": 2})
    words = {remedy.words for remedy in find_remedies(found)}
    tried = {
        "parallel.zero = 3": {"zero": 3, "replicate": 2},
        "parallel.replicate = 1 and parallel.shard = 4": {"zero": 2, "replicate": 1, "shard": 4},
        "parallel.sequence = 2": {"zero": 2, "replicate": 2, "sequence": 2},
        "parallel.cpu_offload = True": {"zero": 2, "replicate": 2, "cpu_offload": True},
    }
    assert words & set(tried)
    for change, parallel in tried.items():
        assert (change in words) == (not plan(machine, parallel=parallel).misfits), change


def test_where_nothing_helps_no_change_is_named() -> None:
    with pytest.raises(UserError, match="no change of remat, sharding, offload or batch size"):
        refuse_misfits(plan(machine_of(1)))


def test_a_run_that_fits_is_not_refused() -> None:
    found = plan()
    refuse_misfits(found)
    assert find_remedies(found) == []


def test_the_plan_as_data_adds_up() -> None:
    data = plan_json(plan())
    assert data["fits"]
    for line in data["buckets"].values():
        parts = dict(line["bytes"])
        assert parts.pop("total") == sum(parts.values())
        seconds = dict(line["seconds"])
        total, limit, of_compute = (seconds.pop(name) for name in ("total", "limit", "parts"))
        assert total == pytest.approx(sum(seconds.values()))
        assert seconds["compute"] == pytest.approx(sum(of_compute.values()))
        assert limit < total


def test_the_page_draws_all_entries_against_what_a_gpu_has_the_worst_first(tmp_path: Path) -> None:
    found = plan(
        machine_of(0.8 * needed_mib()), bucket_config={"64px": {8: (1.0, 4), 16: (1.0, 2)}, "32px": {8: (1.0, 2)}}
    )
    write_html(tmp_path / "plan.html", found, "a <run>")
    text = (tmp_path / "plan.html").read_text()
    page = Page(text)
    assert "<title>Plan of a &lt;run&gt;</title>" in text
    usable, needs = found.machine.usable_bytes, {entry.name: entry.memory.total for entry in found.entries}
    worst = sorted(("64px/8f", "64px/16f"), key=lambda name: -needs[name])
    whole = max(1.1 * usable, needs[worst[0]])
    drawn = [sum(share for _, share in parts) for parts in page.bars]
    assert drawn == pytest.approx([100 * needs[name] / whole for name in (*worst, "32px/8f")], abs=0.01)
    assert page.marks == pytest.approx([100 * usable / whole] * 3, abs=0.01)
    assert text.count("not fit") == 1
    assert page.section("What to change")[0] == f"{len(found.misfits)} entries do not fit"
    heads = [words.split(",")[0] for words in page.section("Memory and time") if "px, at " in words]
    assert heads == ["64px", "32px"]
    shown = page.section("What to change")
    assert [words for words in shown if words in {remedy.words for remedy in find_remedies(found)}] == [
        remedy.words for remedy in find_remedies(found)
    ]


def test_a_bar_far_over_what_a_gpu_has_is_cut_off_at_twice_that(tmp_path: Path) -> None:
    found = plan(machine_of(0.1 * needed_mib()))
    write_html(tmp_path / "plan.html", found, "run")
    page = Page((tmp_path / "plan.html").read_text())
    assert page.marks == [50.0, 50.0]
    assert sum(share for _, share in page.bars[0]) == pytest.approx(100, abs=0.01)


def test_what_it_costs_is_told_for_the_price_of_a_gpu_hour(tmp_path: Path) -> None:
    table = write_table(tmp_path, [(16, 64, 64)] * 10)
    ending = plan(dataset={"data_path": str(table)}, max_steps=10**6)
    hours = ending.forecast.gpu_hours
    assert hours is not None
    assert f"{number(hours)} GPU-hours, {money(hours * 250)} at 250 each" in stage_words(ending, 250)
    write_html(tmp_path / "plan.html", ending, "run", price=250)
    texts = Page((tmp_path / "plan.html").read_text()).texts
    assert texts[texts.index(f"cost, {ending.forecast.steps:,} steps, at 250 a GPU-hour") - 1] == money(hours * 250)
    assert "each" not in stage_words(ending)
    assert stage_words(ending).endswith("; epochs = 1,000 ends it before max_steps = 1,000,000")
    unknown = plan(dataset={"data_path": str(tmp_path / "gone.csv")}, max_steps=None)
    hours = 1000 * unknown.forecast.step_seconds * unknown.forecast.gpus / 3600
    said = f"; 1,000 steps take {number(hours)} GPU-hours, {money(hours * 250)} at 250 each; the length of the run"
    assert said in stage_words(unknown, 250)


def test_no_more_blocks_are_told_than_there_are() -> None:
    assert "recomputed 2 double + 4 single blocks" in layout_words(plan(model={"grad_ckpt_settings": (2, 100)}))


def test_a_run_that_nobody_ends_is_told_by_the_pass(tmp_path: Path) -> None:
    table = write_table(tmp_path, [(16, 64, 64)] * 10)
    endless = plan(dataset={"data_path": str(table)}, max_steps=None)
    forecast, said = endless.forecast, stage_words(endless)
    assert said.endswith("no end is set (max_steps): it trains until it is stopped, or for 1,000 passes")
    hours = forecast.steps_per_pass * forecast.step_seconds * 4 / 3600
    assert f", {number(hours)} GPU-hours; no end" in said
    write_html(tmp_path / "plan.html", endless, "run")
    assert "GPU-hours, a pass" in Page((tmp_path / "plan.html").read_text()).texts


SLOW_TO_IMPORT = {"diffusers", "transformers", "peft", "torchao", "torch._dynamo", "sympy"}
IMPORTED = """
import json, sys
from longtake.cli import main
for preset in ("stage2", "lora_24gb"):
    try:  # blocks that were not looked at before are traced by the compiler
        main(["plan", "opensora_v2/" + preset, "--dataset.data-path", "nowhere.csv", "--compile", "False"])
    except SystemExit:
        pass
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def test_presets_are_planned_without_what_takes_long_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`benchmarks/plan.py` measures the seconds. A fresh interpreter, for that of `forks` has imported much already,
    and an empty cache: what presets need of encoders is in `published.json`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", IMPORTED], timeout=300, capture_output=True, text=True, check=True)
    assert done.stdout.count("11.89 B parameters") == 2
    assert SLOW_TO_IMPORT & set(json.loads(done.stderr.splitlines()[-1])) == set()


def test_a_largest_batch_is_found_in_few_forecasts() -> None:
    def tries(spare: Callable[[int], float], most: int = 4096) -> tuple[int, int]:
        asked: list[int] = []
        found = _most(lambda number: asked.append(number) or spare(number), most)
        return found, len(asked)

    for limit in (0, 1, 2, 3, 57, 4095, 4096, 9999):
        for bend in (0.0, 0.3, -0.3):  # even, ever steeper, ever flatter
            found, asked = tries(lambda n, limit=limit, bend=bend: limit ** (1 + bend) - n ** (1 + bend) + 1e-9)
            assert found == min(limit, 4096)
            assert asked <= (5 if not bend else 14)
