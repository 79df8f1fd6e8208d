"""Spend the first fifteen minutes on a GPU well: jobs with limits, timed ones alone, results in $OUT as jobs end.

python3 benchmarks/first_gpu.py --wheels          before: fill .wheels with what a GPU image lacks
python3 benchmarks/first_gpu.py --seconds 400     first command: what runs, how fast, what fails
python3 benchmarks/first_gpu.py --second --seconds 235 --again FILE     what failed in that file, then the rest
python3 benchmarks/first_gpu.py --only NAME...    jobs of both commands whose names begin so
python3 benchmarks/first_gpu.py --tiny            narrow models on a CPU, without packages that an image lacks
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[1]
RATES = "cache/longtake/rates"  # in the folder of scratch, where the jobs' `longtake plan` reads them
AT_ONCE = max(2, min(6, os.cpu_count() or 1))
# Reads process groups, and kills them at the end of its input: when the runner ends, in any way
GUARD = """import os, signal, sys
for group in list(map(int, sys.stdin)):
    try: os.killpg(group, signal.SIGKILL)
    except ProcessLookupError: pass"""


class Running:
    """A job with its process group and its log; interrupted at its limit, killed by `end`."""

    def __init__(self, job, env, scratch, end):
        self.job, self.start, self.interrupted = job, time.monotonic(), None
        self.end = min(self.start + job.limit, end - job.grace)
        self.log = (scratch / f"{job.name.replace('/', '_')}.log").open("w+b")
        streams = {"stdin": subprocess.DEVNULL, "stdout": self.log, "stderr": subprocess.STDOUT}
        streams |= {"env": env | {"TORCHINDUCTOR_COMPILE_THREADS": "16" if job.alone else "4"}}
        self.process = subprocess.Popen([sys.executable, *job.arguments], cwd=ROOT, start_new_session=True, **streams)

    def has_ended(self):
        now = time.monotonic()
        if self.process.poll() is None:
            if not self.interrupted and now >= self.end:
                self.interrupted = now
                self.process.send_signal(signal.SIGINT)
            if not self.interrupted or now < self.interrupted + self.job.grace:
                return False
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # also what the job has left
        self.process.wait()
        return True

    def result(self, scratch):
        """The outcome, last lines or last traceback, and measurements, as far as a kill has left them."""
        self.log.seek(0)
        text, code = self.log.read().decode(errors="replace"), self.process.returncode
        outcome = "ok" if code == 0 else f"killed by signal {-code}" if code < 0 else f"failed with code {code}"
        lines, facts, figures = text.splitlines(), {}, {}
        for line in filter(lambda line: line.startswith("facts "), lines):
            with suppress(ValueError):
                facts = json.loads(line.removeprefix("facts "))
        with suppress(OSError, ValueError):
            figures = json.loads((scratch / f"{self.job.name}.json").read_text())
        trace = max((i for i, line in enumerate(lines) if line.startswith("Traceback")), default=-25)
        return {
            "outcome": f"out of time, {outcome}" if self.interrupted else outcome,
            "seconds": round(time.monotonic() - self.start, 1),
            "traceback": lines[trace:][-60:] if code else [],
            "tail": lines[-25:],
            "recompiles": text.count("Recompiling function"),
            "graph_breaks": text.count("Graph break in"),
            "facts": facts,
            "figures": figures.get("figures", {}),
            "machine": figures.get("machine"),
            "log": text[-200_000:],
        }


def run_jobs(jobs, env, scratch, seconds, finish):
    """Start jobs in order, as time and others allow; call `finish(job, result)` as each ends."""
    start, waiting, running = time.monotonic(), list(jobs), []
    guard = subprocess.Popen([sys.executable, "-c", GUARD], stdin=subprocess.PIPE, text=True, start_new_session=True)
    while waiting or running:
        for one in [one for one in running if one.has_ended()]:
            running.remove(one)
            finish(one.job, one.result(scratch))
        while waiting and len(running) < AT_ONCE and not any(one.job.alone or waiting[0].alone for one in running):
            job = waiting.pop(0)
            end = start + min(seconds, job.until)
            if time.monotonic() > end - 2 * job.grace:
                finish(job, {"outcome": "not started", "seconds": 0, "facts": {}, "figures": {}, "log": ""})
                continue
            running.append(Running(job, env, scratch, end))
            print(running[-1].process.pid, file=guard.stdin, flush=True)
        time.sleep(0.05)
    guard.communicate()


def environment(scratch, tiny):
    """Variables of all jobs. Wheels are installed into `scratch`; a dry run sees the packages of a GPU machine."""
    env = {**os.environ, "PYTHONPATH": f"{scratch}/site:{ROOT}:{ROOT}/benchmarks", "PYTHONUNBUFFERED": "1"}
    env |= {"PYTHONFAULTHANDLER": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "NCCL_SOCKET_IFNAME": "lo"}
    env |= {"TORCH_LOGS": "recompiles,graph_breaks", "XDG_CACHE_HOME": f"{scratch}/cache"}
    env["TORCHINDUCTOR_CACHE_DIR"] = f"{scratch}/inductor"  # elsewhere a killed job may have left half a file
    if tiny:
        return env | gpu_packages.hiding() | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if wheels := list(map(str, ROOT.glob(".wheels/*.whl"))):
        options = ["-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", f"--target={scratch}/site"]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *wheels], check=True)
    return env


def choose_jobs(arguments, scratch, before):
    """Jobs that the command line asks for. before: earlier results, of which the second command repeats the failed."""
    first, second = schedule.first(scratch, arguments.tiny), schedule.second(scratch, arguments.tiny)
    failed = {name for name, result in before.items() if result["outcome"] != "ok"}
    again = [job._replace(limit=60, until=110 if job.alone else 245) for job in first if job.name in failed]
    jobs = sorted([*again, *second], key=lambda job: not job.alone) if arguments.second else first
    jobs = [job for job in first + second if job.name.startswith(tuple(arguments.only))] if arguments.only else jobs
    if not jobs:
        sys.exit(f"--only: expected beginnings of {[job.name for job in first + second]}, got {arguments.only}")
    if arguments.only or arguments.tiny:
        jobs = [job._replace(limit=arguments.seconds, until=arguments.seconds) for job in jobs]
    return [schedule.Job("clips", ["benchmarks/gpu_jobs/clips.py", str(scratch)], 40, 60, alone=True), *jobs]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=400, help="all jobs together")
    parser.add_argument("--again", type=argparse.FileType(), metavar="FILE", help="begin with what failed in it")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="jobs whose names begin so")
    for flag in ("--second", "--tiny", "--wheels"):
        parser.add_argument(flag, action="store_true")
    arguments = parser.parse_args()
    if arguments.wheels:
        return gpu_packages.fill(ROOT / ".wheels")
    out = Path(os.environ.get("OUT", "outputs/first_gpu")).absolute()
    scratch = Path(os.environ.get("SCRATCH", "outputs/first_gpu_scratch")).absolute()
    shutil.rmtree(scratch, ignore_errors=True)
    for folder in (out, scratch / RATES):
        folder.mkdir(parents=True, exist_ok=True)
    before = json.load(arguments.again) if arguments.again else {"jobs": {}}
    for file in Path(arguments.again.name).parent.glob("*-*-[0-9]*.json") if arguments.again else ():
        shutil.copy(file, scratch / RATES)
    results = {"commit": os.environ.get("LONGTAKE_COMMIT", "unknown"), "arguments": sys.argv[1:], "jobs": {}}
    name = "gpu_only" if arguments.only else "gpu_second" if arguments.second else "gpu_first"
    log = (out / f"{name}.log").open("w", encoding="utf-8")

    def finish(job, result):
        print(f"===== {job.name}: {result['outcome']}", result.pop("log"), sep="\n", file=log, flush=True)
        print(f"{job.name}: {result['outcome']}, {result['seconds']} s", flush=True)
        results["jobs"][job.name] = {"alone": job.alone, **result}
        (out / "unfinished").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (out / "unfinished").replace(out / f"{name}.json")

    jobs, env = choose_jobs(arguments, scratch, before["jobs"]), environment(scratch, arguments.tiny)
    run_jobs(jobs, {**env, "OUT": str(out)}, scratch, arguments.seconds, finish)
    summary.write(out, scratch / RATES, [before, results])
    print((out / "gpu_summary.md").read_text())
    sys.exit(any(job["outcome"] != "ok" for job in results["jobs"].values()))


if __name__ == "__main__":
    sys.path.insert(1, str(ROOT / "tools"))
    import gpu_packages
    from gpu_jobs import schedule, summary

    main()
