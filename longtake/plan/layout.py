"""Layout of a model over GPUs, and the micro-batches that it runs: what a plan varies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from longtake.models.build import LatentSize
from longtake.models.config import LoraConfig
from longtake.parallel.recomputation import Level

FP32 = 4
EIGHT_BIT_BYTES = 2 * (1 + FP32 / 256)  # of both moments of a weight: a code each, and a scale for 256 of them


@dataclass(frozen=True)
class Upkeep:
    """Trained part of the weights, and the storage of its masters, moments and EMA."""

    lora: LoraConfig | None = None
    freeze: tuple[str, ...] = ()
    train_only: tuple[str, ...] | None = None
    master_bytes: int = FP32  # of a weight that trains, and of its gradient
    moments_bytes: float = 2 * FP32  # of both moments of AdamW, a weight
    moments_offloaded: bool = False  # to the host's memory
    ema_offloaded: bool = False


NUMBER_BYTES = {"bf16": 2, "fp32": FP32}  # dtype, as a config names it -> bytes of one number
PLAIN = Upkeep()


@dataclass(frozen=True)
class Layout:
    """Sharding of a model over GPUs, and the tensors that each of them holds."""

    replicate: int = 1
    shard: int = 1
    sequence: int = 1
    tensor: int = 1
    zero: int = 3  # 3 frees gathered weights after a block's forward, 2 keeps them for its backward
    remat: tuple[int, ...] = ()  # first blocks of each list that are recomputed
    level: Level = "full"  # at which these are, or "auto"
    room: int = 0  # bytes of a GPU that level = "auto" may fill, `FORECAST_ERROR` being added to the forecast
    buffer_bytes: int = 0  # of the host's memory to which they offload what they save
    compiled: bool = False  # blocks
    ema: bool = False
    denoisers: int = 1  # that the run trains, of which a step computes with one
    compute_bytes: int = 2  # of one number in the compute dtype
    reduce_bytes: int = 4  # of one number of a gradient on its way between ranks
    prefetch: int = 1  # blocks gathered ahead in backward
    offload: bool = False  # masters, gradients, moments and average in the host's memory
    micro_batches: int = 1  # of one rank in one step
    float8: bool = False  # products of the blocks' linear layers
    upkeep: Upkeep = PLAIN
    bucket_sequence: Mapping[str, Mapping[int, int]] | Literal["auto"] | None = None  # as in `parallel`
    sequence_attention: Literal["auto", "ulysses", "ring"] = "auto"

    @property
    def least(self) -> Layout:
        """The same at the level that takes least memory, where it is "auto"."""
        return replace(self, level="full") if self.level == "auto" else self

    @property
    def unrecomputed(self) -> Layout:
        """The same with nothing recomputed."""
        return replace(self, level="none")

    @property
    def gpus(self) -> int:
        return self.replicate * self.shard * self.sequence * self.tensor

    @property
    def data_ranks(self) -> int:
        """Ranks that read different data."""
        return self.replicate * self.shard

    @property
    def weight_shards(self) -> int:
        """Ranks over which one copy of the weights is spread; sequence and tensor peers share them too."""
        return self.shard * self.sequence * self.tensor

    @property
    def peers(self) -> int:
        """Ranks that compute one micro-batch together."""
        return self.sequence * self.tensor

    def at_degree(self, sequence: int) -> Layout:
        """Return the layout as a bucket sees it that runs at a smaller sequence degree: its subgroups read different
        data while weights stay spread over as many ranks."""
        return replace(self, sequence=sequence, shard=self.shard * self.sequence // sequence)


@dataclass(frozen=True)
class MicroBatch:
    """The sizes of one forward of one data rank."""

    batch: int
    latent: LatentSize  # of one sample
    text_tokens: int
    encoding_bytes: int = 0  # that a rank holds while frames, then captions, are encoded, beside the latents
    waiting_bytes: int = 0  # of embedded captions that wait for their micro-batches, throughout a step
    beside_bytes: int = 0  # of what clips bring along that the denoiser does not need, and is given

    @property
    def latent_bytes(self) -> int:
        """Of the latents of all samples, in float32."""
        return FP32 * self.batch * prod(self.latent)
