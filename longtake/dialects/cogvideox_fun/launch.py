"""What `accelerate launch` puts into the environment, as Longtake's own sharding."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longtake.config.tree import Leaf, Origin, plain
from longtake.contracts import UserError
from longtake.dialects.translation import Translation
from longtake.small_files import parse_json, read_small
from longtake.system.tiny import world_size

_PRECISIONS = {"bf16": "bf16", "no": "fp32"}
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # numbered from 1
_BLOCK = "CogVideoXBlock"
_DEGREES = {"DP_REPLICATE": "replicate", "DP_SHARD": "shard", "TP": "tensor", "CP": "sequence", "SP": "sequence"}
# What accelerate passes on of flags that nothing here reads -> what it passes where they are not given.
_IDLE_FSDP = {
    **dict.fromkeys(("FSDP_AUTO_WRAP_POLICY", "FSDP_BACKWARD_PREFETCH", "FSDP_STATE_DICT_TYPE"), ""),
    **dict.fromkeys(("FSDP_FORWARD_PREFETCH", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"), "false"),
    "FSDP_MIN_NUM_PARAMS": "100000000",
    **dict.fromkeys(("FSDP_CPU_RAM_EFFICIENT_LOADING", "FSDP_SYNC_MODULE_STATES", "FSDP_USE_ORIG_PARAMS"), "true"),
}
# Sections and keys of DeepSpeed's file that say how it does its work, not what comes of it.
_OF_ITS_OWN = {
    *("steps_per_print", "wall_clock_breakdown", "dump_state", "communication_data_type", "prescale_gradients"),
    *("gradient_predivide_factor", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "memory_breakdown"),
    *("sparse_gradients", "torch_autocast", "disable_allgather", "comms_logger", "flops_profiler", "tensorboard"),
}


def translate_launch(work: Translation, environ: Mapping[str, str] = os.environ) -> None:
    """The launcher's variables -> `parallel`, `dtype`, `compile`, `device`."""
    _precision(work, environ)
    low = work.tree
    if _true(environ, "ACCELERATE_USE_CPU"):
        work.put("device", "cpu", low)
    backend = environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower()
    if backend == "inductor":
        work.put("compile", True, low)
    elif backend != "no":
        _refuse(work, "dynamo_backend", backend, "is not available", "write inductor, or leave it out")
    if _true(environ, "ACCELERATE_USE_MEGATRON_LM"):
        _refuse(work, "use_megatron_lm", True, "is not available", "write --parallel.tensor N, or --use_fsdp")
    deepspeed, fsdp = (_true(environ, f"ACCELERATE_USE_{name}") for name in ("DEEPSPEED", "FSDP"))
    for name, is_on in (("use_deepspeed", deepspeed), ("use_fsdp", fsdp)):
        if (node := work.take(name)) is not None and plain(node) and not is_on:
            work.refuse(name, node, "is set by the launcher", f"write `accelerate launch --{name} ...`")
    if deepspeed:
        _deepspeed(work, environ)
    elif fsdp:
        _fsdp(work, environ)
    elif _true(environ, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        for axis in dict.fromkeys(_DEGREES.values()):
            sizes = [
                environ.get(f"PARALLELISM_CONFIG_{name}_SIZE", "1") for name, ours in _DEGREES.items() if ours == axis
            ]
            work.put(f"parallel.{axis}", math.prod(map(int, sizes)), low)
    elif world_size() > 1:
        _whole_on_each_rank(work)
    rank = work.take("local_rank")
    if rank is not None and str(plain(rank)) not in ("-1", "None", environ.get("LOCAL_RANK", "0")):
        work.refuse("local_rank", rank, "is not what the launcher says", "leave it out")


def _precision(work: Translation, environ: Mapping[str, str]) -> None:
    node = work.take("mixed_precision")
    if node is None or plain(node) is None:
        kind = environ.get("ACCELERATE_MIXED_PRECISION", "no")
        node = Leaf(kind, Origin("accelerate launch --mixed_precision"))
        if kind in _PRECISIONS:
            work.put("dtype", _PRECISIONS[kind], work.tree)
            return
    if (dtype := _PRECISIONS.get(str(plain(node)))) is not None:
        work.put("dtype", dtype, node, "mixed_precision")
    else:
        rule = "is not available"
        if plain(node) == "fp16":
            rule += ": its gradients overflow without a scale that is found by trial"
        work.refuse("mixed_precision", node, rule, 'write "bf16", or "no" for float32')


def _whole_on_each_rank(work: Translation) -> None:
    """As DDP has it: every rank holds the model."""
    work.put("parallel", {"replicate": "auto", "shard": 1}, work.tree)


def _fsdp(work: Translation, environ: Mapping[str, str]) -> None:
    said = environ.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD").upper()
    strategy = _STRATEGIES[int(said) - 1] if said in "12345" else said.removeprefix("_")
    if environ.get("FSDP_VERSION") == "2":
        strategy = "SHARD_GRAD_OP" if environ.get("FSDP_RESHARD_AFTER_FORWARD") == "false" else "FULL_SHARD"
    if strategy not in _STRATEGIES:
        _refuse(
            work, "fsdp_sharding_strategy", said, "is not a strategy of FSDP", f"write one of {', '.join(_STRATEGIES)}"
        )
    elif strategy == "NO_SHARD":
        _whole_on_each_rank(work)
    else:
        work.put("parallel.zero", 2 if strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") else 3, work.tree)
        if strategy.startswith("HYBRID"):
            nodes = max(1, world_size() // int(environ.get("LOCAL_WORLD_SIZE", "1")))
            work.put("parallel.replicate", nodes, work.tree)
    if _true(environ, "FSDP_OFFLOAD_PARAMS"):
        work.put("parallel.cpu_offload", True, work.tree)
    if _true(environ, "FSDP_ACTIVATION_CHECKPOINTING"):
        work.put("gradient_checkpointing", True, work.tree)
    if (block := environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", _BLOCK)) != _BLOCK:
        _refuse(work, "fsdp_transformer_layer_cls_to_wrap", block, "is not a block of a CogVideoX", f"write {_BLOCK}")
    idle = [f"--{name.lower()}" for name, usual in _IDLE_FSDP.items() if environ.get(name, usual) != usual]
    if idle:
        work.say(f"{', '.join(idle)}: do nothing here; blocks are gathered ahead, and checkpoints hold shards")
    if (names := environ.get("FSDP_IGNORED_MODULES")) is not None:
        _refuse(work, "fsdp_ignored_modules", names, "is not available: every weight is sharded", "leave it out")


def _deepspeed(work: Translation, environ: Mapping[str, str]) -> None:
    prefix = "ACCELERATE_DEEPSPEED_"
    if (name := environ.get(f"{prefix}CONFIG_FILE")) is not None:
        facts, place = _file(name), name
    else:
        offload = {kind: {"device": environ.get(f"{prefix}OFFLOAD_{kind.upper()}_DEVICE", "none")} for kind in _KINDS}
        stage = int(_number(environ.get(f"{prefix}ZERO_STAGE", "2"), "zero_stage"))
        zero = {"stage": stage, **{f"offload_{kind}": where for kind, where in offload.items()}}
        facts, place = {"zero_optimization": zero}, "accelerate launch"
        clipping = environ.get("ACCELERATE_GRADIENT_CLIPPING", "none")
        if clipping not in ("none", "auto"):
            facts["gradient_clipping"] = _number(clipping, "gradient_clipping")
    if (steps := environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")) != "auto":
        facts.setdefault("gradient_accumulation_steps", int(_number(steps, "gradient_accumulation_steps")))
    _zero(work, _section(facts, "zero_optimization", place), place)
    _numbers(work, facts, place)
    for name in ("fp16", "bf16"):
        section = _section(facts, name, place)
        if section.get("enabled") is True and name == "fp16":
            work.report_at(place, "fp16.enabled", True, "is not available", 'write "bf16": {"enabled": true}')
    for key in sorted(facts.keys() - _OF_ITS_OWN):
        fix = "leave it out, and say it by a flag of the script"
        work.report_at(place, key, facts[key], "is not read from DeepSpeed's file", fix)


_KINDS = ("optimizer", "param")


def _zero(work: Translation, zero: dict[str, Any], place: str) -> None:
    stage = zero.pop("stage", 0)
    if stage == 0:
        _whole_on_each_rank(work)
    elif stage in (1, 2, 3):
        work.put("parallel.zero", max(2, stage), work.tree)
    else:
        work.report_at(place, "zero_optimization.stage", stage, "must be 0, 1, 2 or 3", "write 2")
    devices = {kind: _section(zero, f"offload_{kind}", place).get("device", "none") for kind in _KINDS}
    for kind, device in devices.items():
        if device not in ("none", "cpu"):
            key = f"zero_optimization.offload_{kind}.device"
            work.report_at(place, key, device, "is not available", 'write "cpu" or "none"')
    if devices["param"] == "cpu":
        work.put("parallel.cpu_offload", True, work.tree)
    elif devices["optimizer"] == "cpu":
        work.put("optim.offload", True, work.tree)


def _numbers(work: Translation, facts: dict[str, Any], place: str) -> None:
    """Numbers that the script's flags say too: "auto" is theirs; another one than a flag's is a fault."""
    for key, flag in (("gradient_clipping", "max_grad_norm"), ("gradient_accumulation_steps",) * 2):
        number = facts.pop(key, "auto")
        if number == "auto" or work.value(flag) == number:
            continue
        if work.is_flag(flag):
            rule = f"contradicts --{flag} {work.value(flag)}"
            work.report_at(place, key, number, rule, 'write "auto"')
        else:
            work.take(flag)
            work.put(flag, number, work.tree)
    batch, steps = work.number("train_batch_size", 1), work.number("gradient_accumulation_steps", 1)
    for key, number in (("train_micro_batch_size_per_gpu", batch), ("train_batch_size", batch * steps * world_size())):
        if (said := facts.pop(key, "auto")) not in ("auto", number):
            rule = f"contradicts the flags, which give {number}"
            work.report_at(place, key, said, rule, 'write "auto"')


def _section(facts: dict[str, Any], name: str, place: str) -> dict[str, Any]:
    """Take a section out of DeepSpeed's file; empty where there is none."""
    section = facts.pop(name, None) or {}
    if not isinstance(section, dict):
        raise UserError(f'{place}: {name} = {section!r} is not a section; write "{name}": {{...}}, or leave it out')
    return dict(section)


def _number(text: str, flag: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"accelerate launch --{flag} {text}: expected a number; write one, or leave it out") from None


def _file(name: str) -> dict[str, Any]:
    try:
        return dict(parse_json(read_small(Path(name))))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"--deepspeed_config_file {name}: cannot be read ({error}); give a file such as "
            "config/zero_stage2_config.json of Longtake's repository"
        ) from None


def _true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "false").lower() in ("true", "1", "yes")


def _refuse(work: Translation, word: str, value: Any, rule: str, fix: str) -> None:
    work.report_at("accelerate launch", f"--{word}", value, rule, fix)
