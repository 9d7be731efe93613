"""FlashInfer's attention kernels over paged KV, each with its planning, called without the library's wrappers.

The wrappers (`BatchPrefillWithPagedKVCacheWrapper` and its like) copy device tensors to the host and stage all plans in
one pinned buffer, which a host that runs ahead of the device overwrites. The compiled modules under them take host
tensors and the staging buffer from the caller. Arguments are those of FlashInfer 0.6.12, positional.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape
from radixmesh.daemons.worker.cuda.attention.paged_rows import PagedRows
from radixmesh.daemons.worker.cuda.flashinfer.modules import (
    KernelConfig,
    KernelKind,
    PlanLayout,
    Workspace,
    decode_module,
    extend_module,
)
from radixmesh.kernels.kv_fp8 import KV_FP8

_NHD = 0
_SEES_ALL, _CAUSAL = 0, 1
# From so many query heads a KV head on, the tensor cores' tile of 16 is full enough to be worth it.
_TENSOR_CORE_GROUP = 4
_HEAD_DIMS = (64, 128, 256)
_CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)
_DTYPES = (torch.float16, torch.bfloat16)


class PlannedKernel(ABC):
    """A kernel whose work is cut into pieces on the host, before the step and for all its layers."""

    @abstractmethod
    def plan(self, rows: PagedRows, workspace: Workspace, staging: torch.Tensor) -> PlanLayout:
        """Cuts the work and sends it to `workspace.ints` on the current stream, from `staging` (pinned, as large)."""

    @abstractmethod
    def run(
        self,
        layout: PlanLayout,
        rows: PagedRows,
        workspace: Workspace,
        query_THD: torch.Tensor,
        keys_PSKD: torch.Tensor,
        values_PSKD: torch.Tensor,
        out_THD: torch.Tensor,
        lse_TH: torch.Tensor | None,
    ) -> None:
        """Attention of the planned rows on the current stream; T >= the planned queries, later rows are not touched.

        lse_TH, where wanted: float32, gets the logarithm to base 2 of each softmax's sum; -inf for a row without keys.
        """


def create_kernel(kind: KernelKind, config: KernelConfig) -> PlannedKernel:
    """Loads the kernel's module, which FlashInfer compiles (minutes, with nvcc) where it is not there compiled.

    Raises MeshError UNSUPPORTED for a shape or dtype without kernels, where FlashInfer is not installed, and where it
    may not compile.
    """
    shape = config.shape
    is_pool_read = config.pool_dtype in (config.dtype, KV_FP8)
    if config.dtype not in _DTYPES or not is_pool_read or shape.head_dim not in _HEAD_DIMS:
        raise MeshError(
            common_pb2.ERROR_REASON_UNSUPPORTED,
            f"FlashInfer has no kernel for {config.dtype} over {config.pool_dtype} with head_dim {shape.head_dim}: "
            "choose the triton attention backend",
            {"dtype": str(config.dtype), "head_dim": str(shape.head_dim)},
        )
    if kind is KernelKind.CUDA_CORES and shape.group_size not in _CUDA_CORE_GROUPS:
        raise MeshError(
            common_pb2.ERROR_REASON_UNSUPPORTED,
            f"FlashInfer's decode on CUDA cores has no kernel for {shape.num_heads} heads over {shape.num_kv_heads} "
            f"KV heads: choose {KernelKind.TENSOR_CORES.value}",
            {"group_size": str(shape.group_size)},
        )
    return _KERNELS[kind](config)


def decode_kind_for(shape: AttentionShape) -> KernelKind:
    """The faster one for so many heads."""
    return KernelKind.TENSOR_CORES if shape.group_size >= _TENSOR_CORE_GROUP else KernelKind.CUDA_CORES


def has_hopper_kernels(device: torch.device) -> bool:
    """HOPPER's are built for compute capability 9.0 alone."""
    return torch.cuda.get_device_capability(device)[0] == 9


class _CudaCoreDecode(PlannedKernel):
    def __init__(self, config: KernelConfig) -> None:
        self._config = config
        self._empty = torch.empty(0, dtype=config.dtype)
        self._empty_kv = torch.empty(0, dtype=config.pool_dtype)
        self._module = decode_module(config)

    def plan(self, rows: PagedRows, workspace: Workspace, staging: torch.Tensor) -> PlanLayout:
        config, shape = self._config, self._config.shape
        assert rows.num_queries == len(rows), "one query a row"
        return self._module.plan(
            workspace.floats,
            workspace.ints,
            staging,
            rows.page_counts,
            len(rows),
            shape.num_heads,
            shape.num_kv_heads,
            config.page_size,
            config.in_graphs,
            config.window_left,
            0.0,  # logits soft cap
            shape.head_dim,
            shape.head_dim,
            self._empty,
            self._empty_kv,
        )

    def run(
        self,
        layout: PlanLayout,
        rows: PagedRows,
        workspace: Workspace,
        query_THD: torch.Tensor,
        keys_PSKD: torch.Tensor,
        values_PSKD: torch.Tensor,
        out_THD: torch.Tensor,
        lse_TH: torch.Tensor | None,
    ) -> None:
        self._module.run(
            workspace.floats,
            workspace.ints,
            layout,
            query_THD[: len(rows)],
            keys_PSKD,
            values_PSKD,
            rows.starts,
            rows.page_list,
            rows.last_lens,
            out_THD,
            lse_TH,
            _NHD,
            self._config.window_left,
            True,  # programmatic dependent launch
            None,  # ALiBi slopes
            0.0,  # logits soft cap
            self._config.shape.scale,
            1.0,  # rotary scale and theta, not used
            1.0,
        )


class _ExtendAttention(PlannedKernel):
    """Prefill kernels over pages. FlashInfer's generations take the same arguments up to the last ones."""

    def __init__(self, generation: str, config: KernelConfig) -> None:
        self._config = config
        self._mask = _CAUSAL if config.is_causal else _SEES_ALL
        self._module = extend_module(generation, config)

    @abstractmethod
    def _kv_arrays(self, rows: PagedRows) -> torch.Tensor:
        """The array of the rows' pages, on the host, that this generation's planning reads."""

    @abstractmethod
    def _last_plan_arguments(self) -> tuple[object, ...]: ...

    @abstractmethod
    def _last_run_arguments(self) -> tuple[object, ...]: ...

    def plan(self, rows: PagedRows, workspace: Workspace, staging: torch.Tensor) -> PlanLayout:
        config, shape = self._config, self._config.shape
        return self._module.plan(
            workspace.floats,
            workspace.ints,
            staging,
            rows.query_starts,
            self._kv_arrays(rows),
            rows.lengths,
            rows.num_queries,
            len(rows),
            shape.num_heads,
            shape.num_kv_heads,
            config.page_size,
            config.in_graphs,
            shape.head_dim,
            shape.head_dim,
            config.is_causal,
            config.window_left,
            *self._last_plan_arguments(),
        )

    def run(
        self,
        layout: PlanLayout,
        rows: PagedRows,
        workspace: Workspace,
        query_THD: torch.Tensor,
        keys_PSKD: torch.Tensor,
        values_PSKD: torch.Tensor,
        out_THD: torch.Tensor,
        lse_TH: torch.Tensor | None,
    ) -> None:
        self._module.paged_run(
            workspace.floats,
            workspace.ints,
            layout,
            query_THD,
            keys_PSKD,
            values_PSKD,
            rows.query_starts_device,
            rows.starts,
            rows.page_list,
            rows.last_lens,
            out_THD,
            lse_TH,
            self._mask,
            _NHD,
            self._config.window_left,
            True,  # programmatic dependent launch
            *self._last_run_arguments(),
        )


class _TensorCoreAttention(_ExtendAttention):
    def __init__(self, config: KernelConfig) -> None:
        super().__init__("fa2", config)

    def _kv_arrays(self, rows: PagedRows) -> torch.Tensor:
        return rows.page_counts

    def _last_plan_arguments(self) -> tuple[object, ...]:
        return (
            -1,  # split size: chosen
            False,  # splitting is allowed
            0,  # blocks that run beside these
        )

    def _last_run_arguments(self) -> tuple[object, ...]:
        return (
            *(None,) * 8,  # custom mask and its index, ALiBi slopes, three of multi-item scoring, two scale factors
            0.0,  # logits soft cap
            self._config.shape.scale,
            1.0,  # rotary scale and theta, not used
            1.0,
            0,  # multi-item scoring
        )


class _HopperExtend(_ExtendAttention):
    """Takes rows' starts and lengths from the plan: neither `starts` nor `last_lens` of the device is read."""

    def __init__(self, config: KernelConfig) -> None:
        super().__init__("fa3", config)

    def _kv_arrays(self, rows: PagedRows) -> torch.Tensor:
        return rows.starts_host

    def _last_plan_arguments(self) -> tuple[object, ...]:
        return ()

    def _last_run_arguments(self) -> tuple[object, ...]:
        return (
            *(None,) * 4,  # three of multi-item scoring, scales of the values
            0.0,  # logits soft cap
            self._config.shape.scale,
            1.0,  # scale of the values
            0,  # multi-item scoring
        )


_KERNELS: dict[KernelKind, type[_CudaCoreDecode] | type[_TensorCoreAttention] | type[_HopperExtend]] = {
    KernelKind.CUDA_CORES: _CudaCoreDecode,
    KernelKind.TENSOR_CORES: _TensorCoreAttention,
    KernelKind.HOPPER: _HopperExtend,
}
