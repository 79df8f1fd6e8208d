"""Folders and files: the published model, where a run writes, and the checkpoint that it goes on from."""

from __future__ import annotations

import os
import re
from pathlib import Path

from longtake.checkpoint.runs import CheckpointInfo, list_checkpoints
from longtake.config.tree import Leaf, Node
from longtake.contracts import UserError
from longtake.dialects.cogvideox_fun.keys import FOLDERS
from longtake.dialects.table import apply_rows
from longtake.dialects.tiny_weights import CHECK, LEFT_OUT, NOT_THERE, is_missing, leave_out_tiny_weights
from longtake.dialects.translation import Translation, value_of
from longtake.families.cogvideox import COGVIDEOX
from longtake.hub import published_facts
from longtake.models.cogvideox_config import section_of
from longtake.processes import restarts

RUN = "run"  # the run's own folder in output_dir
_PARTS = ("scheduler", "tokenizer", "text_encoder", "vae", "transformer")
_CHECKPOINT = re.compile(
    r"checkpoint-(\d+)(-run-\d+)?(-compatible_with_comfyui)?(\.safetensors)?|epoch\d+-global_step(\d+)"
)
WHOLE = "give the folder of a whole CogVideoX, such as `hf download NAME --local-dir FOLDER` makes"


def translate_model(work: Translation, control: bool, tiny: bool) -> str | None:
    """Return the published folder -> `model`, `ae`, `t5`, `objective`; returns what the model sees beside noise."""
    apply_rows(work, FOLDERS)
    work.put("model.type", COGVIDEOX.model().type, work.tree)
    node, overlays = work.take("pretrained_model_name_or_path"), [work.take(f"{part}_path") for part in _OVERLAYS]
    visual = "control" if control else None
    for name, overlay in zip(_OVERLAYS, overlays, strict=True):
        if not tiny or overlay is None or (path := value_of(overlay)) is None:
            continue
        if is_missing(str(path)):
            work.refuse(f"{name}_path", overlay, NOT_THERE, CHECK)
        else:
            work.note(f"{name}_path", overlay, LEFT_OUT)
    facts = _facts(work, node) if isinstance(node, Leaf) else None
    if facts is not None and isinstance(node, Leaf):
        found = section_of(facts, f"{node.value}/transformer/config.json")
        visual = "control" if control else found["visual"]
        if control and found["visual"] in ("image", "inpaint"):
            rule = "has weights that see given pictures, in other input channels than control videos need"
            work.refuse("pretrained_model_name_or_path", node, rule, "give those of a control or text-to-video model")
        elif control and found["visual"] is None:
            work.put("model.positions", "fun", node)
        if tiny:
            work.note("pretrained_model_name_or_path", node, "--tiny leaves its weights out")
        else:
            if value_of(overlays[0]) is None:
                work.put("model.from_pretrained", str(node.value), node)
            _overlay(work, str(node.value), overlays)
    if tiny:
        leave_out_tiny_weights(work)
    if control:
        work.put("model.visual", "control", work.tree if node is None else node)
    return visual


_OVERLAYS = ("transformer", "vae")


def _facts(work: Translation, node: Leaf) -> dict[str, object] | None:
    """What the folder's transformer says of itself; None, and a fault, where it is no folder of a CogVideoX."""
    root = Path(str(node.value)).expanduser()
    if (rule := fault_of_folder(root)) is None:
        return published_facts(str(root / "transformer"))
    work.refuse("pretrained_model_name_or_path", node, rule, WHOLE)
    return None


def fault_of_folder(root: Path) -> str | None:
    """What keeps a folder from being that of a whole CogVideoX."""
    if not root.is_dir():
        return "is not a folder"
    if lacking := [part for part in _PARTS if not (root / part).is_dir()]:
        return f"has no {', '.join(lacking)} in it"
    try:
        return None if COGVIDEOX.root(str(root)) is not None else "has no transformer/config.json of a CogVideoX"
    except ValueError as error:
        raise UserError(str(error)) from None


def _overlay(work: Translation, root: str, overlays: list[Node | None]) -> None:
    """`transformer_path` and `vae_path`: other weights for the sizes that the folder says."""
    transformer, vae = overlays
    sections = COGVIDEOX.root(root) or {}
    if transformer is not None and value_of(transformer) is not None:
        work.put("model.from_pretrained", value_of(transformer), transformer)
        for name, section in sections.items():
            work.put(name, section, work.tree)
    if vae is not None and value_of(vae) is not None:
        work.put("ae.from_pretrained", value_of(vae), vae)
        work.put("ae", sections["ae"], work.tree)


def translate_places(work: Translation) -> None:
    """`output_dir`, `train_data_meta`, `resume_from_checkpoint` -> `outputs`, `dataset`, `resume` or `load`."""
    output, resume = work.take("output_dir"), work.take("resume_from_checkpoint")
    folder = Path(str(value_of(output)))
    if output is not None:
        work.put("outputs", str(folder), output)
        work.put("exp_name", RUN, output)
    if (meta := work.take("train_data_meta")) is not None:
        work.put("dataset.data_path", value_of(meta), meta, "train_data_meta")
    if (root := work.take("train_data_dir")) is not None:
        place = Path(str(value_of(root) or "."))
        work.put("dataset.root", str(place if place.is_absolute() else Path.cwd() / place), root, "train_data_dir")
    if (logs := work.take("logging_dir")) is not None and value_of(logs) != "logs":
        rule = "has no place of its own: curves are written into the run's folder"
        work.refuse("logging_dir", logs, rule, f"start `tensorboard --logdir {folder}`")
    if isinstance(resume, Leaf) and resume.value is not None:
        _resume(work, folder, resume)
    elif output is not None and _is_first_start() and (used := _used(folder)) is not None:
        rule = f"is used: it holds {used.name}"
        work.refuse(
            "output_dir", output, rule, "write --resume_from_checkpoint latest to go on, or another --output_dir"
        )


def _is_first_start() -> bool:
    """Whether this is the one process that looks, before any has written: rank 0, not started again."""
    return os.environ.get("RANK", "0") == "0" and not restarts()


def _used(folder: Path) -> Path | None:
    return next((path for pattern in (RUN, "checkpoint-*") for path in sorted(folder.glob(pattern))), None)


def _resume(work: Translation, folder: Path, node: Leaf) -> None:
    """`latest` is the newest checkpoint of the run; a path is one of its checkpoints, by any of its names."""
    own = [info for run in sorted(folder.glob(f"{RUN}*")) for info in list_checkpoints(run) if info.complete]
    if node.value == "latest":
        if not own and (used := _used(folder)) is not None and used.name != RUN:
            rule = f"finds checkpoints of another program in {folder}, such as {used.name}, which cannot be continued"
            fix = f"take another --output_dir, and start from its adapters: --lora.from_pretrained {used}"
            work.refuse("resume_from_checkpoint", node, rule, fix)
        elif not own:
            work.note("resume_from_checkpoint", node, f"there is no checkpoint in {folder}: a new run begins")
        work.put("resume", "auto", node)
        return
    path = Path(str(node.value))
    found = _CHECKPOINT.fullmatch(path.name)
    elsewhere = [info for run in sorted(path.parent.glob(f"{RUN}*")) for info in list_checkpoints(run) if info.complete]
    if path.is_dir() and list_checkpoints(path.parent):
        elsewhere = [info for info in list_checkpoints(path.parent) if info.complete]
    known = [*own, *elsewhere]
    if found is not None and found[5] and path.is_dir():
        known = [info for info in known if info.path.samefile(path)]
    elif found is not None and found[2]:
        known = [info for info in known if info.path.parent.name == found[2][1:]]
    step = None if found is None else int(found[1] or found[5])
    # There only the name counts, and is looked for in output_dir.
    if (meant := next((info for info in known if info.step == step), None)) is None:
        steps = ", ".join(map(_name, own)) or "none"
        rule = f"is not a checkpoint of the run in {folder}"
        work.refuse("resume_from_checkpoint", node, rule, f"write latest, or one of those there: {steps}")
    elif own and meant == max(own, key=lambda info: (info.when, info.step)):
        work.put("resume", "auto", node)
    else:
        work.put("load", str(meant.path), node)


def _name(info: CheckpointInfo) -> str:
    """What a checkpoint's files beside its run are called."""
    run = info.path.parent.name
    return f"checkpoint-{info.step}" + (f"-{run}" if run != RUN else "")
