"""Saved on 1, 2 and 4 processes, loaded on 1, 2 and 4: one launch of four processes plays all the worlds in turn."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from longtake.checkpoint.folder import read_state, verify
from longtake.checkpoint.frozen import keep_frozen, restore_frozen
from longtake.checkpoint.load import load_tensors
from longtake.checkpoint.runs import list_checkpoints
from longtake.checkpoint.save import save_checkpoint
from longtake.checkpoint.state import Frozen
from longtake.contracts import UserError
from tests.forks import on_processes

WORLDS = (1, 2, 4)
SAVED_BY = ("1 rank", "2 ranks", "4 ranks", "4 ranks in 2 x 2")


def build_model() -> nn.Module:
    """A few shapes that shard unevenly: 3 rows on 4 ranks leave one rank without any."""
    return nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 10, bias=False), nn.LayerNorm(5))


def full_values(seed: int = 0) -> dict[str, Tensor]:
    """The state after one AdamW step of an unsharded model: what every load must give back, bit by bit."""
    model = build_model()
    values = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=values)
        parameter.grad = torch.randn(parameter.shape, generator=values)
    return take_step(model)


def take_step(model: nn.Module) -> dict[str, Tensor]:
    """One optimizer step; the tensors by the names they have in a checkpoint, with a bf16 copy as the EMA."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer.step()
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter
        tensors[f"ema.{name}"] = parameter.detach().to(torch.bfloat16)
        tensors |= {f"optim.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return tensors


def sharded_values(seed: int = 0) -> dict[str, Tensor]:
    """The same state made by this world under `fully_shard`; another seed gives tensors of the same shape to fill."""
    _, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if world == 1:
        return full_values(seed)
    model = build_model()
    mesh = init_device_mesh("cpu", (world,))
    values = torch.Generator().manual_seed(seed)
    fulls = {
        name: (torch.randn(p.shape, generator=values), torch.randn(p.shape, generator=values))
        for name, p in model.named_parameters()
    }
    fully_shard(model, mesh=mesh)
    for name, parameter in model.named_parameters():
        value, grad = (distribute_tensor(full, mesh, parameter.placements) for full in fulls[name])
        parameter.data.copy_(value)
        parameter.grad = grad
    return take_step(model)


def values_on_two_axes(seed: int = 0) -> dict[str, Tensor]:
    """The state on a 2 x 2 mesh: replicated by sharded, sharded on two dims, sharded twice on one, or plain."""
    mesh = init_device_mesh("cpu", (2, 2))
    layouts = [(Replicate(), Shard(0)), (Shard(0), Shard(1)), (Shard(0), Shard(0)), (Shard(1), Replicate())]
    tensors: dict[str, Tensor] = {}
    for index, (name, full) in enumerate(full_values(seed).items()):
        layout = layouts[index % len(layouts)] if full.ndim == 2 else (Replicate(), Shard(0))
        tensors[name] = distribute_tensor(full.detach(), mesh, layout) if full.ndim else full
    return tensors


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def loads_exactly(folder: Path, build: Callable[[int], dict[str, Tensor]] = sharded_values) -> bool:
    into = build(1)
    before = {name: tensor.data_ptr() for name, tensor in into.items() if not isinstance(tensor, DTensor)}
    load_tensors(folder, into)
    in_place = all(into[name].data_ptr() == pointer for name, pointer in before.items())
    expected = full_values()
    return in_place and all(torch.equal(whole(into[name]), expected[name]) for name in expected)


def frozen_values(cut: bool = True) -> dict[str, Tensor]:
    """Parameters that are not trained, cut over the world (7 rows: unevenly) or whole."""
    whole = {"model.a": torch.arange(21.0).reshape(7, 3), "model.b": torch.arange(4).bfloat16()}
    if not cut:
        return whole
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}


def keep(work: Path) -> None:
    """Keeps the frozen parameters of two runs of this world, of which one has a file of its own."""
    for name, source in (("2 ranks", None), ("with a file", "flux.safetensors")):
        facts = keep_frozen(work / name, frozen_values(), source)
        (work / f"{name}.json").write_text(json.dumps(asdict(facts)))


def restores(work: Path, cut: bool = True) -> bool:
    """Whether this world fills them bit by bit, finds the same digest, and refuses others."""
    into = {name: torch.zeros_like(tensor) for name, tensor in frozen_values(cut).items()}
    restore_frozen(folder_of(work, "2 ranks"), into, Frozen(**json.loads((work / "2 ranks.json").read_text())))
    facts = Frozen(**json.loads((work / "with a file.json").read_text()))
    restore_frozen(folder_of(work, "with a file"), into, facts)
    equal = all(torch.equal(whole(into[name]), tensor) for name, tensor in frozen_values(cut=False).items())
    into["model.a"] = into["model.a"] + 1
    refused = sentence_of(lambda: restore_frozen(folder_of(work, "with a file"), into, facts))
    return equal and "was trained on frozen weights of digest" in refused


def folder_of(work: Path, saved_by: str) -> Path:
    return work / saved_by / "epoch1-global_step7"


def save_as(work: Path, saved_by: str, tensors: dict[str, Tensor]) -> None:
    save_checkpoint(work / saved_by, 1, 7, tensors, {"saved by": saved_by})


def sentence_of(action: Callable[[], object]) -> str:
    try:
        action()
    except UserError as error:
        return str(error)
    return "no error"


def fail_on_one_rank(work: Path, rank: int) -> dict[str, str]:
    """The disk is full for rank 3 only; then rank 2 alone holds other tensors than were saved."""
    if rank == 3:
        true_fsync = os.fsync

        def full_disk(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.fsync = full_disk
    full = sentence_of(lambda: save_checkpoint(work / "4 ranks", 1, 8, sharded_values(), {}))
    if rank == 3:
        os.fsync = true_fsync
    into = sharded_values()
    if rank == 2:
        into["model.0.weight"] = torch.zeros(2, 2)
    misfit = sentence_of(lambda: load_tensors(folder_of(work, "4 ranks"), into))
    broken = work / "broken" / "epoch1-global_step7"
    save_checkpoint(broken.parent, 1, 7, sharded_values(), {})
    if rank == 0:
        shard = sorted(broken.glob("shard-00002-*"))[0]
        shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    dist.barrier()
    damaged = sentence_of(lambda: load_tensors(broken, sharded_values()))
    return {"full": full, "misfit": misfit, "damaged": damaged}


def play(rank: int, work: Path) -> None:
    """One process of the launch: the worlds 1, 2, 4, 2 one after another, facts into `facts<rank>.json`."""
    torch.set_num_threads(1)
    facts: dict[str, object] = {}
    if rank == 0:
        save_as(work, "1 rank", sharded_values())

    def enter(phase: int, world: int) -> bool:
        """Join a world; ranks outside it wait for the next phase in the rendezvous of all four."""
        if rank < world:
            dist.init_process_group(
                "gloo", f"file://{work}/store{phase}", timedelta(seconds=120), world_size=world, rank=rank
            )
        return rank < world

    if enter(0, 2):
        facts["1 rank -> 2"] = loads_exactly(folder_of(work, "1 rank"))
        save_as(work, "2 ranks", sharded_values())
        keep(work)
        dist.destroy_process_group()
    enter(1, 4)
    save_as(work, "4 ranks", sharded_values())
    save_as(work, "4 ranks in 2 x 2", values_on_two_axes())
    for saved_by in SAVED_BY:
        facts[f"{saved_by} -> 4"] = loads_exactly(folder_of(work, saved_by))
    facts["4 ranks -> 4 in 2 x 2"] = loads_exactly(folder_of(work, "4 ranks"), values_on_two_axes)
    facts["frozen"] = restores(work)
    facts |= fail_on_one_rank(work, rank)
    dist.barrier()
    dist.destroy_process_group()
    if enter(2, 2):
        for saved_by in SAVED_BY[1:]:
            facts[f"{saved_by} -> 2"] = loads_exactly(folder_of(work, saved_by))
        dist.destroy_process_group()
    (work / f"facts{rank}.json").write_text(json.dumps(facts))


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("ranks")
    on_processes(play, 4, work)
    return work


@pytest.fixture(scope="module")
def facts(launch: Path) -> list[dict[str, object]]:
    return [json.loads((launch / f"facts{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("saved_by", SAVED_BY)
def test_a_checkpoint_loads_bit_by_bit_at_any_number_of_ranks(saved_by: str, world: int, launch, facts):
    if world == 1:
        assert loads_exactly(folder_of(launch, saved_by))
    else:
        assert [facts[rank][f"{saved_by} -> {world}"] for rank in range(world)] == [True] * world


def test_a_checkpoint_loads_onto_a_mesh_of_two_axes(facts):
    assert [fact["4 ranks -> 4 in 2 x 2"] for fact in facts] == [True] * 4


def test_what_two_ranks_did_not_train_is_recognised_and_comes_back_on_one_and_four(launch, facts):
    assert [fact["frozen"] for fact in facts] == [True] * 4
    assert restores(launch, cut=False)


@pytest.mark.parametrize("saved_by", SAVED_BY)
def test_what_ranks_wrote_is_whole_and_its_state_comes_back(saved_by: str, launch):
    assert verify(folder_of(launch, saved_by)) == []
    assert read_state(folder_of(launch, saved_by)) == {"saved by": saved_by}


def test_each_rank_writes_its_own_shards_and_a_replica_is_written_once(launch):
    sharded, replicated = (folder_of(launch, saved_by) for saved_by in SAVED_BY[2:])
    assert {path.name[:11] for path in sharded.glob("*.safetensors")} == {f"shard-0000{rank}" for rank in range(1, 5)}
    tensor_bytes = sum(tensor.nbytes for tensor in full_values().values())
    for folder in (sharded, replicated):
        headers = sum(8 + int.from_bytes(p.read_bytes()[:8], "little") for p in folder.glob("*.safetensors"))
        assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) - headers == tensor_bytes


def test_a_full_disk_on_one_rank_ends_the_save_on_all_and_leaves_the_last_checkpoint(launch, facts):
    assert all("the disk is full" in fact["full"] and "keep_n_latest" in fact["full"] for fact in facts)
    assert [info.path.name for info in list_checkpoints(launch / "4 ranks")] == ["epoch1-global_step7"]
    assert sorted(path.name for path in (launch / "4 ranks").iterdir()) == ["epoch1-global_step7"]


def test_a_misfit_on_one_rank_is_told_on_all(facts):
    assert all("model.0.weight is (3, 6), the run has (2, 2)" in fact["misfit"] for fact in facts)


def test_a_flipped_byte_is_told_on_all_ranks(facts):
    assert all("is damaged: shard-00002-" in fact["damaged"] and "checksum" in fact["damaged"] for fact in facts)
