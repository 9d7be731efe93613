"""Parts of a transfer between groups: heads that one rank sends to another, a transfer to the workers for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.kv_share import KvShare, parts_of
from radixmesh.worker.v1 import worker_pb2


class RankPart(NamedTuple):
    """transfer_id: as the workers know it. share: heads that go from rank `writer` to rank `receiver`."""

    transfer_id: str
    receiver: int
    writer: int
    share: KvShare

    def kv(self, ours: worker_pb2.KvFormat) -> worker_pb2.KvFormat:
        """Format of what is sent. ours: that of the receiver."""
        kv = worker_pb2.KvFormat()
        kv.CopyFrom(ours)
        kv.first_head, kv.end_head, kv.num_heads = self.share
        return kv


def rank_parts(transfer_id: str, ours: Sequence[KvShare], writers: Sequence[KvShare]) -> tuple[RankPart, ...]:
    """Parts of a transfer, those of rank after rank. writers: shares of the sending group's ranks; none: as ours.

    Raises TRANSFER_FAILED for a group whose ranks do not have the same heads between them.
    """
    try:
        found = [
            (receiver, part)
            for receiver, share in enumerate(ours)
            for part in parts_of(receiver, share, writers or ours)
        ]
    except ValueError as error:
        message = f"the other group's KV does not make up this one's ({error}): prefill where the request decodes"
        raise MeshError(ErrorReason.ERROR_REASON_TRANSFER_FAILED, message) from error
    is_one_to_one = all(receiver == part.writer for receiver, part in found) and len(found) == len(ours)
    return tuple(
        RankPart(
            transfer_id if is_one_to_one else f"{transfer_id}/{part.writer}-{receiver}",
            receiver,
            part.writer,
            part.share,
        )
        for receiver, part in found
    )
