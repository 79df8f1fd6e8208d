"""Classifier-free guidance (Ho and Salimans, 2022), with text alone or with text and known frames.

Every rule here is linear in the branches: v = sum of coefficient x branch. A branch whose coefficient is 0 is not run,
which saves 27 % (image-to-video) to 47 % (text-to-video) of Open-Sora 2.0's network calls at its 50 oscillating steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from longtake.contracts import Conditions
from longtake.diffusion.solvers import Scale, over_frames

PROMPT, NEGATIVE, NOTHING = "prompt", "negative", "nothing"  # branches: the last also goes without the known frames


def cfg(cond: Tensor, uncond: Tensor, scale: Scale) -> Tensor:
    """Guidance by text: uncond + scale (cond - uncond); [B, C, F, h, w]. At scale 1 `uncond` need not be computed."""
    return uncond + over_frames(scale, cond) * (cond - uncond)


def cfg_with_frames(prompt: Tensor, negative: Tensor, nothing: Tensor, text: Scale, image: Scale) -> Tensor:
    """Guidance by text and by known frames, as in Open-Sora 2.0; [B, C, F, h, w].

    nothing + image (negative - nothing) + text (prompt - negative), where `prompt` and `negative` saw the known frames
    and `nothing` saw neither them nor the text.
    """
    by_image = over_frames(image, prompt) * (negative - nothing)
    return nothing + by_image + over_frames(text, prompt) * (prompt - negative)


def oscillate(scale: float, step: int, num_held: int = 10) -> float:
    """The scale for the first `num_held` steps and every even one after; 1 at the others."""
    return scale if step < num_held or step % 2 == 0 else 1.0


def frame_scales(scale: float, step: int, num_steps: int, num_frames: int) -> Tensor:
    """A scale for each latent frame, float32 [F]: from 1 at the first to a ceiling at the last, which falls from
    `scale` at step 0 towards 1 at `num_steps`. One latent frame has scale 1."""
    ceiling = torch.linspace(scale, 1, num_steps + 1)[step]
    return torch.linspace(1, ceiling.item(), num_frames)


@dataclass(frozen=True)
class GuidanceScales:
    """How strong the guidance is at each step; the names are those of Open-Sora 2.0's sampling options."""

    guidance: float  # by the text
    guidance_img: float | None = None  # by the known frames; None: there are none, and two branches are enough
    text_osci: bool = False
    image_osci: bool = False
    scale_temporal_osci: bool = False  # image guidance grows over the frames and fades over the steps

    def text(self, step: int) -> float:
        """The text scale of a step."""
        return oscillate(self.guidance, step) if self.text_osci else self.guidance

    def image(self, step: int, num_steps: int, num_frames: int) -> Tensor:
        """The image scale of each latent frame at a step, float32 [F]; needs `guidance_img`."""
        assert self.guidance_img is not None, "no known frames to be guided by"
        scale = oscillate(self.guidance_img, step) if self.image_osci else self.guidance_img
        if self.scale_temporal_osci and scale > 1.0:
            return frame_scales(self.guidance_img, step, num_steps, num_frames)
        return torch.full((num_frames,), scale)

    def coefficients(self, step: int, num_steps: int, num_frames: int) -> dict[str, Scale]:
        """What each branch is multiplied by; the keys are the branches needed, those of coefficient 0 are left out.

        Image scales enter in float32. The coefficients of a step add up to 1.
        """
        text = self.text(step)
        if self.guidance_img is None:
            terms: dict[str, Scale] = {PROMPT: text, NEGATIVE: 1.0 - text}
        else:
            image = self.image(step, num_steps, num_frames)
            terms = {PROMPT: text, NEGATIVE: image - text, NOTHING: 1.0 - image}
        return {name: scale for name, scale in terms.items() if torch.as_tensor(scale).any()}


def guided(
    velocity: Callable[[Tensor, Tensor, Conditions], Tensor],
    branches: Mapping[str, Conditions],
    scales: GuidanceScales,
    num_steps: int,
    batched: bool = True,
    beside: Sequence[GuidanceScales] = (),
) -> Guided:
    """A denoiser for a solver: runs the branches a step needs and adds them up by their coefficients.

    velocity(x, t, conditions) -> [B, C, F, h, w]. branches: the conditions of "prompt", "negative" and, where there
    are known frames, "nothing"; each for the whole batch. batched: all branches of a step as one batch; False: one
    after the other, which gives the same and needs the memory of one. beside: the scales of other ranks, which gather
    weights together with this one and so must run as often: in turn, the calls are as many as the most of any.
    """
    return Guided(velocity, branches, scales, num_steps, batched, tuple(beside))


@dataclass(frozen=True)
class Guided:
    """See `guided`. Calling it, or asking for branches, raises KeyError for one that is needed and missing."""

    velocity: Callable[[Tensor, Tensor, Conditions], Tensor]
    conditions: Mapping[str, Conditions]
    scales: GuidanceScales
    num_steps: int
    batched: bool = True
    beside: tuple[GuidanceScales, ...] = ()

    def __call__(self, x: Tensor, t: Tensor, step: int) -> Tensor:
        parts = self.branches(x, t, step).values()
        return sum((over_frames(scale, output) * output for scale, output in parts), start=torch.zeros_like(x))

    def branches(self, x: Tensor, t: Tensor, step: int) -> dict[str, tuple[Scale, Tensor]]:
        """Name -> (coefficient, velocity [B, C, F, h, w] float32) of the branches that the step needs."""
        terms = self.scales.coefficients(step, self.num_steps, x.shape[2])
        if not self.batched:
            return self._in_turn(terms, x, t, step)
        count = len(terms)
        conditions = join_conditions([self.conditions[name] for name in terms])
        outputs = self.velocity(x.repeat(count, 1, 1, 1, 1), t.repeat(count), conditions).float().chunk(count)
        return {name: (scale, output) for (name, scale), output in zip(terms.items(), outputs, strict=True)}

    def _in_turn(self, terms: dict[str, Scale], x: Tensor, t: Tensor, step: int) -> dict[str, tuple[Scale, Tensor]]:
        found = {name: (scale, self.velocity(x, t, self.conditions[name]).float()) for name, scale in terms.items()}
        most = max((len(other.coefficients(step, self.num_steps, x.shape[2])) for other in self.beside), default=0)
        for _ in range(most - len(terms)):
            self.velocity(x, t, self.conditions[next(iter(terms))])
        return found


def join_conditions(parts: list[Conditions]) -> Conditions:
    """Conditions of several batches as those of one, along B. All must carry the same ones."""
    joined: dict[str, object] = {}
    for field in fields(Conditions):
        values = [getattr(part, field.name) for part in parts]
        if field.name == "extra":
            joined["extra"] = {key: torch.cat([value[key] for value in values]) for key in values[0]}
        elif any(value is not None for value in values):
            if any(value is None for value in values):
                raise ValueError(f"the condition {field.name!r} is given for some branches of guidance and not for all")
            joined[field.name] = torch.cat(values)
    return Conditions(**joined)
