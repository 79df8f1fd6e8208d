"""What a launch chooses by time or by free memory: rank 0 chooses, all ranks take it, and `run.json` keeps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from longtake.contracts import Bucket
from longtake.models import Attention, AttentionChoice, use_attention
from longtake.models.attention import KERNEL_NAMES
from longtake.models.attention_time import AttentionShape, slow_on_hopper, time_kernels
from longtake.parallel import BucketPeers, World
from longtake.parallel.mesh import ulysses_degree
from longtake.system import System

Found = Mapping[str, Any]


class Choices:
    """Each choice by its name; `kept`: those of the launch before this one.

    A choice holds on GPUs of one kind with one set of versions; elsewhere it is made again, and a line says so.
    """

    def __init__(self, world: World, kept: Mapping[str, Found], say: Callable[[str], None]) -> None:
        self.made: dict[str, Found] = {}
        self._world, self._kept, self._say = world, kept, say
        self._machine = world.on_main(lambda: _machine(world.device))

    def take(self, name: str, choose: Callable[[], Found]) -> Found:
        """What `choose` finds on rank 0, unless it was found before. Collective."""
        before = self._kept.get(name)
        if before is not None and before["machine"] == self._machine:
            found = before
        else:
            found = {**self._world.on_main(choose), "machine": self._machine}
            if before is not None and self._world.is_main:
                then, now = (", ".join(f"{key} {of[key]}" for key in of) for of in (before["machine"], self._machine))
                self._say(f"{name}: chosen anew on {now}; before it was {then}")
        self.made[name] = found
        return found


def _machine(device: torch.device) -> dict[str, str]:
    """What a choice depends on beside the run itself."""
    found = {"device": device.type, "torch": torch.__version__}
    if device.type == "cuda":
        cudnn = str(torch.backends.cudnn.version())
        found |= {"device": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda), "cudnn": cudnn}
    return found


def attention_shape(system: System, buckets: Sequence[Bucket], peers: BucketPeers) -> AttentionShape | None:
    """What attention of a rank computes on in the bucket where it costs most; None for a denoiser whose tokens do not
    all see each other."""
    model, mesh = system.denoiser, system.mesh
    if hasattr(type(model), "units") or not any(type(module) is Attention for module in model.modules()):
        return None

    def shape(bucket: Bucket) -> AttentionShape:
        heads, degree = type(model).heads(model.config) // mesh.tensor, peers.degree(bucket)
        ulysses = ulysses_degree(mesh.config.sequence_attention, degree, heads)
        tokens = system.tokens(bucket.shape) + system.facts.text_length
        return AttentionShape(
            bucket.batch_size, -(-tokens * ulysses // degree), heads // ulysses, model.config.head_dim
        )

    return max(map(shape, buckets), key=lambda one: one.batch * one.heads * one.tokens**2)


def choose_attention_by_time(
    system: System, buckets: Sequence[Bucket], peers: BucketPeers, choices: Choices, say: Callable[[str], None]
) -> None:
    """Where `model.attention` is "auto", on CUDA: lets attention run on the kernel that is fastest at the run's largest
    shape. Nothing is timed with `deterministic`. Collective."""
    config, device = system.config, system.device
    shape = attention_shape(system, buckets, peers)
    if config.model.attention != "auto" or device.type != "cuda" or config.deterministic or shape is None:
        return

    def choose() -> Found:
        seconds = time_kernels(shape, device, system.dtype)
        chosen = min(seconds, key=seconds.__getitem__, default="auto")
        return {"chosen": chosen, "shape": str(shape), "seconds": seconds, "warning": slow_on_hopper(chosen, device)}

    found = choices.take("attention", choose)
    chosen, seconds = found["chosen"], found["seconds"]
    if chosen in KERNEL_NAMES:
        use_attention(system.denoiser, AttentionChoice(chosen, KERNEL_NAMES[chosen]))
        figures = ", ".join(f"{KERNEL_NAMES[name]} {1e3 * of:.2f} ms" for name, of in seconds.items())
        say(f"attention by time: {KERNEL_NAMES[chosen]} (forward and backward of {found['shape']}: {figures})")
    if found["warning"]:
        say(f"attention: this Hopper GPU is left on FlashAttention-2: {found['warning']}")
