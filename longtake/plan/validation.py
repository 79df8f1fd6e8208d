"""Cost of a validation's videos on a GPU, while a training run waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longtake.generate.config import GenerateConfig
from longtake.generate.sample import shape_asked
from longtake.plan.layout import Layout
from longtake.plan.parameters import weights_of
from longtake.plan.remedies import gib
from longtake.plan.run import RunPlan
from longtake.plan.video import branches_of, rooms_of
from longtake.plan.work import RunConfig, stores_all
from longtake.system.encoders import encoder_bytes, encoder_sections, encoders_on_host


@dataclass(frozen=True)
class ValidationForecast:
    """Bytes on the fullest GPU while the largest video of a validation is made."""

    weights: int  # of the denoiser's masters
    encoders: int  # that stay there
    states: int  # moments and average
    denoising: int  # beside all of it
    coding: int  # beside all of it while texts are embedded, references encoded, videos decoded
    usable: int
    offload: bool  # whether states, and weights while no forward is made, wait in the host's memory

    @property
    def total(self) -> int:
        if self.offload:
            return self.encoders + max(self.weights + self.denoising, self.coding)
        return self.encoders + self.weights + self.states + max(self.denoising, self.coding)

    @property
    def host_bytes(self) -> int:
        """Of the host's memory, for each GPU."""
        return self.offload * (self.weights + self.states)

    @property
    def fits(self) -> bool:
        return self.total <= self.usable

    def to_json(self) -> dict[str, int | bool]:
        """Return the same as plain data."""
        return {"bytes": self.total, "host_bytes": self.host_bytes, "fits": self.fits}

    def __str__(self) -> str:
        said = f"a validation takes {gib(self.total)} of {gib(self.usable)} a GPU"
        if self.offload:
            said += (
                ", for moments and average, and the denoiser but in its forwards, wait in "
                f"{gib(self.host_bytes)} of the host's memory"
            )
        return said if self.fits else f"{said}: too large; ask for smaller or shorter videos"


def forecast_validation(plan: RunPlan, requests: Sequence[GenerateConfig]) -> ValidationForecast | None:
    """Of a planned run whose validations make these videos; None where they make none."""
    if not requests or not plan.entries:
        return None
    held, layout, config = plan.entries[0].memory, plan.layout, plan.work.config
    wanted = config.validation.offload
    each = [validation_rooms(config, one, layout) for one in requests]
    denoising, coding = (max(of) for of in zip(*each, strict=True))
    states, usable = held.optimizer + held.ema, plan.machine.usable_bytes
    parts = held.weights, held.encoders, states, denoising, coding, usable
    beside = ValidationForecast(*parts, offload=wanted is True)
    return ValidationForecast(*parts, offload=True) if wanted == "auto" and not beside.fits else beside


def validation_rooms(config: RunConfig, request: GenerateConfig, layout: Layout) -> tuple[int, int]:
    """Bytes of a batch of videos beside what a run in this layout holds on a GPU: while the denoiser runs, with what is
    gathered of it, and while encoders and decoder do, with what of these is there for that alone."""
    if stores_all(config):  # its encoders are there for validations alone
        request = encoders_on_host(request)
    shape = shape_asked(request, request.sampling_option)
    rooms = rooms_of(request, shape, request.batch_size, layout)
    branches = branches_of(request, request.ae.latent(*shape)[1])
    width = max(branches) if request.sampling_option.guidance_batch is True else 1
    counted = weights_of(request.model, layout)
    gathered = layout.compute_bytes * counted.most_gathered(layout.weight_shards, layout.zero)
    denoising = width * rooms["denoise"] + gathered
    return int(denoising), max(rooms["texts"], rooms["decode"]) + _visiting(request)


def _visiting(request: GenerateConfig) -> int:
    """Bytes of encoders, and of the decoder, that are not on the GPU while the run trains."""
    whole, trains = encoder_bytes(request, decodes=True), encoder_bytes(request)
    stays = [getattr(getattr(request, name), "placement", None) != "offloaded" for name in encoder_sections(request)]
    return sum(whole[name] - trains[name] * stay for name, stay in zip(encoder_sections(request), stays, strict=True))
