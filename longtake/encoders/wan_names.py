"""Names of the tensors of Wan's autoencoders: diffusers' -> those of the official files."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOP = {
    "quant_conv": "conv1",
    "post_quant_conv": "conv2",
    "conv_in": "conv1",
    "norm_out": "head.0",
    "conv_out": "head.2",
    "mid_block.resnets.0": "middle.0",
    "mid_block.attentions.0": "middle.1",
    "mid_block.resnets.1": "middle.2",
}
_IN_BLOCK = {  # of a residual block
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
}
_NAME = re.compile(
    r"(?P<part>(?:encoder|decoder)\.)?"
    r"(?:(?P<top>quant_conv|post_quant_conv|conv_in|norm_out|conv_out|mid_block\.\w+\.\d)"
    r"|(?P<side>down|up)_blocks\.(?P<level>\d+)(?:\.resnets\.(?P<block>\d+)|\.(?P<sampler>(?:down|up)samplers?)(?:\.0)?)?)"
    r"\.(?P<rest>.*)"
)


def wan_names(version: str, num_res_blocks: int) -> Callable[[str], str]:
    """Return the function from diffusers' name of a tensor to the official one.

    2.1 numbers the layers of all levels in a row, 2.2 the layers of each level; diffusers groups the layers of
    each level except in the encoder of 2.1.
    """

    def official(name: str) -> str:
        match = _NAME.fullmatch(name)
        if match is None:
            return name
        part, rest = match["part"] or "", match["rest"]
        head, dot, tail = rest.partition(".")
        rest = _IN_BLOCK.get(head, head) + dot + tail
        if match["top"]:
            return f"{part}{_TOP.get(match['top'], match['top'])}.{rest}"
        group, level = f"{match['side']}samples", int(match["level"])
        count = num_res_blocks + (match["side"] == "up")
        if match["block"] is None and match["sampler"] is None:
            return f"{part}{group}.{level}.{rest}"
        layer = count if match["sampler"] else int(match["block"])
        if version == "2.2":
            return f"{part}{group}.{level}.{group}.{layer}.{rest}"
        return f"{part}{group}.{level * (count + 1) + layer}.{rest}"

    return official
