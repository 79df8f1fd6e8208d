"""Another system's names in errors: keys as the user typed them, and the nearest flag for a mistyped one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from longtake.config.faults import ConfigError, Fault
from longtake.config.overrides import NAME, key_path
from longtake.config.schema import forms_at

_CUTOFF = 0.75  # `--rnk` is `--rank`, and `--lora_rank` is neither `--rank` nor anything else of a script's


def restate(message: str, typed_names: Mapping[str, str]) -> str:
    """Return a message with Longtake's keys replaced by the names that the user typed.

    typed_names: `lora.targets` -> `--target_name`, or the name in a file.
    """
    for key, typed in typed_names.items():
        # `epochs` or `load` is a word of English too, unless it is written as a key
        pattern = rf"(?:--)?{re.escape(key)}" if "." in key else rf"(?:--{key}|{key}(?= =|:))"
        message = re.sub(rf"(?<![\w./-]){pattern}(?![\w/-]|\.\w)", typed, message)
        message = message.replace(f" ({typed})", "")
    return message


def refuse_typos(flags: Sequence[str], known: Collection[str], script: str, schema: Any) -> None:
    """Raise `ConfigError` that names, for each flag that is neither the script's nor Longtake's, the nearest of the
    script's. Flags that resemble none are left to the check of the config."""
    plain_names = {name.replace("-", "_"): name for name in known}
    faults = []
    for flag in flags:
        match = NAME.fullmatch(flag)
        path = key_path(match["name"]) if match else None
        if match is None or path is None or forms_at(schema, path):
            continue
        name = match["name"].replace("-", "_")
        meant = [
            *difflib.get_close_matches(name, plain_names, n=1, cutoff=_CUTOFF),
            *(one for one in plain_names if sorted(one) == sorted(name)),  # too short for the former: `--rl`
            *(one for one in plain_names if one.startswith(name)),  # argparse takes abbreviations
        ]
        if meant:
            fix = f"did you mean --{plain_names[meant[0]]}?"
            faults.append(Fault(f"--{match['name']}", "", f"is not a flag of {script}", fix))
    if faults:
        raise ConfigError(faults)
