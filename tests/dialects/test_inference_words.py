from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.dialects.opensora_v2 import keys
from longtake.dialects.table import keys_of
from tests.dialects.speech import INFERENCE, inference, refusal, write

PRESET = "configs/diffusion/inference/256px.py"


def test_a_file_in_the_old_words_is_the_preset_that_says_the_same(tmp_path: Path) -> None:
    config, heard = inference(write(tmp_path, INFERENCE), "--prompt", "raining, sea")
    preset, _ = inference(PRESET, "--prompt", "raining, sea")
    assert config.sampling_option == preset.sampling_option
    assert (config.motion_score, config.fps_save, config.cond_type) == (4, 24, "t2v")
    assert config.prompt == "raining, sea"
    assert (config.parallel.sequence, config.parallel.sequence_attention) == (1, "ring")
    assert "cut to 1" in heard.of("plugin_config.sp_size")
    assert heard.of("plugin_ae")


def test_degrees_are_cut_to_what_the_processes_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    config, heard = inference(write(tmp_path, INFERENCE))
    assert config.parallel.sequence == 4
    assert "cut to 4, for there are 4 processes" in heard.of("plugin_config.sp_size")


@pytest.mark.parametrize(
    ("flags", "place", "value"),
    [
        (("--num_frames", "33"), "sampling_option.num_frames", 33),
        (("--resolution", "768px"), "sampling_option.resolution", "768px"),
        (("--aspect_ratio", "9:16"), "sampling_option.aspect_ratio", "9:16"),
        (("--num_steps", "20"), "sampling_option.num_steps", 20),
        (("--guidance", "6"), "sampling_option.guidance", 6),
        (("--guidance_img", "2"), "sampling_option.guidance_img", 2),
        (("--sampling_option.seed", "0"), "sampling_option.seed", 0),
        (("--motion-score", "7"), "motion_score", 7),
        (("--ckpt_path", "w"), "model.from_pretrained", "w"),
        (("--model.from_pretrained", "w"), "model.from_pretrained", "w"),
        (("--pretrained_lora_path", "adapters"), "lora.from_pretrained", "adapters"),
        (("--dataset.data-path", "prompts.csv"), "prompts", "prompts.csv"),
        (("--save-dir", "s"), "save_dir", "s"),
        (("--cond_type", "i2v_head", "--ref", "a.png"), "cond_type", "i2v_head"),
        (("--num_sample", "3"), "num_sample", 3),
        (("--offload", "True"), "offload_model", True),
        (("--num_samples", "3"), "num_samples", 3),
        (("--refine-prompt", "False"), "prompt", None),
    ],
)
def test_a_flag_in_the_old_words_counts_upon_a_preset(flags: tuple[str, ...], place: str, value: object) -> None:
    found: object = inference(PRESET, *flags)[0]
    for part in place.split("."):
        found = getattr(found, part)
    assert found == value


def test_names_of_flags_may_stand_in_a_file(tmp_path: Path) -> None:
    config, _ = inference(
        write(tmp_path, "num_frames = 17\nckpt_path = 'w'\n" + INFERENCE.replace("num_frames=129, ", ""))
    )
    assert (config.sampling_option.num_frames, config.model.from_pretrained) == (17, "w")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--prompt_refine", "True"), "prompt_refine = True .*paid services"),
        (("--refine-prompt", "True"), "refine_prompt = True .*paid services"),
        (("--motion-score", "dynamic"), "motion_score = .dynamic. .*paid service"),
        (("--dataset.type", "video_text"), 'dataset.type = "video_text" .*must be "text"'),
        (("--sampling_option.temporal_reduction", "8"), "temporal_reduction = 8 .*must be 4"),
        (("--cond_type", "v2v_head_half"), "v2v_head_half"),
    ],
)
def test_what_has_no_counterpart_is_refused_in_a_sentence(flags: tuple[str, ...], said: str) -> None:
    assert re.search(said, refusal(inference, PRESET, *flags))


@pytest.mark.parametrize("value", ["[]", "{'a': {'b': 1}}", "none"])
def test_no_value_of_a_word_is_a_traceback(value: str, tmp_path: Path) -> None:
    run = write(tmp_path, INFERENCE)
    for key in (*keys_of((*keys.INFERENCE, *keys.PLUGIN)), "plugin_config", "lora_config", "dataset"):
        with suppress(UserError):
            inference(run, f"--{key}={value}")
