"""What only a look at the disk can tell: checkpoints and tables that Open-Sora has left behind."""

from __future__ import annotations

import glob
from contextlib import suppress
from pathlib import Path

from longtake.config.tree import Leaf
from longtake.contracts import UserError
from longtake.data.tables.rows import open_rows
from longtake.dialects.translation import Translation

_STATE_FILE = "running_states.json"  # in every checkpoint of Open-Sora
_DOWNLOADS = Path("ckpts")  # where Open-Sora's pages have weights downloaded to
_ROWS = 8  # of a table that are looked at


def place_weights(work: Translation) -> None:
    """`model.from_pretrained` and `load` that mean a checkpoint of Open-Sora: its weights are below it, in `model`."""
    node = work.get("model.from_pretrained")
    if isinstance(node, Leaf) and (folder := _old_checkpoint(node.value)) is not None:
        work.note("model.from_pretrained", node, f"its weights are in {folder / 'model'}")
        work.put("model.from_pretrained", str(folder / "model"), node)
    node = work.get("load")
    if isinstance(node, Leaf) and (folder := _old_checkpoint(node.value)) is not None:
        rule = "is a checkpoint of Open-Sora, whose optimizer and data states are of another program"
        work.refuse("load", node, rule, f"start from its weights: --model.from_pretrained {folder / 'model'}")
        work.take("load")


def place_encoders(work: Translation) -> None:
    """Text encoders that were downloaded together with Open-Sora's weights are taken from there."""
    for name in ("t5.from_pretrained", "clip.from_pretrained"):
        node = work.get(name)
        if not isinstance(node, Leaf) or not isinstance(node.value, str) or Path(node.value).exists():
            continue
        folder = _DOWNLOADS / node.value
        if not Path(node.value).is_absolute() and folder.is_dir():
            work.note(name, node, f"found in {folder}")
            work.put(name, str(folder), node)


def _old_checkpoint(spec: object) -> Path | None:
    """Return the checkpoint of Open-Sora that a path or glob means; the last in the order of their steps."""
    if not isinstance(spec, str):
        return None
    found = [Path(path) for path in glob.glob(spec) if (Path(path) / _STATE_FILE).is_file()]
    return max(found, key=lambda path: (len(path.name), path.name)) if found else None


def place_clips(work: Translation) -> None:
    """Relative paths in a table start from the working directory there, from the table's folder here."""
    node = work.get("dataset.data_path")
    if not isinstance(node, Leaf) or not isinstance(node.value, str) or work.value("dataset.root") is not None:
        return
    table = Path(node.value)
    if not table.is_file() or table.parent.resolve() == Path.cwd():
        return
    paths = _first_paths(table)
    relative = [path for path in paths if not path.is_absolute() and "://" not in str(path)]
    if any(path.exists() for path in relative) and not any((table.parent / path).exists() for path in relative):
        work.note("dataset.data_path", node, f"its paths start from the working directory: dataset.root = {Path.cwd()}")
        work.put("dataset.root", str(Path.cwd()), node)


def _first_paths(table: Path) -> list[Path]:
    """Column `path` of the first rows; nothing where the file is no table, which is said where training opens it."""
    with suppress(UserError, KeyError):
        for batch in open_rows(table, as_text=True).batches(["path"]):
            return [Path(path) for path in batch.column(0)[:_ROWS].to_pylist() if path]
    return []
