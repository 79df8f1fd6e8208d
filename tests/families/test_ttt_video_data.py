"""Lists of embedded clips in TTT-Video's own form: read as they are, or refused with their lines."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longtake.contracts import Batch, Slot, UserError
from longtake.data.latents.dataset import StoredDataset
from longtake.data.latents.source import EncoderFacts
from longtake.data.probing import embedded
from longtake.data.tables.mix import open_clips
from longtake.data.tables.table import ClipTable
from longtake.families.ttt_video_data import open_embeddings
from longtake.system.encoders import empty_texts
from longtake.train.config import RunConfig
from longtake.train.run_file import read_run
from tests.train.runs import metrics, train_here

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "ttt_video" / "dataset_item.safetensors")
CPU = torch.device("cpu")
RUN = """
device = "cpu"
dataset = dict(data_path={path!r}, latents={path!r}, views=1)
model = dict(type="ttt_video", segment_frames=2, out_channels=3, text_embed_dim=8)
ae = dict(type="cogvideox_vae", latent_channels=3, scale_factor=1.0)
t5 = dict(type="words", dim=8, max_length=4)
bucket_config = {{"32x48": {{17: (1.0, 1)}}}}
"""


def write_clip(folder: Path, name: str, moments: Tensor, texts: Tensor) -> str:
    """The files of one clip in a folder of its own; its line."""
    (folder / name).mkdir(parents=True)
    torch.save(moments, folder / name / "video.pt")
    for number, text in enumerate(texts):
        torch.save(text.clone(), folder / name / f"{number}.pt")
    return json.dumps({"vid_emb": f"{name}/video.pt", "text_chunk_emb": [f"{name}/{n}.pt" for n in range(len(texts))]})


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunConfig]:
    """Writes a list, a run that reads it, and reads that: two clips, then those that are given, or these alone."""

    def write(*clips: tuple[Tensor, Tensor], alone: bool = False, **words: Any) -> RunConfig:
        first = (GOLDEN["moments"], GOLDEN["text"]), (-GOLDEN["moments"], -GOLDEN["text"])
        clips = clips if alone else (*first, *clips)
        lines = [write_clip(tmp_path, f"clip{row}", *clip) for row, clip in enumerate(clips)]
        (path := tmp_path / "list.jsonl").write_text("\n\n".join(lines) + "\n")
        (tmp_path / "run.py").write_text(RUN.format(path=str(path)))
        return read_run(str(tmp_path / "run.py"), [f"--{name}={value}" for name, value in words.items()]).value

    return write


@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_a_clip_is_the_published_one_with_the_same_numbers_drawn(run: Callable[..., RunConfig], scale: float) -> None:
    config = run(**{"ae.scale_factor": scale})
    table = open_clips(config.dataset)
    assert (table.num_frames.tolist(), table.height.tolist(), table.width.tolist()) == ([17] * 2, [32] * 2, [48] * 2)
    source = pickle.loads(pickle.dumps(open_embeddings(config, table)))
    moments, name = source.latents(0), f"scale{scale:g}"
    found = moments["mean"] + moments["std"] * GOLDEN[f"{name}.normal"].float().transpose(0, 1)
    published = GOLDEN[f"{name}.vae_emb"].float().transpose(0, 1)
    torch.testing.assert_close(found, published, rtol=0.02, atol=0.02)  # theirs is rounded to bf16 at each step
    assert torch.equal(source.texts(0, "")["text"], GOLDEN["text"])
    assert torch.equal(source.texts(1, "")["text"], -GOLDEN["text"])


MOMENTS, TEXT = GOLDEN["moments"], GOLDEN["text"]


@pytest.mark.parametrize(
    ("clip", "said"),
    [
        ((MOMENTS, TEXT[:1]), r"list\.jsonl:5: text_chunk_emb has 1 files, and 17 frames have 2 segments"),
        (
            (MOMENTS[:3], TEXT[:1]),
            r"list\.jsonl:5: vid_emb is of 9x32x48 pixels \(\[3, 6, 4, 6\] of bfloat16\), and the run trains 17x32x48",
        ),
        (
            (MOMENTS, TEXT[:, :3]),
            r"list\.jsonl:5: text_chunk_emb has texts of 3 tokens \(\[3, 8\] of bfloat16\), and t5\.max_length is 4",
        ),
        (
            (MOMENTS, TEXT[..., :7]),
            r"list\.jsonl:5: .*tokens of width 7 \(\[4, 7\] of bfloat16\), and model\.text_embed_dim is 8",
        ),
        ((MOMENTS[:, :4], TEXT), r"list\.jsonl:5: vid_emb has 4 channels .* \(files are those of /"),
        ((MOMENTS[0], TEXT), r"list\.jsonl: line 5: vid_emb has the shape \[6, 4, 6\], not \[frames.* of bfloat16"),
    ],
)
def test_a_sample_of_another_size_is_refused_with_its_line(
    run: Callable[..., RunConfig], clip: tuple[Tensor, Tensor], said: str
) -> None:
    config = run(clip)
    with pytest.raises(UserError, match=said):
        open_embeddings(config, open_clips(config.dataset))


class Code:
    """Runs code when a plain unpickler reads it."""

    def __reduce__(self) -> tuple:
        return partial(Path.touch), (Path("ran"),)


def test_a_file_that_would_run_code_is_refused_with_its_line(
    run: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = run()
    (tmp_path / "clip1" / "1.pt").write_bytes(pickle.dumps(Code(), 2))
    with pytest.raises(UserError, match=r"line 3: 1\.pt: cannot be read as plain tensors"):
        open_clips(config.dataset)
    assert not (tmp_path / "ran").exists()


def test_the_table_is_made_anew_once_a_file_changes(run: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = run()
    before = open_clips(config.dataset).clip_ids.tolist()
    torch.save(torch.cat([MOMENTS, MOMENTS[1:]]), tmp_path / "clip1" / "video.pt")
    table = open_clips(config.dataset)
    assert (table.num_frames.tolist(), table.clip_ids.tolist()) == ([17, 33], before)


def test_dropped_text_is_replaced_by_the_named_empty_prompt_and_without_one_refused(
    run: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = run()
    facts = EncoderFacts(config.ae.latent, 4, {})
    torch.save(TEXT[0], tmp_path / "empty.pt")
    torch.save(TEXT[0, :3], tmp_path / "short.pt")
    found = empty_texts(config, facts, str(tmp_path / "empty.pt"), {"t5": 0.1}, CPU)
    assert torch.equal(found["text"], TEXT[:1])
    assert not empty_texts(config, facts, None, {}, CPU)["text"].any()
    with pytest.raises(UserError, match=r"dropout_ratio\.t5 = 0\.1: .* name the file .* as dataset\.empty_prompt"):
        empty_texts(config, facts, None, {"t5": 0.1}, CPU)
    with pytest.raises(UserError, match=r"holds a tensor of shape \[3, 8\], and the texts of this run are \[4, 8\]"):
        empty_texts(config, facts, str(tmp_path / "short.pt"), {"t5": 0.1}, CPU)


def test_a_run_trains_from_a_list_and_drops_text_for_the_named_prompt(
    run: Callable[..., RunConfig], tmp_path: Path
) -> None:
    (moments := MOMENTS.clone())[:, 3:] = -5
    run(*[(moments, TEXT)] * 4, alone=True)
    torch.save(TEXT[0], tmp_path / "empty.pt")
    torch.save(-TEXT[0], tmp_path / "other.pt")
    sizes = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 16, "time_embed_dim": 16}
    words = [f"--model.{name}={size}" for name, size in sizes.items()] + ["--max_steps=3", "--slots_per_step=2"]
    words += ["--dtype=fp32", "--lr=0.01", "--outputs", str(tmp_path), "--tensorboard=False", "--num_workers=0"]
    with pytest.raises(UserError, match=r"dropout_ratio\.t5 = 0\.5: the texts come from files"):
        train_here(tmp_path / "run.py", *words, "--exp_name=refused", "--dropout_ratio.t5=0.5")
    losses = {}
    for name, ratio in (("empty", 0.5), ("other", 0.5), ("none", 0.0)):
        own = ("--exp_name", name, f"--dropout_ratio.t5={ratio}")
        named = () if name == "none" else ("--dataset.empty_prompt", str(tmp_path / f"{name}.pt"))
        folder = train_here(tmp_path / "run.py", *words, *own, *named)[0].folder
        losses[name] = [line["loss"] for line in metrics(folder)]
    assert len({tuple(values) for values in losses.values()}) == 3


def slot_of(config: RunConfig, table: ClipTable, row: int) -> Slot:
    rows = np.array([row])
    return Slot(
        config.bucket_rule.buckets[0], 0, rows, table.clip_ids[rows], table.clip_ids[rows], np.ones(1, np.float32)
    )


def read_batch(config: RunConfig, row: int) -> Batch:
    table = open_clips(config.dataset, config.sample_rules.columns)
    source = open_embeddings(config, table)
    options = {"seed": 0, "stage": 0, "latent": source.encoders.latent, "rules": config.sample_rules}
    return StoredDataset(source, table, config.dataset, **options)[slot_of(config, table, row)]


def with_value(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[7] = value
    return changed


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("row", [0, 2])
def test_embedded_number_out_of_range_costs_its_sample_with_its_file(
    run: Callable[..., RunConfig], tmp_path: Path, value: float, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_MOST_READ", 0)  # a large set: this line is not among those read at the start
    config = run((MOMENTS, TEXT))
    torch.save(with_value(MOMENTS, value), tmp_path / f"clip{row}" / "video.pt")
    batch = read_batch(config, row)
    assert batch.weights.tolist() == [0]
    assert batch.faults[0].path == f"clip{row}/video.pt"
    assert not batch.encoded["mean"].any()
    torch.save(MOMENTS, tmp_path / f"clip{row}" / "video.pt")
    if value != 1e30:
        torch.save(with_value(TEXT[1], value), tmp_path / f"clip{row}" / "1.pt")
        assert "1.pt: 1 of 32 numbers" in read_batch(config, row).faults[0].reason
    assert read_batch(config, 1).faults == ()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16])
def test_embedded_numbers_of_any_precision_train_as_those_of_float32(
    run: Callable[..., RunConfig], dtype: torch.dtype
) -> None:
    config = run((MOMENTS.to(dtype).float(), TEXT.to(dtype).to(TEXT.dtype)), (MOMENTS.to(dtype), TEXT.to(dtype)))
    expected, batch = (read_batch(config, row) for row in (2, 3))
    assert (batch.weights.tolist(), batch.faults) == ([1], ())
    for name, value in expected.encoded.items():
        assert torch.equal(batch.encoded[name], value)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", ["video.pt", "1.pt"])
def test_embedded_numbers_of_another_type_are_refused_with_line_and_type(
    run: Callable[..., RunConfig], tmp_path: Path, dtype: torch.dtype, name: str
) -> None:
    config = run()
    torch.save((MOMENTS if name == "video.pt" else TEXT[1]).to(dtype), tmp_path / "clip1" / name)
    with pytest.raises(UserError, match=rf"list\.jsonl: line 3: {name}: .*{str(dtype).removeprefix('torch.')}"):
        open_clips(config.dataset)


def test_latents_that_are_bytes_as_fractions_are_refused_with_their_line(
    run: Callable[..., RunConfig], tmp_path: Path
) -> None:
    config = run()
    torch.save(MOMENTS * 1e6, tmp_path / "clip1" / "video.pt")
    with pytest.raises(UserError, match=r"list\.jsonl: line 3: clip1/video\.pt: numbers from"):
        open_clips(config.dataset)


@pytest.mark.parametrize("root", [None, "sub", "./sub"])
def test_relative_list_in_a_folder_reads_the_files_of_that_folder(
    run: Callable[..., RunConfig], tmp_path: Path, root: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    run()
    for name in ("list.jsonl", "clip0", "clip1"):
        (tmp_path / name).rename(tmp_path / "sub" / name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.py").write_text(RUN.format(path="sub/list.jsonl"))
    words = [] if root is None else [f"--dataset.root={root}"]
    batch = read_batch(read_run("run.py", words).value, 1)
    assert (batch.weights.tolist(), batch.faults) == ([1], ())


def test_safetensors_of_one_tensor_are_embedded_clips(run: Callable[..., RunConfig], tmp_path: Path) -> None:
    config = run()
    expected = read_batch(config, 1).encoded
    save_file({"moments": MOMENTS}, tmp_path / "clip0" / "video.safetensors")
    save_file({"x": TEXT[0].contiguous()}, tmp_path / "clip0" / "0.safetensors")
    (tmp_path / "list.jsonl").write_text(
        json.dumps({"vid_emb": "clip0/video.safetensors", "text_chunk_emb": ["clip0/0.safetensors", "clip0/1.pt"]})
    )
    batch = read_batch(config, 0)
    assert (batch.weights.tolist(), batch.faults) == ([1], ())
    assert torch.equal(batch.encoded["text"], -expected["text"])
