"""Conversions of the keys of `train.py`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longtake.checkpoint.runs import list_checkpoints
from longtake.config.load import load_config
from longtake.dialects.table import apply_rows
from longtake.dialects.translation import Translation
from longtake.dialects.ttt_video.keys import LENGTHS, TRAINING, WANDB
from longtake.dialects.ttt_video.shared import choice
from longtake.presets import find_preset

_SCHEDULES = ("cosine", "linear")
_QKVO = "ttt_video/ttt_mlp/9s"  # a stage that trains these alone
# Flags of dropped texts and their replacement; lists of embedded clips need no text encoder otherwise.
_EMPTY = ("dropout_ratio.t5", "dataset.empty_prompt", "t5.from_pretrained")


def translate_training(work: Translation, preset: Mapping[str, Any], tiny: bool) -> None:
    """All that `train.py` reads in addition to the model. preset: the preset of the stage, which lies beneath."""
    _places(work)
    _data(work, tiny)
    _trained(work)
    _rates(work, preset)
    apply_rows(work, (*TRAINING, *WANDB))
    work.put("epochs", 10**9, work.tree)
    work.put("log_every", 1, work.tree)


def _places(work: Translation) -> None:
    """Where the run writes, and which checkpoint it resumes."""
    folder = Path(work.value("job.dump_folder") or Path.cwd() / "exp").expanduser()
    if not folder.is_absolute():
        work.refuse("job.dump_folder", work.place("job.dump_folder"), "must be absolute", f"write {folder.absolute()}")
    work.put("outputs", str(folder), work.place("job.dump_folder"))
    name = work.value("job.exp_name")
    work.put("exp_name", name, work.place("job.exp_name"), "job.exp_name")
    _resume(work, folder / name)
    if not work.is_given("checkpoint.init_state_dir") and os.environ.get("RANK", "0") == "0":
        work.say(
            "checkpoint.init_state_dir: is not given, so the model starts from scratch; give the folder that "
            "scripts/convert_weights_from_hf.sh made, or a checkpoint of the stage before"
        )


def _resume(work: Translation, run: Path) -> None:
    """`checkpoint.resume`, `checkpoint.resume_step` -> `resume` for the run's last checkpoint, `load` for another."""
    step, place = work.value("checkpoint.resume_step"), work.place("checkpoint.resume_step")
    if not work.value("checkpoint.resume"):
        if work.is_given("checkpoint.resume_step") and step != -1:
            rule = "is not looked at without resume"
            work.refuse("checkpoint.resume_step", place, rule, "write --checkpoint.resume too")
        return
    if step == -1:
        work.put("resume", "auto", work.place("checkpoint.resume"))
        return
    checkpoints = {info.step: info for info in (list_checkpoints(run) if run.is_dir() else ()) if info.complete}
    if step not in checkpoints:
        steps = ", ".join(map(str, sorted(checkpoints))) or "none"
        rule = f"{run} has no whole checkpoint of this step"
        work.refuse("checkpoint.resume_step", place, rule, f"there are {steps}")
    elif step == max(checkpoints):
        work.put("resume", "auto", place)
    else:
        work.put("load", str(checkpoints[step].path), place)
        work.say(
            f"checkpoint.resume_step = {step}: a later one exists, so the run resumes in a new folder next to {run}"
        )


def _data(work: Translation, tiny: bool) -> None:
    """`training.jsonl_paths` -> `dataset`; the latents' scale."""
    lists, place = work.value("training.jsonl_paths"), work.place("training.jsonl_paths")
    names = [lists] if isinstance(lists, str) else list(lists or ())
    if not names:
        fix = "give the .jsonl of embedded clips"
        work.report_at("command line", "training.jsonl_paths", None, "lists the clips, and is missing", fix)
    elif len(names) == 1:
        work.put("dataset.data_path", names[0], place)
    else:
        work.put("dataset.mix", tuple((name, 1.0) for name in names), place)
    if names:
        work.put("dataset.latents", names[0], place)
    if work.value("training.empty_prompt") is None and not any(map(work.is_flag, _EMPTY)):
        work.say(
            "training.empty_prompt: not given, so no text is dropped (dropout_ratio.t5 = 0); give the embedding of the "
            "empty prompt to drop one in ten"
        )
        work.put("dropout_ratio.t5", 0.0, work.tree)
    choice(work, "model.video_length", LENGTHS)
    if not tiny:
        given = "model.scale_factor" if work.is_given("model.scale_factor") else "checkpoint.init_state_dir"
        work.put("ae.scale_factor", work.value("model.scale_factor"), work.place(given))  # weights may have another


def _trained(work: Translation) -> None:
    """`training.adapter_method` -> `train_only`."""
    method, place = work.value("training.adapter_method"), work.place("training.adapter_method")
    if method not in ("sft", "qkvo"):
        work.refuse("training.adapter_method", place, "names the weights that train", "write sft for all, or qkvo")
    if (method, work.value("model.video_length")) == ("qkvo", LENGTHS[0]):
        work.note(
            "training.adapter_method",
            place,
            "attention's projections and norms and the new layers train, as in TTT-Linear's published file of this "
            "stage; TTT-Video's page names all weights: write sft for these",
        )
    file = find_preset(_QKVO)
    assert file is not None
    trained = load_config(file, [], dict[str, Any]).tree["train_only"]
    work.put("train_only", trained if method == "qkvo" else None, place)


def _rates(work: Translation, preset: Mapping[str, Any]) -> None:
    """`optimizer` and `training.warmup_steps` -> `optim`, in the preset's four groups."""
    last, warm = work.value("training.steps"), work.value("training.warmup_steps")
    schedules = {}
    for rate, kind in (("lr", "lr_schedule"), ("lr_ssm", "lr_ssm_schedule")):
        shape = choice(work, f"optimizer.{kind}", _SCHEDULES)
        end = work.value("optimizer.lr_end")
        schedules[rate] = schedule(work.value(f"optimizer.{rate}"), end, shape, warm, last)
    groups = [
        {**group, **({"schedule": schedules["lr_ssm"]} if "schedule" in group else {})}
        for group in preset["optim"]["groups"]
    ]
    work.put("optim.schedule", schedules["lr"], work.place("optimizer.lr"))
    work.put("optim.groups", groups, work.place("optimizer.lr_ssm"))


def schedule(peak: float, end: float, law: str | None, warm: int, last: int) -> tuple[tuple[Any, ...], ...]:
    """Return the points of a rate that warms up for `warm` steps, from a share of 1 / warm, and falls to `end` at
    step `last`, as `ttt/infra/optimizers.py` of TTT-Video has it."""
    points: tuple[tuple[Any, ...], ...] = ((0, peak / warm), (warm - 1, peak)) if warm > 1 else ()
    if last <= warm or peak == end:
        return points or ((0, peak),)
    shape = ("cosine",) if law == "cosine" else ()
    return (*points, (warm, peak, *shape), (last, end))
