"""Heads of KV by rank, and which rank sends which of them to whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.kv_share import KvShare, pack_shares, parts_of, unpack_shares
from radixmesh.daemons.scheduler.transfers.kv_parts import rank_parts
from radixmesh.daemons.worker.models.sharding import share_heads


def shares_of(num_heads: int, num_ranks: int) -> list[KvShare]:
    """As weights are cut: ranks share a head where there are fewer heads than ranks."""
    cuts = [share_heads(8 * num_heads, num_heads, num_ranks, rank, head_dim=16).kv for rank in range(num_ranks)]
    return [KvShare(*cut, num_heads) for cut in cuts]


@given(num_heads=st.integers(1, 12), sizes=st.tuples(st.integers(1, 8), st.integers(1, 8)))
def test_every_head_of_every_rank_comes_once_from_a_rank_that_has_it(num_heads: int, sizes: tuple[int, int]) -> None:
    writers, ours = (shares_of(num_heads, size) for size in sizes)
    parts = rank_parts("t", ours, writers)
    for rank, share in enumerate(ours):
        mine = [part for part in parts if part.receiver == rank]
        heads = [head for part in mine for head in range(part.share.start, part.share.stop)]
        assert heads == list(range(share.start, share.stop))
        assert all(writers[part.writer].has(part.share) for part in mine)
    # A transfer id is one region's on its receiver, and one transfer's on its writer.
    assert len({(part.receiver, part.transfer_id) for part in parts}) == len(parts)
    assert len({(part.writer, part.transfer_id) for part in parts}) == len(parts)


@pytest.mark.parametrize(("num_heads", "size"), [(1, 1), (1, 4), (2, 2), (2, 4), (8, 4)])
def test_rank_i_sends_to_rank_i_of_a_group_like_it(num_heads: int, size: int) -> None:
    shares = shares_of(num_heads, size)
    for writers in (shares, []):
        parts = rank_parts("t", shares, writers)
        assert [(part.transfer_id, part.writer, part.receiver) for part in parts] == [("t", i, i) for i in range(size)]


def test_heads_that_nobody_has_are_refused() -> None:
    with pytest.raises(ValueError, match="head 1 of 2"):
        parts_of(0, KvShare(0, 2, 2), [KvShare(0, 1, 2)])
    with pytest.raises(MeshError, match="not make up"):
        rank_parts("t", [KvShare(0, 2, 2)], [KvShare(0, 4, 4)])


def test_shares_travel_and_others_are_refused() -> None:
    shares = shares_of(8, 4)
    assert list(unpack_shares(pack_shares(shares), "f")) == shares and unpack_shares(b"", "f") == ()
    for data in (b"x" * 12 * 1025, pack_shares(shares)[:-4], pack_shares([KvShare(1, 1, 2)]), b"abc"):
        with pytest.raises(MeshError, match="f "):
            unpack_shares(data, "f")
