"""Ranks whose sums go through NCCL, inside CUDA graphs; NVLink multicast is off.

A graph holds the communicator that it was captured with, so that graphs are of one generation: they are dropped before
the communicator is, and captured anew. Aborting a communicator frees the device at once, and returns when the last of
its graphs is gone: a thread of its own waits for that.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.collectives.gloo import GlooCommunicator
from radixmesh.daemons.worker.collectives.rank_group import RankGroup
from radixmesh.daemons.worker.cuda.device import Device
from radixmesh.daemons.worker.cuda.ranks.device_group import DeviceGroup
from radixmesh.daemons.worker.group_member import RankLost

_log = get_logger(__name__)

_POLL_S = 0.02
_CONNECT_S = 60.0


class NcclGroup(DeviceGroup):
    is_captured_anew = True

    def __init__(self, ranks: RankGroup, device: Device) -> None:
        """Raises MeshError UNSUPPORTED where this torch has no NCCL."""
        super().__init__(ranks)
        if not dist.is_nccl_available():
            raise MeshError(
                ErrorReason.ERROR_REASON_UNSUPPORTED,
                "this torch brings no NCCL: choose --tp-collectives peer or host",
                {"feature": "tp_collectives"},
            )
        # Multicast resets whole machines where its service is not set up.
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        self._device = device
        self._process_group: dist.ProcessGroupNCCL | None = None

    def form(self) -> None:
        communicator = self.ranks.communicator
        assert isinstance(communicator, GlooCommunicator), "NCCL meets where the ranks have met on their hosts"
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=_CONNECT_S)
        try:
            store = communicator.new_store("nccl")
            self._process_group = group = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            # Connects: within a capture it could not.
            self._sum(group, torch.zeros(1, device=self._device.torch_device))
            self._device.record_event().wait()
        except RuntimeError as error:
            raise RankLost(f"the ranks did not meet through NCCL: {str(error).splitlines()[0][:300]}") from error
        threading.Thread(target=_watch, args=(communicator, group), name="nccl-watch", daemon=True).start()

    def leave(self) -> None:
        self._process_group = None

    def add_reduced(self, x_TN: torch.Tensor, residual_TN: torch.Tensor) -> None:
        residual_TN += self.all_reduce(x_TN)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if self._process_group is not None:
            self._sum(self._process_group, x)
        return x

    def all_gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        widest = max(widths)
        parts = x.new_zeros(self.size, len(x), widest)
        parts[self.rank, :, : x.shape[1]] = x
        if self._process_group is not None:
            own = parts[self.rank].clone()
            self._process_group._allgather_base(parts.view(-1), own.view(-1)).wait()  # type: ignore[attr-defined]
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], dim=1)

    def _sum(self, group: dist.ProcessGroupNCCL, x: torch.Tensor) -> None:
        group.allreduce([x]).wait()  # type: ignore[attr-defined]


def _watch(communicator: GlooCommunicator, group: dist.ProcessGroupNCCL) -> None:
    """Ends collectives that wait for a lost rank."""
    pause = threading.Event()
    while communicator.is_whole:
        pause.wait(_POLL_S)
    _log.info("nccl_aborted")
    try:
        group.abort()
    except RuntimeError as error:
        _log.warning("nccl_abort_failed", error=str(error).splitlines()[0][:300])
