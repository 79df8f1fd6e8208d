"""T5 and CLIP: what transformers makes of the same captions, padded as the released weights expect."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longtake.contracts import UserError
from longtake.data.latents.source import EncoderFacts
from longtake.encoders.autoencoder_config import PixelConfig
from longtake.encoders.config import ClipEncoderConfig, T5EncoderConfig
from longtake.encoders.text import ClipEncoder, T5Encoder, build_text_encoder
from longtake.families.opensora_v2 import OPENSORA_V2
from longtake.families.ttt_video import TTT_VIDEO
from longtake.system.encoders import build_encoders, empty_texts
from tests.encoders.tiny_weights import CLIP_DIM, T5_DIM

CAPTIONS = ["a red circle moves up", "", "a " * 40 + "blue square"]


def built(described: dict[str, Any], **t5: Any) -> tuple[T5Encoder, ClipEncoder]:
    """Both encoders, without an autoencoder."""
    sections = {"t5": T5EncoderConfig(**{**described["t5"], **t5}), "clip": ClipEncoderConfig(**described["clip"])}
    config = SimpleNamespace(ae=PixelConfig(), family=OPENSORA_V2, **sections)
    encoders = build_encoders(config, torch.device("cpu")).of_captions
    assert isinstance(encoders["text"], T5Encoder)
    assert isinstance(encoders["vector"], ClipEncoder)
    return encoders["text"], encoders["vector"]


def by_transformers(folder: Path, length: int, **options: Any) -> tuple[Any, Tensor, Tensor]:
    """What `from_pretrained` of the same folder gives: output, token ids, mask."""
    from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

    found = AutoTokenizer.from_pretrained(folder)(
        CAPTIONS, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
    )
    model = (T5EncoderModel if folder.name == "t5" else CLIPTextModel).from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=found["input_ids"], **options), found["input_ids"], found["attention_mask"]


def test_t5_pads_to_its_length_and_attends_to_the_padding(weights: Path, described: dict[str, Any]) -> None:
    text, _ = built(described)
    expected, ids, mask = by_transformers(weights / "t5", 10)
    tokens = text.embed(CAPTIONS)
    assert tokens.shape == (3, 10, T5_DIM)
    torch.testing.assert_close(tokens, expected.last_hidden_state, rtol=0, atol=1e-6)
    assert ids[2, -1] == 1  # a caption that is cut ends with the end of sequence all the same
    assert mask.sum().item() < mask.numel()
    assert tokens[1, 5].abs().max() > 0  # padding is embedded


def test_captions_that_repeat_are_embedded_once_in_one_forward(described: dict[str, Any]) -> None:
    text, _ = built(described)
    forwards: list[int] = []
    text.module.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    once = text.embed(CAPTIONS)
    again = text.embed([CAPTIONS[place] for place in (2, 0, 2, 1, 1)])
    assert forwards == [3, 3]
    torch.testing.assert_close(again, once[[2, 0, 2, 1, 1]], rtol=0, atol=1e-6)


def test_with_mask_padding_is_not_seen_and_is_zero(weights: Path, described: dict[str, Any]) -> None:
    text, _ = built(described, mask=True)
    short, long = (built(described, mask=True, max_length=n)[0].embed(CAPTIONS[:1]) for n in (8, 10))
    torch.testing.assert_close(short, long[:, :8], rtol=0, atol=1e-6)  # more padding changes nothing
    *_, mask = by_transformers(weights / "t5", 10)
    assert text.embed(CAPTIONS)[mask == 0].abs().max() == 0


class _Reads(TorchDispatchMode):
    """Counts values of tensors that the host reads, for each of which it would wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operation is torch.ops.aten._local_scalar_dense.default
        return operation(*args, **(kwargs or {}))


def test_masked_t5_reads_no_values_and_gives_the_same_bits(described: dict[str, Any]) -> None:
    text, _ = built(described, mask=True)
    ids, mask = text.tokenize(CAPTIONS)
    with torch.no_grad():
        with _Reads() as reads:
            embedded = text.embed_ids(ids, mask)
        expected = text.module(input_ids=ids, attention_mask=mask).last_hidden_state
    assert reads.count == 0
    assert torch.equal(embedded[mask == 1], expected[mask == 1])


def test_clip_pools_at_the_first_end_token(weights: Path, described: dict[str, Any]) -> None:
    _, pooled = built(described)
    expected, ids, _ = by_transformers(weights / "clip", 12)
    vector = pooled.embed(CAPTIONS)
    assert vector.shape == (3, CLIP_DIM)
    torch.testing.assert_close(vector, expected.pooler_output, rtol=0, atol=1e-6)
    ends = (ids == ids[1, 1]).int().argmax(dim=1)  # the empty caption: begin, end, end ...
    assert ends.tolist() == [6, 1, 11]
    torch.testing.assert_close(vector[0], expected.last_hidden_state[0, 6], rtol=0, atol=1e-6)


def test_offloaded_blocks_give_the_same_bits(described: dict[str, Any]) -> None:
    resident, _ = built(described)
    offloaded, _ = built(described, placement="offloaded")
    for _ in range(2):
        assert torch.equal(offloaded.embed(CAPTIONS), resident.embed(CAPTIONS))


def test_embeddings_are_ordinary_tensors_also_in_inference_mode(described: dict[str, Any]) -> None:
    text, pooled = built(described)
    with torch.inference_mode():
        assert not text.embed(["a"]).is_inference()
        assert not pooled.embed(["a"]).is_inference()


def test_weights_of_a_whole_t5_are_read_without_its_decoder(weights: Path, tmp_path: Path, described: Any) -> None:
    folder = tmp_path / "t5"
    shutil.copytree(weights / "t5", folder)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    state |= {"decoder.block.0.layer.0.SelfAttention.q.weight": torch.zeros(2, 2), "lm_head.weight": torch.zeros(2, 2)}
    torch.save(state, folder / "pytorch_model.bin")  # as the published weights are kept
    whole, _ = built(described, from_pretrained=str(folder))
    assert torch.equal(whole.embed(CAPTIONS), built(described)[0].embed(CAPTIONS))


def test_a_pickle_with_code_in_it_is_refused(weights: Path, tmp_path: Path, described: dict[str, Any]) -> None:
    class Code:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    folder = tmp_path / "t5"
    shutil.copytree(weights / "t5", folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Code()))
    with pytest.raises(UserError, match="cannot be read as plain tensors"):
        built(described, from_pretrained=str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dim": 24}, r"t5\.dim = 24: the weights in .* have 16; write t5\.dim = 16"),
        ({"from_pretrained": "nowhere/at/all"}, r"t5\.from_pretrained = 'nowhere/at/all': no such file or folder"),
    ],
)
def test_a_section_that_does_not_fit_its_weights_is_one_sentence(
    described: dict[str, Any], change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        built(described, **change)


def test_a_folder_that_lacks_a_tensor_names_it(weights: Path, tmp_path: Path, described: dict[str, Any]) -> None:
    folder = tmp_path / "t5"
    shutil.copytree(weights / "t5", folder)
    state = load_file(folder / "model.safetensors")
    del state["encoder.final_layer_norm.weight"]
    save_file(state, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks final_layer_norm\.weight, so these are not the weights"):
        built(described, from_pretrained=str(folder))


def test_text_weights_with_nan_are_refused_by_name(weights: Path, tmp_path: Path, described: dict[str, Any]) -> None:
    folder = tmp_path / "t5"
    shutil.copytree(weights / "t5", folder)
    state = load_file(folder / "model.safetensors")
    state["encoder.final_layer_norm.weight"][0] = torch.nan
    save_file(state, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"encoder\.final_layer_norm\.weight holds 1 values that are NaN"):
        built(described, from_pretrained=str(folder))


def test_a_folder_without_tokenizer_says_which_files_there_should_be(
    weights: Path, tmp_path: Path, described: dict[str, Any]
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((weights / "t5" / name).read_bytes())
    with pytest.raises(UserError, match=r"has no tokenizer \(one of tokenizer\.json, spiece\.model, vocab\.json\)"):
        built(described, from_pretrained=str(tmp_path))


def test_new_tokens_take_the_free_rows_of_the_weights(weights: Path, described: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=r"t5\.new_tokens: with 1 more the tokenizer has \d+ tokens, and the weights \d+"
    ):
        built(described, new_tokens=("<end_scene>",))
    config = T5EncoderConfig(**described["t5"], new_tokens=("<end_scene>", "<start_scene>"))
    (module := torch.nn.Identity()).get_input_embeddings = lambda: torch.nn.Embedding(64, 1)
    encoder = T5Encoder(config, module, weights / "t5", torch.device("cpu"))
    free = len(encoder.tokens.tokenizer) - 2
    ids, _ = encoder.tokenize(["a red<start_scene> circle <end_scene>"])
    assert [i for i in ids[0].tolist() if i >= free] == [free + 1, free]


def test_the_empty_prompt_of_embedded_texts_is_made_by_the_encoder_that_made_them(described: dict[str, Any]) -> None:
    config = SimpleNamespace(family=TTT_VIDEO, t5=T5EncoderConfig(**described["t5"]))
    facts, cpu = EncoderFacts(PixelConfig().latent, config.t5.max_length, {}), torch.device("cpu")
    found = empty_texts(config, facts, None, {"t5": 0.1}, cpu)["text"]
    assert torch.equal(found, built(described)[0].embed([""]))
    config.t5 = T5EncoderConfig(**{**described["t5"], "from_pretrained": "no/such/folder"})
    with pytest.raises(UserError, match=r"dropout_ratio\.t5 = 0\.1: no dataset\.empty_prompt is named, and t5\.from"):
        empty_texts(config, facts, None, {"t5": 0.1}, cpu)


def test_clip_has_as_many_positions_as_its_weights(weights: Path) -> None:
    config = ClipEncoderConfig(dim=CLIP_DIM, from_pretrained=str(weights / "clip"))
    with pytest.raises(UserError, match=r"clip\.max_length = 77: the weights have 12 positions"):
        build_text_encoder(config, weights / "clip")
