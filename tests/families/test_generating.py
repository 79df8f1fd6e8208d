"""Families from outside the package are asked for videos: known frames, companions, sizes and prompts of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from longtake.contracts import UserError
from longtake.data.clips.transforms import to_unit
from longtake.data.clips.video import read_frames, write_video
from longtake.data.rules import SampleRules
from longtake.families.registry import register
from longtake.generate.config import GenerateConfig
from longtake.generate.prompts import Prompt
from longtake.generate.requests import brought_by
from longtake.generate.sample import Request, branch_conditions, final_prompt, sample_videos, shape_asked
from longtake.generate.source import resolve_source
from longtake.system.build import System
from longtake.system.config import SamplingOption
from longtake.system.encoders import build_encoders
from longtake.train.run_file import read_run
from tests.cli.conftest import longtake
from tests.families.everything import EVERYTHING, Chunks, EverythingConfig
from tests.families.plain import PLAIN
from tests.families.runs import SIZES, everything, registered, write_family
from tests.train.conftest import clips  # a fixture
from tests.train.runs import train_here

__all__ = ["clips", "everything", "longtake", "registered"]

NOTHING_TAKEN = "this model takes no conditioning frames; leave it out"


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("plain", "--ref r.png", f"ref = 'r.png': {NOTHING_TAKEN}"),
        ("plain", "--cond-type i2v_head --ref r.png", f'cond_type = "i2v_head": {NOTHING_TAKEN}'),
        ("plain", "--cond-type banana", f'cond_type = "banana": {NOTHING_TAKEN}'),
        (
            "everything",
            "--sampling-option.guidance-numbers.powr 2",
            "powr: is no number of the rule 'fading'; choose power",
        ),
        ("everything", "--ref r.png", 'ref = \'r.png\': cond_type = "none" knows no frames; write cond_type = "box"'),
        ("everything", "--cond-type t2v", 'cond_type = "t2v": choose one of none, box, first, edit, inpaint'),
        ("everything", "--cond-type first --num-frames 1", "sampling_option.num_frames = 1 leaves no frame to be made"),
    ],
)
def test_kinds_of_known_frames_are_called_by_its_own_names(name: str, words: str, said: str, tmp_path: Path) -> None:
    own = {"ae": {"type": "pixel"}, "t5": {"type": "words", "dim": 16}} | SIZES[name]
    parts = "".join(f"{key} = {own[key]!r}\n" for key in ("model", "objective", "ae", "t5"))
    (tmp_path / "run.py").write_text(parts)
    with pytest.raises(UserError) as refused:
        resolve_source(str(tmp_path / "run.py"), ["--prompt", "x", "--num-frames", "17", *words.split()])
    assert said in str(refused.value)


def test_long_videos_are_encoded_and_decoded_a_chunk_at_a_time(
    longtake: Any, clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, lengths, decode = write_family(tmp_path, clips, "everything"), [], Chunks.decode_chunk
    encoders = build_encoders(read_run(str(run)).value, torch.device("cpu"))
    video = torch.randint(0, 256, (1, 3, 34, 32, 32), dtype=torch.uint8)
    assert torch.equal(
        encoders.posterior(video)["mean"], encoders.autoencoder.posterior(video.float() / 127.5 - 1)["mean"]
    )
    monkeypatch.setattr(
        Chunks, "decode_chunk", lambda self, z, frames: lengths.append(frames) or decode(self, z, frames)
    )
    folder = train_here(run, "--max_steps", "1")[0].folder
    words = ("--prompt", "a sea", "--num-frames", 34, "--num-steps", 1, "--save-dir", tmp_path)
    assert longtake("generate", folder, *words)[0] == 0
    assert lengths == [17, 17]
    (path,) = tmp_path.rglob("*.mp4")
    assert len(read_frames(path)) == 34


def test_what_stands_for_no_text_keeps_the_prompts_own_mask(everything: System) -> None:
    option = SamplingOption(resolution="32px", aspect_ratio="1:1", num_frames=17, guidance=2.0, solver="noisy")
    requests = [Request("a red circle moves left", 1), Request("a sea", 2, "blue and green")]
    x = torch.zeros(2, 3, 5, 4, 4)
    found = branch_conditions(everything, requests, option, (17, 32, 32), x, None)
    prompt, negative = (found[name] for name in ("prompt", "negative"))
    counts = [branch.masks["text"].sum(-1)[:, 0].tolist() for branch in (prompt, negative)]
    assert counts == [[5, 2], [5, 3]]
    assert torch.equal(negative["text"][0], everything.embed_nothing()["text"].expand(2, -1, -1))
    assert not torch.equal(negative["text"][1], negative["text"][0])


def test_a_request_brings_its_companion_into_every_branch_of_guidance(everything: System) -> None:
    option = SamplingOption(resolution="32px", aspect_ratio="1:1", num_frames=17, num_steps=2, solver="noisy")
    control = torch.randint(0, 256, (3, 17, 32, 32), dtype=torch.uint8)
    videos = [
        sample_videos(everything, [Request("a sea", 1, companions=companions)], option)
        for companions in ({"control": control}, {"control": control.flip(-1)}, {})
    ]
    assert not torch.equal(videos[0], videos[1])
    assert not torch.equal(videos[0], videos[2])
    x, requests = torch.zeros(1, 3, 5, 4, 4), [Request("a sea", 1, companions={"control": control})]
    branches = branch_conditions(everything, requests, option, (17, 32, 32), x, None)
    expected = everything.encoders.posterior(control[None])["mean"]
    assert all(torch.equal(branch["control"], expected) for branch in branches.values())
    with pytest.raises(UserError, match="companion 'control': some videos of a batch have it"):
        branch_conditions(everything, [*requests, Request("a sea", 2)], option, (17, 32, 32), x, None)


def test_files_of_companions_are_named_for_all_videos_or_by_a_column(
    longtake: Any, clips: Path, tmp_path: Path
) -> None:
    folder = train_here(run := write_family(tmp_path, clips, "everything"), "--max_steps", "1")[0].folder
    video = torch.randint(0, 256, (17, 32, 32, 3), dtype=torch.uint8).numpy()
    write_video(tmp_path / "c.mp4", video, 24, crf=0)
    write_video(tmp_path / "short.mp4", video[:5], 24)
    (table := tmp_path / "t.csv").write_text("text,control\na sea,c.mp4\na storm,\na sea,c.mp4\n")
    words = ("--prompts", table, "--num-steps", 1, "--num-frames", 17, "--save-dir", tmp_path / "made", "--seed", 1)
    assert longtake("generate", folder, *words, "--batch-size", 3)[0] == 0
    assert len(list((tmp_path / "made").rglob("*.mp4"))) == 3
    short = longtake("generate", folder, "--prompt", "x", *words[2:], "--companions.control", tmp_path / "short.mp4")
    assert "short.mp4': has 5 frames at 24 FPS, and control of a video takes 17 at 24 FPS" in " ".join(short[2].split())
    table.write_text("text,ref,cond_type\na sea,c.mp4,first\na sea,c.mp4,\n")
    code, out, err = longtake("generate", folder, *words, "--batch-size", 2)
    assert (code, '1 with a ref that cond_type = "none" does not use' in out) == (0, True), err
    table.write_text("text,ref,cond_type\na sea,c.mp4,banana\n")
    fault = longtake("generate", folder, *words)[2]
    assert 'cond_type = "banana": choose one of none, box, first, edit, inpaint in row 1' in " ".join(fault.split())
    wrong = longtake("generate", folder, "--prompt", "x", "--companions.contrl", "c.mp4")[2]
    assert "did you mean companions.control?" in " ".join(wrong.split())
    ask = GenerateConfig.model_construct(companions={}, **dict(read_run(str(run)).value))
    size = {"resolution": "32px", "aspect_ratio": "1:1", "num_frames": 17}
    ask = ask.model_copy(update={"sampling_option": SamplingOption(**size)})
    found = brought_by(Prompt("a sea", "a", brings=(("control", str(tmp_path / "c.mp4")),)), ask)["control"]
    expected = to_unit(torch.from_numpy(read_frames(tmp_path / "c.mp4")).permute(3, 0, 1, 2))
    assert torch.equal(found, expected)


def test_a_family_may_have_more_kinds_than_it_lists() -> None:
    family = replace(EVERYTHING, kind_pattern=r"\d+(,\d+)*")
    assert [family.has_kind(kind, EverythingConfig()) for kind in ("box", "0,1,2", "0;1", "t2v")] == [
        True,
        True,
        False,
        False,
    ]
    assert not EVERYTHING.has_kind("0,1,2", EverythingConfig())


def test_a_still_has_the_rate_that_stills_had_in_training(everything: System) -> None:
    option = SamplingOption(resolution="32px", aspect_ratio="1:1", num_frames=1, solver="noisy")
    for frames, rate in ((1, 120), (17, 24)):
        x = torch.zeros(1, 3, 5 if frames > 1 else 1, 4, 4)
        found = branch_conditions(everything, [Request("a sea", 1)], option, (frames, 32, 32), x, None)
        assert {branch["fps"].item() for branch in found.values()} == {rate}


def test_sizes_are_asked_for_by_the_names_of_the_familys_own_tables() -> None:
    for law, name, ratio, size in (
        ("opensora_v1_2", "240p", "9:16", (240, 426)),
        ("cogvideox_fun", "512px", "0.57", (384, 672)),
        (None, "256px", "16:9", (192, 336)),
    ):
        config = SimpleNamespace(bucket_law=law, size_divisor=16)
        assert shape_asked(config, SamplingOption(resolution=name, aspect_ratio=ratio, num_frames=5)) == (5, *size)


def test_a_model_says_which_lengths_it_takes_and_its_law_sees_its_section(
    clips: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_run(str(write_family(tmp_path, clips, "everything"))).value
    assert config.law_of_family.model == config.model
    config.check_shape(17, 32, 32)
    monkeypatch.setattr(EverythingConfig, "patch", property(lambda self: (2, 1, 1)))
    config.check_shape(1, 32, 32)
    with pytest.raises(UserError, match="videos of 17 frames are not taken: 5 latent frames do not divide into patche"):
        config.check_shape(17, 32, 32)


def told(text: str, fps: float | None, score: int | None, kind: str, facts: dict[str, str]) -> str:
    return f"{kind}: {text}, aesthetic score: {facts['aes']}"


def test_prompts_have_the_form_of_the_family_with_what_its_config_says(clips: Path, tmp_path: Path) -> None:
    rules = SampleRules(caption=f"{__name__}:told", prompt_facts={"aes": "6.5"})
    register(replace(PLAIN, rules=lambda config: rules))
    try:
        own = read_run(str(write_family(tmp_path, clips, "plain"))).value
        high = read_run(str(write_family(tmp_path, clips, "plain", caption_facts={"aes": "7"}))).value
        found = [final_prompt(config, "a sea", 17) for config in (own, high)]
        with pytest.raises(UserError, match=r"caption_facts\.flow: is no key; choose among aes"):
            read_run(str(write_family(tmp_path, clips, "plain", caption_facts={"flow": "2"})))
    finally:
        register(PLAIN)
    assert found == [f"inference: a sea, aesthetic score: {score}" for score in ("6.5", "7")]
