from __future__ import annotations

from dataclasses import replace

import pytest

from longtake.families import registry
from longtake.system.tiny import is_tiny, tiny_layer
from tests.families.plain import PLAIN

PRESET = {
    "model": {"cond_embed": True, "patch_size": 2, "hidden_size": 3072, "grad_ckpt_buffer_size": 50 * 2**30},
    "bucket_config": {
        "256px": {1: (1.0, 45), 5: (1.0, 12), 129: (0.5, 3)},
        "768px": {1: ((0.5), 13), 33: ((1.0, 0.2), 1)},
        "1024px_ar1:1": {1: (0.5, 7)},
    },
    "parallel": {"sequence": 4, "tensor": 1, "zero": 2},
    "condition_config": {"i2v_head": 5},
}


def test_buckets_become_small_and_keep_their_probabilities():
    assert tiny_layer(PRESET, 1)["bucket_config"] == {
        "_delete_": True,
        "32px": {1: (1.0, 4), 5: (1.0, 2), 17: (0.5, 2)},
        "64px": {1: (0.5, 4), 17: ((1.0, 0.2), 1)},
        "64px_ar1:1": {1: (0.5, 4)},
    }


def test_resolutions_of_a_law_that_lists_its_sizes_become_squares(monkeypatch: pytest.MonkeyPatch):
    family = replace(PLAIN, bucket_law=lambda quirks: "opensora_v1_2")
    monkeypatch.setitem(registry._FAMILIES, PLAIN.model, family)
    buckets = {"240p": {51: (1.0, 20), 1: (0.5, 89)}, "2048": {1: (0.1, 5)}, "144p": {408: (0.0, None)}}
    layer = tiny_layer({"model": {"type": "plain"}, "bucket_config": buckets}, 1)
    assert layer["bucket_config"] == {"_delete_": True, "32x32": {17: (1.0, 2), 1: (0.5, 4)}, "64x64": {1: (0.1, 4)}}


def test_validations_become_small_too():
    tree = {**PRESET, "validation": {"prompts": ["a"], "sampling_option": {"resolution": "768px", "num_steps": 50}}}
    assert tiny_layer(tree, 1)["validation"] == {"sampling_option": {"resolution": "64px", "num_steps": 4}}


def test_only_sizes_change():
    layer = tiny_layer(PRESET, 1)
    assert "condition_config" not in layer
    assert "cond_embed" not in layer["model"]
    assert layer["model"]["hidden_size"] == 128
    assert layer["model"]["grad_ckpt_buffer_size"] == 2**20


def test_peers_stay_as_far_as_the_processes_go():
    degrees = [tiny_layer(PRESET, size)["parallel"]["sequence"] for size in (1, 2, 4, 8, 6)]
    assert degrees == [1, 2, 4, 4, 2]
    fixed = {"parallel": {"replicate": 2, "shard": 8, "sequence": 4, "tensor": 1}}
    for size in (1, 2, 6, 8, 64):
        found = tiny_layer(fixed, size)["parallel"]
        assert found["replicate"] * found["shard"] * found["sequence"] * found["tensor"] == size


def test_weights_and_stores_of_full_size_are_left_out():
    tree = {"model": {"from_pretrained": "big"}, "lora": {"rank": 64}, "dataset": {"latents": "store"}}
    layer = tiny_layer(tree, 1)
    assert layer["model"]["from_pretrained"] is None
    assert layer["lora"] == {"rank": 4, "from_pretrained": None}
    assert layer["dataset"] == {"latents": None}


def test_what_is_tiny_already_stays():
    layer = tiny_layer(PRESET, 4)
    buckets = {name: value for name, value in layer["bucket_config"].items() if name != "_delete_"}
    again = tiny_layer({**PRESET, **layer, "bucket_config": buckets}, 4)
    assert again == layer


def test_what_the_schema_will_refuse_is_left_to_it():
    tree = {"model": 3, "bucket_config": {"huge": {1: (1.0, 2)}, "256px": 7}, "parallel": None}
    assert tiny_layer(tree, 1)["bucket_config"] == {"_delete_": True, "huge": {1: (1.0, 2)}}


def test_the_model_of_images_becomes_tiny_too():
    image = {"patch_size": 2, "guidance_embed": True, "hidden_size": 3072, "from_pretrained": "flux"}
    tree = {**PRESET, "img_flux": image, "img_flux_ae": {"type": "autoencoder_2d"}, "img_resolution": "768px"}
    layer = tiny_layer(tree, 1)
    assert (layer["img_flux"]["hidden_size"], layer["img_flux"]["from_pretrained"]) == (128, None)
    assert "guidance_embed" not in layer["img_flux"]
    assert layer["img_flux_ae"] == layer["ae"]
    assert layer["img_resolution"] == "64px"


def test_a_tree_is_told_to_be_tiny_by_the_sizes_of_its_model():
    assert not is_tiny(PRESET)
    assert is_tiny({"model": {**PRESET["model"], **tiny_layer(PRESET, 1)["model"], "axes_dim": [4, 6, 6]}})
