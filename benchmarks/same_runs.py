"""Do two versions of Longtake compute the same, bit by bit? Short training runs of all families.

python benchmarks/same_runs.py --before ../old                        this checkout against another
python benchmarks/same_runs.py --tree ../other --before ../old        two others
python benchmarks/same_runs.py --json before.json                     record this checkout
python benchmarks/same_runs.py --against before.json --only mmdit     compare runs of one name or family with a record

Tiny models of the four families train for 4 steps on the CPU with one thread, on clips that this program writes: in
one process, from a checkpoint in mid-epoch, with adapters, with recomputation, and on two ranks that share weights,
heads or tokens. MMDiT also trains with known frames, from stored latents, on quantized weights and through a
curriculum.
Recorded: for each step the digest of its sample keys and the bits of its loss; a hash of every tensor of the last
checkpoint (weights, EMA, optimizer); a hash of a generated video. A resumed run must also equal the undisturbed one.

Only the command line and config keys are used, so one program runs old versions and new ones; where the key of
recomputation has changed, the one that a tree knows is written. Bits belong to a kind of processor and a version of
torch: where these differ from a record's, digests alone are compared. `results/same_runs.json` is the record of its
commit. Exit status 1 where anything differs. Takes about 3 minutes on two free cores, for two trees side by side 5.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import av
from machine import commit_of, machine, print_table, write_json
from same_runs_table import BASE, FAMILIES, PROMPTS, RUNS, Run, recomputation, write_clips

HERE = Path(__file__).resolve().parents[1]
SAME_MACHINE = ("processor", "torch")
SERVER = Path(__file__).with_name("forked_commands.py")


class CommandError(SystemExit):
    """A `longtake` command failed."""

    def __init__(self, arguments: Sequence[str], codes: Sequence[int], output: str) -> None:
        super().__init__(f"longtake {' '.join(arguments)} ended with {codes}:\n{output[-6000:]}")
        self.output = output


class Tree:
    """A checkout, a process that runs its `longtake` commands, and a folder with clips and outputs."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.folder = source.resolve(), folder
        self.log = folder / "log.txt"
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.source), "CUDA_VISIBLE_DEVICES": ""}
        variables |= {"XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "200"}
        self._server = subprocess.Popen(
            [sys.executable, "-P", str(SERVER)],
            cwd=folder,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        package = Path(self._answer())
        if not package.is_relative_to(self.source):
            raise SystemExit(f"--tree {source}: `import longtake` finds {package}; give the root of a checkout")
        config = (package.parent / "models" / "config.py").read_text(encoding="utf-8")
        self.names_level = "\n    recompute:" in config

    def longtake(self, *arguments: str, processes: int = 1) -> None:
        """Run one command in the folder. Raises `CommandError` if it fails."""
        self.log.unlink(missing_ok=True)
        command = {"arguments": arguments, "folder": str(self.folder), "processes": processes, "log": str(self.log)}
        assert self._server.stdin is not None
        print(json.dumps(command | {"port": _free_port()}), file=self._server.stdin, flush=True)
        if any(codes := self._answer()):
            raise CommandError(arguments, codes, self.log.read_text(encoding="utf-8"))

    def close(self) -> None:
        self._server.communicate()

    def _answer(self) -> Any:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise SystemExit(f"{self.source}: its process ended with {self._server.wait()}")
        return json.loads(line)


def main() -> None:
    """Run, print a table, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=HERE, help="root of the checkout to run; default: this one")
    parser.add_argument("--before", type=Path, help="root of another checkout, run and compared with")
    parser.add_argument("--against", type=Path, help="a record of another version to compare with")
    parser.add_argument("--only", help="names of runs, or how they start, separated by semicolons; default: all")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    names = _chosen(arguments.only)
    if not names:
        parser.error(f"--only {arguments.only}: no such run; choose from {'; '.join(RUNS)}")
    trees = [arguments.tree] if arguments.before is None else [arguments.tree, arguments.before]
    with ThreadPoolExecutor() as pool:  # each tree has a process of its own
        runs, *others = pool.map(partial(measure, names=names), trees)
    before = others[0] if others else {}
    with_bits = True
    if arguments.against is not None:
        record = json.loads(arguments.against.read_text(encoding="utf-8"))
        before = record["figures"]["runs"]
        with_bits = all(record["machine"][key] == machine()[key] for key in SAME_MACHINE)
        if not with_bits:
            print(f"{arguments.against} is from another processor or torch: digests alone are compared")
    found = list(differences(before, runs, with_bits)) if before else []
    found += list(broken_restarts(runs))
    rows = []
    for name, run in runs.items():
        is_compared = name in before or name.endswith(", restart")
        verdict = "no" if any(line.startswith(f"{name}: ") for line in found) else "yes" if is_compared else "-"
        seconds = f"{run['seconds']:.0f}"
        digest, loss = run["steps"][-1][1:]
        rows.append((name, len(run["steps"]), digest, loss, run["tensors"], run["hash"][:16], seconds, verdict))
    print_table(("run", "steps", "last digest", "last loss", "tensors", "their hash", "seconds", "equal"), rows)
    print("\n".join(found) or ("all runs are equal" if before else "nothing to compare with"))
    write_json(arguments.json, "same_runs", {"tree": commit_of(arguments.tree.resolve()), "runs": runs})
    sys.exit(1 if found else 0)


def measure(source: Path, names: Sequence[str]) -> dict[str, Any]:
    """Steps, as [number, digest, bits of the loss], and hashes of each run in a checkout."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(source, Path(folder))
        write_clips(tree.folder / "clips")
        for table in ("clips", "stories"):
            tree.longtake("data", "probe", f"clips/{table}.csv", "-o", f"clips/{table}.parquet")
        for name in names:
            start = time.perf_counter()
            figures[name] = train(tree, name, RUNS[name])
            figures[name]["seconds"] = round(time.perf_counter() - start, 1)
            print(f"{commit_of(tree.source)} {name}: {figures[name]['seconds']:.0f} s", file=sys.stderr, flush=True)
        tree.close()
    return figures


def train(tree: Tree, name: str, run: Run) -> dict[str, Any]:
    """Train one run and read what it left behind."""
    config = _write_config(tree, name, run)
    options = []
    if run.store:
        tree.longtake("data", "encode", config, "-o", "store", "--shard-mb", "0.1")
        options = ["--dataset.latents", "store"]
    if run.restart is None:
        tree.longtake("train", config, *options, processes=run.processes)
    else:
        tree.longtake("train", config, "--max_steps", str(run.restart), processes=run.processes)
        tree.longtake("train", config, "--resume", "auto", processes=run.processes)
    folder = tree.folder / "outputs" / name
    stages = [folder / stage for stage in run.stages] or [folder]
    steps = [step for stage in stages for step in _steps(stage)]
    if len(steps) != run.steps:
        raise SystemExit(f"{name}: expected {run.steps} steps in its metrics, got {len(steps)}")
    count, tensors = _tensors(_checkpoint(stages[-1]))
    figures = {"steps": steps, "tensors": count, "hash": tensors}
    if run.generate:
        prompt = PROMPTS.get(run.family, "a square of red")
        tree.longtake("generate", str(folder), "--prompt", prompt, "--save-dir", f"videos/{name}")
        figures["video"] = _video(tree.folder / "videos" / name)
    return figures


def differences(before: dict[str, Any], after: dict[str, Any], with_bits: bool = True) -> Iterator[str]:
    """A line for each run and kind of figure that differs."""
    for name, run in after.items():
        if name not in before:
            yield f"{name}: not in the other version"
            continue
        other = before[name]
        pairs = list(zip(other["steps"], run["steps"], strict=False))
        if len(other["steps"]) != len(run["steps"]):
            yield f"{name}: {len(other['steps'])} steps before, {len(run['steps'])} after"
        if steps := [ours[0] for theirs, ours in pairs if theirs[:2] != ours[:2]]:
            yield f"{name}: other samples in steps {steps}"
        if not with_bits:
            continue
        if steps := [ours[0] for theirs, ours in pairs if theirs[2] != ours[2]]:
            worst = max(_relative(theirs[2], ours[2]) for theirs, ours in pairs)
            yield f"{name}: other losses in steps {steps}, at most {worst:.1e} apart"
        if run["hash"] != other["hash"]:
            yield f"{name}: other tensors in the last checkpoint ({other['tensors']} before, {run['tensors']} after)"
        if run.get("video") != other.get("video"):
            yield f"{name}: another generated video"


def broken_restarts(runs: dict[str, Any]) -> Iterator[str]:
    """A line for each family in which the resumed run differs from the undisturbed one."""
    for family in FAMILIES:
        name = f"{family}, restart"
        if family in runs and name in runs:
            for key in ("steps", "hash"):
                if runs[family][key] != runs[name][key]:
                    yield f"{name}: other {'losses' if key == 'steps' else 'tensors'} than without a restart"


def _chosen(only: str | None) -> list[str]:
    if only is None:
        return list(RUNS)
    starts = [start.strip() for start in only.split(";")]
    return [name for name in RUNS if any(name == start or name.startswith(f"{start},") for start in starts)]


def _relative(before: str, after: str) -> float:
    first, second = float.fromhex(before), float.fromhex(after)
    return abs(first - second) / max(abs(first), abs(second), 1e-30)


def _write_config(tree: Tree, name: str, run: Run) -> str:
    """Write the file of a run on top of its family's. Dicts merge."""
    (tree.folder / "base.py").write_text(BASE, encoding="utf-8")
    (tree.folder / f"{run.family}.py").write_text(f'_base_ = "base.py"\n{FAMILIES[run.family]}', encoding="utf-8")
    text = f'_base_ = "{run.family}.py"\nexp_name = {name!r}\n{run.changes}\n'
    (tree.folder / "run.py").write_text(text, encoding="utf-8")
    if run.recompute is None:
        return "run.py"
    text = f'_base_ = "run.py"\n{recomputation(run.family, run.recompute, tree.names_level)}\n'
    (tree.folder / "recomputed.py").write_text(text, encoding="utf-8")
    return "recomputed.py"


def _steps(run: Path) -> list[list[Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [[line["step"], line["digest"], line["loss_bits"]] for line in map(json.loads, lines)]


def _checkpoint(run: Path) -> Path:
    """The last complete checkpoint in a folder."""
    complete = [marker.parent for marker in run.glob("*global_step*/COMPLETE")]
    if not complete:
        raise SystemExit(f"{run}: no complete checkpoint in it")
    return max(complete, key=lambda path: int(path.name.rpartition("global_step")[2]))


def _tensors(checkpoint: Path) -> tuple[int, str]:
    """Number of tensors in a checkpoint, and one hash of their names, types, shapes and bytes.

    Frozen weights, which are written once for all checkpoints, count too.
    """
    parts = []
    for file in (*checkpoint.rglob("*.safetensors"), *checkpoint.parent.glob("frozen/**/*.safetensors")):
        content = file.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        header.pop("__metadata__", None)
        for name, facts in header.items():
            start, end = (8 + size + offset for offset in facts["data_offsets"])
            digest = hashlib.sha256(content[start:end]).hexdigest()
            parts.append(f"{name} {facts['dtype']} {facts['shape']} {digest}")
    return len(parts), hashlib.sha256("\n".join(sorted(parts)).encode()).hexdigest()


def _video(folder: Path) -> str:
    """Hash of the frames of all videos in a folder."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.mp4")):
        with av.open(str(path)) as video:
            for frame in video.decode(video=0):
                digest.update(frame.to_ndarray(format="rgb24").tobytes())
    return digest.hexdigest()


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


if __name__ == "__main__":
    main()
