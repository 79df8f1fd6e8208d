"""Differences of FSDP2 in PyTorch before 2.13; this file goes when 2.13 is the oldest that is allowed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


def mend_fsdp() -> None:
    """Make FSDP2 do what it does from 2.13 on, from its next use."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    if torch.__version__ >= "2.13" or isinstance(_fsdp_param.nn, SimpleNamespace):
        return
    if torch.__version__ < "2.12":
        _take_integers()
    else:
        _free_reduced()


def _take_integers() -> None:
    """Shard quantized frozen weights: 2.11 takes every shard for one that trains, which integers cannot, and gathers it
    in the compute dtype, which destroys the codes."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    cast = _fsdp_param.FSDPParam.init_dtype_attrs

    def cast_floats(self: Any, policy: MixedPrecisionPolicy) -> None:
        cast(self, policy if self.sharded_param.is_floating_point() else MixedPrecisionPolicy())

    def parameter(data: Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())

    _fsdp_param.FSDPParam.init_dtype_attrs = cast_floats
    _fsdp_param.nn = SimpleNamespace(Module=nn.Module, Parameter=parameter)


def _free_reduced() -> None:
    """Free the input of a block's gradient reduction before the next block's are laid together: in 2.12 a local name of
    the loop that waits for it holds it until these are reduced too."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    post_backward = FSDPParamGroup.post_backward

    def freed_first(self: Any, *unused: Any) -> None:
        if self.reduce_grads and self._param_group_index == self._num_param_groups - 1:
            states = self.comm_ctx.reduce_scatter_states
            while states:
                if (event := states.pop().event) is not None:
                    self.device_handle.current_stream().wait_event(event)
        post_backward(self, *unused)

    FSDPParamGroup.post_backward = freed_first
