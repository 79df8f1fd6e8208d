"""`Model`: a denoiser, its encoders and its objective as plain PyTorch modules in one process."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from longtake.api.process import refuse_process_group, restored_process
from longtake.api.runs import Run
from longtake.contracts import Batch, Conditions, Noised, UserError
from longtake.diffusion.objective import Objective, micro_batch_loss
from longtake.parallel.config import ParallelConfig
from longtake.parallel.mesh import Mesh
from longtake.parallel.world import World, start_world
from longtake.system.build import System, build_system
from longtake.system.config import SystemConfig
from longtake.system.examples import clean_example

if TYPE_CHECKING:
    from longtake.system.encoders import Encoders

C = TypeVar("C", bound=SystemConfig)


class Model:
    """A denoiser with its encoders and its objective, whole on one device.

        model = longtake.load(longtake.Run.preset("demo/shapes").set(tiny=True))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for batch in longtake.batches(run):
            model.loss(batch).backward()

    Made by `longtake.load`. No process group is needed; wrap `denoiser` in DDP or `fully_shard` for several GPUs.
    Parameters that train are float32, frozen ones are in `dtype`: on a GPU, compute under
    `torch.autocast(model.device.type, model.dtype)`.
    """

    def __init__(self, system: System) -> None:
        """`system`: built unsharded, with its encoders."""
        self.system = system

    @property
    def denoiser(self) -> nn.Module:
        """The diffusion transformer: `denoiser(x, t, conditions)`, x [B, C, F, h, w], t [B] -> [B, C, F, h, w]."""
        return self.system.denoiser

    @property
    def encoders(self) -> Encoders:
        """The autoencoder and the text encoders."""
        return self.system.own_encoders

    @property
    def objective(self) -> Objective:
        """The path from data to noise, what is predicted, and the loss of a sample."""
        return self.system.objective

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.system.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the run computes in."""
        return self.system.dtype

    def parameters(self) -> list[nn.Parameter]:
        """Return the denoiser's parameters that train."""
        return [parameter for parameter in self.denoiser.parameters() if parameter.requires_grad]

    @cached_property
    def _no_text(self) -> Conditions:
        return self.system.embed_nothing()

    def example(self, batch: Batch) -> tuple[Noised, Conditions]:
        """Return the noised latents of a batch and what the denoiser is conditioned on, with the batch's own random
        numbers.

            noised, conditions = model.example(batch)
            prediction = model.denoiser(noised.x, noised.t, conditions)

        Text dropout and the loss at conditioning frames are those of the run that the model was loaded from.
        """
        config, weights = self.system.config, batch.weights.to(self.device)
        dropout = getattr(config, "text_dropout", None)  # keys of training, which a file of weights lacks
        leaves_out_known = getattr(config, "no_i2v_ref_loss", False)
        return clean_example(self.system, batch, self._no_text, weights, dropout).noised(self.system, leaves_out_known)

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, as training computes it: a float32 scalar with its graph.

            model.loss(batch).backward()

        The sum over samples of weight times the objective's loss, divided by the bucket's batch size.
        """
        noised, conditions = self.example(batch)
        prediction = self.denoiser(noised.x, noised.t, conditions)
        weights = batch.weights.to(self.device)
        return micro_batch_loss(self.objective.loss, prediction, noised, weights, batch.bucket.batch_size)

    def save(self, path: str | os.PathLike[str], layout: str | None = None) -> Path:
        """Write the weights to a `.safetensors` file, or to a folder in Hugging Face's layout; adapters are merged.

            model.save("weights.safetensors")

        `longtake generate`, `longtake.load` and `model.from_pretrained` take the result. It appears only when it is
        whole. `layout`: a folder as another program reads it, such as "diffusers", with its `config.json`. Raises
        `Error` where something is at `path` already, and for a layout that the model does not have.
        """
        from longtake.config.dump import plain_data
        from longtake.system.export import CONFIG_HEADER, said_sampling, system_part, trained_size
        from longtake.weights.conversion import ConvertedWeights
        from longtake.weights.files import save_weights

        config = self.system.config
        form = config.family.weight_format
        if layout is not None:
            if layout not in form.folders:
                choices = " or ".join(form.folders) or "None, the model has no other"
                raise UserError(f"layout = {layout!r}: expected a layout of this model; choose {choices}")
            published = form.as_published(layout)
            facts = json.dumps(form.folders[layout](config.model), indent=2) + "\n"
            converted = ConvertedWeights(form, _merged_weights(self.denoiser), config.model, published)
            save_weights(converted, path, published.header, stem=form.stem, beside={"config.json": facts})
            return Path(path)
        whole = plain_data(config)
        tree = system_part(whole) | {"sampling_option": {**said_sampling(whole), **trained_size(whole)}}
        for key in ("lora", "freeze", "train_only"):
            tree.pop(key, None)
        tree["model"] = {**tree["model"], "from_pretrained": None}
        header = {CONFIG_HEADER: json.dumps(tree), **form.own(config.model).header, "part": "model"}
        save_weights(_merged_weights(self.denoiser), path, header)
        return Path(path)

    def load_adapter(self, path: str | os.PathLike[str], strength: float = 1.0) -> None:
        """Put the adapters of a LoRA or DoRA file on the denoiser, in place; its other weights are frozen.

            model.load_adapter("adapters.safetensors", strength=0.8)

        `path`: a file or folder of PEFT, diffusers, ComfyUI or Longtake. Raises `Error` where it does not fit the
        model, or the model has adapters already; the model is then as it was.
        """
        from longtake.models.config import LoraConfig
        from longtake.models.lora import LoraLinear, adapt
        from longtake.system.lora import adapter_sizes, start_adapters
        from longtake.weights.lora import find_adapters, read_adapters

        if any(isinstance(layer, LoraLinear) for layer in self.denoiser.modules()):
            raise UserError(
                f"{path}: expected a model without adapters; load the model again, or merge with Model.save"
            )
        config = self.system.config
        form = config.family.weight_format
        lora = LoraConfig.model_validate({"from_pretrained": os.fspath(path), "strength": strength})
        adapters = read_adapters(form, find_adapters(os.fspath(path), "Model.load_adapter"), config.model)
        adapt(self.denoiser, adapter_sizes(form, self.denoiser, lora, adapters), "dense", self.dtype)
        start_adapters(self.denoiser, adapters)
        self.system = replace(self.system, config=config.model_copy(update={"lora": lora}))


def load(source: Run | str | os.PathLike[str], objective: type[Objective] | None = None) -> Model:
    """Return the model of a run, or of a `.safetensors` file that `Model.save` or `longtake checkpoint export` wrote.

        model = longtake.load("outputs/demo")
        print(sum(p.numel() for p in model.denoiser.parameters()))

    A run's folder gives the weights of its last checkpoint (EMA where it has them); a run file or preset the weights
    that it starts from. `objective`: in place of the config's, as for `Run.train`. Files are looked for first. Raises
    `Error` for files that are missing or do not fit, for a model of two denoisers, under torchrun, and while
    torch.distributed is initialized.
    """
    from longtake.generate.source import check_loaded, load_weights, resolve_source

    checkpoint: Path | None = None
    if isinstance(source, Run) or Path(source).suffix != ".safetensors":
        run = source if isinstance(source, Run) else Run.load(source)
        config: SystemConfig = run.config_without_table
        checkpoint = run.checkpoint
    else:
        config = resolve_source(os.fspath(source), ()).config
    if config.low_noise is not None:
        raise UserError(
            "longtake.load: expected a model of one denoiser, found two (low_noise); use Run.train and Run.generate"
        )
    with one_process(config, "longtake.load") as world:
        config = one_device(config)
        mesh = Mesh.create(config.parallel, world)
        system = build_system(config, mesh, world, restored=checkpoint is not None, sharded=False)
        if checkpoint is not None:
            load_weights(system, checkpoint, ema=True)
            check_loaded(system.denoiser, checkpoint)
    if objective is not None:
        built = objective(config.objective, config.model.patch[1], config.quirks)
        system = replace(system, objective=built)
    return Model(system)


def one_device(config: C) -> C:
    """Return the config of a whole model on one device: no parallelism, nothing compiled or offloaded."""
    changes = {"parallel": ParallelConfig.model_validate({}), "compile": False, "precision": None}
    return config.model_copy(update=changes)


@contextmanager
def one_process(config: SystemConfig, call: str) -> Iterator[World]:
    """Yield a world of this process alone, for building; the process is as before on exit. Raises `UserError` under
    torchrun, and where torch.distributed is initialized."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(f"{call}: expected one process, found WORLD_SIZE = {os.environ['WORLD_SIZE']}; use Run.train")
    refuse_process_group(call)
    with restored_process(), start_world(config.device) as world:
        yield world


def _merged_weights(denoiser: nn.Module) -> Mapping[str, Tensor]:
    """Return the denoiser's parameters by name, with adapters merged into the weights of their layers."""
    from longtake.models.lora import LoraLinear
    from longtake.weights.adapters import adapters_of, merged

    tensors = {name: parameter.detach().cpu() for name, parameter in denoiser.named_parameters()}
    layers = {name: layer for name, layer in denoiser.named_modules() if isinstance(layer, LoraLinear)}
    adapters = adapters_of(tensors, lambda layer: layers[layer].scaling)
    result = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[2] not in LoraLinear.PARAMETERS}
    for name, adapter in adapters.items():
        weight = result[f"{name}.weight"]
        full = merged(weight, adapter)
        strength = layers[name].strength
        result[f"{name}.weight"] = torch.lerp(weight.float(), full.float(), strength).to(weight.dtype)
    return result
