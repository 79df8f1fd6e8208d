"""Open-Sora 1.2's presets and the Lambda recipe's say what was published: tables, masks, rates, stages."""

from __future__ import annotations

import pytest

from longtake.presets import find_preset
from longtake.train.config import RunConfig, RunWithoutTable
from longtake.train.optimizer.schedule import learning_rate
from longtake.train.run_file import read_curriculum, read_run
from tests.buckets.tables import golden
from tests.buckets.test_laws import v1_2_rule
from tests.precision import rounding

V1_2 = "opensora_v1_2"
TABLES, MASKS = golden("bucket_tables.json", V1_2), golden("masks.json", V1_2)["sets"]
RATES = [case for case in golden("lr.json.xz", V1_2) if "resume" not in case]
LAMBDA = range(1, 8)


def preset(name: str) -> RunConfig:
    return read_run(str(find_preset(f"opensora_v1_2/{name}")), [], RunWithoutTable).value


@pytest.mark.parametrize("number", LAMBDA)
def test_stages_have_the_published_tables_and_masks(number: int) -> None:
    stage = (number - 1) % 3 + 1 if number < 7 else 3
    config, base = preset(f"lambda_{number}"), preset(f"stage{stage}")
    expected = v1_2_rule(
        next(of["table"] for name, of in TABLES.items() if name in (f"B{stage}", f"train/stage{stage}"))
    )
    assert config.bucket_rule.content() == base.bucket_rule.content() == expected.content()
    assert [bucket.batch_size for bucket in config.bucket_rule.buckets] == [b.batch_size for b in expected.buckets]
    ratios = {kind: ratio for kind, ratio, _ in MASKS[f"train/stage{stage}"]["order_ratio_cumulative"] if ratio}
    ratios["interpolate"] = ratios.pop("intepolate")
    assert base.condition_config == pytest.approx(ratios)
    assert config.condition_config == (base.condition_config if number < 4 else None)


@pytest.mark.parametrize(
    ("name", "case"),
    [("stage1", 0), ("stage3", 0), ("lambda_1", 1), ("lambda_2", 1), ("lambda_4", 4), ("lambda_5", 4), ("lambda_7", 5)],
)
def test_rates_are_those_of_the_published_schedules(name: str, case: int) -> None:
    config, expected = preset(name), RATES[case]
    rates = [learning_rate(config, step) for step in range(expected["steps"])]
    assert rates == pytest.approx(expected["values"], rel=0, abs=rounding(max(rates)))  # its cosine is of float32


def test_the_recipe_has_seven_stages_that_hand_on_weights_as_trained() -> None:
    curriculum = read_curriculum(str(find_preset("opensora_v1_2/lambda")))
    assert [stage.run.stem for stage in curriculum.stages] == [f"lambda_{number}" for number in LAMBDA]
    configs = [preset(f"lambda_{number}") for number in LAMBDA]
    assert [config.epochs for config in configs] == [5, 5, 5, 3, 1, 1, 3]  # as the page says
    assert {config.max_steps for config in configs} == {None}
    assert [config.warmup_steps for config in configs[:3]] == [400, 400, 1000]
    assert [config.lr for config in configs[:3]] == [1.6e-4, 1.6e-4, 2e-4]
    assert {(c.optim.weight_decay, c.ema_decay, c.eps, c.model.from_part) for c in configs} == {
        (0.01, 0.99, 1e-15, "model")
    }
    assert [config.model.from_pretrained for config in configs[1:]] == [f"outputs/lambda_{n}" for n in LAMBDA[:-1]]
    assert preset("stage2").warmup_steps is None
    assert not preset("stage1").optim.weight_decay


def test_before_stage_1_temporal_blocks_come_last_and_alone() -> None:
    curriculum, path = (f(str(find_preset("opensora_v1_2/adapt"))) for f in (read_curriculum, str))
    stages = [read_run(path, ["--stage", stage.name], RunWithoutTable).value for stage in curriculum.stages]
    assert [stage.max_steps for stage in stages] == [20_000, 18_000, 10_000, 33_000, 8_000, 25_000, 3_000, 38_000]
    assert [stage.objective.type for stage in stages] == ["noise_prediction"] * 2 + ["flow_1000"] * 6
    assert [stage.model.qk_norm for stage in stages] == [False] + [True] * 7
    assert [stage.ae.latent.temporal for stage in stages] == [1] * 5 + [4] * 3
    assert {stage.ae.spatial_scale for stage in stages[:5]} == {0.13025}
    assert ["temporal_blocks" in stage.freeze for stage in stages] == [True] * 6 + [False] * 2
    assert [stage.train_only for stage in stages] == [None] * 7 + [("temporal_blocks",)]
    assert [max(frames for _, frames in stage.bucket_rule.entries) for stage in stages] == [1] * 7 + [204]
    ratios = {kind: ratio for kind, ratio, _ in MASKS["train/adapt"]["order_ratio_cumulative"]}
    ratios["interpolate"] = ratios.pop("intepolate")
    assert stages[-1].condition_config == pytest.approx(ratios)
    assert (stages[2].objective.sample_method, stages[3].objective.sample_method) == ("uniform", "logit-normal")
