"""How a denoiser may be cut over devices, as data that the model classes declare and the parallel plans read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TensorSplit:
    """How tensor parallelism cuts one linear layer.

    `column` cuts the output features (rows of the stored weight, and the bias), `row` the input features; the sum over
    devices of a `row` layer's outputs, plus its bias once, is the result. `parts` names the config sizes that make up
    the cut dimension where it holds several things side by side: each part is cut on its own. `tokens` names what the
    layer runs over: modules of `SequencePlan.split`, in the order in which their tokens follow one another.
    """

    kind: Literal["column", "row"]
    parts: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()


@dataclass(frozen=True)
class SequencePlan:
    """Where sequence parallelism cuts tokens, puts them together again, and exchanges them for heads.

    `split`: module name -> dim of that module's output which is cut. `gather`: module name -> the module of `split`
    whose tokens its output has, to be collected. `attention`: patterns (`*` is a block number) of the submodules called
    as `attention(q, k, v)`, each on its own share of the tokens. `joined`: the modules of `split` whose tokens together
    are the sequence that attention sees. `entry`: module name -> the modules of `split` whose tokens are its first
    arguments; from there to `gather`, tensor parallelism cuts the tokens between its regions (`TensorSplit`) once more.
    """

    split: Mapping[str, int]
    gather: Mapping[str, str]
    attention: tuple[str, ...]
    joined: tuple[str, ...]
    entry: Mapping[str, tuple[str, ...]]
