"""Runs that go on from a checkpoint of Open-Sora 1.2's own training, as ColossalAI's booster writes it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longtake.contracts import UserError
from longtake.models.build import build_denoiser
from longtake.models.config import ModelSection
from longtake.parallel.mesh import Mesh
from longtake.parallel.shard import local_tensor
from longtake.parallel.world import start_world
from longtake.system.build import build_system
from longtake.train.config import RunConfig
from longtake.train.folder import RunFolder, starting_point
from longtake.train.optimizer.quantise import block_size, quantise, table
from longtake.train.optimizer.update import WeightUpdate
from longtake.train.run_file import read_run
from longtake.train.start import Start, restore
from tests.families.test_opensora_v1_2 import run
from tests.models.initialised import initialise
from tests.train.conftest import clips  # a fixture
from tests.train.runs import exact, train_here

__all__ = ["clips", "run"]

UPDATES, EPOCH, STEP, REPLICAS = 37, 1, 3, 2
_FIRST = ("x_embedder", "t_embedder", "fps_embedder", "t_block", "y_embedder", "spatial", "temporal", "final_layer")


def write_sharded(folder: Path, stem: str, items: Mapping[Any, Any], facts: Mapping[str, Any]) -> None:
    """Two files of pickles and an index, as the booster calls them."""
    folder.mkdir()
    keys, table = list(items), {}
    for number, part in enumerate((keys[: len(keys) // 2], keys[len(keys) // 2 :]), 1):
        file = f"{stem}-{number:05d}.bin"
        torch.save({key: items[key] for key in part}, folder / file)
        table |= {str(key): file for key in part}
    index = {"metadata": {"total_size": 1, **facts}, "weight_map": table}
    (folder / f"{stem}.bin.index.json").write_text(json.dumps(index, indent=2))


def write_folder(folder: Path, config: ModelSection) -> Path:
    """The checkpoint; beside it `expected.pt`, weights, averages and moments by the names of the parameters."""
    folder.mkdir(parents=True)
    model = build_denoiser(config)
    initialise(model, 5)
    state = model.state_dict()
    ordered = sorted(state, key=lambda name: next(i for i, word in enumerate(_FIRST) if name.startswith(word)))
    weights = {name: state[name].to(torch.bfloat16) for name in ordered}
    generator = torch.Generator().manual_seed(0)

    def drawn(name: str) -> Tensor:
        return torch.randn(weights[name].shape, generator=generator)

    averages, freqs = {name: drawn(name) for name in weights}, {"rope.freqs": torch.ones(8)}
    trained = [name for name in weights if not name.startswith("y_embedder.")]
    moments = {name: {"exp_avg": drawn(name), "exp_avg_sq": drawn(name).square()} for name in trained}
    states = {number: {"step": UPDATES, **moments[name]} for number, name in enumerate(trained)}
    write_sharded(folder / "model", "pytorch_model", freqs | weights, {})
    write_sharded(folder / "optimizer", "pytorch_optim", states, {"param_groups": "pytorch_optim_group.bin"})
    group = {"lr": torch.tensor(1e-4), "betas": (0.9, 0.999), "eps": 1e-15, "weight_decay": 0.0}
    torch.save([{**group, "params": list(states)}], folder / "optimizer" / "pytorch_optim_group.bin")
    torch.save(freqs | averages, folder / "ema.pt")
    torch.save({"last_epoch": UPDATES, "base_lrs": [1e-4]}, folder / "lr_scheduler")
    done = {"seed": 42, "epoch": EPOCH, "last_micro_batch_access_index": STEP * REPLICAS}
    torch.save(done, folder / "sampler")
    place = {"epoch": EPOCH, "step": STEP, "global_step": UPDATES, "batch_size": None}
    (folder / "running_states.json").write_text(json.dumps(place))
    torch.save((weights, averages, moments), folder.parent / "expected.pt")
    return folder


@pytest.fixture(scope="module")
def left(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs") / f"epoch{EPOCH}-global_step{UPDATES}"
    return write_folder(folder, read_run(str(run)).value.model)


def begun(run: Path, left: Path, place: Path, *words: str) -> tuple[Start, dict[str, Tensor], float]:
    """The start of a run, what it holds by the names of a checkpoint, and the updates that Adam has counted."""
    words = (*words, "--load", str(left), "--model.from_pretrained", str(left))
    config: RunConfig = read_run(str(run), words).value
    with start_world("cpu") as world:
        system = build_system(config, Mesh.create(config.parallel, world), world)
        update = WeightUpdate(system.denoiser, config)
        with starting_point(RunFolder(place, None, continues=False), config, world) as found:
            start = restore(config, found, system, (update,))
        held = {name: local_tensor(value) for name, value in update.tensors().items()}
    return start, held, update.optimizer.updates.item()


def test_weights_averages_moments_and_counts_arrive_bit_by_bit(run: Path, left: Path, tmp_path: Path) -> None:
    start, held, updates = begun(run, left, tmp_path)
    weights, averages, moments = torch.load(left.parent / "expected.pt")
    expected = {f"model.{name}": weights[name].float() for name in moments}
    expected |= {f"ema.{name}": averages[name] for name in moments}
    expected |= {f"optim.{name}.{key}": value for name, both in moments.items() for key, value in both.items()}
    assert held.keys() == expected.keys()
    assert [name for name in held if not torch.equal(held[name], expected[name])] == []
    clock = start.state.clock
    assert (updates, clock.global_step, clock.pass_index, start.skip) == (UPDATES, UPDATES, EPOCH, STEP * REPLICAS // 4)
    assert "behind 1 steps of this run's own order" in start.notes[0]


def test_moments_in_a_byte_are_those_of_the_folder(run: Path, left: Path, tmp_path: Path) -> None:
    _, held, _ = begun(run, left, tmp_path, "--optim.states", "8bit")
    name = "spatial_blocks.0.mlp.fc1.weight"
    for key, whole in torch.load(left.parent / "expected.pt")[2][name].items():
        rows = whole.view(-1, block_size(tuple(whole.shape)))
        codes, scales = quantise(rows, table(key == "exp_avg", torch.device("cpu")))
        assert torch.equal(held[f"optim.{name}.{key}.codes"].view_as(codes), codes)
        assert torch.equal(held[f"optim.{name}.{key}.scales"].flatten(), scales)


def test_a_run_goes_on_and_resumes_as_if_it_had_not_stopped(run: Path, left: Path) -> None:
    words = ("--load", str(left))
    whole, said = train_here(run, *words, "--exp_name", "taken_whole", "--max_steps", str(UPDATES + 5))
    assert (whole.clock.global_step, whole.clock.pass_index) == (UPDATES + 5, EPOCH + 1)
    assert f"starts from {left}, step {UPDATES}" in said
    assert "its order of clips and its random numbers are not those of this run" in said
    assert said.count(f"weights: from {left / 'model'}") == 1
    cut, _ = train_here(run, *words, "--exp_name", "taken_cut", "--max_steps", str(UPDATES + 2))
    train_here(cut.folder, "--max_steps", str(UPDATES + 5))
    assert exact(cut.folder) == exact(whole.folder)
    again, said = train_here(
        run, *words, *("--start_epoch", "0", "--start_step", "0"), "--exp_name", "taken_from_0", "--max_steps", "39"
    )
    assert (again.clock.global_step, again.clock.pass_index) == (39, 0)
    assert "its order of clips" not in said


def test_what_the_folder_lacks_is_one_sentence(run: Path, left: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has moments of \d+ parameters, and the run trains \d+ .*freeze, train_only"):
        begun(run, left, tmp_path, "--train_only", "['temporal_blocks.*']")
    names = ("model", "ema.pt", "running_states.json", "sampler")
    (tmp_path / "part").mkdir()
    for name in names:
        (tmp_path / "part" / name).symlink_to(left / name)
    with pytest.raises(UserError, match=r"so the optimizer's state is not there; .*model\.from_pretrained"):
        begun(run, tmp_path / "part", tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "part" / "optimizer").mkdir()
    for file in (left / "optimizer").iterdir():
        (tmp_path / "part" / "optimizer" / file.name).symlink_to(file)
    (group := tmp_path / "part" / "optimizer" / "pytorch_optim_group.bin").unlink()
    group.write_bytes(pickle.dumps(_Touches(str(ran)), protocol=2))
    with pytest.raises(UserError, match="code in it is not run"):
        begun(run, tmp_path / "part", tmp_path)
    assert not ran.exists()


class _Touches:
    """What makes a file where its pickle is run."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")
