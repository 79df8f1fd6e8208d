"""What the ranks of a world play through beside the steps of `matrix.py`: degrees and groups, forwards of peers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longtake.contracts import UserError
from longtake.models.mmdit import MMDiT
from longtake.parallel.config import ParallelConfig
from longtake.parallel.mesh import Mesh
from longtake.parallel.shard import cut_model, initialise_sharded, shard_model
from longtake.parallel.tokens import TokenCut
from longtake.parallel.world import World
from tests.models.initialised import initialise
from tests.parallel.blocks import set_blocks
from tests.parallel.one_step import whole
from tests.parallel.tiny import micro_loss, tiny
from tests.ranks import Facts


def degrees_and_groups(world: World) -> Facts:
    """What a rank of four finds; a mesh is a matter of all ranks, so these run together."""
    say = partial(refusal, world)
    facts: Facts = {
        "five heads": say({"tensor": 4}, {"hidden_size": 40, "num_heads": 5, "axes_dim": (2, 2, 4)}),
        "uneven mlp": say({"tensor": 4}, {"mlp_ratio": 1.1875}),
        "no block": say({"tensor": 2}, {"depth": 0}),
        "ulysses alone": say({"sequence": 4, "sequence_attention": "ulysses"}, {"num_heads": 2, "axes_dim": (4, 6, 6)}),
        "two nodes": say({"tensor": 4}, {}, local_size=2),
    }
    mesh = Mesh.create(ParallelConfig(sequence=2, tensor=2), world)
    facts["weights"] = mesh.weights.size()
    facts["places"] = [mesh.data_ranks, mesh.data_rank, mesh.num_peers, mesh.peer_index]
    for name, sequence in (("whole", 2), ("half", 1)):
        peers = mesh.token_peers(4, sequence)
        groups = (peers.everyone, peers.tensor_group, peers.ulysses_group, peers.ring_group)
        facts[name] = [None if group is None else dist.get_process_group_ranks(group) for group in groups]
    ring = Mesh.create(ParallelConfig(sequence=4), world).token_peers(2)
    facts["ring"] = [dist.get_process_group_ranks(group) for group in (ring.ulysses_group, ring.ring_group)]
    return facts


def refusal(world: World, parallel: dict[str, Any], model: dict[str, Any], local_size: int = 4) -> str:
    """The sentence that refuses this mesh for this model."""
    try:
        with torch.device("meta"):
            denoiser = MMDiT(tiny(**model))
        here = World(world.rank, world.size, world.local_rank, world.device, local_size)
        cut_model(denoiser, Mesh.create(ParallelConfig(**parallel), here))
    except UserError as error:
        return str(error)
    return "taken"


def forwards_of_peers(world: World) -> Facts:
    """What four sequence peers find when forwards precede one another's backward, and with masters on the CPU."""
    return {"two forwards": two_forwards(world), "offload": offloaded(world)}


def degrees_of_forwards(world: World) -> Facts:
    """What they find when forwards differ in degree."""
    return {"degrees": by_degree(world)}


def cut_and_sharded(world: World, **parallel: Any) -> tuple[MMDiT, Mesh, TokenCut]:
    """A tiny model on the mesh, every block recomputed."""
    mesh = Mesh.create(ParallelConfig(**parallel), world)
    with torch.device("meta"):
        model = MMDiT(tiny())
    cut = cut_model(model, mesh)
    set_blocks(model, "full", cut=cut)
    shard_model(model, mesh, torch.float32)
    initialise_sharded(model, torch.device("cpu"), 3)
    return model, mesh, cut


def plain() -> MMDiT:
    model = MMDiT(tiny())
    initialise(model, 3)
    return model


def gradients_apart(model: nn.Module, reference: nn.Module) -> float:
    """The largest difference between gradients, over the largest gradient."""
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    found: dict[str, Tensor] = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    largest = max(float(g.abs().max()) for g in wanted.values())
    return max(float((found[name] - g).abs().max()) for name, g in wanted.items()) / largest


def by_degree(world: World) -> float:
    """A step of a long micro-batch by all four peers, two by pairs and four by single ranks: seven micro-batches.

    Every rank makes three forwards; the reduction's mean over ranks becomes the mean over micro-batches by a factor:
    how many are made side by side, over seven.
    """
    model, mesh, cut = cut_and_sharded(world, sequence=4)
    peers = {degree: mesh.token_peers(4, degree) for degree in (4, 2, 1)}
    slots = {4: [0], 2: [1, 2], 1: [3, 1, 0, 2]}
    count = sum(len(micro) for micro in slots.values())
    for degree, micro in slots.items():
        cut.use(peers[degree])
        (micro_loss(model, micro[world.rank // degree]) * len(micro) / count).backward()
    alone = plain()
    for micro in slots.values():
        for index in micro:
            (micro_loss(alone, index) / count).backward()
    return gradients_apart(model, alone)


def two_forwards(world: World) -> float:
    """Micro-batches of different lengths go forward before the first goes backward and is recomputed."""
    model, _, _ = cut_and_sharded(world, sequence=2, tensor=2)
    sum(micro_loss(model, index) for index in (0, 1)).backward()
    alone = plain()
    sum(micro_loss(alone, index) for index in (0, 1)).backward()
    return gradients_apart(model, alone)


def offloaded(world: World) -> float:
    """Masters on the CPU are where they were, on a CPU."""
    model, _, _ = cut_and_sharded(world, cpu_offload=True, reduce_dtype="fp32", shard=2, sequence=2)
    micro_loss(model, 0).backward()
    alone = plain()
    micro_loss(alone, 0).backward()
    return gradients_apart(model, alone)
