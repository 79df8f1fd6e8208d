"""Steps in float8 on two processes, their blocks compiled and recomputed with a budget (law 1)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longtake.parallel.world import World
from tests.parallel.matrix import SELECTIVE, SMALL
from tests.parallel.one_step import Case, Step, differences, step_alone, step_on, whole
from tests.precision import within
from tests.ranks import Facts, on_ranks

pytest.importorskip("torchao.float8")
SHARDS = Case({}, SMALL["model"], float8=True, micro=(0, 1), **SELECTIVE)


def apart(step: Step, other: Step) -> float:
    """Relative distance of losses and gradients from those of another step."""

    def joined(step: Step) -> Tensor:
        gradients = [whole(step.gradients[name]).flatten() for name in sorted(step.gradients)]
        return torch.cat([torch.tensor(step.losses), *gradients])

    assert step.gradients.keys() == other.gradients.keys()
    return float((joined(step) - joined(other)).norm() / joined(other).norm())


def beside_one_process(world: World) -> Facts:
    """Of shards, how far they are from one process; of sequence peers and of one process, from a step in float32."""
    peers = replace(SHARDS, parallel={"sequence": 2}, micro=(0,))
    exact = step_alone(replace(peers, float8=False))
    return {
        "shards": differences(step_on(SHARDS, world), step_alone(SHARDS)),
        "peers": apart(step_on(peers, world), exact),
        "alone": apart(step_alone(peers), exact),
    }


@pytest.mark.slow
def test_shards_make_the_step_of_one_process_and_sequence_peers_round_like_it(tmp_path: Path) -> None:
    """Shards scale what one process scales. Each sequence peer scales its own tokens, so it may round otherwise."""
    for facts in (found["steps"] for found in on_ranks(2, tmp_path, {"steps": beside_one_process})):
        assert within(max(facts["shards"].values()), 1e-6)
        assert facts["peers"] > 1e-3
        assert within(facts["peers"] - facts["alone"], 0.1 * facts["alone"])
