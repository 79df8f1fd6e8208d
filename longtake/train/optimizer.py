"""AdamW, gradient clipping and EMA over this rank's shards.

All three are element by element (clipping but for one number), so they work on the local tensors of the sharded
parameters, without DTensor's dispatch, and give the same result on every mesh.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longtake.parallel import local_tensor
from longtake.train.config import RunConfig


class ShardedAdamW:
    """`torch.optim.AdamW` over local shards (fused kernel), with its state readable as sharded tensors."""

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.locals = {name: nn.Parameter(local_tensor(p.data)) for name, p in self.parameters.items()}
        self.optimizer = torch.optim.AdamW(
            self.locals.values(),
            lr=config.lr,
            betas=config.optim.betas,
            eps=config.optim.eps if config.optim.eps is not None else config.eps,
            weight_decay=config.optim.weight_decay,
            fused=True,
        )
        for p in self.locals.values():  # state exists from the start, so that loading has tensors to fill
            self.optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    def grad_square_sum(self) -> Tensor:
        """Sum of squares of this rank's shards of the gradient: float32, 0-d."""
        grads = [local_tensor(p.grad) for p in self.parameters.values() if p.grad is not None]
        return torch.stack(torch._foreach_norm(grads)).square().sum()

    def step(self, lr: float, scale: Tensor | None, skip: Tensor | None = None) -> None:
        """One update at rate `lr`; gradients are first multiplied by the 0-d tensor `scale`. Gradients are freed.

        Where the 0-d tensor `skip` is 1, weights and state stay as they are; the device alone knows.
        """
        for name, p in self.parameters.items():
            self.locals[name].grad = None if p.grad is None else local_tensor(p.grad)
        if scale is not None:
            grads = [p.grad for p in self.locals.values() if p.grad is not None]
            torch._foreach_mul_(grads, scale.to(grads[0].device))  # which is the CPU where masters are kept there
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if skip is not None:
            self.optimizer.found_inf = skip.to(next(iter(self.locals.values())).device)  # PyTorch's word for it
        self.optimizer.step()
        for name, p in self.parameters.items():
            p.grad = self.locals[name].grad = None

    def state(self) -> dict[str, Tensor]:
        """The optimizer's tensors under names for a checkpoint; sharded like their parameters, sharing memory."""
        tensors = {}
        for name, p in self.parameters.items():
            state = self.optimizer.state[self.locals[name]]
            tensors[f"optim.{name}.exp_avg"] = sharded_like(state["exp_avg"], p)
            tensors[f"optim.{name}.exp_avg_sq"] = sharded_like(state["exp_avg_sq"], p)
        return tensors

    def set_updates(self, count: int) -> None:
        """Sets how many updates were made: the bias corrections of Adam are read off it."""
        for p in self.locals.values():
            self.optimizer.state[p]["step"].fill_(float(count))


def sharded_like(local: Tensor, like: Tensor) -> Tensor:
    """A local shard as a sharded tensor laid out like `like` (or itself where that is not sharded)."""
    if not isinstance(like, DTensor):
        return local
    return DTensor(local, like._spec, requires_grad=False)  # `from_local` would copy what is offloaded to the CPU


def clip_scale(norm: Tensor, limit: float) -> Tensor:
    """The factor that brings a gradient of this norm to at most `limit`: 0-d, no wait for the device."""
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


class Ema:
    """Exponential moving average of the trained masters in float32: `ema += (1 - d) * (weights - ema)`.

    The decay d at update n is `min(limit, (1 + n) / (10 + n))`, so the start of a run does not linger in it; without
    `ramp` it is `limit` from the first update on, as in Open-Sora 2.0.
    """

    def __init__(self, model: nn.Module, limit: float, ramp: bool = True) -> None:
        self.limit, self.ramp = limit, ramp
        self.parameters: Mapping[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.averages = {name: local_tensor(p).detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, count: int) -> None:
        """Takes in the weights after update number `count` (from 1)."""
        decay = min(self.limit, (1 + count) / (10 + count)) if self.ramp else self.limit
        current = [local_tensor(p).detach() for p in self.parameters.values()]
        torch._foreach_lerp_(list(self.averages.values()), current, 1 - decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Forgets the past: the average is the weights as they are."""
        for name, p in self.parameters.items():
            self.averages[name].copy_(local_tensor(p))

    def state(self) -> dict[str, Tensor]:
        """The averages under names for a checkpoint; sharded like their parameters, sharing memory."""
        return {f"ema.{name}": sharded_like(self.averages[name], p) for name, p in self.parameters.items()}
