"""Presets: run files that are installed with Longtake, to be trained, sampled from, inherited from or copied.

A preset's name is its path in this folder without `.py`, as in `opensora_v2/train/stage1`, or without the folder of its
kind, as in `opensora_v2/stage1`. In a clone of the repository `configs` leads here; `train` and `eval` are TTT-Video's
own files, under the names that its scripts give (`dialects/ttt_video`).
"""

from __future__ import annotations

import difflib
import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
KINDS = ("train", "inference")
_BASES = "parts.py"  # what several presets have as their base, and no run
WEIGHTS = "ckpts"  # the local folder in which presets look for weights
# Files and folders that presets and their documentation name: where they are published.
PUBLISHED = {
    "CogVideoX-2b": "zai-org/CogVideoX-2b",
    "CogVideoX-5b": "zai-org/CogVideoX-5b",
    "CogVideoX-5b-I2V": "zai-org/CogVideoX-5b-I2V",
    "CogVideoX-Fun-V1.1-2b-InP": "alibaba-pai/CogVideoX-Fun-V1.1-2b-InP",
    "CogVideoX-Fun-V1.1-5b-InP": "alibaba-pai/CogVideoX-Fun-V1.1-5b-InP",
    "CogVideoX-Fun-V1.1-5b-Control": "alibaba-pai/CogVideoX-Fun-V1.1-5b-Control",
    "Wan2.1-T2V-1.3B": "Wan-AI/Wan2.1-T2V-1.3B",
    "Wan2.1-T2V-14B": "Wan-AI/Wan2.1-T2V-14B",
    "Wan2.2-T2V-A14B": "Wan-AI/Wan2.2-T2V-A14B",
    "Wan2.2-I2V-A14B": "Wan-AI/Wan2.2-I2V-A14B",
    "Wan2.2-TI2V-5B": "Wan-AI/Wan2.2-TI2V-5B",
    "PixArt-Sigma-XL-2-2K-MS.pth": "PixArt-alpha/PixArt-Sigma",
    "Open_Sora_v2.safetensors": "hpcai-tech/Open-Sora-v2",
    "hunyuan_vae.safetensors": "hpcai-tech/Open-Sora-v2",
    "flux1-dev.safetensors": "hpcai-tech/Open-Sora-v2",
    "flux1-dev-ae.safetensors": "hpcai-tech/Open-Sora-v2",
    "flux1-dev-fused-rope.safetensors": "hpcai-tech/flux1-dev-fused-rope",
}

# Below configs/opensora-v1-2: the old file -> the preset. `train/stage4` to `stage7` are in no repository; Lambda's
# page names the last of them.
OPENSORA_V1_2 = {
    **{f"train/stage{number}": f"train/stage{number}" for number in (1, 2, 3)},
    **{f"train/stage{number}": f"train/lambda_{number}" for number in (4, 5, 6, 7)},
    **{f"lambda/stage{number}": f"train/lambda_{number}" for number in range(1, 8)},
    **{f"inference/{name}": "inference/240p" for name in ("sample", "sample_hf")},
}


@dataclass(frozen=True)
class Preset:
    """One of them, as it introduces itself in the comment that it opens with."""

    path: Path
    kind: str  # of `KINDS`: what it is a run file of
    about: str
    gpus: str  # those that its forecast is for, as in `8 x h200`; empty without a forecast

    @property
    def name(self) -> str:
        """The short name."""
        return _short_name(self.path)


def presets() -> Iterator[Preset]:
    """All of them, by their paths."""
    for path in sorted(FOLDER.rglob("*.py")):
        if path.name not in (_BASES, "__init__.py"):
            comment = re.match(r"(#.*\n)*", path.read_text(encoding="utf-8"))
            lines = comment[0].splitlines() if comment else []
            words = " ".join(line.removeprefix("# ") for line in lines if not line.startswith("#  "))
            gpus = re.search(r"parameters on (\d+ x \w+),", "\n".join(lines))
            kind = "inference" if "inference" in path.relative_to(FOLDER).parts else "train"
            yield Preset(path, kind, re.split(r"(?<=\.) ", words)[0], gpus[1] if gpus else "")


def preset_gpus(path: str) -> tuple[int, str] | None:
    """Return the number and kind of GPUs that the forecast of the preset in this file is for; None for other files."""
    found = next((one.gpus for one in presets() if one.path == Path(path)), "")
    count, _, kind = found.partition(" x ")
    return (int(count), kind) if found else None


def find_preset(name: str, kind: str = "train") -> Path | None:
    """Return the file of a preset, by either name, with `.py` and a leading `configs/` or without; None for any other
    name.

    `kind`: of `KINDS`, whose folder is looked in first where the name leaves it out.
    """
    if not {"..", "__init__"}.isdisjoint(parts := _bare(name).split("/")):
        return None
    family, *folders = parts
    for inner in ("", kind, *KINDS):
        place = FOLDER.joinpath(family, inner, *folders)
        if (file := place.with_name(f"{place.name}.py")).is_file():
            return file
    return None


def run_file(run: str, kind: str = "train") -> str:
    """RUN, or the preset's file where it names one and means nothing of the user's own."""
    path = None if is_own(run, kind) else find_preset(run, kind)
    return run if path is None else str(path)


def is_own(run: str, kind: str = "train") -> bool:
    """Return whether RUN exists: a file or folder, or, for a generation, also a run's name or a pattern."""
    if kind == "inference" and (run == "latest" or glob.has_magic(run) or Path("outputs", run).exists()):
        return True
    return Path(run).exists()


def nearest_preset(name: str) -> str | None:
    """Return the short name of the preset that a misspelt name may mean."""
    names = {}
    for preset in presets():
        whole = preset.path.relative_to(FOLDER).with_suffix("").as_posix()
        names |= dict.fromkeys((whole, preset.name, preset.path.stem), preset.name)
    bare = _bare(name)
    found = difflib.get_close_matches(bare, names, n=1, cutoff=0.75)
    found = found or [known for known in names if sorted(known) == sorted(bare)]  # letters changed places
    if not found and name.startswith("configs/"):  # another program's place of a file of this name
        found = [known for known in names if known == Path(bare).name]
    return names[found[0]] if found else None


def _short_name(path: Path) -> str:
    parts = path.relative_to(FOLDER).with_suffix("").parts
    return "/".join(part for part in parts if part not in KINDS)


def _bare(name: str) -> str:
    return name.removeprefix("configs/").removesuffix(".py")


def copied(path: Path, target: str) -> str:
    """Return the text of a preset as a file of one's own, called `target`.

    Files that it names (bases, the runs of stages) are named as presets, so that they are found from anywhere; commands
    in its comments name the copy.
    """

    def as_preset(quoted: re.Match[str]) -> str:
        named = (path.parent / quoted[1]).resolve()
        known = named.is_relative_to(FOLDER) and named.is_file()
        return f'"{named.relative_to(FOLDER).with_suffix("").as_posix()}"' if known else quoted[0]

    text = re.sub(r'"([\w./-]+\.py)"', as_preset, path.read_text(encoding="utf-8"))
    return re.sub(rf"^(#   .*) {re.escape(_short_name(path))}(?= |$)", rf"\1 {target}", text, flags=re.MULTILINE)


def published_preset(path: Path) -> Path | None:
    """Return the preset that stands for a published `configs/...` path; None where there is none."""
    return opensora_v2_preset(path) or opensora_v1_2_preset(path)


def opensora_v2_preset(path: Path) -> Path | None:
    """Return the preset that stands for one of Open-Sora 2.0's `configs/diffusion/...`; None where there is none."""
    below = below_configs(path)
    if below is None or len(below) != 3 or below[0] != "diffusion":
        return None
    preset = FOLDER / "opensora_v2" / below[1] / ("256px.py" if below[2] == "256px_tp.py" else below[2])
    return preset if preset.is_file() else None


def opensora_v1_2_preset(path: Path) -> Path | None:
    """Return the preset that stands for one of Open-Sora 1.2's `configs/opensora-v1-2/...`; None where there
    is none."""
    below = below_opensora_v1_2(path)
    name = OPENSORA_V1_2.get(below.removesuffix(".py")) if below is not None else None
    return FOLDER / "opensora_v1_2" / f"{name}.py" if name is not None else None


def below_configs(path: Path) -> tuple[str, ...] | None:
    """Return the parts of a path after its last `configs`; None where it has none."""
    parts = Path(os.path.normpath(path)).parts
    return parts[len(parts) - parts[::-1].index("configs") :] if "configs" in parts else None


def below_opensora_v1_2(path: Path) -> str | None:
    """Return the part of a path after its last `opensora-v1-2`; None where it has none."""
    parts = Path(os.path.normpath(path)).parts
    if "opensora-v1-2" not in parts:
        return None
    return "/".join(parts[len(parts) - parts[::-1].index("opensora-v1-2") :])
