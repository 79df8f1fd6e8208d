"""The benchmark of a step runs at its smallest size, on a CPU, without diffusers."""

from __future__ import annotations

import argparse
import json
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from longtake.models import Attention
from longtake.parallel import INPUTS, Mesh, ParallelConfig, start_world
from tests import forks

ROOT = Path(__file__).parents[2]


def run(target: Path, *words: str) -> tuple[str, dict[str, Any]]:
    """What the program printed, and the figures it wrote."""
    program = ("-m", "tests.benchmarks.program", "step")
    done = forks.run([sys.executable, *program, "--tiny", "--json", target, *words], timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(target.read_text())["figures"]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "remat"), [("flux", ("1", "1")), ("cogvideox-5b", ("1",))])
def test_a_step_is_timed_in_its_phases(tmp_path: Path, model: str, remat: tuple[str, ...]) -> None:
    own = ("--model", model, "--remat", *remat)
    said, figures = run(tmp_path / "step.json", "--no-peer", "--device", "cpu", *own)
    assert "forward ms" in said
    for line in figures["runs"]:
        assert set(line["phases_ms"]) == {"data", "encode", "forward", "backward", "optimizer"}
        assert min(line["phases_ms"].values()) > 0
        assert line["tokens_per_second"] > 0
        assert line["forecast_bytes"] > 0


def test_a_budget_is_a_share_or_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    step = import_module("step")
    assert [step._level(word) for word in ("none", "inputs", "0.5")] == [None, INPUTS, 0.5]
    with pytest.raises(argparse.ArgumentTypeError, match="2 is no share: 0 to 1 is"):
        step._level("2")


def test_lines_of_a_part_that_is_cut_short_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    kernels = import_module("kernels")

    def cut_short(arguments: Any) -> Iterator[dict[str, Any]]:
        yield {"what": "one", "ms": 1.0, "rate": "fast"}
        raise SystemExit(124)

    monkeypatch.setitem(kernels.PARTS, "t5", cut_short)
    monkeypatch.setattr(sys, "argv", ["kernels", "t5", "--device", "cpu", "--json", str(tmp_path / "out.json")])
    with pytest.raises(SystemExit):
        kernels.main()
    assert [line["what"] for line in json.loads((tmp_path / "out.json").read_text())["figures"]["runs"]] == ["one"]


@pytest.mark.slow
def test_every_kind_of_kernel_is_measured_at_its_tiny_size(tmp_path: Path) -> None:
    parts = ["sustained", "gemm", "attention", "varlen", "vae", "t5", "tiles", "chain"]
    program = [sys.executable, "-m", "tests.benchmarks.program", "kernels", *parts, "--tiny", "--device", "cpu"]
    done = forks.run([*program, "--json", tmp_path / "out.json"], timeout=600)
    assert done.returncode == 0, done.stderr
    lines = json.loads((tmp_path / "out.json").read_text())["figures"]["runs"]
    assert {line["part"] for line in lines} == set(parts)


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--budget", "none", "1"), ("--lora", "16"), ("--sequence", "2")])
def test_time_of_a_compiled_step_is_shared_out_by_kind_of_kernel(tmp_path: Path, options: tuple[str, ...]) -> None:
    compiled = ("--compiled-step", "--backend", "aot_eager_decomp_partition", "--static", "--remat", "1", "1")
    _, figures = run(tmp_path / "step.json", "--no-peer", "--profile", "--device", "cpu", *compiled, *options)
    for line in figures["runs"]:
        assert line["graphs"] > 0
        assert set(line["classes_ms"]) >= {"gemm", "elementwise"}


def test_packed_samples_attend_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    attention, alone = nn.ModuleList([Attention("math")]), Attention("math")
    q, k, v = torch.randn(3, 1, 12, 2, 8)
    import_module("step_limits").pack_samples(attention, [5, 7], torch.device("cpu"))
    expected = torch.cat([alone(q[:, rows], k[:, rows], v[:, rows]) for rows in (slice(5), slice(5, 12))], dim=1)
    torch.testing.assert_close(attention[0](q, k, v), expected)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNT", "gemm"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32", "convolution"),
        ("void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda>", "copy"),
        ("prims::convert_element_type", "elementwise"),
        ("triton_poi_fused__to_copy__scaled_dot_product_cudnn_attention_cat_mm_3", "elementwise"),
        ("triton_red_fused_add_addmm_native_layer_norm_convolution_0", "elementwise"),
        ("triton_tem_fused_mm_0", "gemm"),
    ],
)
def test_a_kernel_is_of_the_class_of_what_it_computes(monkeypatch: pytest.MonkeyPatch, kernel: str, kind: str) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    assert import_module("step_limits").class_of(kernel) == kind


@pytest.mark.parametrize(("frozen", "products"), [(False, 3), (True, 2)])
def test_limit_divides_by_the_rate_of_the_largest_gemm_of_the_step(
    monkeypatch: pytest.MonkeyPatch, frozen: bool, products: int
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    limits = import_module("step_limits")
    model = import_module("step_models").SUBJECTS["flux"].sizes["tiny"].model  # 96 wide, mlp of 384
    rounds: list[int] = []

    def sustained(calls: Any, device: torch.device, seconds: float) -> float:
        assert seconds == 8.0
        rounds.append(len(calls))
        return 2.0

    monkeypatch.setattr(limits, "sustained_seconds", sustained)
    sizes = (16, 1, 8, 8), 16, 2
    found = limits.gemm_rate(model, *sizes, torch.float32, torch.device("cpu"), 8.0, frozen)
    rows, width, out = found["shape"]
    assert (rows, width, out) == (2 * (16 + 16), 96, 96 + 384)  # values and MLP of single blocks, image and text tokens
    assert rounds == [products]
    assert found["flops_per_second"] == products * 2 * rows * width * out / 2.0
    rate = {"forward": 1.0, "backward": 2.5}
    limit = limits.limit_seconds(120.0, 30.0, {"flash": rate}, 2.0, frozen)
    assert limit == 90.0 * products / 3 / 2.0 + 10.0 + 10.0
    assert limits.limit_seconds(120.0, 30.0, {"flash": rate}, None) is None


def test_sustained_load_runs_for_its_seconds_in_whole_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    limits = import_module("step_limits")
    now = [0.0]
    monkeypatch.setattr(limits.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(limits.measure, "clock", lambda device: now[0])

    def call() -> None:
        now[0] += 0.5

    assert limits.sustained_seconds([call, call], torch.device("cpu"), 8.0) == 1.0
    assert now[0] == 1.0 + 8.0
    assert limits.sustained_seconds([call], torch.device("cpu"), 0.0) == 0.5


@pytest.fixture
def step_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """A step of the tiny model, in float32, that runs as it is told."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    step, parts = import_module("step"), import_module("step_run")
    model = step.with_blocks(import_module("step_models").SUBJECTS["flux"].sizes["tiny"].model, (1, 1))
    usual = parts.How(
        remat=(0, 0),
        compiled=False,
        static=False,
        budget=INPUTS,
        attention="sdpa",
        lora=None,
        latents="stored",
        sequence=1,
        backend="eager",
        autotune_reductions=False,
    )
    with start_world("cpu") as world:
        mesh = Mesh.create(ParallelConfig(), world)

        def made(**changes: Any) -> Any:
            case = step.Case(model, model, (1, 64, 64), 2, 16)
            return parts.OurStep(case, mesh, world, torch.float32, replace(usual, **changes), step.DEFAULTS)

        yield made


def test_a_measured_step_is_gone_before_the_next_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its weights would be in the next one's peak."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    step, left = import_module("step"), []

    class Watched(step.OurStep):
        def __init__(self, *given: Any) -> None:
            left.append([of() is not None for of in made])
            super().__init__(*given)
            made.append(weakref.ref(self.model))

    made: list[weakref.ref[Any]] = []
    monkeypatch.setattr(step, "OurStep", Watched)
    monkeypatch.setattr(sys, "argv", ["step", "--tiny", "--no-peer", "--batch", "1", "2"])
    arguments = step._arguments()
    arguments.seconds = 0.0
    with start_world("cpu") as world:
        for case in step._cases(arguments, world):
            step.measure(case, None, world, arguments)
    assert left[:2] == [[], [False]]


def test_a_step_that_does_not_fit_is_noted_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    step = import_module("step")
    measure = step.measure

    def short_of_memory(case: Any, *given: Any) -> dict[str, Any]:
        if case.batch == 2:
            raise torch.OutOfMemoryError("no room")
        return measure(case, *given)

    monkeypatch.setattr(step, "measure", short_of_memory)
    words = ["--tiny", "--no-peer", "--device", "cpu", "--batch", "2", "1", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["step", *words])
    with pytest.raises(SystemExit) as ended:
        step.main()
    runs = json.loads((tmp_path / "out.json").read_text())["figures"]["runs"]
    assert ended.value.code == 1
    assert {line["batch"]: line.get("out_of_memory", False) for line in runs} == {2: True, 1: False}


def calls_of(step: Any, operator: str) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step.run()
    return sum(one.count for one in trace.key_averages() if one.key == operator)


def test_attention_runs_on_the_kernel_that_is_named_and_again_unless_a_budget_keeps_it(
    step_of: Callable[..., Any],
) -> None:
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert calls_of(step_of(), kernel) == 2  # once in each block
    assert calls_of(step_of(attention="math"), kernel) == 0
    assert calls_of(step_of(remat=(1, 1)), kernel) == 4
    assert calls_of(step_of(remat=(1, 1), budget=0.0), kernel) == 2


@pytest.mark.slow
def test_graphs_of_a_shape_each_or_one_for_all(step_of: Callable[..., Any]) -> None:
    for static, graphs in ((True, 4), (False, 2)):  # of two kinds of block, for two shapes
        step = step_of(static=static, compiled=True)
        for batch in (2, 3):
            conditions = replace(step.case, batch=batch).conditions()
            step.model(torch.randn(batch, *step.case.latent_shape), torch.rand(batch), conditions).sum().backward()
        assert step.graphs == graphs
    torch.compiler.reset()


def test_adapters_alone_train(step_of: Callable[..., Any]) -> None:
    step = step_of(lora=4)
    before = {name: parameter.detach().clone() for name, parameter in step.model.named_parameters()}
    step.run()
    changed = {name for name, old in before.items() if not torch.equal(old, dict(step.model.named_parameters())[name])}
    assert changed
    assert changed == {name for name in before if "lora" in name}


def test_a_peer_attends_over_all_tokens_with_its_share_of_the_heads(step_of: Callable[..., Any]) -> None:
    attend, shapes = Attention.forward, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attention, "forward", lambda self, *qkv: shapes.append(tuple(qkv[0].shape)) or attend(self, *qkv))
        emulated = step_of(sequence=2)
    emulated.run()
    tokens, heads = 16 + 16, 4
    assert set(shapes) == {(2, 2 * tokens, heads // 2, 24)}


@pytest.mark.skipif(not find_spec("diffusers"), reason="no diffusers is installed")
def test_a_step_that_encodes_takes_its_latents_from_pixels(step_of: Callable[..., Any]) -> None:
    step, seen = step_of(latents="online"), []
    encode = step.autoencoder.posterior
    step.autoencoder.posterior = lambda pixels: seen.append(pixels.shape) or encode(pixels)
    step.run()
    assert seen == [(2, 3, 1, 64, 64)]


@pytest.mark.slow
def test_the_overhead_of_the_trainer_is_told_by_part(tmp_path: Path) -> None:
    said, figures = run(tmp_path / "overhead.json", "--overhead")
    assert "target: other alone <= 2%" in said
    assert figures["parts_ms"]["wait"] > 0
    assert figures["overhead_without_optimizer"] < figures["overhead"]  # one median, and it with a part added
    assert figures["steps"] >= 4
