"""Tensors that a run does not train: written once beside its checkpoints, or named by their source, and recognised.

A checkpoint's state says which they are (`Frozen`). With a source (the file the model was
filled from) they are not written at all; without, `frozen/` in the run's folder holds them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from torch import Tensor
from torch.distributed.tensor import DTensor

from longtake.checkpoint.folder import FROZEN_FOLDER, is_complete, read_state
from longtake.checkpoint.load import load_tensors
from longtake.checkpoint.save import save_into
from longtake.checkpoint.state import Frozen
from longtake.contracts import UserError
from longtake.parallel.world import World
from longtake.tensor_files import bytes_of


def digest_of(tensors: Mapping[str, Tensor], on_progress: Callable[[float], None] = lambda share: None) -> str:
    """BLAKE2b over names, shapes and values of whole tensors: 32 hexadecimal digits, equal on every mesh.

    Floating-point values are taken as bf16, so that a run is recognised where it computes in another dtype. Collective:
    shards are gathered one tensor at a time, and the ranks share out the work. `on_progress` gets the share of
    bytes that is done.
    """
    world = World.here()
    found = {}
    total, done = sum(tensor.nbytes for tensor in tensors.values()), 0
    for index, name in enumerate(sorted(tensors)):
        tensor = tensors[name].detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if index % world.size == world.rank:
            whole = whole.bfloat16() if whole.is_floating_point() else whole
            found[name] = hashlib.blake2b(bytes_of(whole.cpu()).numpy(), digest_size=16).hexdigest()
        done += tensor.nbytes
        on_progress(done / max(1, total))
    every = {name: digest for share in world.gather(found) for name, digest in share.items()}
    text = "\n".join(f"{n} {tuple(tensors[n].shape)} {every[n]}" for n in sorted(every))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def keep_frozen(
    run_folder: Path,
    tensors: Mapping[str, Tensor],
    source: str | None,
    on_progress: Callable[[float], None] = lambda share: None,
    prefix: str = "",
) -> Frozen:
    """What a checkpoint says of the frozen tensors; writes `frozen/`, with the denoiser's `prefix` before that name,
    where they have no `source`. Collective.

    Raises UserError where `frozen/` is there already and holds others.
    """
    facts = Frozen(digest_of(tensors, on_progress), len(tensors), source)
    folder, world = run_folder / (prefix + FROZEN_FOLDER), World.here()
    if source is not None:
        return facts
    if not world.on_main(lambda: is_complete(folder)):
        save_into(folder, 0, 0, tensors, {"frozen": asdict(facts)})
    elif (known := world.on_main(lambda: read_state(folder)["frozen"]["digest"])) != facts.digest:
        raise UserError(
            f"{folder}: holds frozen weights of digest {known}, the run has {facts.digest}; start a run of another name"
        )
    return facts


def restore_frozen(
    checkpoint: Path,
    into: Mapping[str, Tensor],
    facts: Frozen | None,
    on_progress: Callable[[float], None] = lambda share: None,
    prefix: str = "",
) -> None:
    """Fill the frozen tensors of a run from `frozen/` beside `checkpoint`, and make sure that they are its own.

    `facts`: of the checkpoint's state. Where they name a source, `into` is filled already. Collective. Raises
    UserError where the checkpoint was made with others.
    """
    if not into and not facts:
        return
    if not into or not facts:
        had = f"{facts.num_tensors} frozen tensors" if facts else "none"
        raise UserError(
            f"{checkpoint}: was made with {had}, the run has {len(into)}; freeze the parameters it was trained with"
        )
    if facts.source is None:
        folder = checkpoint.parent / (prefix + FROZEN_FOLDER)
        lacking = load_tensors(folder, into, strict=False).missing
        if lacking:
            raise UserError(
                f"{folder}: has no {lacking[0]} ({len(lacking)} lacking in all); freeze the parameters the run was "
                "trained with, and keep lora.base as it was"
            )
    found = digest_of(into, on_progress)
    if found != facts.digest:
        place = facts.source or checkpoint.parent / (prefix + FROZEN_FOLDER)
        raise UserError(
            f"{checkpoint}: was trained on frozen weights of digest {facts.digest} ({place}), the run has {found}; "
            "give model.from_pretrained the file it was trained from, and leave lora.base as it was"
        )
