"""Putting a system together from its config: the one place where training and generation begin."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, nn

from longtake.contracts import Batch, Conditions, LatentShape
from longtake.data import EncoderFacts
from longtake.diffusion import RectifiedFlow
from longtake.encoders import Autoencoder
from longtake.models import FrozenLinear, LoraLinear, build_denoiser, choose_attention, token_grid, use_attention
from longtake.parallel import (
    BlockCompiler,
    InputStore,
    Mesh,
    TokenCut,
    VisitingWeights,
    World,
    check_budget,
    check_compiler,
    cut_model,
    initialise_sharded,
    offload_inputs,
    offloads,
    remat_blocks,
    shard_model,
    tune_host,
    use_compile_cache,
)
from longtake.system.config import SystemConfig
from longtake.system.encoders import CaptionEncoders, Encoders, build_encoders, device_dtype, find_encoders
from longtake.system.lora import choose_trained, start_adapters
from longtake.system.pretrained import kept_adapters, load_pretrained, open_pretrained
from longtake.weights import Adapters, MMDiTWeights


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
    objective: RectifiedFlow
    cut: TokenCut | None = None  # how the denoiser's tokens are cut; None without peers
    kernels: tuple[str, ...] = ()  # what attention runs on and what is compiled, one line each
    notes: tuple[str, ...] = ()  # what the user should know of the weights it starts from, one line each
    visits: VisitingWeights | None = None  # of the denoiser, where it is on the device only while it works

    def frozen(self) -> dict[str, Tensor]:
        """The denoiser's parameters that are not trained, by the names they have in a checkpoint."""
        return {f"model.{name}": p.data for name, p in self.denoiser.named_parameters() if not p.requires_grad}

    def adapter_scaling(self) -> dict[str, float]:
        """alpha / rank of every layer with an adapter, by its name."""
        layers = self.denoiser.named_modules()
        return {name: layer.scaling for name, layer in layers if isinstance(layer, LoraLinear)}

    def adapter_parameters(self) -> set[str]:
        """The names of the adapters' parameters."""
        kinds = ("lora_a", "lora_b", "magnitude")
        names = {f"{layer}.{kind}" for layer in self.adapter_scaling() for kind in kinds}
        return {name for name, _ in self.denoiser.named_parameters() if name in names}

    def num_parameters(self) -> tuple[int, int]:
        """Of the denoiser with its adapters, however their values are kept: all, and those that train."""
        count = trained = 0
        for layer in self.denoiser.modules():
            coded = isinstance(layer, FrozenLinear) and layer.kind is not None
            for name, p in layer.named_parameters(recurse=False):
                if coded and name in ("weight", "weight_scale"):
                    count += layer.in_features * layer.out_features * (name == "weight")
                else:
                    count += p.numel()
                trained += p.numel() * p.requires_grad
        return count, trained

    def keep_compute_dtype(self) -> None:
        """From now on masters are kept in the compute dtype, as forwards see them: for sampling, in half the memory."""
        masters = {id(p) for p in self.denoiser.parameters() if p.requires_grad and p.dtype == torch.float32}
        if self.dtype != torch.float32:
            self.denoiser._apply(lambda tensor: tensor.to(self.dtype) if id(tensor) in masters else tensor)

    def offloaded(self) -> System:
        """The same system, whose denoiser goes to the host's memory now and is on the device inside `denoising` alone.

        Its weights must not change from here on. On a CPU nothing moves.
        """
        if self.device.type == "cpu" or self.visits is not None:
            return self
        return replace(self, visits=VisitingWeights(self.denoiser, self.device))

    @contextmanager
    def denoising(self) -> Iterator[None]:
        """Inside, the denoiser's weights are on the device; an inner one is the outer one's."""
        if self.visits is None or self.visits.is_here:
            yield
            return
        self.visits.come()
        try:
            yield
        finally:
            self.visits.leave()

    @property
    def autoencoder(self) -> Autoencoder:
        """The autoencoder, of a system that holds one."""
        assert self.encoders is not None, "this system was built for stored latents"
        return self.encoders.autoencoder

    @property
    def latent(self) -> LatentShape:
        """How pixels map to latents."""
        return self.facts.latent

    def embed(self, texts: list[str] | tuple[str, ...]) -> Conditions:
        """Captions -> text conditions on the device; `guidance` is filled where the model wants one."""
        assert self.encoders is not None, "this system was built for stored embeddings"
        return self._conditions(self.encoders.embed(texts))

    def embed_empty(self) -> Conditions:
        """The text conditions of the empty prompt, one row."""
        return self._conditions(self.facts.empty)

    def encode(self, batch: Batch) -> Tensor:
        """The latents of a batch: float32 `[B, C, F, h, w]` on the device, from its pixels or as it brings them.

        Where the autoencoder's posterior is random, the draw is the batch's own.
        """
        if batch.encoded:
            moments = {name: batch.encoded[name] for name in ("mean", "std") if name in batch.encoded}
        else:
            assert self.encoders is not None, "this system was built for stored latents"
            moments = self.encoders.moments(batch.video)
        return self.draw_latents(moments, batch.draws.get("posterior"))

    def draw_latents(self, moments: Mapping[str, Tensor], normal: Tensor | None) -> Tensor:
        """Latents from "mean" and, for a random posterior, "std": float32 on the device.

        normal: standard normal numbers of that shape; not needed without "std".
        """
        mean = moments["mean"].to(self.device, non_blocking=True).float()
        if "std" not in moments:
            return mean
        assert normal is not None, "a random posterior needs numbers to be drawn with"
        std = moments["std"].to(self.device, non_blocking=True).float()
        return mean + std * normal.to(self.device, non_blocking=True)

    def conditions(self, batch: Batch) -> Conditions:
        """The text conditions of a batch, from its captions or as it brings them."""
        return self._conditions(batch.encoded) if batch.encoded else self.embed(batch.text)

    def _conditions(self, embedded: Mapping[str, Tensor]) -> Conditions:
        text = embedded["text"].to(self.device, non_blocking=True).float()
        vector = embedded["vector"].to(self.device, non_blocking=True).float()
        guidance = None
        if self.config.model.guidance_embed:
            guidance = torch.full((len(text),), self.config.guidance, device=self.device)
        return Conditions(text=text, vector=vector, guidance=guidance)

    def blank_visual(self, conditions: Conditions, latents: Tensor) -> Conditions:
        """Adds the all-zero visual condition (nothing is known) where the model wants one."""
        if not self.config.model.cond_embed:
            return conditions
        b, c, f, h, w = latents.shape
        visual = torch.zeros(b, c + 1, f, h, w, device=latents.device)
        return replace(conditions, visual=visual)

    def flops(self, pixels: tuple[int, int, int]) -> int:
        """Forward FLOPs of the denoiser for one sample of `(T, H, W)` pixels (its documented formula)."""
        shape = self.latent(*pixels)
        return type(self.denoiser).forward_flops(self.config.model, shape, self.facts.text_length)

    def tokens(self, pixels: tuple[int, int, int]) -> int:
        """Video tokens of one sample of `(T, H, W)` pixels."""
        return prod(token_grid(self.latent(*pixels)[1:], self.config.model.patch_size))


def compute_dtype(config: SystemConfig, device: torch.device) -> torch.dtype:
    """The dtype in which the denoiser computes."""
    return device_dtype(config.dtype, device)


def build_system(
    config: SystemConfig,
    mesh: Mesh,
    world: World,
    stored: EncoderFacts | None = None,
    restored: bool = False,
    kept: CaptionEncoders | None = None,
) -> System:
    """Builds the model on the meta device, cuts it over the mesh, fills it (from `model.from_pretrained`, else with
    initial values).

    `stored`: what a latent store says of the encoders that made it; none are built then. `restored`: the caller fills
    what trains from a checkpoint, so it is left as it is. `kept`: text encoders of an earlier system, for
    `build_encoders`. Files are looked for, and weights compared with the model by their names and sizes, before
    anything that takes minutes.
    """
    if world.device.type == "cpu":
        tune_host(config.cpu_threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with fixed workspaces
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    dtype = compute_dtype(config, world.device)
    if stored is None:
        world.on_all(lambda: find_encoders(config))
    with ExitStack() as stack:
        weights = None
        if config.model.from_pretrained:
            weights = world.on_all(lambda: stack.enter_context(open_pretrained(config.model, config.lora)))
        denoiser, adapters, cut, kernels = _cut_denoiser(config, mesh, world, dtype)
        device = torch.device("cpu") if offloads(mesh) else world.device
        notes = _fill_denoiser(denoiser, device, config.seed, weights, restored)
    start_adapters(denoiser, adapters)
    encoders = build_encoders(config, world.device, world, kept=kept) if stored is None else None
    if encoders is not None and cut is not None:
        encoders.share(lambda: cut.peers.everyone)
    return System(
        config=config,
        mesh=mesh,
        device=world.device,
        dtype=dtype,
        denoiser=denoiser,
        encoders=encoders,
        facts=stored if encoders is None else encoders.facts,
        objective=RectifiedFlow(config.objective, config.model.patch_size, config.compat),
        cut=cut,
        notes=notes,
        kernels=kernels,
    )


def _cut_denoiser(
    config: SystemConfig, mesh: Mesh, world: World, dtype: torch.dtype
) -> tuple[nn.Module, Adapters, TokenCut | None, tuple[str, ...]]:
    """The denoiser on the meta device, cut over the mesh; its adapters' first values; how tokens are cut; kernels."""
    with torch.device("meta"):
        denoiser = build_denoiser(config.model)
    adapters = choose_trained(denoiser, config, dtype, kept_adapters(config.model, config.lora))
    cut = cut_model(denoiser, mesh)
    again, budget = config.model.grad_ckpt_settings or (0, 0), config.model.grad_ckpt_budget
    check_budget(budget, config.compile, mesh.num_peers)
    attention = choose_attention(config.model.attention, world.device, dtype, config.model.head_dim)
    use_attention(denoiser, attention)
    if budget:  # the compiler is to see what is kept
        remat_blocks(denoiser, again, cut, budget)
    kernels = f"attention: {attention.name}", *compile_blocks(denoiser, config, world)
    if not budget:
        remat_blocks(denoiser, again, cut)
    if config.model.grad_ckpt_buffer_size:
        offload_inputs(denoiser, again, InputStore(config.model.grad_ckpt_buffer_size))
    if config.master_dtype == "bf16":
        for parameter in denoiser.parameters():
            if parameter.requires_grad:  # a frozen one has the dtype it was given
                parameter.data = parameter.data.to(torch.bfloat16)
    shard_model(denoiser, mesh, dtype)
    return denoiser, adapters, cut, kernels


def _fill_denoiser(
    denoiser: nn.Module, device: torch.device, seed: int, weights: tuple[MMDiTWeights, str] | None, restored: bool
) -> tuple[str, ...]:
    """Gives every parameter memory on `device` and its value, but for those that a checkpoint will fill; returns notes.

    What the weights hold is not drawn first.
    """
    later = {name for name, p in denoiser.named_parameters() if p.requires_grad} if restored else set()
    if weights is None:
        initialise_sharded(denoiser, device, seed, later)
        return ()
    state, said = weights
    initialise_sharded(denoiser, device, seed, later | set(state))
    load_pretrained(denoiser, state, later)
    return said, *state.notes


def compile_blocks(denoiser: nn.Module, config: SystemConfig, world: World) -> tuple[str, ...]:
    """Compiles the denoiser's blocks where the config says so, and says it in a line.

    Raises `UserError` for a compiler or its cache that is not there.
    """
    if not config.compile:
        return ()
    check_compiler(world.device)
    cache = use_compile_cache(config.compile_cache) if config.compile_cache else None
    compiler = BlockCompiler(config.compile_dynamic, config.compile_limit)
    if not world.is_main:
        compiler.tell = lambda sentence: None
    compiler.compile(denoiser)
    shapes = "one graph for all shapes" if config.compile_dynamic else "a graph for each shape"
    return (f"compiled: blocks, {shapes}" + (f", kept in {cache}" if cache else ""),)
