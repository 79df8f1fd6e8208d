"""Fills in and filters tables of clips, in Open-Sora 1.2's words: each step is a command of `longtake data`.

python -m tools.datasets.datautil OpenVid-1M.csv --info --remove-empty-caption --fmin 1

Every step writes a table beside the first input, whose name has the old suffix of the step; --output names the last.
"""

from __future__ import annotations

import argparse
import sys
from glob import glob
from pathlib import Path

from longtake.cli.app import run
from longtake.cli.console import complain

# flag -> (suffix, condition), in the order in which they are done there; {} is the flag's number.
CONDITIONS = {
    "remove_empty_caption": ("_noempty", "text IS NOT NULL AND length(trim(text)) > 0"),
    "remove_empty_path": ("_noemptypath", "path IS NOT NULL AND length(trim(path)) > 0"),
    "fmin": ("_fmin{}", "num_frames >= {}"),
    "fmax": ("_fmax{}", "num_frames <= {}"),
    "fpsmax": ("_fpsmax{}", "fps IS NULL OR fps <= {}"),
    "hwmax": ("_hwmax{}", "resolution <= {}"),
    "aesmin": ("_aesmin{}", "aes >= {}"),
    "matchmin": ("_matchmin{}", "match >= {}"),
    "flowmin": ("_flowmin{}", "flow >= {}"),
    "img_only": ("_img", "num_frames = 1"),
    "vid_only": ("_vid", "num_frames > 1"),
}
_WHOLE, _FLOATS = ("fmin", "fmax", "hwmax"), ("fpsmax", "aesmin", "matchmin", "flowmin")
_ORDER = "the order of a pass is made by the run's seed"
_TABLE = "change the table by a program of your own; Longtake's commands filter, merge and probe"
_PATHS = "paths are read relative to the table's folder or dataset.root"
# What has no counterpart: flag -> what to do in its place.
REFUSED = {
    **dict.fromkeys(("shuffle", "seed", "sort", "sort_ascending"), _ORDER),
    **dict.fromkeys(
        ("difference", "intersection", "load_caption", "append_text", "update_text", "train_column"), _TABLE
    ),
    **dict.fromkeys(("refine_llm_caption", "score_to_text", "merge_cmotion", "lang", "path_subset", "ext"), _TABLE),
    **dict.fromkeys(("relpath", "abspath", "path_to_id"), _PATHS),
    **dict.fromkeys(("filesize", "fsmax"), "move files that are too large away, and --info leaves their rows out"),
    "clean_caption": "captions are cleaned where they are read, in training as in generation",
    "count_num_token": "a run cuts captions at t5.max_length",
    "remove_url": "captions are cleaned where they are read",
    "remove_path_duplication": "write `longtake data merge TABLE TABLE -o FILE --repeated first`",
    "remove_text_duplication": _TABLE,
    "shard": "write `longtake data split TABLE`",
    "head": "write `longtake data split TABLE`, or --dataset.mix for a share of it",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "input", nargs="+", help="tables with a column path, or patterns such as 'part*.csv'; several become one"
    )
    parser.add_argument("--output", type=Path, help="the last table; its suffix says the format")
    parser.add_argument("--format", default="csv", choices=("csv", "parquet"), help="of the tables that are written")
    parser.add_argument("--num-workers", type=int, default=0, help="processes that read files")
    parser.add_argument("--root", help="folder that relative paths start from; default: the table's")
    for name in ("--info", "--video-info", "--decode-check", "--disable-parallel"):
        parser.add_argument(name, action="store_true")
    for name in CONDITIONS:
        number = int if name in _WHOLE else float if name in _FLOATS else None
        kind = {"action": "store_true"} if number is None else {"type": number}
        parser.add_argument(f"--{name.replace('_', '-')}", **kind)
    for name in REFUSED:
        parser.add_argument(f"--{name.replace('_', '-')}", nargs="*", help=argparse.SUPPRESS)
    return parser


def steps(words: argparse.Namespace) -> list[list[str]]:
    """The commands of `longtake data`, each with the table that it writes at its end, behind `-o`."""
    tables = [name for word in words.input for name in sorted(glob(word)) or [word]]
    first = Path(tables[0])
    stem, found = "+".join(Path(name).stem for name in tables), list[list[str]]()

    def add(verb: str, suffix: str, *more: str) -> None:
        nonlocal stem, tables
        stem += suffix
        target = str(first.with_name(f"{stem}.{words.format}"))
        found.append(["data", verb, *tables, *more, "-o", target])
        tables = [target]

    if len(tables) > 1:
        add("merge", "")
    if words.info or words.video_info or words.decode_check:
        more = ["--root", words.root] if words.root else []
        more += ["--decode-check"] * words.decode_check
        workers = 0 if words.disable_parallel else words.num_workers
        suffix = "_vinfo" if words.video_info else "_info"
        add("probe", suffix, "--workers", str(workers), *more)
    for name, (suffix, condition) in CONDITIONS.items():
        value = getattr(words, name)
        if value is not None and value is not False:
            add("filter", suffix.format(value), "--where", condition.format(value))
    if found and words.output is not None:
        found[-1][-1] = str(words.output)
    return found


def main(arguments: list[str]) -> int:
    """Runs all steps and returns the exit status of the first that fails."""
    words = _parser().parse_args(arguments)
    for name, fix in REFUSED.items():
        if getattr(words, name) is not None:
            complain(f"--{name.replace('_', '-')}: is not here; {fix}")
            return 2
    todo = steps(words)
    if not todo:
        complain("datautil: there is nothing to do; write --info, or a filter such as --fmin 1")
        return 2
    for command in todo:
        if code := run(command):
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
