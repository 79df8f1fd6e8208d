"""Where encoders' files lie, and the names of their tensors there and in the modules of diffusers and transformers.

HunyuanVideo's layers are called alike in its own code, Open-Sora's and diffusers'; original files may put `vae.` before
each name. FLUX's original `ae.safetensors` counts blocks, levels and attentions in another way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from longtake.contracts import UserError
from longtake.hub import find_files, is_hub_name
from longtake.tensor_files import check_finite

Rules = Sequence[tuple[str, str | Callable[[re.Match[str]], str]]]

_SMALL = ("*.json", "*.model", "*.txt")  # architecture and tokenizer
_WEIGHTS = ("*.safetensors", "*.bin")  # looked for in this order
_LEVELS = 4
_RULES: Rules = (  # diffusers' name -> the original's; the first that fits counts
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


def find_encoder(name: str, key: str, cache_dir: str | None = None) -> Path:
    """Return the local file or folder that `name`, of the config key `key`, stands for. Raises `UserError` as
    `find_files`."""
    return find_files(name, key, [(*_SMALL, weights) for weights in _WEIGHTS], cache_dir)


def local_encoder(name: str, cache_dir: str | None = None) -> Path | None:
    """Return the folder that `find_encoder` would give, where it is on this machine; nothing is fetched."""
    local = Path(name).expanduser()
    if local.exists() or not is_hub_name(name):
        return local if local.is_dir() else None
    try:
        from huggingface_hub import snapshot_download

        owner, repository, *_ = name.split("/")
        return Path(snapshot_download(f"{owner}/{repository}", cache_dir=cache_dir, local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None


def flux_name(name: str) -> str:
    """diffusers' name of a tensor of FLUX's autoencoder -> its name in the original file."""
    renamed = _renamed(name, _RULES)
    return name if renamed is None else renamed.replace("conv_shortcut", "nin_shortcut")


def _renamed(name: str, rules: Rules) -> str | None:
    """Return a name by the first of the rules that fits its beginning; None where none does."""
    for pattern, replacement in rules:
        renamed, count = re.subn(f"^{pattern}", replacement, name)
        if count:
            return renamed
    return None


def autoencoder_names(files: Collection[str], names: Collection[str], original: Callable[[str], str]) -> dict[str, str]:
    """diffusers' name of each tensor of an autoencoder -> that in the file; unknown tensors keep theirs.

    `names`: every tensor of diffusers' module; the file's layout is the one in which it has most of them. `original`:
    from diffusers' name to that of the other layout.
    """
    layouts = [{name: name for name in names}, {name: original(name) for name in names}]
    theirs = max(layouts, key=lambda layout: sum(name in files for name in layout.values()))
    ours = {their: name for name, their in theirs.items()}
    return {ours.get(their, their): their for their in files}


def t5_names(files: Collection[str]) -> dict[str, str]:
    """Name in the encoder stack -> name in a T5 checkpoint, whole or of the encoder alone; the rest is left out."""
    names = {name.removeprefix("encoder."): name for name in files if name.startswith("encoder.")}
    return names | ({"embed_tokens.weight": "shared.weight"} if "shared.weight" in files else {})


_UMT5_RULES: Rules = (  # official name -> that in the encoder stack
    (r"token_embedding\.", "embed_tokens."),
    (r"norm\.", "final_layer_norm."),
    (r"blocks\.(\d+)\.norm1\.", r"block.\1.layer.0.layer_norm."),
    (r"blocks\.(\d+)\.norm2\.", r"block.\1.layer.1.layer_norm."),
    (r"blocks\.(\d+)\.attn\.([qkvo])\.", r"block.\1.layer.0.SelfAttention.\2."),
    (r"blocks\.(\d+)\.pos_embedding\.embedding\.", r"block.\1.layer.0.SelfAttention.relative_attention_bias."),
    (r"blocks\.(\d+)\.ffn\.gate\.0\.", r"block.\1.layer.1.DenseReluDense.wi_0."),
    (r"blocks\.(\d+)\.ffn\.fc1\.", r"block.\1.layer.1.DenseReluDense.wi_1."),
    (r"blocks\.(\d+)\.ffn\.fc2\.", r"block.\1.layer.1.DenseReluDense.wo."),
)


def umt5_names(files: Collection[str]) -> dict[str, str]:
    """Name in the encoder stack -> name in a UMT5 checkpoint of transformers, or in Wan's official file."""
    if "token_embedding.weight" not in files:
        return t5_names(files)
    return {_renamed(name, _UMT5_RULES) or name: name for name in files}


def clip_names(files: Collection[str]) -> dict[str, str]:
    """Name in the text model -> name in a CLIP checkpoint, whole or of the text half alone.

    The image half, the projections and the table of positions that old files carry are left out.
    """
    prefix = "text_model." if any(name.startswith("text_model.") for name in files) else ""
    own = (name for name in files if name.startswith(prefix) and not name.endswith("position_ids"))
    return {name.removeprefix(prefix): name for name in own}


class CheckedWeights(Mapping[str, Tensor]):
    """Tensors of files under the names of a module: each that it has is there, in its shape, and nothing else is.

    `names`: name in the module -> name in `files`; `shapes`: name -> shape in the module; `place` is the file or
    folder, `section` the config's that describes the module, for messages. Opening raises `UserError` naming what is
    missing or unknown, or not a tensor; reading one for another shape, and for NaN or infinity.
    """

    def __init__(
        self,
        files: Mapping[str, Tensor],
        names: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
        place: object,
        section: str,
    ) -> None:
        self._files, self._names, self._shapes, self._place, self._section = files, names, shapes, place, section
        for name, kind in getattr(files, "others", {}).items():
            raise UserError(
                f"{place}: holds {name}, a {kind}, expected tensors alone; download the file again from where the "
                "weights are published"
            )
        missing = [name for name in shapes if name not in names]
        surplus = [name for name in names if name not in shapes]
        for what, names in (("lacks", missing), ("has unknown", surplus)):
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise UserError(
                    f"{place}: {what} {', '.join(names[:3])}{more}, so these are not the weights that {section} "
                    f"describes; give the right ones, or describe them in {section}"
                )

    def __getitem__(self, name: str) -> Tensor:
        tensor, shape = self._files[self._names[name]], tuple(self._shapes[name])
        if tuple(tensor.shape) == (*shape, 1, 1):
            tensor = tensor.reshape(shape)  # a linear layer written as a convolution of one pixel
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"{self._place}: {name} is {list(tensor.shape)} where {self._section} describes {list(shape)}; give "
                f"the right weights, or describe them in {self._section}"
            )
        check_finite(tensor, str(self._place), self._names[name])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
