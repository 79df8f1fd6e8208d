"""Products of the blocks' linear layers in float8, by torchao: operands are e4m3 (gradients e5m2), each tensor scaled
by its largest number at the time; results, and all that is kept, have the compute dtype.

Parameters, their names, gradients and optimizer states stay as they are, so checkpoints go between precisions. Weights
are gathered in the compute dtype: torchao's gather in float8 needs parameters of a class of its own, which optimizers
and checkpoints would have to know.
"""

from __future__ import annotations

import torch
from torch import nn

from longtake.contracts import UserError
from longtake.encoders.extras import needs_extra
from longtake.parallel.sequence import matching

_MULTIPLE = 16  # of both sizes of a weight, by the kernels' rule
_CAPABILITY = (8, 9)


def check_float8(precision: str | None, tensor: int, eager: bool = False, missing: str | None = None) -> None:
    """Raise `UserError` for float8 with tensor peers, and in blocks that a GPU runs eagerly; `missing`: what the
    compiler lacks, and what to do, where that is why."""
    if precision is None:
        return
    if eager:
        raise UserError(
            'precision = "fp8": blocks that are not compiled make float32 copies of all that they multiply; '
            f"{f'here {missing}' if missing else 'write compile = True too'}, or write precision = None"
        )
    if tensor > 1:
        raise UserError(
            f'precision = "fp8": is not tested with parallel.tensor = {tensor}; write parallel.tensor = 1 or '
            "precision = None"
        )


def use_float8(denoiser: nn.Module, device: torch.device) -> str:
    """Convert the blocks' linear layers over tokens to float8, in place, before the model is sharded: those whose sizes
    divide by 16; embeddings, modulation and the last layer stay. Returns the log line.

    On a CPU products are emulated. Raises `UserError` where torchao is missing, and for a GPU without float8.
    """
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _CAPABILITY:
        major, minor = found
        raise UserError(
            f'precision = "fp8": needs a GPU of compute capability 8.9 or higher, this one has {major}.{minor}; write '
            "precision = None"
        )
    with needs_extra("precision", "fp8", "fp8"):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    layers = {name: layer for pattern in denoiser.tensor_plan or () for name, layer in matching(denoiser, pattern)}
    fitting = {
        name
        for name, layer in layers.items()
        if type(layer) is nn.Linear and not (layer.in_features % _MULTIPLE or layer.out_features % _MULTIPLE)
    }
    # padded: in a weight's gradient the tokens are the inner dim, and there may be any number of them
    config = Float8LinearConfig(emulate=device.type == "cpu", pad_inner_dim=True)
    convert_to_float8_training(denoiser, module_filter_fn=lambda _, name: name in fitting, config=config)
    said = f"float8: products of {len(fitting)} linear layers"
    return said if device.type != "cpu" else f"{said}, emulated, for a CPU has none: slower than bf16"
