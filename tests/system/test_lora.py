"""Runs that train adapters, or a part of the model: what they write, how they go on, what comes of them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from longtake.checkpoint.contents import inspect
from longtake.contracts import UserError
from longtake.generate.run import open_system
from longtake.generate.source import resolve_source
from longtake.parallel.world import start_world
from longtake.system.export import export_adapters, export_merged, export_model
from tests.train.runs import assert_same_bits, exact, run_command, state_of, tensors, train_here, write_config

LORA = ("--lora.rank", "2", "--lora.alpha", "4", "--max-steps", "3", "--ckpt-every", "1", "--lr", "1e-2")


@pytest.fixture(scope="module")
def base(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights to start from: those of a run of one step, as a file in the folder of its config."""
    folder = tmp_path_factory.mktemp("base")
    outcome, _ = train_here(write_config(folder, clips), "--exp-name", "base", "--max-steps", "1")
    return export_model(str(outcome.folder), folder / "base.safetensors")


def predicted(source: Path, *flags: str) -> Tensor:
    """What the denoiser of a generation from `source` makes of fixed inputs."""
    with start_world("cpu") as world, torch.no_grad():
        system = open_system(resolve_source(str(source), flags), world, lambda line: None)
        x = torch.randn(1, 1536, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        return system.denoiser(x, torch.tensor([0.5]), system.embed(["a red circle"])).float()


def test_a_checkpoint_holds_adapters_alone_and_a_run_goes_on_from_them(config: Path, base: Path) -> None:
    start = ("--model.from-pretrained", str(base), *LORA)
    whole, _ = train_here(config, "--exp-name", "whole", *start)
    names = {row.name for row in inspect(whole.checkpoint).rows}
    assert all(name.rpartition("lora_")[1] for name in names)
    assert {name.partition(".")[0] for name in names} == {"model", "ema", "optim"}
    assert not (whole.folder / "frozen").exists()
    facts = state_of(whole.checkpoint)
    assert facts["frozen"]["source"] == str(base)
    assert facts["adapters"]["double_blocks.0.img_attn.qkv"] == 2.0
    part, _ = train_here(config, "--exp-name", "part", *start, "--max-steps", "2")
    train_here(part.folder, "--max-steps", "3")
    assert exact(part.folder) == exact(whole.folder)
    assert_same_bits(part.folder / whole.checkpoint.name, whole.checkpoint)


def test_another_base_is_refused(config: Path, base: Path, tmp_path: Path) -> None:
    other, _ = train_here(config, "--exp-name", "other", "--max-steps", "2", "--seed", "8")
    file = export_model(str(other.folder), tmp_path / "other.safetensors")
    run, _ = train_here(config, "--exp-name", "run", "--model.from-pretrained", str(base), *LORA, "--max-steps", "1")
    with pytest.raises(UserError, match=r"was trained on frozen weights of digest .*base.safetensors.*, the run has"):
        train_here(run.folder, "--model.from-pretrained", str(file), "--max-steps", "2")


def test_another_alpha_is_refused(config: Path, base: Path) -> None:
    run, _ = train_here(config, "--exp-name", "run", "--model.from-pretrained", str(base), *LORA, "--max-steps", "1")
    with pytest.raises(
        UserError, match=r"were trained at the scale 2 .*, the run has 4; leave these keys as they were"
    ):
        train_here(run.folder, "--lora.alpha", "8", "--max-steps", "2")


@pytest.mark.parametrize("dora", [False, True])
def test_a_run_its_adapters_and_its_merged_weights_make_the_same(
    dora: bool, config: Path, base: Path, tmp_path: Path
) -> None:
    start = ("--model.from-pretrained", str(base), "--lora.dora", str(dora))
    run, _ = train_here(config, "--exp-name", "run", *LORA, *start)
    wanted = predicted(run.folder)
    assert (wanted - predicted(base)).abs().max() > 1e-3
    merged = export_merged(str(run.folder), tmp_path / "merged.safetensors")
    torch.testing.assert_close(predicted(merged), wanted, rtol=1e-4, atol=1e-4)
    for family, name in (("peft", "peft"), ("diffusers", "d.safetensors"), ("comfy", "c.safetensors")):
        file = export_adapters(str(run.folder), tmp_path / name, family)
        found = predicted(base, "--lora.from-pretrained", str(file))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        none = predicted(base, "--lora.from-pretrained", str(file), "--lora.strength", "0")
        torch.testing.assert_close(none, predicted(base), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored", ["file", "frozen"])
def test_a_run_from_a_run_with_adapters_keeps_them_or_has_them_merged(
    stored: str, config: Path, base: Path, tmp_path: Path
) -> None:
    start = ("--model.from-pretrained", str(base)) if stored == "file" else ()
    first, _ = train_here(config, "--exp-name", "first", *start, *LORA)
    wanted = predicted(first.folder)
    again = ("--model.from-pretrained", str(first.checkpoint), "--max-steps", "1")
    for name, words, what in (
        ("same", LORA[:4], "those under the adapters of"),
        ("higher", ("--lora.rank", "3", "--lora.dora", "True"), "with the averaged adapters merged into them, from"),
        ("whole", (), "with the averaged adapters merged into them, from"),
    ):
        run, said = train_here(config, "--exp-name", name, *again, *words, "--lr", "1e-9", "--initial-lr", "0")
        assert f"weights: {what} {first.checkpoint}" in said
        torch.testing.assert_close(predicted(run.folder), wanted, rtol=1e-4, atol=1e-4)
        train_here(run.folder, "--max-steps", "2")
        if words:
            merged = export_merged(str(run.folder), tmp_path / f"{name}.safetensors")
            torch.testing.assert_close(predicted(merged), predicted(run.folder), rtol=1e-4, atol=1e-4)
    same, facts = tensors(first.folder.parent / "same" / "epoch0-global_step1"), state_of(first.checkpoint)
    averages = {name: value for name, value in tensors(first.checkpoint).items() if name.startswith("ema.")}
    for name, value in averages.items():
        torch.testing.assert_close(same[name.replace("ema", "model", 1)], value, rtol=0, atol=1e-6)
    kept, grown = (state_of(first.folder.parent / name / "epoch0-global_step1") for name in ("same", "higher"))
    assert kept["frozen"]["digest"] == facts["frozen"]["digest"] != grown["frozen"]["digest"]
    named = export_adapters(str(first.folder.parent / "same"), tmp_path / "peft", "peft") / "adapter_config.json"
    assert json.loads(named.read_text())["base_model_name_or_path"] == (str(base) if stored == "file" else None)


def test_coded_weights_under_adapters_are_merged_for_a_run_of_all(config: Path, tmp_path: Path) -> None:
    wide = ("--model.hidden-size", "64", "--model.axes-dim", "[8, 12, 12]")
    first, _ = train_here(config, "--exp-name", "first", *LORA, *wide, "--lora.base", "int8")
    start = ("--model.from-pretrained", str(first.checkpoint), "--max-steps", "1", "--lr", "1e-9", "--initial-lr", "0")
    whole, _ = train_here(config, "--exp-name", "whole", *wide, *start)
    torch.testing.assert_close(predicted(whole.folder), predicted(first.folder), rtol=1e-3, atol=1e-3)


def test_adapters_lie_upon_the_checkpoint_of_another_run(config: Path, base: Path, tmp_path: Path) -> None:
    run, _ = train_here(config, "--exp-name", "run", "--model.from-pretrained", str(base), *LORA)
    file = export_adapters(str(run.folder), tmp_path / "a.safetensors", "diffusers")
    full = base.parent / "outputs" / "base"
    found = predicted(full, "--lora.from-pretrained", str(file))
    torch.testing.assert_close(found, predicted(run.folder), rtol=1e-4, atol=1e-4)
    again = shutil.copy(file, tmp_path / "again.safetensors")  # a quarter and three quarters of the same are the whole
    parts = predicted(full, "--lora", str(file), "--lora-scale", "0.25", "--lora-more", f"[('{again}', 0.75)]")
    torch.testing.assert_close(parts, found, rtol=1e-4, atol=1e-4)
    half = predicted(full, "--lora", str(file), "--lora-more", f"[('{again}', -0.5)]")
    torch.testing.assert_close(half, predicted(full, "--lora", str(file), "--lora-scale", "0.5"), rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match="the run has adapters of its own; merge them first"):
        predicted(run.folder, "--lora.from-pretrained", str(file))


def test_training_goes_on_from_adapters_in_a_file(config: Path, base: Path, tmp_path: Path) -> None:
    first, _ = train_here(config, "--exp-name", "first", "--model.from-pretrained", str(base), *LORA)
    file = export_adapters(str(first.folder), tmp_path / "peft", "peft", part="model")
    flags = ("--model.from-pretrained", str(base), "--lora.from-pretrained", str(file), "--max-steps", "1")
    second, _ = train_here(config, "--exp-name", "second", *flags, "--lr", "1e-9", "--initial-lr", "0")
    before, after = tensors(first.checkpoint), tensors(second.checkpoint)
    for name in [name for name in before if name.startswith("model.")]:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "fp8")), "nf4"])
def test_adapters_train_on_coded_weights(kind: str, config: Path, tmp_path: Path) -> None:
    wide = ("--model.hidden-size", "64", "--model.axes-dim", "[8, 12, 12]", "--lora.base", kind)
    run, said = train_here(config, "--exp-name", "run", *LORA, *wide, "--max-steps", "2")
    assert re.search(r"model: 0.45 M parameters, 0.01 M of them train, compute in", said), said
    frozen = load_file(next((run.folder / "frozen").glob("*.safetensors")))
    blocks = [name for name in frozen if name.endswith("linear1.weight")]
    assert {frozen[name].dtype for name in blocks} <= {torch.int8, torch.uint8}
    assert f"{blocks[0]}_scale" in frozen
    train_here(run.folder, "--max-steps", "3")
    merged = export_merged(str(run.folder), tmp_path / "merged.safetensors")
    torch.testing.assert_close(predicted(merged), predicted(run.folder), rtol=1e-3, atol=1e-3)


def test_a_run_may_train_a_part(config: Path, base: Path, tmp_path: Path) -> None:
    flags = ("--train-only", '["single_blocks"]', "--freeze", '["*.bias"]', "--model.from-pretrained", str(base))
    run, _ = train_here(config, "--exp-name", "run", *flags, "--max-steps", "2")
    trained = {row.name for row in inspect(run.checkpoint).rows if row.part == "model"}
    assert trained
    assert all(name.startswith("model.single_blocks.") and not name.endswith("bias") for name in trained)
    train_here(run.folder, "--max-steps", "3")
    merged = export_merged(str(run.folder), tmp_path / "merged.safetensors")
    torch.testing.assert_close(predicted(merged), predicted(run.folder))


def test_the_command_writes_adapters_or_merged_weights(
    config: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = train_here(config, "--exp-name", "run", "--model.from-pretrained", str(base), *LORA)
    export = ("checkpoint", "export", run.folder)
    for words, said in (
        ((tmp_path / "a.safetensors",), "--lora peft, diffusers or comfy"),
        ((tmp_path / "a.safetensors", "--lora", "kohya"), "choose one of peft, diffusers, comfy"),
        ((tmp_path / "a.safetensors", "--lora", "peft"), "are a folder"),
        ((tmp_path / "a", "--lora", "comfy"), "with the ending .safetensors"),
        ((tmp_path / "a.safetensors", "--lora", "comfy", "--merge"), "keep one of the two"),
        ((tmp_path / "a.safetensors", "--part", "raw", "--merge"), "has no part 'raw'"),
    ):
        code, _, error = run_command(capsys, [*export, *words])
        assert (code, said in error) == (2, True), error
    for words in ((tmp_path / "peft", "--lora", "peft"), (tmp_path / "merged.safetensors", "--merge")):
        code, out, _ = run_command(capsys, [*export, *words])
        assert (code, out.strip()) == (0, str(words[0]))
        assert words[0].exists()


def test_mistakes_are_told(config: Path, tmp_path: Path) -> None:
    for flags, said in (
        (("--lora.rank", "2", "--train-only", '["img_in"]'), "with lora the adapters alone train"),
        (("--lora.strength", "0.5"), "is for generation"),
        (("--lora.more", "[('a.safetensors', 1)]"), "there is no first file"),
        (("--lora.from-pretrained", "b.safetensors", "--lora.more", "[('a.safetensors', 1)]"), "is for generation"),
        (("--lora.targets", '["to_x"]'), "names no linear layer"),
        (("--lora.from-pretrained", str(tmp_path / "none.safetensors")), "no such file"),
        (("--lora.base", "nf4"), "do not divide by 64"),
        (("--freeze", '["*"]'), "leave nothing to train"),
    ):
        with pytest.raises(UserError, match=said):
            train_here(config, *flags, "--max-steps", "1")
