"""What the real model holds in memory, counted on stand-ins of tensors (nothing is allocated or computed)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from longtake.contracts import Conditions, Noised
from longtake.diffusion.objective import micro_batch_loss, sample_loss
from longtake.models import quantized
from longtake.models.build import build_denoiser, denoiser_class, example_conditions
from longtake.models.config import LoraConfig, MMDiTConfig
from longtake.parallel.config import ParallelConfig
from longtake.parallel.mesh import Mesh
from longtake.parallel.recomputation import Level
from longtake.parallel.shard import cut_model, local_tensor, shard_model
from longtake.parallel.world import World
from longtake.system.config import SystemConfig
from longtake.system.lora import choose_trained
from tests.parallel.blocks import set_blocks

CPU = torch.device("cpu")


class FusedNorm(torch.autograd.Function):
    """RMS norm that keeps what the CUDA kernel keeps: its input and one number a row."""

    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32), scale)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, _, scale = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(scale)


@contextmanager
def norms_as_on_cuda() -> Iterator[None]:
    """Inside, RMS norms save what they save on a GPU. (On a CPU they are made of small ops that keep fp32 copies.)"""
    kept = F.rms_norm
    F.rms_norm = lambda x, shape, scale, eps: FusedNorm.apply(x, scale)
    try:
        yield
    finally:
        F.rms_norm = kept


def saved_bytes(call: Callable[[], Tensor | tuple[Tensor, ...]], not_counted: list[Tensor]) -> int:
    """Bytes of the distinct memory that `call` saves for backward, besides that of the tensors named."""
    known = {tensor.untyped_storage()._cdata for tensor in not_counted}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            found[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = call()
    del result
    return sum(storage.nbytes() for storage in found.values())


def fake_block(config: MMDiTConfig, kind: str, dtype: torch.dtype) -> nn.Module:
    """The first block of a kind, `double` or `single`, on the fake CPU; call it inside a `FakeTensorMode`."""
    torch.set_default_dtype(dtype)
    try:
        return build_denoiser(config).get_submodule(f"{kind}_blocks.0")
    finally:
        torch.set_default_dtype(torch.float32)


def block_saved_bytes(config: MMDiTConfig, kind: str, batch: int, video: int, text: int, dtype: torch.dtype) -> int:
    """Bytes that one block saves for backward, its input among them; not its weights, `vec` and the rotary table."""
    with FakeTensorMode():
        block = fake_block(config, kind, dtype)

        def tokens(number: int) -> Tensor:
            return torch.empty(batch, number, config.hidden_size, dtype=dtype, requires_grad=True)

        vec = torch.empty(batch, config.hidden_size, dtype=dtype, requires_grad=True)
        rope = torch.empty(2, video + text, 1, config.head_dim // 2)
        streams = (tokens(video), tokens(text)) if kind == "double" else (tokens(video + text),)
        return saved_bytes(lambda: block(*streams, vec, rope), [*block.parameters(), vec, rope])


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Inside, this process is rank 0 of a world that answers every collective at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_mesh(parallel: ParallelConfig, size: int) -> Iterator[Mesh]:
    """The mesh of that world, inside a `FakeTensorMode`: made before it, for its table of ranks is a real tensor."""
    with fake_world(size):
        mesh = Mesh.create(parallel, World(0, size, 0, CPU))
        with FakeTensorMode():
            yield mesh


class _NoModules:
    """In the place of MemTracker's view of modules, whose hooks keep one gradient of every block until the end."""

    is_bw = False
    parents = frozenset(("Global",))

    def register_user_hooks(self, *hooks: object) -> None: ...

    def clear_user_hooks(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def step_bytes(
    config: MMDiTConfig,
    latent: tuple[int, int, int],
    text: int,
    *,
    batch: int = 1,
    shard: int = 1,
    sequence: int = 1,
    tensor: int = 1,
    zero: int = 3,
    sequence_attention: Literal["auto", "ring"] = "auto",
    remat: tuple[int, ...] = (),
    level: Level = "full",
    lora: LoraConfig | None = None,
    train_only: tuple[str, ...] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    micro_batches: int = 1,
) -> dict[str, int]:
    """Bytes on rank 0 by MemTracker over the micro-batches of one step of the sharded model.

    `weights`: before it; `gradients`: what its end leaves; `peak`: the most at any moment, weights and inputs included.
    """
    parallel = ParallelConfig(
        shard=shard, sequence=sequence, tensor=tensor, zero=zero, sequence_attention=sequence_attention
    )
    run = None
    if lora is not None or train_only is not None:
        run = SystemConfig.model_construct(model=config, lora=lora, freeze=(), train_only=train_only)

    def loss_of(model: nn.Module) -> Tensor:  # latents and conditions end with it, as in the loop
        x, conditions = inputs(config, latent, text, batch)
        noised = Noised(x, torch.empty(batch), torch.empty_like(x), torch.empty(batch))
        prediction = model(noised.x, noised.t, conditions)
        return micro_batch_loss(sample_loss, prediction, noised, noised.weight, batch)

    with fake_mesh(parallel, shard * sequence * tensor) as mesh:
        model = _sharded(config, mesh, dtype, remat, level, run)
        with _tracked(model) as tracker:
            before = _total(tracker, "current")
            for _ in range(micro_batches):
                loss_of(model).backward()
            peak = _total(tracker, "peak")
        gradients = sum(local_tensor(p.grad).nbytes for p in model.parameters() if p.grad is not None)
    return {"weights": before, "gradients": gradients, "peak": peak}


def sampling_bytes(
    config: MMDiTConfig,
    latent: tuple[int, int, int],
    text: int,
    *,
    batch: int = 1,
    shard: int = 1,
    sequence: int = 1,
    tensor: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Bytes that a forward without gradients adds on rank 0 to the weights and inputs at its worst moment."""
    parallel = ParallelConfig(shard=shard, sequence=sequence, tensor=tensor)
    with fake_mesh(parallel, shard * sequence * tensor) as mesh, torch.no_grad():
        model = _sharded(config, mesh, dtype)
        x, conditions = inputs(config, latent, text, batch)
        with _tracked(model, x, *conditions.values()) as tracker:
            before = _total(tracker, "current")
            model(x, torch.empty(batch), conditions)
            peak = _total(tracker, "peak")
    return peak - before


def _sharded(
    config: MMDiTConfig,
    mesh: Mesh,
    dtype: torch.dtype,
    remat: tuple[int, ...] = (),
    level: Level = "full",
    run: SystemConfig | None = None,
) -> nn.Module:
    """The denoiser as a run holds it on rank 0; call it inside a `FakeTensorMode`."""
    quantized._nf4.cache_clear()  # lest it holds a stand-in of another mode
    with torch.device("meta"):
        model = build_denoiser(config)
        if run is not None:
            choose_trained(model, run, dtype)
    set_blocks(model, level, remat or (0,) * len(model.blocks), cut_model(model, mesh))
    shard_model(model, mesh, dtype)
    _materialise(model)
    return model


def _materialise(model: nn.Module) -> None:
    """`to_empty`, which cannot exchange a fake parameter that is not sharded: those are made again."""
    plain = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and not isinstance(parameter, DTensor)
    ]
    for module, name, _ in plain:
        module._parameters[name] = None
    model.to_empty(device="cpu")
    for module, name, parameter in plain:
        made = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        module._parameters[name] = nn.Parameter(made, requires_grad=parameter.requires_grad)


def inputs(config: MMDiTConfig, latent: tuple[int, int, int], text: int, batch: int) -> tuple[Tensor, Conditions]:
    """Latents and conditions of a micro-batch; call it inside a `FakeTensorMode`."""
    whole = (config.latent_channels, *latent)
    needs = denoiser_class(config).needs(config, whole, text)
    of_text = {name: shape[:-1] for name, shape in needs.items() if text in shape[-2:-1]}
    masks = Conditions({}, {name: torch.ones(1, *shape, dtype=torch.bool) for name, shape in of_text.items()})
    return torch.empty(batch, *whole), example_conditions(config, whole, text, batch, given=masks)


def _tracked(*known: nn.Module | Tensor) -> MemTracker:
    """A tracker that counts what is made inside it, beside what is there already."""
    tracker = MemTracker()
    tracker._mod_tracker = _NoModules()
    tracker.track_external(*known)
    return tracker


def _total(tracker: MemTracker, moment: str) -> int:
    """Bytes at a moment, "current" or "peak"."""
    return tracker.get_tracker_snapshot(moment)[CPU]["Total"]
