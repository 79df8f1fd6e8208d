"""Prints the GPU programs and the mean power of each node, as Lambda's tutorial has it: python nvtop_all.py nodes.txt

`longtake nodes nodes.txt` shows more, and again and again.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from longtake.cli.console import EXIT_MISTAKE, complain
from longtake.cli.nodes import connect
from longtake.contracts import UserError

HEAD = ("", "Node", "GPU Processes", "Mean Power Consumption (W)")


def main(hostfile: Path) -> None:
    """Prints the table; a node that does not answer, or whose GPUs do not, has "Failed" in its line."""
    rows: list[tuple[str, ...]] = [HEAD]
    with closing(connect(hostfile)) as nodes:
        answers = nodes.ask_all({"do": "look", "workdir": "/"})
        for number, answer in answers.items():
            cells = ("Failed", "Failed")
            if answer.get("gpus"):
                power = [gpu["power_watts"] or 0.0 for gpu in answer["gpus"]]
                cells = (str(len(answer["programs"])), f"{sum(power) / len(power):.5f}")
            rows.append((str(number), nodes.labels[number], *cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        print("  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])]))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("nvtop_all.py: give one file of hosts: python nvtop_all.py nodes.txt")
    try:
        main(Path(sys.argv[1]))
    except (UserError, OSError) as error:
        complain(f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error))
        sys.exit(EXIT_MISTAKE)
