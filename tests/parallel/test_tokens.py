"""Shares of tokens: nothing lost, nothing twice, sizes within one of each other, lengths that can be brought back."""

from __future__ import annotations

import pytest

from longtake.parallel.mesh import TokenPeers
from longtake.parallel.tokens import TokenCut, share


def peers(sequence: int, tensor: int, index: int) -> TokenPeers:
    return TokenPeers(sequence, tensor, sequence, *divmod(index, tensor), None, None, None, None)


@pytest.mark.parametrize("num", [1, 2, 3, 8])
@pytest.mark.parametrize("whole", [0, 1, 5, 8, 17])
def test_shares_follow_one_another_and_differ_by_one_token_at_most(whole: int, num: int) -> None:
    shares = [share(whole, num, index) for index in range(num)]
    assert [offset for offset, _ in shares] == [sum(size for _, size in shares[:i]) for i in range(num)]
    assert sum(size for _, size in shares) == whole
    assert max(size for _, size in shares) - min(size for _, size in shares) <= 1


def test_all_ranks_tell_the_same_lengths_of_all_ranks() -> None:
    cuts = [TokenCut(peers(3, 2, index)) for index in range(6)]
    for cut in cuts:
        cut.note("img", 17)
        cut.note("txt", 4)
    assert {tuple(cut.peer_sizes("img", entered=True)) for cut in cuts} == {(3, 3, 3, 3, 3, 2)}
    assert {tuple(cut.peer_sizes("img", entered=False)) for cut in cuts} == {(6, 6, 5)}
    assert {tuple(cut.joined_sizes(("txt", "img"))) for cut in cuts} == {(8, 7, 6)}
    for index, cut in enumerate(cuts):
        assert cut.tensor_share("img")[1] == cut.peer_sizes("img", entered=True)[index]
        assert cut.tensor_sizes(("txt", "img"))[index % 2] == (cut.tensor_share("txt")[1], cut.tensor_share("img")[1])


def test_lengths_of_an_earlier_forward_come_back_as_often_as_need_be() -> None:
    cut = TokenCut(peers(2, 1, 0))
    cut.note("img", 10)
    earlier = cut.captured()
    cut.note("img", 3)
    for _ in range(2):
        with earlier:
            assert cut.joined_sizes(("img",)) == [5, 5]
        assert cut.joined_sizes(("img",)) == [2, 1]


@pytest.mark.parametrize("frames", [3, 8, 16])
def test_units_are_not_cut_apart(frames: int) -> None:
    cuts = [TokenCut(peers(4, 1, index)) for index in range(4)]
    for cut in cuts:
        cut.note("img", frames * 6)
        cut.note_units({"img": 6})
    sizes = [cut.sequence_share("img")[1] for cut in cuts]
    assert sum(sizes) == frames * 6
    assert all(size % 6 == 0 for size in sizes)
    assert max(sizes) - min(sizes) <= 6
    assert [cut.peer_sizes("img", entered=False) for cut in cuts] == [sizes] * 4
