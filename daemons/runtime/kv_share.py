"""The part of a token's KV that a rank has: consecutive heads of all that the model has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.arrays import pack_ints, unpack_ints
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.rank_layout import MAX_RANKS

MAX_HEADS = 1 << 20


class KvShare(NamedTuple):
    """Heads [start, stop) of `total`. KV that has no heads, or that all ranks have whole, counts as one head."""

    start: int
    stop: int
    total: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def has(self, part: KvShare) -> bool:
        """True for a part of it that is not empty."""
        return part.total == self.total and self.start <= part.start < part.stop <= self.stop


WHOLE_KV = KvShare(0, 1, 1)


class KvPart(NamedTuple):
    """KV that one rank of a group sends to one rank of another. writer: the sending rank."""

    writer: int
    share: KvShare


def parts_of(receiver: int, share: KvShare, writers: Sequence[KvShare]) -> list[KvPart]:
    """Parts that make up the share of a rank, each from one rank of a group with these shares, in the order of heads.

    Ranks that have the same heads take turns. Raises ValueError where some heads are nobody's.
    """
    parts: list[KvPart] = []
    start = share.start
    while start < share.stop:
        head = KvShare(start, start + 1, share.total)
        having = [rank for rank, theirs in enumerate(writers) if theirs.has(head)]
        if not having:
            raise ValueError(f"head {start} of {share.total} is on no rank of the other group")
        writer = having[receiver % len(having)]
        stop = min(share.stop, writers[writer].stop)
        parts.append(KvPart(writer, KvShare(start, stop, share.total)))
        start = stop
    return parts


def pack_shares(shares: Sequence[KvShare]) -> bytes:
    """Shares by rank, as messages have them."""
    return pack_ints([number for share in shares for number in share])


def unpack_shares(data: bytes, field: str) -> tuple[KvShare, ...]:
    """The reverse of pack_shares(). Raises INVALID_ARGUMENT, naming the field."""
    is_long = len(data) > 4 * 3 * MAX_RANKS
    numbers = [] if is_long else unpack_ints(data, field).tolist()
    shares = tuple(KvShare(*numbers[at : at + 3]) for at in range(0, len(numbers) - 2, 3))
    if (
        is_long
        or 3 * len(shares) != len(numbers)
        or not all(0 <= s.start < s.stop <= s.total <= MAX_HEADS for s in shares)
    ):
        message = f"{field} is no array of (first, end, number in all): send it as the scheduler's hello had it"
        raise MeshError(ErrorReason.ERROR_REASON_INVALID_ARGUMENT, message, {"field": field})
    return shares
