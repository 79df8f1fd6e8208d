"""A run that fits its autoencoder: once, before its first step; its folder holds all that is needed from then on."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from longtake.contracts import UserError
from longtake.doctor.run import examine
from longtake.encode import autoencoder as module
from longtake.encode.autoencoder import fit_autoencoder
from longtake.encoders.autoencoder_config import AUTOENCODER_FILE, LinearConfig
from longtake.generate.run import generate_from
from longtake.generate.source import resolve_source
from longtake.parallel.world import start_world
from longtake.system.export import export_model
from longtake.train.run import Outcome
from longtake.train.run_file import read_run
from tests.forks import on_processes
from tests.train.runs import free_port, run_command, train_here, write_config

LINEAR = {"type": "linear", "channels": 24, "temporal": 8, "spatial": 8}
SMALL = ("--model.in_channels", "24", "--max-steps", "2", "--slots-per-step", "1")
BUCKETS = {"32px": {8: (1.0, 2)}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, clips: Path) -> tuple[Outcome, str, Path]:
    """The run, what it printed, its config file."""
    file = write_config(tmp_path_factory.mktemp("fitted"), clips, ae=LINEAR, bucket_config=BUCKETS)
    return *train_here(file, *SMALL), file


@pytest.fixture
def no_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise AssertionError("fitted again")

    monkeypatch.setattr(module, "principal_components", fail)


def generate(words: list, folder: Path) -> None:
    source = resolve_source(str(words[0]), [*words[1:], "--save-dir", str(folder), "--device", "cpu"])
    with start_world("cpu") as world:
        generate_from(source, world, lambda line: None)


def test_fit_is_printed_once_and_kept_in_the_folder(run: tuple[Outcome, str, Path]) -> None:
    outcome, printed, _ = run
    facts = LinearConfig(from_pretrained=str(outcome.folder / AUTOENCODER_FILE)).fitted()
    assert (facts["clips"], facts["held_out"]) == (28, 4)
    assert 10 < facts["worst_psnr"] <= facts["psnr"] < 60
    assert printed.count("autoencoder: 24 components fitted on 28 clips in") == 1
    assert str(outcome.folder / AUTOENCODER_FILE) not in (outcome.folder / "config.py").read_text()
    assert read_run(str(outcome.folder)).value.ae.fitted() == facts


def test_run_moved_elsewhere_trains_on_and_generates_without_a_fit(
    run: tuple[Outcome, str, Path], tmp_path: Path, no_fit: None
) -> None:
    moved = Path(shutil.copytree(run[0].folder, tmp_path / "moved" / "tiny"))
    weights = (moved / AUTOENCODER_FILE).read_bytes()
    outcome, printed = train_here(moved, "--max-steps", "3")
    assert (outcome.folder, outcome.clock.global_step) == (moved, 3)
    assert "components fitted" not in printed
    assert (moved / AUTOENCODER_FILE).read_bytes() == weights
    shutil.move(moved, tmp_path / "again")
    asked = ["--prompt", "a red circle", "--num-frames", "8", "--sampling-option.num-steps", "1"]
    generate([tmp_path / "again", *asked], tmp_path / "videos")
    assert len(list((tmp_path / "videos").rglob("*.mp4"))) == 1


def test_run_from_weights_of_another_takes_its_autoencoder(
    run: tuple[Outcome, str, Path], tmp_path: Path, no_fit: None
) -> None:
    outcome, _ = train_here(
        run[2],
        *SMALL,
        "--exp-name",
        "second",
        "--outputs",
        str(tmp_path),
        "--model.from-pretrained",
        str(run[0].folder),
    )
    assert (outcome.folder / AUTOENCODER_FILE).read_bytes() == (run[0].folder / AUTOENCODER_FILE).read_bytes()


def test_another_file_for_a_run_that_has_one_is_refused(run: tuple[Outcome, str, Path], tmp_path: Path) -> None:
    other = tmp_path / AUTOENCODER_FILE
    other.write_bytes((run[0].folder / AUTOENCODER_FILE).read_bytes() + b" ")
    with pytest.raises(UserError, match=f"ae.from_pretrained = '{other}': differs from"):
        train_here(run[0].folder, "--ae.from-pretrained", str(other), "--max-steps", "9")


def test_config_show_plan_and_doctor_show_the_ceiling(
    run: tuple[Outcome, str, Path], capsys: pytest.CaptureFixture, no_fit: None
) -> None:
    facts = read_run(str(run[0].folder)).value.ae.fitted()
    for words in (["config", "show", run[0].folder], ["plan", run[0].folder, "--gpu", "h200", "--gpus", "1"]):
        code, printed, _ = run_command(capsys, words)
        assert code == 0
        assert f"linear autoencoder: {facts['psnr']:.1f} dB PSNR" in printed
    examined = examine(str(run[0].folder), clips=4, quick=True)
    (round_trip,) = [one for one in examined.findings if one.name == "autoencoder round trip"]
    assert "dB" in round_trip.figure


def test_store_of_an_unfitted_run_brings_the_autoencoder_to_it(
    run: tuple[Outcome, str, Path], tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    code, printed, _ = run_command(capsys, ["data", "encode", run[2], "-o", store, *SMALL, "--dataset.views", "1"])
    assert code == 0
    assert "components fitted" in printed
    assert (store / AUTOENCODER_FILE).read_bytes() == (run[0].folder / AUTOENCODER_FILE).read_bytes()
    monkeypatch.setattr(module, "principal_components", None)  # not called
    stored = ("--dataset.views", "1", "--dataset.latents", str(store), "--outputs", str(tmp_path))
    outcome, _ = train_here(run[2], *SMALL, *stored)
    assert (outcome.folder / AUTOENCODER_FILE).is_file()


def test_exported_file_generates_where_the_run_still_is(run: tuple[Outcome, str, Path], tmp_path: Path) -> None:
    export_model(run[0].checkpoint, tmp_path / "model.safetensors")
    asked = ["--prompt", "a red circle", "--num-frames", "8", "--sampling-option.num-steps", "1"]
    generate([tmp_path / "model.safetensors", *asked], tmp_path)
    assert len(list(tmp_path.rglob("*.mp4"))) == 1


def _fit_on_a_rank(rank: int, port: int, file: Path, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    config = read_run(str(file), SMALL).value
    with start_world("cpu", timeout_seconds=120) as world:
        fit_autoencoder(config, config.dataset, config.bucket_rule, 0, folder, world, lambda line: None)


def test_two_ranks_fit_the_same_weights_as_one(run: tuple[Outcome, str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    on_processes(_fit_on_a_rank, 2, free_port(), run[2], tmp_path)
    one, two = load_file(run[0].folder / AUTOENCODER_FILE), load_file(tmp_path / AUTOENCODER_FILE)
    assert all(torch.equal(one[name], two[name]) for name in one | two)
