"""FlashInfer's compiled modules: which one a configuration needs, and how it is called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from typing import Protocol, TypeVar

import torch

from radixmesh.common.v1 import common_pb2
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.cpu.attention.backend import AttentionShape

Module = TypeVar("Module", covariant=True)

_NO_POSITION_ENCODING = 0


class KernelKind(Enum):
    """CUDA_CORES: decode for few query heads a KV head. TENSOR_CORES: the FlashAttention-2 template, decode and extend.

    HOPPER: the FlashAttention-3 template, extend on compute capability 9.0.
    """

    CUDA_CORES = "cuda_cores"
    TENSOR_CORES = "tensor_cores"
    HOPPER = "hopper"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelConfig:
    """dtype: of queries and results; kv_dtype: of the pool, None = the same. `window` as in `StepAttention.attend`.
    `in_graphs`: every plan of as many rows has the same layout and grid."""

    shape: AttentionShape
    dtype: torch.dtype
    page_size: int
    window: int | None
    is_causal: bool
    in_graphs: bool
    kv_dtype: torch.dtype | None = None

    @property
    def pool_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def window_left(self) -> int:
        """Tokens before a row's own that it sees; -1 = all."""
        return -1 if self.window is None else self.window - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """floats, ints: uint8 on the device, for partial results and for the plan. `ints` is copied from `staging`."""

    floats: torch.Tensor
    ints: torch.Tensor


PlanLayout = Sequence[int]


class DecodeModule(Protocol):
    def plan(self, *args: object) -> PlanLayout: ...

    def run(self, *args: object) -> None: ...


class ExtendModule(Protocol):
    def plan(self, *args: object) -> PlanLayout: ...

    def paged_run(self, *args: object) -> None: ...


def decode_module(config: KernelConfig) -> DecodeModule:
    """Raises as `create_kernel` does."""
    _check_installed()
    from flashinfer.jit import gen_batch_decode_module

    module: DecodeModule = _load(gen_batch_decode_module(*_variant(config)), _purpose(config))
    return module


def extend_module(template: str, config: KernelConfig) -> ExtendModule:
    """template: "fa2" or "fa3". Raises as `create_kernel` does."""
    _check_installed()
    from flashinfer.jit import gen_batch_prefill_module

    is_half_product = False  # Scores of queries and keys are summed in float32.
    module: ExtendModule = _load(
        gen_batch_prefill_module(template, *_variant(config), is_half_product), _purpose(config)
    )
    return module


class MergeModule(Protocol):
    def merge_state_in_place(self, *args: object) -> None: ...


def merge_module() -> MergeModule:
    """Softmax over a union of keys from those of its parts. Raises as `create_kernel` does."""
    _check_installed()
    from flashinfer.jit.cascade import gen_cascade_module

    module: MergeModule = _load(gen_cascade_module(), "merging")
    return module


class _Spec(Protocol[Module]):
    def build_and_load(self) -> Module: ...


def _variant(config: KernelConfig) -> tuple[object, ...]:
    """dtypes of queries, keys and values, and outputs; of indices; head dims; what the kernel does to the scores."""
    head_dim, has_soft_cap = config.shape.head_dim, False
    return (
        config.dtype,
        config.pool_dtype,
        config.dtype,
        torch.int32,
        head_dim,
        head_dim,
        _NO_POSITION_ENCODING,
        config.window is not None,
        has_soft_cap,
    )


def _load(spec: _Spec[Module], purpose: str) -> Module:
    from flashinfer.jit.core import MissingJITCacheError

    try:
        return spec.build_and_load()
    except MissingJITCacheError as error:
        raise MeshError(
            common_pb2.ERROR_REASON_UNSUPPORTED,
            f"FlashInfer's kernel for {purpose} is not among the compiled ones: "
            "unset FLASHINFER_DISABLE_JIT to compile it, or choose the triton attention backend",
            {"kernel": purpose},
        ) from error


def _purpose(config: KernelConfig) -> str:
    return f"{config.dtype} over {config.pool_dtype}, head_dim {config.shape.head_dim}, window {config.window}"


def _check_installed() -> None:
    if find_spec("flashinfer") is None:
        raise MeshError(
            common_pb2.ERROR_REASON_UNSUPPORTED,
            "FlashInfer is not installed: install flashinfer-python, or choose the triton attention backend",
            {"package": "flashinfer-python"},
        )
