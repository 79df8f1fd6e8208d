"""Training with known frames: through the loop, from files and from a latent store, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from longtake.contracts import Batch, Bucket, Conditions, LatentShape, UserError
from longtake.diffusion import ConditionConfig
from longtake.parallel import Mesh, start_world
from longtake.system import System, add_known_frames, build_system, kinds_apart, windows_apart
from longtake.train.folder import read_run
from tests.train.runs import exact, train_here

EMBED = ("--model.cond_embed", "True")
HEAD = (*EMBED, "--condition_config.t2v", "1", "--condition_config.i2v_head", "3")


def made_batch(shape: tuple[int, int, int], draws: list[float]) -> Batch:
    count = len(draws)
    video = torch.randint(0, 256, (count, 3, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ones, size = torch.ones(count), torch.zeros(count, 2)
    bucket = Bucket("32px", shape[0], "1:1", shape, count)
    uniforms = np.array(draws, np.float32)
    return Batch(bucket, video, ("",) * count, ones, size, np.zeros(count, np.uint64), ones, {}, kind_draws=uniforms)


def system_of(config: Path, *overrides: str) -> System:
    run = read_run(str(config), overrides).value
    with start_world("cpu") as world:
        return build_system(run, Mesh.create(run.parallel, world), world)


def visual_of(
    system: System, batch: Batch, kinds: ConditionConfig | None, weights: torch.Tensor
) -> torch.Tensor | None:
    return add_known_frames(system, Conditions(), batch, system.encode(batch), weights, kinds).visual


def test_a_sample_knows_its_first_frame_as_it_is_encoded_alone(config: Path) -> None:
    system = system_of(config, *HEAD)
    batch = made_batch((16, 32, 32), [0.1, 0.9])
    visual = visual_of(system, batch, ConditionConfig(t2v=1, i2v_head=3), torch.ones(2))
    assert not visual[0].any(), "0.1 falls on t2v"
    alone = system.encode(replace(batch, video=batch.video[1:, :, :1]))
    assert torch.equal(visual[1, 1:, :1], alone[0])
    assert visual[1, 0, :1].eq(1).all()
    assert not visual[1, :, 1:].any()


def test_fillers_and_models_without_an_entrance_know_nothing(config: Path) -> None:
    batch = made_batch((16, 32, 32), [0.9, 0.9])
    weights = torch.tensor([0.0, 1.0])
    visual = visual_of(system_of(config, *EMBED), batch, ConditionConfig(i2v_tail=1), weights)
    assert not visual[0].any()
    assert visual[1, 0, 1].eq(1).all()
    assert not visual_of(system_of(config, *EMBED), batch, None, weights).any()
    assert visual_of(system_of(config), batch, None, weights) is None


def test_a_random_posterior_is_drawn_with_the_numbers_of_the_known_places(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = system_of(config, *EMBED)
    batch = made_batch((16, 32, 32), [0.5])
    batch = replace(batch, draws={"posterior": torch.randn(1, 1536, 2, 4, 4)})
    plain = type(system.encoders).moments
    monkeypatch.setattr(
        type(system.encoders), "moments", lambda self, video: (m := plain(self, video)) | {"std": 0 * m["mean"] + 2}
    )
    visual = visual_of(system, batch, ConditionConfig(i2v_tail=1), torch.ones(1))
    mean = plain(system.encoders, batch.video[:, :, -1:])["mean"]
    assert torch.equal(visual[:, 1:, 1:], mean + 2 * batch.draws["posterior"][:, :, 1:])


def test_runs_with_known_frames_repeat_and_differ_from_those_without(config: Path) -> None:
    steps = ("--max_steps", "4")
    first, again, blank, left_out = (
        exact(train_here(config, "--exp_name", name, *steps, *words)[0].folder)
        for name, words in (
            ("first", HEAD),
            ("again", (*HEAD, "--num_workers", "2")),
            ("blank", EMBED),
            ("left_out", (*HEAD, "--no_i2v_ref_loss", "True")),
        )
    )
    assert first == again
    assert first != blank
    assert first != left_out


def test_a_stopped_run_with_known_frames_goes_on_as_if_it_had_not(config: Path) -> None:
    whole, _ = train_here(config, "--exp_name", "whole", "--max_steps", "5", *HEAD)
    cut, _ = train_here(config, "--exp_name", "cut", "--max_steps", "2", *HEAD)
    train_here(cut.folder, "--max_steps", "5")
    assert exact(cut.folder) == exact(whole.folder)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("--condition_config.i2v_head", "1"), "write model.cond_embed = True or leave condition_config out"),
        ((*EMBED, "--no_i2v_ref_loss", "True"), "no_i2v_ref_loss = True: no frames are known"),
        ((*EMBED, "--condition_config.i2v_haed", "1"), "did you mean condition_config.i2v_head?"),
        ((*EMBED, "--condition_config.t2v", "0"), "every weight is 0"),
        ((*EMBED, "--condition_config.t2v", "-1"), "condition_config.t2v"),
    ],
    ids=str,
)
def test_mistakes_in_the_conditions_are_one_sentence(config: Path, overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError) as refused:
        read_run(str(config), overrides)
    assert said in str(refused.value)


def test_a_latent_store_needs_the_windows_that_are_encoded_apart_and_fit_into_a_clip() -> None:
    blocks = LatentShape(4, 4, 8, causal=False)
    causal = replace(blocks, causal=True)
    kinds = ConditionConfig(t2v=1, i2v_head=1, i2v_loop=1, v2v_tail=1)
    assert kinds_apart(None, blocks) == ()
    assert kinds_apart(kinds, blocks) == ("i2v_head", "i2v_loop")
    assert kinds_apart(kinds, causal) == ("i2v_head", "i2v_loop", "v2v_tail")
    found = {length: windows_apart(kinds_apart(kinds, causal), causal, length) for length in (1, 5, 37)}
    assert {length: list(windows) for length, windows in found.items()} == {
        1: [],
        5: ["head1", "tail1"],
        37: ["head1", "tail1", "tail9"],
    }
    assert found[37]["tail9"].pixels == range(4, 37)
