"""Low latency by NIXL EP (`nixl_ep_cu13` of the package nixl-cu13), which reaches other GPUs over NVLink or RDMA.

A kernel that waits too long for a rank goes on without it and masks it: its step is dropped (BufferDispatch.check). Its
high-throughput mode is for several hosts alone, and not used here.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.collectives.gloo import GlooCommunicator
from radixmesh.daemons.worker.collectives.rank_group import RankGroup
from radixmesh.daemons.worker.cuda.expert_parallel.buffer_dispatch import BufferShape
from radixmesh.daemons.worker.cuda.expert_parallel.library_buffer import LibraryBuffer
from radixmesh.daemons.worker.ranks.group_member import RankLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_MODULES = ("nixl_ep_cu13", "nixl_ep")
# Longer than a rank may be late for a step that the scheduler has sent to another one, and shorter than the 5 s within
# which a survivor leaves.
_TIMEOUT_MS = 4_000


def import_nixl() -> ModuleType:
    """Raises MeshError UNSUPPORTED where it is not installed, or is not for this torch."""
    reasons = []
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except (ImportError, OSError) as error:
            reasons.append(f"{name}: {error}")
    raise MeshError(
        ErrorReason.ERROR_REASON_UNSUPPORTED,
        f"--ep-transport nixl needs NIXL EP (pip install nixl-cu13) for torch {torch.__version__}, which cannot be "
        f"imported ({'; '.join(reasons)[:300]}): choose nccl",
        {"feature": "ep_transport"},
    )


def nixl_bytes(module: ModuleType, shape: BufferShape) -> int:
    """Of a buffer."""
    num_bytes: int = module.Buffer.get_low_latency_buffer_size_hint(
        shape.max_rows, shape.hidden_size, shape.num_ranks, shape.num_slots
    )
    return num_bytes


class NixlBuffer(LibraryBuffer):
    """Buffer of one generation."""

    def __init__(self, module: ModuleType, ranks: RankGroup, shape: BufferShape, device: torch.device) -> None:
        """Connects; blocks until the others do. Raises RankLost."""
        self._shape = shape
        self.id_dtype: torch.dtype = getattr(module, "topk_idx_t", torch.int64)
        """Its kernels were compiled for ids of this one."""
        self._mask_N = torch.zeros(shape.num_ranks, dtype=torch.int32, device=device)
        try:
            self.buffer = module.Buffer(
                rank=ranks.rank,
                explicitly_destroy=True,
                low_latency_mode=True,
                tcp_store_group=_store(ranks),
                timeout_ms=_TIMEOUT_MS,
            )
            self.buffer.update_memory_buffers(shape.num_ranks, shape.slots_per_rank, nixl_bytes(module, shape))
            self.buffer.connect_ranks([rank for rank in range(shape.num_ranks) if rank != ranks.rank])
        except RuntimeError as error:
            raise RankLost(f"the ranks did not meet through NIXL: {str(error).splitlines()[0][:300]}") from error
        # Nobody sends before all are connected.
        ranks.stack(torch.zeros(1))

    def masked(self) -> torch.Tensor | None:
        self.buffer.query_mask_buffer(self._mask_N)
        return self._mask_N


def _store(ranks: RankGroup) -> Store:
    communicator = ranks.communicator
    assert isinstance(communicator, GlooCommunicator), "NIXL meets where the ranks have met on their hosts"
    return communicator.new_store("nixl-ep")
