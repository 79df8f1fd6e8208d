"""How verbs print a table: framed by colour on a terminal, aligned plain lines in files and pipes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def print_table(
    console: Console, head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = ()
) -> None:
    """Prints rows under their heads; columns named in `numbers` stand at the right.

    On a terminal a long cell is folded, so nothing is lost; elsewhere each row is one line, for grep and awk.
    """
    if not console.is_terminal:
        widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]
        for line in (head, *rows):
            cells = zip(head, line, widths, strict=True)
            print("  ".join(c.rjust(w) if name in numbers else c.ljust(w) for name, c, w in cells).rstrip())
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in head:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
