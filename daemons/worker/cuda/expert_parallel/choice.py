"""Transports of rows to experts by name, as --ep-transport chooses them."""

from __future__ import annotations

from functools import partial

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.collectives.rank_group import RankGroup
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.expert_parallel.buffer_dispatch import BufferDispatch
from radixmesh.daemons.worker.cuda.expert_parallel.device_dispatch import DeviceDispatch
from radixmesh.daemons.worker.cuda.expert_parallel.replicated_dispatch import ReplicatedDispatch
from radixmesh.daemons.worker.cuda.expert_parallel.row_share import WHOLE, RowShare
from radixmesh.daemons.worker.cuda.expert_parallel.wire import HostWire, NcclWire, Wire
from radixmesh.daemons.worker.cuda.expert_parallel.wire_dispatch import WireDispatch

EP_TRANSPORTS = ("auto", "nccl", "nixl", "deepep", "host")

_log = get_logger(__name__)


def create_device_dispatch(
    name: str, ranks: RankGroup, device: Device, *, max_room: int, batch: RowShare = WHOLE
) -> DeviceDispatch:
    """auto: nccl on a GPU, host elsewhere. max_room: most rows of a step at low latency. batch: this rank's position
    among those that have the same rows (tensor parallelism).

    Where all ranks that share the experts are of one batch, its rows are with each of them, and `name` says how experts
    move alone. Otherwise each rank of a batch brings a part of its rows.

    Raises MeshError INVALID_ARGUMENT or UNSUPPORTED.
    """
    if name not in EP_TRANSPORTS:
        raise MeshError(
            ErrorReason.ERROR_REASON_INVALID_ARGUMENT,
            f"ep_transport is {name!r}: choose one of {', '.join(EP_TRANSPORTS)}",
            {"field": "ep_transport"},
        )
    is_gpu = device.torch_device.type == "cuda"
    if not is_gpu and name not in ("auto", "host"):
        message = f"--ep-transport {name} needs GPUs"
        raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "ep_transport"})
    is_host = name == "host" or not is_gpu
    wire: Wire = HostWire(ranks) if is_host else NcclWire(ranks, device)
    if batch.num_parts % ranks.size == 0:
        if name in ("nixl", "deepep"):
            _log.warning("ep_transport_unused", transport=name, reason="no rows travel: --ep-size divides --tp-size")
        share = RowShare(batch.part // ranks.size, batch.num_parts // ranks.size)
        return ReplicatedDispatch(wire, max_room=max_room, share=share)
    normal = WireDispatch(wire, max_room=max_room, share=batch)
    # Libraries are imported here alone: hardly anybody has them.
    if name == "nixl":
        from radixmesh.daemons.worker.cuda.expert_parallel.nixl_buffer import NixlBuffer, import_nixl, nixl_bytes

        nixl = import_nixl()
        create = partial(NixlBuffer, nixl, ranks, device=device.torch_device)
        return BufferDispatch(name, create, partial(nixl_bytes, nixl), normal, max_room=max_room)
    if name == "deepep":
        from radixmesh.daemons.worker.cuda.expert_parallel.deep_ep_buffer import (
            DeepEpBuffer,
            deep_ep_bytes,
            import_deep_ep,
        )

        deep_ep = import_deep_ep()
        open_buffer = partial(DeepEpBuffer, deep_ep, ranks, device=device.torch_device)
        return BufferDispatch(name, open_buffer, partial(deep_ep_bytes, deep_ep), normal, max_room=max_room)
    return normal
