"""`model.from_pretrained`: which weights are meant, and how they get into a sharded model."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from longtake.checkpoint.export import CheckpointWeights
from longtake.checkpoint.folder import FROZEN_FOLDER, LOW_NOISE, is_complete
from longtake.checkpoint.runs import hold, list_checkpoints
from longtake.checkpoint.state import RunState
from longtake.config.load import load_config
from longtake.contracts import UserError
from longtake.encoders.autoencoder_config import fitted_layer
from longtake.families.registry import family_of, read_model
from longtake.models import quantized
from longtake.models.config import LOW_NOISE_KEY, LoraConfig, ModelSection
from longtake.tensor_files import check_finite
from longtake.weights.adapters import Adapter, Adapters, adapters_of, convert_adapters, merged, tensors_of
from longtake.weights.conversion import state_shapes
from longtake.weights.files import find_denoiser
from longtake.weights.model import ModelWeights


@contextmanager
def open_pretrained(
    config: ModelSection, lora: LoraConfig | None = None, key: str = "model.from_pretrained"
) -> Iterator[tuple[ModelWeights, str]]:
    """Yield the weights that `config.from_pretrained`, the value of `key`, means, and a line that says which.

    A file or folder of any naming of the model's format, here or on the Hugging Face hub; or a checkpoint of a run, the
    run's folder, or a glob of either: the newest, held while it is read, averaged unless `from_part` says else. Of a
    run with adapters: the weights with these merged, or those under them for a run with the same `lora`
    (`kept_adapters`). Of a run with two denoisers those of the first, or, where `key` is that of the second, those of
    the second.
    """
    spec = config.from_pretrained
    form = family_of(config).weight_format
    if not means_checkpoint(spec):
        state = ModelWeights(form.folder_in(find_denoiser(spec, key)), config, form)
        yield state, f"weights: from {state.files.path}"
        return
    with hold(spec) as folder, ExitStack() as stack:
        prefix = _denoiser_of_run(folder, key)
        model, theirs = run_sections(folder, prefix)
        if RunState.read(folder).frozen_of(prefix) is None:
            header = family_of(model).weight_format.own(model).header
            weights = CheckpointWeights(folder, header, wanted=config.from_part, prefix=prefix)
            kind = "averaged (ema)" if weights.part == "ema" else "as trained"
            yield ModelWeights(weights, config, form), f"weights: {kind}, from {folder}"
            return
        parts = TrainedParts(folder, config.from_part, stack, prefix)
        kind = "averaged " if parts.part == "ema" else ""
        if parts.adapters and model.type == config.type and _same_adapters(lora, theirs):
            parts.adapters = {}
            said = f"weights: those under the adapters of {folder}, whose {kind}adapters go on training"
        elif parts.adapters:
            said = f"weights: with the {kind}adapters merged into them, from {folder}"
        else:
            kind = "averaged (ema)" if kind else "as trained"
            said = f"weights: {kind}, from {folder}; what it did not train, from {parts.source}"
        yield ModelWeights(parts, config, form), said


def _denoiser_of_run(checkpoint: Path, key: str) -> str:
    """Return the prefix of the denoiser in a checkpoint that a key's model starts from."""
    return LOW_NOISE if key == LOW_NOISE_KEY and isinstance(run_tree(checkpoint).get("low_noise"), Mapping) else ""


def kept_adapters(config: ModelSection, lora: LoraConfig | None, key: str = "model.from_pretrained") -> Adapters:
    """Return the adapters that a run starts with because it starts from a run of the same kind of model with the
    same ones (`lora.rank`, `alpha`, `rslora`, `targets`, `dora`); empty where `lora` names a file. `key` as for
    `open_pretrained`. Collective."""
    spec = config.from_pretrained
    if lora is None or spec is None or not means_checkpoint(spec):
        return {}
    with hold(spec) as folder:
        prefix = _denoiser_of_run(folder, key)
        model, theirs = run_sections(folder, prefix)
        if model.type != config.type or not _same_adapters(lora, theirs):
            return {}
        found = read_adapters_of(CheckpointWeights(folder, partly=True, prefix=prefix))
        form = family_of(config).weight_format
        return convert_adapters(form, found, config, form.own(model), form.own(config))


def base_of_adapters(spec: str | None, lora: LoraConfig | None) -> str | None:
    """Return the weights under adapters, as they were named where these began: `spec`, or what lies under a run it
    names."""
    if spec is None or not means_checkpoint(spec):
        return spec
    with hold(spec) as folder:
        theirs = run_sections(folder)[1]
        if not _same_adapters(lora, theirs):
            return spec
        return base_of_adapters(RunState.read(folder).frozen_source, theirs)


def _same_adapters(here: LoraConfig | None, there: LoraConfig | None) -> bool:
    if here is None or there is None or here.from_pretrained is not None:
        return False
    return all(getattr(here, key) == getattr(there, key) for key in ("rank", "alpha", "rslora", "targets", "dora"))


def means_checkpoint(spec: str) -> bool:
    """Return whether a path is that of a checkpoint: its folder, the run's folder, or a glob of folders."""
    path = Path(spec).expanduser()
    if path.is_dir():
        return is_complete(path) or bool(list_checkpoints(path))
    return glob.has_magic(spec) and not path.exists()


def run_tree(checkpoint: Path) -> dict[str, Any]:
    """Return the config, as plain data, of the run that a checkpoint is of. Raises `UserError` where it is not beside
    it."""
    file = checkpoint.parent / "config.py"
    if not file.exists():
        raise UserError(f"{checkpoint.parent}: no config.py beside the checkpoint; give the folder of a training run")
    tree = dict(load_config(file, [], dict[str, Any]).tree)
    for section, own in fitted_layer(tree, checkpoint.parent).items():
        tree[section] = {**tree[section], **own}
    return tree


def run_sections(checkpoint: Path, prefix: str = "") -> tuple[ModelSection, LoraConfig | None]:
    """`model` and `lora` of the run that a checkpoint is of; `prefix`: `LOW_NOISE` for its second denoiser."""
    tree = tree_of_denoiser(run_tree(checkpoint), checkpoint, prefix)
    return read_model(tree), LoraConfig(**tree["lora"]) if tree.get("lora") is not None else None


def tree_of_denoiser(tree: Mapping[str, Any], checkpoint: Path, prefix: str = "") -> dict[str, Any]:
    """Return the config of a run, as plain data, as if it had trained one of its denoisers alone. Raises `UserError`
    where it has no second one and that is asked for."""
    low_noise = tree.get("low_noise")
    own = {name: section for name, section in tree.items() if name != "low_noise"}
    if isinstance(option := own.get("sampling_option"), Mapping):
        own["sampling_option"] = {key: value for key, value in option.items() if key != "guidance_low"}
    if not prefix:
        return own
    if not isinstance(low_noise, Mapping):
        raise UserError(f"{checkpoint}: its run trained one denoiser; leave --low-noise out")
    own["model"] = {**own.get("model", {}), "from_pretrained": low_noise.get("from_pretrained")}
    if isinstance(lora := own.get("lora"), Mapping):
        own["lora"] = {**lora, "from_pretrained": low_noise.get("lora")}
    return own


class TrainedParts(Mapping[str, Tensor]):
    """Every weight of a run that trained adapters or a part of the model, by the names of its model, on the CPU.

    Adapters are merged in float32 when a weight is asked for, which keeps the dtype of what lies under it; with
    `adapters` emptied these are the weights under them. What the run did not train comes from the file it started from,
    or from its `frozen/`. Collective. Raises `UserError` where a file of it is gone or damaged.
    """

    def __init__(self, folder: Path, part: str, stack: ExitStack, prefix: str = "") -> None:
        """`part`: "ema" (falls back to "model") or "model". `stack` keeps what lies under it from being removed.
        `prefix`: `LOW_NOISE` for a second denoiser."""
        self.path = folder
        self.model, lora = run_sections(folder, prefix)
        self.metadata: Mapping[str, str] = family_of(self.model).weight_format.own(self.model).header
        self._own = CheckpointWeights(folder, wanted=part, partly=True, prefix=prefix)
        self.part, self.adapters = self._own.part, read_adapters_of(self._own)
        self._code = "dense" if lora is None else lora.base
        self._shapes = state_shapes(self.model)
        self._under: Mapping[str, Tensor] = {}
        frozen = RunState.read(folder).frozen_of(prefix)
        source = None if frozen is None else frozen.source
        self.source = source or str(folder.parent / (prefix + FROZEN_FOLDER))  # of what did not train
        if source is not None:
            under = self.model.model_copy(update={"from_pretrained": source})
            self._under = stack.enter_context(open_pretrained(under, lora))[0]

    def __getitem__(self, name: str) -> Tensor:
        value = self._own[name] if name in self._own else self._under[name]
        if f"{name}_scale" in self._own:
            scale = self._own[f"{name}_scale"]
            value = quantized.dequantize(value, scale, self._code, scale.dtype)
        layer, _, kind = name.rpartition(".")
        return merged(value, self.adapters[layer]) if kind == "weight" and layer in self.adapters else value

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._shapes if name in self._own or name in self._under)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]


def read_adapters_of(weights: CheckpointWeights) -> dict[str, Adapter]:
    """Return the adapters in a checkpoint, by the layers of its model; empty where its run trained none."""
    scaling = RunState.read(weights.path).adapters
    found = adapters_of(weights, lambda layer: scaling[weights.prefix + layer])
    for name, value in tensors_of(found).items():
        check_finite(value, str(weights.path), name)
    return found
