"""What a generation takes, foretold by the passes that it makes."""

from __future__ import annotations

from typing import Any

import pytest

from longtake.contracts import UserError
from longtake.encoders.cost import autoencoder_cost
from longtake.generate.config import GenerateConfig
from longtake.generate.prompts import Prompt
from longtake.generate.sample import shape_asked
from longtake.generate.source import resolve_source
from longtake.plan.blocks import count_blocks
from longtake.plan.layout import Layout, MicroBatch
from longtake.plan.machine import Machine
from longtake.plan.video import denoisers_bytes, forecast_videos, video_words
from longtake.presets import find_preset
from longtake.track.devices import gpu_named
from tests.plan.runs import run_config

MACHINE = Machine(gpu_named("h200"), efficiency=0.5, launch=0.0)


def request(option: dict[str, Any] | None = None, **changes: Any) -> GenerateConfig:
    run = run_config()
    option = {"resolution": "256px", "num_frames": 32, "num_steps": 10, "text_osci": False} | (option or {})
    parts = {name: getattr(run, name) for name in ("model", "ae", "t5", "clip")}
    return GenerateConfig(**parts, sampling_option=option, **changes)


def test_denoising_takes_a_forward_for_each_step_and_branch_of_guidance() -> None:
    found = forecast_videos(request(), MACHINE)
    assert found.forwards == 20
    config = request()
    latent = config.ae.latent(32, 192, 336)
    flops = count_blocks(config.model, MicroBatch(2, latent, config.text_length), Layout()).forward.flops
    assert found.parts["denoising"] == pytest.approx(10 * flops / (989e12 * 0.5), rel=0.1)
    plain = forecast_videos(request({"guidance": 1.0}), MACHINE)
    assert plain.forwards == 10
    assert plain.parts["denoising"] == pytest.approx(found.parts["denoising"] / 2, rel=0.05)
    assert plain.bytes < found.bytes


def test_gpus_share_videos_and_then_the_tokens_of_one() -> None:
    one = forecast_videos(request(), MACHINE).parts["denoising"]
    assert forecast_videos(request(), MACHINE, gpus=4, count=8).parts["denoising"] == pytest.approx(2 * one, rel=0.1)
    together = forecast_videos(request(), MACHINE, gpus=4).parts["denoising"]
    assert together < one


def test_peers_that_the_config_names_make_whole_batches() -> None:
    peers = {"parallel": {"sequence": 4}, "batch_size": 2}
    eight = forecast_videos(request(**peers), MACHINE, gpus=4, count=8)
    one = forecast_videos(request(**peers), MACHINE, gpus=4, count=1)
    pair = forecast_videos(request(**peers), MACHINE, gpus=4, count=2)
    assert eight.bytes == pair.bytes > one.bytes
    assert eight.seconds == pytest.approx(4 * pair.seconds)
    three = forecast_videos(request(**peers), MACHINE, gpus=4, count=3)
    assert three.seconds == pytest.approx(pair.seconds + one.seconds)


def test_a_control_video_is_a_reference_that_is_encoded() -> None:
    given = ("--prompt", "a dancer"), ("--prompt", "a dancer", "--companions.control", "poses.mp4")
    preset = str(find_preset("cogvideox_fun/v2v_control"))
    alone, with_control = (resolve_source(preset, words).config for words in given)
    shape = shape_asked(with_control, with_control.sampling_option)
    seconds = autoencoder_cost(with_control.ae, shape, 1).flops / MACHINE.rates.convolutions
    assert forecast_videos(with_control, MACHINE).parts["references"] == pytest.approx(seconds)
    assert forecast_videos(alone, MACHINE).parts["references"] == 0


def test_degrees_that_the_model_cannot_have_are_a_users_mistake() -> None:
    with pytest.raises(UserError, match="tensor = 8: 4 attention heads"):
        forecast_videos(request(parallel={"tensor": 8}), MACHINE, gpus=8)


def test_rows_of_a_table_are_told_as_they_are_made() -> None:
    short = {"options": (("num_steps", 5),)}
    chain = Prompt("a boat", "b", then=(Prompt("it lands", "c", carries="i2v_head"),))
    prompts = [Prompt("rain", "a"), Prompt("sea", "d", **short), chain, Prompt("sun", "e")]
    said = video_words(request(num_sample=2), MACHINE, 1, prompts).split("\n")
    assert [line.split(" on ")[0] for line in said[:3]] == [
        "4 x 32 x 192 x 336",
        "2 x 32 x 192 x 336",
        "2 x 32 x 192 x 336 in 2 clips each",
    ]
    assert [int(line.split("a video takes ")[1].split()[0]) for line in said[:3]] == [20, 10, 20]
    assert said[3].startswith("all 8 videos: ")
    twice = forecast_videos(request(num_clips=2, carries="i2v_head"), MACHINE).parts["denoising"]
    assert twice == pytest.approx(2 * forecast_videos(request(), MACHINE).parts["denoising"])


def test_of_two_denoisers_one_is_on_the_gpu_and_both_are_in_host_memory() -> None:
    pair = resolve_source(str(find_preset("wan/t2v_a14b", "inference")), ["--prompt", "x"]).config
    option = pair.sampling_option.model_copy(update={"guidance_low": None})
    one = pair.model_copy(update={"low_noise": None, "sampling_option": option})
    assert forecast_videos(pair, MACHINE).bytes == forecast_videos(one, MACHINE).bytes
    assert denoisers_bytes(pair) == 2 * 2 * 14_288_491_584  # of the fact sheet, in bf16
    assert "host memory for the two denoisers" in video_words(pair, MACHINE, 1)
    assert "host memory" not in video_words(one, MACHINE, 1)
