"""What the tests of CogVideoX-Fun's words need: a tiny published folder, and what becomes of a command line."""

from __future__ import annotations

import json
from pathlib import Path

from longtake.dialects.cogvideox_fun import CogVideoXFun
from longtake.train.config import RunConfig
from longtake.train.run_file import read_run
from tests.dialects.speech import Heard

ROOT = Path(__file__).resolve().parents[2]


def write_root(folder: Path, visual: str | None = "inpaint") -> Path:
    """A whole published CogVideoX-Fun of random weights: transformer, autoencoder, text encoder, schedule."""
    from tests.generate.test_published_pipeline import write_pipeline

    channels = {None: 4, "inpaint": 9, "control": 8}[visual]
    write_pipeline(folder, "CogVideoXPipeline", {"scaling_factor": 0.7}, in_channels=channels)
    config = folder / "published" / "transformer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "add_noise_in_inpaint_model": False}))
    return folder / "published"


def spoken(script: str, *flags: str) -> tuple[RunConfig, Heard]:
    """The run that a command line of a script means."""
    heard = Heard()
    dialect = CogVideoXFun(script, heard.lines.append)
    _, run, *words = dialect.command(["train", "--train_data_meta", "x.csv", *flags])
    return read_run(run, words, dialect=dialect).value, heard
