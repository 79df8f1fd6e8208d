"""Conversions of Open-Sora 1.2's training files."""

from __future__ import annotations

from typing import Any

from longtake.config.tree import Node, plain
from longtake.dialects.opensora_v1_2.keys import TRAINING
from longtake.dialects.opensora_v1_2.shared import is_old, translate_parts
from longtake.dialects.table import apply_rows
from longtake.dialects.translation import Translation, recompute_fully, recompute_nothing, value_of

RATES = ("lr_schedule", "anneal_strategy", "cooldown_steps", "min_lr", "max_lr")
_KIND_NAMES = {"intepolate": "interpolate"}
_NOTHING = "identity"
# What a file that leaves them out means there, where that is not Longtake's default.
DEFAULTS = {"grad_clip": 0.0, "eps": 1e-8, "ema_decay": 0.9999, "lr": 1e-4, "log_every": 1, "initial_lr": 0.0}
_NAMED_AS = {"eps": "adam_eps"}
_DROPPED = 0.1  # share of texts, where model.class_dropout_prob does not say it
_CORNERS = 3  # points of a schedule that rises, falls and stays


def translate_training(work: Translation, tiny: bool) -> None:
    """Translate all keys of a training file."""
    old = is_old(work)
    apply_rows(work, TRAINING)
    translate_parts(work, old, tiny)
    _plugin(work)
    _masks(work)
    _recomputation(work)
    _rates(work)
    _start(work)
    if old:
        missing = {name: value for name, value in DEFAULTS.items() if work.get(name) is None}
        for name, value in {**missing, "dropout_ratio.t5": _DROPPED, "model.from_part": "model"}.items():
            work.lay(name, value)
        work.lay("parallel.zero", 2)
        named = [f"{_NAMED_AS.get(name, name)} {value:g}" for name, value in missing.items() if name != "initial_lr"]
        if named:
            work.say(f"not in the file, so as Open-Sora's defaults have it: {', '.join(named)}")


def _plugin(work: Translation) -> None:
    """`plugin`, `sp_size` -> `parallel`."""
    plugin, size = work.take("plugin"), work.take("sp_size")
    kind, degree = value_of(plugin), value_of(size) or 1
    if plugin is not None and kind not in ("zero2", "zero2-seq", None):
        work.refuse("plugin", plugin, "must be zero2 or zero2-seq", 'write "zero2"; parallel.* sets all else')
        return
    if plugin is not None and kind is not None:
        work.put("parallel.zero", 2, plugin)
    if size is None:
        return
    if degree != 1 and kind != "zero2-seq":
        work.refuse("sp_size", size, 'is for plugin = "zero2-seq"', "write that, or parallel = dict(sequence=...)")
    else:
        work.put("parallel.sequence", degree, size)


def _masks(work: Translation) -> None:
    """`mask_ratios` -> `condition_config`, with what is left for no mask."""
    if (node := work.take("mask_ratios")) is None:
        return
    ratios = value_of(node) or {}
    numbers = isinstance(ratios, dict) and all(isinstance(r, (int, float)) and 0 <= r <= 1 for r in ratios.values())
    if not numbers or (total := sum(r for kind, r in ratios.items() if kind != _NOTHING)) > 1 + 1e-9:
        work.refuse("mask_ratios", node, "must be shares by kind, together at most 1", "write {'image_head': 0.05}")
        return
    kinds = {_KIND_NAMES.get(kind, kind): r for kind, r in ratios.items() if r and kind != _NOTHING}
    there = work.get("condition_config")
    if there is not None and work.heights(there.origin) > work.heights(node.origin):
        return
    work.take("condition_config")
    if kinds:
        rest = round(1 - total, 12)
        work.put("condition_config", {**({_NOTHING: rest} if rest else {}), **kinds}, node)


def _recomputation(work: Translation) -> None:
    if (node := work.take("grad_checkpoint")) is None or not isinstance(plain(node), bool):
        if node is not None and plain(node) is not None:
            work.refuse("grad_checkpoint", node, "must be True or False")
        return
    depth = int(work.number("model.depth", 28))
    if not plain(node):
        recompute_nothing(work, node)
        return
    work.put("model.grad_ckpt_settings", (depth, depth), node)
    recompute_fully(work, node)


def _rates(work: Translation) -> None:
    """`lr_schedule` and its keys -> `optim.schedule`; flags of a rate or warm-up change that of a preset."""
    nodes = {name: work.take(name) for name in RATES}
    kind, warm = nodes["lr_schedule"], work.get("warmup_steps")
    if kind is None or plain(kind) is None:
        for name, node in nodes.items():
            if node is not None and plain(node) is not None and name != "lr_schedule":
                work.note(name, node, 'does nothing without lr_schedule = "1cycle", as there')
        _reshaped(work)
        return
    if plain(kind) != "1cycle":
        work.refuse("lr_schedule", kind, "must be 1cycle", "leave it out for a linear warm-up; optim.schedule has any")
        return
    if warm is None or plain(warm) is None:
        work.note("lr_schedule", kind, "does nothing without warmup_steps, as there: the rate is constant")
        return
    lr = work.number("lr", DEFAULTS["lr"])
    numbers: dict[str, Any] = {name: value_of(node) for name, node in nodes.items()}
    law = numbers["anneal_strategy"] or "cos"
    if law not in ("cos", "linear"):
        place = nodes["anneal_strategy"]
        assert place is not None
        work.refuse("anneal_strategy", place, "must be cos or linear")
        return
    if law == "linear":
        work.say("anneal_strategy: linear runs from point to point, where there it runs backwards")
    for name in ("min_lr", "max_lr", "cooldown_steps"):
        if isinstance(numbers[name], bool) or not isinstance(numbers[name], (int, float)):
            work.refuse(name, nodes[name] or kind, 'must be a number where lr_schedule is "1cycle"')
            return
    if isinstance(steps := plain(warm), bool) or not isinstance(steps, int) or steps < 0:
        work.refuse("warmup_steps", warm, "must be a whole number from 0")
        return
    _put_cycle(work, kind, (numbers["min_lr"], numbers["max_lr"], lr), steps, int(numbers["cooldown_steps"]), law)


def _put_cycle(
    work: Translation, node: Node, rates: tuple[float, float, float], warm: int, cool: int, law: str = "cos"
) -> None:
    """The rate rises for `warm` steps, falls for `cool`, and stays."""
    lowest, highest, last = rates
    shape = ("cosine",) if law == "cos" else ()
    work.take("warmup_steps")
    points = {0: (lowest, *shape), warm: (highest, *shape), warm + cool: (last,)}  # of one step the later counts
    work.put("optim.schedule", [(step, *rate) for step, rate in points.items()], node)


def _reshaped(work: Translation) -> None:
    """`--lr` and `--warmup-steps` where a schedule of three points lies below: its last rate, its first steps."""
    given = [node for name in ("lr", "warmup_steps") if work.is_flag(name) and (node := work.get(name)) is not None]
    points = work.value("optim.schedule")
    if not given or work.is_flag("optim.schedule") or not isinstance(points, (list, tuple)) or len(points) != _CORNERS:
        return
    (_, lowest, *_), (peak, highest, *_), (end, last) = points
    last = work.number("lr", last) if work.is_flag("lr") else last
    warm = int(work.number("warmup_steps", peak)) if work.is_flag("warmup_steps") else peak
    _put_cycle(work, given[0], (lowest, highest, last), warm, end - peak)


def _start(work: Translation) -> None:
    """`load`, `start_from_scratch` of a file."""
    node, scratch = work.get("load"), work.take("start_from_scratch")
    if node is None:
        return
    if scratch is not None and plain(scratch):
        work.put("start_epoch", 0, scratch)
        work.put("start_step", 0, scratch)
