"""Conversions that TTT-Video's training and sampling share: defaults, the preset of the stage, the model's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longtake.config.load import load_config
from longtake.config.tree import Branch, plain
from longtake.dialects.table import KeyRow, apply_rows, keys_of
from longtake.dialects.tiny_weights import LEFT_OUT, leave_out_tiny_weights
from longtake.dialects.translation import Translation
from longtake.dialects.ttt_video.keys import LENGTHS, MIXERS, MODEL
from longtake.presets import find_preset

_SIZES: Mapping[str, Mapping[str, int]] = {
    "5B": {},
    "debug": {"num_attention_heads": 8, "num_layers": 6, "text_embed_dim": 512},
}


def check_keys(work: Translation, rows: Sequence[KeyRow]) -> None:
    """Lay the defaults beneath what is written. Report unknown keys, and values of another kind than the default."""
    known = sorted(keys_of(rows))
    for section in dict.fromkeys(key.partition(".")[0] for key in known):
        node = work.get(section)
        if section == "model" or not isinstance(node, Branch):  # of `model`, other keys are Longtake's
            continue
        for key, item in node.items.items():
            name = f"{section}.{str(key).replace('-', '_')}"
            if name not in known:
                fix = ", ".join(one.partition(".")[2] for one in known if one.startswith(f"{section}."))
                work.refuse(name, item, "unknown key", f"choose {fix}")
                work.take(name)
    for row in rows:
        _check_kind(work, row)
        work.lay(row.key, row.default)


def _check_kind(work: Translation, row: KeyRow) -> None:
    """Make a whole number of 8.0; take out a text that is empty, and a value of another kind."""
    if (node := work.get(row.key)) is None:
        return
    value = plain(node)
    if value in (None, "") and row.default is None:
        work.take(row.key)
    elif (kind := _expected_kind(value, row.default)) is not None:
        work.refuse(
            row.key, node, f"must be {kind}", "" if row.default is None else f"write for example {row.default!r}"
        )
        work.take(row.key)
    elif isinstance(row.default, int) and not isinstance(row.default, bool):
        work.put(row.key, int(value), node)


def _expected_kind(value: Any, default: Any) -> str | None:
    """Return the kind of value that a key must have, if this one is of another."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int):
        return None if is_number and float(value).is_integer() else "a whole number"
    if isinstance(default, float):
        return None if is_number else "a number"
    return None if isinstance(value, (str, list, tuple)) else "text"


def drop_keys(work: Translation, rows: Sequence[KeyRow]) -> None:
    """Take out the keys that code has read."""
    for row in rows:
        if row.ours != row.key:
            work.take(row.key)


def lay_preset(work: Translation, kind: str, tiny: bool) -> Mapping[str, Any]:
    """Lay Longtake's preset of the same stage beneath all that is written; return its keys."""
    length, mixer = work.value("model.video_length"), work.value("model.ssm_layer")
    stage = (length if length in LENGTHS else LENGTHS[0]).removesuffix("ec")
    between = "/" if kind == "train" else "_"
    file = find_preset(f"ttt_video/{mixer if mixer in MIXERS[:2] else MIXERS[0]}{between}{stage}", kind)
    assert file is not None, "there is one for each"
    tree = load_config(file, [], dict[str, Any]).tree
    for name, value in tree.items():
        is_of_tiny = tiny and (
            name in ("ae", "t5") or (work.get("bucket_config") is not None and name == "bucket_config")
        )
        if name != "exp_name" and not is_of_tiny:
            work.lay(name, value)
    return tree


def translate_model(work: Translation, tiny: bool) -> None:
    """`model`, `checkpoint.init_state_dir`, `parallelism`, `remat` -> `model`, `ae`, `parallel`."""
    weights, size = work.place("checkpoint.init_state_dir"), work.place("model.size")
    folder = work.value("checkpoint.init_state_dir")
    if (name := choice(work, "model.size", _SIZES)) is not None and not tiny:
        for key, value in _SIZES[name].items():
            work.put(f"model.{key}", value, size)
        if name == "debug":
            work.put("t5.dim", _SIZES[name]["text_embed_dim"], size)
    apply_rows(work, MODEL)
    if folder is None and not work.is_flag("model.from_pretrained"):
        work.take("model.from_pretrained")
    if tiny:
        leave_out_tiny_weights(work)
    if folder is not None:
        if not Path(folder).expanduser().exists():
            work.refuse("checkpoint.init_state_dir", weights, "does not exist", "give the folder of a checkpoint")
        elif tiny:
            work.note("checkpoint.init_state_dir", weights, LEFT_OUT)
        else:
            work.put("model.from_pretrained", folder, weights)


def choice(work: Translation, key: str, known: Any) -> Any:
    """Return a key's value; None, and a fault, for one that is unknown."""
    value = work.value(key)
    if isinstance(value, str) and value in known:
        return value
    work.refuse(key, work.place(key), f"must be one of {', '.join(map(str, known))}")
    return None
