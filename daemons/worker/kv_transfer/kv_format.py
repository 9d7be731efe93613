"""Format of a worker's KV, and whether that of another is the same or a part of it."""

from __future__ import annotations

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.kv_share import WHOLE_KV, KvShare
from radixmesh.daemons.worker.runner import ModelRunner
from radixmesh.worker.v1 import worker_pb2


def format_of(runner: ModelRunner, weights_digest: str, share: KvShare) -> worker_pb2.KvFormat:
    """KV of these heads, as the runner has it."""
    return worker_pb2.KvFormat(
        weights_digest=weights_digest,
        kv_dtype=runner.kv_dtype,
        kv_layout=runner.kv_token_layout,
        first_head=share.start,
        end_head=share.stop,
        num_heads=share.total,
    )


def share_of_format(kv: worker_pb2.KvFormat) -> KvShare:
    """The heads that it is of."""
    return KvShare(kv.first_head, kv.end_head, kv.num_heads) if kv.num_heads else WHOLE_KV


def part_of(ours: worker_pb2.KvFormat, kv: worker_pb2.KvFormat) -> KvShare:
    """The heads of `kv`, which are some of ours. Raises TRANSFER_FAILED for KV of another format."""
    part = share_of_format(kv)
    is_alike = all(getattr(kv, name) == getattr(ours, name) for name in ("weights_digest", "kv_dtype", "kv_layout"))
    if is_alike and share_of_format(ours).has(part):
        return part
    message = "the KV is of another model, type, layout or heads than this worker's: run one release on both sides"
    raise MeshError(ErrorReason.ERROR_REASON_TRANSFER_FAILED, message, {"failure": "format"})
