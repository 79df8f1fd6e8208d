"""Captions that peers deal out among themselves: the embeddings of one rank, and nobody waits for nobody."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longtake.encoders.autoencoder_config import PixelConfig
from longtake.encoders.config import WordsConfig
from longtake.families.opensora_v2 import OPENSORA_V2
from longtake.parallel.world import World
from longtake.system.encoders import Encoders, build_encoders
from tests.encoders.conftest import described
from tests.ranks import Facts, on_ranks
from tests.system.test_encoders import tiny

__all__ = ["described"]
CAPTIONS = ("a red circle moves up", "", "a blue square", "green triangle " * 9, "a")
COUNTS = (5, 1, 3)
PLACEMENTS = ("resident", "sharded", "offloaded")
WORDS = SimpleNamespace(ae=PixelConfig(), t5=WordsConfig(), clip=WordsConfig(), family=OPENSORA_V2)
PEERS = 2  # of three ranks; the third is alone


def embed_counts(encoders: Encoders) -> dict[str, list[Tensor]]:
    """The embeddings of the first of the captions, so many at a time."""
    found = [encoders.embed(CAPTIONS[:count]) for count in COUNTS]
    return {name: [one[name] for one in found] for name in ("text", "vector")}


def play(described: Mapping[str, Any], folder: Path, world: World) -> Facts:
    """Saves what this rank has at each placement; how many captions it gave to T5 and to CLIP in each call."""
    facts: Facts = {}
    peers, alone = dist.new_group(list(range(PEERS))), world.rank >= PEERS
    for placement in PLACEMENTS:
        encoders = build_encoders(tiny(dict(described), "--t5.placement", placement), world.device, world)
        encoders.share(lambda: None if alone else peers)
        calls: dict[str, list[int]] = {"t5": [], "clip": []}
        for name, part in (("t5", encoders.of_captions["text"]), ("clip", encoders.of_captions["vector"])):
            part.module.register_forward_pre_hook(
                lambda module, args, words, own=calls[name]: own.append(len(words["input_ids"])), with_kwargs=True
            )
        with torch.inference_mode():
            found = embed_counts(encoders)
        assert not found["text"][0].is_inference()
        torch.save(found, folder / f"{placement}-{world.rank}.pt")
        facts[placement] = calls
    return facts


@pytest.fixture(scope="module")
def shared(described: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Facts]]:
    folder = tmp_path_factory.mktemp("shared")
    return folder, [facts["play"] for facts in on_ranks(3, folder, {"play": partial(play, described, folder)})]


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_peers_have_the_embeddings_of_one_rank(
    described: dict[str, Any], shared: tuple[Path, list[Facts]], placement: str
) -> None:
    alone = embed_counts(build_encoders(tiny(described), torch.device("cpu")))
    first, *others = (torch.load(shared[0] / f"{placement}-{rank}.pt") for rank in range(3))
    for name, wanted in alone.items():
        for i, embedded in enumerate(wanted):
            assert torch.equal(first[name][i], others[0][name][i])
            for rank in (first, *others):
                torch.testing.assert_close(rank[name][i], embedded, rtol=0, atol=2e-6)


def test_each_caption_is_embedded_once(shared: tuple[Path, list[Facts]]) -> None:
    for placement in ("resident", "offloaded"):
        calls = [facts[placement] for facts in shared[1]]
        for name in ("t5", "clip"):
            assert [rank[name] for rank in calls] == [[3, 1, 2], [2, 1], list(COUNTS)]


def test_all_ranks_call_a_sharded_encoder_equally_often(shared: tuple[Path, list[Facts]]) -> None:
    calls = [facts["sharded"] for facts in shared[1]]
    assert [rank["t5"] for rank in calls] == [[3, 1, 2], [2, 1, 1], list(COUNTS)]  # one stands in where it has none
    assert [rank["clip"] for rank in calls] == [[3, 1, 2], [2, 1], list(COUNTS)]


def test_words_are_looked_up_by_each_rank_itself() -> None:
    encoders = build_encoders(WORDS, torch.device("cpu"))
    encoders.share(lambda: pytest.fail("no group is needed"))
    assert len(encoders.embed(CAPTIONS)["text"]) == len(CAPTIONS)
