from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.pages import Page
from tests.plan.runs import write_table

RUN = """
dataset = dict(data_path={table!r})
bucket_config = {{"64px": {{8: (1.0, 4), 16: (1.0, 2)}}}}
ae = dict(type="pixel", temporal=8, spatial=8)
t5 = dict(type="words", dim=128, max_length=16)
clip = dict(type="words", dim=128, max_length=16)
model = dict(
    in_channels=1536, patch_size=1, hidden_size=256, num_heads=4, axes_dim=(16, 24, 24), depth=2,
    depth_single_blocks=4, vec_in_dim=128, context_in_dim=128,
)
"""
PRICE = ("--price-per-gpu-hour", 2.5)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run on a table of which one clip is too short."""
    table = write_table(tmp_path, [(16, 64, 64)] * 6 + [(4, 64, 64)])
    path = tmp_path / "run.py"
    path.write_text(RUN.format(table=str(table)), encoding="utf-8")
    return path


def test_a_run_is_planned_without_being_launched(longtake, run_file: Path):
    page, data = run_file.with_name("plan.html"), run_file.with_name("plan.json")
    code, out, err = longtake("plan", run_file, "--gpus", 2, "--gpu", "h200", "--html", page, "--json", data, *PRICE)
    assert (code, err) == (0, "")
    assert "parameters on 2 x h200" in out
    assert "64px/16f" in out
    assert "6 of 7 clips used" in out
    assert " at 2.50 each" in out
    assert out.endswith(f"page: {page}\n")
    assert any(words.startswith("cost, ") for words in Page(page.read_text()).texts)
    assert "assumed, not measured" in out
    assert "<title>Plan of" in page.read_text()
    assert json.loads(data.read_text())["gpus"] == 2
    assert sorted(p.name for p in run_file.parent.iterdir()) == ["clips.csv", "plan.html", "plan.json", "run.py"]


def test_what_cannot_fit_ends_with_one_sentence_and_is_still_shown(longtake, run_file: Path):
    code, out, err = longtake("plan", run_file, "--gpus", 1, "--gpu", "4090", "--memory-gib", 0.2, "--headroom", 0)
    assert code == 2
    assert err.count("\n") == 1
    assert "longtake: bucket_config.64px." in err
    assert "the cheapest change that fits" in err
    assert "64px/16f" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without a GPU")
def test_machine_without_a_gpu_is_planned_for_first(
    longtake, run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here, there, *_ = longtake("plan", run_file, "--gpus", 1, "--gpu", "4090")[1].splitlines()
    (needs,) = re.findall(r"takes ([0-9.]+) GiB, which fits; .*--measure", here)
    assert 0.05 < float(needs) < 2
    assert "parameters on 1 x 4090" in there
    here = longtake("plan", run_file, "--parallel.tensor", 2)[1].splitlines()[0]
    assert here.startswith("this machine: ")
    assert "parallel.tensor" in here


def without_this_machine(out: str) -> str:
    """The part of the output that is equal on every machine."""
    return re.sub(r"\Athis machine: .*\n", "", out)


def test_keys_of_the_run_can_be_overridden(longtake, run_file: Path):
    _, out, _ = longtake("plan", run_file, "--gpus", 4, "--parallel.zero", 2, "--accumulation_steps", 3)
    assert "zero 2" in out
    assert "3 micro-batches a rank a step" in out


def test_the_assumed_efficiency_is_said_and_can_be_set(longtake, run_file: Path):
    _, out, _ = longtake("plan", run_file, "--efficiency", 0.55, "--peak-tflops", 100)
    assert "rates: 55% of 100 TFLOP/s for all kernels (--efficiency)" in out
    assert "all else takes no time; a kernel takes the host " in out


def test_rates_that_were_measured_are_kept_and_used_by_later_plans(
    longtake, mistake, run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert "plan RUN --measure" in mistake("plan", run_file, "--gpus", 1, "--gpu", "cpu")
    words = ("--gpus", 1, "--device", "cpu", "--cpu_threads", 1)
    _, first, _ = longtake("plan", run_file, *words, "--measure")
    (said,) = re.findall("^rates: .*$", first, re.MULTILINE)
    assert re.match(r"rates: measured here on \d{4}-\d\d-\d\d, 1 CPU threads: matrix products [0-9.]+ TFLOP/s", said)
    assert said in longtake("plan", run_file, *words, "--gpu", "cpu")[1]
    assert "rates: table of h200" in longtake("plan", run_file)[1]
    assert "choose --gpu cpu" in mistake("plan", run_file, *words, "--gpu", "h200", "--measure")


def test_the_log_in_a_runs_folder_is_compared_with_its_plan(longtake, run_file: Path):
    folder = run_file.with_name("run")
    folder.mkdir()
    run_file.rename(folder / "config.py")
    launch = {"time": 0.0, "step": 0, "hosts": {"a": 2}, "device": "NVIDIA H200", "reports": "none"}
    (folder / "launches.jsonl").write_text(json.dumps(launch) + "\n", encoding="utf-8")
    line = {"seconds": 3.0, "wait": 1.0, "buckets": {"64px/16f/1:1": 0.5}}
    lines = "".join(json.dumps({"step": step, **line}) + "\n" for step in range(1, 8))
    (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
    _, out, _ = longtake("plan", folder)
    assert "parameters on 2 x h200" in out, "as the run had"
    assert re.search(r"^step (1\.9\d|2) s as measured", out, re.MULTILINE)
    assert "measured: 6 steps of this run's log took" in out, "the first of a launch is left out"
    for other in (("--gpus", 4), ("--gpu", "h100")):
        assert "as measured" not in longtake("plan", folder, *other)[1]


def test_mistakes_are_one_sentence(mistake, run_file: Path):
    assert "choose one of" in mistake("plan", run_file, "--gpu", "abacus")
    for price in ("nan", "inf", -1):
        assert "--price-per-gpu-hour" in mistake("plan", run_file, "--price-per-gpu-hour", price)
    assert "multiple of 8" in mistake("plan", run_file, "--gpus", 12)
    assert "RUN is expected" in mistake("plan", "--gpus", 8)
    assert "parallel.tensor" in mistake("plan", run_file, "--parallel.tensor", 3)


def test_the_example_of_the_docs_is_what_the_command_says(longtake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text(encoding="utf-8")
    (run,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    said, complained = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    (tmp_path / "run.py").write_text(run, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    code, out, err = longtake("plan", "run.py", "--gpus", 8, "--gpu", "h200")
    assert (code, without_this_machine(out), err) == (2, said, complained)


def test_a_probe_on_a_cpu_is_shown_in_the_table_the_page_and_the_data(longtake, run_file: Path):
    page, data = run_file.with_name("plan.html"), run_file.with_name("plan.json")
    words = ("--device", "cpu", "--cpu_threads", 1, "--html", page, "--json", data)
    code, out, err = longtake("plan", run_file, "--gpus", 1, "--probe", *words)
    assert (code, err) == (0, "")
    head, row = out[out.index("batches tried") :].splitlines()[:2]
    assert head.split()[-5:] == ["GiB", "forecast", "off", "s", "suggested"]
    assert re.fullmatch(r"64px/16f +2 +2 +- +[0-9.]+ +- +[0-9.e-]+ +[12]", row)
    assert "64px/8f" not in out[out.index("batches tried") :].split("step ")[0], "no clip is that short"
    text = page.read_text()
    assert "<h2>Measured</h2>" in text
    assert "batches tried" in text[text.index("<h2>Measured</h2>") :]
    (name, measured), *_ = json.loads(data.read_text())["probe"].items()
    assert (name, measured["largest_batch"], measured["peak_bytes"]) == ("64px/16f", 2, None)
    assert measured["seconds"] > 0
    assert re.search(r"^measured: 1 micro-batches of the probe took [0-9.]+ times the forecast", out, re.MULTILINE)
    assert [one["batch"] for one in measured["tries"]] == [2]


def test_batch_sizes_for_a_target_are_confirmed_by_a_probe_and_make_a_run(longtake, mistake, run_file: Path):
    words = ("--gpus", 1, "--target-step-seconds", 0.2, "--probe", "--device", "cpu", "--cpu_threads", 1)
    code, out, err = longtake("plan", run_file, *words, "--html", page := run_file.with_name("plan.html"))
    assert (code, err) == (0, "")
    (row,) = re.findall(r"^64px/16f +([\d, ]+?)  .* (\d+)$", out[out.index("batches tried") :], re.MULTILINE)
    tried, chosen = [int(batch) for batch in row[0].split(", ")], int(row[1])
    assert chosen == 0 or chosen in tried
    said, _, table = out.partition("for steps of at most 0.2 s, measured batch sizes:\n")[2].partition(
        "bucket_config = "
    )
    assert said == ""
    assert f"16: (1.0, {max(1, chosen)})" in table
    assert "not measured but forecast, for no clip is theirs: 64px/8f" in out
    assert "measured batch sizes" in page.read_text()
    own = run_file.with_name("own.py")
    own.write_text(run_file.read_text() + f"bucket_config = {table.splitlines()[0]}\n")
    assert longtake("plan", own, "--gpus", 1)[0] == 0
    code, out, _ = longtake(
        "plan", run_file, "--gpus", 1, "--memory-gib", 0.2, "--headroom", 0, "--target-step-seconds", 1
    )
    assert (code, "bucket_config = " in out) == (2, True), "not even one sample fits"
    assert "--target-step-seconds" in mistake("plan", run_file, "--target-step-seconds", 0)


def test_a_probe_for_more_gpus_than_there_are_processes_is_one_sentence(mistake, run_file: Path):
    said = mistake("plan", run_file, "--gpus", 2, "--probe", "--device", "cpu")
    assert "--gpus 2: --probe measures real steps and 1 process runs; choose --gpus 1" in said


def test_all_stages_are_planned_and_added_up(longtake, run_file: Path) -> None:
    stages = run_file.with_name("stages.py")
    stages.write_text(
        "stages = [dict(name='a', run='run.py', max_steps=1000), dict(name='b', run='run.py', max_steps=3000)]"
    )
    code, out, err = longtake("plan", stages, "--epochs", 10**6, "--gpus", 2, *PRICE)
    assert (code, err) == (0, "")
    hours = [float(one.replace(",", "")) for one in re.findall(r"([\d.,]+) GPU-hours, [\d.,]+ at 2.50 each", out)]
    assert len(hours) == 3
    assert hours[2] == pytest.approx(hours[0] + hours[1], rel=0.01)
    assert hours[1] == pytest.approx(3 * hours[0], rel=0.01)
    code, out, err = longtake("plan", stages, "--stage", "b", "--gpus", 2)
    assert (code, "all 2 stages" in out) == (0, False)
    code, _, err = longtake("plan", stages, "--json", run_file.with_name("plan.json"))
    assert (code, "--json: is for one run, and this has stages; add --stage a" in err) == (2, True)
