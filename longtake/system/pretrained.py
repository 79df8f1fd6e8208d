"""`model.from_pretrained`: which weights are meant, and how they get into a sharded model."""

from __future__ import annotations

import glob
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from longtake.checkpoint import (
    CheckpointWeights,
    hold,
    is_complete,
    list_checkpoints,
    read_state,
)
from longtake.config import load_config
from longtake.contracts import UserError
from longtake.models import LoraConfig, MMDiTConfig, held_as, storage
from longtake.system.lora import fill
from longtake.weights import (
    ROPE_KEY,
    Adapter,
    Adapters,
    MMDiTWeights,
    adapters_of,
    convert_adapters,
    find_denoiser,
    layout_of,
    merged,
    state_shapes,
)

_OF_ADAPTERS = (".lora_a", ".lora_b", ".magnitude")


def load_pretrained(denoiser: nn.Module, state: MMDiTWeights, without: Collection[str] = frozenset()) -> None:
    """Fills the denoiser with weights that `open_pretrained` has opened, `without` these names.

    Collective. One tensor at a time is in memory.
    """
    for name in state:
        if name not in without:
            fill(denoiser, held_as(denoiser, name, state[name]))


@contextmanager
def open_pretrained(config: MMDiTConfig, lora: LoraConfig | None = None) -> Iterator[tuple[MMDiTWeights, str]]:
    """The weights that `config.from_pretrained` means, and a line that says which.

    A file or folder of any family that `MMDiTWeights` reads, here or on the Hugging Face hub; or a checkpoint of a run,
    the run's folder, or a glob of either, of which the newest is taken, averaged where it has an average. It is not
    removed while it is read.

    Of a run that trained adapters the weights are those with the adapters merged into them; or, for a run with the same
    `lora`, which keeps the adapters (`kept_adapters`), those under them.
    """
    spec = config.from_pretrained
    assert spec is not None
    if not means_checkpoint(spec):
        state = MMDiTWeights(find_denoiser(spec), config)
        yield state, f"weights: from {state.files.path}"
        return
    with hold(spec) as folder, ExitStack() as stack:
        model, theirs = run_sections(folder)
        rope = {ROPE_KEY: layout_of(model).rope}
        if not read_state(folder).get("frozen"):
            weights = CheckpointWeights(folder, rope)
            kind = "averaged (ema)" if weights.part == "ema" else "as trained"
            yield MMDiTWeights(weights, config), f"weights: {kind}, from {folder}"
            return
        parts = TrainedParts(folder, "ema", stack)
        kind = "averaged " if parts.part == "ema" else ""
        if parts.adapters and _same_adapters(lora, theirs):
            parts.adapters = {}
            said = f"weights: those under the adapters of {folder}, whose {kind}adapters go on training"
        elif parts.adapters:
            said = f"weights: with the {kind}adapters merged into them, from {folder}"
        else:
            kind = "averaged" if kind else "as trained"
            said = f"weights: {kind}, of a part and what it was trained with, from {folder}"
        yield MMDiTWeights(parts, config), said


def kept_adapters(config: MMDiTConfig, lora: LoraConfig | None) -> Adapters:
    """The adapters that a run starts with because it starts from another run with the same ones.

    These are runs of equal `lora.rank`, `alpha`, `targets` and `dora`; empty for any other, and where `lora` names a
    file of adapters. Collective.
    """
    spec = config.from_pretrained
    if lora is None or spec is None or not means_checkpoint(spec):
        return {}
    with hold(spec) as folder:
        model, theirs = run_sections(folder)
        if not _same_adapters(lora, theirs):
            return {}
        found = read_adapters_of(CheckpointWeights(folder, partly=True))
        return convert_adapters(found, config, layout_of(model), layout_of(config))


def base_of_adapters(spec: str | None, lora: LoraConfig | None) -> str | None:
    """The weights under adapters, as they were named where these began: `spec`, or what lies under a run it names."""
    if spec is None or not means_checkpoint(spec):
        return spec
    with hold(spec) as folder:
        theirs = run_sections(folder)[1]
        if not _same_adapters(lora, theirs):
            return spec
        return base_of_adapters(read_state(folder)["frozen"]["source"], theirs)


def _same_adapters(here: LoraConfig | None, there: LoraConfig | None) -> bool:
    if here is None or there is None or here.from_pretrained is not None:
        return False
    return all(getattr(here, key) == getattr(there, key) for key in ("rank", "alpha", "targets", "dora"))


def means_checkpoint(spec: str) -> bool:
    """Whether a path means a checkpoint of a run: its folder, the run's folder, or a glob of folders."""
    path = Path(spec).expanduser()
    if path.is_dir():
        return is_complete(path) or bool(list_checkpoints(path))
    return glob.has_magic(spec) and not path.exists()


def run_sections(folder: Path) -> tuple[MMDiTConfig, LoraConfig | None]:
    """`model` and `lora` of the run that a checkpoint is of."""
    file = folder.parent / "config.py"
    if not file.exists():
        raise UserError(
            f"{folder}: no config.py beside it says how its weights are written; give a checkpoint in its run's folder"
        )
    tree = load_config(file, [], dict[str, Any]).tree
    lora = tree.get("lora")
    return MMDiTConfig(**tree.get("model", {})), None if lora is None else LoraConfig(**lora)


class TrainedParts(Mapping[str, Tensor]):
    """Every weight of a run that trained adapters or a part of the model, by the names of its model, on the CPU.

    Adapters are merged into their layers, in float32, and the result has the dtype of what lies under them; each weight
    is made when it is asked for. What the run did not train comes from the file that it started from, or from its
    `frozen/`. `adapters` may be emptied: the mapping then is of the weights under them. Collective. Raises `UserError`
    where a file of it is gone or damaged.
    """

    def __init__(self, folder: Path, part: str, stack: ExitStack) -> None:
        """`part`: "ema" (falls back to "model") or "model". `stack` keeps what lies under it from being removed."""
        self.path = folder
        self.model, lora = run_sections(folder)
        self.metadata: Mapping[str, str] = {ROPE_KEY: layout_of(self.model).rope}
        self._own = CheckpointWeights(folder, wanted=part, partly=True)
        self.part, self.adapters = self._own.part, read_adapters_of(self._own)
        self._code = "dense" if lora is None else lora.base
        self._shapes = state_shapes(self.model)
        self._under: Mapping[str, Tensor] = {}
        source = (read_state(folder).get("frozen") or {}).get("source")
        if source is not None:
            under = self.model.model_copy(update={"from_pretrained": source})
            self._under = stack.enter_context(open_pretrained(under, lora))[0]

    def __getitem__(self, name: str) -> Tensor:
        value = self._own[name] if name in self._own else self._under[name]
        if f"{name}_scale" in self._own:
            scale = self._own[f"{name}_scale"]
            value = storage.decode(value, scale, self._code, scale.dtype)
        layer, _, kind = name.rpartition(".")
        return merged(value, self.adapters[layer]) if kind == "weight" and layer in self.adapters else value

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._shapes if name in self._own or name in self._under)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, which is that of the run's model."""
        return self._shapes[name]


def read_adapters_of(weights: CheckpointWeights) -> dict[str, Adapter]:
    """The adapters in a checkpoint, by the layers of its model; empty where its run trained none."""
    scaling = read_state(weights.path).get("adapters", {})
    tensors = {name: weights[name] for name in weights if name.endswith(_OF_ADAPTERS)}
    return adapters_of(tensors, scaling.__getitem__)
