from __future__ import annotations

from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.generate.prompts import read_prompts
from longtake.generate.read import read_flags
from longtake.generate.source import resolve_source
from longtake.train.run import Outcome

PRESET = str(Path(__file__).parents[2] / "configs" / "opensora_v2" / "inference" / "256px.py")


def test_short_flags_stand_for_keys_of_sampling():
    words = read_flags(["--aspect-ratio", "1:1", "--num_frames=33", "--seed", "0", "--prompt", "resolution", "--tiny"])
    assert words.tiny
    assert words.overrides == (
        "--sampling_option.aspect_ratio",
        "1:1",
        "--sampling_option.num_frames=33",
        "--sampling_option.seed",
        "0",
        "--prompt",
        "resolution",
    )


def test_of_two_values_for_one_flag_the_later_counts_and_for_two_spellings_neither():
    flags = ["--num-steps", "3", "--num_steps=4", "--guidance", "2", "--guidance-img", "5"]
    option = resolve_source(PRESET, flags).config.sampling_option
    assert (option.num_steps, option.guidance, option.guidance_img) == (4, 2, 5)
    assert resolve_source(PRESET, [*flags, "--sampling-option.num-steps=4"]).config.sampling_option.num_steps == 4
    with pytest.raises(UserError) as refused:
        resolve_source(PRESET, [*flags, "--tiny", "--sampling-option.num-steps", "5"])
    assert str(refused.value) == (
        "--num_steps 4: stands for the same key as --sampling_option.num_steps 5; keep one of the two"
    )


def test_several_prompts_and_references_are_all_taken():
    flags = ["--prompt", "a", "--cond-type", "i2v_loop", "--ref", "1.png", "--prompt", "b", "--ref", "2.png;3.png"]
    config = resolve_source(PRESET, flags).config
    assert config.prompt == ["a", "b"]
    assert {prompt.refs for prompt in read_prompts(config.prompt, None, ref=config.ref)} == {
        ("1.png", "2.png", "3.png")
    }


def test_adapters_and_their_strength_have_short_flags():
    lora = resolve_source(PRESET, ["--lora", "a.safetensors", "--lora-scale", "0.5", "--lora.rank", "8"]).config.lora
    assert (lora.from_pretrained, lora.strength, lora.rank) == ("a.safetensors", 0.5, 8)


def test_tiny_needs_no_files_and_flags_go_on_top():
    config = resolve_source(PRESET, ["--tiny", "--num-steps", "7"]).config
    assert (config.model.from_pretrained, config.ae.type, config.t5.type) == (None, "pixel", "words")
    assert (config.sampling_option.resolution, config.sampling_option.num_frames) == ("32px", 17)
    assert config.sampling_option.num_steps == 7
    assert config.sampling_option.text_osci


def test_tiny_leaves_weights_of_another_size_out(run: Outcome):
    source = resolve_source(str(run.folder), ["--tiny"])
    assert source.checkpoint is None
    assert source.config.model.hidden_size == 128


def test_tiny_keeps_the_weights_of_a_tiny_run_and_shrinks_its_videos(monkeypatch: pytest.MonkeyPatch):
    tree = resolve_source(PRESET, ["--tiny"]).config.model_dump(exclude={"sampling_option"})
    tree["model"]["from_pretrained"] = "tiny.safetensors"
    monkeypatch.setattr("longtake.generate.source.exported_tree", lambda path: tree)
    config = resolve_source("tiny.safetensors", ["--tiny"]).config
    assert config.model.from_pretrained == "tiny.safetensors"
    assert (config.sampling_option.resolution, config.sampling_option.num_frames) == ("32px", 17)
    assert resolve_source("tiny.safetensors", []).config.sampling_option.num_frames == 129


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--cond-type", "i2v_middle"], "cond_type"),
        (["--ref", "a.png"], "ref = 'a.png': cond_type = \"t2v\" knows no frames"),
        (["--cond-type", "i2v_head", "--num-frames", "1"], "num_frames = 1 leaves no frame to be made"),
        (["--cond-type", "v2v_head", "--num-frames", "33"], "num_frames = 33 leaves no frame to be made"),
        (["--cond-type", "i2v_head", "--model.cond-embed", "False", "--model.grow-cond-in", "False"], "cond_embed is"),
        (["--use-t2i2v"], "there is no img_flux"),
        (["--sampling-option.method", "distill"], "this model takes no guidance scale as a condition"),
        (["--motion-score", "dynamic"], "asks a paid service for a number; give one yourself"),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_is_read(flags: list[str], said: str):
    with pytest.raises(UserError) as caught:
        resolve_source(PRESET, ["--prompt", "x", *flags])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--cond-type", "i2v_tail"], 'cond_type = "i2v_tail": use_t2i2v makes the first frame'),
        (["--img-flux-ae.z-channels", "8"], "img_flux: model.in_channels = 64"),
        (["--img-flux.context-in-dim", "64"], "img_flux: t5.dim = 4096"),
    ],
)
def test_the_model_of_images_must_fit(flags: list[str], said: str):
    with pytest.raises(UserError) as caught:
        resolve_source(PRESET.replace("256px", "t2i2v_256px"), ["--prompt", "x", *flags])
    assert said in str(caught.value)


def test_presets_are_the_published_ones():
    found = {name: resolve_source(PRESET.replace("256px", name), []).config for name in ("256px", "768px")}
    more = ["--low-noise.boundary", "0.5", "--sampling-option.guidance-low", "3"]  # of the videos alone
    stills = resolve_source(PRESET.replace("256px", "t2i2v_768px"), more).config.of_stills()
    assert (stills.low_noise, stills.sampling_option.guidance_low) == (None, None)
    option = found["256px"].sampling_option
    assert (option.num_steps, option.num_frames, option.guidance, option.guidance_img) == (50, 129, 7.5, 3.0)
    assert option.text_osci
    assert option.image_osci
    assert option.scale_temporal_osci
    assert found["768px"].sampling_option.resolution == "768px"
    assert found["768px"].parallel.sequence == "auto"
    still = stills.sampling_option
    assert (still.resolution, still.num_frames, still.guidance, still.method) == ("768px", 1, 4.0, "distill")
    assert (stills.model.fused_qkv, stills.model.use_liger_rope, stills.ae.type) == (True, False, "autoencoder_2d")
