"""Where the files that an old command line names are now: run files, and weights."""

from __future__ import annotations

from pathlib import Path

from longtake.contracts import UserError
from longtake.dialects.tiny_weights import CHECK, LEFT_OUT, NOT_THERE, is_missing, is_own_checkpoint
from longtake.dialects.translation import Say
from longtake.presets import FOLDER, OPENSORA_V1_2, below_opensora_v1_2, opensora_v1_2_preset

_FAMILY = "opensora_v1_2"
PICKLES = (".pt", ".pth")
SEARCHED = ("train/stage2", 12.0)  # the preset whose table has that of misc/bs.py, and the seconds that it asks for
_TABLE = "write it into a file of your own, whose _base_ is opensora_v1_2/stage1: "
_ELSEWHERE = {
    "train/demo_360p": _TABLE + 'bucket_config = {"_delete_": True, "360p": {102: (1.0, 1)}}, condition_config = None',
    "train/demo_480p": _TABLE + 'bucket_config = {"_delete_": True, "480p": {51: (0.5, 5)}}, condition_config = None',
    "train/adapt": "the preset opensora_v1_2/adapt has the steps from PixArt-Sigma on",
    "train/stage1_feat": "make a store by `longtake data encode RUN -o FOLDER`, give it as dataset.latents",
    **dict.fromkeys(("misc/feat", "misc/extract"), "`longtake data encode RUN -o FOLDER` stores latents and texts"),
    "misc/bs": "`longtake plan RUN --target-step-seconds 12 --probe`, or scripts/misc/search_bs.py, finds batch sizes",
    "misc/eval_loss": "`validation` in a run file makes videos while it trains",
}

_OTHERWISE = {  # where the page of a published file says something else
    "lambda_3": ", which warms up over 1,000 steps as its published file does; Lambda's page says 400",
}


def run_file(run: str, verb: str, say: Say) -> str:
    """Return the file that RUN means, as it is where it exists, else the preset of Open-Sora's name. Raises
    `UserError` for one that has no counterpart."""
    path = Path(run)
    below = below_opensora_v1_2(path)
    if path.exists() or below is None or path.suffix != ".py":
        return run
    if verb == "plan" and below == "misc/bs.py":
        new = FOLDER / _FAMILY / f"{SEARCHED[0]}.py"
    elif (new := opensora_v1_2_preset(path)) is None:
        fix = _ELSEWHERE.get(below.removesuffix(".py"))
        kind = "inference/" if verb == "generate" else ("train/", "lambda/")
        known = ", ".join(f"{name}.py" for name in OPENSORA_V1_2 if name.startswith(kind))
        raise UserError(
            f"{run}: has no counterpart here; {fix}" if fix else f"{run}: does not exist; there are {known}"
        )
    say(f"{run}: read as the preset {_FAMILY}/{new.stem}{_OTHERWISE.get(new.stem, '')}")
    return str(new)


def weights_keys(place: str) -> dict[str, object]:
    """What `--ckpt-path` says: the weights as they were trained, unless it names the averaged ones' file."""
    keys: dict[str, object] = {"model.from_pretrained": place}
    if Path(place).suffix in PICKLES:  # PixArt-Sigma among them, which lacks much of the model
        keys["model.strict_load"] = False
    elif is_own_checkpoint(place):
        keys["model.from_part"] = "model"
    elif (Path(place).expanduser() / "model").is_dir():  # a checkpoint of Open-Sora, or as much as was copied of one
        keys["model.from_pretrained"] = str(Path(place) / "model")
    return keys


def weights_flags(place: str, tiny: bool, say: Say) -> list[str]:
    """Return the flags of `weights_keys`; with `--tiny` those of a tiny run's weights only. Raises `UserError` for a
    path that is not there."""
    if tiny and is_missing(place):
        raise UserError(f"--ckpt-path {place}: {NOT_THERE}; {CHECK}")
    if tiny and not is_own_checkpoint(place):
        say(f"--ckpt-path {place}: {LEFT_OUT}")
        return []
    return [f"--{key}={value!r}" for key, value in weights_keys(place).items()]
