"""Families from outside the package do all that the built-in one does, with no line changed elsewhere."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from longtake.checkpoint import list_checkpoints
from longtake.contracts import UserError
from longtake.data import read_frames, to_unit, write_video
from longtake.data.rules import SampleRules
from longtake.families import registry
from longtake.families.registry import read_model, register
from longtake.generate import Request, resolve_source, sample_videos
from longtake.generate.config import GenerateConfig
from longtake.generate.prompts import Prompt
from longtake.generate.requests import brought_by
from longtake.generate.sample import branch_conditions, final_prompt, shape_asked
from longtake.models import build_denoiser
from longtake.parallel import Mesh, World, start_world
from longtake.plan import (
    Layout,
    Machine,
    MicroBatch,
    count_blocks,
    forecast_memory,
    forecast_time,
    plan_run,
    refuse_misfits,
)
from longtake.system import SamplingOption, System, build_encoders, build_system
from longtake.system.room import forward_bytes
from longtake.track import gpu_named
from longtake.train import read_run, train
from tests.cli.conftest import longtake
from tests.families.everything import EVERYTHING, Chunks, EverythingConfig
from tests.families.plain import PLAIN
from tests.families.runs import SIZES, write_family
from tests.parallel.one_step import Facts, on_ranks
from tests.plan.trace import inputs, sampling_bytes, step_bytes
from tests.train.conftest import clips  # a fixture
from tests.train.runs import exact, metrics, train_here

__all__ = ["clips", "longtake"]


@pytest.fixture(autouse=True, scope="module")
def registered() -> Iterator[None]:
    known = dict(registry._FAMILIES)
    register(PLAIN)
    register(EVERYTHING)
    yield
    registry._FAMILIES.clear()
    registry._FAMILIES.update(known)


@pytest.fixture(scope="module", params=sorted(SIZES))
def run(request: pytest.FixtureRequest, clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(tmp_path_factory.mktemp(request.param), clips, request.param)


# For tests in which a family with everything has all that a plain one has.
PLAIN_IS_SLOW = pytest.mark.parametrize(
    "run", ["everything", pytest.param("plain", marks=pytest.mark.slow)], indirect=True
)


def test_an_installed_package_brings_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / "my_family-0.1.dist-info").mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: my-family\nVersion: 0.1\n")
    (points := folder / "entry_points.txt").write_text("[longtake.families]\nmine = my_family:FAMILY\n")
    (tmp_path / "my_family.py").write_text("from tests.families.plain import PLAIN as FAMILY\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(registry._FAMILIES, PLAIN.model)
    registry._load_installed.cache_clear()
    assert PLAIN in registry.families()
    points.write_text("[longtake.families]\nmine = my_family:NONE\n")
    registry._load_installed.cache_clear()
    with pytest.raises(UserError, match=r"the model family mine \(my_family:NONE\) cannot be loaded: AttributeError"):
        registry.families()


def test_it_trains_and_resumes_as_if_it_had_not_stopped(run: Path) -> None:
    whole, _ = train_here(run, "--exp_name", "whole", "--max_steps", "6")
    cut, _ = train_here(run, "--exp_name", "cut", "--max_steps", "3")
    train_here(cut.folder, "--max_steps", "6")
    assert exact(cut.folder) == exact(whole.folder)
    assert all(line["loss"] > 0 for line in metrics(whole.folder))
    assert [line.get("rates") for line in metrics(cut.folder)] == [line.get("rates") for line in metrics(whole.folder)]


def test_groups_of_parameters_have_rates_of_their_own_and_the_others_one_cycle(clips: Path, tmp_path: Path) -> None:
    outcome, said = train_here(write_family(tmp_path, clips, "everything"), "--max_steps", "5")
    one_cycle = pytest.approx([1e-4, 5.05e-3, 1e-2, 5.5e-3, 1e-3])
    expected = {"others": one_cycle, "null": [2e-3] * 5, "biases": one_cycle, "ends": [1e-3] * 5}
    expected["blocks"] = pytest.approx([4e-3, 3e-3, 2e-3, 1e-3, 0.0])
    rates = [line["rates"] for line in metrics(outcome.folder)]
    assert {name: [line[name] for line in rates] for name in rates[0]} == expected
    sizes = dict(re.findall(r"^learning rate of (\w+): (\d+) tensors", said, re.MULTILINE))
    inside = 2 * 9  # layers of two blocks
    assert {name: int(size) for name, size in sizes.items()} == {
        "others": 2,
        "null": 1,
        "biases": 4 + inside,
        "blocks": inside,
        "ends": 2,
    }


@pytest.fixture(scope="module")
def trained(run: Path) -> Path:
    return train_here(run, "--exp_name", "trained", "--max_steps", "2")[0].folder


def test_it_generates_from_a_run_and_from_an_export(longtake: Any, trained: Path, tmp_path: Path) -> None:
    words = ("--prompt", "a red circle moves left", "--save-dir", tmp_path / "of_run", "--num-steps", 3)
    assert longtake("generate", trained, *words)[0] == 0
    file = tmp_path / "weights.safetensors"
    assert longtake("checkpoint", "export", trained, file)[0] == 0
    (table := tmp_path / "prompts.csv").write_text(f"text,ref\n{words[1]},unused.png\n")
    code, out, _ = longtake("generate", file, "--prompts", table, "--save-dir", tmp_path / "of_file", *words[4:])
    reader = "this model" if "plain" in str(trained) else 'cond_type = "none"'
    assert (code, f"1 with a ref that {reader} does not use" in out) == (0, True)
    first, second = ([p.read_bytes() for p in (tmp_path / name).rglob("*.mp4")] for name in ("of_run", "of_file"))
    assert len(first) == 1
    assert first == second


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


@PLAIN_IS_SLOW
def test_a_run_from_a_store_is_the_run_that_encodes(longtake: Any, run: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert longtake("data", "encode", run, "--dataset.views", 2, "-o", store)[0] == 0
    words = ("--max_steps", "3", "--dataset.views", "2", "--outputs", str(tmp_path))
    online, _ = train_here(run, "--exp_name", "online", *words)
    stored, _ = train_here(run, "--exp_name", "stored", *words, "--dataset.latents", str(store))
    assert exact(stored.folder) == exact(online.folder)


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


@pytest.mark.parametrize("name", sorted(SIZES))
def test_it_trains_and_generates_in_bf16(longtake: Any, clips: Path, tmp_path: Path, name: str) -> None:
    run = write_family(tmp_path, clips, name, dtype="bf16", master_dtype="bf16")
    folder = train_here(run, "--max_steps", "2")[0].folder
    words = ("--prompt", "a sea", "--num-steps", 2, "--save-dir", tmp_path)
    code, _, err = longtake("generate", folder, *words)
    assert code == 0, err


@pytest.fixture
def everything(clips: Path, tmp_path: Path) -> Iterator[System]:
    config = read_run(str(write_family(tmp_path, clips, "everything"))).value
    with start_world("cpu") as world:
        system = build_system(config, Mesh.create(config.parallel, world), world)
        with torch.no_grad():
            system.denoiser.null_text.fill_(1.5)
        yield system


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


def test_adapters_train_alone_and_are_exported(longtake: Any, run: Path, trained: Path, tmp_path: Path) -> None:
    words = ("--lora.rank", "2", "--max_steps", "2", "--outputs", str(tmp_path))
    words += ("--model.from_pretrained", str(trained))
    adapted, _ = train_here(run, "--exp_name", "adapted", *words)
    assert longtake("checkpoint", "export", adapted.folder, tmp_path / "adapters", "--lora", "peft")[0] == 0
    assert longtake("checkpoint", "export", adapted.folder, tmp_path / "merged.safetensors", "--merge")[0] == 0
    again, _ = train_here(run, "--exp_name", "again", *words, "--lora.from_pretrained", str(tmp_path / "adapters"))
    assert exact(again.folder) != exact(adapted.folder)


def test_it_is_made_tiny(run: Path) -> None:
    outcome, _ = train_here(run, "--exp_name", "tiny", "--max_steps", "1", "--tiny")
    assert len(list_checkpoints(outcome.folder)) == 1


def test_it_is_planned(longtake: Any, run: Path) -> None:
    code, out, err = longtake("plan", run, "--gpus", 1, "--gpu", "h100", "--model.grad_ckpt_settings=(1,)")
    assert code == 0, err
    assert "remat 1 layers blocks" in out
    config = read_run(str(run), ()).value
    plan = plan_run(config, 1, Machine(replace(gpu_named("h100"), memory_gib=1e-4), headroom=0))
    sizes = {entry.bucket.resolution for entry in plan.entries}
    assert sizes == ({"32px"} if config.family is PLAIN else {"16px", "32px"}), "a law of buckets of its own"
    assert plan.num_parameters == sum(p.numel() for p in build_denoiser(config.model).parameters())
    with pytest.raises(UserError, match="a micro-batch of"):
        refuse_misfits(plan)
    sizes = plan.work.micro_batch(plan.entries[0].bucket)
    brought = sizes.latent_bytes if config.model.type == "everything" else 0  # the control video, as latents
    bare = forecast_memory(config.model, replace(sizes, beside_bytes=0), plan.layout)
    assert forecast_memory(config.model, sizes, plan.layout).total - bare.total == sizes.beside_bytes == brought


@pytest.mark.parametrize("name", sorted(SIZES))
def test_what_a_step_takes_is_foretold_by_its_own_blocks(name: str) -> None:
    model = read_model({"model": {"type": name, "width": 256, "layers": 3}})
    latent, text, batch = (model.latent_channels, 9, 32, 32), 64, 16
    counted = step_bytes(model, latent[1:], text, batch=batch, remat=(1,))
    sizes, layout = MicroBatch(batch, latent, text), Layout(remat=(1,))
    said = forecast_memory(model, sizes, layout)
    assert said.total - said.optimizer == pytest.approx(counted["peak"], rel=0.05)
    sampling = sampling_bytes(model, latent[1:], text, batch=batch)
    assert max(forward_bytes(model, latent, text, batch).values()) == pytest.approx(sampling, rel=0.05)
    fused = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)
    }
    with FakeTensorMode(), FlopCounterMode(display=False, custom_mapping=fused) as counter:
        x, conditions = inputs(model, latent[1:], text, batch)
        build_denoiser(model)(x, torch.empty(batch), conditions)
    found = count_blocks(model, sizes, layout)
    assert found.forward.flops == pytest.approx(counter.get_total_flops(), rel=1e-3)
    machine = Machine(gpu_named("h100"), efficiency=0.4, launch=0)
    seconds = (3 * found.forward.flops + found.blocks[0].forward.flops) / machine.rates.products
    assert forecast_time(model, sizes, layout, machine).compute == pytest.approx(seconds)


def test_degrees_that_it_has_no_plan_for_are_refused_in_a_sentence(longtake: Any, run: Path) -> None:
    code, _, err = longtake("plan", run, "--gpus", 2, "--parallel.tensor", 2)
    assert (code, err) == (2, "longtake: parallel.tensor = 2: this model has no plan for it; choose 1\n")


def losses_of(run: Path, words: tuple[str, ...], world: World) -> Facts:
    """The losses of a run of several processes; these know the families too."""
    register(PLAIN)
    register(EVERYTHING)
    config = read_run(str(run), words).value
    train(config, world, str(run), Console(file=io.StringIO()))
    return {"losses": [line["loss"] for line in metrics(Path(config.outputs) / config.exp_name)]}


@PLAIN_IS_SLOW
def test_peers_make_the_run_of_one_process(run: Path, tmp_path: Path) -> None:
    alone, _ = train_here(run, "--exp_name", "alone", "--max_steps", "2")
    words = ("--exp_name", "two", "--max_steps", "2", "--parallel.sequence", "2")
    first, second = on_ranks(2, tmp_path, {"peers": partial(losses_of, run, words)})
    assert first["peers"] == second["peers"]
    assert first["peers"]["losses"] == pytest.approx([line["loss"] for line in metrics(alone.folder)], rel=1e-5)
