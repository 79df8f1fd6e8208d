"""Objectives as a user writes them."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import huber_loss

from longtake.contracts import Noised
from longtake.diffusion.flow import RectifiedFlow


class Huber(RectifiedFlow):
    """Rectified flow with Huber's loss."""

    def loss(self, prediction: Tensor, noised: Noised) -> Tensor:
        errors = huber_loss(prediction.float(), noised.target, reduction="none", delta=0.1)
        return noised.weight * errors.flatten(1).mean(1)


class Failing(RectifiedFlow):
    """Raises in the loss of its sixth micro-batch of a process, which is in the second step of a tiny run."""

    error = KeyError("of the user's")
    calls = 0

    def loss(self, prediction: Tensor, noised: Noised) -> Tensor:
        Failing.calls += 1
        if Failing.calls == 6:
            raise Failing.error
        return super().loss(prediction, noised)
