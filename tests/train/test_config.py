"""Rules of a run's config that its sections do not hold by themselves."""

from __future__ import annotations

from typing import Any

import pytest

from longtake.config.faults import ConfigError
from longtake.config.load import load_config
from longtake.config.schema import all_names
from longtake.contracts import UserError
from longtake.presets import find_preset
from longtake.train.config import RunConfig
from tests.train.optimizer.test_schedule import run_config


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"keep_n_latest": 0}, "keep_n_latest"),
        ({"keep_n_latest": -2}, "keep_n_latest"),
        ({"exp_name": "a/b"}, "plain folder name"),
        ({"exp_name": ".hidden"}, "plain folder name"),
        ({"resume": "yes"}, 'must be "auto"'),
        ({"resume": "auto", "load": "latest"}, "keep one of the two"),
        ({"use_cosine_scheduler": True}, "max_steps"),
        ({"use_cosine_scheduler": True, "decay_fraction": 0.1, "max_steps": 5}, "keep one of the two"),
        ({"bucket_config": {"32px": {1: (2.0, 1)}}}, "bucket_config"),
        ({"parallel": {"shard": 0}}, "parallel.shard"),
        ({"ema_decay": 1.0}, "ema_decay"),
        ({"slots_per_step": 0}, "slots_per_step"),
    ],
    ids=str,
)
def test_a_run_that_cannot_work_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        run_config(**values)
    assert said in str(refused.value)


@pytest.mark.parametrize("count", [-1, 1, 7])
def test_checkpoints_kept_are_all_or_some(count: int) -> None:
    assert run_config(keep_n_latest=count).keep_n_latest == count


def test_what_other_programs_call_a_key_leads_to_ours() -> None:
    names = {".".join(map(str, path)) for path in all_names(RunConfig)}
    for word, hint in RunConfig.OTHER_WORDS.items():
        with pytest.raises(ConfigError) as refused:
            load_config(find_preset("custom"), [f"--{word}", "3"], RunConfig)
        assert f"is no key; did you mean {hint}?" in str(refused.value)
        assert hint.split(",")[0] in names | {"lora.rank"}
