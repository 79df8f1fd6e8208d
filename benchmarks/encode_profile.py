"""Launches, copies and layout conversions of one encode, counted on the fake CUDA device of the tests.

    python benchmarks/encode_profile.py [--json FILE]

The autoencoders have their published layers at few channels, and a small video: neither changes what is launched.
Counted by what PyTorch dispatches on CUDA tensors. A convolution whose input and weight differ in memory layout
converts its input inside, where no dispatch shows it; it is counted from the layouts. Needs g++, not a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    if "--library" in sys.argv:
        ctypes.CDLL(sys.argv[sys.argv.index("--library") + 1])  # before PyTorch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.layouts import LAYOUTS, lay_out_weights
from longtake.encoders.autoencoder import Autoencoder, build_autoencoder
from longtake.encoders.autoencoder_config import Autoencoder2DConfig, CogVideoXVAEConfig, HunyuanVAEConfig
from longtake.encoders.opensora_v1_2_config import OpenSoraVAEConfig
from longtake.encoders.wan_config import WanVAEConfig
from tests.pretended.gpu import GPU, OnGpu, pretended_gpu
from tests.pretended.library import build_library

ROOT = Path(__file__).resolve().parents[1]
PLANTED = "planted"  # a case with a layout conversion in front of each convolution, to show that it is counted
_LIBRARY = "--library"
_FEW = {"block_out_channels": (4, 4, 8, 8), "norm_num_groups": 2}
CASES = {  # section, pixels (T, H, W)
    "hunyuan_vae": (HunyuanVAEConfig(**_FEW, latent_channels=4), (9, 32, 32)),
    "cogvideox_vae": (CogVideoXVAEConfig(**_FEW, latent_channels=4, scale_factor=1.0), (9, 32, 32)),
    "opensora_vae_v1_2": (OpenSoraVAEConfig(**_FEW, filters=4, num_groups=2), (9, 32, 32)),
    "wan_2.1": (WanVAEConfig(base_dim=4), (9, 32, 32)),
    "wan_2.2": (WanVAEConfig(version="2.2", base_dim=4, decoder_base_dim=4), (9, 32, 32)),
    "autoencoder_2d": (Autoencoder2DConfig(ch=4, norm_num_groups=2, z_channels=4), (1, 32, 32)),
}
_COPIES = ("clone", "copy_", "_to_copy", "cat", "constant_pad_nd", "replication_pad3d", "stack")
_NO_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "detach")
Counts = dict[str, int]


class CountLaunches(TorchDispatchMode):
    """Counts operations on CUDA tensors that start a kernel, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counts = dict.fromkeys(("launches", "copies", "layout_conversions", "convolutions", "norms"), 0)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        self._count(operation, args, out)
        return out

    def _count(self, operation, args, out) -> None:
        name = operation._schema.name.removeprefix("aten::")
        first = args[0] if args else None
        is_on_gpu = any(isinstance(tensor, OnGpu) for tensor in torch.utils._pytree.tree_leaves((args, out)))
        if not is_on_gpu or operation.is_view or name in _NO_KERNEL:
            return
        self.counts["launches"] += 1
        self.counts["copies"] += name in _COPIES
        self.counts["convolutions"] += name == "convolution"
        self.counts["norms"] += name == "native_group_norm"
        if name == "convolution":
            self.counts["layout_conversions"] += _converts_inside(first, args[1])
        elif name == "clone":
            self.counts["layout_conversions"] += _order(first) != _order(out)
        elif name == "copy_" and isinstance(args[1], OnGpu):
            self.counts["layout_conversions"] += _order(args[0]) != _order(args[1])


def _order(x: Tensor) -> tuple[int, ...]:
    """The dims of more than one element, from the slowest to the fastest in memory."""
    dims = [dim for dim in range(x.dim()) if x.shape[dim] > 1]
    return tuple(sorted(dims, key=lambda dim: (-x.stride(dim), dim)))


def _converts_inside(x: Tensor, weight: Tensor) -> bool:
    """Return True where cuDNN's convolution converts its input to channels last, the layout of one of the two."""
    form = LAYOUTS["channels_last"][weight.dim()]
    is_last = _is_only(x, form) or _is_only(weight, form)
    return not x.is_contiguous(memory_format=form if is_last else torch.contiguous_format)


def _is_only(x: Tensor, form: torch.memory_format) -> bool:
    return x.is_contiguous(memory_format=form) and not x.is_contiguous()


def filled(section) -> Autoencoder:
    """An autoencoder with drawn weights, on the CPU."""
    autoencoder = build_autoencoder(section)
    parts = nn.ModuleDict(autoencoder.encoding)
    parts.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in parts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return autoencoder


def profile(autoencoder: Autoencoder, shape: tuple[int, int, int], layout: str) -> Counts:
    """The counts of one encode of a video of (T, H, W) pixels, with weights in a layout. Moves the weights."""
    parts = nn.ModuleDict(autoencoder.encoding)
    lay_out_weights(parts.values(), layout)
    parts.to(GPU)
    video = torch.zeros(1, 3, *shape).to(GPU)
    with CountLaunches() as counter:
        autoencoder.posterior(video)
    return counter.counts


def _convert(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0].contiguous(memory_format=torch.channels_last_3d),)


def profile_all() -> dict[str, dict[str, Counts]]:
    """The counts of every autoencoder in every layout."""
    autoencoders = {  # built first: what libraries import asks for properties that the fake device has not
        (name, layout): filled(section) for name, (section, _) in CASES.items() for layout in LAYOUTS
    }
    planted, shape_of_planted = filled(CASES["hunyuan_vae"][0]), CASES["hunyuan_vae"][1]
    for layer in planted.encoding["encoder"].modules():
        if isinstance(layer, nn.Conv3d):
            layer.register_forward_pre_hook(_convert)
    with pretended_gpu():
        counts = {
            name: {layout: profile(autoencoders[name, layout], shape, layout) for layout in LAYOUTS}
            for name, (_, shape) in CASES.items()
        }
        return counts | {PLANTED: {"contiguous": profile(planted, shape_of_planted, "contiguous")}}


def counted() -> dict[str, dict[str, Counts]]:
    """The same, in a process in which the fake device is loaded before PyTorch. Raises `CannotBuild`."""
    with tempfile.TemporaryDirectory() as folder:
        library = build_library(Path(folder))
        command = [sys.executable, __file__, _LIBRARY, str(library)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the counts as data")
    parser.add_argument(_LIBRARY, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.library is not None:
        print(json.dumps(profile_all()))
        return
    from machine import write_json  # next to this file, which tests import as part of a package

    counts = counted()
    heads = list(next(iter(next(iter(counts.values())).values())))
    print(f"{'autoencoder':20}{'layout':16}" + "".join(f"{head:>20}" for head in heads))
    planted = counts.pop(PLANTED)
    for name, layouts in counts.items():
        for layout, numbers in layouts.items():
            print(f"{name:20}{layout:16}" + "".join(f"{numbers[head]:>20,}" for head in heads))
    conversions, plain = (case["contiguous"]["layout_conversions"] for case in (planted, counts["hunyuan_vae"]))
    print(f"planted, a conversion in front of each convolution: {conversions} in place of {plain}")
    write_json(options.json, "encode_profile", {"counts": counts})


if __name__ == "__main__":
    main()
