"""The transport that a worker's settings name."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from enum import StrEnum

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.security.tls_files import TlsFiles
from radixmesh.daemons.worker.kv_transfer.transfer_service import GrpcTransport
from radixmesh.daemons.worker.kv_transfer.transport import KvTransport
from radixmesh.daemons.worker.kv_transfer.transports.device_transport import DeviceTransport
from radixmesh.daemons.worker.kv_transfer.transports.shared_memory import SharedMemoryTransport


class TransferTransport(StrEnum):
    """Values of --transfer-transport."""

    DEVICE = "device"
    GRPC = "grpc"
    SHARED_MEMORY = "shared_memory"
    NIXL = "nixl"


def make_transport(
    kind: TransferTransport,
    tls: TlsFiles | None = None,
    *,
    staging_bytes: int = 0,
    before_last_word: Callable[[], Awaitable[None]] | None = None,
    on_fallback: Callable[[], object] = lambda: None,
) -> KvTransport:
    """Raises UNSUPPORTED where this machine has none of that kind. staging_bytes: of its regions and send buffers.
    before_last_word: awaited by every writer. on_fallback: called for each transfer that NIXL was to carry and gRPC
    does."""
    if kind is TransferTransport.GRPC:
        return GrpcTransport(tls, before_last_word=before_last_word)
    if kind is TransferTransport.NIXL:
        # Imported where it is asked for: the library is an extra of the installation.
        from radixmesh.daemons.worker.kv_transfer.transports.nixl_transport import NixlTransport

        return NixlTransport(
            tls, staging_bytes=staging_bytes, before_last_word=before_last_word, on_fallback=on_fallback
        )
    if not hasattr(os, "memfd_create"):
        message = "shared memory for KV transfers is Linux's: choose --transfer-transport grpc"
        raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "shared_memory"})
    if kind is TransferTransport.DEVICE:
        return DeviceTransport(tls, staging_bytes=staging_bytes, before_last_word=before_last_word)
    return SharedMemoryTransport(tls, before_last_word=before_last_word)
