"""Several runs on one page: figures at equal steps and at equal GPU-hours, settings that differ, failures by node."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.train.compare import write_comparison
from longtake.train.report import RunRecord, read_record, write_note
from tests.pages import Page
from tests.train.test_report import CONFIG, SECONDS, record

H100 = "NVIDIA H100"
BEGUN = {"time": 1.7e9, "step": 0, "device": H100, "reports": "hang-1"}


def run_of(
    folder: Path, processes: int, steps: int, seconds: float, losses: float, *launches: dict, config: str = ""
) -> RunRecord:
    """A run whose loss at step n is `losses` / n."""
    lines = [
        {"step": n, "loss": losses / n, "grad_norm": 0.1, "lr": 0.003, "samples": 4, "seconds": seconds}
        | {"buckets": {"32px/8f/1:1": 1.0}}
        for n in range(1, steps + 1)
    ]
    told = launches or (BEGUN | {"hosts": {"node1": processes}},)
    files = {"metrics.jsonl": lines, "launches.jsonl": told}
    texts = {name: "".join(json.dumps(line) + "\n" for line in of) for name, of in files.items()}
    return record(folder, **texts, **{"config.py": CONFIG + config})


def page(*records: RunRecord, at: Path) -> Page:
    write_comparison(at, records)
    return Page(at.read_text(encoding="utf-8"))


def row(found: Page, what: str, count: int = 2) -> list[str]:
    return found.texts[(at := found.texts.index(what)) + 1 : at + 1 + count]


def mean(losses: float, first: int, last: int) -> str:
    return f"{sum(losses / n for n in range(first, last + 1)) / (last - first + 1):.4g}"


def test_figures_stand_side_by_side_at_equal_steps_and_equal_hours(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", 8, 90, 20.0, 2.0)  # 4 GPU-hours
    two = run_of(tmp_path / "two", 16, 60, 9.0, 3.0)  # 2.4 GPU-hours, the first run's after 54 steps
    found = page(one, two, at=tmp_path / "page.html")
    assert row(found, "steps") == ["90", "60"]
    assert row(found, "loss, mean of the last 25 steps") == [mean(2, 66, 90), mean(3, 36, 60)]
    assert row(found, "the same up to step 60, which all have") == [mean(2, 36, 60), mean(3, 36, 60)]
    assert row(found, "the same up to 2.4 GPU-hours, which all have") == [mean(2, 30, 54), mean(3, 36, 60)]
    assert row(found, "a step, median") == ["20 s", "9 s"]
    assert row(found, "GPU-hours in steps that count") == ["4", "2.4"]
    whole = sum(SECONDS[part] for part in ("steps", "start", "again", "save", "wait"))
    assert row(found, "GPU-hours in all launches") == [f"{whole * n / 3600:.4g}" for n in (8, 16)]
    lines = [line for line in found.lines if line.count("L") in (89, 59)]
    assert len(lines) == 16, "4 curves of both, twice"
    ends = [float(line.split("L")[-1].split()[0]) for line in lines]
    assert ends[:2] == pytest.approx([100, 100 * (2.4 - 0.04) / (4 - 2 / 45)], abs=0.7), "one scale of hours for both"
    assert ends[8:10] == pytest.approx([100, 100 * 59 / 89], abs=0.01)


def test_hours_follow_the_processes_of_the_launch_that_made_a_step(tmp_path: Path) -> None:
    launches = [
        BEGUN | {"hosts": {"node1": 8}},
        BEGUN | {"hosts": {"node1": 8, "node2": 8}, "step": 20},  # from step 20 on all is made again
    ]
    two = run_of(tmp_path / "two", 8, 60, 36.0, 1.0)
    found = page(run_of(tmp_path / "one", 0, 60, 36.0, 1.0, *launches), two, at=tmp_path / "page.html")
    assert row(found, "GPU-hours in steps that count") == [f"{(20 * 8 + 40 * 16) / 100:g}", "4.8"]


def test_settings_are_those_that_differ(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", 1, 5, 1.0, 1.0)
    two = run_of(tmp_path / "two", 1, 5, 1.0, 1.0, config="lr = 0.001\noptim = dict(weight_decay=0.01)\n")
    found = page(one, two, at=tmp_path / "page.html").section("Settings that differ")
    table = found[: found.index("Power")]
    assert table[:3] == ["key", "one", "two"]
    rows = {table[at]: table[at + 1 : at + 3] for at in range(3, len(table), 3)}
    assert rows == {"optim.weight_decay": ["0.0", "0.01"], "lr": ["0.003", "0.001"]}
    same = page(one, run_of(tmp_path / "three", 1, 5, 1.0, 1.0), at=tmp_path / "page.html")
    assert "None: the runs have the same settings." in same.texts
    other = run_of(tmp_path / "four", 1, 5, 1.0, 1.0, config='objective = dict(predict="clean")\n')
    said = [text for text in page(one, other, at=tmp_path / "page.html").texts if "not of the same thing" in text]
    assert said == ["The runs differ in objective.predict: their losses are not of the same thing."]


def test_failures_are_counted_by_node(tmp_path: Path) -> None:
    nodes = {"node1": 8, "node2": 8}
    launches = [
        BEGUN | {"hosts": nodes},
        {"time": 1.7e9, "ended": "failed", "host": "node2", "why": "RuntimeError: <lost>"},
        BEGUN | {"hosts": nodes, "step": 2},
        BEGUN | {"hosts": {"node1": 8}, "step": 4},
        {"time": 1.7e9, "ended": "done"},
    ]
    one = run_of(tmp_path / "one", 0, 5, 1.0, 1.0, *launches)
    found = page(one, run_of(tmp_path / "two", 8, 5, 1.0, 1.0), at=tmp_path / "page.html")
    assert row(found, "launches") == ["3", "1"]
    assert row(found, "of them failed") == ["2", "0"]
    said = found.section("Failures and restarts")
    assert "failed on node2: RuntimeError: <lost>" in said
    assert "without a word: killed, or a node was lost" in said
    table = said[said.index("watts of a GPU") + 1 :]
    assert table == ["node2", "2", "1", "1", "–", "node1", "4", "0", "1", "–"]


def test_power_is_shown_by_run_and_node_or_the_reason_why_not(tmp_path: Path) -> None:
    one, two = (run_of(tmp_path / name, 8, 6, 1.0, 1.0) for name in ("one", "two"))
    lines = [line | {"watts": {"node1": 600.0, "node2": 720.0}} for line in two.lines]
    (two.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = page(one, read_record(two.folder), at=tmp_path / "page.html")
    said = found.section("Power")
    assert said[0].startswith("one: metrics.jsonl has no watts")
    assert "660" in said, "the mean of both nodes, on the axis"
    assert said[said.index("node1") + 4] == "600"


def test_losses_of_the_buckets_that_both_have_are_drawn(tmp_path: Path) -> None:
    one, two = (run_of(tmp_path / name, 8, 6, 1.0, 1.0) for name in ("one", "two"))
    for run, names in ((one, "abc"), (two, "bcd")):
        lines = [line | {"buckets": dict.fromkeys(names, 1.0)} for line in run.lines]
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = page(*(read_record(run.folder) for run in (one, two)), at=tmp_path / "page.html").section("At equal steps")
    assert "loss by bucket, 2 of 2, the most frequent first" in found
    assert {"b", "c"} <= set(found)
    assert not {"a", "d"} & set(found)


def test_notes_are_kept_and_told_apart(tmp_path: Path) -> None:
    one, two = (run_of(tmp_path / name, 8, 6, 1.0, 1.0) for name in ("one", "two"))
    for run in (one, two):
        write_note(run.folder, " we test if <x> helps \n")
    found = page(*(read_record(run.folder) for run in (one, two)), at=tmp_path / "page.html")
    assert found.texts.count("we test if <x> helps") == 1
    write_note(one.folder, "")
    found = page(*(read_record(run.folder) for run in (one, two)), at=tmp_path / "page.html")
    assert found.texts[2:6] == ["one", "no note", "two", "we test if <x> helps"]


def test_a_run_of_an_earlier_version_is_compared_by_steps(tmp_path: Path) -> None:
    one, two = (run_of(tmp_path / name, 8, 6, 1.0, 1.0) for name in ("one", "two"))
    (one.folder / "launches.jsonl").unlink()
    found = page(read_record(one.folder), two, at=tmp_path / "page.html")
    assert row(found, "GPU-hours in steps that count") == ["–", "0.01333"]
    assert not any(text.startswith("the same up to 0") for text in found.texts)
    assert any(text.startswith("one: not known: no launches.jsonl says") for text in found.texts)


def test_what_cannot_be_compared_is_one_sentence(tmp_path: Path) -> None:
    one = run_of(tmp_path / "one", 8, 6, 1.0, 1.0)
    with pytest.raises(UserError, match="one: is given twice; give another run"):
        write_comparison(tmp_path / "page.html", [one, one])
    with pytest.raises(UserError, match="two: has made no step yet"):
        write_comparison(tmp_path / "page.html", [one, run_of(tmp_path / "two", 8, 0, 1.0, 1.0)])
    assert not (tmp_path / "page.html").exists()
    run_of(tmp_path / "a" / "run", 8, 6, 1.0, 1.0), run_of(tmp_path / "b" / "run", 8, 6, 1.0, 1.0)
    found = page(*(read_record(tmp_path / name / "run") for name in "ab"), at=tmp_path / "page.html")
    assert found.texts[0] == "a/run · b/run"
