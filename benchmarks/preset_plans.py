"""Do two versions of Longtake forecast the same? Memory and seconds of every entry of every preset, by `longtake plan`.

python benchmarks/preset_plans.py --before ../old                  this checkout against another
python benchmarks/preset_plans.py --json FILE                      record this checkout (or --tree ../other)
python benchmarks/preset_plans.py --against FILE --limit 0.05      compare with a record
python benchmarks/preset_plans.py --only opensora_v2/              presets whose names start so

Each preset that trains is planned on the GPUs that its forecast is for. Entries more than `--limit` apart in bytes or
seconds are listed with the level of recomputation in either version; exit status 1 where there are any.
`results/preset_plans.json` is the record of its commit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from machine import commit_of, gib, print_table, write_json
from same_runs import HERE, CommandError, Tree

from longtake.presets import FOLDER, preset_gpus, presets

DEFAULT_GPUS = 8, "h200"
LIMIT = 0.05
POLICY = ("remat", "remat_budget", "recompute")  # keys of a plan about recomputation


def main() -> None:
    """Plan, compare, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=HERE, help="root of the checkout; default: this one")
    parser.add_argument("--before", type=Path, help="root of another checkout, planned and compared with")
    parser.add_argument("--against", type=Path, help="a record of another version to compare with")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"relative difference to report; default: {LIMIT}")
    parser.add_argument("--only", default="", help="presets whose names start so")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    names = [name for name in _preset_names() if name.startswith(arguments.only)]
    if not names:
        parser.error(f"--only {arguments.only}: no preset starts so; `longtake config presets` lists them")
    trees = [arguments.tree] if arguments.before is None else [arguments.tree, arguments.before]
    with ThreadPoolExecutor() as pool:  # each tree has a process of its own
        plans, *others = pool.map(partial(measure, names=names), trees)
    write_json(arguments.json, "preset_plans", {"tree": commit_of(arguments.tree.resolve()), "plans": plans})
    before = others[0] if others else {}
    if arguments.against is not None:
        before = json.loads(arguments.against.read_text(encoding="utf-8"))["figures"]["plans"]
    print_table(("preset", "GPUs", "entries", "most GiB", "most seconds"), [_row(*item) for item in plans.items()])
    if before:
        sys.exit(_report(before, plans, arguments.limit))


def measure(source: Path, names: Sequence[str]) -> dict[str, Any]:
    """Plans of presets in a checkout; of one that is refused, the reason."""
    plans: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(source, Path(folder))
        for name in names:
            gpus, kind = preset_gpus(str(FOLDER / f"{name}.py")) or DEFAULT_GPUS
            options = ("--gpus", str(gpus), "--gpu", kind, "--dataset.data-path", "clips.parquet")
            file = tree.folder / "plan.json"
            file.unlink(missing_ok=True)
            try:
                tree.longtake("plan", name, *options, "--json", str(file))
            except CommandError as error:  # exit status 2 also means that it does not fit
                if not file.exists():
                    plans[name] = {"refused": error.output.strip().splitlines()[-1]}
                    continue
            plan = json.loads(file.read_text(encoding="utf-8"))
            plans[name] = {"gpus": gpus, "gpu": kind, "policy": _policy(plan["layout"]), "entries": {}}
            for entry, facts in plan["buckets"].items():
                plans[name]["entries"][entry] = {
                    "batch_size": facts["batch_size"],
                    "bytes": facts["bytes"]["total"],
                    "seconds": facts["seconds"]["total"],
                    "policy": _policy(facts),
                }
            print(f"{commit_of(tree.source)} {name}: {len(plan['buckets'])} entries", file=sys.stderr, flush=True)
        tree.close()
    return plans


def differences(before: dict[str, Any], after: dict[str, Any], limit: float) -> Iterator[tuple[str, ...]]:
    """A row for each entry that is further apart than `limit`, and for presets that one version alone can plan."""
    for name, plan in after.items():
        other = before.get(name, {"refused": "unknown"})
        if "refused" in plan or "refused" in other:
            if plan.get("refused") != other.get("refused"):
                yield name, "-", "-", other.get("refused", "planned"), plan.get("refused", "planned"), "-", "-"
            continue
        for entry in other["entries"].keys() ^ plan["entries"].keys():
            yield name, entry, "in one version alone", "-", "-", "-", "-"
        for entry in other["entries"].keys() & plan["entries"].keys():
            first, second = other["entries"][entry], plan["entries"][entry]
            ratios = [second[key] / first[key] for key in ("bytes", "seconds")]
            if max(abs(ratio - 1) for ratio in ratios) <= limit and first["batch_size"] == second["batch_size"]:
                continue
            policies = [level(whole["policy"] | one["policy"]) for one, whole in ((first, other), (second, plan))]
            memory = " → ".join(gib(one["bytes"]) for one in (first, second))
            seconds = " → ".join(f"{one['seconds']:.3g}" for one in (first, second))
            yield name, entry, f"{ratios[0]:.3f} {ratios[1]:.3f}", memory, seconds, *policies


def level(policy: dict[str, Any]) -> str:
    """Name of a level of recomputation, in either version's words; budgets of the older one as they are."""
    if "recompute" in policy:
        return str(policy["recompute"])
    if not any(policy.get("remat", ())):
        return "none"
    budget = policy.get("remat_budget", "?")
    return {"inputs": "full", "attention": "selective"}.get(str(budget), f"budget {json.dumps(budget)}")


def _report(before: dict[str, Any], after: dict[str, Any], limit: float) -> int:
    """Print the differences. Returns the exit status."""
    rows = sorted(differences(before, after, limit))
    if not rows:
        print(f"no entry is more than {limit:.0%} apart")
        return 0
    print_table(("preset", "entry", "ratios", "GiB", "seconds", "policy before", "policy after"), rows)
    return 1


def _row(name: str, plan: dict[str, Any]) -> tuple[str, ...]:
    if "refused" in plan:
        return name, "-", "-", "-", "-"
    entries = plan["entries"].values()
    most = [max(entry[key] for entry in entries) for key in ("bytes", "seconds")]
    return name, f"{plan['gpus']} x {plan['gpu']}", str(len(entries)), gib(most[0]), f"{most[1]:.3g}"


def _preset_names() -> list[str]:
    return [str(one.path.relative_to(FOLDER).with_suffix("")) for one in presets() if one.kind == "train"]


def _policy(facts: dict[str, Any]) -> dict[str, Any]:
    return {key: facts[key] for key in POLICY if facts.get(key) is not None}


if __name__ == "__main__":
    main()
