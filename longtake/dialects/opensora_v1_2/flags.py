"""The flags of Open-Sora 1.2's scripts, a fixed list there, as Longtake's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from longtake.contracts import UserError
from longtake.dialects.command_line import as_flag, refuse_stray, split
from longtake.dialects.opensora_v1_2.keys import flags_of
from longtake.dialects.opensora_v1_2.places import weights_flags, weights_keys
from longtake.dialects.table import arities_of, refuse_bare
from longtake.dialects.tiny_weights import is_own_checkpoint
from longtake.dialects.translation import Say

_TRUE = ("true", "yes", "t", "y", "1")
_FALSE = ("false", "no", "f", "n", "0")


def read_flags(arguments: Sequence[str], verb: str) -> tuple[str | None, dict[str, list[str]], list[str]]:
    """RUN; the script's flags, by name, with their arguments; and all else. Raises `UserError` for a flag with too few
    arguments."""
    rows = flags_of(verb)
    arities = dict(zip(rows, arities_of(rows.values()).values(), strict=True))
    given, groups = split(arguments, arities, lambda name: name.replace("_", "-"))
    refuse_bare(given, rows)
    words = [group for group in groups if not group[0].startswith("-")]
    alone = [name.replace("-", "_") for name, row in rows.items() if row.takes == "nothing"]
    refuse_stray(arguments, [group[0] for group in words[1:]], alone)
    run = next(iter(words), None)
    return run[0] if run else None, given, [word for group in groups if group is not run for word in group]


def training_flags(given: Mapping[str, list[str]], tiny: bool, say: Say) -> list[str]:
    """Longtake's flags for those of `scripts/train.py`. Raises `UserError` for what they cannot say here."""
    flags: list[str] = []
    rows = flags_of("train")
    for name, values in given.items():
        row = rows[name]
        if row.note:
            say(f"--{name}: {row.note}")
        elif row.ours:
            flags.append(as_flag(row.ours, values, row.takes == "text"))
    if "wandb" in given:
        flags.append(f"--wandb={truth('wandb', given['wandb'][0])}")
        if not truth("wandb", given["wandb"][0]):
            say(f"--wandb {given['wandb'][0]}: is False, where there any text is True")
    if "load" in given:
        flags += _load(given, say)
    elif "start-from-scratch" in given:
        say("--start-from-scratch: does nothing without --load, as there")
    if "ckpt-path" in given and "load" in given:
        say("--ckpt-path: --load brings the weights, as there")
    elif "ckpt-path" in given:
        flags += weights_flags(given["ckpt-path"][0], tiny, say)
    return flags


def typed_names(given: Mapping[str, list[str]]) -> dict[str, str]:
    """Longtake's keys for flags of `scripts/train.py`, with the flags that the user typed."""
    rows = flags_of("train")
    names = {rows[name].ours: f"--{name}" for name in given if rows[name].ours and not rows[name].note}
    return names | ({"model.from_pretrained": "--ckpt-path"} if "ckpt-path" in given else {})


def _load(given: Mapping[str, list[str]], say: Say) -> list[str]:
    """`--load P`: all of the checkpoint; with `--start-from-scratch` the data begin again."""
    (place,) = given["load"]
    flags = [f"--load={place!r}"]
    if is_own_checkpoint(place):  # which has what does not train too, whatever the run file starts from
        flags += [f"--{key}={value!r}" for key, value in weights_keys(place).items()]
    if "start-from-scratch" in given:
        say("--start-from-scratch: start_epoch = 0, start_step = 0: the data begin again, all else goes on")
        flags += ["--start_epoch=0", "--start_step=0"]
    return flags


def truth(name: str, text: str) -> bool:
    """Return the truth value of a flag's text. Raises `UserError` for another text."""
    if text.lower() not in (*_TRUE, *_FALSE):
        raise UserError(f"--{name} {text}: must be True or False")
    return text.lower() in _TRUE
