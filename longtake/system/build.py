"""Putting a system together from its config: the one place where training and generation begin."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longtake.checkpoint.folder import LOW_NOISE
from longtake.contracts import Batch, Bucket, Caption, Conditions, Known, LatentShape
from longtake.data.latents.source import EncoderFacts
from longtake.data.rules import MASK
from longtake.diffusion.known import KnownLaw
from longtake.diffusion.objective import Objective, build_objective
from longtake.encoders.autoencoder import Autoencoder
from longtake.models.attention import check_attention
from longtake.models.build import build_denoiser
from longtake.models.build import example_conditions as model_conditions
from longtake.models.config import LOW_NOISE_KEY
from longtake.models.initial import held_as
from longtake.models.lora import FrozenLinear, LoraLinear
from longtake.parallel.compile import BlockCompiler, missing_compiler, recompute_and_compile, use_compile_cache
from longtake.parallel.degrees import EntryKey
from longtake.parallel.host import tune_host
from longtake.parallel.mesh import Mesh
from longtake.parallel.offload import BlockStore
from longtake.parallel.offloaded_weights import OffloadedWeights
from longtake.parallel.recomputation import CurrentLevel, Level, check_level, level_and_counts
from longtake.parallel.shard import cut_model, initialise_sharded, offloads, shard_model
from longtake.parallel.tokens import TokenCut
from longtake.parallel.world import World
from longtake.system.config import SystemConfig
from longtake.system.encoders import CaptionEncoders, Encoders, build_encoders, device_dtype, find_encoders, set_tf32
from longtake.system.float8 import check_float8, use_float8
from longtake.system.lora import choose_trained, fill, lora_notes, start_adapters
from longtake.system.pretrained import kept_adapters, open_pretrained
from longtake.transfer import to_device
from longtake.weights.adapters import Adapters
from longtake.weights.model import ModelWeights


@dataclass(frozen=True)
class System:
    """The parts of one model, placed on this rank's device."""

    config: SystemConfig
    mesh: Mesh
    device: torch.device
    dtype: torch.dtype  # of the denoiser's compute
    denoiser: nn.Module  # sharded over the mesh, float32 masters
    encoders: Encoders | None  # None: training reads latents and embeddings from a store
    facts: EncoderFacts  # of the encoders, whether they are here or not
    objective: Objective
    law: KnownLaw | None  # of what may be known of samples; None where the model takes nothing of the kind
    cut: TokenCut | None = None  # how the denoiser's tokens are cut; None without peers
    kernels: tuple[str, ...] = ()  # what attention runs on and what is compiled, one line each
    notes: tuple[str, ...] = ()  # what the user should know of the weights it starts from, one line each
    frozen_source: str | None = None  # the file that all parameters that are not trained are from; None: there is none
    offloaded_weights: OffloadedWeights | None = None  # the denoiser's, where they are offloaded between uses
    level: CurrentLevel = field(default_factory=CurrentLevel)  # of the denoiser's blocks
    store: BlockStore | None = None  # of what its blocks save in host memory
    low_noise: System | None = None  # the same with the second denoiser, for times below the boundary
    prefix: str = ""  # before the names of its denoiser's tensors in a checkpoint

    @property
    def experts(self) -> tuple[System, ...]:
        """The system of each denoiser: this one, and that of the second where there is one."""
        return (self,) if self.low_noise is None else (self, self.low_noise)

    @property
    def whole_objective(self) -> Objective:
        """The objective with the times of all denoisers."""
        return build_objective(self.config.objective, self.config.model.patch[1], self.config.quirks)

    @property
    def boundary_time(self) -> float:
        """The time from which on, upwards, the first of two denoisers works."""
        assert self.config.low_noise is not None, "there is no second denoiser"
        return self.config.low_noise.boundary * self.objective.noise_time

    def is_high(self, time: float) -> bool:
        """Return whether the first denoiser, or the only one, is in use at a time."""
        return self.low_noise is None or time >= self.boundary_time

    def at(self, t: Tensor) -> System:
        """Return the system whose denoiser works at the time `t` [B], alike in a batch. Where weights are offloaded
        between uses, its own are on the device from then on, and the other's are not."""
        if self.low_noise is None:
            return self
        one, other = (self, self.low_noise) if self.is_high(t[0].item()) else (self.low_noise, self)
        if other.offloaded_weights is not None:
            other.offloaded_weights.offload()
        if one.offloaded_weights is not None:
            one.offloaded_weights.load()
        return one

    def frozen(self) -> dict[str, Tensor]:
        """Return the denoiser's parameters that are not trained, by the names they have in a checkpoint."""
        return {f"model.{name}": p.data for name, p in self.denoiser.named_parameters() if not p.requires_grad}

    def adapter_scaling(self) -> dict[str, float]:
        """Return alpha / rank of every layer with an adapter, by its name."""
        return {name: at.scaling for name, at in self.denoiser.named_modules() if isinstance(at, LoraLinear)}

    def adapter_parameters(self) -> set[str]:
        """Return the names of the adapters' parameters."""
        names = {f"{layer}.{kind}" for layer in self.adapter_scaling() for kind in LoraLinear.PARAMETERS}
        return {name for name, _ in self.denoiser.named_parameters() if name in names}

    def num_parameters(self) -> tuple[int, int]:
        """Of the denoisers with their adapters, however their values are kept: all, and those that train."""
        count = trained = 0
        for layer in (layer for one in self.experts for layer in one.denoiser.modules()):
            quantized = isinstance(layer, FrozenLinear) and layer.kind is not None
            for name, p in layer.named_parameters(recurse=False):
                if quantized and name in ("weight", "weight_scale"):
                    count += layer.in_features * layer.out_features * (name == "weight")
                else:
                    count += p.numel()
                trained += p.numel() * p.requires_grad
        return count, trained

    def keep_compute_dtype(self) -> None:
        """From now on the denoiser's masters are kept in the compute dtype, as forwards see them: for sampling, in half
        the memory."""
        masters = {id(p) for p in self.denoiser.parameters() if p.requires_grad and p.dtype == torch.float32}
        if self.dtype != torch.float32:
            self.denoiser._apply(lambda tensor: tensor.to(self.dtype) if id(tensor) in masters else tensor)

    def offloaded(self) -> System:
        """Return the same system with its denoiser in host memory outside of `denoising`, and so that of a second
        one; their weights must not change any more. On a CPU nothing moves."""
        second = None if self.low_noise is None else self.low_noise.offloaded()
        if self.device.type == "cpu" or self.offloaded_weights is not None:
            return replace(self, low_noise=second)
        return replace(self, offloaded_weights=OffloadedWeights(self.denoiser, self.device), low_noise=second)

    @contextmanager
    def denoising(self) -> Iterator[None]:
        """Hold the denoiser's weights on the device inside the context, or those of the second where it is in use
        (`at`); a nested context is the outer one."""
        offloaded = [one.offloaded_weights for one in self.experts if one.offloaded_weights is not None]
        if not offloaded or any(weights.on_device for weights in offloaded):
            yield
            return
        offloaded[0].load()
        try:
            yield
        finally:
            for weights in offloaded:
                weights.offload()

    @property
    def own_encoders(self) -> Encoders:
        """The encoders, of a system that holds them."""
        assert self.encoders is not None, "this system was built for stored latents and embeddings"
        return self.encoders

    @property
    def autoencoder(self) -> Autoencoder:
        """The autoencoder, of a system that holds one."""
        return self.own_encoders.autoencoder

    @property
    def latent(self) -> LatentShape:
        """Mapping of pixels to latents."""
        return self.facts.latent

    def known_conditions(self, known: Known) -> Mapping[str, Tensor]:
        """Return the denoiser's conditions from known values; only for a model with a conditioning rule."""
        assert self.law is not None, "this model is given nothing that is known"
        return self.law.conditions(known)

    def embed(self, texts: Sequence[Caption]) -> Conditions:
        """Captions -> text conditions on the device, float32; `guidance` is filled where the model wants one."""
        return self._conditions(self.own_encoders.embed(texts))

    def embed_nothing(self) -> Conditions:
        """Return the conditions that stand for no text, one row."""
        found = dict(self.facts.empty)
        for text in self.config.family.texts:
            if text.empty not in ("prompt", "zeros"):
                with self.denoising():
                    found[text.condition] = whole_tensor(self.denoiser, text.empty)[None].clone()
        return self._conditions(found)

    def encode(self, batch: Batch) -> Tensor:
        """Return the latents of a batch: float32 `[B, C, F, h, w]` on the device, from its pixels or as it brings
        them, drawn with its own numbers where the posterior is random."""
        if batch.encoded:
            posterior = {name: batch.encoded[name] for name in ("mean", "std") if name in batch.encoded}
        else:
            posterior = self.own_encoders.posterior(batch.video)
        return self.draw_latents(posterior, batch.draws.get("posterior"))

    def draw_latents(self, posterior: Mapping[str, Tensor], normal: Tensor | None) -> Tensor:
        """Latents from "mean" and, of a random posterior, "std" with standard normal numbers of that shape: float32 on
        the device."""
        mean = posterior["mean"].to(self.device, non_blocking=True).float()
        if "std" not in posterior:
            return mean
        assert normal is not None, "a random posterior needs numbers to be drawn with"
        std = posterior["std"].to(self.device, non_blocking=True).float()
        return mean + std * normal.to(self.device, non_blocking=True)

    def conditions(self, batch: Batch) -> Conditions:
        """Return the text conditions of a batch, from its captions or as it brings them."""
        return self._conditions(batch.encoded) if batch.encoded else self.embed(batch.text)

    def _conditions(self, embedded: Mapping[str, Tensor]) -> Conditions:
        tensors, masks = {}, {}
        for text in self.config.family.texts:
            name = text.condition
            tensors[name] = embedded[name].to(self.device, non_blocking=True).float()
            if name + MASK in embedded:
                masks[name] = embedded[name + MASK].to(self.device, non_blocking=True)
        if "guidance" in self.config.model.conditions:
            count = len(next(iter(tensors.values())))
            tensors["guidance"] = torch.full((count,), self.config.guidance, device=self.device)
        return Conditions(tensors, masks)

    def facts_of(self, shape: tuple[int, int, int], fps: Tensor, source: Tensor | None = None) -> Conditions:
        """Return the model's conditions that are facts of samples of (T, H, W) pixels, [B] or [B, 2], float32 on the
        device. fps: [B]; source: height and width [B, 2] of the source, by default the bucket's."""

        def equal(number: int) -> Tensor:  # made on the device: a copy from the host would wait for it
            return torch.full((len(fps),), float(number), device=self.device)

        def size() -> Tensor:
            return torch.stack([equal(side) for side in shape[1:]], dim=1)

        facts: Mapping[str, Callable[[], Tensor]] = {
            "fps": lambda: to_device(fps, self.device),
            "num_frames": lambda: equal(shape[0]),
            "size": size,
            "source_size": lambda: size() if source is None else to_device(source, self.device),
        }
        return Conditions({name: facts[name]().float() for name in facts if name in self.config.model.conditions})

    def example_conditions(self, pixels: tuple[int, int, int], batch: int) -> Conditions:
        """Conditions of the shapes that the denoiser needs for `(T, H, W)` pixels: those that stand for no text,
        and zeros; for measuring."""
        sizes = self.latent(*pixels), self.facts.text_length, batch
        return model_conditions(self.config.model, *sizes, self.device, given=self.embed_nothing())

    def use(self, bucket: Bucket) -> None:
        """Prepare the denoiser's blocks for training on a micro-batch of `bucket`."""
        self.level.use(bucket)

    def flops(self, pixels: tuple[int, int, int]) -> int:
        """Forward FLOPs of the denoiser for one sample of `(T, H, W)` pixels (its documented formula)."""
        shape = self.latent(*pixels)
        return type(self.denoiser).forward_flops(self.config.model, shape, self.facts.text_length)

    def tokens(self, pixels: tuple[int, int, int]) -> int:
        """Video tokens of one sample of `(T, H, W)` pixels."""
        return type(self.denoiser).tokens(self.config.model, self.latent(*pixels))


def whole_tensor(model: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer of a model by its name, whole and without gradient. Collective where it is
    sharded."""
    tensor = {**dict(model.named_parameters()), **dict(model.named_buffers())}[name].detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def build_system(
    config: SystemConfig,
    mesh: Mesh,
    world: World,
    stored: EncoderFacts | None = None,
    restored: bool = False,
    kept: CaptionEncoders | None = None,
    levels: Mapping[EntryKey, Level] | None = None,
    sharded: bool = True,
) -> System:
    """Build the model on the meta device, cut it over the mesh, fill it (from `model.from_pretrained`, else with
    initial values).

    `stored`: the encoder facts of a latent store; no encoders are built then. `restored`: a checkpoint will fill what
    trains. `kept`: text encoders of an earlier system. `levels`: of recomputation, by entry, where the model's is
    "auto"; without them it is "full". `sharded` False: the denoiser is a plain module of one process, which needs no
    process group once it is built. Files are looked for, and weights compared with the model by names and sizes,
    before anything that takes minutes.
    """
    if world.device.type == "cpu":
        tune_host(config.cpu_threads)
    if config.deterministic:
        _be_deterministic()
    set_tf32(config)
    dtype = device_dtype(config.dtype, world.device)
    if stored is None:
        world.on_all(lambda: find_encoders(config))
    with ExitStack() as stack:
        weights = None
        if config.model.from_pretrained:
            weights = world.on_all(lambda: stack.enter_context(open_pretrained(config.model, config.lora)))
        level, counts = level_and_counts(config.model)
        level = CurrentLevel("full" if level == "auto" else level, levels or {})
        store = BlockStore(room) if (room := config.model.grad_ckpt_buffer_size) else None
        denoiser, adapters, cut, kernels = _cut_denoiser(
            config, mesh, world, dtype, level, counts, store, None, sharded
        )
        device = torch.device("cpu") if offloads(mesh) else world.device
        notes, drawn = _fill_denoiser(denoiser, device, config.seed, weights, restored)
    start_adapters(denoiser, adapters)
    notes += lora_notes(config.lora, adapters)
    encoders = build_encoders(config, world.device, world, kept=kept) if stored is None else None
    if encoders is not None and (cut is not None or kept):  # what is kept may be shared with an earlier model's peers
        encoders.share(lambda: None if cut is None else cut.peers.everyone)
    return System(
        config=config,
        mesh=mesh,
        device=world.device,
        dtype=dtype,
        denoiser=denoiser,
        encoders=encoders,
        facts=stored if encoders is None else encoders.facts,
        objective=build_objective(config.objective, config.model.patch[1], config.quirks),
        law=config.known_law,
        cut=cut,
        notes=notes,
        frozen_source=None if drawn else config.model.from_pretrained,
        kernels=kernels,
        level=level,
        store=store,
    )


def with_low_noise(system: System, world: World, restored: bool = False, trained: bool = False) -> System:
    """Return a system with its second denoiser (`low_noise`), built as the first was; all else is shared. Each has the
    objective with its own part of the times, where that can be cut. `trained`: a run trains it, `restored` as for
    `build_system`. Collective. Raises `UserError` as `build_system`; faults name the weights."""
    config = system.config.of_low_noise(trained)
    with ExitStack() as stack:
        weights = None
        if config.model.from_pretrained:
            opened = partial(open_pretrained, config.model, config.lora, LOW_NOISE_KEY)
            weights = world.on_all(lambda: stack.enter_context(opened()))
        counts = level_and_counts(config.model)[1]
        shared = system.mesh, world, system.dtype, system.level
        denoiser, adapters, cut, _ = _cut_denoiser(config, *shared, counts, system.store, system)
        device = torch.device("cpu") if offloads(system.mesh) else world.device
        notes, drawn = _fill_denoiser(denoiser, device, config.seed, weights, restored)
    start_adapters(denoiser, adapters)
    notes += lora_notes(config.lora, adapters)
    boundary = system.config.low_noise.boundary
    high, low = (_objective_within(system, *ends) for ends in ((boundary, 1.0), (0.0, boundary)))
    second = replace(
        system,
        config=config,
        denoiser=denoiser,
        objective=low,
        cut=cut,
        notes=tuple(f"below {boundary:g} of the way to noise: {line}" for line in notes),
        frozen_source=None if drawn else config.model.from_pretrained,
        offloaded_weights=None,
        prefix=LOW_NOISE,
    )
    return replace(system, objective=high, low_noise=second)


def _objective_within(system: System, low: float, high: float) -> Objective:
    """Return a system's objective with its times between two shares of the way to noise, or as it is where it has no
    part."""
    section = system.config.objective.within(low, high)
    if section is None:
        return system.objective
    return build_objective(section, system.config.model.patch[1], system.config.quirks)


def _be_deterministic() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with fixed workspaces
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward has no deterministic form
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"  # compiled code is not tuned by time
    if (inductor := sys.modules.get("torch._inductor.config")) is not None:
        inductor.deterministic = True


def _cut_denoiser(
    config: SystemConfig,
    mesh: Mesh,
    world: World,
    dtype: torch.dtype,
    level: CurrentLevel,
    recomputed: Sequence[int],
    store: BlockStore | None,
    first: System | None = None,
    sharded: bool = True,
) -> tuple[nn.Module, Adapters, TokenCut | None, tuple[str, ...]]:
    """Return the denoiser on the meta device, cut over the mesh; its adapters' first values; how tokens are cut;
    kernels. `first`: the system of the first of two, whose cut it shares."""
    with torch.device("meta"):
        denoiser = build_denoiser(config.model)
    key = "model.from_pretrained" if first is None else LOW_NOISE_KEY
    adapters = choose_trained(denoiser, config, dtype, kept_adapters(config.model, config.lora, key))
    compiled, why = compiles(config, world)
    check_float8(config.precision, mesh.tensor, eager=world.device.type == "cuda" and not compiled)
    float8 = () if config.precision is None else (use_float8(denoiser, world.device),)
    cut = cut_model(denoiser, mesh, None if first is None else first.cut)
    check_level(level.level, compiled, mesh.sequence * mesh.tensor)
    attention = check_attention(config.model.attention, world.device, dtype, config.model.head_dim)
    compiler, said = block_compiler(config, world) if compiled else (None, why)
    kernels = *attention, *float8, *((said,) if said else ())
    recompute_and_compile(denoiser, recomputed, level, cut, compiler, store)
    if config.master_dtype == "bf16":
        for parameter in denoiser.parameters():
            if parameter.requires_grad:  # a frozen one has the dtype it was given
                parameter.data = parameter.data.to(torch.bfloat16)
    if sharded:
        shard_model(denoiser, mesh, dtype)
    return denoiser, adapters, cut, kernels


def _fill_denoiser(
    denoiser: nn.Module, device: torch.device, seed: int, weights: tuple[ModelWeights, str] | None, restored: bool
) -> tuple[tuple[str, ...], bool]:
    """Give every parameter memory on `device`, and its value where no checkpoint will fill it; return notes, and
    whether one that does not train was drawn."""
    later = {name for name, p in denoiser.named_parameters() if p.requires_grad} if restored else set()
    if weights is None:
        initialise_sharded(denoiser, device, seed, later)
        said = f"weights: none given, the model starts from scratch by seed {seed}; model.from_pretrained takes some"
        return () if restored else (said,), True
    state, said = weights
    initialise_sharded(denoiser, device, seed, later | set(state))
    for name in state:  # one tensor at a time is in memory
        if name not in later:
            fill(denoiser, held_as(denoiser, name, state[name]))
    frozen = {name.removesuffix("_scale") for name, p in denoiser.named_parameters() if not p.requires_grad}
    return (said, *state.notes), not frozen <= set(state)


def compiles(config: SystemConfig, world: World) -> tuple[bool, str | None]:
    """Return whether blocks are compiled, and a line where they are not because no compiler is installed. Collective.
    Raises `UserError` where a GPU needs the compiler."""
    if not config.compiles_on(world.device.type):
        return False, None
    missing = next(filter(None, world.gather(missing_compiler(world.device))), None)
    check_float8(config.precision, 1, world.device.type == "cuda" and missing is not None, missing)
    return missing is None, missing and f"not compiled: {missing}"


def block_compiler(config: SystemConfig, world: World) -> tuple[BlockCompiler, str]:
    """Return the compiler of the denoiser's blocks, and a line on it. Raises `UserError` for a cache that cannot be
    used."""
    cache = use_compile_cache(config.compile_cache) if config.compile_cache else None
    is_dynamic = config.compile_dynamic is not False
    compiler = BlockCompiler(is_dynamic, config.compile_limit)
    if not world.is_main:
        compiler.warn = lambda sentence: None
    shapes = "one graph for all shapes" if is_dynamic else "a graph for each shape"
    return compiler, f"compiled: blocks, {shapes}" + (f", kept in {cache}" if cache else "")
