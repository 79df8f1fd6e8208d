"""The mathematics and the judgements of the checks, without a model; and what the command says and how it ends."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longtake.diffusion.config import Flow1000Config, FlowConfig, NoisePredictionConfig, VPredictionConfig
from longtake.diffusion.objective import build_objective
from longtake.doctor.case import open_case
from longtake.doctor.finding import Finding, ranked
from longtake.doctor.measures import Line, errors, in_one_cell
from longtake.doctor.model import could_be_read, judge_text
from longtake.doctor.run import alone, examine
from longtake.doctor.training import against_start, averaged, drawn, history, judge_overfit, sampled
from longtake.models.initial import initial_values
from longtake.models.ttt_video import TTTVideo
from longtake.parallel.mesh import Mesh
from longtake.parallel.world import start_world
from longtake.presets import find_preset
from longtake.train.run_file import read_run
from longtake.weights.conversion import state_shapes
from longtake.weights.format import WeightLayout
from longtake.weights.model import ModelWeights
from longtake.weights.ttt_video import FORMAT
from tests.models.golden_ttt_video import tiny_config
from tests.weights.saved import save_model

SECTIONS = {
    "velocity": FlowConfig(predict="velocity", shift=None),
    "clean": FlowConfig(predict="clean", shift=None),
    "noise": FlowConfig(predict="noise", shift=None),
    "flow_1000": Flow1000Config(),
    "v": VPredictionConfig(),
    "noise prediction": NoisePredictionConfig(),
}


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("level", [0.2, 0.6])
def test_clean_latents_come_back_from_every_objectives_target(name: str, level: float) -> None:
    objective = build_objective(SECTIONS[name], 1, frozenset())
    clean, noise = torch.randn(2, 1, 4, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    noised = objective.noise(clean, {"noise": noise}, level=level)
    line = Line.at(objective, float(noised.t[0]))
    torch.testing.assert_close(line.clean(noised.target, noised.x), clean, atol=1e-3, rtol=0)
    for what, other in line.predictions().items():  # and from no other reading of it
        assert errors(other.clean(noised.target, noised.x), clean).min() > 1e-3, what


def test_the_guess_is_better_than_the_mean_and_than_x_itself() -> None:
    clean = 0.3 * torch.randn(8, 4, 3, 5, 5, generator=torch.Generator().manual_seed(1)) + 1
    x = 0.5 * clean + 0.5 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(2))
    guess = errors(Line(0.5, 0.5, -1, 1).guess(clean, x), clean).mean()
    assert guess < errors(torch.full_like(clean, 1.0), clean).mean() < errors(2 * x, clean).mean()


@pytest.mark.parametrize(("t", "scale"), [(0.75, 1.0), (0.75, 1000.0), (750.0, 1.0)])
def test_two_times_of_one_cell_differ_until_they_are_rounded(t: float, scale: float) -> None:
    one, same, other = in_one_cell(t, scale)
    assert one < same < other
    rounded = [float(torch.tensor(time * scale).bfloat16()) for time in (one, same, other)]
    assert rounded[0] == rounded[1] < rounded[2]


@pytest.mark.parametrize(
    ("excess", "moved", "good", "cause"),
    [
        ([0.1, 0.2, 0.05, -0.01], 0.3, True, ""),
        ([0.0, 0.0, 0.0, 0.0], 0.0, True, "dead captions"),
        ([0.1, -0.2, -0.05, -0.1], 0.3, True, "shuffled captions"),
        ([*[0.1] * 5, *[-0.1] * 3], 0.3, True, "shuffled captions, or not learned yet"),
        ([0.1, -0.2, -0.05, -0.1], 0.3, False, "captions make no difference"),
        ([1e-3, -1e-3, 2e-4, -1e-4], 0.01, True, "captions make no difference"),
    ],
)
def test_captions_are_judged_by_who_is_better(excess: list[float], moved: float, good: bool, cause: str) -> None:
    found = judge_text(torch.tensor(excess), moved, 0.1, good)
    assert found.cause.startswith(cause)
    assert (found.verdict == "ok") == (not cause)


@pytest.mark.parametrize(
    ("tried", "cause"),
    [
        ({1.0: 0.4}, ""),
        ({1.0: math.inf, 0.1: 5.0, 0.01: 0.6}, "too high a rate"),
        ({1.0: 40.0, 0.1: 5.0, 0.01: 1.1, 10.0: math.inf}, "too high a rate"),
        ({1.0: 1.0, 0.1: 1.0, 0.01: 1.0, 10.0: 1.0}, "the model does not learn: frozen"),
        ({1.0: 0.97, 0.1: 0.99, 0.01: 1.0, 10.0: 0.5}, "too low a rate"),
    ],
)
def test_one_clip_that_is_not_learned_says_which_rate_would_do(tried: dict[float, float], cause: str) -> None:
    assert judge_overfit(tried, 1e-3, 200).cause.startswith(cause)


def lines(losses: list[float], **more: Any) -> list[dict[str, Any]]:
    return [{"loss": loss + 0.01 * (-1) ** step, "lr": 1e-3, **more} for step, loss in enumerate(losses)]


def test_a_loss_that_rises_speaks_for_too_high_a_rate_and_one_that_falls_or_stays_for_nothing() -> None:
    falling = [1 / (1 + step / 50) for step in range(200)]
    assert history(lines(falling)).verdict == "ok"
    assert history(lines([0.5] * 200)).verdict == "ok"
    risen, blown = history(lines(falling + [0.4] * 60)), history(lines([*falling, *[2.0] * 60]))
    assert risen.cause == blown.cause == "too high a rate: the loss has risen"
    assert blown.weight > risen.weight
    assert history(lines([*falling, 1e9, *[1.0, 20.0] * 30])).cause == risen.cause
    assert history(lines(falling, skipped=True)).verdict == "fault"
    assert history(lines(falling[:20])).verdict == "left out"


def test_a_mixer_that_starts_new_by_rule_is_no_missing_weight(tmp_path: Path) -> None:
    bare, config = tiny_config(mixer="none"), tiny_config().model_copy(update={"from_pretrained": str(tmp_path / "w")})
    shapes = state_shapes(bare)
    save_model(FORMAT, {k: torch.randn(v) for k, v in shapes.items()}, bare, tmp_path / "w", WeightLayout("diffusers"))
    model = TTTVideo(config)
    first = {name: initial_values(model, name, 3)[name] for name in model.state_dict()}
    model.load_state_dict(first | dict(ModelWeights(tmp_path / "w", config, FORMAT)))
    run = SimpleNamespace(model=config, lora=None, seed=3)
    case: Any = SimpleNamespace(system=SimpleNamespace(denoiser=model), config=run)
    assert drawn(case) is None
    model.load_state_dict(first)
    assert drawn(case).cause.startswith("missing weights")


def test_a_place_among_tokens_is_not_missed_where_there_is_one_token(clips: Path) -> None:
    words = ["--dataset.data_path", str(clips), "--device", "cpu", "--bucket_config", "{'8x8': {4: (1.0, 4)}}"]
    config = alone(read_run(str(find_preset("demo/opensora_v1_2")), words).value)
    with start_world("cpu") as world:
        case = open_case(config, world, Mesh.create(config.parallel, world), 4, trained=True)
        before = sampled(case.system.denoiser)
        assert (could_be_read(case, "fps", 0.5), could_be_read(case, "size", 0.5)) == (True, False)
        assert all(torch.equal(before[name], value) for name, value in sampled(case.system.denoiser).items())


def test_an_average_that_is_behind_its_weights_is_named() -> None:
    assert averaged([0.1], [0.09], 0.99, 100).verdict == "ok"
    assert averaged([0.1], [0.5], 0.9999, 100).cause == "the average is behind the weights"


def test_a_model_worse_than_its_base_is_its_rates_fault_whatever_else_it_shows() -> None:
    rate = against_start([0.04], [0.09], pretrained=True)
    text = judge_text(torch.tensor([0.1, -0.1]), 0.4, 0.2, good=True)
    late = averaged([0.09], [0.5], 0.99, 60, spoiled=True)
    assert text.cause.startswith("shuffled captions")
    assert next(iter(ranked([text, late, rate]))) is rate
    assert next(iter(ranked([text, against_start([0.04], [0.05], pretrained=True)]))) is text  # both saw the captions
    assert next(iter(ranked([text, against_start([0.04], [0.09], pretrained=False)]))) is text


def test_faults_come_before_suspicions_and_the_heavier_first() -> None:
    found = [Finding("a", "", "suspect", weight=0.9), Finding("b", "", "fault", weight=0.2), Finding("c", "")]
    found.append(Finding("d", "", "fault", weight=0.6))
    assert [one.name for one in ranked(found)] == ["d", "b", "a"]


def test_a_healthy_config_ends_with_status_0_and_its_findings_as_data(longtake: Any, config: Path, tmp_path: Path):
    code, out, err = longtake("doctor", config, "--clips", "3", "--json", tmp_path / "found.json")
    assert (code, err) == (0, "")
    assert "a clean bill" in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["clean"]
    assert {one["name"]: one["verdict"] for one in found["findings"]}["one clip learned"] == "ok"


def test_a_run_without_a_checkpoint_gets_no_word_on_what_its_model_makes(longtake: Any, config: Path, tmp_path: Path):
    shutil.copy(config, tmp_path / "config.py")
    code, out, _ = longtake("doctor", tmp_path, "--clips", "3", "--quick")
    assert code == 0
    assert "no complete checkpoint in" in out
    assert "what it makes of clips can be looked at once it has trained" in " ".join(out.split())


def test_a_fault_ends_with_status_1_and_its_cause(longtake: Any, config: Path) -> None:
    code, out, _ = longtake("doctor", config, "--quick", "--ae.scaling_factor", "40")
    assert code == 1
    assert "1. wrong scaling of latents (scale and shift of latents): write the scale that the weights" in out


def test_mistakes_are_one_sentence(mistake: Any, config: Path, tmp_path: Path) -> None:
    assert "there is no such file, folder or preset" in mistake("doctor", tmp_path / "nothing")
    assert "no config.py in it" in mistake("doctor", tmp_path)
    assert "gone.parquet" in mistake("doctor", config, "--dataset.data-path", tmp_path / "gone.parquet")
    gone = tmp_path / "gone.safetensors"
    assert str(gone) in mistake("doctor", config, "--model.from-pretrained", gone)


@pytest.mark.parametrize(
    "words",
    [
        ("demo/shapes",),
        ("demo/cogvideox_fun",),
        ("demo/ttt_video", "--stage", "scene"),
        ("opensora_v1_2/stage1", "--tiny", "--bucket-config", "{'_delete_': True, '144p': {4: (1.0, 2)}}"),
    ],
    ids=lambda words: words[0],
)
def test_healthy_configs_of_every_family_get_a_clean_bill(clips: Path, words: tuple[str, ...]) -> None:
    flags = ["--dataset.data-path", str(clips), "--device", "cpu", "--dtype", "fp32"]
    found = examine(str(find_preset(words[0])), [*words[1:], *flags], clips=4, quick=True)
    assert [(one.cause, one.figure) for one in found.causes] == []
    assert {one.name: one.verdict for one in found.findings}["autoencoder round trip"] == "ok"
