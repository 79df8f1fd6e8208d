"""The doctor on autoencoders and text encoders that are learned, in their published formats, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from longtake.doctor.run import examine
from longtake.presets import find_preset
from tests.encoders.test_opensora_v1_2 import SIZES
from tests.encoders.tiny_weights import CLIP_DIM, T5_DIM, sections

pytestmark = pytest.mark.slow
GOLDEN = Path(__file__).parents[1] / "golden"
OF_FAMILY: dict[str, dict[str, Any]] = {
    "shapes": {
        "model": {"in_channels": 16, "patch_size": 2, "vec_in_dim": CLIP_DIM, "context_in_dim": T5_DIM},
        "bucket_config": {"_delete_": True, "32px": {5: (1.0, 4)}},
    },
    "cogvideox_fun": {
        "model": {"out_channels": 4, "text_embed_dim": T5_DIM, "max_text_seq_length": 10, "num_layers": 1}
        | {"patch_size": 2, "patch_size_t": None, "temporal_compression_ratio": 4, "sample_frames": 5},
        "bucket_config": {"_delete_": True, "32px": {5: (1.0, 4)}},
    },
    "opensora_v1_2": {
        "model": {"in_channels": 4, "caption_channels": T5_DIM, "model_max_length": 10}
        | {"patch_size": (1, 2, 2), "hidden_size": 32, "num_heads": 2, "depth": 1},
        "bucket_config": {"_delete_": True, "32x32": {17: (1.0, 4)}},
    },
}


def autoencoder(name: str, folder: Path, hunyuan: dict[str, Any]) -> dict[str, Any]:
    if name == "shapes":
        return hunyuan
    if name == "cogvideox_fun":
        return {"type": "cogvideox_vae", "from_pretrained": str(GOLDEN / "cogvideox" / "vae"), "dtype": "fp32"}
    parts = [
        load_file(GOLDEN / "opensora_v1_2" / f"vae_{part}_weights.safetensors") for part in ("spatial", "temporal")
    ]
    file = folder / "vae.safetensors"
    save_file({key: tensor.float() for part in parts for key, tensor in part.items()}, file)
    return {"type": "opensora_vae_v1_2", "from_pretrained": str(file), "dtype": "fp32", **SIZES}


@pytest.mark.parametrize("name", OF_FAMILY)
def test_random_weights_of_an_autoencoder_are_told_and_nothing_else_is(clips: Path, tmp_path: Path, name: str) -> None:
    made = sections(tmp_path)
    own = OF_FAMILY[name] | {
        "ae": {"_delete_": True, **autoencoder(name, tmp_path, made["ae"])},
        "t5": {"_delete_": True, **made["t5"]},
        **({"clip": {"_delete_": True, **made["clip"]}} if name == "shapes" else {}),
        **{"dataset.data_path": clips, "device": "cpu", "dtype": "fp32"},
    }
    words = [word for key, value in own.items() for word in (f"--{key}", str(value))]
    found = examine(str(find_preset(f"demo/{name}")), words, clips=4, quick=True)
    assert [one.cause for one in found.causes] == ["the autoencoder gives back no picture"]
    assert "random or of another model" in found.causes[0].advice
    verdicts = {one.name: one.verdict for one in found.findings}
    assert verdicts["captions"] == verdicts["scale and shift of latents"] == "ok"
