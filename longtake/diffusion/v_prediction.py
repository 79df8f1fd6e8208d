"""v-prediction over 1,000 integer timesteps, the last of which is pure noise.

With clean latents x0 and a the share of their variance that is left at a timestep (its alpha_cumprod):

    x = sqrt(a) x0 + sqrt(1 - a) noise,    v = sqrt(a) noise - sqrt(1 - a) x0

Salimans and Ho, "Progressive Distillation for Fast Sampling", 2022. The schedule is the scaled-linear one, its
signal-to-noise ratio shifted, then stretched so that nothing is left of x0 at the end (Lin et al., "Common Diffusion
Noise Schedules and Sample Steps are Flawed", 2024). Solvers: DDIM (Song et al., 2021) and DPM-Solver++ 2M, as an ODE
and as an SDE (Lu et al., 2022).

With `spacing = "rescaled"`, as in SAT, the stretch is made anew on the timesteps that a solver takes. The denoiser is
told the timestep, and its v is read at the nearest level that it was trained at.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from longtake.contracts import Draw, Noised, UserError
from longtake.diffusion.config import NUM_TIMESTEPS, NoisePredictionConfig, Shift, VPredictionConfig
from longtake.diffusion.known import PixelShape
from longtake.diffusion.objective import Objective, sample_loss
from longtake.diffusion.solvers import Denoise, Past, Solver, StepNoise
from longtake.random import Purpose
from longtake.transfer import to_device


class OnTimesteps(Objective):
    """What objectives on a schedule of noise have in common. Times are integers as float32: 999 is noise, 0 almost
    clean, and -1 stands for clean latents, where solvers end, which take v."""

    noise_time: ClassVar[float] = NUM_TIMESTEPS - 1.0
    config: VPredictionConfig | NoisePredictionConfig
    schedule: Schedule

    def times(self, drawn: Tensor, latent_shape: tuple[int, ...], shape: PixelShape | None) -> Tensor:
        """Return the integers drawn."""
        return drawn.float()

    def time_at(self, level: float) -> float:
        return round(level * self.noise_time)

    def noised_at(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x(t), float32 [B, C, F, h, w]; t: of any shape that broadcasts."""
        signal, level = self.schedule.factors(t)
        return signal * clean + level * noise

    def grid(
        self,
        num_steps: int,
        latent_shape: tuple[int, int, int, int],
        shift: Shift | str = "training",
        shape: PixelShape | None = None,
    ) -> Tensor:
        """Return the timesteps that a solver asks the denoiser about, then -1: float32 [num_steps + 1]."""
        if not 1 <= num_steps <= NUM_TIMESTEPS:
            raise UserError(f"num_steps = {num_steps}: there are {NUM_TIMESTEPS:,} timesteps; choose 1 to as many")
        if shift not in ("training", None):
            raise UserError(
                f"flow_shift = {shift}: is for rectified flow; leave it out, or change objective.snr_shift in training"
            )
        if num_steps == 1 and self.config.spacing == "rescaled":
            raise UserError(
                'num_steps = 1: objective.spacing = "rescaled" stretches levels between two; choose 2 or more'
            )
        numbers = torch.arange(num_steps, dtype=torch.float64)
        match self.config.spacing:
            case "trailing":
                times = (NUM_TIMESTEPS - numbers * (NUM_TIMESTEPS / num_steps)).round() - 1
            case "linspace":
                times = torch.linspace(0, NUM_TIMESTEPS - 1, num_steps, dtype=torch.float64).round().flip(0)
            case "leading":
                times = numbers.flip(0) * (NUM_TIMESTEPS // num_steps)
            case "rescaled":
                times = (NUM_TIMESTEPS - 1 - numbers * ((NUM_TIMESTEPS - 1) / num_steps)).floor()
        return torch.cat([times.float(), torch.tensor([-1.0])])

    def grid_from(self, grid: Tensor, share: float) -> Tensor:
        return grid[grid <= round(share * self.noise_time)]

    def solver(self, name: str, num_steps: int) -> Solver:
        """`ddim`, `dpmpp_2m` or `dpmpp_2m_sde`."""
        levels: tuple[Schedule, Schedule, int | None] = self.schedule, self.schedule, NUM_TIMESTEPS // num_steps
        if self.config.spacing == "rescaled":
            times = self.grid(num_steps, (1, 1, 1, 1))[:-1].long()
            levels = *self.schedule.restretched(times, self.config.solver_snr_shift), None
        if name == "ddim":
            return DDIM(*levels)
        return DPMPlusPlus2M(*levels, adds_noise=name == "dpmpp_2m_sde")


class VPrediction(OnTimesteps):
    """The objective of v-prediction (`Objective`)."""

    config: VPredictionConfig

    def __init__(self, config: VPredictionConfig, patch_size: int, quirks: frozenset[str] = frozenset()) -> None:
        super().__init__(config, patch_size, quirks)
        self.schedule = Schedule.scaled_linear(config.beta_start, config.beta_end, config.snr_shift)

    @property
    def timestep(self) -> Draw:
        config = self.config
        return Draw(Purpose.TIMESTEP, "integer", below=config.num_timesteps, stratified=config.uniform_sampling)

    def target(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """v."""
        return self.noised_at(noise, -clean, t)

    def weight(self, t: Tensor) -> Tensor:
        """1, or with `min_snr_gamma` min(snr, gamma) / (snr + 1), the loss of x0 weighted as by Hang et al., "Efficient
        Diffusion Training via Min-SNR Weighting Strategy", 2023; snr = a / (1 - a)."""
        if (gamma := self.config.min_snr_gamma) is None:
            return torch.ones_like(t)
        alpha = self.schedule.alpha(t)
        return torch.minimum(alpha, gamma * (1 - alpha)).float()

    def loss(self, prediction: Tensor, noised: Noised) -> Tensor:
        """Return the loss of each sample, float32 [B]; a share `motion_loss` of it that of the differences between
        neighbouring frames, where there are more than two frames."""
        plain, share = sample_loss(prediction, noised), self.config.motion_loss
        if not share or prediction.shape[2] < 3:
            return plain
        counted = None if noised.counted is None else noised.counted[:, :, 1:] * noised.counted[:, :, :-1]
        motion = replace(noised, target=noised.target.diff(dim=2), counted=counted)
        return (1 - share) * plain + share * sample_loss(prediction.float().diff(dim=2), motion)


class Schedule:
    """How much of the clean latents' variance is left at each timestep, in float64; all of it at -1."""

    def __init__(self, alphas: Tensor) -> None:
        self._keep(alphas)

    @classmethod
    def linear(cls, beta_start: float, beta_end: float) -> Schedule:
        """That of DDPM, which keeps a little of the clean latents at the end."""
        return cls((1 - torch.linspace(beta_start, beta_end, NUM_TIMESTEPS, dtype=torch.float64)).cumprod(0))

    @classmethod
    def scaled_linear(cls, beta_start: float, beta_end: float, snr_shift: float) -> Schedule:
        """Linear in the roots of the betas, shifted, and stretched to pure noise."""
        betas = torch.linspace(beta_start**0.5, beta_end**0.5, NUM_TIMESTEPS, dtype=torch.float64).square()
        alphas = (1 - betas).cumprod(0)
        made = cls(_stretched(_shifted(alphas, snr_shift).sqrt()).square())
        made._unshifted, made._shift = alphas, snr_shift
        return made

    def _keep(self, alphas: Tensor) -> None:
        self._alphas = {torch.device("cpu"): torch.cat([torch.ones(1, dtype=torch.float64), alphas])}

    def restretched(self, times: Tensor, snr_shift: float | None) -> tuple[Schedule, Schedule]:
        """Two schedules at falling timesteps `times` [N] alone: stretched over these, with a shift of their own if one
        is given, and the nearest levels of this one."""
        shifted = _shifted(self._unshifted[times], self._shift if snr_shift is None else snr_shift)
        roots, own = _stretched(shifted.sqrt().flip(0)).flip(0), self.alpha(torch.arange(NUM_TIMESTEPS))
        nearest = (roots[:, None] - own.sqrt()).abs().argmin(1)
        found = []
        for alphas in (roots.square(), own[nearest]):
            table = own.new_full((NUM_TIMESTEPS,), torch.nan)
            table[times] = alphas
            found.append(copy(self))
            found[-1]._keep(table)
        return found[0], found[1]

    def alpha(self, t: Tensor) -> Tensor:
        """At timesteps `t`, float64 of the same shape; below 0 they are -1."""
        if t.device not in self._alphas:
            self._alphas[t.device] = to_device(self._alphas[torch.device("cpu")], t.device)
        return self._alphas[t.device][(t.round().long() + 1).clamp_min(0)]

    def factors(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Of the clean latents and of the noise in x, float32."""
        alpha = self.alpha(t)
        return alpha.sqrt().float(), (1 - alpha).sqrt().float()


def _shifted(alphas: Tensor, snr_shift: float) -> Tensor:
    return alphas / (snr_shift + (1 - snr_shift) * alphas)


def _stretched(roots: Tensor) -> Tensor:
    """Return the first stays, the last becomes 0."""
    first, last = roots[0], roots[-1]
    return (roots - last) * (first / (first - last))


@dataclass(frozen=True)
class _ByLevels(Solver):
    """From level to level of a schedule.

    Each step goes 1000 // num_steps timesteps down, as in diffusers, also where that is not quite the next of the grid:
    numbers of steps that divide 1,000 end at clean latents, others a little before.
    """

    schedule: Schedule
    read: Schedule  # at whose levels v is turned into clean latents
    stride: int | None  # None: to the next timestep of the grid

    def after(self, t: Tensor, t_next: Tensor) -> Tensor:
        """Where a step from t ends."""
        return t_next if self.stride is None else t - self.stride


@dataclass(frozen=True)
class DDIM(_ByLevels):
    """Along the noise that v stands for, with none of its own."""

    def step(
        self, denoise: Denoise, x: Tensor, t: Tensor, t_next: Tensor, index: int, past: Past, noise: StepNoise
    ) -> Tensor:
        v = denoise(x, t.expand(len(x)), index).float()
        signal, level = self.read.factors(t)
        signal_next, level_next = self.schedule.factors(self.after(t, t_next))
        return signal_next * (signal * x - level * v) + level_next * (level * x + signal * v)


@dataclass(frozen=True)
class DPMPlusPlus2M(_ByLevels):
    """The two-step rule in the logarithm of signal over noise: x0 is continued in a straight line through the last two.

    adds_noise: the SDE; otherwise the ODE. The first step is of first order, as is one that ends at clean latents, and
    any where a known place has just been released: the x0 before was another path's.
    """

    adds_noise: bool

    def step(
        self, denoise: Denoise, x: Tensor, t: Tensor, t_next: Tensor, index: int, past: Past, noise: StepNoise
    ) -> Tensor:
        v = denoise(x, t.expand(len(x)), index).float()
        alpha, alpha_next = self.schedule.alpha(t), self.schedule.alpha(self.after(t, t_next))
        read = self.read.alpha(t)
        clean = read.sqrt() * x - (1 - read).sqrt() * v
        h, mean = _log_ratio(alpha_next) - _log_ratio(alpha), clean
        if "" in past:
            t_before, before = past[""]
            h_before = _log_ratio(alpha) - _log_ratio(self.schedule.alpha(t_before))
            slope = torch.where(alpha_next < 1, h / (2 * h_before), 0.0)
            mean = clean + slope * torch.where(before.isnan(), 0.0, clean - before)
        past[""] = t, clean
        kept = ((1 - alpha_next) / (1 - alpha)).sqrt()
        if not self.adds_noise:
            return kept * x - torch.expm1(-h) * alpha_next.sqrt() * mean
        fresh = -torch.expm1(-2 * h)  # share of the noise that is new
        added = ((1 - alpha_next) * fresh).sqrt() * noise(index).to(x)
        return kept * (-h).exp() * x + fresh * alpha_next.sqrt() * mean + added


def _log_ratio(alpha: Tensor) -> Tensor:
    """Half the logarithm of the signal-to-noise ratio."""
    return (alpha / (1 - alpha)).log() / 2
