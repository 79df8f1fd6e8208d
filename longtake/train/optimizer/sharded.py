"""AdamW and gradient clipping over this rank's shards.

Both are element by element (clipping but for one number), so they work on the local tensors of the sharded
parameters, without DTensor's dispatch, and give the same result on every mesh.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from longtake.parallel.shard import local_tensor, own_part
from longtake.train.config import RunConfig
from longtake.train.optimizer.adamw import Moments, StepNumbers, kernel, update_8bit, update_fp32
from longtake.train.optimizer.groups import groups_of
from longtake.train.optimizer.quantise import block_size, quantise, scale_shape, table
from longtake.train.optimizer.rounding import rounding_key
from longtake.train.optimizer.storage import Layout, OnDevice, OnHost


@dataclass(frozen=True)
class Trained:
    """One trained parameter as the update sees it."""

    name: str
    parameter: Tensor
    local: Tensor  # this rank's shard, sharing memory
    block: int | None  # elements that share a scale of their moments; None: the moments are float32
    group: int
    decay: float
    key: Tensor  # of the random bits that its rounding takes
    copies: int  # ranks that hold the same elements

    @property
    def fused(self) -> bool:
        """True if PyTorch's fused kernel updates it."""
        return self.block is None and self.local.dtype == torch.float32

    @property
    def layout(self) -> Layout:
        """The tensors of its moments."""
        shape = tuple(self.local.shape)
        if self.block is None:
            return {"exp_avg": (shape, torch.float32), "exp_avg_sq": (shape, torch.float32)}
        codes, scales = (shape, torch.uint8), (scale_shape(shape, self.block), torch.float32)
        return {
            "exp_avg.codes": codes,
            "exp_avg.scales": scales,
            "exp_avg_sq.codes": codes,
            "exp_avg_sq.scales": scales,
        }


class ShardedAdamW:
    """`torch.optim.AdamW` over local shards, with its state readable as sharded tensors.

    Moments are float32 or a byte (`optim.states`), on the device or in host memory (`optim.offload`); weights are
    float32 or bfloat16, as the model has them. Float32 throughout takes PyTorch's fused kernel, all else our own
    formula, compiled on CUDA.
    """

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        optim = config.optim
        self.config, self.betas = config, optim.betas
        self.eps = optim.eps if optim.eps is not None else config.eps
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.groups = groups_of(model, config)
        of_group = {name: number for number, group in enumerate(self.groups) for name in group.names}
        self.trained = [
            _trained(name, p, of_group[name], self.groups[of_group[name]].weight_decay, config)
            for name, p in self.parameters.items()
        ]
        self.device = self.trained[0].local.device
        offloaded = optim.offload and not _beside_masters(self.trained[0])
        self.storage = (OnHost if offloaded else OnDevice)([one.layout for one in self.trained], self.device)
        self.updates = torch.zeros((), dtype=torch.float32, device=self.device)  # made so far

    def rates(self, step: int) -> dict[str, float]:
        """Return the learning rate of each group at optimizer step `step` (from 0), by its name."""
        return {group.name: group.rate(self.config, step) for group in self.groups}

    @torch.no_grad()  # with gradients, each local tensor of one would be a node of a graph
    def grad_square_sum(self) -> Tensor:
        """Return this rank's part of the square of the gradient's norm: over all ranks, parts make the sum. float32,
        0-d.

        What several ranks hold alike (HSDP's replicas, parameters that are not sharded) counts once, so meshes may
        differ from parameter to parameter.
        """
        by_copies: dict[int, list[Tensor]] = {}
        for one in self.trained:
            if one.parameter.grad is not None:
                by_copies.setdefault(one.copies, []).append(local_tensor(one.parameter.grad))
        sums = [
            torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float32)).square().sum() / copies
            for copies, grads in by_copies.items()
        ]
        return torch.stack(sums).sum()

    @torch.no_grad()
    def step(self, lr: float | Mapping[str, float], scale: Tensor | None, skip: Tensor | None = None) -> None:
        """One update at rate `lr`, or at `rates`, of which each group has its own; gradients are first multiplied by
        the 0-d tensor `scale`, and freed in the end.

        Where the 0-d tensor `skip` is 1, weights and state stay as they are; the device alone knows.
        """
        rates = [lr[group.name] if isinstance(lr, Mapping) else lr for group in self.groups]
        numbers = {rate: StepNumbers.of(rate, self.betas, self.updates, scale, skip) for rate in set(rates)}
        for indices, moments in self.storage.walk():
            ready = [(self.trained[i], own) for i, own in zip(indices, moments, strict=True)]
            ready = [(one, own) for one, own in ready if one.parameter.grad is not None and one.local.numel()]
            together: dict[tuple[float, float], list[tuple[Trained, Moments]]] = defaultdict(list)
            for one, own in ready:
                if one.fused:
                    together[rates[one.group], one.decay].append((one, own))
                else:
                    self._step_one(one, own, numbers[rates[one.group]])
            for (rate, decay), pairs in together.items():
                self._step_fused(pairs, decay, numbers[rate])
        any_rate = numbers[rates[0]]
        self.updates.copy_(torch.where(any_rate.skip, self.updates, any_rate.count))
        for p in self.parameters.values():
            p.grad = None

    def _step_fused(self, ready: Sequence[tuple[Trained, Moments]], decay: float, numbers: StepNumbers) -> None:
        grads = [local_tensor(one.parameter.grad) for one, _ in ready]
        if numbers.scale is not None:
            torch._foreach_mul_(grads, numbers.scale)
        torch._fused_adamw_(
            [one.local for one, _ in ready],
            grads,
            [own["exp_avg"] for _, own in ready],
            [own["exp_avg_sq"] for _, own in ready],
            [],
            [numbers.count] * len(ready),
            lr=numbers.lr_value,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            found_inf=numbers.skip.float(),  # PyTorch's word for it
        )

    def _step_one(self, one: Trained, own: Moments, numbers: StepNumbers) -> None:
        grad = local_tensor(one.parameter.grad)
        lasting = numbers.lr * one.decay
        if one.block is None:
            update = kernel(update_fp32, self.device)
            tensors = [x.view(-1) for x in (one.local, grad, own["exp_avg"], own["exp_avg_sq"])]
            update(*tensors, one.key, lasting, numbers.tensors(), self.betas, self.eps)
            return
        codes = [x.view(-1, one.block) for x in (one.local, grad, own["exp_avg.codes"], own["exp_avg_sq.codes"])]
        scales = [own[f"{moment}.scales"].view(-1) for moment in ("exp_avg", "exp_avg_sq")]
        tables = table(True, self.device), table(False, self.device)
        update = kernel(update_8bit, self.device)
        update(*codes, *scales, *tables, one.key, lasting, numbers.tensors(), self.betas, self.eps)

    def state(self) -> dict[str, Tensor]:
        """Return the optimizer's tensors under names for a checkpoint; sharded like their parameters, sharing
        memory."""
        self.storage.wait()
        return {
            f"optim.{one.name}.{part}": sharded_like(tensor, one.parameter)
            for one, own in zip(self.trained, self.storage.tensors, strict=True)
            for part, tensor in own.items()
        }

    def take_moments(self, given: Iterable[tuple[str, Mapping[str, Tensor]]]) -> None:
        """Take `exp_avg` and `exp_avg_sq` of parameters, by their names, from whole tensors, each rank its part."""
        state = self.state()
        for name, moments in given:
            for moment, whole in moments.items():
                key = f"optim.{name}.{moment}"
                values = {key: whole}
                if key not in state:  # in a byte
                    rows = whole.float().reshape(-1, block_size(tuple(whole.shape)))
                    parts = quantise(rows, table(moment == "exp_avg", rows.device))
                    values = {f"{key}.codes": parts[0], f"{key}.scales": parts[1]}
                for own, value in values.items():
                    local_tensor(state[own]).copy_(own_part(value.view(state[own].shape), state[own]))

    def set_updates(self, count: int) -> None:
        """Set how many updates were made: the bias corrections of Adam are read off it."""
        self.updates.fill_(float(count))


def _trained(name: str, p: Tensor, group: int, weight_decay: float, config: RunConfig) -> Trained:
    local = local_tensor(p.data)
    block = block_size(tuple(p.shape)) if config.optim.states == "8bit" else None
    first_row = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)[1][0] if _cut(p) else 0
    start = first_row * prod(p.shape[1:])
    decay = 0.0 if any(part in name for part in config.optim.no_decay) else weight_decay
    key = rounding_key(config.seed, name, start, local.device)
    return Trained(name, p, local, block, group, decay, key, _copies(p))


def _cut(p: Tensor) -> bool:
    """Return whether ranks hold different rows of it. Other cuts are made nowhere."""
    if not isinstance(p, DTensor):
        return False
    dims = {place.dim for place in p.placements if isinstance(place, Shard)}
    assert dims <= {0}, f"cut along dims {sorted(dims)}"
    return bool(dims)


def _copies(p: Tensor) -> int:
    """Return the number of ranks that hold the same elements."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if not isinstance(p, DTensor):
        return ranks
    sizes = zip(p.placements, p.device_mesh.shape, strict=True)
    return ranks // prod(size for place, size in sizes if isinstance(place, Shard))


def _beside_masters(one: Trained) -> bool:
    """Return whether moments are in host memory anyway, because masters are (`parallel.cpu_offload`)."""
    mesh = one.parameter.device_mesh.device_type if isinstance(one.parameter, DTensor) else one.local.device.type
    return mesh != one.local.device.type


def sharded_like(local: Tensor, like: Tensor) -> Tensor:
    """Return a local shard as a sharded tensor, its rows sharded as those of `like` (itself where that is not
    sharded)."""
    if not isinstance(like, DTensor):
        return local
    shape = torch.Size((like.shape[0], *local.shape[1:])) if _cut(like) else local.shape
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(like.device_mesh, like.placements, TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)  # `from_local` would copy what is offloaded to the CPU


def clip_scale(norm: Tensor, limit: float | Tensor) -> Tensor:
    """Return the factor that brings a gradient of this norm to at most `limit`: 0-d, no wait for the device."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


@torch.no_grad()
def sharing(parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the local shards of parameters, sharing memory, without gradients."""
    return [local_tensor(p).detach() for p in parameters.values()]  # the DTensor's own `detach` takes 4 times as long
