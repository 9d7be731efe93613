"""Cuts of a model's tensors over the ranks of a tensor-parallel group, for any number of ranks.

    column      features out: each rank computes some of them           queries, keys, values, gate, up (of each expert)
    row         features in: ranks' results are summed                  output projections, down (of each expert)
    vocabulary  rows of the embedding, logits of some tokens            embedding, head
    (whole)     on every rank                                           norms, biases behind a sum, routers

Shares are contiguous and differ by one unit at most. A unit of heads is a KV head with the query heads that share it;
where there are fewer KV heads than ranks, ranks that share one hold it each, and divide its query heads.
Source: Shoeybi et al., Megatron-LM (2019).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError


class Share(NamedTuple):
    """[start, stop) of a rank."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def times(self, factor: int) -> Share:
        return Share(self.start * factor, self.stop * factor)


class HeadShares(NamedTuple):
    query: Share
    kv: Share


def share_of(total: int, num_ranks: int, rank: int, *, unit: int = 1) -> Share:
    """A rank's part of `total`, cut at multiples of `unit`.

    Raises MeshError INVALID_ARGUMENT where a rank gets none.
    """
    num_units = -(-total // unit)
    if num_units < num_ranks:
        raise _too_many(num_ranks, num_units)
    return Share(
        min(num_units * rank // num_ranks * unit, total), min(num_units * (rank + 1) // num_ranks * unit, total)
    )


def share_heads(
    num_heads: int, num_kv_heads: int, num_ranks: int, rank: int, *, head_dim: int, block: int = 1
) -> HeadShares:
    """A rank's query heads, and the KV heads that they read. block: features in of the projection behind the heads are
    cut at multiples of it. Raises MeshError INVALID_ARGUMENT where a rank gets no query head."""
    group = num_heads // num_kv_heads
    # Heads that end together with a block.
    heads_a_block = block // math.gcd(block, head_dim)
    if num_ranks <= num_kv_heads:
        # As many KV heads as end with a block.
        unit = heads_a_block // math.gcd(heads_a_block, group)
        kv = share_of(num_kv_heads, num_ranks, rank, unit=unit)
        return HeadShares(kv.times(group), kv)
    kv_head = rank * num_kv_heads // num_ranks
    sharing = [other for other in range(num_ranks) if other * num_kv_heads // num_ranks == kv_head]
    num_units = -(-group // heads_a_block)
    if len(sharing) > num_units:
        raise _too_many(num_ranks, num_kv_heads * num_units)
    share = share_of(group, len(sharing), rank - sharing[0], unit=heads_a_block)
    first = kv_head * group
    return HeadShares(Share(first + share.start, first + share.stop), Share(kv_head, kv_head + 1))


def _too_many(num_ranks: int, num_units: int) -> MeshError:
    return MeshError(
        ErrorReason.ERROR_REASON_INVALID_ARGUMENT,
        f"{num_ranks} ranks cannot share {num_units} parts of a tensor: set a --tp-size of at most {num_units}",
        {"field": "tp_size"},
    )
