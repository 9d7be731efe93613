"""Collectives of ranks on GPUs by name, as --tp-collectives chooses them."""

from __future__ import annotations

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.collectives.rank_group import RankGroup
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.ranks.device_group import DeviceGroup, HostGroup

TP_COLLECTIVES = ("auto", "peer", "nccl", "host")


def create_device_group(name: str, ranks: RankGroup, device: Device) -> DeviceGroup:
    """auto: peer on a GPU, host elsewhere. Raises MeshError INVALID_ARGUMENT or UNSUPPORTED."""
    if name not in TP_COLLECTIVES:
        raise MeshError(
            ErrorReason.ERROR_REASON_INVALID_ARGUMENT,
            f"tp_collectives is {name!r}: choose one of {', '.join(TP_COLLECTIVES)}",
            {"field": "tp_collectives"},
        )
    is_gpu = device.torch_device.type == "cuda"
    if name == "host" or (name == "auto" and not is_gpu):
        return HostGroup(ranks)
    if not is_gpu:
        raise MeshError(
            ErrorReason.ERROR_REASON_UNSUPPORTED,
            f"--tp-collectives {name} needs GPUs",
            {"feature": "tp_collectives"},
        )
    if name == "nccl":
        from radixmesh.daemons.worker.cuda.ranks.nccl_group import NcclGroup

        return NcclGroup(ranks, device)
    # Here alone: they bring Triton's kernels and the driver.
    from radixmesh.daemons.worker.cuda.ranks.peer_group import PeerGroup
    from radixmesh.daemons.worker.cuda.ranks.peer_memory import CudaPeerMemory

    return PeerGroup(ranks, device, CudaPeerMemory())
