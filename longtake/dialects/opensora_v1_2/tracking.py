"""Where a run of Open-Sora 1.2's training writes, and whether Weights & Biases gets its curves."""

from __future__ import annotations

from collections.abc import Sequence

from longtake.contracts import UserError
from longtake.dialects.opensora_v1_2.shared import is_old
from longtake.dialects.translation import Translation
from longtake.track.config import TrackingConfig
from longtake.track.trackers import require_wandb_login
from longtake.train.config import NUMBER

_STDIT3 = "STDiT3-XL/2"
NO_LOGIN = "no login to Weights & Biases here, so nothing is sent there; `wandb login` makes one"
_LAMBDA = {"outputs": "outputs_speedrun", "wandb": True}  # as Lambda's published files have it


def translate_places(work: Translation, preset: str | None, flags: Sequence[str]) -> None:
    """`exp_name`, `outputs` and `wandb` as the program names and tracks its runs. preset: in place of a published
    file; flags: of the command line, without which the file is translated too."""
    if preset is None and not is_old(work):
        return
    if preset is not None or work.get("exp_name") is None:
        kind = str(work.value("model.type"))
        work.put("exp_name", f"{NUMBER}-{(kind if '/' in kind else _STDIT3).replace('/', '-')}", work.tree)
    if preset is not None and preset.startswith("lambda_"):
        for name, value in _LAMBDA.items():
            work.put(name, value, work.tree)
    node = work.get("wandb")
    if node is None or work.value("wandb") is not True or any(flag.startswith("--wandb") for flag in flags):
        return
    if not has_login():
        work.note("wandb", node, NO_LOGIN)
        work.put("wandb", False, node)


def has_login() -> bool:
    """Return True where Weights & Biases can be used on this machine."""
    try:
        require_wandb_login(TrackingConfig(wandb=True))
    except UserError:
        return False
    return True
