"""What a mixer adds to a block of TTT-Video: the layer, and the block beside the block with local attention alone.

python benchmarks/ttt.py              on CUDA the 5B model's block, on a CPU two heads and 135 tokens a frame
python benchmarks/ttt.py --segments 1 3 --mixers "ttt_mlp" "large_chunk frame"
python benchmarks/ttt.py --tiny       a tiny block, to see that it runs

Videos of 1, 3, 6, 10 and 21 segments are those of 3, 9, 18, 30 and 63 seconds. One block, one sample, no recomputation;
weights and compute in bfloat16 on CUDA, where blocks are compiled, and in float32 on a CPU. `kept` is what forward
leaves for backward. Launches are kernels on CUDA, on a CPU operators that compute or copy. On a CPU times are the
processor's, of whatever threads compute, so that other work on the machine counts less. All mixers take turns, and the
fastest of all repeats counts; `over local` is the block over the block without a mixer, in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from machine import gib, print_table, write_json
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from longtake.contracts import Conditions
from longtake.models.build import build_denoiser
from longtake.models.ttt_video_config import TTTVideoConfig
from longtake.parallel.compile import prepare_compiler
from longtake.plan.timing import clock
from longtake.system.encoders import device_dtype

SECONDS = MappingProxyType({1: 3, 3: 9, 6: 18, 10: 30, 21: 63})  # of a number of segments
LOCAL = "none"
MIXERS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        LOCAL: {"mixer": "none"},
        "ttt_linear": {"mixer": "ttt_linear", "mini_batch_size": 16, "ttt_base_lr": 1.0},
        "ttt_mlp": {"mixer": "ttt_mlp"},
        "ttt_mlp b=128": {"mixer": "ttt_mlp", "mini_batch_size": 128},
        "ttt_mlp parallel": {"mixer": "ttt_mlp", "directions": "parallel"},
        "large_chunk frame": {"mixer": "large_chunk", "chunk": "frame"},
        "large_chunk segment": {"mixer": "large_chunk", "chunk": "segment"},
    }
)
_MOVES_NOTHING = (
    "view",
    "reshape",
    "as_strided",
    "expand",
    "transpose",
    "permute",
    "select",
    "slice",
    "split",
    "empty",
)


@dataclass(frozen=True)
class Size:
    """A block and its videos."""

    config: TTTVideoConfig
    sides: tuple[int, int]  # h, w of the latent grid
    text_tokens: int  # of a segment


def _size(heads: int, sides: tuple[int, int], text_tokens: int, **keys: Any) -> Size:
    return Size(TTTVideoConfig(num_layers=1, num_attention_heads=heads, **keys), sides, text_tokens)


SMALL_WIDTHS = {"time_embed_dim": 32, "text_embed_dim": 32}
SIZES = {
    "tiny": _size(1, (4, 4), 2, segment_frames=2, attention_head_dim=16, mini_batch_size=4, **SMALL_WIDTHS),
    "small": _size(2, (18, 30), 48, **SMALL_WIDTHS),
    "5b": _size(48, (60, 90), 458),
}


def main() -> None:
    """Measures each length and prints one table."""
    arguments = _arguments()
    prepare_compiler(4 * len(MIXERS))  # which share code: of the layer and of the block, with gradients and without
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = "tiny" if arguments.tiny else arguments.size or ("5b" if device.type == "cuda" else "small")
    runs: list[dict[str, Any]] = []
    for count in arguments.segments or ((2,) if arguments.tiny else SECONDS):
        runs.append(measure(name, count, device, arguments))
        torch.compiler.reset()  # or the next length's blocks are looked for among these graphs
        figures = {"tiny": arguments.tiny, "size": name, "threads": torch.get_num_threads(), "runs": runs}
        write_json(arguments.json, "ttt", figures)
    rows = [_row(run, mixer) for run in runs for mixer in run["mixers"]]
    head = ("seconds", "tokens", "mixer", "layer fwd ms", "layer ms", "block fwd ms", "block ms", "over local fwd")
    print_table((*head, "over local", "kept GiB", "peak GiB", "launches"), rows)


def measure(name: str, count: int, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures of all mixers on a video of so many segments."""
    found: dict[str, dict[str, Any]] = {}
    contenders: dict[str, dict[str, Callable[[], None]]] = {}
    tokens = 0
    for mixer in dict.fromkeys((LOCAL, *arguments.mixers)):
        subject = Subject(SIZES[name], mixer, count, device, compiled=device.type == "cuda")
        tokens, contenders[mixer] = subject.tokens, subject.runs()
        try:
            found[mixer] = subject.memory_and_launches()
        except torch.OutOfMemoryError:
            found[mixer] = {"out_of_memory": True}
            del contenders[mixer]
    best = {mixer: dict.fromkeys(parts, float("inf")) for mixer, parts in contenders.items()}
    for _ in range(arguments.repeats):
        for mixer, parts in contenders.items():
            for part, run in parts.items():
                start = _clock(device)
                run()
                best[mixer][part] = min(best[mixer][part], _clock(device) - start)
    for mixer, parts in best.items():
        found[mixer]["ms"] = {part: 1e3 * seconds for part, seconds in parts.items()}
        if LOCAL in best:
            local = best[LOCAL]
            found[mixer]["over_local"] = {part: parts[part] / local[part] for part in ("block forward", "block")}
    return {"segments": count, "seconds": SECONDS.get(count), "tokens": tokens, "mixers": found}


def _clock(device: torch.device) -> float:
    return time.process_time() if device.type == "cpu" else clock(device)


class Subject:
    """A block with a mixer, and what enters it for a made-up video."""

    def __init__(self, size: Size, mixer: str, count: int, device: torch.device, compiled: bool) -> None:
        keys = dict(MIXERS[mixer])
        if size.config.mini_batch_size != TTTVideoConfig().mini_batch_size:  # a tiny one
            keys.pop("mini_batch_size", None)
        config = size.config.model_copy(update=keys)
        dtype = device_dtype("bf16", device)
        with torch.device(device):
            model = build_denoiser(config).to(dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(model.initial_value(name, parameter.shape, seed=1))
        frames = config.segment_frames * count + 1
        x = torch.randn(1, config.out_channels, frames, *size.sides, device=device, dtype=dtype)
        text = torch.randn(1, count, size.text_tokens, config.text_embed_dim, device=device, dtype=dtype)
        self.block, self.device = model.transformer_blocks[0], device
        entered: list[Any] = []
        hook = self.block.register_forward_pre_hook(lambda _, given: entered.extend(given))
        with torch.no_grad():
            model(x, torch.full((1,), 500.0, device=device), Conditions({"text": text}))
        hook.remove()
        self.entering, *self.rest = entered
        self.entering.requires_grad_()
        self.tokens = self.entering.shape[1]
        _, runs, where = self.rest
        mixer, self.given = self.block.ttt, (runs, where.order)
        if mixer is None:
            mixer, self.given = self.block.attn1, (where.share,)
        self.whole, self.layer = (
            torch.compile(part, dynamic=False) if compiled else part for part in (self.block, mixer)
        )

    def block_forward(self) -> Tensor:
        return self.whole(self.entering, *self.rest)

    def layer_forward(self) -> Tensor:
        """The mixer alone; without one, attention in segments."""
        return self.layer(self.entering, *self.given)

    def runs(self) -> dict[str, Callable[[], None]]:
        """Forward alone, and with backward."""
        forwards = {"layer": self.layer_forward, "block": self.block_forward}
        made: dict[str, Callable[[], None]] = {}
        for part, forward in forwards.items():
            made[f"{part} forward"] = lambda forward=forward: self._forward(forward)
            made[part] = lambda forward=forward: self._forward_backward(forward)
        return made

    def memory_and_launches(self) -> dict[str, int | None]:
        """Of the block's forward and backward: bytes kept in between, parameters and what enters not counted, the most
        bytes of the device beyond those held before, and launches."""
        run, peak = self.runs()["block"], None
        is_cuda = self.device.type == "cuda"
        if is_cuda:
            run()
            torch.cuda.reset_peak_memory_stats(self.device)
            held = torch.cuda.memory_allocated(self.device)
            run()
            peak = torch.cuda.max_memory_allocated(self.device) - held
        given = {part.untyped_storage().data_ptr() for part in (*self.block.parameters(), self.entering)}
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with (
            profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as profiled,
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            run()
        events = profiled.events()
        if is_cuda:
            on_device = (event for event in events if event.device_type == torch.autograd.DeviceType.CUDA)
            names = [event.name for event in on_device if not event.name.startswith("Mem")]
        else:
            names = [event.name.removeprefix("aten::") for event in events if not event.cpu_children]
            names = [name for name in names if not name.startswith(_MOVES_NOTHING)]
        return {"kept_bytes": sum(kept.values()), "peak_bytes": peak, "launches": len(names)}

    def _forward(self, forward: Callable[[], Tensor]) -> None:
        with torch.no_grad():
            forward()

    def _forward_backward(self, forward: Callable[[], Tensor]) -> None:
        out = forward()
        out.backward(torch.ones_like(out))
        nn.Module.zero_grad(self.block, set_to_none=True)
        self.entering.grad = None


def _row(run: Mapping[str, Any], mixer: str) -> tuple[str, ...]:
    line = run["mixers"][mixer]
    start = (str(run["seconds"] or "-"), f"{run['tokens']:,}", mixer)
    if "ms" not in line:
        return (*start, "out of memory", *["-"] * 8)
    parts = ("layer forward", "layer", "block forward", "block")
    ratios = (line.get("over_local", {}).get(part) for part in parts[2:])
    return (
        *start,
        *(f"{line['ms'][part]:.1f}" for part in parts),
        *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        gib(line["kept_bytes"]),
        gib(line["peak_bytes"]),
        f"{line['launches']:,}",
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), help="default: 5b on CUDA, small on a CPU")
    parser.add_argument("--segments", type=int, nargs="+", help="default: 1 3 6 10 21")
    parser.add_argument("--mixers", nargs="+", choices=tuple(MIXERS), default=tuple(MIXERS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a tiny block and two segments")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
