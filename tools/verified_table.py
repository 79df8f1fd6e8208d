"""Write the table of docs/verify.md of what has been verified, from the records in benchmarks/results/verified/.

python tools/verified_table.py            write the table
python tools/verified_table.py --check    exit 1 if the table is not what would be written
"""

from __future__ import annotations

from pathlib import Path

from generated_page import write_or_check

from longtake.verification.report import read_verified, verified_table

ROOT = Path(__file__).parent.parent
RECORDS, PAGE = ROOT / "benchmarks" / "results" / "verified", ROOT / "docs" / "verify.md"
BEGIN, END = "<!-- verified: begin -->\n", "<!-- verified: end -->\n"


def with_table(page: str, records: Path) -> str:
    """The page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{verified_table(read_verified(records))}\n{END}{after}"


if __name__ == "__main__":
    write_or_check(PAGE, lambda text: with_table(text, RECORDS), __doc__)
