"""Work and layout of a planned run, read from its config: the work independent of the layout, and the layout over
GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from longtake.buckets.protocol import BucketLaw
from longtake.contracts import Bucket, LatentShape, UserError
from longtake.encoders.cost import EncodeCost, autoencoder_cost
from longtake.models.build import denoiser_class
from longtake.parallel.config import resolve_degrees
from longtake.parallel.degrees import EntryKey, bucket_degrees, check_bucket_sequence
from longtake.parallel.mesh import Mesh
from longtake.parallel.recomputation import NAMED_LEVELS, Level, check_level, level_and_counts
from longtake.plan.layout import EIGHT_BIT_BYTES, FP32, NUMBER_BYTES, Layout, MicroBatch, Upkeep
from longtake.plan.machine import FORECAST_ERROR, Machine
from longtake.plan.memory import Memory, forecast_memory
from longtake.plan.speed import EncoderWork, MicroBatchTime, forecast_time
from longtake.system.encoders import (
    CAPTIONS_AT_ONCE,
    captions_costs,
    captions_of_sample,
    companions_costs,
    embedding_bytes,
    embeds_ahead,
    encoder_bytes,
    encoding_costs,
)
from longtake.system.float8 import check_float8

RunConfig = Any  # a training run's config: that of `longtake.train`, which this package must not import


@dataclass(frozen=True)
class Work:
    """A run as a plan sees it: everything that does not depend on how it is laid out over GPUs."""

    config: RunConfig
    rule: BucketLaw
    latent: LatentShape
    text_tokens: int
    encoder_bytes: int  # of frozen weights on one GPU
    _known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # what was computed before

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    @property
    def model(self) -> Any:
        """The denoiser's section."""
        return self.config.model

    @cached_property
    def entries(self) -> tuple[Bucket, ...]:
        """Each entry of the bucket table that clips can take, at the ratio with the most tokens."""
        largest: dict[tuple[str, int], Bucket] = {}
        for bucket in self.rule.buckets:
            key = bucket.entry
            if key in self.rule.entries and (key not in largest or self.tokens(bucket) > self.tokens(largest[key])):
                largest[key] = bucket
        return tuple(largest.values())

    def tokens(self, bucket: Bucket) -> int:
        """Video tokens of one sample."""
        tokens = denoiser_class(self.model).tokens
        return self._once(bucket.shape, lambda: tokens(self.model, self.latent(*bucket.shape)))

    def micro_batch(self, bucket: Bucket, batch: int | None = None, encoders_of: int = 0, ahead: int = 0) -> MicroBatch:
        """Return the sizes of one micro-batch of a bucket, of its own batch size where none is given.

        encoders_of: peers that encode it together; 0: encoding is left out. ahead: captions that are embedded in one
        pass, see `captions_ahead`.
        """
        batch = bucket.batch_size if batch is None else batch
        most, waiting = 0, ahead * embedding_bytes(self.config)
        if encoders_of:
            costs = self.encoding(bucket.shape, batch)
            captions = captions_costs(self.config, ahead) if ahead else {}
            most = max(
                cost.rank_bytes(encoders_of) + waiting * (name not in captions)
                for name, cost in {**costs, **captions}.items()
            )
        beside = FP32 * batch * self._once(("beside", bucket.shape), lambda: self._brought(bucket.shape))
        return MicroBatch(batch, self.latent(*bucket.shape), self.text_tokens, most, waiting, beside)

    def captions_ahead(self, bucket: Bucket, layout: Layout, batch: int | None = None) -> int:
        """Captions whose embeddings are there throughout a step with a micro-batch of this bucket: its own, and those
        of others as far as they are embedded in one pass; 0 where each micro-batch embeds its own."""
        config = self.config
        sections = [getattr(config, text.section) for text in config.family.texts]
        if layout.peers > 1 or config.dataset.stored or not embeds_ahead(sections):
            return 0

        own = self._captions(bucket, bucket.batch_size if batch is None else batch)
        return max(own, min(CAPTIONS_AT_ONCE, own + (layout.micro_batches - 1) * self._most_captions))

    @cached_property
    def _most_captions(self) -> int:
        """Of a micro-batch of any entry."""
        return max(self._captions(one, one.batch_size) for one in self.entries)

    def _captions(self, bucket: Bucket, batch: int) -> int:
        frames = bucket.num_frames
        return batch * self._once(("captions", frames), lambda: captions_of_sample(self.config, frames))

    def _brought(self, shape: tuple[int, int, int]) -> int:
        """Numbers of a sample's companions that the denoiser's `needs` do not name: it takes them where they are."""
        latent = self.latent(*shape)
        needs = denoiser_class(self.model).needs(self.model, latent, self.text_tokens)
        still = self.latent(1, *shape[1:])
        of = {"video": lambda one: prod(latent), "stills": lambda one: one.most * prod(still)}
        of["numbers"] = lambda one: shape[0] * one.width
        found = self.config.family.companions(self.model)
        return sum(of[one.kind](one) for one in found if one.condition not in needs)

    def encoding(self, shape: tuple[int, int, int], batch: int) -> Mapping[str, EncodeCost]:
        """Return the cost of encoding a micro-batch, by section; none where everything comes from a latent store."""
        if stores_all(self.config):
            return {"": EncodeCost()}
        return self._once((shape, batch), lambda: encoding_costs(self.config, shape, batch))

    def encoder_work(self, bucket: Bucket, batch: int, ranks: int) -> EncoderWork:
        """Of the rank with most to do among so many that share a micro-batch; none where latents come from a store."""
        if self.config.dataset.stored:
            return EncoderWork()
        flops = {name: cost.rank_flops(ranks) for name, cost in self.encoding(bucket.shape, batch).items()}
        brought = sum(cost.rank_flops(ranks) for cost in companions_costs(self.config, bucket.shape, batch))
        video = flops.pop("ae", 0) + self.known_flops(bucket, batch, ranks) + brought
        return EncoderWork(video, sum(flops.values()))

    def known_flops(self, bucket: Bucket, batch: int, ranks: int) -> float:
        """Of that rank for what is known and encoded apart: the mean over the kinds of `condition_config`."""

        def mean() -> float:
            (frames, *sides), weights = bucket.shape, self.config.condition_config or {}
            law, found = self.config.known_law, 0.0
            for kind, weight in weights.items():
                for window in law.windows(kind, self.latent, frames) if weight else ():
                    cost = autoencoder_cost(self.config.ae, (len(window.pixels), *sides), batch)
                    found += weight * cost.rank_flops(ranks) * bool(window.name)
            return found / sum(weights.values()) if found else 0.0

        return self._once(("known", bucket.shape, batch, ranks), mean)

    def degrees(self, layout: Layout) -> dict[EntryKey, int]:
        """Return the sequence degree of every entry of the bucket table, at the batch sizes as written."""
        parallel = self.config.parallel.model_copy(update={"bucket_sequence": layout.bucket_sequence})

        def length(bucket: Bucket) -> int:
            return self.tokens(bucket) + self.text_tokens

        key = layout.sequence, str(layout.bucket_sequence)
        return self._once(key, lambda: bucket_degrees(parallel, layout.sequence, self.rule.buckets, length))

    def degree(self, bucket: Bucket, layout: Layout) -> int:
        """Return the sequence degree of one of them."""
        if layout.bucket_sequence is None or layout.sequence == 1:
            return layout.sequence
        return self.degrees(layout)[bucket.entry]

    def slot_size(self, bucket: Bucket, layout: Layout) -> int:
        """Micro-batches of a bucket that the peers of one data rank run side by side."""
        return layout.sequence // self.degree(bucket, layout)

    def level(self, bucket: Bucket, layout: Layout, batch: int | None = None) -> Level:
        """Return the level at which blocks of a micro-batch of this bucket are recomputed; where "auto", the
        cheapest that fits even where the forecast is off by `FORECAST_ERROR`."""
        if layout.level != "auto":
            return layout.level

        def choose() -> Level:
            for level in NAMED_LEVELS[:-1]:
                memory = self.memory(bucket, replace(layout, level=level), batch, error=FORECAST_ERROR)
                if memory.total <= layout.room:
                    return level
            return NAMED_LEVELS[-1]

        return self._once((bucket, batch, str(layout)), choose)

    def own_layout(self, bucket: Bucket, layout: Layout, batch: int | None = None) -> Layout:
        """Return the layout as a micro-batch of this bucket sees it."""
        return replace(layout.at_degree(self.degree(bucket, layout)), level=self.level(bucket, layout, batch))

    def memory(
        self, bucket: Bucket, layout: Layout, batch: int | None = None, encodes: bool = True, error: float = 0.0
    ) -> Memory:
        """Bytes of a step whose micro-batches are of this bucket, at its own sequence degree.

        encodes: False leaves encoders out, their weights and activations. error: as of `forecast_memory`.
        """
        own = self.own_layout(bucket, layout, batch)
        ahead = self.captions_ahead(bucket, layout, batch) if encodes else 0
        sizes = self.micro_batch(bucket, batch, own.peers if encodes else 0, ahead)
        return forecast_memory(self.model, sizes, own, self.encoder_bytes if encodes else 0, error)

    def encoding_bytes(self, bucket: Bucket, layout: Layout) -> int:
        """Bytes of activations while a micro-batch of this bucket is encoded."""
        peers = self.degree(bucket, layout) * layout.tensor
        sizes = self.micro_batch(bucket, encoders_of=peers, ahead=self.captions_ahead(bucket, layout))
        return sizes.encoding_bytes + sizes.latent_bytes

    def time(self, bucket: Bucket, layout: Layout, machine: Machine, batch: int | None = None) -> MicroBatchTime:
        """Time of one micro-batch of this bucket, and of those that run beside it."""
        own, sizes = self.own_layout(bucket, layout, batch), self.micro_batch(bucket, batch)
        return forecast_time(self.model, sizes, own, machine, self.encoder_work(bucket, sizes.batch, own.peers))


def read_work(config: RunConfig, ranks_per_node: int = 1) -> Work:
    """Return the work of a run on nodes of so many ranks. Raises `UserError` for buckets that the autoencoder cannot
    take."""
    rule = config.bucket_rule
    for bucket in rule.buckets:
        config.check_shape(*bucket.shape)
    return Work(config, rule, config.ae.latent, config.text_length, _encoder_bytes(config, ranks_per_node))


def _encoder_bytes(config: RunConfig, ranks_per_node: int) -> int:
    """Of frozen encoders on one GPU; none are held where all comes from a latent store."""
    if stores_all(config):
        return 0
    return sum(encoder_bytes(config, ranks_per_node).values())


def stores_all(config: RunConfig) -> bool:
    """Return whether everything comes from a latent store, so that nothing is encoded."""
    return config.dataset.stored and config.dataset.latents_missing == "refuse"


def _read_upkeep(config: RunConfig) -> Upkeep:
    """Return the trained part of the weights and its storage."""
    return Upkeep(
        lora=config.lora,
        freeze=config.freeze,
        train_only=config.train_only,
        master_bytes=NUMBER_BYTES[config.master_dtype],
        moments_bytes=EIGHT_BIT_BYTES if config.optim.states == "8bit" else 2 * FP32,
        moments_offloaded=config.optim.offload,
        ema_offloaded=config.ema_offload,
    )


def read_layout(config: RunConfig, gpus: int, gpus_per_node: int, device: str = "cuda") -> Layout:
    """Return the layout of the config's model over `gpus` GPUs, or devices of another type. Raises `UserError` where it
    does not divide."""
    if gpus > gpus_per_node and gpus % gpus_per_node:
        raise UserError(
            f"--gpus {gpus}: does not fill nodes of {gpus_per_node} GPUs; choose a multiple of {gpus_per_node}, or set "
            "--gpus-per-node"
        )
    replicate, shard, sequence, tensor = resolve_degrees(config.parallel, gpus)
    node = min(gpus, gpus_per_node)
    if node % tensor:
        raise UserError(
            f"parallel.tensor = {tensor}: tensor peers must lie in one node, of {node} GPUs here; choose a divisor of "
            f"{node}"
        )
    mesh = Mesh(replicate, shard, sequence, tensor, 0, config.parallel, weights=None)  # of no process; for its checks
    mesh.check_model(kind := denoiser_class(config.model), kind.heads(config.model))
    check_bucket_sequence(config.parallel, sequence)
    compiled = config.compiles_on(device)
    check_float8(config.precision, tensor, eager=device == "cuda" and not compiled)
    level, recomputed = level_and_counts(config.model)
    check_level(level, compiled, sequence * tensor)
    ranks = replicate * shard
    return Layout(
        replicate=replicate,
        shard=shard,
        sequence=sequence,
        tensor=tensor,
        zero=config.parallel.zero,
        remat=recomputed,
        ema=config.ema_decay is not None,
        denoisers=1 if config.low_noise is None else 2,
        compute_bytes=NUMBER_BYTES[config.dtype],
        reduce_bytes=NUMBER_BYTES[config.parallel.reduce_dtype],
        prefetch=max(1, config.parallel.backward_prefetch),
        offload=config.parallel.cpu_offload,
        level=level,
        buffer_bytes=config.model.grad_ckpt_buffer_size,
        compiled=compiled,
        float8=config.precision == "fp8",
        bucket_sequence=config.parallel.bucket_sequence,
        sequence_attention=config.parallel.sequence_attention,
        upkeep=_read_upkeep(config),
        micro_batches=-(-config.slots_at(ranks) // ranks),
    )
