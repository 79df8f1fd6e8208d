"""Conversions of training: the optimizer, trained weights, encoders, tracking, validation."""

from __future__ import annotations

from longtake.config.tree import Leaf, Node, plain
from longtake.dialects.cogvideox_fun.keys import ADAPTERS, LORA_FILES, TRAINING
from longtake.dialects.table import apply_rows
from longtake.dialects.translation import Translation, recompute_fully, value_of
from longtake.system.tiny import world_size

_OF_ENCODERS = {"vae_mini_batch": "ae.mini_batch", "tokenizer_max_length": "t5.max_length"}
_ENDLESS = 10**9  # passes
# What that program's validations, and its examples of generation, are guided away from; no flag says it.
_NEGATIVE_PROMPT = (
    "The video is not of a high quality, it has a low resolution. Watermark present in each frame. The background is "
    "solid. Strange body and strange trajectory. Distortion. "
)
_DROPPED = 0.1  # share of captions that are left out; no flag says it
_ALL_BLOCKS = (1000,)
_NAMES = {"ff.net.0.proj": "ff.0", "ff.net.2": "ff.2", "ff.net": "ff", "to_out.0": "to_out"}  # theirs -> ours
_KNOWN_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "to_out", "ff.0", "ff.2", "ff.net.0.proj", "ff.net.2")
# All but the patch embedding, which is a convolution in files of 1.0.
_EVERY_LINEAR = ("transformer_blocks.*", "patch_embed.text_proj", "time_embedding.*", "norm_out.linear", "proj_out")


def translate_training(work: Translation, script: str, tiny: bool) -> None:
    """Translate the keys that the other modules leave."""
    if isinstance(work.value("max_train_steps"), int):  # which decides alone there
        if (passes := work.take("num_train_epochs")) is not None and work.heights.is_flag(passes.origin):
            work.note("num_train_epochs", passes, "--max_train_steps decides alone, as it does there")
        work.put("epochs", _ENDLESS, work.tree)
    limit = work.get("max_grad_norm")
    if limit is not None and plain(limit) == 0 and work.heights.is_flag(limit.origin):
        work.note("max_grad_norm", limit, "no clipping; there a limit of 0 makes every gradient 0")
    apply_rows(work, TRAINING)
    _encoders(work, tiny)
    _loss(work)
    _optimizer(work)
    _tracking(work)
    work.put("dropout_ratio", {"t5": _DROPPED}, work.tree)
    work.put("fps_save", 8, work.tree)
    if (node := work.take("gradient_checkpointing")) is not None and plain(node):
        work.put("model.grad_ckpt_settings", _ALL_BLOCKS, node)
        recompute_fully(work, node)
    if script == "train_lora":
        _adapters(work)
    else:
        _weights(work)
    _validation(work, script)


def translate_rates(work: Translation) -> None:
    """`learning_rate` and `lr_scheduler` with its warm-up, as accelerate steps it: once an update."""
    rate = work.take("learning_rate")
    kind, steps = work.take("lr_scheduler"), work.take("lr_warmup_steps")
    scale, last = work.take("scale_lr"), work.value("max_train_steps")
    lr, warmup = (value_of(node) for node in (rate, steps))
    if not isinstance(lr, (int, float)) or rate is None or kind is None:
        if rate is not None:
            work.put("lr", lr, rate)
        return
    if scale is not None and plain(scale):
        times = work.number("gradient_accumulation_steps", 1) * work.number("train_batch_size", 1) * world_size()
        lr *= times
        work.note("scale_lr", scale, f"lr = {lr:g}")
    work.put("lr", lr, rate, "learning_rate")
    name = plain(kind)
    start = [(0, 0.0), (warmup, lr)] if isinstance(warmup, int) and warmup > 0 else [(0, lr)]
    if name in _ENDS and isinstance(last, int) and isinstance(warmup, int) and warmup >= last > 0:
        rule = f"warms up for {warmup} steps, and the run has {last}"
        work.refuse("lr_scheduler", kind, rule, "write --lr_warmup_steps 0, or less than --max_train_steps")
        return
    if name in _ENDS and isinstance(last, int):
        shape = ("cosine",) if name.startswith("cosine") else ()
        points = (*start[:-1], (*start[-1], *shape), (last, _ENDS[name]))
    elif name in _ENDS:
        work.refuse("lr_scheduler", kind, "ends with the run, whose last step is not said", "write --max_train_steps N")
        return
    elif name in ("constant", "constant_with_warmup"):
        points = tuple(start) if name != "constant" else ()
        if name == "constant" and steps is not None and work.heights.is_flag(steps.origin):
            work.note(
                "lr_warmup_steps",
                steps,
                'no warm-up: the rate is constant; write --lr_scheduler "constant_with_warmup"',
            )
    else:
        work.refuse("lr_scheduler", kind, f"must be one of constant, constant_with_warmup, {', '.join(_ENDS)}")
        return
    if points:
        work.put("optim.schedule", points, kind)
    _low_rates(work, lr, points)


_ENDS = {"linear": 0.0, "cosine": 0.0, "cosine_with_restarts": 0.0, "polynomial": 1e-7}  # rate at the last step


def _low_rates(work: Translation, lr: float, points: tuple[tuple[object, ...], ...]) -> None:
    """`trainable_modules_low_learning_rate`: half the rate."""
    node = work.get("trainable_modules_low_learning_rate")
    if (names := value_of(node)) and node is not None:
        own = {"schedule": tuple((at, rate / 2, *more) for at, rate, *more in points)} if points else {"lr": lr / 2}
        work.put("optim.groups", ({"match": tuple(map(_pattern, names)), "name": "low", **own},), node)


def _encoders(work: Translation, tiny: bool) -> None:
    """Where the encoders live, and how much they do at once."""
    for old, new in _OF_ENCODERS.items():
        node = work.take(old)
        if node is not None and not tiny:
            work.put(new, plain(node), node if work.heights.is_flag(node.origin) else work.tree)
    offloaded = {"low_vram": ("t5", "ae"), "enable_text_encoder_in_dataloader": ("t5",)}
    for name, sections in offloaded.items():
        if (node := work.take(name)) is not None and plain(node):
            if tiny:
                work.note(name, node, "--tiny has encoders without weights")
                continue
            for section in sections:
                work.put(f"{section}.placement", "offloaded", node)


def _loss(work: Translation) -> None:
    ratio, wanted = work.take("motion_sub_loss_ratio"), work.take("motion_sub_loss")
    if wanted is not None and plain(wanted) and ratio is not None:
        work.put("objective.motion_loss", plain(ratio), ratio)
    elif ratio is not None and work.heights.is_flag(ratio.origin):
        work.refuse("motion_sub_loss_ratio", ratio, "is of a loss that is off", "write --motion_sub_loss too")


def _optimizer(work: Translation) -> None:
    betas = [work.take(f"adam_beta{i}") for i in (1, 2)]
    given = next((node for node in betas if node is not None and work.heights.is_flag(node.origin)), work.tree)
    work.put("optim.betas", tuple(map(value_of, betas)), given)
    start, ratio = work.take("abnormal_norm_clip_start"), work.take("initial_grad_norm_ratio")
    if start is not None and ratio is not None and work.value("grad_clip") != 0:
        work.put("optim.clip", {"start": value_of(ratio), "steps": value_of(start)}, start)


def _tracking(work: Translation) -> None:
    node, project = work.take("report_to"), work.take("tracker_project_name")
    to = str(value_of(node))
    if node is not None:
        if to not in ("tensorboard", "wandb", "all"):
            work.refuse("report_to", node, "is not available", "write tensorboard, wandb or all")
        work.put("tensorboard", to in ("tensorboard", "all"), node)
        work.put("wandb", to in ("wandb", "all"), node)
    if project is not None and value_of(project) is not None:
        if to in ("wandb", "all"):
            work.put("wandb_project", plain(project), project)
        else:
            work.refuse("tracker_project_name", project, "is a project of W&B", "write --report_to wandb too")


def _adapters(work: Translation) -> None:
    """`rank`, `network_alpha`, `target_name` -> `lora`."""
    apply_rows(work, ADAPTERS)
    rank, alpha, names, peft = (work.take(n) for n in ("rank", "network_alpha", "target_name", "use_peft_lora"))
    if rank is not None:
        work.put("lora.rank", plain(rank), rank)
    if alpha is not None:
        work.put("lora.alpha", plain(alpha) or value_of(rank), alpha)
    if names is not None and value_of(names) is not None:
        parts = tuple(name.strip() for name in str(plain(names)).split(",") if name.strip())
        if peft is None or not plain(peft):  # the other path there takes any name that has the part in it
            parts = tuple(name if name in _KNOWN_TARGETS else f"*{name}*" for name in parts)
        work.put("lora.targets", parts, names, "target_name")
    elif peft is None or not plain(peft):
        work.say(f"target_name: is not given, and means every linear layer there: lora.targets = {_EVERY_LINEAR}")
        work.put("lora.targets", _EVERY_LINEAR, work.tree)
    else:
        work.say("target_name: is not given: attention and MLPs of all blocks get adapters")
    if work.get("lora_files") is None:
        work.put("lora_files", LORA_FILES, work.tree)


def refuse_nothing_trained(work: Translation) -> None:
    """A script of whole weights is told which of them train."""
    if not (work.value("trainable_modules") or work.value("trainable_modules_low_learning_rate")):
        fix = 'write --trainable_modules "." for all'
        work.report_at("command line", "trainable_modules", None, "names the weights that train, and is missing", fix)


def _weights(work: Translation) -> None:
    """`trainable_modules` -> `train_only`."""
    names, low = work.take("trainable_modules"), work.take("trainable_modules_low_learning_rate")
    wanted = [*(value_of(names) or ()), *(value_of(low) or ())]
    if wanted and "." not in wanted:
        work.put("train_only", tuple(map(_pattern, wanted)), names or low or work.tree)


def _pattern(name: str) -> str:
    """Parameters that have it in their names, by ours."""
    for theirs, ours in _NAMES.items():
        if theirs in name:
            name = name.replace(theirs, ours)
            break
    return "*" if name == "." else f"*{name}*"


def _validation(work: Translation, script: str) -> None:
    """`validation_*` -> `validation`, `validate_every`, `validate_every_passes`."""
    prompts, paths, steps, epochs = (
        work.take(f"validation_{name}") for name in ("prompts", "paths", "steps", "epochs")
    )
    if prompts is None or not value_of(prompts):
        for name, node in (("paths", paths), ("steps", steps), ("epochs", epochs)):
            if isinstance(node, Leaf) and work.heights.is_flag(node.origin):
                work.refuse(
                    f"validation_{name}", node, "is of videos that no prompt asks for", "write --validation_prompts too"
                )
        return
    guidance = 6.0 if script == "train_control" else 4.5
    option = {"num_steps": 25, "guidance": guidance}
    work.put("validation", {"prompts": _texts(prompts), "sampling_option": option}, prompts)
    work.put("validation.negative_prompt", _NEGATIVE_PROMPT, work.tree)
    if paths is not None and value_of(paths):
        work.put("validation.references", _texts(paths), paths)
    for node, name in ((steps, "validate_every"), (epochs, "validate_every_passes")):
        if node is not None:
            work.put(name, plain(node), node)


def _texts(node: Node) -> tuple[str, ...]:
    return tuple(map(str, plain(node)))
