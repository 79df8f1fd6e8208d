"""What a run that trained adapters, or a part of the model, gives away: adapters alone, or whole weights."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

from longtake.checkpoint import EXPORT_BYTES, CheckpointWeights, hold
from longtake.contracts import UserError
from longtake.system.export import CONFIG_HEADER, system_tree
from longtake.system.pretrained import TrainedParts, base_of_adapters, read_adapters_of, run_sections
from longtake.weights import Family, save_adapters, save_weights


def export_adapters(checkpoint: str, target: str | Path, family: Family, part: str = "ema") -> Path:
    """Writes the adapters of a checkpoint as a family's file (for peft: a folder) and returns `target`.

    `checkpoint`: as for `--load`, also of a run that goes on; `part`: "ema" (the adapters themselves where a run kept
    no average) or "model". Raises `UserError` where the run trained no adapters.
    """
    with hold(checkpoint) as folder:
        model, lora = run_sections(folder)
        adapters = read_adapters_of(CheckpointWeights(folder, wanted=part, partly=True))
    if not adapters:
        raise UserError(f"{folder}: holds no adapters, for its run trained without lora; leave --lora out")
    save_adapters(adapters, model, target, family, base_of_adapters(model.from_pretrained, lora))
    return Path(target)


def export_merged(checkpoint: str, target: str | Path, part: str = "ema", max_file_bytes: int = EXPORT_BYTES) -> Path:
    """Writes whole weights, adapters merged into them, to a file or folder that `longtake generate` takes by itself.

    What the run did not train comes from the file that it started from, or from its `frozen/`. A merged weight is
    computed in float32 and rounded to the dtype in which that base is written. Raises `UserError` where the file of the
    base is gone.
    """
    with hold(checkpoint) as folder, ExitStack() as stack:
        tree = system_tree(folder)
        weights = TrainedParts(folder, part, stack)
        tree = {key: value for key, value in tree.items() if key not in ("lora", "freeze", "train_only")}
        tree["model"] = {**tree.get("model", {}), "from_pretrained": None}
        header = {CONFIG_HEADER: json.dumps(tree), **weights.metadata, "part": part}
        save_weights(weights, target, header, max_file_bytes)
    return Path(target)
