"""Do the tests find mistakes? Plants faults of many kinds, one at a time, and runs the tests that should find them.

python benchmarks/faults.py --json FILE              all faults, in a copy of this checkout; those in FILE are left out
python benchmarks/faults.py --tree ../other --only "the average" --json FILE     some, by words of their names
python benchmarks/faults.py --wide --json FILE       those that FILE has as missed, by all tests of their packages
python benchmarks/faults.py --check                  every old text stands once in the tree; nothing is run

`fault_table.py` lists the faults. Nothing in the tree is changed: it is copied, a fault is planted in the copy, and
pytest runs there until the first test fails, `slow` ones too, on one thread. A fault counts as found when that test
passes again without it. A test that runs into the time limit, or a process of it that hangs, counts as a failure.
`--wide` plants all that were missed at once and runs whole folders; what fails there is run with each of them alone.
`results/faults_before.json` holds what the tests of commit 9127a13 found. Takes about an hour on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fault_table import FAULTS, Fault, check, place_of
from machine import commit_of, print_table, write_json

HERE = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", ".venv", "outputs", "build", "*.egg-info")
TEST_SECONDS, RUN_SECONDS = 300, 7200
PASSED, NOTHING_RUN, NO_ANSWER = 0, 5, (3, 4)  # exit codes of pytest; all others are failures
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", re.MULTILINE)


class Copy:
    """A tree that faults can be planted in."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self.folder = folder / "tree"
        shutil.copytree(tree, self.folder, ignore=LEFT_OUT)

    @contextmanager
    def with_faults(self, faults: Sequence[Fault]) -> Iterator[None]:
        """Inside, the faults are planted."""
        before: dict[Path, str] = {}
        try:
            for edit in (edit for fault in faults for edit in fault.edits):
                path = place_of(self.folder, edit)
                text = path.read_text(encoding="utf-8")
                before.setdefault(path, text)
                self._write(path, text.replace(edit.old, edit.new))
            yield
        finally:
            for path, text in before.items():
                self._write(path, text)

    def failures(self, *words: str) -> list[str]:
        """The tests that fail, or how pytest ended without a word of any."""
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not weekly", "-p", "no:cacheprovider", *words]
        command += ["-o", f"timeout={TEST_SECONDS}", "-rfE", "--tb=no"]
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.folder)}
        process = subprocess.Popen(
            command, cwd=self.folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return [f"no end after {RUN_SECONDS} s"]
        if (code := process.returncode) in NO_ANSWER:
            raise SystemExit(f"{' '.join(command)}\nended with {code}:\n{said[-4000:]}")
        if code in (PASSED, NOTHING_RUN):
            return []
        return _FAILED.findall(said) or [f"pytest ended with {code}"]

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()  # of a text as long and as old, to the second


def search(copy: Copy, fault: Fault, tests: Sequence[str]) -> dict[str, Any]:
    """Whether some tests find a fault, which of them first, and the seconds it took.

    A test that fails without the fault as well, as one with a time limit may on a busy machine, is left out.
    """
    begun = time.perf_counter()
    unsteady: list[str] = []
    while True:
        with copy.with_faults([fault]):
            found = copy.failures("-x", *tests, *(f"--deselect={test}" for test in unsteady))
        if not found or "::" not in found[0] or not copy.failures(found[0]):
            break
        unsteady.append(found[0])
    result = {"found": bool(found), "by": found[0] if found else None, "seconds": round(time.perf_counter() - begun, 1)}
    return result | ({"unsteady": unsteady} if unsteady else {})


def search_wide(copy: Copy, faults: Sequence[Fault]) -> dict[str, dict[str, Any]]:
    """As `search` for each of some faults, by all tests of the packages they lie in and of training, which brings
    everything together."""
    places = {place_of(copy.folder, edit) for fault in faults for edit in fault.edits}
    packages = {"train", *(path.relative_to(copy.folder / "longtake").parts[0] for path in places)}
    folders = [f"tests/{name}" for name in sorted(packages) if (copy.folder / "tests" / name).is_dir()]
    with copy.with_faults(faults):
        failed = copy.failures(*folders)
    if [test for test in failed if "::" not in test]:
        raise SystemExit(f"all missed faults at once: {failed[0]}; search fewer by --only")
    missed = {"found": False, "by": None, "seconds": 0.0}
    return {fault.name: search(copy, fault, failed) if failed else missed for fault in faults}


def chosen(words: Sequence[str]) -> Iterator[Fault]:
    """The faults that have one of some words in their names; all where there are none."""
    return (fault for fault in FAULTS if not words or any(word in fault.name for word in words))


def main() -> None:
    """Plants, searches, prints a table; exit status 1 where `--check` finds something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=HERE, help="root of the checkout; default: this one")
    parser.add_argument("--only", action="append", default=[], help="faults with these words in their names")
    parser.add_argument("--wide", action="store_true", help="search further for the faults that FILE has as missed")
    parser.add_argument("--check", action="store_true", help="whether every old text stands once in the tree")
    parser.add_argument("--json", type=Path, help="add the figures to this file, one fault after the other")
    arguments = parser.parse_args()
    tree = arguments.tree.resolve()
    if wrong := check(tree):
        print("\n".join(wrong))
        sys.exit(1)
    if arguments.check:
        return
    known: dict[str, Any] = {}
    if arguments.json is not None and arguments.json.is_file():
        known = json.loads(arguments.json.read_text(encoding="utf-8"))["figures"]["faults"]
    with tempfile.TemporaryDirectory() as place:
        copy = Copy(tree, Path(place))
        wanted = list(chosen(arguments.only))
        if arguments.wide:
            missed = [fault for fault in wanted if not known.get(fault.name, {"found": True})["found"]]
            for name, result in (search_wide(copy, missed) if missed else {}).items():
                known[name]["wide"] = result
        for fault in [] if arguments.wide else wanted:
            if fault.name not in known:
                result = known[fault.name] = search(copy, fault, fault.tests)
                said = "found " if result["found"] else "MISSED"
                print(f"{said} {result['seconds']:6.1f} s  {fault.name}", flush=True)
                write_json(arguments.json, "faults", _figures(tree, known))
    write_json(arguments.json, "faults", _figures(tree, known))
    rows = [(name, *_shown(result)) for name, result in known.items()]
    print_table(("fault", "found", "seconds", "by"), rows)


def _figures(tree: Path, results: dict[str, Any]) -> dict[str, Any]:
    found = sum(result["found"] for result in results.values())
    wide = sum(result.get("wide", result)["found"] for result in results.values())
    counts = {"planted": len(results), "found": wide, "found_by_the_tests_named": found}
    return {"tree": commit_of(tree), **counts, "faults": results}


def _shown(result: dict[str, Any]) -> tuple[str, str, str]:
    last = result.get("wide", result)
    found = "yes" if result["found"] else "wide" if last["found"] else "no"
    return found, f"{last['seconds']:.0f}", last["by"] or "-"


if __name__ == "__main__":
    main()
