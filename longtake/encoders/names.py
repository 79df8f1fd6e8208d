"""Names of the autoencoders' tensors in the files people have, and in diffusers' modules.

HunyuanVideo's layers are called alike in its own code, Open-Sora's and diffusers'; original files may put `vae.` before
each name. FLUX's original `ae.safetensors` counts blocks, levels and attentions in another way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from longtake.contracts import UserError

_LEVELS = 4
_RULES = (  # diffusers' name -> the original's; the first that fits counts
    (r"(encoder|decoder)\.conv_norm_out\.", r"\1.norm_out."),
    (r"(encoder|decoder)\.mid_block\.resnets\.0\.", r"\1.mid.block_1."),
    (r"(encoder|decoder)\.mid_block\.resnets\.1\.", r"\1.mid.block_2."),
    (r"(encoder|decoder)\.mid_block\.attentions\.0\.group_norm\.", r"\1.mid.attn_1.norm."),
    (r"(encoder|decoder)\.mid_block\.attentions\.0\.to_([qkv])\.", r"\1.mid.attn_1.\2."),
    (r"(encoder|decoder)\.mid_block\.attentions\.0\.to_out\.0\.", r"\1.mid.attn_1.proj_out."),
    (r"encoder\.down_blocks\.(\d)\.resnets\.(\d)\.", r"encoder.down.\1.block.\2."),
    (r"encoder\.down_blocks\.(\d)\.downsamplers\.0\.", r"encoder.down.\1.downsample."),
    (r"decoder\.up_blocks\.(\d)\.resnets\.(\d)\.", lambda m: f"decoder.up.{_LEVELS - 1 - int(m[1])}.block.{m[2]}."),
    (r"decoder\.up_blocks\.(\d)\.upsamplers\.0\.", lambda m: f"decoder.up.{_LEVELS - 1 - int(m[1])}.upsample."),
)


def flux_name(name: str) -> str:
    """diffusers' name of a tensor of FLUX's autoencoder -> its name in the original file."""
    for pattern, replacement in _RULES:
        found, count = re.subn(f"^{pattern}", replacement, name)
        if count:
            return found.replace("conv_shortcut", "nin_shortcut")
    return name


class Renamed(Mapping[str, Tensor]):
    """An autoencoder's tensors under diffusers' names; those that have none of these keep their own.

    `names`: every tensor of diffusers' module. The file's layout is the one in which it has most of them. `kind` is the
    config's `type`.
    """

    def __init__(self, files: Mapping[str, Tensor], names: list[str], kind: str) -> None:
        layouts: list[Callable[[str], str]] = [str, flux_name if kind == "autoencoder_2d" else _under_vae]
        best = max(layouts, key=lambda layout: sum(layout(name) in files for name in names))
        ours = {best(name): name for name in names}
        self._files, self._theirs = files, {ours.get(theirs, theirs): theirs for theirs in files}

    def __getitem__(self, name: str) -> Tensor:
        return self._files[self._theirs[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._theirs)

    def __len__(self) -> int:
        return len(self._theirs)


def _under_vae(name: str) -> str:
    return f"vae.{name}"


class CheckedWeights(Mapping[str, Tensor]):
    """Weights of which every tensor of a module is there, in its shape, and nothing else is.

    `shapes`: name -> shape in the module; `place` is the file or folder, `section` the config's that describes the
    module, for messages. Opening raises `UserError` naming what is missing or unknown, reading one for another shape.
    """

    def __init__(
        self, weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], place: object, section: str
    ) -> None:
        self._weights, self._shapes, self._place, self._section = weights, shapes, place, section
        missing = [name for name in shapes if name not in weights]
        surplus = [name for name in weights if name not in shapes]
        for what, names in (("lacks", missing), ("has unknown", surplus)):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise UserError(
                    f"{place}: {what} {', '.join(names[:3])}{more}, so these are not the weights that {section} "
                    f"describes; give the right ones, or describe them in {section}"
                )

    def __getitem__(self, name: str) -> Tensor:
        tensor, shape = self._weights[name], tuple(self._shapes[name])
        if tuple(tensor.shape) == (*shape, 1, 1):
            tensor = tensor.reshape(shape)  # a linear layer written as a convolution of one pixel
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"{self._place}: {name} is {list(tensor.shape)} where {self._section} describes {list(shape)}; give "
                f"the right weights, or describe them in {self._section}"
            )
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
