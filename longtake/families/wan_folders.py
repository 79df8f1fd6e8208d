"""Folders of whole Wan models, the authors' and diffusers': what they say of a run's sections, and their experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from longtake.hub import published_facts
from longtake.models.wan_config import OFFICIAL_CLASS, PUBLISHED_CLASS, section_of

OFFICIAL_EXPERTS = "high_noise_model", "low_noise_model"
DIFFUSERS_EXPERTS = "transformer", "transformer_2"
_BOUNDARY, _BOUNDARY_I2V = 0.875, 0.9  # of the authors' configs
_TEXT_FILE = "models_t5_umt5-xxl-enc-bf16.pth"
_AUTOENCODER_FILES = "Wan2.1_VAE.pth", "Wan2.2_VAE.pth"


def root(folder: str) -> dict[str, Any] | None:
    """What the folder of a whole Wan says of a run's sections: of the denoiser or the two experts, the autoencoder and
    the text encoder that are in it. Raises `ValueError` for a folder of one expert alone."""
    place = Path(folder).expanduser()
    if not place.is_dir():
        return None
    index = published_facts(folder, "model_index.json")
    names = OFFICIAL_EXPERTS if index is None else DIFFUSERS_EXPERTS
    first, second = ((place / name).is_dir() for name in names)
    is_pair = (first or second) if index is None else second or bool((index.get(names[1]) or [None])[0])
    if is_pair and not (first and second):
        there, lacking = (names[0], names[1]) if first else (names[1], names[0])
        raise ValueError(
            f"holds the expert {there} and no {lacking}; copy {lacking} into it, or name {place / there} to run one "
            "expert alone"
        )
    inner = names[0] if is_pair or index is not None else ""
    facts = published_facts(str(place / inner))
    if facts is None or facts.get("_class_name") not in (PUBLISHED_CLASS, OFFICIAL_CLASS):
        return None
    sections: dict[str, Any] = _encoders(place, index is not None)
    if is_pair:
        model = section_of(facts, str(place / inner / "config.json"))
        usual = _BOUNDARY if model.get("in_channels") == model.get("out_channels") else _BOUNDARY_I2V
        boundary = usual if index is None else index.get("boundary_ratio") or usual
        sections["model"] = model
        sections["low_noise"] = {"from_pretrained": str(place / names[1]), "boundary": boundary}
    return sections or None


def _encoders(place: Path, is_diffusers: bool) -> dict[str, Any]:
    """Return the sections of the autoencoder and the text encoder."""
    vae = [place / "vae"] if is_diffusers else [place / name for name in _AUTOENCODER_FILES]
    text = place / ("text_encoder" if is_diffusers else _TEXT_FILE)
    sections: dict[str, Any] = {}
    if (weights := next((path for path in vae if path.exists()), None)) is not None:
        sections["ae"] = {"type": "wan", "from_pretrained": str(weights)}
    if text.exists():
        width = (published_facts(str(text)) or {}).get("d_model") if is_diffusers else None
        sections["t5"] = {"type": "umt5", "from_pretrained": str(text), **({"dim": width} if width else {})}
    return sections
