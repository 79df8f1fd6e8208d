"""Law 1 as a table: every mesh of the law, and on each of them every way of making a step.

`MATRIX` is all of it, for `make weekly`. `CHOSEN` runs each time: with the cases of `plays.py`, which make steps in
the plainest way, every mesh meets every kind of parameter that trains, recomputation and several micro-batches a rank,
and every axis of a mesh meets compiled blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.parallel.one_step import Case

Table = Mapping[int, Mapping[str, Case]]
MESHES: Mapping[int, Mapping[str, Mapping[str, Any]]] = {  # processes -> name -> degrees; shard is what is left
    2: {"shard 2": {}, "tensor 2": {"tensor": 2}, "sequence 2": {"sequence": 2}},
    4: {
        "shard 4": {},
        "replicate 2 x shard 2": {"replicate": 2},
        "sequence 4": {"sequence": 4},
        "sequence 2 x tensor 2": {"sequence": 2, "tensor": 2},
    },
    8: {"shard 2 x sequence 2 x tensor 2": {"sequence": 2, "tensor": 2}},
}
FROZEN = ("double_blocks.0", "img_attn", "v_mlp", "txt_in")
LORA = {"rank": 3, "alpha": 6}
COMPILED = {"compiled": "aot_eager", "micro": (0, 1, 0, 1)}
BUDGET = {**COMPILED, "remat": (2, 2), "budget": 0.5, "model": {"attention": "sdpa"}}
WAYS: Mapping[str, Mapping[str, Any]] = {  # of 18, 12, 5 and 1 tokens; as many micro-batches for every data rank
    "plain": {},
    "every block recomputed": {"remat": (2, 2)},
    "blocks compiled": COMPILED,
    "blocks compiled and recomputed": {**COMPILED, "remat": (2, 2)},
    "blocks compiled, a budget": BUDGET,
    "parts frozen": {"frozen": FROZEN},
    "parts frozen, blocks recomputed": {"frozen": FROZEN, "remat": (1, 2)},
    "three micro-batches a rank": {"micro": (0, 1, 2, 3) * 3},
    "adapters": {"lora": LORA},
    "adapters, blocks recomputed": {"lora": LORA, "remat": (2, 2)},
    "adapters, blocks compiled, a budget": {**BUDGET, "lora": LORA},
}
EVERYWHERE = ("three micro-batches a rank", "parts frozen, blocks recomputed", "adapters, blocks recomputed")
MESHES_COMPILED = ("tensor 2", "replicate 2 x shard 2")  # seconds for each process; other axes: `plays.py`


def _table(chosen: Mapping[str, tuple[str, ...]]) -> Table:
    return {
        size: {f"{mesh}: {way}": Case(degrees, **WAYS[way]) for mesh, degrees in meshes.items() for way in chosen[mesh]}
        for size, meshes in MESHES.items()
    }


MATRIX = _table({mesh: tuple(WAYS) for meshes in MESHES.values() for mesh in meshes})
CHOSEN = _table(
    {
        mesh: EVERYWHERE + ("blocks compiled and recomputed",) * (mesh in MESHES_COMPILED)
        for meshes in MESHES.values()
        for mesh in meshes
    }
)
