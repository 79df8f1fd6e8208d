"""Count code: lines by package, files that a clip visits on its way to the loss, files that name a setting.

python tools/count_code.py                             this checkout
python tools/count_code.py --tree ../old --json FILE   another one
python tools/count_code.py --setting grad_ckpt_budget --setting recompute

Lines are those with code: no blank lines, comments or docstrings, and no presets. Visited files are those of which a
function runs while a tiny model of each family (`benchmarks/same_runs_table.py`) makes its first training step on the
CPU, from the fetch of its clips to the gradient of the loss. A setting counts as named where the word is in a file.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from machine import commit_of, print_table, write_json  # noqa: E402
from same_runs_table import BASE, FAMILIES, write_clips  # noqa: E402

NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
)
SETTINGS = ("grad_ckpt_budget", "recompute", "compile_dynamic")
# Run in a process of the tree: record the files of functions that are called during the first step.
TRACE = """
import json, sys, threading
from longtake.cli import main
from longtake.train import loop

files, is_on = set(), [False]
forward_backward = loop.Trainer.forward_backward

def record(frame, event, argument):
    if is_on[0] and event == "call":
        files.add(frame.f_code.co_filename)

def traced(self, *arguments):
    is_on[0] = self.clock.global_step == 0
    sums = forward_backward(self, *arguments)
    is_on[0] = False
    return sums

loop.Trainer.forward_backward = traced
threading.setprofile(record)
sys.setprofile(record)
try:
    main(sys.argv[2:])
finally:
    sys.setprofile(None)
    with open(sys.argv[1], "w") as file:
        json.dump(sorted(files), file)
"""


def main() -> None:
    """Count, print tables, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="root of the checkout; default: this one")
    parser.add_argument("--setting", action="append", help=f"a setting to look for; default: {', '.join(SETTINGS)}")
    parser.add_argument("--no-visits", action="store_true", help="skip the training steps")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    package = arguments.tree.resolve() / "longtake"
    if not package.is_dir():
        parser.error(f"--tree {arguments.tree}: expected the root of a checkout, with a folder longtake")
    figures: dict[str, Any] = {"tree": commit_of(package.parent), "lines": lines_by_package(package)}
    print_table(("package", "code lines"), [*figures["lines"].items(), ("total", sum(figures["lines"].values()))])
    figures["settings"] = {name: files_with(package, name) for name in arguments.setting or SETTINGS}
    print()
    print_table(("setting", "files"), [(name, len(files)) for name, files in figures["settings"].items()])
    if not arguments.no_visits:
        figures["visits"] = visited_files(package)
        print()
        print_table(
            ("model", "files that a clip visits"), [(name, len(files)) for name, files in figures["visits"].items()]
        )
    write_json(arguments.json, "count_code", figures, "tools/count_code.py")


def lines_by_package(package: Path) -> dict[str, int]:
    """Code lines of each package, most first; modules next to packages are counted as `(modules)`."""
    lines: Counter[str] = Counter()
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        if parts[0] != "presets":
            lines[parts[0] if len(parts) > 1 else "(modules)"] += code_lines(path.read_text(encoding="utf-8"))
    return dict(lines.most_common())


def code_lines(text: str) -> int:
    """Lines of a file with a token that is not a comment or docstring."""
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code.difference(*_docstrings(text)))


def _docstrings(text: str) -> Iterator[range]:
    """Lines of each docstring."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            yield range(docstring.lineno, docstring.end_lineno + 1)


def files_with(package: Path, setting: str) -> list[str]:
    """Files in which the name of a setting is a word, presets too."""
    word = re.compile(rf"\b{re.escape(setting)}\b")
    files = (path for path in sorted(package.rglob("*")) if path.suffix in (".py", ".toml"))
    return [str(path.relative_to(package)) for path in files if word.search(path.read_text(encoding="utf-8"))]


def visited_files(package: Path) -> dict[str, list[str]]:
    """Files of which a function runs in the first step of each family."""
    visits = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_clips(folder / "clips")
        (folder / "base.py").write_text(f"{BASE}max_steps = 1\n", encoding="utf-8")
        for table in ("clips", "stories"):
            probe = ("data", "probe", f"clips/{table}.csv", "-o", f"clips/{table}.parquet")
            _python(package, folder, "-m", "longtake", *probe)
        for family, text in FAMILIES.items():
            config = f'_base_ = "base.py"\nexp_name = {family!r}\n{text}'
            (folder / f"{family}.py").write_text(config, encoding="utf-8")
            _python(package, folder, "-c", TRACE, "files.json", "train", f"{family}.py")
            files = map(Path, json.loads((folder / "files.json").read_text(encoding="utf-8")))
            visits[family] = [str(file.relative_to(package)) for file in files if file.is_relative_to(package)]
    return visits


def _python(package: Path, folder: Path, *arguments: str) -> None:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(package.parent), "CUDA_VISIBLE_DEVICES": ""}
    command: Sequence[str] = (sys.executable, "-P", *arguments)
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments[:1] + arguments[2:])} ended with {done.returncode}:\n{done.stderr[-3000:]}")


if __name__ == "__main__":
    main()
