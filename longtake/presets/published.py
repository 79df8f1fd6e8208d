"""Run files of Open-Sora's repositories by their published paths, and the presets that stand for them."""

from __future__ import annotations

import os
from pathlib import Path

_FOLDER = Path(__file__).resolve().parent
# Below configs/opensora-v1-2: the old file -> the preset. `train/stage4` to `stage7` are in no repository; Lambda's
# page names the last of them.
OPENSORA_V1_2 = {
    **{f"train/stage{number}": f"train/stage{number}" for number in (1, 2, 3)},
    **{f"train/stage{number}": f"train/lambda_{number}" for number in (4, 5, 6, 7)},
    **{f"lambda/stage{number}": f"train/lambda_{number}" for number in range(1, 8)},
    **{f"inference/{name}": "inference/240p" for name in ("sample", "sample_hf")},
}


def published_preset(path: Path) -> Path | None:
    """The preset that stands for a published `configs/...` path; None where there is none."""
    return opensora_v2_preset(path) or opensora_v1_2_preset(path)


def opensora_v2_preset(path: Path) -> Path | None:
    """The preset that stands for one of Open-Sora 2.0's `configs/diffusion/...`; None where there is none."""
    below = below_configs(path)
    if below is None or len(below) != 3 or below[0] != "diffusion":
        return None
    preset = _FOLDER / "opensora_v2" / below[1] / ("256px.py" if below[2] == "256px_tp.py" else below[2])
    return preset if preset.is_file() else None


def opensora_v1_2_preset(path: Path) -> Path | None:
    """The preset that stands for one of Open-Sora 1.2's `configs/opensora-v1-2/...`; None where there is none."""
    below = below_opensora_v1_2(path)
    name = OPENSORA_V1_2.get(below.removesuffix(".py")) if below is not None else None
    return _FOLDER / "opensora_v1_2" / f"{name}.py" if name is not None else None


def below_configs(path: Path) -> tuple[str, ...] | None:
    """The parts of a path after its last `configs`; None where it has none."""
    parts = Path(os.path.normpath(path)).parts
    return parts[len(parts) - parts[::-1].index("configs") :] if "configs" in parts else None


def below_opensora_v1_2(path: Path) -> str | None:
    """The part of a path after its last `opensora-v1-2`; None where it has none."""
    parts = Path(os.path.normpath(path)).parts
    if "opensora-v1-2" not in parts:
        return None
    return "/".join(parts[len(parts) - parts[::-1].index("opensora-v1-2") :])
