"""The parts of a model beside those of diffusers and transformers, in float32 and from the same files."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longtake.contracts import Conditions, UserError, in_one_line
from longtake.diffusion.objective import build_objective
from longtake.encoders.autoencoder import Autoencoder
from longtake.encoders.files import find_encoder
from longtake.encoders.references import autoencoder_reference, plain_section, text_reference
from longtake.encoders.text import LearnedTextEncoder
from longtake.system.config import SystemConfig
from longtake.system.encoders import encoder_sections, open_encoder
from longtake.system.lora import fill
from longtake.system.pretrained import open_pretrained
from longtake.verification.release import checksum, public_name
from longtake.verification.report import GRADIENT_LIMIT, OUTPUT_LIMIT, PartResult
from longtake.weights.conversion import ConvertedWeights
from longtake.weights.files import WeightFiles
from longtake.weights.model import ModelWeights
from longtake.weights.references import ReferenceDenoiser

CAPTIONS = ("a red circle moves right", "two people walk along a beach at sunset, seen from behind")
_FRAMES, _HEIGHT, _WIDTH = 9, 64, 96  # of the video that an autoencoder codes: 8k + 1, two chunks of CogVideoX's
_SMALLEST = 1e-3  # a gradient is compared by its own largest value, or by this share of the largest of all
Found = dict[str, Any]  # fields of a `PartResult`


@dataclass
class TensorComparison:
    """Tensors of ours beside a library's, by name."""

    limit: float
    values: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def add(self, name: str, ours: Tensor, theirs: Tensor) -> None:
        """Hold copies of both in host memory."""
        self.values[name] = ours.detach().float().cpu(), theirs.detach().float().cpu()

    @property
    def largest(self) -> float:
        return max(float(theirs.abs().max()) for _, theirs in self.values.values())

    def error(self, name: str) -> float:
        """Return the largest difference over the largest value."""
        ours, theirs = self.values[name]
        scale = max(float(theirs.abs().max()), _SMALLEST * self.largest, 1e-30)
        return float((ours - theirs).abs().max()) / scale

    def result(self) -> tuple[float, str | None]:
        """Return the largest error, and a sentence on what exceeds the limit."""
        errors = {name: self.error(name) for name in self.values}
        worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
        if errors[worst] <= self.limit:
            return errors[worst], None
        above = [name for name, error in errors.items() if not error <= self.limit]
        more = f" and {len(above) - 1} more" if len(above) > 1 else ""
        return errors[worst], f"{worst}{more}: differs by {errors[worst]:.1e} of the largest, limit {self.limit:g}"


def check_parts(config: SystemConfig, device: torch.device, report: Callable[[str], None]) -> Iterator[PartResult]:
    """Every part that has weights, one after the other: no two are in memory together.

    Raises `torch.AcceleratorError` after the result of a part that has broken the device.
    """
    checks: dict[str, tuple[str | None, Callable[[], Found]]] = {
        "denoiser": (config.model.from_pretrained, partial(_check_denoiser, config, device))
    }
    if config.low_noise is not None and (weights := config.low_noise.from_pretrained) is not None:
        checks["low_noise"] = weights, partial(_check_denoiser, config.of_low_noise(), device)
    for key in encoder_sections(config):
        named = getattr(getattr(config, key), "from_pretrained", None)
        if named is not None:
            check = _check_autoencoder if key == "ae" else partial(_check_text, key=key)
            checks[key] = named, partial(check, config, device)
    for name, (weights, check) in checks.items():
        report(name)
        result = PartResult(name, public_name(weights))
        try:
            with _exact_float32():
                result = replace(result, **check())
        except torch.AcceleratorError as error:  # every later call on the device fails too
            yield replace(result, problem=reason_of(error))
            raise
        except (UserError, OSError, RuntimeError) as error:
            result = replace(result, problem=reason_of(error))
        _free(device)
        yield result


def reason_of(error: Exception) -> str:
    """Return an error as a record has it. The traceback of a kernel's or a library's goes to stderr."""
    if isinstance(error, UserError):
        return in_one_line(error)
    if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
        traceback.print_exception(error)
    return f"{type(error).__name__}: {in_one_line(error)}"


@contextmanager
def _exact_float32() -> Iterator[None]:
    """Without TF32, which has ten bits of mantissa."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _drawn(*shape: int, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Return standard normal numbers, the same on every machine."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def _refuse_infinite(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise UserError(f"{name}: holds values that are not finite")


@dataclass(frozen=True)
class _Inputs:
    """Inputs of a denoiser, with room for gradients."""

    x: Tensor
    t: Tensor
    conditions: Conditions

    @classmethod
    def draw(cls, config: SystemConfig, latent: tuple[int, ...], device: torch.device) -> _Inputs:
        from longtake.models.build import denoiser_class

        needs = denoiser_class(config.model).needs(config.model, latent, config.text_length)
        tensors = {
            name: _drawn(1, *shape, seed=number, device=device) if shape[1:] else torch.full((1, *shape), 24.0)
            for number, (name, shape) in enumerate(sorted(needs.items()), 1)
        }
        if getattr(config.model, "known_frames", False):  # the first frame is given, at time 0
            tensors["x_mask"] = torch.arange(latent[1])[None] > 0
        if "vector" in needs:
            tensors["vector"] = _drawn(1, *needs["vector"], seed=9)
        masks = {
            text.condition: torch.ones(1, config.text_length, dtype=torch.bool, device=device)
            for text in config.family.texts
            if text.masked
        }
        objective = build_objective(config.objective, config.model.patch[1], config.quirks)
        conditions = Conditions({name: tensor.to(device) for name, tensor in tensors.items()}, masks)
        time = torch.full((1,), float(objective.time_at(0.5)), device=device)
        return cls(_drawn(1, *latent, device=device), time, conditions)

    def with_gradients(self) -> _Inputs:
        """Fresh leaves of the same values."""
        text = self.conditions["text"].detach().clone().requires_grad_()
        return _Inputs(self.x.detach().clone().requires_grad_(), self.t, self.conditions.updated(text=text))


def _check_denoiser(config: SystemConfig, device: torch.device) -> Found:
    """Predictions and gradients, of inputs and of the first and last block's parameters."""
    form = config.family.weight_format
    section = config.model.model_copy(update={"attention": "auto", "grad_ckpt_settings": None})
    with open_pretrained(section) as (state, _):
        digest = checksum(getattr(state.files, "opened", ()))
        facts: Found = {"sha256": digest, "notes": tuple(state.notes)}
        reference: ReferenceDenoiser | None = None
        if form.reference is not None and set(state) == set(_own_names(section)):
            reference = resolve_name(form.reference)(section, state, Path(state.files.path))
        latent = reference.latent if reference is not None else _small_latent(config)
        inputs = _Inputs.draw(config, latent, device)
        theirs = None if reference is None else _run_reference(reference, inputs, device)
        denoiser = _filled_denoiser(section, state, device, config.seed)
    facts |= {"parameters": sum(parameter.numel() for parameter in denoiser.parameters())}
    ours = _run_ours(denoiser, inputs)
    _refuse_infinite(ours)
    if reference is None or theirs is None:
        return facts
    outputs, gradients = TensorComparison(OUTPUT_LIMIT), TensorComparison(GRADIENT_LIMIT)
    outputs.add("prediction", ours["prediction"], theirs["prediction"])
    named = _as_library_names(form, section, denoiser, ours, reference.naming)
    for name in theirs.keys() - {"prediction"}:
        if name not in named or named[name].shape != theirs[name].shape:
            raise UserError(
                f"{name}: expected a gradient of shape {list(theirs[name].shape)} as the library has, got none"
            )
        gradients.add(name, named[name], theirs[name])
    (output_error, problem), (gradient_error, other) = outputs.result(), gradients.result()
    return facts | {
        "reference": reference.name,
        "output_error": output_error,
        "gradient_error": gradient_error,
        "problem": problem or other,
    }


def _own_names(section: Any) -> Iterable[str]:
    from longtake.models.build import build_denoiser

    with torch.device("meta"):
        return build_denoiser(section).state_dict()


def _small_latent(config: SystemConfig) -> tuple[int, ...]:
    """Latents of the shortest video that the model takes, of a few tokens a frame."""
    side = config.size_divisor
    lengths = (frames for frames in range(9, 2000) if config.ae.has_length(frames))
    for frames in lengths:
        latent = config.ae.latent(frames, 4 * side, 6 * side)
        if config.model.refuses_length(latent[1]) is None:
            return tuple(latent)
    raise UserError("no length of video that the autoencoder and the model take together")


def _filled_denoiser(section: Any, state: ModelWeights, device: torch.device, seed: int) -> nn.Module:
    from longtake.models.build import build_denoiser
    from longtake.models.initial import held_as
    from longtake.parallel.shard import initialise_sharded

    with torch.device("meta"):
        denoiser = build_denoiser(section)
    initialise_sharded(denoiser, device, seed, set(state))
    with torch.no_grad():
        for name in state:
            fill(denoiser, held_as(denoiser, name, state[name]))
    return denoiser


def _end_blocks(module: nn.Module, lists: Iterable[str]) -> list[str]:
    """Prefixes of the parameters in the first and last block of each list."""
    counts = {name: len(module.get_submodule(name)) for name in lists}
    return [f"{name}.{number}." for name, count in counts.items() if count for number in {0, count - 1}]


def _run_ours(denoiser: nn.Module, inputs: _Inputs) -> dict[str, Tensor]:
    """Return the prediction, and gradients by our names."""
    blocks = [block for name in type(denoiser).blocks for block in denoiser.get_submodule(name)]
    for block in blocks:  # one block's activations at a time
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return _gradients(denoiser, denoiser, _end_blocks(denoiser, type(denoiser).blocks), inputs)


def _run_reference(reference: ReferenceDenoiser, inputs: _Inputs, device: torch.device) -> dict[str, Tensor]:
    """Return the same by the library's names, in host memory; its module is freed."""
    module = reference.module.to(device)
    lists = [name for name, part in module.named_children() if isinstance(part, nn.ModuleList) and "blocks" in name]
    results = _gradients(module, reference.predict, _end_blocks(module, lists), inputs)
    module.to("meta")
    _free(device)
    return results


def _gradients(
    module: nn.Module, predict: Callable[..., Tensor], blocks: Iterable[str], inputs: _Inputs
) -> dict[str, Tensor]:
    chosen = tuple(blocks)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name.startswith(chosen))
    given = inputs.with_gradients()
    prediction = predict(given.x, given.t, given.conditions)
    target = _drawn(*prediction.shape, seed=11, device=prediction.device)
    (prediction.float() - target).square().mean().backward()
    found = {"prediction": prediction, "gradient of latents": given.x.grad}
    found["gradient of text"] = given.conditions["text"].grad
    found |= {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    return {name: tensor.detach().float().cpu() for name, tensor in found.items() if tensor is not None}


def _as_library_names(
    form: Any, section: Any, denoiser: nn.Module, ours: Mapping[str, Tensor], naming: str
) -> dict[str, Tensor]:
    """Our gradients under the library's names: they are cut and joined as the weights are."""
    nothing = {
        name: ours[name] if name in ours else torch.zeros(()).expand(value.shape)
        for name, value in denoiser.state_dict().items()
    }
    converted = ConvertedWeights(form, nothing, section, form.as_published(naming))
    inputs = {name: tensor for name, tensor in ours.items() if name.startswith("gradient of")}
    return inputs | dict(converted)


def _check_autoencoder(config: SystemConfig, device: torch.device) -> Found:
    section = plain_section(config.ae)
    plain = config.model_copy(update={"ae": section})
    ours = open_encoder(plain, "ae", device)
    assert isinstance(ours, Autoencoder)
    path = find_encoder(section.from_pretrained, "ae.from_pretrained", section.cache_dir)
    files = WeightFiles(path)
    ours.load_decoder()
    parts = [*ours.encoding.values(), *ours.decoding.values()]
    facts: Found = {
        "sha256": checksum(files.opened),
        "parameters": sum(parameter.numel() for part in parts for parameter in part.parameters()),
    }
    height, width = (size // section.latent.spatial * section.latent.spatial for size in (_HEIGHT, _WIDTH))
    video = _drawn(1, 3, _FRAMES, height, width).tanh().to(device)
    whole = ours.posterior(video)
    _refuse_infinite({**whole, "decoded video": ours.decode(whole["mean"], _FRAMES)})
    reference = autoencoder_reference(section, ours, files)
    if reference is None:
        return facts
    reference.module.to(device)
    comparison = TensorComparison(OUTPUT_LIMIT)
    with torch.no_grad():
        encoded, theirs = reference.ours_encode(video), reference.encode(video)
        for name, value in theirs.items():
            comparison.add(f"{name} of latents", encoded[name], value)
        mean = theirs["mean"]
        comparison.add("decoded video", reference.ours_decode(mean, _FRAMES), reference.decode(mean))
    error, problem = comparison.result()
    return facts | {"reference": reference.name, "output_error": error, "problem": problem}


def _check_text(config: SystemConfig, device: torch.device, key: str) -> Found:
    changes = {"dtype": "fp32", "placement": "resident"}
    section = getattr(config, key).model_copy(update=changes)
    encoder = open_encoder(config.model_copy(update={key: section}), key, device)
    assert isinstance(encoder, LearnedTextEncoder)
    files = WeightFiles(find_encoder(section.from_pretrained, f"{key}.from_pretrained", section.cache_dir))
    facts: Found = {
        "sha256": checksum(files.opened),
        "parameters": sum(parameter.numel() for parameter in encoder.module.parameters()),
    }
    with torch.no_grad():
        ours = encoder.embed(CAPTIONS)
        _refuse_infinite({"embeddings": ours})
        tokens = encoder.tokenize(CAPTIONS)
        ours = ours.cpu()
        encoder.module.to("meta")
        _free(device)
        reference = text_reference(section, encoder, files.path, files)
        reference.module.to(device)
        comparison = TensorComparison(OUTPUT_LIMIT)
        comparison.add("embeddings", ours, reference.embed_ids(*tokens))
    error, problem = comparison.result()
    return facts | {"reference": reference.name, "output_error": error, "problem": problem}
