"""Idle time of ranks that wait for the slowest of them, with balanced and with random dealing: a simulation.

python benchmarks/balance.py           8 to 1,024 ranks, Open-Sora 2.0's stage-1 and stage-2 tables
python benchmarks/balance.py --tiny    8 ranks, a small table, to see that it runs

The time of a micro-batch is taken to be the FLOPs of Open-Sora 2.0's 11B model, which a cost model of three constants
meets exactly. What a real machine adds is simulated beside it: "5 % off" multiplies each bucket's time by a factor that
the model does not know (log-normal, 5 %). A step is one slot a rank. "random" is the same order of micro-batches
without a cost model.

The mix: over any 200 steps in a row the number of slots of each bucket is compared with its share of the pass; the
deviation is told in standard deviations of 200 steps drawn independently from the steps of the pass. Buckets that come
up in fewer than 10 of 200 steps are counted together, as one ("rare" says how many): a single micro-batch of a bucket
that a pass holds once is any number of deviations off, however it is dealt. "each" counts them one by one, and "each,
drawn" does so with steps that were drawn independently, which is what they are to be compared with.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bucket_tables import bucket_rule, clip_columns
from machine import print_table, write_json

from longtake.buckets.inputs import OrderInputs
from longtake.buckets.mix import CostModel, fit_cost
from longtake.buckets.order import PassOrder, plan_pass
from longtake.contracts import Bucket, LatentShape
from longtake.models.config import MMDiTConfig
from longtake.models.mmdit import MMDiT

TARGET_IDLE, TARGET_SIGMAS = 0.03, 3.0
LATENT, PATCH, TEXT_TOKENS = LatentShape(16, 4, 8, causal=True), 2, 512
MODEL = MMDiTConfig()  # the defaults are Open-Sora 2.0's
RUN_STEPS, RARE_STEPS = 200, 10


def main() -> None:
    """Simulates each table at each number of ranks and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, action="append", help="data ranks; default: 8, 64, 256 and 1024")
    parser.add_argument("--clips", type=float, default=6e6, help="clips of the made-up table")
    parser.add_argument("--tiny", action="store_true", help="20,000 clips, 8 ranks, stage 1")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    ranks = [8] if arguments.tiny else arguments.ranks or [8, 64, 256, 1024]
    columns = clip_columns(20_000 if arguments.tiny else int(arguments.clips))
    figures = []
    for table in ["stage1"] if arguments.tiny else ["stage1", "stage2"]:
        for num_ranks in ranks:
            figures.append(measure(table, columns, num_ranks))
    head = (
        "table",
        "ranks",
        "steps",
        "idle",
        "5 % off",
        "random",
        "mix, sigmas",
        "random",
        "rare",
        "each",
        "each, drawn",
    )
    rows = [
        (
            line["table"],
            line["ranks"],
            line["steps"],
            f"{line['idle']:.2%}",
            f"{line['idle_5_percent_off']:.2%}",
            f"{line['idle_random']:.1%}",
            f"{line['mix_sigmas']:.2f}",
            f"{line['mix_sigmas_random']:.2f}",
            f"{line['rare_buckets']} of {line['buckets']}",
            f"{line['mix_sigmas_each']:.2f}",
            f"{line['mix_sigmas_each_drawn']:.2f}",
        )
        for line in figures
    ]
    print_table(head, rows)
    print(f"targets: idle <= {TARGET_IDLE:.0%}, mix within {TARGET_SIGMAS:.0f} sigmas")
    for line in figures:
        if not arguments.tiny and (line["idle"] > TARGET_IDLE or line["mix_sigmas"] > TARGET_SIGMAS):
            print(f"missed: {line['table']} on {line['ranks']} ranks")
    write_json(arguments.json, "balance", {"tiny": arguments.tiny, "runs": figures})


def measure(table: str, columns: dict[str, np.ndarray], num_ranks: int) -> dict[str, Any]:
    """The figures of one table on so many ranks."""
    rule = bucket_rule(table)
    seconds = np.array([true_cost(bucket) for bucket in rule.buckets], np.float64)
    cost = cost_model(num_ranks)
    inputs = OrderInputs(seed=1, stage=0, slots_per_step=num_ranks, rule=rule, table="made up", **columns, cost=cost)
    balanced = plan_pass(inputs, 0)
    random = plan_pass(replace(inputs, cost=None), 0)
    rng = np.random.default_rng(0)
    off = seconds * np.exp(rng.normal(0, 0.05, len(seconds)))
    counts = slots_by_step(balanced)
    rare = rare_buckets(counts)
    return {
        "table": table,
        "ranks": num_ranks,
        "steps": balanced.num_steps,
        "model_error": float(np.max(np.abs(cost.costs(rule.buckets) / seconds - 1))),
        "idle": idle_share(balanced, seconds),
        "idle_5_percent_off": idle_share(balanced, off),
        "idle_random": idle_share(random, seconds),
        "mix_sigmas": mix_sigmas(together(counts, rare)),
        "mix_sigmas_random": mix_sigmas(together(slots_by_step(random), rare)),
        "buckets": int((counts.sum(axis=0) > 0).sum()),
        "rare_buckets": int((rare & (counts.sum(axis=0) > 0)).sum()),
        "mix_sigmas_each": mix_sigmas(counts),
        "mix_sigmas_each_drawn": mix_sigmas(counts[rng.integers(0, len(counts), len(counts))]),
    }


def true_cost(bucket: Bucket) -> float:
    """FLOPs of a micro-batch."""
    return bucket.batch_size * MMDiT.forward_flops(MODEL, LATENT(*bucket.shape), TEXT_TOKENS)


def cost_model(num_ranks: int) -> CostModel:
    """Constants fitted to three shapes, as a run does before it starts."""
    shapes = [(1, 256, 256), (33, 256, 256), (129, 768, 768)]
    empty = CostModel(0.0, 1.0, 0.0, LATENT, PATCH, num_ranks)
    flops = [MMDiT.forward_flops(MODEL, LATENT(*shape), TEXT_TOKENS) for shape in shapes]
    return CostModel(*fit_cost([empty.tokens(shape) for shape in shapes], flops), LATENT, PATCH, num_ranks)


def idle_share(order: PassOrder, seconds: np.ndarray) -> float:
    """Share of all ranks' time spent waiting for the slowest of them, over a pass (full steps)."""
    steps = full_steps(order)
    times = seconds[steps]
    return float(1 - times.mean(axis=1).sum() / times.max(axis=1).sum())


def slots_by_step(order: PassOrder) -> np.ndarray:
    """int32 [steps, B]: slots of each bucket in each full step."""
    steps = full_steps(order)
    counts = np.zeros((len(steps), len(order.inputs.rule.buckets)), np.int32)
    np.add.at(counts, (np.repeat(np.arange(len(steps)), steps.shape[1]), steps.ravel()), 1)
    return counts


def rare_buckets(counts: np.ndarray) -> np.ndarray:
    """bool [B]: which buckets come up in fewer than `RARE_STEPS` of `RUN_STEPS` steps."""
    return (counts > 0).mean(axis=0) * RUN_STEPS < RARE_STEPS


def together(counts: np.ndarray, rare: np.ndarray) -> np.ndarray:
    """The counts with those of the rare buckets added up, as the last column."""
    return np.column_stack([counts[:, ~rare], counts[:, rare].sum(axis=1)])


def mix_sigmas(counts: np.ndarray) -> float:
    """The largest deviation of any column over any `RUN_STEPS` steps in a row, in standard deviations."""
    run = min(RUN_STEPS, len(counts) // 2)
    total = np.concatenate([np.zeros((1, counts.shape[1]), np.int64), np.cumsum(counts, axis=0)])
    deviation = np.abs(total[run:] - total[:-run] - run * counts.mean(axis=0)).max(axis=0)
    sigma = np.sqrt(run * counts.var(axis=0))
    return float((deviation[sigma > 0] / sigma[sigma > 0]).max())


def full_steps(order: PassOrder) -> np.ndarray:
    """int [steps, G]: the bucket of each slot of each full step."""
    size = order.inputs.slots_per_step
    num_full = len(order.slot_bucket) // size
    return order.slot_bucket[: num_full * size].reshape(num_full, size)


if __name__ == "__main__":
    main()
