"""Open-Sora 1.2's inference flags and files: what each word becomes, and which are refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from longtake.config.faults import ConfigError
from longtake.contracts import UserError
from longtake.dialects.opensora_v1_2 import OpenSoraV12
from longtake.dialects.opensora_v1_2.keys import LENGTHS, frames_of
from longtake.generate.config import GenerateConfig
from longtake.generate.read import read_generation
from longtake.generate.requests import prompts_of
from longtake.generate.source import resolve_source
from longtake.presets import FOLDER, find_preset
from tests.buckets.tables import golden
from tests.dialects.speech import Heard, write

SAMPLE = "configs/opensora-v1-2/inference/sample.py"
FILE = """
resolution = "240p"
aspect_ratio = "9:16"
num_frames = 51
fps = 24
frame_interval = 1
save_fps = 24
save_dir = "./samples/samples/"
seed = 42
batch_size = 1
multi_resolution = "STDiT2"
dtype = "bf16"
condition_frame_length = 5
align = 5
model = dict(
    type="STDiT3-XL/2", from_pretrained="hpcai-tech/OpenSora-STDiT-v3", qk_norm=True, enable_flash_attn=True,
    enable_layernorm_kernel=True,
)
vae = dict(
    type="OpenSoraVAE_V1_2", from_pretrained="hpcai-tech/OpenSora-VAE-v1.2", micro_frame_size=17, micro_batch_size=4
)
text_encoder = dict(type="t5", from_pretrained="DeepFloyd/t5-v1_1-xxl", model_max_length=300)
scheduler = dict(type="rflow", use_timestep_transform=True, num_sampling_steps=30, cfg_scale=7.0)
aes = 6.5
flow = None
"""


def spoken(run: str | Path, *flags: str) -> tuple[GenerateConfig, Heard]:
    """The generation that a command line of scripts/inference.py means."""
    heard = Heard()
    dialect = OpenSoraV12(heard.lines.append)
    _, found, *words = dialect.command(["generate", str(run), *flags])
    return resolve_source(found, words, dialect=dialect).config, heard


def test_a_file_in_the_old_keys_says_what_the_preset_says(tmp_path: Path) -> None:
    config, heard = spoken(write(tmp_path, FILE), "--prompt", "a pond")
    preset = resolve_source(str(find_preset("opensora_v1_2/240p", "inference")), ["--prompt", "a pond"]).config
    found = {key for key in GenerateConfig.model_fields if getattr(config, key) != getattr(preset, key)}
    assert found == {"save_dir", "prompt", "caption_facts"}
    assert config.prompt == ["a pond"]
    assert {key: value for key, value in config.caption_facts.items() if value} == preset.caption_facts
    assert "not moved" in heard.of("align")


def test_the_flags_of_the_page_act() -> None:
    flags = ["--num-frames", "4s", "--resolution", "720p", "--aspect-ratio", "16:9", "--aes", "7", "--flow", "5"]
    flags += ["--camera-motion", "pan left", "--seed", "3", "--save-dir", "o", "--sample-name", "x", "--cfg-scale", "5"]
    flags += ["--num-sampling-steps", "20", "--num-sample", "2", "--start-index", "1", "--prompt-path", "p.txt"]
    config, _ = spoken(SAMPLE, *flags, "--ckpt-path", "a/ema.pt", "--llm-refine", "False", "--prompt-as-path")
    option = config.sampling_option
    assert (option.num_frames, option.resolution, option.aspect_ratio, option.seed) == (102, "720p", "16:9", 3)
    assert (option.guidance, option.num_steps, config.num_sample, config.start_index) == (5.0, 20, 2, 1)
    assert config.caption_facts == {"aes": "7", "flow": "5", "camera_motion": "pan left"}
    assert (config.save_dir, config.save_prefix, config.prompts, config.prompt_as_path) == ("o", "x_", "p.txt", True)
    assert (config.model.from_pretrained, config.model.strict_load) == ("a/ema.pt", False)


def test_a_rate_that_is_given_twice_is_that_of_the_video() -> None:
    assert spoken(SAMPLE, "--prompt", "a", "--fps", "12", "--save-fps", "12")[0].fps_save == 12


def test_lengths_have_the_published_names() -> None:
    known = golden("image_size.json", "opensora_v1_2")["get_num_frames"]
    assert {name: count for name, count in known.items() if name in LENGTHS} == LENGTHS


def test_references_and_strategies_go_to_their_prompts(tmp_path: Path) -> None:
    flags = ["--reference-path", "x.png", "y.png;z.png", "--mask-strategy", "0", "0;0,1,0,-1,1"]
    wanted = [
        'a {"reference_path": "x.png", "mask_strategy": "0"}',
        'b {"reference_path": "own.png", "mask_strategy": "0;0,1,0,-1,1"}',
    ]
    prompts = ["a", 'b {"reference_path": "own.png"}']
    assert spoken(SAMPLE, "--prompt", *prompts, *flags)[0].prompt == wanted
    (tmp_path / "p.txt").write_text("\n".join(["first", *prompts]))
    config, _ = spoken(SAMPLE, "--prompt-path", str(tmp_path / "p.txt"), "--start-index", "1", *flags)
    assert (config.prompt, config.prompts, config.start_index) == (wanted, None, 0)


def test_loops_carry_the_last_frames_on() -> None:
    config, _ = spoken(SAMPLE, "--prompt", "|0|a day|2|a night", "--loop", "4", "--condition-frame-length", "10")
    assert (config.num_clips, config.carries) == (4, "0,,-10,0,10,0")
    config, heard = spoken(SAMPLE, "--prompt", "a day", "--condition-frame-length", "10")
    assert config.num_clips == 1
    assert "does nothing" in heard.of("condition_frame_length")


def test_processes_share_a_video(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert spoken(SAMPLE, "--prompt", "a")[0].parallel.sequence == 8


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--llm-refine", "True"], "sends nothing to paid services"),
        (["--watermark", "True"], "videos have no mark"),
        (["--frame-interval", "2"], "frames follow each other"),
        (["--fps", "24", "--save-fps", "12"], "is not fps = 24"),
        (["--save-fps", "12"], "is not fps = 24"),
        (["--fps", "12"], "is not fps = 12"),
        (["--loop", "2", "--condition-frame-length", "7"], "must be a multiple of 5"),
        (["--reference-path", "x.png", "y.png"], "must be as many as the prompts, 1"),
    ],
)
def test_what_has_no_counterpart_is_refused(flags: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        spoken(SAMPLE, "--prompt", "a", *flags)
    assert re.search(said, str(error.value)), str(error.value)


def test_a_length_that_is_none_is_refused() -> None:
    with pytest.raises(UserError, match="write a number, or one of 1x, 2x"):
        spoken(SAMPLE, "--num-frames", "3s")
    with pytest.raises(UserError, match="write a number"):
        frames_of([])


def test_empty_value_of_a_prompts_json_takes_the_default_away() -> None:
    words = [
        "--tiny",
        "--ref",
        "x.png",
        "--cond_type",
        "0",
        "--prompt",
        'a {"reference_path": "", "mask_strategy": ""}',
    ]
    config = read_generation(FOLDER / "opensora_v1_2" / "inference" / "240p.py", words).value
    (prompt,) = prompts_of(config)
    assert (prompt.refs, prompt.kind) == ((), config.family.kind_of_nothing)
    (plain,) = prompts_of(config.model_copy(update={"prompt": "a"}))
    assert plain.refs == ("x.png",)
