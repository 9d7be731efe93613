"""Transports of rows to experts by name, as --ep-transport chooses them."""

from __future__ import annotations

from functools import partial

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.collectives.rank_group import RankGroup
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.expert_parallel.buffer_dispatch import BufferDispatch
from radixmesh.daemons.worker.cuda.expert_parallel.device_dispatch import DeviceDispatch
from radixmesh.daemons.worker.cuda.expert_parallel.wire import HostWire, NcclWire
from radixmesh.daemons.worker.cuda.expert_parallel.wire_dispatch import WireDispatch

EP_TRANSPORTS = ("auto", "nccl", "nixl", "deepep", "host")


def create_device_dispatch(name: str, ranks: RankGroup, device: Device, *, max_room: int) -> DeviceDispatch:
    """auto: nccl on a GPU, host elsewhere. max_room: most rows of a rank in a forward at low latency.

    Raises MeshError INVALID_ARGUMENT or UNSUPPORTED.
    """
    if name not in EP_TRANSPORTS:
        raise MeshError(
            ErrorReason.ERROR_REASON_INVALID_ARGUMENT,
            f"ep_transport is {name!r}: choose one of {', '.join(EP_TRANSPORTS)}",
            {"field": "ep_transport"},
        )
    is_gpu = device.torch_device.type == "cuda"
    if name == "host" or (name == "auto" and not is_gpu):
        return WireDispatch(HostWire(ranks), max_room=max_room)
    if not is_gpu:
        message = f"--ep-transport {name} needs GPUs"
        raise MeshError(ErrorReason.ERROR_REASON_UNSUPPORTED, message, {"feature": "ep_transport"})
    normal = WireDispatch(NcclWire(ranks, device), max_room=max_room)
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
