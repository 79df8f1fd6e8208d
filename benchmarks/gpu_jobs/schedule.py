"""The jobs of both commands, with the seconds that each may take and the second at which it is killed."""

import json
from pathlib import Path
from typing import NamedTuple

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
STEP = "step.py --no-peer --profile --static --budget none inputs"
TIMED = {  # name: limit, hard end, program in benchmarks/, its arguments on a GPU, those on a CPU
    "about": (35, 45, "gpu_jobs/about.py", "", ""),
    "step": (100, 140, STEP, "--seconds 3 --frames 129 --batch 3 --blocks 2 4 --remat 2 4", "--remat 1 1"),
    "attention": (45, 345, "kernels.py attention", "--seconds 0.15", ""),
    "encode": (60, 400, "kernels.py vae", "--seconds 0.5 --frames 33", ""),
    "chain": (30, 150, "kernels.py chain", "--seconds 0.1", ""),
    "varlen": (40, 150, "kernels.py varlen", "--seconds 0.5", ""),
    "fused": (35, 150, "kernels.py fused", "--seconds 0.1", ""),
    "lora": (50, 150, "finetune.py --preset cogvideox_fun/lora_2b", "", ""),
}
FAMILIES = {"opensora_v2": "clips", "opensora_v1_2": "clips", "cogvideox": "clips", "ttt_video": "stories"}
ON_CPU = ["--tiny", "--device", "cpu"]
RUN = "--lr 1e-4 --ema_decay 0.99 --num_workers 2 --log_every 5 --slots_per_step 1 --tensorboard False --resume auto"


class Job(NamedTuple):
    name: str
    arguments: list[str]  # of the Python interpreter
    limit: float
    until: float
    alone: bool = False  # timed, so nothing else runs


def first(scratch, tiny):
    """Timed jobs, trainings of all families side by side with tests of kernels, timed jobs."""
    plan = ["-m", "longtake", "plan", "opensora_v2/finetune_1gpu", "--dataset.data-path", "-", "--measure"]
    about, step, attention, encode = (_timed(name, scratch, tiny) for name in ("about", "step", "attention", "encode"))
    eager, compiled = ([_training(way, f, scratch, tiny) for f in FAMILIES] for way in ("eager", "compiled"))
    options = ["-m", "pytest", "-q", "-m", "gpu", "-k", "agree", *(["--collect-only"] if tiny else [])]
    kernels = [
        Job(f"kernels/{Path(file).stem[5:]}", [*options, file], 100, 300) for file in _tests("assert_kernels_agree(")
    ]
    rates = Job("rates", [*plan, *(ON_CPU if tiny else [])], 30, 365, alone=True)
    return [about, step, *eager, *kernels, *compiled, attention, rates, encode]


def second(scratch, tiny):
    """Timed jobs, then the GPU tests and a video of each family side by side."""
    names = ["chain", "varlen", "lora", *(["fused"] if (ROOT / "longtake/models/fused_kernels.py").exists() else [])]
    tests = ["-m", "pytest", "-q", "-m", "gpu", "-n", "4", "--tb=short", "-p", "no:cacheprovider", "--timeout=90"]
    tests += ["--continue-on-collection-errors", f"--junitxml={scratch}/tests.xml", *(["--co"] if tiny else [])]
    videos = [_training("video", family, scratch, tiny) for family in FAMILIES]
    timed = [_timed(name, scratch, tiny) for name in names]
    return [*timed, Job("tests", [*tests, *_tests("pytest.mark.gpu")], 120, 245), *videos]


def _timed(name, scratch, tiny):
    limit, until, program, on_gpu, on_cpu = TIMED[name]
    file, *arguments = f"{program} {on_cpu if tiny else on_gpu}".split()
    figures = ["--json", f"{scratch}/{name}.json", *(ON_CPU if tiny else [])]
    return Job(name, [f"benchmarks/{file}", *arguments, *figures], limit, until, alone=True)


def _training(way, family, scratch, tiny):
    """Some steps, as many after a resume; or some steps, and a video from their checkpoint."""
    folder, only_cpu = f"{scratch}/{way}", ON_CPU if tiny else []
    train = ["train", f"{HERE}/runs/{family}.py", "--dataset.data-path", f"{scratch}/{FAMILIES[family]}.parquet"]
    train += [*RUN.split(), "--outputs", folder, "--exp_name", family, "--compile", str(way == "compiled"), *only_cpu]
    steps = 2 if tiny else 10
    resume = [*train, "--max_steps", f"{2 * steps}"]
    video = ["generate", f"{folder}/{family}", "--prompt", "a ramp", "--num-steps", "4", "--save-dir", folder]
    commands = [*train, "--max_steps", f"{steps}"], video + only_cpu[1:] if way == "video" else resume
    until = 245 if way == "video" else 300
    return Job(f"{way}/{family}", [f"{HERE}/longtake_job.py", *map(json.dumps, commands)], 150, until)


def _tests(text):
    """Files of tests in which there is this text."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if text in file.read_text(encoding="utf-8")]
