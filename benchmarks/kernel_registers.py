"""Registers and stack per thread of each Triton kernel of TTT layers at the published sizes, compiled without a GPU.

python benchmarks/kernel_registers.py                              # with the Triton that is installed, for an H100
python benchmarks/kernel_registers.py --capability 80              # for an A100
python benchmarks/kernel_registers.py --json FILE                  # figures of other Triton versions in FILE stay

The scan of `ttt_triton` runs on tensors of the published sizes with its launches recorded, so kernels, dtypes, tiles
and warps are those of a run: CogVideoX-5B's heads of 64, TTT-MLP with 256 hidden units in mini-batches of 64 tokens and
TTT-Linear in mini-batches of 16. Each kernel is compiled to machine code, and `cuobjdump`, which Triton brings, reads
registers and stack from it. Stack is memory that is read and written where registers do not suffice.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from machine import print_table, write_json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from longtake.models import ttt_triton
from longtake.models.ttt_chunked import pack

HEADS, WIDTH = 2, 64  # the number of heads is not compiled in
PUBLISHED = {"TTT-MLP": (256, 64), "TTT-Linear": (0, 16)}  # hidden units, tokens of a mini-batch
_POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Launch:
    """A kernel with the arguments of one launch."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Resources:
    """Resources of a compiled kernel: registers and bytes of stack per thread, bytes of shared memory per program."""

    registers: int
    stack: int
    shared: int


def launches(hidden: int, mini_batch: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Launch]:
    """The kernels by name that forward and backward of two mini-batches launch."""
    recorded: dict[str, Launch] = {}

    def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        recorded[kernel.__name__] = Launch(kernel, arguments, options)

    rows = (1, 2 * mini_batch, HEADS)
    q, k, target = (torch.zeros(*rows, WIDTH, dtype=dtype) for _ in range(3))
    inputs = (q, k, target, torch.zeros(rows), torch.ones(HEADS, WIDTH), torch.zeros(HEADS, WIDTH))
    shapes = [(WIDTH, hidden), (1, hidden), (hidden, WIDTH)] if hidden else [(WIDTH, WIDTH)]
    state = pack(tuple(torch.zeros(HEADS, *shape) for shape in (*shapes, (1, WIDTH))))
    rest = {"hidden": hidden, "mini_batch": mini_batch, "segment": 2, "eps": 1e-8}
    with patch.object(triton.JITFunction, "run", record):
        out, kept = ttt_triton.forward(*inputs, state, keep=True, **rest)
        ttt_triton.backward(torch.zeros_like(out), *inputs, kept, **rest)
    return recorded


def resources(launch: Launch, capability: int) -> Resources:
    """Compiles the kernel as this launch would, its tensors aligned to 16 bytes."""
    options = dict(launch.options)
    names = launch.kernel.arg_names
    constants = {(i,): options.pop(name) for i, name in enumerate(names) if name in options}
    signature = dict.fromkeys(names, "constexpr")
    aligned = {}
    for i, argument in enumerate(launch.arguments):
        if isinstance(argument, torch.Tensor):
            signature[names[i]] = _POINTERS[argument.dtype]
            aligned[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[names[i]] = "fp32" if isinstance(argument, float) else "i32"
    source = ASTSource(launch.kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [_CUOBJDUMP, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    fields = dict(field.split(":") for field in text.split() if field.startswith(("REG:", "STACK:")))
    return Resources(int(fields["REG"]), int(fields["STACK"]), compiled.metadata.shared)


def measure(capability: int, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """A line for each kernel of each published layer."""
    for layer, (hidden, mini_batch) in PUBLISHED.items():
        for name, launch in launches(hidden, mini_batch, dtype).items():
            yield {"layer": layer, "kernel": name, **vars(resources(launch, capability))}


def main() -> None:
    """Compiles all and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90, help="of the GPU, times ten")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    lines = list(measure(arguments.capability, getattr(torch, arguments.dtype)))
    head = ("layer", "kernel", "registers", "stack", "shared")
    print_table(head, [[line[key] for key in head] for line in lines])
    figures = {}
    if arguments.json is not None and arguments.json.exists():
        figures = json.loads(arguments.json.read_text(encoding="utf-8"))["figures"]
    asked = {"capability": arguments.capability, "dtype": arguments.dtype}
    figures[f"Triton {triton.__version__}"] = {**asked, "kernels": lines}
    write_json(arguments.json, "kernel_registers", figures)


if __name__ == "__main__":
    main()
