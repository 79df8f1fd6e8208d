"""What a plan assumes of the GPUs; apart from the rest, for the command's help shows it and needs nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longtake.track import Gpu


@dataclass(frozen=True)
class Machine:
    """The GPUs a run is planned for, and what is assumed of them."""

    gpu: Gpu
    gpus_per_node: int = 8
    efficiency: float = 0.4  # share of the peak that the blocks' kernels reach
    bandwidth: float = 0.7  # share of the data sheet's bandwidths that transfers reach
    network: float = 50e9  # bytes/s of one GPU's way to other nodes, one direction
    host: float = 20e9  # bytes/s between one GPU and its share of the host's memory
    launch: float = 1e-5  # seconds of the host for each kernel that it starts
    headroom: float = 0.08  # share of the memory that CUDA, NCCL and fragments take
    storage: float = 2e9  # bytes/s between one node and where checkpoints are kept
    interruptions: float = 419 / 54 / 2048  # unexpected ones a node-day: Llama 3 405B, arXiv:2407.21783, table 5
    relaunch: float = 120.0  # seconds from an interruption until all ranks load again
    restart: float | None = None  # seconds from an interruption to the next step; None: forecast
    stall: float | None = None  # seconds that a run stands still for a checkpoint; None: forecast

    @property
    def usable_bytes(self) -> int:
        """Memory of one GPU that a run may count on."""
        return int(self.gpu.memory_gib * 2**30 * (1 - self.headroom))

    @property
    def rate(self) -> float:
        """FLOP/s of the blocks' kernels."""
        return self.gpu.peak_flops * self.efficiency

    @property
    def memory_rate(self) -> float:
        """Bytes/s of a GPU's own memory."""
        return self.gpu.memory_bandwidth * self.bandwidth
