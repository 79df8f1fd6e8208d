"""What a first step compiles: the blocks' graphs as Inductor lowers them for a GPU, and Triton's kernels, without one.

    python benchmarks/compile.py                     # the 11B model's blocks of each list, sizes left open and fixed
    python benchmarks/compile.py --capability 80     # for an A100
    python benchmarks/compile.py --autotune-reductions  # kernels that add are autotuned too, as in a run they are not
    python benchmarks/compile.py --again             # a launch for this CPU, and another one from its cache
    python benchmarks/compile.py --again --float8    # the same of products in float8, which a CPU emulates
    python benchmarks/compile.py --tiny

Blocks run on this CPU at few tokens, compiled as in a run (`parallel.BlockCompiler`), with all recomputed.
Each graph is moved to CUDA on stand-ins of tensors, lowered, and its kernels are compiled to machine code; then it is
run here as it is. A line for each graph: seconds of tracing (of a pair of graphs, behind the second, and the run here),
of lowering and of Triton; fused kernels, how many of them a GPU would choose by time, and how many of those add numbers
up (none in a run: `parallel.prepare_compiler`); calls of other operators (products, attention). Triton is one process
here; on a GPU machine as many as it has cores share that part. Not in it: our own operators' kernels, timing of
candidates, and what a GPU adds; and with sizes fixed the candidates are those of few tokens. With `--again` the
compiler is that of a CPU, whose code takes longer to make; finding it again takes tracing and reading, as a GPU's does.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from machine import print_table, write_json
from step_run import autotune_reductions
from torch import Tensor

from longtake.models.build import build_denoiser, example_conditions
from longtake.models.config import MMDiTConfig
from longtake.parallel.compile import BlockCompiler, recompute_and_compile
from longtake.parallel.recomputation import NAMED_LEVELS, CurrentLevel
from longtake.system.float8 import use_float8

GPU = torch.device("cuda", 0)
_OTHERS = re.compile(r"(?:extern_kernels\.\w+|torch\.ops\.\w+\.\w+(?:\.\w+)?)\(")
_KERNELS = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.DOTALL)


class _Lowered(Exception):
    """Ends Inductor's work on a graph where it would load the code."""


@contextmanager
def pretended_gpu(capability: int) -> Iterator[None]:
    """Lets Inductor and Triton take this machine for one with a GPU of that compute capability."""
    import torch._inductor.runtime.triton_helpers as helpers
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes.reinplace import _inplace_generalized_scatter
    from torch._inductor.graph import GraphLowering
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget

    properties = SimpleNamespace(
        name="a GPU", type="cuda", index=0, major=capability // 10, minor=capability % 10, multi_processor_count=132,
        total_memory=141 << 30, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
        regs_per_multiprocessor=65536, L2_cache_size=60 << 20, shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=227 << 10, shared_memory_per_multiprocessor=228 << 10, gcnArchName="", uuid="",
    )  # fmt: skip
    device = {
        "is_available": lambda *_: True, "device_count": lambda *_: 1, "current_device": lambda *_: 0,
        "get_device_properties": lambda *_: properties, "get_device_capability": lambda *_: divmod(capability, 10),
        "synchronize": lambda *_: None, "set_device": lambda *_: None, "is_initialized": lambda *_: True,
        "_lazy_init": lambda *_: None, "_exchange_device": lambda *_: 0, "_maybe_exchange_device": lambda *_: 0,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8), "set_rng_state": lambda *_: None,
    }  # fmt: skip
    interface = {name: staticmethod(one) for name, one in device.items() if hasattr(CudaInterface, name)}
    interface["get_compute_capability"] = staticmethod(lambda *_: capability)
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32), get_current_device=lambda: 0,
        get_active_torch_device=lambda: GPU, is_active=lambda: True, get_device_interface=lambda: torch.cuda,
    )  # fmt: skip
    worker = {"get_device_properties": staticmethod(lambda *_: properties), "current_device": staticmethod(lambda: 0)}

    def ends(self: Any) -> Any:
        code = self.codegen()[0]
        raise _Lowered(getattr(code, "value", code))

    with ExitStack() as stack:
        for of, changes in ((torch.cuda, device), (CudaInterface, interface), (CudaInterface.Worker, worker)):
            stack.enter_context(patch.multiple(of, **{name: one for name, one in changes.items() if hasattr(of, name)}))
        stack.enter_context(patch.object(GraphLowering, "compile_to_module", ends))
        stack.enter_context(patch.object(helpers, "set_driver_to_gpu", lambda: None))
        stack.enter_context(patch.object(fake_tensor, "init_gpu_context", lambda _: None))
        # on fake tensors a scatter gives its input; PyTorch without CUDA cannot copy between two of the GPU
        scatter = _inplace_generalized_scatter
        stack.callback(setattr, scatter, "__code__", scatter.__code__)
        scatter.__code__ = (lambda inp, src, view_ops: inp).__code__
        triton.runtime.driver.set_active(driver)
        stack.enter_context(torch._inductor.config.patch(compile_threads=1, force_disable_caches=True))
        _look_again()
        stack.callback(_look_again)
        yield


def _look_again() -> None:
    """Forgets whether Triton runs here."""
    from torch.utils import _triton

    for one in vars(_triton).values():
        if hasattr(one, "cache_clear"):
            one.cache_clear()


def on_gpu(graph: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, list[Any]]:
    """A copy of a traced graph whose tensors are on the GPU, and its inputs."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    moved = copy.deepcopy(graph)
    values = [node.meta["val"] for node in moved.graph.nodes if node.op == "placeholder"]
    mode = next(value.fake_mode for value in values if isinstance(value, FakeTensor))
    for node in moved.graph.nodes:
        if node.kwargs.get("device") == torch.device("cpu"):
            node.kwargs = {**node.kwargs, "device": GPU}
    with mode, torch.no_grad():
        inputs = [
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=GPU)
            if isinstance(one, Tensor)
            else one
            for one in values
        ]
        FakeTensorProp(moved, mode).propagate_dont_convert_inputs(*inputs)
    return moved, inputs


def lower(graph: torch.fx.GraphModule, capability: int, backward: bool) -> dict[str, Any]:
    """What Inductor and Triton make of a graph: seconds, kernels, other calls."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner

    begun = time.perf_counter()
    with pretended_gpu(capability):
        moved, inputs = on_gpu(graph)
        mode = next(one.fake_mode for one in inputs if isinstance(one, Tensor))
        try:
            with tracing(TracingContext(mode)), torch.no_grad():
                compile_fx_inner(moved, inputs, is_backward=backward)
            raise RuntimeError("Inductor ended without code")
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, _Lowered):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            code = cause.args[0]
        lowered = time.perf_counter()
        kernels = [_to_machine_code(name, source) for name, source in _KERNELS.findall(code)]
    body = code[code.index("def call(") :]
    return {
        "lowering_seconds": lowered - begun,
        "triton_seconds": time.perf_counter() - lowered,
        "kernels": len(kernels),
        "autotuned": sum(len(kernel.configs) > 1 for kernel in kernels),
        "reductions_autotuned": sum(
            len(kernel.configs) > 1 for kernel in kernels if "POINTWISE" not in str(kernel.heuristic_type)
        ),
        "launches": body.count(".run("),
        "others": len(_OTHERS.findall(body)),
    }


def _to_machine_code(name: str, source: str) -> Any:
    """One of Inductor's kernels, compiled as its launch would, without loading it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(source, encoding="utf-8")
        spec = spec_from_file_location(name, path)
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        for candidate in kernel.configs:  # a GPU takes the fastest, for which it compiles all
            kernel._precompile_config(candidate)
    return kernel


def counting(lines: list[dict[str, Any]], capability: int) -> Callable[..., Any]:
    """A backend that lowers forward and backward for the GPU and runs them as they were traced."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    def seen(graph: torch.fx.GraphModule, inputs: Sequence[Any], backward: bool) -> Any:
        lines.append({"pass": "backward" if backward else "forward", **lower(graph, capability, backward)})
        return boxed_nop(graph, inputs)

    return aot_autograd(
        fw_compiler=partial(seen, backward=False),
        bw_compiler=partial(seen, backward=True),
        decompositions=select_decomp_table(),
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each graph of each block."""
    found: list[dict[str, Any]] = []
    for block in _blocks(arguments.tiny):
        lines: list[dict[str, Any]] = []
        name = f"for_a_gpu_{len(found)}"
        torch._dynamo.register_backend(counting(lines, arguments.capability), name=name)
        step = _step(block, BlockCompiler(block.sizes == "left open", backend=name), arguments)
        if arguments.autotune_reductions:
            autotune_reductions()
        rest = step()
        rest -= sum(line["lowering_seconds"] + line["triton_seconds"] for line in lines)
        found += [{"blocks": block.name, "sizes": block.sizes, **line} for line in lines]
        found[-1]["tracing_seconds"] = rest
    return found


def launch(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each block that this process compiles for its CPU: seconds beyond those of a second step, and how many
    of its graphs the cache held."""
    found, counters = [], torch._dynamo.utils.counters["aot_autograd"]
    for block in _blocks(arguments.tiny):
        step, hits = _step(block, BlockCompiler(block.sizes == "left open"), arguments), counters["autograd_cache_hit"]
        seconds = step() - step()
        hits = counters["autograd_cache_hit"] - hits
        found.append({"blocks": block.name, "sizes": block.sizes, "seconds": seconds, "cache_hits": hits})
    return found


def compare_launches(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What `launch` finds in a process without a cache of compiled code, and in one with what that left there."""
    command = [sys.executable, __file__, "--launch", "--level", arguments.level]
    command += ["--tiny"] * arguments.tiny + ["--float8"] * arguments.float8
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{name}.json" for name in ("first", "second")]
        for file in files:
            environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/cache"}
            subprocess.run([*command, "--json", file], check=True, env=environment, stdout=subprocess.DEVNULL)
        first, second = (json.loads(file.read_text(encoding="utf-8"))["figures"]["launch"] for file in files)
    return [
        {**line, "from_cache_seconds": again["seconds"], "from_cache_hits": again["cache_hits"]}
        for line, again in zip(first, second, strict=True)
    ]


@dataclass(frozen=True)
class _Block:
    """A block of a model, as it is compiled."""

    name: str
    sizes: str
    config: MMDiTConfig

    @property
    def counts(self) -> tuple[int, int]:
        return self.config.depth, self.config.depth_single_blocks


def _blocks(tiny: bool) -> Iterator[_Block]:
    """A double and a single block with sizes fixed and left open; of a tiny model the single one."""
    config = MMDiTConfig(attention="flash")
    if tiny:
        small = {"hidden_size": 64, "num_heads": 2, "axes_dim": (8, 12, 12), "context_in_dim": 32, "vec_in_dim": 16}
        config = config.model_copy(update=small)
    for name, counts in (("double", (1, 0)), ("single", (0, 1)))[tiny:]:
        own = config.model_copy(update=dict(zip(("depth", "depth_single_blocks"), counts, strict=True)))
        for sizes in ("fixed", "left open"):
            yield _Block(name, sizes, own)


def _step(block: _Block, compiler: BlockCompiler, arguments: argparse.Namespace) -> Callable[[], float]:
    """A forward and backward of the block, compiled and recomputed, at few tokens; gives its seconds."""
    torch._dynamo.reset()
    model = build_denoiser(block.config).to(torch.bfloat16)
    if arguments.float8:
        use_float8(model, torch.device("cpu"))
    recompute_and_compile(model, block.counts, CurrentLevel(arguments.level), compiler=compiler)
    latent = (block.config.latent_channels, 3, 8, 12)
    conditions = example_conditions(block.config, latent, 16, batch=2)
    conditions = conditions.map(lambda one: one.bfloat16() if one.is_floating_point() else one)

    def step() -> float:
        begun = time.perf_counter()
        out = model(torch.zeros(2, *latent, dtype=torch.bfloat16), torch.full((2,), 0.5), conditions)
        out.float().square().mean().backward()
        return time.perf_counter() - begun

    return step


def main() -> None:
    arguments = _arguments()
    for of in ("torch._inductor.utils", "torch._higher_order_ops.wrap", "torch._logging._internal"):
        logging.getLogger(of).setLevel(logging.ERROR)
    asked = {name: getattr(arguments, name) for name in ("capability", "level", "autotune_reductions", "float8")}
    if arguments.launch:
        write_json(arguments.json, "compile", {"launch": launch(arguments)})
    elif arguments.again:
        lines = compare_launches(arguments)
        rows = [
            [line["blocks"], line["sizes"], *(f"{line[key]:.1f}" for key in ("seconds", "from_cache_seconds"))]
            for line in lines
        ]
        print_table(["blocks", "sizes", "compiled s", "from the cache s"], rows)
        write_json(arguments.json, "compile", {**{key: asked[key] for key in ("level", "float8")}, "launches": lines})
    else:
        with tempfile.TemporaryDirectory() as folder:
            os.environ |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
            lines = measure(arguments)
        total = _print_graphs(lines)
        write_json(arguments.json, "compile", {**asked, "total_seconds": total, "graphs": lines})


def _print_graphs(lines: Sequence[dict[str, Any]]) -> float:
    """One table; returns the seconds of all."""
    columns = ("tracing_seconds", "lowering_seconds", "triton_seconds")
    numbers = ("kernels", "autotuned", "reductions_autotuned", "launches", "others")
    rows = []
    for line in lines:
        seconds = [f"{line[key]:.1f}" if key in line else "-" for key in columns]
        rows.append([line["blocks"], line["sizes"], line["pass"], *seconds, *(line[key] for key in numbers)])
    named = [name.replace("_", " ") for name in numbers]
    print_table(["blocks", "sizes", "pass", "tracing s", "lowering s", "Triton s", *named], rows)
    total = sum(line.get(key, 0.0) for line in lines for key in columns)
    print(f"all of them, one after another: {total:.0f} s")
    return total


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    capabilities = [80, 86, 89, 90, 100, 120]
    parser.add_argument("--capability", type=int, default=90, choices=capabilities, help="of the GPU, times ten")
    parser.add_argument("--level", choices=NAMED_LEVELS, default="selective", help="of recomputation")
    parser.add_argument("--autotune-reductions", action="store_true", help="as Inductor does by itself; a run does not")
    parser.add_argument(
        "--again", action="store_true", help="a launch for this CPU, and one from the first one's cache"
    )
    parser.add_argument("--float8", action="store_true", help="products in float8, with --again")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    if arguments.float8 and not (arguments.again or arguments.launch):
        parser.error("--float8 goes with --again: a CPU emulates float8, so its graphs are not those of a GPU")
    return arguments


if __name__ == "__main__":
    main()
