"""Write the table of docs/verify.md of what has been verified, from the records in benchmarks/results/verified/.

python tools/verified_table.py            write the table
python tools/verified_table.py --check    exit 1 if the table is not what would be written
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from longtake.verification import read_verified, verified_table

ROOT = Path(__file__).parent.parent
RECORDS, PAGE = ROOT / "benchmarks" / "results" / "verified", ROOT / "docs" / "verify.md"
BEGIN, END = "<!-- verified: begin -->\n", "<!-- verified: end -->\n"


def with_table(page: str, records: Path) -> str:
    """The page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{verified_table(read_verified(records))}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    page = PAGE.read_text(encoding="utf-8")
    expected = with_table(page, RECORDS)
    if not parser.parse_args().check:
        PAGE.write_text(expected, encoding="utf-8")
        return 0
    if page != expected:
        print(f"{PAGE.name}: the table of verified presets is out of date; run {Path(__file__).name}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
