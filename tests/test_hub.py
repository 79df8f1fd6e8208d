"""Weights by their name on the hub: out of its cache, and one sentence where they are not there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from longtake.contracts import UserError
from longtake.hub import find_files, is_hub_name
from longtake.presets import Preset, presets
from longtake.train.run_file import read_run

KEY = "model.from_pretrained"
WANTED = (("model_index.json", "transformer/*.safetensors"), ("model*.safetensors",))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, empty, with hub access off."""
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def put(cache: Path, repository: str, *files: str) -> Path:
    """Files of a repository as the hub's client keeps them; returns their folder."""
    place = cache / f"models--{repository.replace('/', '--')}"
    folder = place / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    folder.mkdir(parents=True, exist_ok=True)
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / "main").write_text(folder.name, encoding="utf-8")
    return folder


def test_what_is_here_is_not_looked_for_elsewhere(cache: Path, tmp_path: Path) -> None:
    put(cache, "owner/name", "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert find_files(str(tmp_path / "model.safetensors"), KEY, WANTED) == tmp_path / "model.safetensors"


def test_a_repository_is_a_folder_and_a_file_in_it_a_file(cache: Path) -> None:
    folder = put(cache, "owner/name", "model-00001-of-00001.safetensors", "sub/other.safetensors")
    assert find_files("owner/name", KEY, WANTED) == folder
    assert find_files("owner/name/sub/other.safetensors", KEY, WANTED) == folder / "sub" / "other.safetensors"
    whole = put(cache, "owner/whole", "model_index.json", "transformer/a.safetensors")
    assert find_files("owner/whole", KEY, WANTED) == whole


@pytest.mark.parametrize("name", ["owner/absent", "owner/name", "owner/name/gone.safetensors"])
def test_what_the_cache_has_not_is_one_sentence(cache: Path, name: str) -> None:
    put(cache, "owner/name", "vae/model.safetensors")
    with pytest.raises(UserError) as refused:
        find_files(name, KEY, WANTED)
    said = str(refused.value)
    assert "\n" not in said
    assert said.startswith(f"{KEY} = {name!r}: is neither a path (looked for {Path(name).absolute()}) nor in the")
    assert f"({cache}), and hub access is off (HF_HUB_OFFLINE)" in said
    assert f"run `hf download owner/{name.split('/')[1]}" in said


def test_paths_are_not_taken_for_names(cache: Path) -> None:
    assert is_hub_name("hpcai-tech/Open-Sora-v2/Open_Sora_v2.safetensors")
    assert is_hub_name("PixArt-alpha/PixArt-Sigma/PixArt-Sigma-XL-2-2K-MS.pth")
    for path in (
        "./a/b",
        "/a/b",
        "a",
        "ckpts/Open_Sora_v2.safetensors",
        "ckpts/PixArt.pth",
        "ckpts/Wan2.1-T2V-1.3B",
        "ckpts/Wan2.1-T2V-1.3B/Wan2.1_VAE.pth",
        "outputs/run/epoch*-global_step*",
    ):
        assert not is_hub_name(path)
    with pytest.raises(UserError, match=r"no such file or folder \(looked for /.*/ckpts/gone.safetensors\); download"):
        find_files("ckpts/gone.safetensors", KEY, WANTED)


def _weights_of(preset: Preset) -> list[str]:
    config = read_run(str(preset.path), ("--dataset.data-path", "-")).value
    sections = (config.model, config.ae, *(getattr(config, text.section) for text in config.family.texts))
    names = [getattr(section, "from_pretrained", None) for section in sections]
    return [name for name in names if name is not None and name.startswith("ckpts/")]


WAN = [one for one in presets() if one.name.startswith("wan/") and one.kind == "train"]


@pytest.mark.parametrize("preset", WAN, ids=lambda preset: preset.name)
def test_wans_presets_name_weights_that_are_published(preset: Preset, cache: Path) -> None:
    names = _weights_of(preset)
    assert len(names) == 3
    for name in names:
        with pytest.raises(UserError) as refused:
            find_files(name, KEY, WANTED)
        assert re.search(r"`hf download Wan-AI/Wan2\.[12]-.* --local-dir ckpts/Wan2\.[12]-[\w.-]+`", str(refused.value))


@pytest.mark.parametrize(
    ("file", "line"),
    [
        (
            "hunyuan_vae.safetensors",
            "`hf download hpcai-tech/Open-Sora-v2 hunyuan_vae.safetensors --local-dir ckpts`",
        ),
        (
            "Wan2.1-T2V-14B/models_t5_umt5-xxl-enc-bf16.pth",
            "`hf download Wan-AI/Wan2.1-T2V-14B --include 'models_t5_umt5-xxl-enc-bf16.pth' "
            "--include 'google/umt5-xxl/*' --local-dir ckpts/Wan2.1-T2V-14B`",
        ),
    ],
)
def test_a_published_file_is_missed_with_the_line_that_fetches_it(file: str, line: str, cache: Path) -> None:
    with pytest.raises(UserError, match=re.escape(f"ckpts/{file}); {line}, or name them")):
        find_files(f"ckpts/{file}", KEY, WANTED)


def test_without_the_hubs_client_the_extra_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"pip install '\.\[encoders\]'"):
        find_files("owner/name", KEY, WANTED)
