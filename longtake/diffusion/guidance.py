"""Classifier-free guidance (Ho and Salimans, 2022), with text alone or with text and known frames.

By text alone v = negative + text (prompt - negative); with known frames, as in Open-Sora 2.0, v = nothing + image
(negative - nothing) + text (prompt - negative), where `prompt` and `negative` see the known frames and `nothing` sees
neither them nor the text. Either is linear: v = sum of coefficient x branch. A branch of coefficient 0 is not run: that
saves 27 % (image-to-video) to 47 % (text-to-video) of Open-Sora 2.0's network calls at its 50 oscillating steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longtake.contracts import Conditions, UserError
from longtake.diffusion.solvers import Scale, over_frames

PROMPT, NEGATIVE, NOTHING = "prompt", "negative", "nothing"  # branches: the last also goes without the known frames


def oscillate(scale: float, step: int, num_held: int = 10) -> float:
    """Return the scale for the first `num_held` steps and every even one after; 1 at the others."""
    return scale if step < num_held or step % 2 == 0 else 1.0


def dynamic(scale: float, step: int, num_steps: int, t: float, exp: float = 5) -> float:
    """CogVideoX's dynamic guidance as SAT and diffusers have it: by the timestep `t` from 0 to 999, not by the step, so
    that it swings between 1 and 1 + scale, the faster the more t exceeds the number of steps."""
    return _risen(scale, (num_steps - t) / num_steps, exp)


def dynamic_by_step(scale: float, step: int, num_steps: int, t: float, exp: float = 5) -> float:
    """Return the same by the step, as it was meant: from 1 up to almost 1 + scale, most of it at the end."""
    return _risen(scale, step / num_steps, exp)


def _risen(scale: float, share: float, exp: float) -> float:
    if exp != int(exp):
        raise UserError(f"sampling_option.guidance_numbers.exp = {exp:g}: must be a whole number, such as 5")
    return 1 + scale * (1 - math.cos(math.pi * share ** int(exp))) / 2


# (scale, step, steps, time on the objective's grid, numbers of its own by name) -> the text scale of that step
GuidanceRule = Callable[..., float]


@dataclass(frozen=True)
class GuidanceScales:
    """How strong the guidance is at each step; the names are those of Open-Sora 2.0's sampling options."""

    guidance: float  # by the text
    guidance_img: float | None = None  # by the known frames; None: there are none, and two branches are enough
    text_osci: bool = False
    image_osci: bool = False
    scale_temporal_osci: bool = False  # image guidance grows over the frames and fades over the steps
    rule: GuidanceRule | None = None  # of a family whose text scale changes over the steps in a way of its own
    below: tuple[float, float] | None = None  # (time, text scale at times below it), where a second denoiser works

    def text(self, step: int, num_steps: int = 1, t: Tensor | None = None) -> float:
        """Return the text scale of a step; its time `t` [B], alike in a batch, is read where there is a `rule` or
        another scale `below` some time."""
        scale = self.guidance
        if self.below is not None and t is not None and t[0].item() < self.below[0]:
            scale = self.below[1]
        if self.rule is not None and t is not None:
            return self.rule(scale, step, num_steps, t[0].item())
        return oscillate(scale, step) if self.text_osci else scale

    def image(self, step: int, num_steps: int, num_frames: int) -> Tensor:
        """Return the image scale of each latent frame at a step, float32 [F]; needs `guidance_img`."""
        assert self.guidance_img is not None, "no known frames to be guided by"
        scale = oscillate(self.guidance_img, step) if self.image_osci else self.guidance_img
        if self.scale_temporal_osci and scale > 1.0:  # from 1 at the first frame to a ceiling that falls over the steps
            ceiling = torch.linspace(self.guidance_img, 1, num_steps + 1)[step]
            return torch.linspace(1, ceiling.item(), num_frames)
        return torch.full((num_frames,), scale)

    def coefficients(self, step: int, num_steps: int, num_frames: int, t: Tensor | None = None) -> dict[str, Scale]:
        """What each branch is multiplied by; the keys are the branches needed, those of coefficient 0 are left out.

        Image scales enter in float32. The coefficients of a step add up to 1.
        """
        text = self.text(step, num_steps, t)
        if self.guidance_img is None:
            terms: dict[str, Scale] = {PROMPT: text, NEGATIVE: 1.0 - text}
        else:
            image = self.image(step, num_steps, num_frames)
            terms = {PROMPT: text, NEGATIVE: image - text, NOTHING: 1.0 - image}
        return {name: scale for name, scale in terms.items() if torch.as_tensor(scale).any()}


@dataclass(frozen=True)
class Guided:
    """A denoiser for a solver: runs the branches a step needs and adds them up by their coefficients.

    Calling it, or asking for branches, raises KeyError for one that is needed and missing.
    """

    velocity: Callable[[Tensor, Tensor, Conditions], Tensor]  # (x, t, conditions) -> [B, C, F, h, w]
    conditions: Mapping[str, Conditions]  # of each branch, for the whole batch
    scales: GuidanceScales
    num_steps: int
    batched: bool = True  # branches as one batch; False: one after the other, the same in the memory of one
    # Scales of other ranks, which gather weights together with this one and so must run as often: in turn, the calls
    # are as many as the most of any.
    beside: Sequence[GuidanceScales] = ()

    def __call__(self, x: Tensor, t: Tensor, step: int) -> Tensor:
        parts = self.branches(x, t, step).values()
        return sum((over_frames(scale, output) * output for scale, output in parts), start=torch.zeros_like(x))

    def branches(self, x: Tensor, t: Tensor, step: int) -> dict[str, tuple[Scale, Tensor]]:
        """Name -> (coefficient, velocity [B, C, F, h, w] float32) of the branches that the step needs."""
        terms = self.scales.coefficients(step, self.num_steps, x.shape[2], t)
        if not self.batched:
            return self._in_turn(terms, x, t, step)
        count = len(terms)
        conditions = join_conditions([self.conditions[name] for name in terms])
        outputs = self.velocity(x.repeat(count, 1, 1, 1, 1), t.repeat(count), conditions).float().chunk(count)
        return {name: (scale, output) for (name, scale), output in zip(terms.items(), outputs, strict=True)}

    def _in_turn(self, terms: dict[str, Scale], x: Tensor, t: Tensor, step: int) -> dict[str, tuple[Scale, Tensor]]:
        found = {name: (scale, self.velocity(x, t, self.conditions[name]).float()) for name, scale in terms.items()}
        others = (other.coefficients(step, self.num_steps, x.shape[2], t) for other in self.beside)
        for _ in range(max(map(len, others), default=0) - len(terms)):
            self.velocity(x, t, self.conditions[next(iter(terms))])
        return found


def join_conditions(parts: list[Conditions]) -> Conditions:
    """Conditions of several batches as those of one, along B. All must carry the same ones."""
    for tensors in (parts, [part.masks for part in parts]):
        some = set().union(*tensors)
        if lacking := sorted(name for name in some if any(name not in of_branch for of_branch in tensors)):
            raise ValueError(f"the condition {lacking[0]!r} is given for some branches of guidance and not for all")
    return Conditions(
        {name: torch.cat([part[name] for part in parts]) for name in parts[0]},
        {name: torch.cat([part.masks[name] for part in parts]) for name in parts[0].masks},
    )
