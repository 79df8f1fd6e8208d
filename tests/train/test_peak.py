from __future__ import annotations

from pathlib import Path

from tests.train.runs import train_here


def test_mfu_is_shown_where_the_peak_is_given_and_left_out_where_it_is_unknown(config: Path) -> None:
    _, said = train_here(config, "--peak_tflops", "0.001", "--max_steps", "4", "--exp_name", "with")
    assert "  mfu " in said
    _, said = train_here(config, "--max_steps", "4", "--exp_name", "without")
    assert "tflops_per_device" in said
    assert "  mfu " not in said
