"""Groups of parameters: which ones they have, and that each is updated at its own rate and decay."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from longtake.contracts import UserError
from longtake.train.optimizer.groups import groups_of
from longtake.train.optimizer.sharded import ShardedAdamW
from tests.train.optimizer.test_schedule import run_config
from tests.train.optimizer.test_sharded import give_gradients, model_of
from tests.train.runs import exact, metrics, tensors, train_here, write_config

TTT = ("attn.q", "attn.q_bias", "ttt.w1", "ttt.norm", "ssm.gate", "mlp.bias", "mlp.w")


def named(*names: str, frozen: str = "") -> nn.Module:
    """A module with parameters of such names; those of modules in `frozen` are not trained."""
    model = nn.Module()
    for name in names:
        where, _, last = name.rpartition(".")
        if not hasattr(model, where):
            model.add_module(where, nn.Module())
        getattr(model, where).register_parameter(last, nn.Parameter(torch.ones(2), requires_grad=where != frozen))
    return model


def test_the_first_group_that_matches_takes_a_parameter_and_the_others_are_left() -> None:
    groups = [{"match": ["ttt.*", "ssm.*"], "name": "ttt"}, {"match": ["*bias", "ttt.norm"], "weight_decay": 0.5}]
    found = groups_of(named(*TTT), run_config(optim={"groups": groups, "weight_decay": 0.1}))
    assert [(group.name, group.names, group.weight_decay) for group in found] == [
        ("others", ("attn.q", "mlp.w"), 0.1),
        ("ttt", ("ttt.w1", "ttt.norm", "ssm.gate"), 0.1),
        ("group 2", ("attn.q_bias", "mlp.bias"), 0.5),
    ]


def test_a_group_of_which_nothing_trains_is_left_out() -> None:
    groups = [{"match": ["ttt.*"], "name": "ttt"}, {"match": ["*bias"]}]
    found = groups_of(named(*TTT, frozen="ttt"), run_config(optim={"groups": groups}))
    assert [(group.name, group.names) for group in found] == [
        ("others", ("attn.q", "ssm.gate", "mlp.w")),
        ("group 2", ("attn.q_bias", "mlp.bias")),
    ]


def test_a_group_without_a_parameter_is_refused() -> None:
    groups = [{"match": ["*"]}, {"match": ["ttt.*"]}]
    with pytest.raises(
        UserError, match=r"optim\.groups\[1\]\.match = \['ttt\.\*'\]: fits no name .*groups before it have"
    ):
        groups_of(named(*TTT), run_config(optim={"groups": groups}))
    with pytest.raises(UserError, match=r"optim\.groups\[0\].*names are such as attn\.q, attn\.q_bias, ttt\.w1"):
        groups_of(named(*TTT), run_config(optim={"groups": [{"match": ["tt"]}]}))


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_each_group_is_updated_at_its_own_rate_and_decay_as_by_an_optimizer_of_its_own(states: str) -> None:
    """Four kinds of parameters as TTT-Video has them: two rates, each with and without decay."""
    shapes = (64, 96), (5,), (80, 64), (3, 4)
    optim: dict[str, Any] = {"states": states, "weight_decay": 0.1, "no_decay": ["p1", "p3"]}
    groups = [{"match": ["p2", "p3"], "schedule": [(0, 1e-2), (2, 3e-2)]}]
    together, apart = model_of(*shapes), model_of(*shapes)
    whole = ShardedAdamW(together, run_config(lr=1e-3, eps=1e-8, optim={**optim, "groups": groups}))
    alone = ShardedAdamW(apart, run_config(lr=1e-3, eps=1e-8, optim=optim))
    for step in range(3):
        rates = whole.rates(step)
        assert rates == {"others": 1e-3, "group 1": pytest.approx(1e-2 + step * 1e-2)}
        give_gradients(together, step)
        whole.step(rates, None)
        before = {name: p.detach().clone() for name, p in apart.named_parameters()}
        moments = {name: tensor.clone() for name, tensor in alone.state().items()}
        for rate, own in ((rates["group 1"], ("p2", "p3")), (1e-3, ("p0", "p1"))):
            for name, p in apart.named_parameters():  # the same update at each rate, of which a part is kept
                p.data.copy_(before[name])
            for name, tensor in alone.state().items():
                tensor.copy_(moments[name])
            alone.set_updates(step)
            give_gradients(apart, step)
            alone.step(rate, None)
            kept = {name: p.detach().clone() for name, p in apart.named_parameters() if name in own}
            for name, value in kept.items():
                assert torch.equal(dict(together.named_parameters())[name], value), (step, name)
        for p, q in zip(apart.parameters(), together.parameters(), strict=True):
            p.data.copy_(q)


def test_a_run_says_its_groups_and_one_like_all_others_changes_no_bit(tmp_path: Path, clips: Path) -> None:
    plain, _ = train_here(write_config(tmp_path / "plain", clips, max_steps=3))
    group = {"match": ["single_blocks.*"], "name": "single"}
    same, said = train_here(write_config(tmp_path / "same", clips, max_steps=3, optim={"groups": [group]}))
    assert exact(same.folder) == exact(plain.folder)
    sizes = re.findall(r"^learning rate of (\w+): (\d+) tensors", said, re.MULTILINE)
    assert [name for name, _ in sizes] == ["others", "single"]
    trained = [name for name in tensors(same.checkpoint) if name.startswith("model.")]
    assert sum(int(size) for _, size in sizes) == len(trained)
    other, _ = train_here(same.folder, "--max-steps", "5", "--optim.groups", str([{**group, "lr": 1e-5}]))
    assert [line.get("rates") for line in metrics(other.folder)[3:]] == [{"others": 3e-3, "single": 1e-5}] * 2
