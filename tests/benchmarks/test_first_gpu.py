"""The runner of jobs on a GPU: crashes, hangs and kills are recorded, and nothing of a job survives it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from xdist.workermanage import NodeManager

from longtake.families import registry
from longtake.plan.machine import Machine
from longtake.plan.run import plan_run
from longtake.presets import run_file
from longtake.track.devices import gpu_named
from longtake.train.config import RunConfig, RunWithoutTable
from longtake.train.run_file import read_run

ROOT = Path(__file__).parents[2]
MIB, GIB = 2**20, 2**30
MOST_GIB = 70  # of jobs that run at a time
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process groups of Linux")


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program as a module."""
    for folder in ("tools", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    first_gpu = import_module("first_gpu")
    for module in ("schedule", "summary"):
        monkeypatch.setattr(first_gpu, module, import_module(f"gpu_jobs.{module}"), raising=False)
    monkeypatch.setattr(first_gpu, "gpu_packages", import_module("gpu_packages"), raising=False)
    return first_gpu


def job(runner: Any, name: str, code: str, limit: float = 30, alone: bool = False, until: float = 60) -> Any:
    return runner.schedule.Job(name, ["-S", "-c", code], limit, until, alone, grace=1)


def results_of(runner: Any, folder: Path, jobs: list[Any], seconds: float = 60) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}

    def finish(done: Any, result: dict[str, Any]) -> None:
        results[done.name] = result

    runner.run_jobs(jobs, dict(os.environ), folder, seconds, finish)
    return results


def wait_until_gone(pid: int) -> None:
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)


def test_job_outcomes_are_told_apart(runner: Any, tmp_path: Path) -> None:
    (tmp_path / "good.json").write_text('{"figures": {"runs": [{"ms": 2}]}}')
    sleeps = "import time; print('asleep', flush=True); time.sleep(3000)"
    jobs = [
        job(runner, "cut", "print('facts {\"peak_by')"),
        job(runner, "good", "print('facts {\"peak_bytes\": 1}'); print('facts {\"peak_bytes\": 2}')"),
        job(runner, "crash", "print('before'); raise ValueError('wrong size')"),
        job(runner, "interrupted", sleeps, limit=1.5),
        job(runner, "hang", f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {sleeps}", limit=1.5),
        job(runner, "killed", "import os; os.kill(os.getpid(), 9)"),
        job(runner, "late", "", until=0.1),
    ]
    results = results_of(runner, tmp_path, jobs)
    assert {name: result["outcome"] for name, result in results.items()} == {
        "cut": "ok",
        "good": "ok",
        "crash": "failed with code 1",
        "interrupted": "out of time, killed by signal 2",
        "hang": "out of time, killed by signal 9",
        "killed": "killed by signal 9",
        "late": "not started",
    }
    assert results["good"]["facts"] == {"peak_bytes": 2}
    assert results["good"]["figures"]["runs"] == [{"ms": 2}]
    assert results["crash"]["traceback"][-1] == "ValueError: wrong size"
    assert results["interrupted"]["traceback"][-1] == "KeyboardInterrupt"


def test_what_a_job_leaves_running_is_killed_with_it(runner: Any, tmp_path: Path) -> None:
    child = "import os, time; child = os.fork(); print(child) if child else time.sleep(3000)"
    left = []

    def finish(done: Any, result: dict[str, Any]) -> None:
        left.append(int(result["tail"][0]))
        wait_until_gone(left[0])

    runner.run_jobs([job(runner, "parent", child)], dict(os.environ), tmp_path, 60, finish)
    assert left


def test_timed_jobs_run_alone(runner: Any, tmp_path: Path) -> None:
    code = "import time; print(time.monotonic()); time.sleep(0.15); print(time.monotonic())"
    jobs = [job(runner, name, code, alone=name.startswith("alone")) for name in ("alone1", "a", "b", "alone2", "c")]
    results = results_of(runner, tmp_path, jobs)
    spans = {name: tuple(map(float, result["tail"])) for name, result in results.items()}
    for name in ("alone1", "alone2"):
        (begin, end), others = spans.pop(name), spans.values()
        assert all(other_end < begin or end < other_begin for other_begin, other_end in others)
    assert max(spans["a"][0], spans["b"][0]) < min(spans["a"][1], spans["b"][1]), "these two run side by side"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_jobs_end_with_the_runner(tmp_path: Path, number: signal.Signals) -> None:
    code = f"""import os, sys
sys.path[:0] = ["{ROOT}/benchmarks", "{ROOT}/tools"]
import first_gpu
from gpu_jobs.schedule import Job
from pathlib import Path
job = Job("job", ["-Sc", "import os, time; print(os.getpid(), flush=True); time.sleep(3000)"], 50, 60)
first_gpu.run_jobs([job], dict(os.environ), Path("{tmp_path}"), 60, print)"""
    with subprocess.Popen([sys.executable, "-S", "-c", code], stderr=subprocess.DEVNULL) as process:
        log = tmp_path / "job.log"
        while not (log.exists() and log.read_text().strip()):
            time.sleep(0.01)
        process.send_signal(number)
    wait_until_gone(int(log.read_text()))


def test_schedules_end_in_time_and_name_every_gpu_test(runner: Any, tmp_path: Path) -> None:
    first, second = runner.schedule.first(tmp_path, False), runner.schedule.second(tmp_path, False)
    assert max(one.until for one in first) <= 400
    assert max(one.until for one in second) <= 245
    names = [one.name for one in first + second]
    assert len(names) == len(set(names))
    families = {family.name for family in registry._OURS}
    for way in ("eager", "compiled", "video"):
        assert {name.partition("/")[2] for name in names if name.startswith(f"{way}/")} == families
    (tests,) = (one for one in second if one.name == "tests")
    assert tests.grace > NodeManager.EXIT_TIMEOUT + 2, "or no failure is printed where a worker hangs in a kernel"
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if "\n@pytest.mark.gpu\n" in file.read_text()]
    assert {str(file.relative_to(ROOT)) for file in files} <= set(tests.arguments)


@pytest.mark.parametrize("program", ["step", "finetune"])
def test_arguments_on_a_gpu_are_understood(
    runner: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str
) -> None:
    jobs = runner.schedule.first(tmp_path, False) + runner.schedule.second(tmp_path, False)
    (arguments,) = (one.arguments for one in jobs if one.arguments[0] == f"benchmarks/{program}.py")
    monkeypatch.setattr(sys, "argv", arguments)
    assert import_module(program)._arguments().json.parent == tmp_path


def test_jobs_side_by_side_fit_a_gpu_of_80_gb_by_their_forecasts(runner: Any, tmp_path: Path) -> None:
    """At the sizes of a GPU, uncompiled, which needs more. Kernels' tests take less than 1 GiB each."""
    jobs = runner.schedule.first(tmp_path, False) + runner.schedule.second(tmp_path, False)
    needed: dict[str, list[float]] = {"eager": [], "compiled": [], "video": []}
    for one in jobs:
        way = one.name.partition("/")[0]
        if way in needed:
            _, file, *words = json.loads(one.arguments[1])
            config = read_run(file, [*words, "--compile", "False"], RunWithoutTable).value
            plan = plan_run(config, 1, Machine(gpu_named("h100")))
            needed[way].append(max(entry.memory.total for entry in plan.entries) / GIB)
    assert {way: len(sizes) for way, sizes in needed.items()} == dict.fromkeys(needed, len(runner.schedule.FAMILIES))
    contexts = 6  # 1 GiB of CUDA's and its libraries' in each process that runs at a time
    first = needed["eager"] + needed["compiled"]
    again = first + needed["video"]
    assert sum(sorted(first)[-6:]) + contexts <= MOST_GIB
    assert sum(sorted(again)[-6:]) + contexts <= 79, "or not all that failed could be repeated beside the videos"


def test_timed_jobs_fit_a_gpu_of_80_gb_by_their_forecasts(
    runner: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs = runner.schedule.first(tmp_path, False) + runner.schedule.second(tmp_path, False)
    step, finetune = (import_module(program) for program in ("step", "finetune"))
    (arguments,) = (one.arguments for one in jobs if one.name == "step")
    monkeypatch.setattr(sys, "argv", arguments)
    given, world = step._arguments(), SimpleNamespace(device=torch.device("cuda"))
    (case,) = step._cases(given, world)
    assert case.tokens + case.text_tokens == 8960
    mesh = SimpleNamespace(data_ranks=1, config=SimpleNamespace(zero=3))
    for level in given.level:
        how = replace(step._how(given, case, level, {}, world), compiled=False)
        forecast = step._forecast(case, mesh, torch.bfloat16, how, torch.device("cpu"))
        assert forecast["forecast_bytes"] <= MOST_GIB * GIB
    words = ("--dataset.data-path", "-", "--compile", "False", *finetune._SIZED)
    config = read_run(run_file("cogvideox_fun/lora_2b", "train"), words, RunConfig).value
    plan = plan_run(config, 1, Machine(gpu_named("h100")))
    assert max(entry.memory.total for entry in plan.entries) <= MOST_GIB * GIB


def test_second_command_begins_with_what_failed(runner: Any, tmp_path: Path) -> None:
    arguments = type("Arguments", (), {"tiny": False, "second": True, "only": None, "seconds": 240})
    before = {"step": {"outcome": "failed with code 1"}, "eager/cogvideox": {"outcome": "killed by signal 9"}}
    names = [one.name for one in runner.choose_jobs(arguments, tmp_path, before | {"sustained": {"outcome": "ok"}})]
    assert names[:3] == ["clips", "step", "chain"]
    assert names.index("eager/cogvideox") < names.index("tests")
    assert "sustained" not in names


@pytest.mark.parametrize("words", [["--only", "nothing"], ["--second", "--again", "missing.json"]], ids=" ".join)
def test_a_job_or_result_file_that_is_not_there_is_refused(words: list[str], tmp_path: Path) -> None:
    line = [sys.executable, ROOT / "benchmarks/first_gpu.py", "--tiny", *words]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode
    assert words[-1] in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_rates_come_from_timed_jobs_and_are_those_of_a_plan(
    runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from longtake.plan.rates import Rates, keep_rates, measured_rates

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep_rates("h100", Rates(7e14, {128: (5e14, 4e14)}, 1e14, 3e12, None, 5e10, 4e-6, "measured"))
    blank = {"outcome": "ok", "seconds": 1, "alone": True, "facts": {}, "figures": {}}
    blank |= {"recompiles": 0, "graph_breaks": 0}
    attention = [{"width": 64, "rates": {"forward": 4e14, "backward": 3e14}}]
    memory = {"waits": {}, "peak_bytes": 2**31, "forecast_bytes": 2**30, "step_ms": 3, "forecast_ms": 4}
    jobs = {
        "sustained": blank | {"figures": {"runs": [{"what": "gemm, 8 s", "tflops": 600}]}},
        "attention": blank | {"figures": {"runs": attention}},
        "eager/cogvideox": blank | {"facts": memory, "alone": False},
        "step": blank | {"figures": {"runs": [{"remat": "none", "step_ms": 3, "forecast_ms": 6}]}},
    }
    runner.summary.write(tmp_path, tmp_path / runner.RATES, [{"commit": "c", "jobs": jobs}])
    (written,) = tmp_path.glob("h100-*.json")
    shutil.copy(written, tmp_path / "cache/longtake/rates")
    rates = measured_rates("h100")
    assert rates is not None
    assert rates.products == 6e14
    assert dict(rates.attention) == {128: (5e14, 4e14), 64: (4e14, 3e14)}
    summary = (tmp_path / "gpu_summary.md").read_text()
    assert re.search(r"eager/cogvideox.*GiB \| 2.00 \| 1.00 \| 0.50", summary)
    assert not re.search(r"eager/cogvideox.*ms", summary), "it did not run alone"
    assert "| step none, ms | 3.00 | 6.00 | 2.00 |" in summary


@pytest.mark.parametrize(("code", "status"), [("", 0), ("raise ValueError", 1)], ids=["ok", "failed"])
def test_exit_status_tells_of_failed_jobs_once_all_files_are_there(
    runner: Any, code: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, out = tmp_path / "before", tmp_path / "out"
    before.mkdir()
    (before / "gpu_first.json").write_text('{"jobs": {}}')
    (before / "h100-2.11.0+cu130-2.json").write_text('{"products": 5e14, "attention": {}}')
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    line = ["first_gpu.py", "--tiny", "--second", "--again", str(before / "gpu_first.json")]
    monkeypatch.setattr(sys, "argv", line)
    report = "import os; open(os.environ['OUT'] + '/gpu_tests.xml', 'w')"
    reads = "import json, os; json.load(open(os.environ['OUT'] + '/gpu_second.json'))['jobs']['tested']"
    jobs = [job(runner, "tested", code), job(runner, "tests", report), job(runner, "reads", reads, alone=True)]
    monkeypatch.setattr(runner, "choose_jobs", lambda *given: jobs)
    with pytest.raises(SystemExit) as end:
        runner.main()
    assert int(end.value.code) == status
    results = json.loads((out / "gpu_second.json").read_text())["jobs"]
    assert results["reads"]["outcome"] == "ok", "results are written as jobs end"
    names = {"gpu_second.json", "gpu_second.log", "gpu_summary.md", "gpu_tests.xml", "h100-2.11.0+cu130-2.json"}
    assert {file.name for file in out.iterdir()} == names
    summary = (out / "gpu_summary.md").read_text()
    assert "500000000000000" in summary, "rates of the first command"
    assert ("\ntested, failed with code 1:" in summary) == ("\nValueError\n" in summary) == bool(status)


def test_program_and_its_jobs_stay_small() -> None:
    files = [ROOT / "benchmarks/first_gpu.py", *(ROOT / "benchmarks/gpu_jobs").rglob("*.py")]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 400


def test_what_travels_is_within_its_bounds() -> None:
    wheels = json.loads((ROOT / "tools/gpu_packages.json").read_text())["wheels"]
    assert {name.partition("-")[0] for name in wheels} >= {"av", "ftfy", "beautifulsoup4", "pydantic_core", "diffusers"}
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("not a checkout")
    tracked = sum((ROOT / name).lstat().st_size for name in files.stdout.split("\0")[:-1] if (ROOT / name).exists())
    assert tracked <= 17.5 * MIB
    assert tracked + sum(wheels.values()) <= 62 * MIB


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_first_command_runs_on_a_cpu(runner: Any, tmp_path: Path) -> None:
    line = [sys.executable, ROOT / "benchmarks/first_gpu.py", "--tiny", "--only", "sustained", "eager"]
    env = {**os.environ, "OUT": str(tmp_path / "out"), "SCRATCH": str(tmp_path / "scratch")}
    subprocess.run([*line, "--seconds", "500"], env=env, check=True, stdout=subprocess.DEVNULL)
    jobs = json.loads((tmp_path / "out/gpu_only.json").read_text())["jobs"]
    assert {name: result["traceback"] for name, result in jobs.items() if result["outcome"] != "ok"} == {}
    assert len(jobs) == 2 + len(runner.schedule.FAMILIES)
