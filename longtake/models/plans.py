"""Sharding plans of a denoiser, as data that the model classes declare and the parallel plans read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from longtake.contracts import Conditions, UserError

ANY = -1  # in the shape of a condition: a length that the model leaves open


@dataclass(frozen=True)
class TensorSplit:
    """Sharding of one linear layer by tensor parallelism.

    `column` cuts the output features (rows of the stored weight, and the bias), `row` the input features; the sum over
    devices of a `row` layer's outputs, plus its bias once, is the result; a `whole` one stands between the regions of
    these and is not cut, for there each device has tokens of its own. `parts` names the config sizes that make up
    the cut dimension where it holds several things side by side: each part is cut on its own. `tokens` names what the
    layer runs over: modules of `SequencePlan.split`, in the order in which their tokens follow one another; (): what
    every peer has whole, such as a text.
    """

    kind: Literal["column", "row", "whole"]
    parts: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exchange:
    """All-to-all of sequence-parallel ranks around a submodule that mixes tokens: from this rank's tokens of all heads
    to all tokens of this rank's heads, and back for its result.

    The submodule is called on tensors [B, l, N, K], of this rank's share of the tokens, and returns one like the first;
    K may differ. What is no tensor is passed on as it is.
    `queries`: the modules of `SequencePlan.split` whose tokens the first has, in the order in which they follow one
    another; `keys`: those of the other tensors, which may be more or fewer (None: the same). `ring`: peers beyond the
    number of heads pass keys and values around; False for a submodule that is no attention, whose heads must suffice.
    `of_heads`: parameters of the submodule with the heads along dim 0, of which it finds those of its heads alone (it
    need not have them all). `by_tensor_peers`: the submodule stands between the regions of tensor parallelism, where
    each tensor peer has tokens of its own; then these peers exchange as the others do.
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...] | None = None
    ring: bool = True
    of_heads: tuple[str, ...] = ()
    by_tensor_peers: bool = False


@dataclass(frozen=True)
class Switch:
    """Own units at all their places for all units at own places, and back: for attention over time at each place.

    The submodule is called on tensors [B, units, places, ...] of the tokens of `split`, which a plan cuts by units, and
    returns one like the first.
    """

    split: str


@dataclass(frozen=True)
class Halo:
    """The end of the share before this one goes in front of the first tensor of a submodule, [B, l, ...], and what the
    submodule makes of it is added to that share: for windows that reach over a cut.

    split: whose tokens; width: how much, a name in the class's `units`; tensors: how many of the first tensors are such
    as that, alike in shape. Of several results the first is such a tensor.
    """

    split: str
    width: str
    tensors: int = 1


@dataclass(frozen=True)
class Sum:
    """All-reduce of a submodule's result, which each rank computes from its own tokens: for an inner gradient, or a
    statistic."""


@dataclass(frozen=True)
class SequencePlan:
    """Plan of sequence parallelism: where it splits tokens, gathers them, and runs collectives.

    `split`: module name -> dim of that module's output which is cut. `gather`: module name -> the module of `split`
    whose tokens its output has, to be collected. `exchanges`: pattern (`*` is a block number) of a submodule -> what
    peers exchange around it; a submodule that is not named works on its own tokens alone (cross-attention to a text
    that every peer has whole, attention within a frame where frames are the unit). `entry`: module name -> the modules
    of `split` whose tokens are its first arguments; from there to `gather`, tensor parallelism cuts the tokens between
    its regions (`TensorSplit`) once more. `units`: module of `split` -> what is not cut apart, a name in the class's
    `units`, of which the first may be longer; a module that is not named is cut between any two tokens. `tensor_units`:
    tensor peers cut between units alone, too, for a model whose layers between regions ask what unit a token is of.
    """

    split: Mapping[str, int]
    gather: Mapping[str, str]
    exchanges: Mapping[str, Exchange | Switch | Halo | Sum]
    entry: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    units: Mapping[str, str] = field(default_factory=dict)
    tensor_units: bool = False


def check_conditions(
    model: str, needs: Mapping[str, tuple[int, ...]], conditions: Conditions, batch: int, remedies: Mapping[str, str]
) -> None:
    """Raise `UserError` for a condition that is missing or has another shape than `needs` says, batch in front.

    remedies: condition -> what to do where it is missing.
    """
    for name, shape in needs.items():
        if name not in conditions:
            raise UserError(f"the {model} model needs the condition `{name}`, which was not given; {remedies[name]}")
        found, wanted = conditions[name].shape, (batch, *shape)
        if len(found) != len(wanted) or any(w not in (ANY, f) for w, f in zip(wanted, found, strict=True)):
            expected = ", ".join("any" if n == ANY else str(n) for n in wanted)
            raise UserError(f"condition `{name}` has shape {list(found)}; the {model} model needs [{expected}]")
