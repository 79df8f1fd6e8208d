"""The flags of Open-Sora 1.2's scripts, which are a fixed list there, as Longtake's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from longtake.contracts import UserError
from longtake.dialects.command_line import MANY, as_flag, split
from longtake.dialects.opensora_v1_2.places import weights_flags, weights_keys
from longtake.dialects.tiny_weights import is_own_checkpoint
from longtake.dialects.translation import Say

SCRIPTS = {"train": "scripts/train.py", "generate": "scripts/inference.py", "plan": "scripts/misc/search_bs.py"}
TRUE, FALSE = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")
_SHARED = dict.fromkeys(
    (
        *("seed", "ckpt-path", "batch-size", "outputs", "flash-attn", "layernorm-kernel", "resolution", "data-path"),
        "dtype",
    ),
    1,
)
_GENERATE = (
    *(
        "save-dir",
        "sample-name",
        "start-index",
        "end-index",
        "num-sample",
        "prompt-path",
        "prompt-generator",
        "verbose",
    ),
    *("num-frames", "fps", "save-fps", "frame-interval", "aspect-ratio", "watermark", "num-sampling-steps"),
    *("cfg-scale", "loop", "condition-frame-length", "aes", "flow", "camera-motion", "llm-refine"),
)
FLAGS: Mapping[str, Mapping[str, int]] = {  # verb -> flag -> number of its arguments
    "train": {
        **_SHARED,
        **dict.fromkeys(("lr", "wandb", "load", "warmup-steps"), 1),
        **dict.fromkeys(("start-from-scratch", "record-time"), 0),
    },
    "generate": {
        **_SHARED,
        **dict.fromkeys(_GENERATE, 1),
        **dict.fromkeys(("reference-path", "mask-strategy", "prompt"), MANY),
        "image-size": 2,
        "prompt-as-path": 0,
    },
    "plan": _SHARED,
}
KERNELS = "attention and norms take their fastest path by themselves"
TEXTS = frozenset({"data-path", "outputs", "dtype"})
MOVED = {
    "seed": "seed",
    "outputs": "outputs",
    "data-path": "dataset.data_path",
    "dtype": "dtype",
    "lr": "lr",
    "warmup-steps": "warmup_steps",
}
LEFT = {
    "batch-size": "bucket_config says the batch size of each bucket",
    "resolution": "bucket_config says the resolutions; there only inference reads it",
    "flash-attn": KERNELS,
    "layernorm-kernel": KERNELS,
    "record-time": "the log has times of steps and of the loader in every line",
}


def read_flags(words: Sequence[str], verb: str) -> tuple[str | None, dict[str, list[str]], list[str]]:
    """RUN; the script's flags, by name, with their arguments; and all else. Raises `UserError` for a flag with too few
    arguments."""
    given, groups = split(words, FLAGS[verb], lambda name: name.replace("_", "-"))
    for name, values in given.items():
        if len(values) < (least := min(FLAGS[verb][name], 2) if FLAGS[verb][name] != MANY else 1):
            wanted = "two" if least == 2 else "a value"
            raise UserError(f"--{name}: {len(values)} values; write {wanted} behind it")
    run = next((group for group in groups if not group[0].startswith("-")), None)
    return run[0] if run else None, given, [word for group in groups if group is not run for word in group]


def training_flags(given: Mapping[str, list[str]], tiny: bool, say: Say) -> list[str]:
    """Longtake's flags for those of `scripts/train.py`. Raises `UserError` for what they cannot say here."""
    flags: list[str] = []
    for name, values in given.items():
        if name in LEFT:
            say(f"--{name}: {LEFT[name]}")
        elif name in MOVED:
            flags.append(as_flag(MOVED[name], values, name in TEXTS))
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
    """Whether a word is a yes. Raises `UserError` for what is neither."""
    if text.lower() not in (*TRUE, *FALSE):
        raise UserError(f"--{name} {text}: must be True or False")
    return text.lower() in TRUE
