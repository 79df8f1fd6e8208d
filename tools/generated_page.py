"""Pages that programs write: write them, or check that they are what would be written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def write_or_check(page: Path, make: Callable[[str], str], description: str) -> None:
    """The command line of a program that makes `page`; `make` turns its present text into the one that it should have.

    With `--check` nothing is written, and the exit status is 1 where the two differ.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    is_check = parser.parse_args().check
    written = page.read_text(encoding="utf-8") if page.exists() else ""
    wanted = make(written)
    if not is_check:
        page.write_text(wanted, encoding="utf-8")
    elif written != wanted:
        sys.exit(f"docs/{page.name}: out of date; run python tools/{Path(sys.argv[0]).name}")
