"""Libraries that carry rows to experts on GPUs, as their documented interfaces say, on tensors of the host.

Ranks are threads of this process. What a library leaves undefined holds NaN here, and what it refuses is asserted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import ClassVar

import torch
import torch.distributed as dist

_STUCK_S = 60.0


class _World:
    """Meeting point of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._values: list[object] = [None] * size

    def gather(self, rank: int, value: object) -> list[object]:
        self._values[rank] = value
        self._barrier.wait(_STUCK_S)
        values = list(self._values)
        self._barrier.wait(_STUCK_S)
        return values


class FakeNccl:
    """torch.distributed.ProcessGroupNCCL, by gloo: what the two have in common is c10d's interface."""

    Options = SimpleNamespace

    def __init__(self, store: object, rank: int, size: int, options: object) -> None:
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=_STUCK_S))  # type: ignore[arg-type]
        self.is_aborted = False

    def __getattr__(self, name: str) -> object:
        assert name in ("allreduce", "_allgather_base", "alltoall_base"), name
        return getattr(self._gloo, name)

    def abort(self) -> None:
        self.is_aborted = True


class _Handle(tuple):
    """As the libraries say: to be given to combine(), once."""


class _Kernels:
    """Low-latency dispatch and combine of both libraries. masked: ranks that kernels gave up waiting for. id_dtype: of
    the experts' ids, for which kernels are compiled."""

    id_dtype = torch.int64

    def __init__(self) -> None:
        self.world: _World
        self.rank, self.size = 0, 0
        self.num_bytes = 0
        self.masked: set[int] = set()
        self.num_dispatched = self.num_split = 0
        self.is_open = False
        self.is_destroyed = False

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        use_fp8: bool = True,
        return_recv_hook: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, _Handle, None, Callable[[], None] | None]:
        self._begin()
        assert not use_fp8 and x.dtype == torch.bfloat16 and x.is_contiguous() and topk_idx.dtype == self.id_dtype
        assert len(x) == len(topk_idx) <= num_max_dispatch_tokens_per_rank and num_experts % self.size == 0
        assert not len(x) or 0 <= int(topk_idx.min()) <= int(topk_idx.max()) < num_experts
        hint = size_hint(num_max_dispatch_tokens_per_rank, x.shape[1], self.size, num_experts)
        assert hint <= self.num_bytes, "the buffer is too small"
        shape = (num_max_dispatch_tokens_per_rank, x.shape[1], num_experts)
        sent = self.world.gather(self.rank, (x.clone(), topk_idx.clone(), shape))
        assert all(other[2] == shape for other in sent), "all ranks hold the same values"  # type: ignore[index]
        held, most = num_experts // self.size, num_max_dispatch_tokens_per_rank * self.size
        recv_x = torch.full((held, most, x.shape[1]), float("nan"), dtype=torch.bfloat16)
        count = torch.zeros(held, dtype=torch.int32)
        sources: list[list[tuple[int, int]]] = [[] for _ in range(held)]
        # Kernels do not keep an order among the rows of an expert.
        for source in reversed(range(self.size)):
            other_x, other_idx, _ = sent[source]  # type: ignore[misc]
            for row in range(len(other_x)):
                for expert in other_idx[row].tolist():
                    if expert // held == self.rank:
                        local = expert % held
                        recv_x[local, int(count[local])] = other_x[row]
                        sources[local].append((source, row))
                        count[local] += 1
        self.num_dispatched += 1
        hook = self._hook(recv_x, count) if return_recv_hook else None
        return recv_x, count, _Handle((sources, held)), None, hook

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: _Handle,
        return_recv_hook: bool = False,
    ) -> tuple[torch.Tensor, None, Callable[[], None] | None]:
        self._begin()
        sources, held = handle
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and topk_weights.dtype == torch.float32
        assert topk_idx.dtype == self.id_dtype
        sent = self.world.gather(self.rank, (x.clone(), sources))
        combined = torch.zeros(len(topk_idx), x.shape[2])
        for row in range(len(topk_idx)):
            for expert, weight in zip(topk_idx[row].tolist(), topk_weights[row], strict=True):
                results, of = sent[expert // held]  # type: ignore[misc]
                combined[row] += weight * results[expert % held, of[expert % held].index((self.rank, row))].float()
        result = combined.bfloat16()
        return result, None, self._hook(result) if return_recv_hook else None

    def _begin(self) -> None:
        assert not self.is_open, "a call cleans the region of the call before, which nobody has received"

    def _hook(self, *results: torch.Tensor) -> Callable[[], None]:
        """Results are there once it was called."""
        came = [result.clone() for result in results]
        for result in results:
            result.fill_(float("nan") if result.is_floating_point() else -1)
        self.is_open = True
        self.num_split += 1

        def receive() -> None:
            assert self.is_open, "received twice"
            self.is_open = False
            for result, data in zip(results, came, strict=True):
                result.copy_(data)

        return receive

    def _fill(self, mask_status: torch.Tensor) -> None:
        assert mask_status.dtype == torch.int32 and len(mask_status) == self.size
        mask_status.copy_(torch.tensor([int(rank in self.masked) for rank in range(self.size)], dtype=torch.int32))

    def destroy(self) -> None:
        assert not self.is_destroyed
        self.is_destroyed = True


def size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
    return 2 * num_max_dispatch_tokens_per_rank * hidden * num_experts + 64 * num_ranks


class FakeNixlEp:
    """The module nixl_ep_cu13 of nixl-cu13 1.4.1."""

    topk_idx_t = torch.int32

    class Buffer(_Kernels):
        id_dtype = torch.int32
        worlds: ClassVar[dict[str, _World]] = {}
        lock = threading.Lock()
        opened: ClassVar[list[FakeNixlEp.Buffer]] = []

        def __init__(
            self, rank: int, explicitly_destroy: bool, low_latency_mode: bool, tcp_store_group: object, timeout_ms: int
        ) -> None:
            super().__init__()
            assert explicitly_destroy and low_latency_mode and 0 < timeout_ms < 5_000
            self.rank, self._store = rank, tcp_store_group
            self.opened.append(self)

        get_low_latency_buffer_size_hint = staticmethod(size_hint)

        def update_memory_buffers(self, num_ranks: int, num_experts_per_rank: int, num_rdma_bytes: int) -> None:
            self.size, self.num_bytes = num_ranks, num_rdma_bytes

        def connect_ranks(self, remote_ranks: list[int]) -> None:
            """By the store, with the calls that the library makes of it."""
            assert sorted([*remote_ranks, self.rank]) == list(range(self.size))
            store = self._store
            store.set(f"NIXL_EP/{self.rank}", f"metadata of {self.rank}".encode())  # type: ignore[attr-defined]
            keys = [f"NIXL_EP/{rank}" for rank in remote_ranks]
            store.wait(keys, timedelta(seconds=_STUCK_S))  # type: ignore[attr-defined]
            told = store.multi_get(keys)  # type: ignore[attr-defined]
            assert told == [f"metadata of {rank}".encode() for rank in remote_ranks]
            number = store.add("generation", 1)  # type: ignore[attr-defined]
            assert 1 <= number <= self.size
            name = store.compare_set("name", "", f"{id(store)}").decode()  # type: ignore[attr-defined]
            with self.lock:
                self.world = self.worlds.setdefault(name, _World(self.size))

        def query_mask_buffer(self, mask_status: torch.Tensor) -> None:
            self._fill(mask_status)


class FakeDeepEp:
    """The module deep_ep of sgl-deep-ep 0.1.2: its legacy buffer, where `comm` stands for a process group."""

    class Buffer(_Kernels):
        worlds: ClassVar[dict[bytes, _World]] = {}
        lock = threading.Lock()
        opened: ClassVar[list[FakeDeepEp.Buffer]] = []

        def __init__(
            self,
            group: None,
            num_nvl_bytes: int,
            num_rdma_bytes: int,
            low_latency_mode: bool,
            num_qps_per_rank: int,
            explicitly_destroy: bool,
            enable_shrink: bool,
            comm: object,
        ) -> None:
            super().__init__()
            assert group is None and low_latency_mode and explicitly_destroy and enable_shrink and num_qps_per_rank > 0
            self.rank, self.size = comm.Get_rank(), comm.Get_size()  # type: ignore[attr-defined]
            self.num_bytes = num_rdma_bytes
            # Device ids, memory handles, and the id that rank 0 has made: as the library exchanges them.
            allgather = comm.allgather  # type: ignore[attr-defined]
            assert allgather(self.rank) == list(range(self.size))
            assert allgather(bytearray([self.rank, 0, 255])) == [bytearray([r, 0, 255]) for r in range(self.size)]
            ids = allgather(bytearray(f"{id(self)}".encode()) if self.rank == 0 else None)
            assert isinstance(ids[0], bytearray) and ids[1:] == [None] * (self.size - 1)
            with self.lock:
                self.world = self.worlds.setdefault(bytes(ids[0]), _World(self.size))
            self.opened.append(self)

        get_low_latency_rdma_size_hint = staticmethod(size_hint)
        is_clean = False

        def clean_low_latency_buffer(
            self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
        ) -> None:
            self.is_clean = True

        def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
            self._fill(mask_status)
