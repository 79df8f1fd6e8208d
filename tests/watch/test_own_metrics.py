"""The commands of docs/watch.md that measure videos, run as they stand there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from longtake.data.clips.video import write_video
from longtake.data.shapes import draw_clip

PAGE = Path(__file__).parents[2] / "docs" / "watch.md"
PROMPTS = ["a red circle moves left", "a blue square moves up", "a green triangle moves down"]
VBENCH = """
import json, os


class VBench:
    def __init__(self, device, full_info_dir, output_path):
        assert os.path.isfile(full_info_dir)
        self.output_path = output_path

    def evaluate(self, videos_path, name, prompt_list=[], dimension_list=None, mode="vbench_standard"):
        print("Evaluation meta data saved")
        assert mode == "custom_input"
        assert sorted(prompt_list) == sorted(name for name in os.listdir(videos_path) if not name.endswith(".txt"))
        found = {dimension: [0.5, [{"video_path": "x", "video_results": 0.5}]] for dimension in dimension_list}
        with open(os.path.join(self.output_path, name + "_eval_results.json"), "w") as file:
            json.dump(found, file)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos with their prompts, as validations leave them."""
    place = tmp_path_factory.mktemp("videos")
    for number, prompt in enumerate(PROMPTS):
        write_video(place / f"{number}.mp4", draw_clip(prompt, [0.5] * 9, 0.0, 0.0), 8, crf=10)
        (place / f"{number}.txt").write_text(prompt + "\n")
    return place


def run(script: str, place: Path, *words: object) -> dict[str, float]:
    """What a script of the page prints."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    (text,) = [block for block in blocks if f"# {script}" in block]
    (place / script).write_text(text)
    done = subprocess.run(
        [sys.executable, str(place / script), *map(str, words)], cwd=place, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def write_clip(place: Path) -> None:
    """A small CLIP with random weights, as transformers keeps it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, PreTrainedTokenizerFast

    words = sorted({word for prompt in PROMPTS for word in prompt.split()})
    vocabulary = {word: number for number, word in enumerate(["<unk>", *words, "<start>", "<end>"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("<start>", vocabulary["<start>"]), ("<end>", vocabulary["<end>"])]
    tokenizer.post_processor = processors.TemplateProcessing("<start> $A <end>", special_tokens=ends)
    names = {"bos_token": "<start>", "eos_token": "<end>", "pad_token": "<end>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=12, **names)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": len(vocabulary), "max_position_embeddings": 12, "eos_token_id": len(vocabulary) - 1}
    vision = {**sizes, "image_size": 32, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(place)
    pictures = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(pictures, fast).save_pretrained(place)


def test_the_clip_score_of_a_clip_in_transformers_format(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    write_clip(tmp_path / "clip")
    found = run("clip_score.py", tmp_path, tmp_path / "clip", folder)
    assert -100 <= found["clip_score"] <= 100
    assert found["clip_score"] != 0


class Features(torch.nn.Module):
    """Stands for an I3D, with its words: means of the colours, and of their changes."""

    def forward(self, x: torch.Tensor, rescale: bool, resize: bool, return_features: bool) -> torch.Tensor:
        moved = (x[:, :, 1:] - x[:, :, :-1]).abs().mean(dim=[2, 3, 4])
        return torch.cat([x.mean(dim=[2, 3, 4]), moved], dim=1) / 255


def test_the_fvd_of_clips_to_themselves_is_0_and_to_others_is_that_of_gaussians(folder: Path, tmp_path: Path) -> None:
    torch.jit.script(Features()).save(str(tmp_path / "i3d.pt"))
    assert run("fvd.py", tmp_path, tmp_path / "i3d.pt", folder, folder)["fvd"] == pytest.approx(0, abs=1e-9)
    (tmp_path / "grey").mkdir()
    for number in range(3):  # all alike: no spread, so the distance is that of the means and the others' spread
        write_video(tmp_path / "grey" / f"{number}.mp4", np.full((16, 32, 32, 3), 128, np.uint8), 8)
    assert 1e-5 < run("fvd.py", tmp_path, tmp_path / "i3d.pt", tmp_path / "grey", folder)["fvd"] < 1


def test_the_means_of_vbench_are_read_from_its_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "vbench").mkdir()
    (tmp_path / "vbench" / "__init__.py").write_text(VBENCH)
    (tmp_path / "vbench" / "VBench_full_info.json").write_text("[]")
    found = run("vbench_means.py", tmp_path, folder)
    assert found["vbench_motion_smoothness"] == 0.5
    assert len(found) == 4
