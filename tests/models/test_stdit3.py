"""STDiT3 against the published program, and what it promises about sizes, dtypes, conditions and cost."""

from __future__ import annotations

import copy
import json
import re
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from longtake.contracts import UserError
from longtake.models.build import build_denoiser
from longtake.models.layers import rotate_interleaved, timestep_features
from longtake.models.stdit3 import STDiT3, add_gated, modulate
from longtake.models.stdit3_config import STDiT3Config, published_config, section_of
from longtake.models.stdit3_inputs import FramePositions, frame_frequencies, sine_positions
from longtake.parallel.compile import missing_compiler
from tests.models.golden_stdit3 import FOLDER, golden_model, inputs_of, random_inputs, read_golden, tiny_config
from tests.models.initialised import initialise
from tests.precision import rounding

close = partial(torch.testing.assert_close, rtol=0)
CASES = [(kind, case["name"]) for kind in ("base", "small") for case in read_golden(f"stdit3_{kind}_cases")[0]["cases"]]


@pytest.mark.parametrize("attention", ["math", "sdpa"])
@pytest.mark.parametrize(("kind", "case"), [pair for pair in CASES if pair[1] != "skip_y"])
def test_outputs_and_gradients_equal_the_reference(kind: str, case: str, attention: str) -> None:
    model, (_, tensors) = golden_model(kind, attention=attention), read_golden(f"stdit3_{kind}_cases")
    out = model.all_channels(*inputs_of(tensors, case))
    close(out, tensors[f"{case}.out"], atol=5e-5)
    expected = {
        name.removeprefix(f"{case}.grad."): value for name, value in tensors.items() if name.startswith(f"{case}.grad.")
    }
    out.square().mean().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    largest = max((float(gradient.abs().max()) for gradient in expected.values()), default=0.0)
    zero = rounding(largest)  # of a gradient that is rounding alone
    for name, gradient in expected.items():
        close(found[name], gradient, atol=float(5e-5 * gradient.abs().max()) + zero, msg=name)


def test_text_that_is_embedded_already_is_read_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The golden case `skip_y`: texts behind each other, with their lengths."""
    model, (info, tensors) = golden_model("base"), read_golden("stdit3_base_cases")
    [lengths] = [case["lens"] for case in info["cases"] if case["name"] == "skip_y"]
    texts = tensors["skip_y.y"][0].split(lengths)
    text = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    x, t, conditions = inputs_of({**tensors, "skip_y.y": text[:, None], "skip_y.mask": mask}, "skip_y")
    monkeypatch.setattr(model, "y_embedder", torch.nn.Identity())
    monkeypatch.setattr(model, "_check_inputs", lambda *inputs: None)
    close(model.all_channels(x, t, conditions), tensors["skip_y.out"], atol=5e-5)


def test_the_prediction_is_the_first_channels() -> None:
    model, (_, tensors) = golden_model("base"), read_golden("stdit3_base_cases")
    close(model(*inputs_of(tensors, "odd_x_mask")), tensors["odd_x_mask.out"][:, :4], atol=5e-5)


def test_what_stands_for_no_text_is_embedded_as_the_reference_does() -> None:
    model, (_, tensors) = golden_model("base"), read_golden("stdit3_base_cases")
    dropped, text = tensors["drop.ids"].bool(), tensors["drop.y"][:, 0]
    text = model.y_embedder.y_embedding.where(dropped[:, None, None], text)
    close(model.y_embedder(text)[:, None], tensors["drop.out"], atol=5e-5)


def test_parts_equal_the_reference() -> None:
    info, tensors = read_golden("stdit3_parts")
    for i, (width, rows, columns, scale, base) in enumerate(info["grids"]):
        if base is not None:
            close(sine_positions((rows, columns), width, base / scale)[None], tensors[f"pos.{i}"], atol=1e-5)
    close(timestep_features(tensors["time.t"].float(), factor=1.0), tensors["time.embedding"], atol=1e-3)
    close(frame_frequencies(72), tensors["rope.freqs"], atol=rounding(1.0))
    q, rope = tensors["rope.in"], FramePositions(72)(11, torch.device("cpu"))[:, :, 0]
    close(rotate_interleaved(q.transpose(1, 2), rope).transpose(1, 2), tensors["rope.out"], atol=1e-5)
    normed = torch.nn.functional.rms_norm(q, (72,), tensors["rms.weight"], 1e-6)
    close(normed, tensors["rms.out"], atol=1e-5)


@pytest.mark.parametrize(("name", "sizes"), [("STDiT3-XL/2", (1152, 16)), ("STDiT3-3B/2", (1872, 26))])
def test_full_sizes_have_the_published_tensors(name: str, sizes: tuple[int, int]) -> None:
    facts = json.loads((FOLDER / "state_keys.json").read_text())[name]
    config = STDiT3Config(hidden_size=sizes[0], num_heads=sizes[1])
    with torch.device("meta"):
        model = build_denoiser(config)
    shapes = {key: list(value.shape) for key, value in model.state_dict().items()} | {"rope.freqs": [36]}
    assert len(shapes) == facts["num_tensors"]
    starred = {key.replace("_blocks.0.", "_blocks.*."): shape for key, shape in shapes.items() if "_blocks.0." in key}
    rest = {key: shape for key, shape in shapes.items() if "_blocks." not in key}
    assert rest | starred == facts["tensors"]
    buffer = model.y_embedder.y_embedding.numel()  # which is no parameter there, as the frequencies are
    assert sum(p.numel() for p in model.parameters()) - buffer + 36 == facts["num_parameters"]
    assert STDiT3Config(**section_of(published_config(config), "config.json")) == config


def test_parameters_start_as_in_the_reference_and_temporal_blocks_as_the_identity() -> None:
    facts = json.loads((FOLDER / "stdit3_init.json").read_text())
    model = STDiT3(STDiT3Config(**facts["config"]))
    initialise(model, 0)
    state = model.state_dict()
    for name, law in facts["tensors"].items():
        if name == "rope.freqs":
            continue
        value = state[name]
        if isinstance(law, str):
            assert (value == (law == "ones")).all(), name
            continue
        assert list(value.shape) == law["shape"], name
        spread = 4 / value.numel() ** 0.5  # of a few hundred numbers, a deviation of 5 % is chance
        assert value.std().item() == pytest.approx(law["std"], rel=max(0.05, spread)), name
        if value.numel() > 5000 and law["max"] < 2 * law["std"]:  # uniform
            assert value.abs().max().item() == pytest.approx(law["max"], rel=0.01), name
    tokens, others = torch.randn(2, 6, 96), (torch.randn(2, 3, 6, 96), torch.randn(2, 4, 96))
    mask, rope = torch.ones(2, 1, 1, 4, dtype=torch.bool), model.frame_positions(3, torch.device("cpu"))
    assert torch.equal(model.temporal_blocks[0](tokens, *others, mask, 2, rope), tokens)


@pytest.mark.parametrize("size", [(1, 1, 1), (5, 7, 10), (2, 20, 6)])
def test_any_latent_size_comes_back_in_its_own_shape(size: tuple[int, int, int]) -> None:
    model = STDiT3(tiny_config())
    initialise(model, 0)
    x, t, conditions = random_inputs(model.config, size, known=True)
    out = model(x, t, conditions)
    assert out.shape == x.shape
    assert torch.isfinite(out).all()


def test_tokens_behind_the_mask_are_never_read() -> None:
    model = STDiT3(tiny_config())
    initialise(model, 0)
    x, t, conditions = random_inputs(model.config)
    text = conditions["text"].where(conditions.masks["text"][..., None], 7.0)
    assert torch.equal(model(x, t, conditions.updated(text=text)), model(x, t, conditions))


def test_bf16_weights_take_fp32_inputs_and_tell_close_timesteps_apart() -> None:
    model = STDiT3(tiny_config())
    initialise(model, 0)
    x, t, conditions = random_inputs(model.config)
    t = torch.tensor([998.0, 999.0])
    exact = model(x, t, conditions)
    rounded = model.bfloat16()(x, t, conditions)
    bound = rounding(float(exact.detach().abs().max()), steps=2, dtype=torch.bfloat16)  # of two blocks
    torch.testing.assert_close(rounded.float(), exact, atol=bound, rtol=0)
    assert t.bfloat16().unique().numel() == 1
    assert not torch.equal(model(x, t + 1, conditions), rounded)


@pytest.mark.parametrize("name", ["text", "fps", "size"])
def test_a_missing_or_misshapen_condition_is_named(name: str) -> None:
    model = STDiT3(tiny_config())
    x, t, conditions = random_inputs(model.config)
    with pytest.raises(UserError, match=f"condition `{name}`, which was not given"):
        model(x, t, conditions.updated(**{name: None}))
    with pytest.raises(UserError, match=f"condition `{name}` has shape"):
        model(x, t, conditions.updated(**{name: conditions[name][:1]}))


def test_forward_flops_equal_the_counter_of_torch() -> None:
    config = tiny_config(attention="math")
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        x, t, conditions = random_inputs(config, (4, 5, 6))
        build_denoiser(config)(x, t, conditions)
    assert counter.get_total_flops() == 2 * STDiT3.forward_flops(config, (3, 4, 5, 6), 5)


def test_a_traced_model_gives_the_same_answer() -> None:
    model = STDiT3(tiny_config())
    initialise(model, 0)
    inputs = random_inputs(model.config)
    traced = torch.compile(copy.deepcopy(model), backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(*inputs), model(*inputs), atol=1e-6, rtol=0)


@pytest.mark.slow
def test_compiled_gate_residual_norm_and_modulation_are_one_kernel_each_way() -> None:
    from torch._inductor.utils import run_and_get_code

    assert missing_compiler(torch.device("cpu")) is None
    tokens, (gate, shift, scale) = torch.randn(2, 2, 18, 64).requires_grad_(), torch.randn(3, 2, 3, 1, 64).unbind()
    frames = [one.requires_grad_() for one in (gate, shift, scale)]

    def between(x: torch.Tensor, out: torch.Tensor, gate: torch.Tensor, *how: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = add_gated(x, gate, out, 6)
        return x, modulate(x, *how, 6)

    compiled = torch.compile(between)
    run = lambda: sum(one.square().sum() for one in compiled(*tokens, *frames)).backward()  # noqa: E731
    codes = run_and_get_code(run)[1]
    assert [len(set(re.findall(r"cpp_fused\w+", code))) for code in codes] == [1, 1]
