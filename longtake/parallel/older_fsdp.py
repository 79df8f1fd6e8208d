"""What FSDP2 lacks in PyTorch before 2.13; this file goes when 2.13 is the oldest that is allowed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


def take_integers() -> None:
    """Lets FSDP2 shard the codes of frozen weights, from its next use on: PyTorch 2.11 takes every shard for one that
    trains, which integers cannot, and gathers them in the compute dtype, where they are no codes any more."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    if torch.__version__ >= "2.13" or isinstance(_fsdp_param.nn, SimpleNamespace):
        return
    cast = _fsdp_param.FSDPParam.init_dtype_attrs

    def cast_floats(self: Any, policy: MixedPrecisionPolicy) -> None:
        cast(self, policy if self.sharded_param.is_floating_point() else MixedPrecisionPolicy())

    def parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())

    _fsdp_param.FSDPParam.init_dtype_attrs = cast_floats
    _fsdp_param.nn = SimpleNamespace(Module=nn.Module, Parameter=parameter)
