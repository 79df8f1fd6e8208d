"""Ten prepared faults, each of which has its own cause ranked first, and a healthy run with a clean bill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from longtake.doctor.run import Examination, examine
from longtake.models.mmdit import MMDiT
from longtake.system.encoders import Encoders
from longtake.train.run import train_run
from tests.doctor.runs import make_good, write_config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has learned its clips; 250 steps, some 12 s."""
    return make_good(tmp_path_factory.mktemp("good"))


def table_of(good: Path) -> Path:
    return good.parents[1] / "clips" / "clips.parquet"


def changed_table(good: Path, name: str, column: str, change: Callable[[list[Any]], list[Any]]) -> list[str]:
    """The flags of a run over the same clips, of which a column says another thing."""
    table = pq.read_table(table_of(good))
    place = table.column_names.index(column)
    table = table.set_column(place, column, pa.array(change(table.column(place).to_pylist())))
    path = table_of(good).with_name(f"{name}.parquet")
    pq.write_table(table, path)
    return ["--dataset.data-path", str(path)]


def train(good: Path, folder: Path, *words: str, **changes: Any) -> Path:
    """The folder of a short run over the clips."""
    folder.mkdir(exist_ok=True)
    config = write_config(folder, table_of(good), exp_name="ill", **changes)
    return train_run(str(config), words, Console(quiet=True)).folder


def first(found: Examination) -> str:
    """The cause that is ranked first, by its first words."""
    assert found.causes, "a clean bill"
    return found.causes[0].cause


def test_a_healthy_run_gets_a_clean_bill(good: Path) -> None:
    found = examine(str(good))
    assert [(one.cause, one.figure) for one in found.causes] == []
    verdicts = {one.name: one.verdict for one in found.findings}
    assert {name for name, verdict in verdicts.items() if verdict == "left out"} == {
        "conditions used",
        "known frames used",
    }


def test_a_healthy_config_from_good_weights_gets_a_clean_bill(good: Path, tmp_path: Path) -> None:
    words = ["--model.from-pretrained", str(good)]
    config = write_config(tmp_path, table_of(good), lora={"rank": 4})
    assert [(one.cause, one.figure) for one in examine(str(config), words).causes] == []


@pytest.mark.parametrize("factor", [0.25, 4])
def test_a_wrong_scale_of_latents(good: Path, factor: float) -> None:
    found = examine(str(good), ["--ae.scaling_factor", str(factor)], quick=True)
    assert first(found).startswith("wrong scaling")
    written = float(found.causes[0].advice.split("ae.scaling_factor = ")[1].split()[0])
    assert 2 / 3 <= written <= 1.5  # near that of the weights, 1


@pytest.mark.parametrize(("dim", "words"), [(1, "colours"), (2, "frames")])
def test_swapped_colours_and_frames(good: Path, monkeypatch: pytest.MonkeyPatch, dim: int, words: str) -> None:
    posterior = Encoders.posterior
    monkeypatch.setattr(Encoders, "posterior", lambda self, video: posterior(self, video.flip(dim)))
    found = first(examine(str(good), quick=True))
    assert found.startswith("swapped")
    assert words in found


@pytest.mark.parametrize("predict", ["velocity", "noise"])
def test_one_prediction_type_in_place_of_another(good: Path, predict: str) -> None:
    found = first(examine(str(good), ["--objective.predict", predict], quick=True))
    assert found == "wrong prediction type: the model predicts the clean latents"


def test_missing_weights(good: Path, tmp_path: Path) -> None:
    from longtake.system.export import export_model

    whole = tmp_path / "whole.safetensors"
    export_model(str(good), whole)
    kept = {name: tensor for name, tensor in load_file(whole).items() if "single_blocks.1" not in name}
    save_file(kept, tmp_path / "part.safetensors")
    config = write_config(tmp_path, table_of(good))
    words = ["--model.from-pretrained", str(tmp_path / "part.safetensors"), "--model.strict-load", "False"]
    assert first(examine(str(config), words, quick=True)).startswith("missing weights")


@pytest.mark.parametrize("text", ["", "a clip"])
def test_dead_captions(good: Path, text: str) -> None:
    words = changed_table(good, "dead", "text", lambda texts: [text] * len(texts))
    assert first(examine(str(good), words, quick=True)).startswith("dead captions")


def test_timesteps_in_bf16(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = MMDiT.forward
    monkeypatch.setattr(MMDiT, "forward", lambda self, x, t, given: forward(self, x, t.bfloat16().float(), given))
    assert first(examine(str(good), quick=True)) == "timesteps are rounded to bfloat16"


def test_a_wrong_frame_rate(good: Path) -> None:
    words = changed_table(good, "rate", "fps", lambda rates: [3 * rate for rate in rates])
    assert first(examine(str(good), words, quick=True)).startswith("wrong frame rate")


@pytest.mark.parametrize(("rate", "words"), [("0.0", "frozen adapters"), ("1e-9", "adapters that hardly move")])
def test_adapters_that_do_not_train(good: Path, tmp_path: Path, rate: str, words: str) -> None:
    changes = {"lora": {"rank": 4}, "max_steps": 3, "ema_decay": None}
    flags = ["--model.from-pretrained", str(good), "--optim.schedule", f"((0, {rate}),)", "--optim.lr", "None"]
    flags += ["--decay-fraction", "0", "--warmup-steps", "0"]
    assert first(examine(str(train(good, tmp_path, *flags, **changes)), quick=True)).startswith(words)


def test_captions_of_other_clips(good: Path) -> None:
    words = changed_table(good, "shuffled", "text", sorted)
    assert first(examine(str(good), words, quick=True)).startswith("shuffled captions")


def test_too_high_a_rate_of_a_run(good: Path, tmp_path: Path) -> None:
    words = ["--model.from-pretrained", str(good), "--optim.lr", "0.1", "--max-steps", "60", "--grad-clip", "0"]
    assert first(examine(str(train(good, tmp_path, *words)), quick=True)).startswith("too high a rate")


def test_too_high_a_rate_of_a_config(good: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, table_of(good))
    found = examine(str(config), ["--optim.lr", "0.3"])
    assert first(found).startswith("too high a rate")
    # at a tenth the last bits of a gradient decide whether the clip is learned; at a hundredth it is
    assert {"write optim.lr = 0.03", "write optim.lr = 0.003"} & {one.advice for one in found.causes}
