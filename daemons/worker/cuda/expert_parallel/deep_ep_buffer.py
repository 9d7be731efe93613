"""Low latency by DeepEP (`deep_ep` of the package sgl-deep-ep), whose ABI follows one version of torch.

Ranks are masked where its kernels give up waiting for them (its "shrink mode"): a step without them is dropped.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.collectives.rank_group import RankGroup
from radixmesh.daemons.worker.cuda.expert_parallel.buffer_dispatch import BufferShape
from radixmesh.daemons.worker.cuda.expert_parallel.library_buffer import LibraryBuffer
from radixmesh.daemons.worker.ranks.group_member import RankLost

# Handles and ids that ranks tell each other are some hundred bytes.
_MOST_BYTES = 4096
_LENGTH_BYTES = 4
_LEAST_DEPTH = 1024


def import_deep_ep() -> ModuleType:
    """Raises MeshError UNSUPPORTED where it is not installed, or is not for this torch."""
    try:
        return importlib.import_module("deep_ep")
    # It checks its libraries with assertions.
    except (ImportError, OSError, AssertionError) as error:
        raise MeshError(
            ErrorReason.ERROR_REASON_UNSUPPORTED,
            f"--ep-transport deepep needs DeepEP (pip install sgl-deep-ep) for torch {torch.__version__}, which cannot "
            f"be imported ({str(error)[:300]}): choose nccl or nixl",
            {"feature": "ep_transport"},
        ) from error


def deep_ep_bytes(module: ModuleType, shape: BufferShape) -> int:
    """Of a buffer."""
    num_bytes: int = module.Buffer.get_low_latency_rdma_size_hint(
        shape.max_rows, shape.hidden_size, shape.num_ranks, shape.num_slots
    )
    return num_bytes


class DeepEpBuffer(LibraryBuffer):
    """Buffer of one generation."""

    id_dtype = torch.int64

    def __init__(self, module: ModuleType, ranks: RankGroup, shape: BufferShape, device: torch.device) -> None:
        """Connects; blocks until the others do. Raises RankLost."""
        self._shape = shape
        self._mask_N = torch.zeros(shape.num_ranks, dtype=torch.int32, device=device)
        # Queues of its transport hold all that is sent at once.
        depth = max(_LEAST_DEPTH, 1 << (2 * shape.max_rows + 1).bit_length())
        os.environ["NVSHMEM_QP_DEPTH"] = str(max(depth, int(os.environ.get("NVSHMEM_QP_DEPTH", "0"))))
        try:
            self.buffer = module.Buffer(
                None,
                0,
                deep_ep_bytes(module, shape),
                low_latency_mode=True,
                num_qps_per_rank=shape.slots_per_rank,
                explicitly_destroy=True,
                enable_shrink=True,
                comm=HostComm(ranks),
            )
        except RuntimeError as error:
            raise RankLost(f"the ranks did not meet through DeepEP: {str(error).splitlines()[0][:300]}") from error
        self.buffer.clean_low_latency_buffer(shape.max_rows, shape.hidden_size, shape.num_slots)
        # Nobody sends before all have cleaned theirs.
        ranks.stack(torch.zeros(1))

    def masked(self) -> torch.Tensor | None:
        self.buffer.low_latency_query_mask_buffer(self._mask_N)
        return self._mask_N


class HostComm:
    """The ranks as DeepEP asks for them where it is given no process group: after mpi4py's `Comm`."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def Get_rank(self) -> int:
        return self._ranks.rank

    def Get_size(self) -> int:
        return self._ranks.size

    def allgather(self, value: object) -> list[object]:
        """Every rank's value: bytes, numbers, or None."""
        data = _encode(value)
        assert len(data) <= _MOST_BYTES, len(data)
        padded = len(data).to_bytes(_LENGTH_BYTES, "little") + data.ljust(_MOST_BYTES, b"\0")
        told = self._ranks.stack(torch.frombuffer(bytearray(padded), dtype=torch.uint8))
        return [_told(bytes(each)) for each in told.numpy()]


def _told(padded: bytes) -> object:
    length = int.from_bytes(padded[:_LENGTH_BYTES], "little")
    return _decode(padded[_LENGTH_BYTES : _LENGTH_BYTES + length])


def _encode(value: object) -> bytes:
    """A letter for the type, and the value: no other types travel, so that nothing of a peer is ever run."""
    if value is None:
        return b"n"
    if isinstance(value, int):
        return b"i" + str(value).encode()
    # Handles are byte arrays of its extension.
    return b"a" + bytes(value) if isinstance(value, bytearray) else b"b" + bytes(value)  # type: ignore[call-overload]


def _decode(data: bytes) -> object:
    kind, rest = data[:1], data[1:]
    if kind == b"n":
        return None
    if kind == b"i":
        return int(rest)
    return bytearray(rest) if kind == b"a" else rest
