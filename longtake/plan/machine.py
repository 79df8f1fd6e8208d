"""Assumptions of a plan about the GPUs; a separate module because the command's help shows them and needs nothing
else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from longtake.plan.rates import Rates, table_rates

if TYPE_CHECKING:
    from longtake.track.devices import Gpu


CPU = "cpu"  # a device like any kind of GPU
FORECAST_ERROR = 0.1  # of gathered weights and activations: twice the largest error that a test of a forecast allows


@dataclass(frozen=True)
class Machine:
    """The GPUs a run is planned for, and what is assumed of them."""

    gpu: Gpu
    gpus_per_node: int = 8
    efficiency: float | None = None  # share of the peak that all kernels reach; None: by their kind
    bandwidth: float = 0.7  # share of the data sheet's bandwidths that transfers reach
    network: float = 50e9  # bytes/s of one GPU's way to other nodes, one direction
    host: float = 20e9  # bytes/s between one GPU and its share of the host's memory
    launch: float = 1e-5  # seconds of the host for each kernel that it starts
    measured: Rates | None = None  # by `longtake plan --measure`
    headroom: float = 0.08  # share of the memory that CUDA, NCCL and fragments take
    storage: float = 2e9  # bytes/s between one node and where checkpoints are kept
    interruptions: float = 419 / 54 / 2048  # unexpected ones a node-day: Llama 3 405B, arXiv:2407.21783, table 5
    relaunch: float = 120.0  # seconds from an interruption until all ranks load again
    restart: float | None = None  # seconds from an interruption to the next step; None: forecast
    stall: float | None = None  # seconds that a run stands still for a checkpoint; None: forecast

    @property
    def device(self) -> str:
        """The type of a rank's device there, as PyTorch calls it."""
        return CPU if self.gpu.name == CPU else "cuda"

    @property
    def usable_bytes(self) -> int:
        """Memory of one GPU that a run may count on."""
        return int(self.gpu.memory_gib * 2**30 * (1 - self.headroom))

    @property
    def room_bytes(self) -> int:
        """Memory that `model.recompute = "auto"` may fill: on a CPU none."""
        return self.usable_bytes if self.device != CPU else 0

    @cached_property
    def rates(self) -> Rates:
        """Rates of the GPUs by kind of work: one fraction of the peak where that is given, else measured, else from the
        table."""
        rates = table_rates(self.gpu, self.gpu.link_bandwidth * self.bandwidth, self.host, self.launch)
        if self.measured is not None:
            links, host = self.measured.links or rates.links, self.measured.host or rates.host
            rates = replace(self.measured, links=links, host=host)
        if self.efficiency is None:
            return rates
        rate = self.gpu.peak_flops * self.efficiency  # of model FLOPs, where attention's backward is twice its forward
        said = f"{self.efficiency:.0%} of {self.gpu.peak_flops / 1e12:g} TFLOP/s for all kernels (--efficiency)"
        return replace(rates, products=rate, attention={128: (rate, 1.25 * rate)}, convolutions=rate, said=said)
