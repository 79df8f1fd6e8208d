"""Law 1 as tables of steps: on which mesh, of which denoiser, made how.

`MATRIX` has every way of `_ways` on every mesh of `MESHES` with one denoiser of each family, for `make weekly`. The
other tables run each time: with MMDiT every mesh meets every kind of parameter that trains, recomputation and several
micro-batches a rank; every axis of a mesh and every family meets compiled blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longtake.models.cogvideox_config import CogVideoXConfig
from longtake.models.stdit3_config import STDiT3Config
from longtake.models.ttt_video_config import TTTVideoConfig
from longtake.models.wan_config import WanConfig
from tests.parallel.one_step import Case

Table = Mapping[int, Mapping[str, Case]]  # processes -> name
Way = Mapping[str, Any]  # fields of a case


def _case(degrees: Mapping[str, Any], *ways: Way) -> Case:
    """A step on a mesh, made in several ways at once: where two set a field the later one holds, but those of the model
    are joined."""
    fields: dict[str, Any] = {}
    for way in ways:
        fields = {**fields, **way, "model": {**fields.get("model", {}), **way.get("model", {})}}
    return Case(degrees, **fields)


def _cogvideox(variant: str) -> Way:
    return {"family": CogVideoXConfig, "model": {"variant": variant}}


def _ttt_video(mixer: str, **model: Any) -> Way:
    return {"family": TTTVideoConfig, "model": {"mixer": mixer, **model}}


def _wan(variant: str) -> Way:
    return {"family": WanConfig, "model": {"variant": variant}}


STDIT3: Way = {"family": STDiT3Config}
FUSED, TWO_HEADS = {"fused_qkv": True}, {"num_heads": 2, "axes_dim": (4, 6, 6)}
RING = {"sequence_attention": "ring"}
LORA, NF4 = {"rank": 3, "alpha": 6}, {"hidden_size": 64, "axes_dim": (4, 4, 8)}
DORA = {**LORA, "dora": True, "targets": ("proj", "linear*", "*_mlp*", "*.lin")}
MMDIT: Table = {
    2: {
        "shard 2": Case({}),
        "shard 2, zero 2, prefetch": Case({"zero": 2, "forward_prefetch": 1, "backward_prefetch": 2}),
        "tensor 2": Case({"tensor": 2}),
        "tensor 2, fused, remat": Case({"tensor": 2}, FUSED, remat=(1, 2)),
        "tensor 2, parts frozen": Case({"tensor": 2}, frozen=("img_attn", "linear2.weight", "mlp.0.bias", "txt_in")),
        "shard 2, lora": Case({}, lora=LORA, remat=(1, 0)),
        "shard 2, lora on fp8": Case({}, lora={**LORA, "base": "fp8"}, micro=(0, 1)),
        "shard 2, dora on int8": Case({}, lora={**DORA, "base": "int8"}, remat=(0, 2)),
        "replicate 2, lora on int8": Case({"replicate": 2}, lora={**LORA, "base": "int8"}, micro=(0, 1)),
        "tensor 2, lora": Case({"tensor": 2}, lora=LORA, remat=(2, 1)),
        "tensor 2, layers saved": Case(
            {"tensor": 2}, {"attention": "sdpa"}, remat=(2, 2), level=("linear2", "img_mlp.2"), micro=(0, 2)
        ),
        "tensor 2, fused, dora": Case({"tensor": 2}, FUSED, lora=DORA),
        "sequence 2, lora on nf4": Case({"sequence": 2}, NF4, lora={**LORA, "base": "nf4"}, remat=(0, 1)),
        "sequence 2": Case({"sequence": 2}),
        "sequence 2, ring": Case({"sequence": 2, **RING}),
    },
    4: {
        "shard 4": Case({}, by_blocks=False),
        "replicate 2 x shard 2": Case({"replicate": 2}, remat=(2, 2)),
        "sequence 4": Case({"sequence": 4}),
        "sequence 4, ring": Case({"sequence": 4, **RING}, remat=(2, 1)),
        "sequence 4 of two heads": Case({"sequence": 4}, TWO_HEADS),
        "tensor 4": Case({"tensor": 4}),
        "sequence 2 x tensor 2, lora": Case({"sequence": 2, "tensor": 2}, lora=LORA, remat=(1, 1)),
        "replicate 2 x shard 2, dora": Case({"replicate": 2}, lora=DORA, by_blocks=False),
        "sequence 2 x tensor 2": Case({"sequence": 2, "tensor": 2}, remat=(2, 2)),
        "sequence 2 x tensor 2, ring": Case({"sequence": 2, "tensor": 2, **RING}, FUSED),
        "shard 2 x sequence 2": Case({"sequence": 2}, remat=(1, 1)),
        "shard 2 x sequence 2, parts frozen": Case({"sequence": 2}, frozen=("double_blocks", "v_mlp"), remat=(2, 1)),
        "replicate 2 x tensor 2": Case({"replicate": 2, "tensor": 2}, by_blocks=False),
    },
    8: {
        "shard 2 x sequence 2 x tensor 2": Case({"sequence": 2, "tensor": 2}, remat=(2, 2)),
        "replicate 2 x sequence 2 x tensor 2": Case({"replicate": 2, "sequence": 2, "tensor": 2}, FUSED),
        "sequence 8 of four heads": Case({"sequence": 8}),
    },
}

# Of the other families, on peers with the first blocks recomputed.
PEERS: Mapping[int, Mapping[str, Mapping[str, int]]] = {
    2: {"tensor 2": {"tensor": 2}, "sequence 2": {"sequence": 2}},
    4: {"sequence 2 x tensor 2": {"sequence": 2, "tensor": 2}, "sequence 4": {"sequence": 4}},
}
DENOISERS: Mapping[str, Way] = {
    "CogVideoX-2B": {**_cogvideox("2b"), "by_blocks": False},
    "CogVideoX-5B-I2V": _cogvideox("5b_i2v"),
    "CogVideoX1.5-5B-I2V": _cogvideox("1.5_i2v"),
    "CogVideoX-Fun-5B-InP": _cogvideox("fun_inp_5b"),
    "CogVideoX-5B, lora": {**_cogvideox("5b"), "lora": {"rank": 4}},
    "STDiT3": STDIT3,
    "STDiT3, lora": {**STDIT3, "lora": {"rank": 3}},
    "Wan-TI2V": _wan("ti2v"),
    "Wan-I2V with CLIP, lora": {**_wan("i2v_clip"), "lora": {"rank": 4}},
    "TTT-MLP": _ttt_video("ttt_mlp"),
    "TTT-MLP, directions in parallel": {**_ttt_video("ttt_mlp", directions="parallel"), "by_blocks": False},
}
OTHER_MIXERS: Mapping[str, Way] = {
    f"TTT-Video, {mixer}": _ttt_video(mixer) for mixer in ("none", "ttt_linear", "large_chunk")
}
KERNEL: Way = {"model": {"attention": "sdpa"}}  # whose output may be saved


def _on_peers(size: int, denoisers: Mapping[str, Way]) -> dict[str, Case]:
    return {
        f"{mesh}: {name}": _case(degrees, {"remat": (1, 1), "micro": (0, 1, 2)}, of)
        for mesh, degrees in PEERS[size].items()
        for name, of in denoisers.items()
    }


OTHER_FAMILIES: Table = {
    2: {
        **_on_peers(2, DENOISERS),
        **{
            f"{mesh}: {name}, selective": _case(
                PEERS[2][mesh], DENOISERS[name], KERNEL, {"remat": (2, 2), "micro": (0, 2), "level": "selective"}
            )
            for mesh in ("sequence 2", "tensor 2")
            for name in ("CogVideoX-5B-I2V", "STDiT3", "Wan-TI2V", "TTT-MLP")
        },
    },
    4: {
        **_on_peers(4, DENOISERS),
        **{
            f"tensor 4: {name}": _case({"tensor": 4}, {"remat": (1, 1), "micro": (0, 1, 2)}, DENOISERS[name])
            for name in ("STDiT3", "STDiT3, lora", "Wan-TI2V")
        },
    },
}
MIXERS: Table = {2: _on_peers(2, OTHER_MIXERS)}

# Blocks compiled.
SMALL: Way = {"model": {"depth": 1, "depth_single_blocks": 1, "attention": "sdpa"}}
SELECTIVE: Way = {"compiled": "aot_eager", "remat": (2, 2), "level": "selective"}
RECOMPUTED: Way = {"compiled": "aot_eager", "remat": (2, 2)}
ON_FP8: Way = {"lora": {**LORA, "base": "fp8"}, "micro": (0, 1)}
ONE_SIZE: Mapping[str, Way] = {  # with a graph of its own, as in presets; STDiT3's open sizes take a minute more
    "tensor 2: CogVideoX-Fun-5B-InP": {**DENOISERS["CogVideoX-Fun-5B-InP"], "micro": (0,)},
    "tensor 2: STDiT3": {**STDIT3, "model": {"depth": 1}, "micro": (3,)},
    "sequence 2: TTT-MLP": {**DENOISERS["TTT-MLP"], "micro": (0,)},
    "tensor 2: Wan-TI2V": {**DENOISERS["Wan-TI2V"], "micro": (0,)},
}
COMPILED: Table = {
    2: {
        "sequence 2": _case({"sequence": 2}, SMALL, {"compiled": "aot_eager", "micro": (1,)}),
        "tensor 2, remat": _case({"tensor": 2}, SMALL, RECOMPUTED, {"micro": (0, 4)}),
        "shard 2, lora on fp8": _case({}, SMALL, ON_FP8, {"compiled": "aot_eager", "static": True}),
        "shard 2, lora on fp8, selective": _case({}, SMALL, SELECTIVE, ON_FP8),
        "sequence 2, ring, dora, selective": _case(
            {"sequence": 2, **RING}, SMALL, SELECTIVE, {"lora": DORA, "micro": (0,)}
        ),
        "tensor 2, lora, selective": _case({"tensor": 2}, SMALL, SELECTIVE, {"lora": LORA, "micro": (1,)}),
        **{
            f"{name}, selective": _case(PEERS[2][name.split(":")[0]], KERNEL, SELECTIVE, of, {"static": True})
            for name, of in ONE_SIZE.items()
        },
    },
    4: {"replicate 2 x shard 2, remat": _case({"replicate": 2}, SMALL, RECOMPUTED, {"static": True})},
}

# Every mesh of the law, and on each of them every way.
MESHES: Mapping[int, Mapping[str, Mapping[str, int]]] = {  # processes -> name -> degrees; shard is what is left
    2: {"shard 2": {}, "tensor 2": {"tensor": 2}, "sequence 2": {"sequence": 2}},
    4: {
        "shard 4": {},
        "replicate 2 x shard 2": {"replicate": 2},
        "sequence 4": {"sequence": 4},
        "sequence 2 x tensor 2": {"sequence": 2, "tensor": 2},
    },
    8: {"shard 2 x sequence 2 x tensor 2": {"sequence": 2, "tensor": 2}},
}
FROZEN = (
    "double_blocks.0",
    "spatial_blocks.0",
    "transformer_blocks.0",
    "img_attn",
    "v_mlp",
    "txt_in",
    "cross_attn",
    "attn1",
    "text_proj",
)


def _ways(long: int, short: int) -> Mapping[str, Way]:
    """As many micro-batches for every data rank; compiled are two of these numbers, the long one for all peers."""
    compiled = {"compiled": "aot_eager", "micro": (long, short, short, long)}
    keeps = {**compiled, **SELECTIVE, **KERNEL}
    return {
        "plain": {},
        "every block recomputed": {"remat": (2, 2)},
        "blocks compiled": compiled,
        "blocks compiled and recomputed": {**compiled, "remat": (2, 2)},
        "blocks compiled, selective": keeps,
        "parts frozen": {"frozen": FROZEN},
        "parts frozen, blocks recomputed": {"frozen": FROZEN, "remat": (1, 2)},
        "three micro-batches a rank": {"micro": (0, 1, 2, 3) * 3},
        "adapters": {"lora": LORA},
        "adapters, blocks recomputed": {"lora": LORA, "remat": (2, 2)},
        "adapters, blocks compiled, selective": {**keeps, "lora": LORA},
    }


EVERYWHERE = ("three micro-batches a rank", "parts frozen, blocks recomputed", "adapters, blocks recomputed")
CHOSEN: Table = {
    size: {f"{mesh}: {way}": _case(degrees, _ways(0, 1)[way]) for mesh, degrees in meshes.items() for way in EVERYWHERE}
    for size, meshes in MESHES.items()
}
MATRIX: Mapping[str, Table] = {  # by family
    family: {
        size: {
            f"{family}, {mesh}: {way}": _case(degrees, how, of)
            for mesh, degrees in meshes.items()
            for way, how in ways.items()
        }
        for size, meshes in MESHES.items()
    }
    for family, of, ways in (
        ("MMDiT", {}, _ways(0, 1)),
        ("CogVideoX", {**DENOISERS["CogVideoX-5B-I2V"], "static": True}, _ways(3, 2)),
        ("STDiT3", {**STDIT3, "static": True}, _ways(3, 2)),
        ("TTT-Video", {**DENOISERS["TTT-MLP"], "static": True}, _ways(2, 3)),
        ("Wan", {**DENOISERS["Wan-TI2V"], "static": True}, _ways(3, 1)),
    )
}
TABLES: Mapping[str, Table] = {
    "law": MMDIT,
    "families": OTHER_FAMILIES,
    "mixers": MIXERS,
    "compiled": COMPILED,
    "some ways": CHOSEN,
    **{f"all ways of {family}": table for family, table in MATRIX.items()},
}
