"""`longtake verify` on tiny releases: what passes, what fails and how, and what the record holds."""

from __future__ import annotations

import getpass
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longtake.contracts import UserError
from longtake.encoders.files import CheckedWeights
from longtake.train.loop import Trainer
from longtake.verification import parts as verification_parts
from longtake.verification.parts import TensorComparison
from longtake.verification.release import checksum
from longtake.verification.report import NO_REFERENCE, PartResult, TrainingResult, Verification
from tests.hub_server import hub_of
from tests.precision import within
from tests.train.runs import run_command
from tests.verification.releases import RELEASES, cogvideox, write_run

pytest.importorskip("diffusers")
WAN = {
    "denoiser": "diffusers WanTransformer3DModel",
    "ae": "diffusers AutoencoderKLWan",
    "t5": "transformers UMT5EncoderModel",
}
REFERENCES = {
    "cogvideox": {"denoiser": "diffusers CogVideoXTransformer3DModel", "ae": "diffusers AutoencoderKLCogVideoX"},
    "ttt_video": {"denoiser": NO_REFERENCE, "ae": "diffusers AutoencoderKLCogVideoX"},
    "opensora_v2": {
        "denoiser": "diffusers FluxTransformer2DModel",
        "ae": "diffusers AutoencoderKLHunyuanVideo",
        "clip": "transformers CLIPTextModel",
    },
    "opensora_v1_2": {"denoiser": NO_REFERENCE, "ae": "diffusers AutoencoderKL (of single frames)"},
    "wan": WAN,
    "wan_ti2v": WAN,
}
Verify = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny CogVideoX and its run file."""
    folder = tmp_path_factory.mktemp("release")
    write_run(folder, cogvideox(folder))
    return folder


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Verify:
    """Exit status and record of a run file."""

    def verify(run: Path, *words: str) -> tuple[int, dict[str, Any]]:
        record = tmp_path / "record.json"
        code, _, error = run_command(capsys, ["verify", str(run), "--json", str(record), *words])
        assert code in (0, 1), error
        return code, json.loads(record.read_text())

    return verify


def failed(record: dict[str, Any]) -> set[str]:
    problems = {part["name"]: part["problem"] for part in record["parts"]}
    problems["training"] = record["training"]["problem"]
    return {name for name, problem in problems.items() if problem is not None}


def copied(release: Path, folder: Path) -> Path:
    """The run file of a copy that may be changed."""
    shutil.copytree(release, folder)
    run = folder / "run.py"
    run.write_text(run.read_text().replace(str(release), str(folder)))
    return run


def test_a_release_passes_and_its_record_holds_no_private_data(release: Path, verify: Verify) -> None:
    code, record = verify(release / "run.py", "--steps", "3")
    assert (code, record["passed"], failed(record)) == (0, True, set())
    assert [part["name"] for part in record["parts"]] == ["denoiser", "ae", "t5"]
    assert all(within(part["output_error"], 1e-5) for part in record["parts"])
    assert within(record["parts"][0]["gradient_error"], 1e-4)
    assert all(len(part["sha256"]) == 64 for part in record["parts"])
    assert record["training"]["steps"] == 3
    assert math.isfinite(record["training"]["last_loss"])
    text = json.dumps(record)
    assert [word for word in (str(release), str(Path.home()), platform.node()) if word in text] == []


def test_wan_published_folder_passes_and_its_denoiser_is_its_own_file(tmp_path: Path, verify: Verify) -> None:
    run = write_run(tmp_path, RELEASES["wan"](tmp_path))
    code, record = verify(run, "--steps", "0")
    assert (code, failed(record)) == (0, set())
    assert (tmp_path / "Wan2.1" / "Wan2.1_VAE.pth").is_file(), "in the same folder"
    contents = (tmp_path / "Wan2.1" / "diffusion_pytorch_model.safetensors").read_bytes()
    assert record["parts"][0]["sha256"] == hashlib.sha256(contents).hexdigest()


def test_second_denoiser_is_a_part(tmp_path: Path, verify: Verify) -> None:
    sections = RELEASES["wan"](tmp_path)
    second = shutil.copytree(tmp_path / "Wan2.1", tmp_path / "low")
    tensors = load_file(second / "diffusion_pytorch_model.safetensors")
    tensors["head.head.bias"][0] = math.nan
    save_file(tensors, second / "diffusion_pytorch_model.safetensors")
    run = write_run(tmp_path, sections | {"low_noise": {"from_pretrained": str(second)}})
    code, record = verify(run, "--steps", "0")
    assert (code, failed(record)) == (1, {"low_noise"})


@pytest.mark.slow
@pytest.mark.parametrize("family", RELEASES)
def test_every_family_passes_with_fifty_steps(family: str, tmp_path: Path, verify: Verify) -> None:
    folder = tmp_path / "release"
    folder.mkdir()
    code, record = verify(write_run(folder, RELEASES[family](folder)))
    assert (code, failed(record)) == (0, set())
    references = {part["name"]: part["reference"] for part in record["parts"]}
    assert references == {"t5": "transformers T5EncoderModel", **REFERENCES[family]}
    assert record["training"]["steps"] == 50
    compared = [part for part in record["parts"] if part["reference"] != NO_REFERENCE]
    assert all(within(part["output_error"], 1e-5) for part in compared)


def plant_changed_denoiser(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor of ours changes while the denoiser is filled; the library's stays."""
    fill, changed = verification_parts.fill, []

    def fill_changed(denoiser: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
        (name,) = values
        if not changed and name.endswith("weight") and values[name].dim() == 2:
            changed.append(name)
            values = {name: values[name] * 1.01}
        fill(denoiser, values)

    monkeypatch.setattr(verification_parts, "fill", fill_changed)


def plant_changed_encoder(monkeypatch: pytest.MonkeyPatch, section: str) -> None:
    """The same of the matrices of an encoder."""
    take = CheckedWeights.__getitem__

    def take_changed(weights: CheckedWeights, name: str) -> torch.Tensor:
        found = take(weights, name)
        is_clip = "clip" in Path(weights._place).name
        owner = "ae" if weights._section == "ae" else "clip" if is_clip else "t5"
        return found * 1.01 if owner == section and found.dim() > 1 and "norm" not in name else found

    monkeypatch.setattr(CheckedWeights, "__getitem__", take_changed)


def plant(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    if part == "denoiser":
        plant_changed_denoiser(monkeypatch)
    else:
        plant_changed_encoder(monkeypatch, part)


@pytest.mark.parametrize("part", ["denoiser", "ae", "t5"])
def test_a_tensor_that_differs_from_the_librarys_fails_its_part(
    part: str, release: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, part)
    code, record = verify(release / "run.py", "--steps", "0")
    assert (code, failed(record)) == (1, {part})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["opensora_v2", "opensora_v1_2", "ttt_video", "wan", "wan_ti2v"])
def test_a_tensor_that_differs_fails_its_part_in_every_family(family: str, tmp_path: Path, verify: Verify) -> None:
    run = write_run(tmp_path, RELEASES[family](tmp_path))
    parts = {"t5", *(part for part, reference in REFERENCES[family].items() if reference != NO_REFERENCE)}
    for part in sorted(parts):
        with pytest.MonkeyPatch.context() as monkeypatch:
            plant(monkeypatch, part)
            code, record = verify(run, "--steps", "0")
        assert (code, failed(record)) == (1, {part})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["opensora_v1_2", "ttt_video"])
def test_a_denoiser_that_no_library_has_is_named_as_compared_with_nothing(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path, RELEASES[family](tmp_path))
    plant(monkeypatch, "denoiser")
    line = ["verify", str(run), "--json", str(tmp_path / "record.json"), "--steps", "0"]
    code, out, _ = run_command(capsys, line)
    assert code == 0, "a tensor that is 1 % too large is not seen, and the page says so"
    assert "denoiser: no library" in out
    assert "ae: no library" not in out


def test_a_gradient_that_ours_lacks_fails_the_denoiser(
    release: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ours = verification_parts._run_ours

    def run_without_text(*arguments: Any) -> dict[str, torch.Tensor]:
        results = run_ours(*arguments)
        del results["gradient of text"]
        return results

    monkeypatch.setattr(verification_parts, "_run_ours", run_without_text)
    code, record = verify(release / "run.py", "--steps", "0")
    assert (code, failed(record)) == (1, {"denoiser"})


def test_a_kernel_that_fails_in_training_is_recorded(
    release: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("Triton Error [CUDA]: device kernel image is invalid")

    monkeypatch.setattr(Trainer, "forward_backward", fail)
    code, record = verify(release / "run.py", "--steps", "2")
    assert (code, failed(record)) == (1, {"training"})
    assert "kernel image" in record["training"]["problem"]


def test_a_device_that_fails_ends_the_checks_with_a_record(
    release: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(verification_parts, "_run_ours", fail)
    monkeypatch.setattr(verification_parts, "_free", fail)  # nothing works on the device any more
    code, record = verify(release / "run.py", "--steps", "2")
    assert (code, failed(record)) == (1, {"denoiser", "training"})
    assert [part["name"] for part in record["parts"]] == ["denoiser"]


@pytest.mark.parametrize(
    ("part", "file"),
    [
        ("denoiser", "transformer/diffusion_pytorch_model.safetensors"),
        ("ae", "vae/diffusion_pytorch_model.safetensors"),
        ("t5", "text_encoder/model.safetensors"),
    ],
)
def test_a_wrong_key_fails_its_part_and_is_named(
    part: str, file: str, release: Path, tmp_path: Path, verify: Verify
) -> None:
    run = copied(release, tmp_path / "copy")
    path = run.parent / file
    tensors = load_file(path)
    name = sorted(name for name in tensors if name.endswith("weight"))[0]
    save_file({("misspelt" if own == name else own): tensor for own, tensor in tensors.items()}, path)
    code, record = verify(run, "--steps", "0")
    assert (code, failed(record)) == (1, {part})
    problem = next(own["problem"] for own in record["parts"] if own["name"] == part)
    assert name.removeprefix("encoder.") in problem
    assert str(tmp_path) not in problem


def test_weights_that_are_not_finite_fail_their_part_and_training(
    release: Path, tmp_path: Path, verify: Verify
) -> None:
    run = copied(release, tmp_path / "copy")
    path = run.parent / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors["proj_out.bias"][0] = math.nan
    save_file(tensors, path)
    code, record = verify(run, "--steps", "1")
    assert (code, failed(record)) == (1, {"denoiser", "training"})


def test_missing_weights_offline_say_what_downloads_them(
    release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, _, error = run_command(capsys, ["verify", "cogvideox_fun/lora_2b", "--device", "cpu"])
    assert code == 2
    assert "hf download zai-org/CogVideoX-2b --include 'transformer/*' --local-dir ckpts/CogVideoX-2b" in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_missing_weights_are_downloaded_and_held_against_the_hubs_checksums(tmp_path: Path) -> None:
    published, here = tmp_path / "published", tmp_path / "here"
    here.mkdir()
    sections = cogvideox(published)
    sections["ae"] |= {"scale_factor": 1.0, "latent_channels": 4}  # as presets say: no file is there that does
    sections["model"] |= {"num_attention_heads": 2, "attention_head_dim": 16, "out_channels": 4, "time_embed_dim": 32}
    sections["model"] |= {"text_embed_dim": 16, "num_layers": 2, "sample_width": 4, "sample_height": 4}
    sections["model"] |= {"sample_frames": 9}
    run = write_run(here, json.loads(json.dumps(sections).replace(str(published), "ckpts/CogVideoX-2b")))
    line = [sys.executable, "-m", "longtake", "verify", str(run), "--steps", "0", "--json", str(here / "record.json")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
    with hub_of({"zai-org/CogVideoX-2b": published}) as address:
        environment["HF_ENDPOINT"] = address
        done = subprocess.run(line, cwd=here, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    file = here / "ckpts" / "CogVideoX-2b" / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["proj_out.bias"][0] += 1
    save_file(tensors, file)
    done = subprocess.run(line, cwd=here, env=environment, capture_output=True, text=True, timeout=300)
    record = json.loads((here / "record.json").read_text())
    assert (done.returncode, failed(record)) == (1, {"denoiser"})
    assert "SHA-256" in record["parts"][0]["problem"]


def test_a_run_from_scratch_is_refused(release: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, error = run_command(capsys, ["verify", "custom", "--json", str(tmp_path / "record.json")])
    assert (code, "model.from_pretrained" in error) == (2, True)
    assert not (tmp_path / "record.json").exists()


@pytest.mark.parametrize("kind", ["cache", "local folder"])
def test_a_file_that_differs_from_the_hubs_checksum_is_refused(kind: str, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    for place, contents in ((good, b"as published"), (bad, b"as damaged")):
        digest = hashlib.sha256(b"as published").hexdigest()
        if kind == "cache":
            blob = tmp_path / place.stem / digest
            blob.parent.mkdir()
            blob.write_bytes(contents)
            place.symlink_to(blob)
        else:
            place.write_bytes(contents)
            note = tmp_path / ".cache" / "huggingface" / "download" / f"{place.name}.metadata"
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(f"commit\n{digest}\n1700000000.0\n")
    assert checksum([good]) == digest
    with pytest.raises(UserError, match=r"bad\.safetensors"):
        checksum([bad])


def test_a_comparison_fails_above_its_limit_and_at_nan_and_names_the_worst() -> None:
    equal = torch.tensor([1.0, -4.0])
    comparison = TensorComparison(1e-4)
    comparison.add("fine", equal + 4e-4 * 0.99, equal)
    assert comparison.result()[1] is None
    comparison.add("off", equal + 5e-4, equal)
    error, problem = comparison.result()
    assert error == pytest.approx(1.25e-4, rel=1e-2)
    assert problem is not None
    assert problem.startswith("off:")
    comparison.add("undefined", equal * math.nan, equal)
    assert (comparison.result()[1] or "").startswith("undefined and 1 more:")


def test_a_record_drops_paths_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "someone")
    monkeypatch.chdir(tmp_path)
    assert getpass.getuser() == "someone"
    texts = {
        "/home/someone/weights/transformer: holds no tensor": "transformer: holds no tensor",
        "~/models/a.safetensors: lacks b.c": "a.safetensors: lacks b.c",
        r"C:\Users\someone\w.bin: lacks b": "w.bin: lacks b",
        "run by someone here": "run by ... here",
        "owner/name and 3/4 of it": "owner/name and 3/4 of it",
        f"{tmp_path}: is damaged": f"{tmp_path.name}: is damaged",
    }
    for text, expected in texts.items():
        parts = (PartResult("denoiser", "local file", problem=text),)
        record = Verification("p", "f", "2026-01-01", "CPU", None, {}, parts, TrainingResult())
        assert json.loads(record.to_json())["parts"][0]["problem"] == expected
