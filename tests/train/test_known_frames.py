"""Training with known frames: through the loop, from files and from a latent store, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from longtake.contracts import Batch, Bucket, LatentShape, UserError
from longtake.diffusion.flow import RectifiedFlow
from longtake.diffusion.known import keep_known
from longtake.diffusion.windows import EndWindows
from longtake.parallel.mesh import Mesh
from longtake.parallel.world import start_world
from longtake.system.build import System, build_system
from longtake.system.examples import KnownDraw, kinds_apart, known_of_batch, windows_apart
from longtake.train.loop import Trainer
from longtake.train.run_file import read_run
from tests.train.runs import exact, metrics, train_here, write_config

EMBED = ("--model.cond_embed", "True")
HEAD = (*EMBED, "--condition_config.t2v", "1", "--condition_config.i2v_head", "3")


def made_batch(shape: tuple[int, int, int], draws: list[float]) -> Batch:
    count = len(draws)
    video = torch.randint(0, 256, (count, 3, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ones, size = torch.ones(count), torch.zeros(count, 2)
    bucket = Bucket("32px", shape[0], "1:1", shape, count)
    uniforms = np.array(draws, np.float32)
    return Batch(
        bucket, video, ("",) * count, ones, size, np.zeros(count, np.uint64), ones, {}, choices={"mask": uniforms}
    )


def system_of(config: Path, *overrides: str) -> System:
    run = read_run(str(config), overrides).value
    with start_world("cpu") as world:
        return build_system(run, Mesh.create(run.parallel, world), world)


def visual_of(system: System, batch: Batch, kinds: dict[str, float] | None, weights: torch.Tensor) -> torch.Tensor:
    draw = KnownDraw.create(system.law, kinds, system.latent)
    drawn = {} if draw is None else draw(batch.choices, batch.bucket.shape)
    known = keep_known(known_of_batch(system, replace(batch, known=drawn), system.encode(batch)), weights)
    return system.law.conditions(known)["visual"]


def test_a_sample_knows_its_first_frame_as_it_is_encoded_alone(config: Path) -> None:
    system = system_of(config, *HEAD)
    batch = made_batch((16, 32, 32), [0.1, 0.9])
    visual = visual_of(system, batch, {"t2v": 1, "i2v_head": 3}, torch.ones(2))
    assert not visual[0].any(), "0.1 falls on t2v"
    alone = system.encode(replace(batch, video=batch.video[1:, :, :1]))
    assert torch.equal(visual[1, 1:, :1], alone[0])
    assert visual[1, 0, :1].eq(1).all()
    assert not visual[1, :, 1:].any()


def test_fillers_and_models_without_an_entrance_know_nothing(config: Path) -> None:
    batch = made_batch((16, 32, 32), [0.9, 0.9])
    weights = torch.tensor([0.0, 1.0])
    visual = visual_of(system_of(config, *EMBED), batch, {"i2v_tail": 1}, weights)
    assert not visual[0].any()
    assert visual[1, 0, 1].eq(1).all()
    assert not visual_of(system_of(config, *EMBED), batch, None, weights).any()
    assert system_of(config).law is None


def test_a_random_posterior_is_drawn_with_the_numbers_of_the_known_places(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = system_of(config, *EMBED)
    batch = made_batch((16, 32, 32), [0.5])
    batch = replace(batch, draws={"posterior": torch.randn(1, 1536, 2, 4, 4)})
    plain = type(system.encoders).posterior
    monkeypatch.setattr(
        type(system.encoders), "posterior", lambda self, video: (m := plain(self, video)) | {"std": 0 * m["mean"] + 2}
    )
    visual = visual_of(system, batch, {"i2v_tail": 1}, torch.ones(1))
    mean = plain(system.encoders, batch.video[:, :, -1:])["mean"]
    assert torch.equal(visual[:, 1:, 1:], mean + 2 * batch.draws["posterior"][:, :, 1:])


@pytest.mark.parametrize(("kind", "trained"), [("i2v_head", slice(1, None)), ("i2v_tail", slice(0, -1))])
def test_a_loss_without_known_frames_is_the_sum_over_the_others(
    tmp_path: Path, clips: Path, kind: str, trained: slice, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictions, noised, steps = [], [], []
    noise, micro_batch = RectifiedFlow.noise, Trainer.micro_batch
    monkeypatch.setattr(RectifiedFlow, "noise", lambda *args: noised.append(noise(*args)) or noised[-1])

    def watched(trainer: Trainer, batch: Batch, *args: object) -> torch.Tensor:
        hook = trainer.system.denoiser.register_forward_hook(lambda _, __, out: predictions.append(out.detach()))
        steps.append((batch, micro_batch(trainer, batch, *args)))
        hook.remove()
        return steps[-1][1]

    monkeypatch.setattr(Trainer, "micro_batch", watched)
    buckets = {"32px": {16: (1.0, 2)}}
    config = write_config(tmp_path, clips, bucket_config=buckets, slots_per_step=3, max_steps=2, no_i2v_ref_loss=True)
    outcome, _ = train_here(config, *EMBED, f"--condition_config.{kind}", "1")
    by_hand = []
    for (batch, _), out, of in zip(steps, predictions, noised, strict=True):
        square = (out - of.target).square()[:, :, trained].mean((1, 2, 3, 4))
        by_hand.append(float((batch.weights * of.weight * square).sum() / batch.bucket.batch_size))
    assert by_hand == pytest.approx([loss.item() for _, loss in steps], rel=1e-5)
    shares = [float(batch.weights.sum()) / batch.bucket.batch_size for batch, _ in steps]
    logged = [line["loss"] for line in metrics(outcome.folder)]
    expected = [sum(by_hand[:3]) / sum(shares[:3]), sum(by_hand[3:]) / sum(shares[3:])]
    assert logged == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
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
        ((*EMBED, "--no_i2v_ref_loss", "True"), "no_i2v_ref_loss = True: no conditioning frames"),
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
    kinds = {"t2v": 1, "i2v_head": 1, "i2v_loop": 1, "v2v_tail": 1, "v2v_head": 0}
    config = SimpleNamespace(law_of_family=(law := EndWindows()))
    assert kinds_apart(config, None, blocks) == ()
    assert kinds_apart(config, kinds, blocks) == ("i2v_head", "i2v_loop")
    assert kinds_apart(config, kinds, causal) == ("i2v_head", "i2v_loop", "v2v_tail")
    found = {length: windows_apart(law, kinds, causal, length) for length in (1, 5, 37)}
    assert {length: list(windows) for length, windows in found.items()} == {
        1: [],
        5: ["head1", "tail1"],
        37: ["head1", "tail1", "tail9"],
    }
    assert found[37]["tail9"].pixels == range(4, 37)
