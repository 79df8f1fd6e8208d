"""What a training step holds on one GPU, in bytes, part by part: a formula, checked against the real model in tests.

Of the weights (float32 masters), their gradients, AdamW's two moments and the average (all float32) a rank holds the
share that `parameters` counts. On top come, at the worst moment of the step: weights gathered in the compute dtype
and the buffers of their communication, and the activations. The moments are followed block by block, last to first,
as backward does: when block i runs backward, the activations of the blocks before it are still there, and of a
recomputed block only its input; gradients of the blocks behind it exist already.

Shapes: B samples, M video tokens, L text tokens, S = M + L, D width, H width of the MLP's hidden layer, N heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Literal

from longtake.models import MMDiTConfig
from longtake.parallel import ulysses_degree
from longtake.plan.kept import kept_by_blocks
from longtake.plan.parameters import FP32, PLAIN, Unit, Upkeep, Weights, count_weights


@dataclass(frozen=True)
class Layout:
    """How a model is cut over GPUs and what each of them keeps."""

    replicate: int = 1
    shard: int = 1
    sequence: int = 1
    tensor: int = 1
    zero: int = 3  # 3 frees gathered weights after a block's forward, 2 keeps them for its backward
    remat: tuple[int, int] = (0, 0)  # first double and single blocks whose activations are computed again
    budget: float = 0.0  # share of their attention's and linear layers' outputs that these keep
    buffer_bytes: int = 0  # of the host's memory in which their inputs wait
    ema: bool = False
    compute_bytes: int = 2  # of one number in the compute dtype
    reduce_bytes: int = 4  # of one number of a gradient on its way between ranks
    prefetch: int = 1  # blocks gathered ahead in backward
    offload: bool = False  # masters, gradients, moments and average in the host's memory
    micro_batches: int = 1  # of one rank in one step
    upkeep: Upkeep = PLAIN
    bucket_sequence: Mapping[str, Mapping[int, int]] | Literal["auto"] | None = None  # as in `parallel`
    sequence_attention: Literal["auto", "ulysses", "ring"] = "auto"

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

    def at_degree(self, sequence: int) -> Layout:
        """The layout as a bucket sees it that runs at a smaller sequence degree: its neighbourhoods read different data
        while weights stay spread over as many ranks."""
        return replace(self, sequence=sequence, shard=self.shard * self.sequence // sequence)

    def ring(self, heads: int) -> int:
        """Groups of sequence peers that pass keys of so many attention heads around; 1: none do."""
        return self.sequence // ulysses_degree(self.sequence_attention, self.sequence, heads // self.tensor)


@dataclass(frozen=True)
class MicroBatch:
    """The sizes of one forward of one data rank that memory depends on."""

    batch: int  # B
    video_tokens: int  # M, of one sample
    text_tokens: int  # L
    latent_numbers: int  # of one sample's latents
    pixel_numbers: int  # of one sample's frames, 3 T H W
    autoencoder_bytes: int = 0  # that encoding all samples holds at once beside frames and latents
    text_bytes: int = 0  # that embedding this rank's captions holds at once


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest GPU at the worst moment of a step."""

    weights: int  # masters of those that train, and those that do not
    gradients: int
    optimizer: int  # both moments of AdamW
    ema: int
    encoders: int  # frozen autoencoder and text encoders
    gathered: int  # weights in the compute dtype, and buffers that gather them and reduce gradients
    activations: int  # saved for backward or computed again, working space of backward, and the batch itself

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    def parts(self) -> dict[str, int]:
        """The parts by name, in order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class BlockActivations:
    """Bytes of activations that one block accounts for."""

    saved: int  # kept from forward to backward, the block's input among them
    input: int  # its input alone: what is kept where the block is computed again
    kept: int  # what it keeps beside its input where it is computed again with a budget
    working: int  # needed at once in its backward beyond what it has saved


def block_activations(config: MMDiTConfig, kind: str, batch: MicroBatch, layout: Layout) -> BlockActivations:
    """Activations of a `double` or `single` block on one rank.

    Saved for each token, in numbers of the compute dtype:

    single: input of the norm D, normed D, way out D; modulated D; before their norms q and k 2D, v and MLP input D + H,
    rotated q and k 2D, attention D, input of the way out D + H.
    double, either stream: inputs of two norms 2D, normed 2D, outputs of attention and MLP 2D; modulated 2D; before
    their norms q and k 2D (with v 3D where one projection makes them), joined q, k, v 3D, attention D (and a copy D
    where B > 1), MLP before and after its GELU 2H.

    Tensor parallelism divides all but the modulated tokens, which are gathered for the projections. Sequence
    parallelism divides the tokens, and keeps attention's result once more, before its exchange. In float32 come the
    root of each norm and the log-sum of attention: 3N + 4 (single) or 3N + 8 (double) numbers a token;
    `attention = "math"` saves N S numbers a token more, and works on twice as many. Norms of q and k are taken to be
    fused, as on a GPU.
    """
    D, H, N = config.hidden_size, config.mlp_size, config.num_heads
    whole = batch.video_tokens + batch.text_tokens
    tokens = batch.batch * ceil(whole / layout.sequence)
    if kind == "single":
        modulated, split, norms = D, 10 * D + 2 * H, 4
    else:
        copied = batch.batch > 1 and config.attention != "math"
        modulated, split, norms = 2 * D, (12 + config.fused_qkv + copied) * D + 2 * H, 8
    if layout.sequence > 1:
        split += D
    working = (3 if kind == "single" else 1) * D + H
    if config.attention == "math":
        split += N * whole
        working += 2 * N * whole
    numbers = modulated + split // layout.tensor
    saved = tokens * (numbers * layout.compute_bytes + FP32 * (3 * N // layout.tensor + norms))
    working = working // layout.tensor + (2 * D if layout.tensor > 1 else 0)
    kept = kept_by_blocks(config, layout.budget, layout.tensor)[kind]
    beside = tokens * layout.compute_bytes * kept.products_width
    if kept.attention and layout.ring(N) == 1:
        beside += tokens * (D * layout.compute_bytes + FP32 * N) // layout.tensor
    return BlockActivations(
        saved=saved,
        input=tokens * D * layout.compute_bytes // layout.tensor,
        kept=beside,
        working=tokens * working * layout.compute_bytes,
    )


def forecast_memory(config: MMDiTConfig, batch: MicroBatch, layout: Layout, encoder_bytes: int = 0) -> Memory:
    """Bytes on the fullest GPU at the worst moment of a training step of micro-batches like `batch`."""
    upkeep = layout.upkeep
    weights = count_weights(config, layout.weight_shards, upkeep, layout.compute_bytes)
    owned = 0 if layout.offload else upkeep.master_bytes * weights.owned
    moments = [(0, 0, encoding_bytes(batch)), *_forward_and_backward(config, weights, batch, layout)]
    if layout.micro_batches > 1:  # from the second micro-batch on all gradients of the first are there
        moments = [(owned, gathered, activations) for _, gathered, activations in moments]
    gradients, gathered, activations = max([*moments, (owned, 0, 0)], key=sum)
    return Memory(
        weights=owned + (0 if layout.offload else weights.frozen),
        gradients=gradients,
        optimizer=0 if layout.offload or upkeep.moments_offloaded else int(upkeep.moments_bytes * weights.owned),
        ema=FP32 * weights.owned if layout.ema and not (layout.offload or upkeep.ema_offloaded) else 0,
        encoders=encoder_bytes,
        gathered=gathered,
        activations=activations,
    )


_Moment = tuple[int, int, int]  # bytes of gradients, of gathered weights and buffers, of activations


def encoding_bytes(batch: MicroBatch) -> int:
    """Bytes of activations while frames, then captions, are encoded: the frames as bytes and as float32 twice (before
    and after the autoencoder folds them), what the encoder at work holds, and the latents."""
    frames = 9 * batch.batch * batch.pixel_numbers + batch.autoencoder_bytes
    return max(frames, batch.text_bytes) + FP32 * batch.batch * batch.latent_numbers


def _forward_and_backward(
    config: MMDiTConfig, weights: Weights, batch: MicroBatch, layout: Layout
) -> Iterator[_Moment]:
    """The moments of one micro-batch that may be the worst: the end of forward, and three in each block's backward."""
    compute, alone = layout.compute_bytes, layout.weight_shards == 1
    gradient_bytes = 0 if layout.offload else layout.upkeep.master_bytes
    blocks = weights.blocks
    whole = [compute * block.gathered + block.codes for block in blocks]
    sizes = {kind: block_activations(config, kind, batch, layout) for kind in ("double", "single")}
    again = [i < layout.remat[0] for i in range(config.depth)]
    again += [i < layout.remat[1] for i in range(config.depth_single_blocks)]
    held = _held(blocks, again, sizes, layout.buffer_bytes)
    entry, final = _ends_activations(config, batch, layout)
    kept = sum(whole) if layout.zero == 2 else 0  # until their backward
    rest = compute * weights.rest.gathered + weights.rest.codes + compute * weights.widest_coded
    last = whole[-1] if blocks else 0
    yield 0, rest + (kept or last * (1 if alone else 2)), sum(held) + entry + final

    gradients, reducing, saved = 0, 0, sum(held) + entry
    for i in range(len(blocks) - 1, -1, -1):
        unit, size, gathered = blocks[i], sizes[blocks[i].kind], whole[i]
        before = 0 if alone or kept else sum(whole[max(0, i - layout.prefetch) : i])
        unsharded = kept or gathered
        made = compute * unit.trained  # gradients, whole
        away = held[i] < size.input and again[i]  # its input comes back, and that of the block before
        working = size.working + (size.saved - size.kept if again[i] else 0) + (2 * size.input if away else 0)
        # early: all that the block has saved is there, and the first third of its gradients
        yield gradients, rest + unsharded + before + reducing + made // 3, saved + working
        # late: the block is through, its gradients stand ready, its input's gradient goes on
        saved -= held[i]
        yield gradients, rest + unsharded + before + reducing + made, saved + 2 * size.input
        # reduce: gradients are copied into a buffer, which is added up over the shards
        kept -= gathered if kept else 0
        reducing = layout.reduce_bytes * unit.trained
        owned = gradient_bytes * unit.owned
        yield gradients + owned, rest + kept + before + reducing + made, saved + size.input
        gradients += owned
    gradients += gradient_bytes * weights.rest.owned
    yield gradients, rest + layout.reduce_bytes * weights.rest.trained + reducing, entry


def _held(
    blocks: Sequence[Unit], again: Sequence[bool], sizes: Mapping[str, BlockActivations], buffer_bytes: int
) -> list[int]:
    """What each block holds from forward to backward; inputs of recomputed ones wait elsewhere while there is room."""
    held, room = [], buffer_bytes
    for block, recomputed in zip(blocks, again, strict=True):
        size = sizes[block.kind]
        if not recomputed:
            held.append(size.saved)
        elif size.input <= room:
            room -= size.input
            held.append(size.kept)
        else:
            held.append(size.input + size.kept)
    return held


def _ends_activations(config: MMDiTConfig, batch: MicroBatch, layout: Layout) -> tuple[int, int]:
    """Bytes outside the blocks: at the entry (patches, text, positions), and at the end (last layer and loss).

    Those at the end are gone when the blocks' backward begins, all but the latents and their kind.
    """
    D, compute, share = config.hidden_size, layout.compute_bytes, layout.sequence
    video, text = batch.video_tokens, batch.text_tokens
    patches = video * config.in_channels + text * config.context_in_dim
    if config.cond_embed:
        patches += video * config.visual_channels
    positions = FP32 * (video + text) * config.head_dim
    latents = FP32 * batch.latent_numbers  # clean, noised, target
    final = ((video + text) * D + 2 * video * D) * compute // share + 4 * latents
    return batch.batch * (patches * compute // share + 3 * latents) + positions, batch.batch * final
