"""Fused operators are the model's own formulas under every way of making a step on two processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longtake.models import fused, projections
from longtake.parallel import World
from tests.parallel.matrix import OTHER_FAMILIES
from tests.parallel.one_step import Case, Step, assert_one_step, compare, step_on, whole
from tests.precision import within
from tests.ranks import Facts, on_ranks

LORA = {"rank": 3, "alpha": 6}
DORA = {**LORA, "dora": True, "targets": ("proj", "linear*", "*_mlp*", "k_proj")}
KERNEL, HALF = {"attention": "sdpa"}, torch.bfloat16
BUDGET: Mapping[str, Any] = {"model": KERNEL, "remat": (2, 2), "budget": 0.5, "micro": (0, 1)}
COMPILED: Mapping[str, Any] = {**BUDGET, "compiled": "aot_eager", "micro": (0,)}
BODIES = [(fused.Plain, of + way) for of in ("join", "gate") for way in ("", "_backward")] + [(projections, "joined")]
EIGHTS: Mapping[str, Any] = {"float8": True, "model": {**KERNEL, "num_heads": 2, "axes_dim": (4, 6, 6)}}
EXACT = {
    "zero 3": Case({}, remat=(1, 2)),
    "zero 2, a budget": Case({"zero": 2}, **BUDGET),
    "Ulysses, a budget": Case({"sequence": 2}, **BUDGET),
    "ring, recomputed": Case({"sequence": 2, "sequence_attention": "ring"}, remat=(2, 2)),
    "tensor peers, a budget": Case({"tensor": 2}, **BUDGET),
    "q, k and v as one layer, tensor peers": Case({"tensor": 2}, {"fused_qkv": True}, remat=(2, 1)),
    "parts frozen": Case({}, frozen=("img_attn.k_proj", "img_attn.norm", "single_blocks.0", "txt_in"), remat=(1, 1)),
    "LoRA, a budget": Case({}, lora=LORA, **BUDGET),
    "LoRA, Ulysses": Case({"sequence": 2}, lora=LORA, remat=(2, 2)),
    "DoRA, zero 2": Case({"zero": 2}, lora=DORA, remat=(0, 2)),
    "DoRA, tensor peers": Case({"tensor": 2}, lora=DORA),
}
IN_HALF = {name: replace(EXACT[name], dtype=HALF) for name in ("zero 3", "zero 2, a budget", "Ulysses, a budget")} | {
    "ring, a budget": Case({"sequence": 2, "sequence_attention": "ring"}, **BUDGET, dtype=HALF),
    "tensor peers": Case({"tensor": 2}, remat=(2, 1), dtype=HALF),
    "LoRA, a budget": replace(EXACT["LoRA, a budget"], dtype=HALF),
}
GRAPHS = {
    "tensor peers": Case({"tensor": 2}, **COMPILED),
    "Ulysses, bf16": Case({"sequence": 2}, **COMPILED, dtype=HALF),
}
IN_FLOAT8 = {
    "zero 3": Case({}, **EIGHTS, remat=(1, 1)),
    "Ulysses": Case({"sequence": 2}, **EIGHTS, remat=(2, 2), micro=(0, 1)),
}


def forced(case: Case, world: World) -> tuple[Step, list[str]]:
    """A step by the operators, and what of them ran: in graphs they are called as such."""
    ran = set()

    def noted(name: str, body: Callable[..., Any], *args: Any) -> Any:
        ran.add(name)
        return body(*args)

    torch.compiler.reset()
    fused.use(fused.NAMES)
    try:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.filterwarnings("error", "FSDP2-wrapped module .* returned a view")
            for owner, name in BODIES:
                patch.setattr(owner, name, partial(noted, name, getattr(owner, name)))
            return step_on(case, world), sorted(ran)
    finally:
        fused.use(())
        torch.compiler.reset()


def apart(one: Step, other: Step) -> float:
    """How far losses and gradients are from others, as a share of these."""

    def joined(step: Step) -> Tensor:
        return torch.cat(
            [torch.tensor(step.losses), *(whole(step.gradients[name]).flatten() for name in sorted(step.gradients))]
        )

    assert one.gradients.keys() == other.gradients.keys()
    return float((joined(one) - joined(other)).norm() / joined(other).norm())


def beside(cases: Mapping[str, Case], world: World) -> Facts:
    """Of each case: how far a step by the operators is from one without them; where it computes in half precision, how
    far either is from one in float32."""
    found = {}
    for name, case in cases.items():
        plain = step_on(replace(case, compiled=None), world)
        ours, ran = forced(case, world)
        found[name] = {"apart": apart(ours, plain), "ran": ran}
        if case.dtype != torch.float32:
            exact = step_on(replace(case, dtype=torch.float32, compiled=None), world)
            found[name] |= {"ours": apart(ours, exact), "plain": apart(plain, exact)}
    return found


def facts_of(cases: Mapping[str, Case], folder: Path) -> list[tuple[str, Facts]]:
    ranks = on_ranks(2, folder, {"cases": partial(beside, cases)})
    return [(name, facts["cases"][name]) for facts in ranks for name in cases]


def assert_ran(name: str, facts: Facts) -> None:
    one_product = not any(word in name for word in ("tensor", "LoRA", "DoRA", "float8"))  # there layers have their own
    assert facts["ran"] == sorted(of for _, of in BODIES if of != "joined" or one_product), (name, facts)


@pytest.mark.slow
def test_they_change_no_step_in_float32(tmp_path: Path) -> None:
    for name, facts in facts_of(EXACT, tmp_path):
        assert within(facts["apart"], 1e-6), (name, facts)
        assert_ran(name, facts)


@pytest.mark.slow
def test_they_round_a_step_in_bfloat16_no_more_than_the_models_own_operations(tmp_path: Path) -> None:
    for name, facts in facts_of(IN_HALF, tmp_path):
        assert within(facts["ours"] - facts["plain"], 0.1 * facts["plain"]), (name, facts)
        assert_ran(name, facts)


@pytest.mark.slow
def test_they_are_in_the_graphs_of_compiled_blocks_with_a_budget(tmp_path: Path) -> None:
    for name, facts in facts_of(GRAPHS, tmp_path):
        if "bf16" in name:
            assert within(facts["ours"] - facts["plain"], 0.1 * facts["plain"]), (name, facts)
        else:
            assert within(facts["apart"], 1e-6), (name, facts)
        assert_ran(name, facts)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao: pip install '.[fp8]'")
def test_products_in_float8_go_on_beside_them(tmp_path: Path) -> None:
    for name, facts in facts_of(IN_FLOAT8, tmp_path):
        assert within(facts["apart"], 1e-3), (name, facts)
        assert_ran(f"float8, {name}", facts)


OTHERS = ("CogVideoX-5B-I2V", "CogVideoX-5B, lora", "STDiT3", "STDiT3, lora", "TTT-MLP")


def of_others(world: World) -> Facts:
    """Steps of the other denoisers by the operators, on peers and alone: how far apart they are."""
    cases = {name: case for name, case in OTHER_FAMILIES[2].items() if name.partition(": ")[2] in OTHERS}
    assert len(cases) == 2 * len(OTHERS)
    fused.use(fused.NAMES)
    try:
        return compare(cases, world)
    finally:
        fused.use(())


@pytest.mark.slow
def test_peers_of_the_other_denoisers_compute_what_one_process_does(tmp_path: Path) -> None:
    """By the operators both; `tests.models.test_fused` holds those of one process to the plain way."""
    ranks = [facts["others"] for facts in on_ranks(2, tmp_path, {"others": of_others})]
    for name in ranks[0]:
        assert_one_step(ranks, name)
