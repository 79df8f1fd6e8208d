"""Writes into every preset, and into four pages of docs/, what `longtake plan` says of it.

python tools/preset_forecasts.py                   write the presets and the pages
python tools/preset_forecasts.py --check [FILE]    exit 1 if one, or FILE, does not say what the command says

A preset has lines of the form `#   longtake plan FILE ...`; the lines `#     ...` behind one are the forecast: the
first two lines of the plan, and of its table the fullest entry of each resolution, some columns left out. In a page a
table between two marks has a line for each of `MACHINES`, of `CARDS`, of `STAGES`, or of `WAN`.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from longtake import presets
from longtake.cli import main as longtake
from longtake.train.config import RunWithoutTable
from longtake.train.run_file import read_run

ROOT = Path(__file__).parent.parent
PRESETS = sorted(presets.FOLDER.glob("*/train/**/*.py"))
COMMAND, FORECAST = "#   longtake plan ", "#     "
LEFT_OUT = ("TxHxW", "sequence", "encode GiB", "encode s", "MFU", "suggested", "samples")
LONGEST = 112  # characters of a line of the forecast
MARKS = "<!-- plans -->\n", "<!-- end of plans -->\n"
MACHINES = (  # preset, GPUs, kind
    ("image", 8, "h200"),
    ("stage1", 8, "h200"),
    ("stage1", 8, "h100"),
    ("stage2", 8, "h200"),
    ("stage2", 32, "h200"),
    ("finetune", 8, "h100"),
    ("finetune_1gpu", 1, "h100"),
    ("lora", 1, "h100"),
    ("lora_24gb", 1, "4090"),
)
CARDS = (  # preset, GiB of one GPU, kind, options
    ("lora_2b", 12, "4090", {"ae.use_tiling": True}),
    ("lora_2b", 8, "4090", {"ae.use_tiling": True, "lora.base": "int8", "model.grad_ckpt_buffer_size": 4 << 30}),
    ("lora_5b", 16, "4090", {"ae.use_tiling": True, "model.grad_ckpt_buffer_size": 4 << 30}),
    ("lora_5b", 24, "4090", {}),
    ("full_2b", 24, "4090", {"master_dtype": "bf16", "optim.states": "8bit", "ae.use_tiling": True}),
    ("full_5b", 80, "h100", {}),
)
STAGES = tuple(
    f"{mixer}/{length}" for mixer in ("ttt_mlp", "ttt_linear") for length in ("3s", "9s", "18s", "30s", "63s")
)
_LONG_14B = {"lora.base": "int8", "model.grad_ckpt_buffer_size": 16 << 30, "bucket_config.480p.81": (1.0, 1)}
WAN = (  # preset, GPUs, kind, options
    ("lora_1_3b", 1, "3060", {}),
    ("lora_5b", 1, "4090", {}),
    ("lora_14b", 1, "4090", {}),
    ("lora_14b", 1, "l40s", _LONG_14B),
    ("lora_a14b_high", 1, "4090", {}),
    ("lora_a14b_low", 1, "4090", {}),
    ("lora_a14b", 1, "l40s", {}),
    ("lora_i2v_a14b_high", 1, "4090", {}),
    ("lora_i2v_a14b_low", 1, "4090", {}),
    ("full_1_3b", 1, "h100", {}),
    ("full_14b", 8, "h100", {}),
)
_NODES, _NODE = 8, 8  # on which the peers that a stage needs are looked for
_CARD_SIZE = {"480x720": {49: (1.0, 1)}}


def with_forecasts(text: str) -> str:
    """The text of a preset with fresh forecasts."""
    lines: list[str] = []
    stale = False  # whether the lines of an earlier forecast may come
    for line in text.splitlines():
        if stale and line.startswith(FORECAST):
            continue
        lines.append(line)
        stale = line.startswith(COMMAND)
        if stale:
            lines += [f"{FORECAST}{said}" for said in forecast(shlex.split(line.removeprefix("#   longtake ")))]
    return "\n".join(lines) + "\n"


def forecast(words: list[str]) -> list[str]:
    """What the plan's command line says, shortened. Exits with its complaint where it fails."""
    said, complaint = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(complaint):
        try:
            longtake(words)
        except SystemExit as end:
            status = end.code
    if status and "fits" not in said.getvalue():
        sys.exit(f"longtake {shlex.join(words)}: {complaint.getvalue()}")
    lines = [line for line in said.getvalue().splitlines() if not line.startswith("this machine: ")]
    first, second, *rest = lines
    table = [re.split(r"\s{2,}", line) for line in rest if re.match(r"bucket |\S+/\d+f ", line)]
    return [*_folded(first), *_folded(second), *_aligned(_fullest(table))]


def between_marks(text: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A page with a fresh table."""
    before, _, rest = text.partition(MARKS[0])
    lines = [head, ["---"] * len(head), *rows]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return before + MARKS[0] + table + MARKS[1] + rest.partition(MARKS[1])[2]


def with_machines(text: str) -> str:
    """docs/parallel.md."""
    head = ("preset", "GPUs", "degrees", "fullest entry", "GiB a GPU", "of", "mean step", "")
    return between_marks(text, head, [_machine(*machine) for machine in MACHINES])


def with_cards(text: str) -> str:
    """docs/cogvideox_fun.md."""
    head = ("preset", "options", "GPU", "GiB", "GiB while encoding", "step")
    return between_marks(text, head, [_card(*card) for card in CARDS])


def with_stages(text: str) -> str:
    """docs/ttt_video.md."""
    head = ("preset", "as published", "GiB on h100", "of the host", "step", "80 GB", "141 GB")
    return between_marks(text, head, [_stage(stage) for stage in STAGES])


def with_wan(text: str) -> str:
    """docs/wan.md."""
    head = ("preset", "options", "GPUs", "fullest entry", "GiB a GPU", "of the host", "step")
    return between_marks(text, head, [_wan(*row) for row in WAN])


PAGES = {
    ROOT / "docs" / "parallel.md": with_machines,
    ROOT / "docs" / "cogvideox_fun.md": with_cards,
    ROOT / "docs" / "ttt_video.md": with_stages,
    ROOT / "docs" / "wan.md": with_wan,
}


def _plan(words: Sequence[str]) -> dict[str, Any]:
    """The plan's JSON."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        forecast(["plan", *words, "--dataset.data-path", "clips.parquet", "--json", str(file)])
        return json.loads(file.read_text(encoding="utf-8"))


def _machine(preset: str, gpus: int, gpu: str) -> tuple[str, ...]:
    plan = _plan([f"opensora_v2/{preset}", "--gpus", str(gpus), "--gpu", gpu])
    axes = ("replicate", "shard", "sequence", "tensor")
    degrees = [f"{name} {degree}" for name in axes if (degree := plan["layout"][name]) > 1]
    name, fullest = max(plan["buckets"].items(), key=lambda item: item[1]["bytes"]["total"])
    remedy = "fits" if plan["fits"] else f"does not fit; {plan['remedies'][0]['change']} would"
    gib = [f"{size / 2**30:.1f}" for size in (fullest["bytes"]["total"], plan["usable_bytes"])]
    step = f"{plan['stage']['step_seconds']:.2f} s"
    return f"`{preset}`", f"{gpus} x {gpu}", ", ".join(degrees), name, *gib, step, remedy


def _wan(preset: str, gpus: int, gpu: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    plan = _plan([f"wan/{preset}", "--gpus", str(gpus), "--gpu", gpu, *words])
    if not plan["fits"]:
        sys.exit(f"wan/{preset}: does not fit {gpu}; {plan['remedies'][0]['change']} would")
    name, fullest = max(plan["buckets"].items(), key=lambda item: item[1]["bytes"]["total"])
    gib = [f"{size / 2**30:.1f}" for size in (fullest["bytes"]["total"], plan["host_bytes"])]
    said = ", ".join(f"`{key} = {value!r}`" for key, value in options.items())
    return f"`wan/{preset}`", said, f"{gpus} x {gpu}", name, *gib, f"{plan['stage']['step_seconds']:.1f} s"


def _card(preset: str, memory: int, gpu: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    flags = {"sizes": None, "bucket_config": _CARD_SIZE, **options}
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    plan = _plan([f"cogvideox_fun/{preset}", "--gpus", "1", "--gpu", gpu, "--memory-gib", str(memory), *words])
    (found,) = plan["buckets"].values()
    if not plan["fits"]:
        sys.exit(f"cogvideox_fun/{preset}: does not fit {memory} GiB; {plan['remedies'][0]['change']} would")
    gib = [f"{size / 2**30:.1f}" for size in (found["bytes"]["total"], found["encoding_bytes"])]
    said = ", ".join(f"`{key} = {value!r}`" for key, value in options.items())
    return f"`{preset}`", said, f"`--gpu {gpu} --memory-gib {memory}`", *gib, f"{plan['stage']['step_seconds']:.1f} s"


def _stage(preset: str) -> tuple[str, ...]:
    """A stage on its published mesh, and the fewest sequence peers with which it fits nodes of eight GPUs."""
    config = read_run(str(presets.FOLDER / "ttt_video" / "train" / f"{preset}.py"), [], schema=RunWithoutTable).value
    degrees = [(name, getattr(config.parallel, name)) for name in ("replicate", "shard", "tensor")]
    gpus = math.prod(degree for _, degree in degrees)
    published = _plan([f"ttt_video/{preset}", "--gpus", str(gpus), "--gpu", "h100"])
    (found,) = published["buckets"].values()
    said = ", ".join(f"{name} {degree}" for name, degree in degrees if degree > 1)
    fitting = [_fewest_peers(preset, kind) for kind in ("h100", "h200")]
    gib = (f"{found['bytes']['total'] / 2**30:.1f}", f"{published['host_bytes'] / 2**30:.0f}")
    return f"`{preset}`", said, *gib, f"{published['stage']['step_seconds']:.1f} s", *fitting


def _fewest_peers(preset: str, gpu: str) -> str:
    for peers in (1, 2, 4, 8):
        mesh = {"replicate": _NODES, "shard": _NODE // peers, "sequence": peers, "tensor": 1}
        words = [word for axis, degree in mesh.items() for word in (f"--parallel.{axis}", str(degree))]
        plan = _plan([f"ttt_video/{preset}", "--gpus", str(_NODES * _NODE), "--gpu", gpu, *words])
        if plan["fits"]:
            (found,) = plan["buckets"].values()
            return f"`sequence = {peers}`: {found['bytes']['total'] / 2**30:.1f}"
    return "8 do not do"


def _fullest(table: list[list[str]]) -> list[list[str]]:
    """The head of the table and the fullest row of each resolution, some columns left out."""
    head, *rows = table
    place = head.index("GiB a GPU")
    of_resolution: dict[str, list[str]] = {}
    for row in rows:
        name = row[0].split("/")[0]
        if name not in of_resolution or _number(row[place]) > _number(of_resolution[name][place]):
            of_resolution[name] = row
    kept = [i for i, name in enumerate(head) if name not in LEFT_OUT]
    return [[row[i] for i in kept] for row in (head, *of_resolution.values())]


def _number(cell: str) -> float:
    return float(cell.split()[0])  # a `!` may follow


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]


def _folded(line: str) -> list[str]:
    """A long line in pieces, broken behind commas."""
    pieces = [""]
    for part in re.split(r"(?<=, )", line):
        if len(pieces[-1] + part) > LONGEST:
            pieces.append("  ")
        pieces[-1] += part
    return [piece.rstrip() for piece in pieces]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a preset is out of date")
    parser.add_argument("files", nargs="*", type=Path, help="presets or pages; without any, all of them")
    args = parser.parse_args()
    check = args.check
    stale = []
    for path in map(Path.resolve, args.files or (*PRESETS, *PAGES)):
        text = path.read_text(encoding="utf-8")
        if (fresh := PAGES.get(path, with_forecasts)(text)) != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(fresh, encoding="utf-8")
    if check and stale:
        sys.exit(f"{', '.join(stale)}: not what the plan says; run python tools/preset_forecasts.py")


if __name__ == "__main__":
    main()
