"""One rank's step as `step.py` measures it, put together as a run would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from step_limits import emulate_peers, pack_samples
from step_models import LATENT, draws_of, objective_of
from torch import Tensor, nn

from longtake.contracts import Bucket, Conditions, Slot
from longtake.data.clips.transforms import to_unit
from longtake.data.loading.draws import draw
from longtake.diffusion.dropout import drop_text
from longtake.diffusion.objective import micro_batch_loss
from longtake.encoders.autoencoder import Autoencoder, build_autoencoder
from longtake.encoders.autoencoder_config import HunyuanVAEConfig
from longtake.families.registry import family_of
from longtake.models.attention import check_attention
from longtake.models.build import build_denoiser
from longtake.models.config import LoraConfig, ModelSection
from longtake.models.lora import adapt
from longtake.parallel.compile import BlockCompiler, recompute_and_compile
from longtake.parallel.mesh import Mesh
from longtake.parallel.recomputation import CurrentLevel, Level
from longtake.parallel.shard import initialise_sharded, local_tensor, shard_model
from longtake.parallel.world import World
from longtake.plan.timing import clock
from longtake.system.lora import adapter_sizes
from longtake.train.config import RunConfig
from longtake.train.optimizer.ema import Ema
from longtake.train.optimizer.sharded import ShardedAdamW, clip_scale


class Sizes(Protocol):
    """What a step is made of."""

    model: ModelSection
    batch: int

    @property
    def bucket(self) -> Bucket: ...

    @property
    def latent_shape(self) -> tuple[int, int, int, int]: ...

    def conditions(self, **place: Any) -> Conditions: ...


@dataclass(frozen=True)
class How:
    """In which way the model computes."""

    remat: tuple[int, ...]  # blocks computed again, of each list
    compiled: bool
    static: bool  # a graph for each shape
    level: Level  # at which these are
    attention: str
    lora: int | None  # rank of adapters that train in place of the weights
    latents: str | None  # "online": pixels are encoded, by an autoencoder of random weights; "stored"
    sequence: int  # peers, of which this rank is one; the others are emulated
    backend: str  # of the compiler
    autotune_reductions: bool  # as the compiler does by itself: it times kernels that add in different orders

    def build(
        self, model: ModelSection, device: torch.device, dtype: torch.dtype
    ) -> tuple[nn.Module, BlockCompiler | None]:
        """The model on the meta device, and what compiles its blocks as they first run."""
        check_attention(self.attention, device, dtype, model.head_dim)
        with torch.device("meta"):
            found = build_denoiser(model.model_copy(update={"attention": self.attention}))
        if self.lora:
            sizes = adapter_sizes(family_of(model).weight_format, found, LoraConfig(rank=self.lora), {})
            adapt(found, sizes, "dense", dtype)
        emulate_peers(found, self.sequence)
        compiler = BlockCompiler(dynamic=not self.static, backend=self.backend) if self.compiled else None
        recompute_and_compile(found, self.remat, CurrentLevel(self.level), compiler=compiler)
        if self.autotune_reductions:
            autotune_reductions()
        return found, compiler


def autotune_reductions() -> None:
    """Takes back what `parallel.prepare_compiler` says of kernels that add and of padding."""
    from torch._inductor import config

    config.test_configs.force_filter_reduction_configs = False
    config.dynamic_scale_rblock = config.shape_padding = True


class OurStep:
    """One rank's step: the trainer's own parts, on made-up latents and embeddings."""

    def __init__(
        self, case: Sizes, mesh: Mesh, world: World, dtype: torch.dtype, how: How, defaults: RunConfig
    ) -> None:
        self.case, self.mesh, self.world, self.count = case, mesh, world, 0
        self.model, self.compiler = how.build(case.model, world.device, dtype)
        shard_model(self.model, mesh, dtype)
        matrices = {name for name, parameter in self.model.named_parameters() if parameter.dim() > 1}
        initialise_sharded(self.model, world.device, seed=1, given=matrices)
        for name, parameter in self.model.named_parameters():
            if name in matrices:  # drawn where they are: a run's own values would take a CPU a minute
                local_tensor(parameter.data).normal_(0, 0.02)
        self.optimizer = ShardedAdamW(self.model, defaults)
        self.ema = Ema(self.model, 0.99)
        self.objective, self.draws = objective_of(case.model), draws_of(case.model)
        self.latents = self._pinned(torch.randn(case.batch, *case.latent_shape))
        self.autoencoder = None
        if how.latents == "online":
            small = {"block_out_channels": (32,) * 4, "layers_per_block": 1} if min(case.bucket.shape[1:]) < 128 else {}
            self.autoencoder = random_autoencoder(HunyuanVAEConfig(**small), world.device, dtype)
            self.pixels = self._pinned(torch.randint(256, (case.batch, 3, *case.bucket.shape), dtype=torch.uint8))
        self.conditions = case.conditions().map(self._pinned)
        self.empty = self.conditions.map(lambda tensor: tensor[:1].to(world.device))
        self.draws_ahead = {name: self._pinned(numbers) for name, numbers in self._draw().items()}

    @property
    def graphs(self) -> int:
        """Shapes for which blocks have been compiled, over all kinds of block."""
        return 0 if self.compiler is None else sum(self.compiler.variants.values())

    def run(self) -> None:
        """A whole step, whose numbers are drawn already: a run draws them beside the steps before."""
        for _ in self._steps():
            pass

    def phases(self) -> dict[str, float]:
        """Seconds of each phase of a step, the device waited for after each; first of drawing numbers on the host."""
        start = clock(self.world.device)
        drawn = self._draw()
        seconds = {"data": clock(self.world.device) - start}
        self.draws_ahead = {name: self._pinned(numbers) for name, numbers in drawn.items()}
        start = clock(self.world.device)
        for phase in self._steps():
            end = clock(self.world.device)
            seconds[phase], start = end - start, end
        return seconds

    def _pinned(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory() if self.world.device.type == "cuda" else tensor

    def _draw(self) -> dict[str, Tensor]:
        return draw(_slot(self.case, self.count), 1, 0, LATENT, self.draws)

    def _steps(self) -> Iterator[str]:
        """The phases on the device one after the other: yields the name of each when it is done."""
        case, device = self.case, self.world.device
        with torch.no_grad():
            draws = {name: numbers.to(device, non_blocking=True) for name, numbers in self.draws_ahead.items()}
            weights = torch.ones(case.batch, device=device)
            given = self.conditions.map(lambda tensor: tensor.to(device, non_blocking=True))
            uniforms = dict(zip(given, draws["dropout"].unbind(1), strict=True))
            conditions = drop_text(given, self.empty, uniforms, dict.fromkeys(given, 0.1))
            latents = self.latents.to(device, non_blocking=True)
            if self.autoencoder is not None:
                pixels = self.pixels.to(device, non_blocking=True)
                latents = self.autoencoder.posterior(to_unit(pixels))["mean"].float()
            noised = self.objective.noise(latents, draws, weights)
        yield "encode"
        prediction = self.model(noised.x, noised.t, conditions)
        loss = micro_batch_loss(self.objective.loss, prediction, noised, weights, case.batch)
        yield "forward"
        loss.backward()
        yield "backward"
        norm = self.optimizer.grad_square_sum().sqrt()
        self.optimizer.step(1e-5, clip_scale(norm, 1.0))
        self.count += 1
        self.ema.update(self.count)
        yield "optimizer"


def random_autoencoder(section: HunyuanVAEConfig, device: torch.device, dtype: torch.dtype) -> Autoencoder:
    """An encoder with random weights."""
    found = build_autoencoder(section, dtype)
    for module in found.encoding.values():
        module.to_empty(device=device)
        for tensor in module.state_dict().values():
            tensor.normal_(0, 0.02)
    return found


def our_blocks(
    case: Sizes,
    device: torch.device,
    dtype: torch.dtype,
    remat: tuple[int, ...],
    compiled: bool,
    lengths: Sequence[int] | None = None,
) -> Callable[[], None]:
    """A call that runs forward and backward of our model once, without a trainer around it, and frees the gradients.
    lengths: of the samples that are packed into the one of `case`."""
    with torch.device(device):
        model = build_denoiser(case.model).to(dtype)
    if lengths is not None:
        pack_samples(model, lengths, device)
    compiler = BlockCompiler(dynamic=False) if compiled else None
    recompute_and_compile(model, remat, CurrentLevel("full"), compiler=compiler)
    x = torch.randn(case.batch, *case.latent_shape, device=device, dtype=dtype)
    conditions = case.conditions(device=device, dtype=dtype)
    t = torch.rand(case.batch, device=device) * objective_of(case.model).noise_time
    target = torch.randn_like(x, dtype=torch.float32)

    def run() -> None:
        (model(x, t, conditions).float() - target).square().mean().backward()
        model.zero_grad(set_to_none=True)

    return run


def _slot(case: Sizes, number: int) -> Slot:
    samples = np.arange(case.batch, dtype=np.uint64) + np.uint64(number * case.batch)
    rows = np.zeros(case.batch, np.int64)
    return Slot(case.bucket, 0, rows, samples, samples, np.ones(case.batch, np.float32))
