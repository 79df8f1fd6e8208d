"""Folders of whole Wan pipelines that diffusers wrote, sampled by us: the latents of its pipelines; two experts."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longtake.contracts import UserError
from longtake.families.wan_folders import root
from longtake.generate.checks import check_request
from longtake.generate.config import GenerateConfig
from longtake.generate.run import open_system
from longtake.generate.sample import Request, sample_videos, seeded_noise
from longtake.generate.source import GenerationSource
from longtake.models.wan_config import WanConfig, official_config
from longtake.parallel.offloaded_weights import OffloadedWeights
from longtake.parallel.shard import local_tensor
from longtake.parallel.world import World
from longtake.system.build import System
from longtake.system.config import SamplingOption
from longtake.verification.parts import check_parts
from longtake.weights.conversion import ConvertedWeights
from longtake.weights.files import save_weights
from longtake.weights.model import ModelWeights
from longtake.weights.wan import FORMAT
from tests.encoders.tiny_weights import _randomise, tiny_wan
from tests.models.golden_wan import FOLDER

SIZES = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 16, "ffn_dim": 40, "text_dim": 24}
SIZES |= {"freq_dim": 32, "cross_attn_norm": True, "qk_norm": "rms_norm_across_heads"}
KINDS = ("t2v", "ti2v", "a14b")
SHAPE = (9, 64, 64)
OPTION = {"resolution": "64px", "aspect_ratio": "1:1", "num_frames": 9, "num_steps": 6, "guidance": 4.0}
SHIFT = 5.0  # at which four of six steps are above the boundary
REQUEST = Request("a red circle moves up", 7, "blue square")
TOLERANCE = 1e-4  # issue 35's, of latents of order 1


def write_pipeline(folder: Path, kind: str, name: str = "WanPipeline") -> Any:
    """diffusers' pipeline of random weights, which it has written to `folder`."""
    import diffusers
    from transformers import AutoTokenizer, UMT5EncoderModel

    channels = 48 if kind == "ti2v" else 16
    sizes = {"in_channels": 36 if kind == "i2v_a14b" else channels, "out_channels": channels}
    experts = []
    for seed in (1, 2):
        experts.append(diffusers.WanTransformer3DModel(**SIZES, **sizes).eval())
        _randomise(experts[-1], seed)
    keys: dict[str, Any] = {}
    if "a14b" in kind:
        keys = {"transformer_2": experts[1], "boundary_ratio": 0.9 if kind == "i2v_a14b" else 0.875}
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": SHIFT}
    if name != "WanPipeline":
        keys |= {"image_encoder": None, "image_processor": None}
    pipe = getattr(diffusers, name)(
        tokenizer=AutoTokenizer.from_pretrained(FOLDER / "text" / "tokenizer"),
        text_encoder=UMT5EncoderModel.from_pretrained(FOLDER / "text", dtype=torch.float32).eval(),
        vae=tiny_wan(folder.parent / "autoencoder", "2.2" if kind == "ti2v" else "2.1"),
        scheduler=diffusers.UniPCMultistepScheduler(**flow),
        transformer=experts[0],
        expand_timesteps=kind == "ti2v",
        **keys,
    )
    pipe.save_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def config_of(folder: Path, **changes: Any) -> GenerateConfig:
    """A generation that names the folder of the whole model, and nothing of its parts."""
    keys = {"dtype": "fp32", "device": "cpu", "prompt": REQUEST.text, "objective": {"shift": SHIFT}}
    encoders = {"ae": {"dtype": "fp32"}, "t5": {"dtype": "fp32"}}
    sampling = {**OPTION, **changes.pop("sampling_option", {})}
    model = {"type": "wan", "from_pretrained": str(folder)}
    return GenerateConfig(sampling_option=sampling, **{"model": model, **keys, **encoders, **changes})


def opened(config: GenerateConfig, world: World) -> System:
    return open_system(GenerationSource(config, None), world, lambda line: None)


def latents_of(system: System, request: Request = REQUEST, **option: Any) -> Tensor:
    """The latents [1, C, F, h, w] of a generation, before they are decoded."""
    found = []
    sampling = SamplingOption(**{**OPTION, "solver": "unipc_diffusers", **option})
    sample_videos(system, [request], sampling, lambda done, total, x: found.append(x))
    return found[-1]


def theirs(pipe: Any, system: System, **keys: Any) -> Tensor:
    """The latents of diffusers' pipeline from our noise."""
    return pipe(
        prompt=REQUEST.text,
        negative_prompt=REQUEST.negative,
        num_frames=SHAPE[0],
        height=SHAPE[1],
        width=SHAPE[2],
        num_inference_steps=OPTION["num_steps"],
        guidance_scale=OPTION["guidance"],
        latents=seeded_noise(REQUEST.seed, system.latent(*SHAPE))[None],
        output_type="latent",
        max_sequence_length=512,
        **keys,
    ).frames


def used_experts(system: System) -> list[str]:
    """Names of the denoisers in the order of their calls, in a list that grows with them."""
    calls: list[str] = []
    for name, expert in zip(("high", "low"), system.experts, strict=False):
        expert.denoiser.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_text_becomes_the_latents_of_diffusers(tmp_path: Path, world: World, kind: str) -> None:
    pipe = write_pipeline(tmp_path / "published", kind)
    system = opened(config_of(tmp_path / "published"), world)
    calls = used_experts(system)
    low: dict[str, Any] = {"guidance_low": 3.0} if kind == "a14b" else {}
    latents = latents_of(system, **low)
    wanted = theirs(pipe, system, **({"guidance_scale_2": 3.0} if low else {}))
    assert wanted.std() > 0.1
    torch.testing.assert_close(latents, wanted, rtol=0, atol=TOLERANCE)
    assert (calls.count("high"), calls.count("low")) == ((3, 3) if low else (6, 0))


def test_a_first_frame_becomes_the_latents_of_diffusers(tmp_path: Path, world: World) -> None:
    pipe = write_pipeline(tmp_path / "published", "ti2v", "WanImageToVideoPipeline")
    system = opened(config_of(tmp_path / "published"), world)
    image = torch.rand(3, *SHAPE[1:], generator=torch.Generator().manual_seed(0))
    wanted = theirs(pipe, system, image=image[None])
    places = system.law.given("i2v_head", system.latent, SHAPE)
    request = replace(REQUEST, places=places, known=(image[:, None] * 2 - 1,))
    latents = latents_of(system, request)
    torch.testing.assert_close(latents[:, :, 1:], wanted[:, :, 1:], rtol=0, atol=TOLERANCE)


def first_frame_of(system: System, image: Tensor) -> Request:
    """The request of a video whose first frame is an image [3, H, W] in [0, 1]."""
    places = system.law.given("i2v_head", system.latent, SHAPE)
    (window,) = places.windows
    video = torch.zeros(3, len(window.pixels), *SHAPE[1:])
    video[:, 0] = image * 2 - 1
    return replace(REQUEST, places=places, known=(video,))


def test_both_experts_of_i2v_see_the_first_frame_and_make_the_latents_of_diffusers(
    tmp_path: Path, world: World
) -> None:
    pipe = write_pipeline(tmp_path / "published", "i2v_a14b", "WanImageToVideoPipeline")
    system = opened(config_of(tmp_path / "published"), world)
    assert system.config.low_noise.boundary == 0.9
    calls = used_experts(system)
    image = torch.rand(3, *SHAPE[1:], generator=torch.Generator().manual_seed(0))
    wanted = theirs(pipe, system, image=image[None], guidance_scale_2=3.0)
    latents = latents_of(system, first_frame_of(system, image), guidance_low=3.0)
    assert wanted.std() > 0.1
    torch.testing.assert_close(latents, wanted, rtol=0, atol=TOLERANCE)
    assert set(calls) == {"high", "low"}
    other = latents_of(system, first_frame_of(system, image.flip(-1)), guidance_low=3.0)
    assert (other - wanted).abs().max() > 100 * TOLERANCE


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pipeline of two experts."""
    folder = tmp_path_factory.mktemp("pair")
    write_pipeline(folder / "published", "a14b")
    return folder / "published"


def parts_of(folder: Path) -> dict[str, Any]:
    """The autoencoder and text encoder in the folder of a pipeline, as sections."""
    return {
        "ae": {"type": "wan", "from_pretrained": str(folder / "vae"), "dtype": "fp32"},
        "t5": {"type": "umt5", "from_pretrained": str(folder / "text_encoder"), "dim": 24, "dtype": "fp32"},
    }


def write_official(published: Path, folder: Path) -> Path:
    """The authors' folder of the two experts of a diffusers pipeline, without encoders."""
    for theirs_, ours in zip(("transformer", "transformer_2"), ("high_noise_model", "low_noise_model"), strict=True):
        config = WanConfig(from_pretrained=str(published / theirs_))
        own = ModelWeights(published / theirs_, config, FORMAT)
        converted = ConvertedWeights(FORMAT, own, config, FORMAT.as_published("official"))
        said = {"config.json": json.dumps(official_config(config) | {"text_dim": 24})}
        save_weights(converted, folder / ours, stem=FORMAT.stem, beside=said)
    return folder


def config_of_two(high: Path | str, low: Path | str, published: Path, **changes: Any) -> GenerateConfig:
    """A generation by two denoisers that are named one by one."""
    return config_of(Path(high), low_noise={"from_pretrained": str(low)}, **parts_of(published) | changes)


def test_an_official_folder_and_two_files_are_the_same_pair(pair: Path, tmp_path: Path, world: World) -> None:
    wanted = latents_of(opened(config_of(pair), world))
    official = write_official(pair, tmp_path / "official")
    config = config_of(official, **parts_of(pair))
    assert (config.low_noise.from_pretrained, config.low_noise.boundary) == (str(official / "low_noise_model"), 0.875)
    assert torch.equal(latents_of(opened(config, world)), wanted)
    files = [tmp_path / f"{name}.safetensors" for name in ("high", "low")]
    for file, name in zip(files, ("transformer", "transformer_2"), strict=True):
        shutil.copy(pair / name / "diffusion_pytorch_model.safetensors", file)
    sizes = WanConfig(from_pretrained=str(pair / "transformer")).model_dump()
    config = config_of_two(*files, pair, model={**sizes, "from_pretrained": str(files[0])})
    assert torch.equal(latents_of(opened(config, world)), wanted)


def test_one_expert_twice_is_one_model_bit_for_bit(pair: Path, world: World) -> None:
    high = pair / "transformer"
    one = latents_of(opened(config_of(high, **parts_of(pair)), world))
    twice = opened(config_of_two(high, high, pair), world)
    calls = used_experts(twice)
    assert torch.equal(latents_of(twice), one)
    assert set(calls) == {"high", "low"}
    assert torch.equal(latents_of(twice, guidance_low=OPTION["guidance"]), one)
    assert not torch.equal(latents_of(twice, guidance_low=3.0), one)


@pytest.mark.parametrize("solver", ["euler", "ab2", "dpmpp_2m"])
def test_each_denoiser_has_the_times_on_its_side_of_the_boundary(pair: Path, world: World, solver: str) -> None:
    system = opened(config_of(pair), world)
    times: dict[str, list[float]] = {"high": [], "low": []}
    for name, expert in zip(times, system.experts, strict=True):
        expert.denoiser.register_forward_pre_hook(lambda _, given, name=name: times[name].extend(given[1].tolist()))
    latents_of(system, solver=solver)
    assert min(times["high"]) >= 875 > max(times["low"])


def test_a_guidance_of_one_runs_the_prompt_alone(pair: Path, world: World) -> None:
    system = opened(config_of(pair), world)
    branches: list[int] = []
    for expert in system.experts:
        expert.denoiser.register_forward_pre_hook(lambda _, given: branches.append(len(given[0])))
    latents_of(system, guidance=1.0, guidance_low=3.0)
    assert branches == [1, 1, 1, 2, 2, 2]
    branches.clear()
    latents_of(system, guidance=3.0, guidance_low=1.0)
    assert branches == [2, 2, 2, 1, 1, 1]


def test_only_the_denoiser_that_works_is_on_the_device(pair: Path, world: World) -> None:
    plain = opened(config_of(pair), world)
    wanted = latents_of(plain)
    cpu = torch.device("cpu")
    held = [replace(one, offloaded_weights=OffloadedWeights(one.denoiser, cpu)) for one in plain.experts]
    system = replace(held[0], low_noise=held[1])

    def on_device() -> list[bool]:
        sizes = (local_tensor(p).untyped_storage().nbytes() for one in held for p in [next(one.denoiser.parameters())])
        return [size > 0 for size in sizes]

    seen: list[tuple[bool, ...]] = []
    for one in held:
        one.denoiser.register_forward_pre_hook(lambda *_: seen.append(tuple(on_device())))
    assert on_device() == [False, False]
    assert torch.equal(latents_of(system), wanted)
    assert seen == [(True, False)] * 3 + [(False, True)] * 3
    assert on_device() == [False, False]


def test_the_boundary_is_that_of_the_folder_or_of_the_kind_of_model(tmp_path: Path) -> None:
    config = {"_class_name": "WanModel", "model_type": "i2v", "in_dim": 36, "out_dim": 16, "num_layers": 1}
    for name in ("high_noise_model", "low_noise_model"):
        (tmp_path / "i2v" / name).mkdir(parents=True)
        (tmp_path / "i2v" / name / "config.json").write_text(json.dumps(config))
    assert root(str(tmp_path / "i2v"))["low_noise"]["boundary"] == 0.9
    published = {"_class_name": "WanTransformer3DModel", "in_channels": 16, "out_channels": 16}
    for name in ("transformer", "transformer_2"):
        (tmp_path / "t2v" / name).mkdir(parents=True)
        (tmp_path / "t2v" / name / "config.json").write_text(json.dumps(published))
    index = {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.7}
    (tmp_path / "t2v" / "model_index.json").write_text(json.dumps(index))
    assert root(str(tmp_path / "t2v"))["low_noise"] == {
        "from_pretrained": str(tmp_path / "t2v" / "transformer_2"),
        "boundary": 0.7,
    }


@pytest.mark.parametrize("boundary", [0.0, 1.0, 875])
def test_a_boundary_outside_0_and_1_is_refused(pair: Path, boundary: float) -> None:
    with pytest.raises(ValueError, match="expected a number between 0 and 1"):
        config_of(pair, low_noise={"boundary": boundary})


@pytest.mark.parametrize(("names", "lost"), [("official", 0), ("official", 1), ("diffusers", 1)])
def test_a_folder_of_one_expert_alone_is_refused(pair: Path, tmp_path: Path, names: str, lost: int) -> None:
    folder = tmp_path / "pair"
    experts = ("high_noise_model", "low_noise_model") if names == "official" else ("transformer", "transformer_2")
    if names == "official":
        write_official(pair, folder)
    else:
        shutil.copytree(pair, folder)
    shutil.rmtree(folder / experts[lost])
    with pytest.raises(ValueError, match=f"holds the expert {experts[1 - lost]} and no {experts[lost]}; copy"):
        config_of(folder, **parts_of(pair))
    assert config_of(folder / experts[1 - lost], **parts_of(pair)).low_noise is None


def test_a_second_denoiser_of_other_sizes_is_named_before_one_is_built(pair: Path, tmp_path: Path) -> None:
    state = load_file(pair / "transformer_2" / "diffusion_pytorch_model.safetensors")
    other = {name: value for name, value in state.items() if not name.startswith("blocks.1.")}
    save_file(other, tmp_path / "low.safetensors")
    config = config_of_two(pair / "transformer", tmp_path / "low.safetensors", pair)
    with pytest.raises(UserError, match=r"low\.safetensors: holds a Wan with num_layers = 1, and .* num_layers = 2"):
        check_request(config)
    with pytest.raises(UserError, match=r"low_noise.from_pretrained = .*: no such file"):
        check_request(config_of_two(pair / "transformer", tmp_path / "none.safetensors", pair))


def test_both_denoisers_are_verified_against_the_library(pair: Path) -> None:
    found = {part.name: part for part in check_parts(config_of(pair), torch.device("cpu"), lambda name: None)}
    assert set(found) == {"denoiser", "low_noise", "ae", "t5"}
    assert all(part.problem is None for part in found.values())
    assert found["denoiser"].sha256 != found["low_noise"].sha256


def test_a_scale_for_a_second_denoiser_needs_one(pair: Path) -> None:
    with pytest.raises(ValueError, match="guidance_low = 3: is for a second denoiser"):
        config_of(pair / "transformer", sampling_option={"guidance_low": 3.0}, **parts_of(pair))
