"""Measure how far the tests' numerical bounds are from their errors on processors of several kinds.

python tools/margins.py                      every setting by itself and together: about half an hour on one core
python tools/margins.py --quick              this processor, and one with AVX2 alone
python tools/margins.py tests/models         these files, folders or tests (FILE::NAME) only
python tools/margins.py --json FILE          also write the results, after each setting

Instruction sets are limited in PyTorch, oneDNN and MKL. For each comparison with a tolerance
(`torch.testing.assert_close`, `torch.allclose`, `numpy.testing.assert_allclose`, `pytest.approx`,
`tests.precision.within`) the margin is bound / error. Prints the tests with a margin below 4 and those that fail, and
exits with 1 if there is one.

An error that is the same under all settings, with a bound of more than a thousandth of the values compared, is not a
rounding error: the size of a sample, or what a model of memory leaves out. Such comparisons are counted and pass.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.machine import write_json  # noqa: E402
from tests.precision import MARGIN  # noqa: E402

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2", "LONGTAKE_MARGINS_BF16": "0"}
LEAST = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
SETTINGS: dict[str, dict[str, str]] = {
    "native": {},
    "least": LEAST | {"LONGTAKE_MARGINS_BF16": "0"},
    "avx2": AVX2,
    **{f"{key}={values[key]}": {key: values[key]} for values in (AVX2, LEAST) for key in LEAST},
}
QUICK = ("native", "avx2")
WIDE = 30.0  # a margin beyond which a comparison is not repeated under the other settings
FIXED = 0.05  # relative change of an error between settings below which it is not one of rounding
COARSE = 1e-3  # share of the values compared that a bound of something else than rounding exceeds
_COMPARES = re.compile(r"assert_close|allclose\(|approx\(|\bwithin\(")


@dataclass
class Comparison:
    """A comparison of a test: its line, the bound as a share of the values compared, and by setting the largest share
    of the bound that an error used, with this error and bound."""

    test: str
    site: str
    share: float
    used: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)

    @property
    def margin(self) -> float:
        largest = max(self.used.values())
        return 1 / largest if largest else float("inf")

    @property
    def is_fixed(self) -> bool:
        """Not a rounding error."""
        least, most = min(self.errors.values()), max(self.errors.values())
        return len(self.errors) > 1 and self.share >= COARSE and most - least <= FIXED * most

    def content(self) -> dict[str, Any]:
        setting = max(self.used, key=self.used.__getitem__)
        facts = {"margin": round(self.margin, 2), "setting": setting}
        facts |= {"error": self.errors[setting], "bound": self.bounds[setting]}
        return {"test": self.test, "site": self.site, **facts}


Comparisons = dict[tuple[str, str], Comparison]  # by test and line


def main() -> int:
    arguments = parse_arguments()
    comparisons: Comparisons = {}
    failed: dict[str, list[str]] = {}
    paths = arguments.paths or ["tests"]
    tests: Iterable[str] = [path for path in paths if "::" in path]
    tests = [*tests, *map(str, comparing_files(path for path in paths if "::" not in path))]
    for name in QUICK if arguments.quick else SETTINGS:
        with tempfile.TemporaryDirectory() as folder:
            failed[name] = run_tests(sorted(tests), SETTINGS[name], Path(folder), arguments)
            read_records(Path(folder), name, comparisons)
        count = sum(name in comparison.used for comparison in comparisons.values())
        print(f"{name}: {count} comparisons", flush=True)
        if name == "native":
            tests = {comparison.test for comparison in comparisons.values() if comparison.margin < WIDE}
        write_json(arguments.json, "margins", summarize(comparisons, failed), program="tools/margins.py")
    return report(comparisons, failed)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files, folders or names of tests")
    parser.add_argument("--quick", action="store_true", help=f"only the settings {' and '.join(QUICK)}")
    parser.add_argument("--slow", action="store_true", help="also the tests marked slow")
    parser.add_argument("--workers", type=int, default=0, help="processes that run tests")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def comparing_files(paths: Iterable[str]) -> list[Path]:
    """The test files that compare with a tolerance, themselves or by a module of `tests` that they import."""
    files = [file for path in paths for file in sorted([Path(path), *Path(path).rglob("*.py")]) if file.is_file()]
    return [file for file in files if file.name.startswith("test_") and compares(file.resolve())]


@cache
def compares(file: Path) -> bool:
    text = file.read_text(encoding="utf-8")
    if _COMPARES.search(text):
        return file.name != "precision.py"
    modules = (node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom))
    parts = (ROOT.joinpath(*module.split(".")).with_suffix(".py") for module in modules if module is not None)
    return any(part.is_relative_to(ROOT / "tests") and part.is_file() and compares(part) for part in parts)


def run_tests(
    tests: Sequence[str], setting: Mapping[str, str], folder: Path, arguments: argparse.Namespace
) -> list[str]:
    """Run tests, whose processes record their comparisons in `folder`; return those that fail."""
    if not tests:
        return []
    listed, results = folder / "tests.txt", folder / "results.xml"
    listed.write_text("\n".join(tests), encoding="utf-8")
    marks = "not weekly and not cluster" if arguments.slow else "not slow and not weekly and not cluster"
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-m", marks]
    command += ["-n", str(arguments.workers), "--dist", "loadfile", "--junitxml", str(results), f"@{listed}"]
    variables = (
        os.environ | setting | {"LONGTAKE_MARGINS": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    )
    done = subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1, 5):  # 5: all of them are deselected
        sys.exit(f"pytest ended with exit code {done.returncode}:\n{done.stdout[-4000:]}")
    cases = ElementTree.parse(results).getroot().iter("testcase")
    failing = (case for case in cases if {child.tag for child in case} & {"failure", "error"})
    return [f"{case.get('classname')}::{case.get('name')}" for case in failing]


def read_records(folder: Path, setting: str, comparisons: Comparisons) -> None:
    """Add what processes recorded under a setting."""
    for file in folder.glob("*.jsonl"):
        for text in file.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            new = Comparison(line["test"], line["site"], line["share"])
            comparison = comparisons.setdefault((line["test"], line["site"]), new)
            if line["used"] >= comparison.used.get(setting, 0.0):
                comparison.used[setting] = line["used"]
                comparison.errors[setting], comparison.bounds[setting] = line["error"], line["bound"]


def summarize(comparisons: Comparisons, failed: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The results so far, under the settings of `failed`."""
    rounding = [comparison for comparison in comparisons.values() if not comparison.is_fixed]
    rounding.sort(key=lambda comparison: comparison.margin)
    return {
        "settings": {name: SETTINGS[name] for name in failed},
        "tests": len({comparison.test for comparison in comparisons.values()}),
        "comparisons": len(comparisons),
        "fixed": len(comparisons) - len(rounding),
        "failed": failed,
        "below": [comparison.content() for comparison in rounding if comparison.margin < MARGIN],
        "least": [comparison.content() for comparison in rounding[:50] if comparison.margin < float("inf")],
    }


def report(comparisons: Comparisons, failed: Mapping[str, Sequence[str]]) -> int:
    """Print what is below the margin; return the exit code."""
    summary = summarize(comparisons, failed)
    for name, tests in failed.items():
        for test in tests:
            print(f"fails under {name}: {test}")
    for line in summary["below"]:
        print("{margin:6.2f}  error {error:.3g}, bound {bound:.3g}  {setting}  {test}  {site}".format(**line))
    print("{comparisons} comparisons in {tests} tests, {fixed} of them not of rounding".format(**summary))
    return int(bool(summary["below"] or any(failed.values())))


if __name__ == "__main__":
    sys.exit(main())
