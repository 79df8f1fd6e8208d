"""Conversions of Open-Sora 1.2's search for batch sizes, `scripts/misc/search_bs.py`: flags, and files such as `bs.py`.

There a table has `frames: (guess, range)`, and searches each batch in that range; here the forecast sets the range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longtake.config.load import load_config
from longtake.config.tree import Branch, plain
from longtake.contracts import UserError
from longtake.dialects.command_line import as_flag
from longtake.dialects.opensora_v1_2.keys import flags_of
from longtake.dialects.opensora_v1_2.places import SEARCHED
from longtake.dialects.translation import Say, Translation
from longtake.system.tiny import world_size
from longtake.track.devices import gpu_named

_TARGET = "--target-step-seconds"
_NOTES = {
    "ckpt-path": "a step takes the same time with any weights; none are read",
    "outputs": "the result is printed; nothing is written",
}


def search_flags(
    file: str, given: Mapping[str, list[str]], others: Sequence[str], is_published: bool, tiny: bool, say: Say
) -> list[str]:
    """Return the flags of `longtake plan` for those of the script and the keys of its file, which has the goal. Raises
    `UserError` where it has none."""
    flags = ["--probe"]
    rows = flags_of("plan")
    for name, (value, *_) in given.items():
        row = rows[name]
        note = _NOTES.get(name, row.note)
        if note and name != "resolution":
            say(f"--{name}: {note}")
        elif tiny and name == "resolution":
            say(f"--resolution {value}: --tiny has resolutions of its own")
        else:
            flags.append(as_flag(row.ours or name, [value], row.takes == "text"))
    named = {word.partition("=")[0] for word in others}
    if _TARGET not in named:
        flags += [_TARGET, f"{SEARCHED[1] if is_published else _goal(file):g}"]
    if "--gpus" not in named:
        flags += ["--gpus", str(world_size())]
    return flags if "--gpu" in named else flags + _kind_here()


def _goal(file: str) -> float:
    """`base_step_time` of a file. Raises `UserError` where that is no number of seconds."""
    tree: dict[str, Any] = load_config(file, [], dict[str, Any]).tree
    seconds = tree.get("base_step_time")
    if isinstance(seconds, (int, float)) and not isinstance(seconds, bool):
        return float(seconds)
    found = f"base_step_time = {seconds!r}" if seconds is not None else "base_step_time is missing"
    fix = f"write base_step_time = 12, in seconds, or {_TARGET} 12"
    if "base" in tree:
        fix += f"; `longtake plan` prints the time of a step of base = {tree['base']!r}"
    raise UserError(f"{file}: {found}; {fix}")


def _kind_here() -> list[str]:
    """Return the kind of this machine's GPU; nothing where it has none that is known."""
    import torch

    if not torch.cuda.is_available():
        return []
    try:
        return ["--gpu", gpu_named(torch.cuda.get_device_name()).name]
    except UserError:
        return []


def translate_search(work: Translation, tiny: bool) -> None:
    """`resolution`, the only one of the table that is searched; guesses; and the goal, which is a flag here."""
    if (base := work.take("base")) is not None:
        work.note("base", base, "does nothing beside base_step_time, as there")
    work.take("base_step_time")
    only, table = work.take("resolution"), work.get("bucket_config")
    if not isinstance(table, Branch):
        return
    if only is not None and plain(only) is not None:
        if (name := str(plain(only))) not in (known := [str(key) for key in table.items]):
            work.refuse("resolution", only, "is not in bucket_config", f"choose {', '.join(known)}")
            return
        for other in known:
            if other != name:
                work.take(f"bucket_config.{other}")
    for name, lengths in plain(table).items():
        for frames, entry in lengths.items() if isinstance(lengths, Mapping) else ():
            node = work.get(f"bucket_config.{name}.{frames}")
            if node is not None and isinstance(entry, (tuple, list)) and [type(part) for part in entry] == [int, int]:
                work.say("bucket_config: ranges of guesses are not needed; the forecast sets where a search begins")
                work.put(f"bucket_config.{name}.{frames}", (1.0, 1 if tiny else max(1, entry[0])), node)
