"""What accelerate's launchers put into the environment."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.train.config import RunConfig
from tests.dialects.fun import ROOT, spoken
from tests.dialects.speech import refusal

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
ZERO = "ACCELERATE_DEEPSPEED_"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """That of rank 0 of 4 on two machines, without accelerate's own words."""
    for name in [name for name in os.environ if name.startswith(("ACCELERATE", "FSDP", "PARALLELISM"))]:
        monkeypatch.delenv(name)
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def launched(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], *flags: str) -> RunConfig:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return spoken("train_lora", "--tiny", "--use_peft_lora", *flags)[0]


@pytest.mark.parametrize(
    ("variables", "replicate", "shard", "zero", "offload"),
    [
        ({}, "auto", 1, 3, False),
        (FSDP, 1, "auto", 3, False),
        (FSDP | {"FSDP_SHARDING_STRATEGY": "1"}, 1, "auto", 3, False),
        (FSDP | {"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, 1, "auto", 2, False),
        (FSDP | {"FSDP_SHARDING_STRATEGY": "NO_SHARD"}, "auto", 1, 3, False),
        (FSDP | {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, 2, "auto", 3, False),
        (FSDP | {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD_ZERO2"}, 2, "auto", 2, False),
        (FSDP | {"FSDP_OFFLOAD_PARAMS": "true"}, 1, "auto", 3, True),
        (FSDP | {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}, 1, "auto", 2, False),
        (DEEPSPEED, 1, "auto", 2, False),
        (DEEPSPEED | {f"{ZERO}ZERO_STAGE": "3"}, 1, "auto", 3, False),
        (DEEPSPEED | {f"{ZERO}ZERO_STAGE": "0"}, "auto", 1, 3, False),
        (DEEPSPEED | {f"{ZERO}OFFLOAD_PARAM_DEVICE": "cpu"}, 1, "auto", 2, True),
        (DEEPSPEED | {f"{ZERO}CONFIG_FILE": str(ROOT / "config/zero_stage2_config.json")}, 1, "auto", 2, False),
        (
            {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4"},
            1,
            4,
            3,
            False,
        ),
    ],
)
def test_shards_are_as_the_launcher_says(
    variables: dict[str, str],
    replicate: int | str,
    shard: int | str,
    zero: int,
    offload: bool,
    environment: pytest.MonkeyPatch,
) -> None:
    parallel = launched(environment, variables).parallel
    assert (parallel.replicate, parallel.shard, parallel.zero, parallel.cpu_offload) == (
        replicate,
        shard,
        zero,
        offload,
    )


def test_degrees_of_a_parallelism_config(environment: pytest.MonkeyPatch) -> None:
    sizes = {f"PARALLELISM_CONFIG_{name}_SIZE": "2" for name in ("CP", "TP")}
    parallel = launched(environment, {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", **sizes}).parallel
    assert (parallel.replicate, parallel.shard, parallel.sequence, parallel.tensor) == (1, 1, 2, 2)


def test_a_flag_of_ours_counts_upon_the_launcher(environment: pytest.MonkeyPatch) -> None:
    assert launched(environment, FSDP, "--parallel.zero", "2").parallel.zero == 2


@pytest.mark.parametrize(
    ("variables", "key", "value"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "dtype", "bf16"),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, "dtype", "fp32"),
        ({"ACCELERATE_USE_CPU": "true"}, "device", "cpu"),
        ({"ACCELERATE_GRADIENT_CLIPPING": "0.3", **DEEPSPEED}, "grad_clip", 0.3),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3", **DEEPSPEED}, "accumulation_steps", 3),
        (FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "model", None),
    ],
)
def test_the_launchers_other_words_act(
    variables: dict[str, str], key: str, value: object, environment: pytest.MonkeyPatch
) -> None:
    config = launched(environment, variables)
    if key == "model":
        assert config.model.grad_ckpt_settings is not None
    else:
        assert getattr(config, key) == value


def test_the_flag_of_the_script_counts_for_clipping_under_deepspeed(environment: pytest.MonkeyPatch) -> None:
    path = {f"{ZERO}CONFIG_FILE": str(ROOT / "config/zero_stage2_config.json")}
    assert launched(environment, DEEPSPEED | path, "--max_grad_norm", "0.05").grad_clip == 0.05


def test_the_file_of_cogvideox_fun_itself_is_read(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    buckets = {"overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": 5e8}
    content = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "dump_state": True,
        "zero_optimization": {"stage": 2, **buckets},
    }
    (tmp_path / "zero.json").write_text(json.dumps(content))
    path = {f"{ZERO}CONFIG_FILE": str(tmp_path / "zero.json")}
    config = launched(environment, DEEPSPEED | path, "--max_grad_norm", "0.05", "--train_batch_size", "1")
    assert (config.parallel.zero, config.grad_clip) == (2, 0.05)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"gradient_clipping": 0.3}, "contradicts --max_grad_norm 0.05"),
        ({"fp16": {"enabled": True}}, 'fp16.enabled = True (FILE): is not available; write "bf16"'),
        ({"zero_optimization": {"stage": 4}}, "must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, 'write "cpu" or "none"'),
        ({"train_micro_batch_size_per_gpu": 3}, "which give 16"),
        ({"optimizer": {"type": "Lion"}}, "(FILE): is not read from DeepSpeed's file"),
    ],
)
def test_a_file_of_deepspeed_that_says_other_things_is_refused(
    content: dict[str, object], said: str, tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(content))
    sentence = refusal(
        lambda: launched(environment, DEEPSPEED | {f"{ZERO}CONFIG_FILE": str(file)}, "--max_grad_norm", "0.05")
    )
    assert said.replace("FILE", str(file)) in sentence


@pytest.mark.parametrize(
    "content", [{"zero_optimization": 2}, {"fp16": True}, {"bf16": "auto"}, {"offload_param": "cpu"}]
)
def test_no_section_of_deepspeeds_file_is_a_traceback(
    content: dict[str, object], tmp_path: Path, environment: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": content} if "offload_param" in content else content))
    with pytest.raises(UserError, match=f"{next(iter(content))} = .* is not a section"):
        launched(environment, DEEPSPEED | {f"{ZERO}CONFIG_FILE": str(file)})
    environment.delenv(f"{ZERO}CONFIG_FILE")
    with pytest.raises(UserError, match="--gradient_clipping x: expected a number"):
        launched(environment, DEEPSPEED | {"ACCELERATE_GRADIENT_CLIPPING": "x"})


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, 'write "bf16"'),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "--use_megatron_lm"),
        ({"ACCELERATE_DYNAMO_BACKEND": "EAGER"}, "write inductor"),
        (FSDP | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaBlock"}, "write CogVideoXBlock"),
        (FSDP | {"FSDP_SHARDING_STRATEGY": "SOME"}, "is not a strategy of FSDP"),
        (FSDP | {"FSDP_IGNORED_MODULES": "x"}, "every weight is sharded"),
    ],
)
def test_what_the_launcher_may_not_say(variables: dict[str, str], said: str, environment: pytest.MonkeyPatch) -> None:
    assert said in refusal(lambda: launched(environment, variables))


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE"}, "--fsdp_backward_prefetch"),
        ({"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}, "--fsdp_state_dict_type"),
        ({"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}, "--fsdp_auto_wrap_policy"),
        ({"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}, "--fsdp_cpu_ram_efficient_loading"),
        ({"FSDP_MIN_NUM_PARAMS": "100000000", "FSDP_USE_ORIG_PARAMS": "true"}, None),
    ],
)
def test_fsdp_flag_that_does_nothing_is_named(
    environment: pytest.MonkeyPatch, variables: dict[str, str], named: str | None
) -> None:
    for name, value in (FSDP | variables).items():
        environment.setenv(name, value)
    lines = spoken("train_lora", "--tiny", "--use_peft_lora")[1].lines
    idle = [line for line in lines if "do nothing here" in line]
    assert [line.partition(":")[0] for line in idle] == ([] if named is None else [named])
