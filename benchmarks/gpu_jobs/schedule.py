"""The jobs of both commands, with the seconds that each may take and the second at which it is killed."""

import json
from pathlib import Path
from typing import NamedTuple

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
ON_CPU = ["--tiny", "--device", "cpu"]
STEP, SIZES = "step.py --no-peer --profile --static --level none full", "--frames 129 --batch 3 --blocks 2 4"
PYTEST = ["-m", "pytest", "-q", "-m", "gpu", "--tb=short", "--timeout=90", "-pxdist.plugin", "-ppytest_timeout"]
RUN = "--lr 1e-4 --ema_decay 0.99 --num_workers 2 --log_every 5 --slots_per_step 1 --tensorboard False --resume auto"
FAMILIES = ("opensora_v2", "opensora_v1_2", "cogvideox", "ttt_video", "wan")
TIMED = {  # name: limit, hard end, program in benchmarks/, its arguments on a GPU, those on a CPU
    "sustained": (35, 45, "kernels.py sustained", "", ""),
    "step": (100, 140, STEP, f"--seconds 3 --remat 2 4 {SIZES}", "--remat 1 1"),
    "attention": (45, 345, "kernels.py attention", "--seconds 0.15", ""),
    "encode": (60, 400, "kernels.py vae", "--seconds 0.5 --frames 33", ""),
    "chain": (30, 150, "kernels.py chain", "--seconds 0.1", ""),
    "varlen": (40, 150, "kernels.py varlen", "--seconds 0.5", ""),
    "lora": (50, 150, "finetune.py --preset cogvideox_fun/lora_2b", "", ""),
}


class Job(NamedTuple):
    name: str
    arguments: list[str]  # of the Python interpreter
    limit: float
    until: float
    alone: bool = False  # timed, so nothing else runs
    grace: float = 8.0  # seconds from SIGINT to SIGKILL


def first(scratch, tiny):
    """Timed jobs, trainings of all families side by side with tests of kernels, timed jobs."""
    timed = {name: _timed(name, scratch, tiny) for name in TIMED}
    eager, compiled = ([_training(way, family, scratch, tiny) for family in FAMILIES] for way in ("eager", "compiled"))
    agree = [*PYTEST, "-k", "agree", *(["--collect-only"] if tiny else [])]
    kernels = [Job(f"kernels/{Path(x).stem[5:]}", [*agree, x], 100, 300) for x in _tests_with("assert_kernels_agree(")]
    plan = ["-m", "longtake", "plan", "opensora_v2/finetune_1gpu", "--dataset.data-path", "-", "--measure"]
    rates = Job("rates", [*plan, *(ON_CPU if tiny else [])], 30, 365, alone=True)
    return [timed["sustained"], timed["step"], *eager, *kernels, *compiled, timed["attention"], rates, timed["encode"]]


def second(scratch, tiny):
    """Timed jobs, then the GPU tests and a video of each family side by side."""
    tests = [*PYTEST, "-n", "4", "--continue-on-collection-errors", "--junitxml=$OUT/gpu_tests.xml"]
    tests += [*(["--collect-only"] if tiny else []), *_tests_with("pytest.mark.gpu")]
    jobs = [*(_timed(x, scratch, tiny) for x in ("chain", "varlen", "lora")), Job("tests", tests, 155, 245, grace=16)]
    return [*jobs, *(_training("video", family, scratch, tiny) for family in FAMILIES)]


def _timed(name, scratch, tiny):
    limit, until, program, on_gpu, on_cpu = TIMED[name]
    arguments = f"benchmarks/{program} {on_cpu if tiny else on_gpu}".split()
    arguments += ["--json", f"{scratch}/{name}.json", *(ON_CPU if tiny else [])]
    return Job(name, arguments, limit, until, alone=True)


def _training(way, family, scratch, tiny):
    """Some steps, as many after a resume; or some steps, and a video from their checkpoint."""
    folder, steps, on_cpu = f"{scratch}/{way}", 2 if tiny else 10, ON_CPU if tiny else []
    table = f"{scratch}/{'stories' if family == 'ttt_video' else 'clips'}.parquet"
    train = ["train", f"{HERE}/runs/{family}.py", "--dataset.data-path", table]
    train += [*RUN.split(), "--outputs", folder, "--exp_name", family, "--compile", str(way == "compiled"), *on_cpu]
    video = ["generate", f"{folder}/{family}", "--prompt", "a ramp", "--num-steps", "4", "--save-dir", folder]
    then = [*video, *on_cpu[1:]] if way == "video" else [*train, "--max_steps", f"{2 * steps}"]
    commands = map(json.dumps, ([*train, "--max_steps", f"{steps}"], then))
    return Job(f"{way}/{family}", [f"{HERE}/longtake_job.py", *commands], 150, 245 if way == "video" else 300)


def _tests_with(text):
    return sorted(str(x.relative_to(ROOT)) for x in (ROOT / "tests").rglob("test_*.py") if text in x.read_text())
