"""The words of `train.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longtake.checkpoint import list_checkpoints
from longtake.config import load_config
from longtake.dialects.translation import Fixed, Translation
from longtake.dialects.ttt_video.shared import LENGTHS, Words, at_least, choice, fix_word, put_dtype
from longtake.presets import find_preset

_SCHEDULES = ("cosine", "linear")
_LEAST = {
    **dict.fromkeys(("training.warmup_steps", "training.gc_freq"), 0),
    **dict.fromkeys(("training.grad_accum_steps", "training.global_batch_size", "training.steps"), 1),
}
MOVED = {
    "job.seed": "seed",
    "training.dataset_path": "dataset.root",
    "training.empty_prompt": "dataset.empty_prompt",
    "training.global_batch_size": "slots_per_step",
    "training.steps": "max_steps",
    "training.gc_freq": "gc_every",
    "optimizer.gradient_clipping_norm": "grad_clip",
    "checkpoint.interval": "ckpt_every",
    "comm.init_timeout_seconds": "watchdog_seconds",
    "wandb.project": "wandb_project",
}
_QKVO = "ttt_video/ttt_mlp/9s"  # a stage that trains these alone
# Flags that say how text is dropped, and what takes its place; lists of embedded clips need no text encoder otherwise.
_EMPTY = ("dropout_ratio.t5", "dataset.empty_prompt", "t5.from_pretrained")


def translate_training(work: Translation, words: Words, preset: Mapping[str, Any], tiny: bool) -> None:
    """All that `train.py` reads beside the model. preset: what lies beneath."""
    words.move(work, MOVED)
    _places(work, words)
    _data(work, words, tiny)
    _trained(work, words)
    _rates(work, words, preset)
    _steps(work, words)
    _tracking(work, words)
    put_dtype(work, words, "parallelism.fsdp_unsharded_dtype")


def _places(work: Translation, words: Words) -> None:
    """Where the run writes, and what it goes on from."""
    folder = Path(words["job.dump_folder"] or Path.cwd() / "exp").expanduser()
    if not folder.is_absolute():
        work.refuse("job.dump_folder", words.node("job.dump_folder"), "must be absolute", f"write {folder.absolute()}")
    work.put("outputs", str(folder), words.node("job.dump_folder"))
    work.put("exp_name", words["job.exp_name"], words.node("job.exp_name"), "job.exp_name")
    run, step = folder / words["job.exp_name"], words["checkpoint.resume_step"]
    if words["checkpoint.resume"] and step == -1:
        work.put("resume", "auto", words.node("checkpoint.resume"))
    elif words["checkpoint.resume"]:
        found = {info.step: info for info in (list_checkpoints(run) if run.is_dir() else ()) if info.complete}
        if step in found and step == max(found):
            work.put("resume", "auto", words.node("checkpoint.resume_step"))
        elif step in found:
            work.put("load", str(found[step].path), words.node("checkpoint.resume_step"))
            work.say(
                f"checkpoint.resume_step = {step}: a later one is there, so the run goes on in a folder beside {run}"
            )
        else:
            steps = ", ".join(map(str, sorted(found))) or "none"
            rule = f"{run} has no whole checkpoint of this step"
            work.refuse("checkpoint.resume_step", words.node("checkpoint.resume_step"), rule, f"there are {steps}")
    elif words.is_given("checkpoint.resume_step") and step != -1:
        node = words.node("checkpoint.resume_step")
        work.refuse("checkpoint.resume_step", node, "is not looked at without resume", "write --checkpoint.resume too")
    if not words["checkpoint.init_state_dir"] and os.environ.get("RANK", "0") == "0":
        work.say(
            "checkpoint.init_state_dir: is not given, so the model starts from scratch; give the folder that "
            "scripts/convert_weights_from_hf.sh made, or a checkpoint of the stage before"
        )


def _data(work: Translation, words: Words, tiny: bool) -> None:
    """`training.jsonl_paths`, `dataset_path` -> `dataset`; the length of the stage -> its one bucket."""
    lists, node = words["training.jsonl_paths"], words.node("training.jsonl_paths")
    names = [lists] if isinstance(lists, str) else list(lists or ())
    if not names:
        fix = "give the .jsonl of embedded clips"
        work.report_at("command line", "training.jsonl_paths", None, "says what is trained on, and is missing", fix)
    elif len(names) == 1:
        work.put("dataset.data_path", names[0], node)
    else:
        work.put("dataset.mix", tuple((name, 1.0) for name in names), node)
    if names:
        work.put("dataset.latents", names[0], node)
    if words["training.empty_prompt"] is None and not any(map(work.is_flag, _EMPTY)):
        work.say(
            "training.empty_prompt: not given, so no text is dropped (dropout_ratio.t5 = 0); give the embedding of the "
            "empty prompt to drop one in ten"
        )
        work.put("dropout_ratio.t5", 0.0, work.tree)
    choice(work, words, "model.video_length", LENGTHS)
    if not tiny:
        given = "model.scale_factor" if words.is_given("model.scale_factor") else "checkpoint.init_state_dir"
        work.put("ae.scale_factor", words["model.scale_factor"], words.node(given))  # weights may say another


def _trained(work: Translation, words: Words) -> None:
    """`training.adapter_method` -> `train_only`."""
    method, node = words["training.adapter_method"], words.node("training.adapter_method")
    if method not in ("sft", "qkvo"):
        work.refuse("training.adapter_method", node, "says which weights train", "write sft for all, or qkvo")
    if (method, words["model.video_length"]) == ("qkvo", LENGTHS[0]):
        work.note(
            "training.adapter_method",
            node,
            "attention's projections and norms and the new layers train, as TTT-Linear's published file of this stage "
            "has it; TTT-Video's page says all weights: write sft for these",
        )
    file = find_preset(_QKVO)
    assert file is not None
    work.put("train_only", load_config(file, [], dict[str, Any]).tree["train_only"] if method == "qkvo" else None, node)


def _rates(work: Translation, words: Words, preset: Mapping[str, Any]) -> None:
    """`optimizer` and `training.warmup_steps` -> `optim`, in the preset's four groups."""
    fix_word(work, words, "optimizer.name", Fixed(("AdamW",), "", "AdamW is what there is"))
    node = words.node("optimizer.lr")
    last, warm = words["training.steps"], words["training.warmup_steps"]
    schedules = {}
    for rate, kind in (("lr", "lr_schedule"), ("lr_ssm", "lr_ssm_schedule")):
        law = choice(work, words, f"optimizer.{kind}", _SCHEDULES)
        schedules[rate] = schedule(words[f"optimizer.{rate}"], words["optimizer.lr_end"], law, warm, last)
    groups = [
        {**group, **({"schedule": schedules["lr_ssm"]} if "schedule" in group else {})}
        for group in preset["optim"]["groups"]
    ]
    work.put("optim.schedule", schedules["lr"], node)
    work.put("optim.groups", groups, words.node("optimizer.lr_ssm"))


def schedule(peak: float, end: float, law: str | None, warm: int, last: int) -> tuple[tuple[Any, ...], ...]:
    """The points of a rate that warms up for `warm` steps, from a share of 1 / warm, and falls to `end` at step `last`,
    as `ttt/infra/optimizers.py` of TTT-Video has it."""
    points: tuple[tuple[Any, ...], ...] = ((0, peak / warm), (warm - 1, peak)) if warm > 1 else ()
    if last <= warm or peak == end:
        return points or ((0, peak),)
    shape = ("cosine",) if law == "cosine" else ()
    return (*points, (warm, peak, *shape), (last, end))


def _steps(work: Translation, words: Words) -> None:
    at_least(work, words, _LEAST)
    work.put("epochs", 10**9, work.tree)
    if words["training.grad_accum_steps"] != 1:
        text = "every rank takes one sample at a time, global_batch_size of them together make a step"
        work.note("training.grad_accum_steps", words.node("training.grad_accum_steps"), text)
    if minutes := words["checkpoint.timeout_minutes"]:
        work.put("time_limit", minutes, words.node("checkpoint.timeout_minutes"))


def _tracking(work: Translation, words: Words) -> None:
    """`wandb`."""
    work.put("wandb", not words["wandb.disable"], words.node("wandb.disable"))
    if words["wandb.entity"] != "default":
        work.put("wandb_entity", words["wandb.entity"], words.node("wandb.entity"))
    work.put("log_every", 1, work.tree)
    if words.is_given("wandb.log_interval") and words["wandb.log_interval"] != 1:
        work.note("wandb.log_interval", words.node("wandb.log_interval"), "every step is logged, as it is there")
    if words["wandb.alert"] and not words["wandb.disable"]:
        work.note("wandb.alert", words.node("wandb.alert"), "W&B itself alerts of runs that fail; see its settings")
