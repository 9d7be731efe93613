"""The operations around GEMMs as torch.compile fuses them, instead of kernels of our own.

Legend: T rows, D hidden size, N features out, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from radixmesh.common.v1.common_pb2 import ErrorReason
from radixmesh.daemons.runtime.errors import MeshError
from radixmesh.daemons.worker.cuda.gemm.backend import GemmBackend
from radixmesh.daemons.worker.cuda.ops import TorchOps, TritonOps
from radixmesh.kernels.deferred_norm import DeferredNormGemm
from radixmesh.kernels.rope_kv import HeadNorms, HeadShape, KvTarget, RopeAngles

_Options = dict[str, str | int | bool | Callable[..., object]]

# Compiled here: a pool of processes would outlive the few kernels that it is started for.
_OPTIONS: _Options = {"compile_threads": 1}
# To choose among configurations by measurement, a copy of a layer's keys or values would be made for each.
_WRITING: _Options = _OPTIONS | {"triton.autotune_pointwise": False}
# The size that kernels are laid out for, where it is up to us.
_USUAL_ROWS = 256


class CompiledOps(TritonOps):
    """The references, compiled; GEMMs as TritonOps has them, one row's with what is fused into them.

    Compiled when first called, for any number of rows from two on and once more for one: a decode step runs before it
    is captured. The compiler's own graphs stay off, since ours hold its kernels. For inference mode. backend: as
    torch.compile's.
    """

    def __init__(
        self,
        *,
        use_pdl: bool = False,
        max_fused_rows: int = 1,
        gemm: GemmBackend | None = None,
        backend: str | Callable[..., Callable[..., object]] = "inductor",
    ) -> None:
        super().__init__(use_pdl=use_pdl, max_fused_rows=max_fused_rows, gemm=gemm)
        options, writing = (_OPTIONS, _WRITING) if backend == "inductor" else (None, None)
        torch_ops = TorchOps()
        self._compiled_norm = torch.compile(torch_ops.rms_norm, fullgraph=True, backend=backend, options=options)
        self._compiled_silu = torch.compile(torch_ops.silu_mul, fullgraph=True, backend=backend, options=options)
        self._compiled_rope = torch.compile(torch_ops.rope_write_kv, fullgraph=True, backend=backend, options=writing)

    def check(self, w_D: torch.Tensor, eps: float = 1e-6) -> None:
        """Compiles the norm. Raises MeshError UNSUPPORTED where torch.compile does not work."""
        try:
            with torch.inference_mode():
                self.rms_norm(w_D.new_ones(_USUAL_ROWS, len(w_D)), w_D, eps)
        except (RuntimeError, ImportError, OSError) as error:
            reason = " ".join(str(error).split("\n")[:2])
            raise MeshError(
                ErrorReason.ERROR_REASON_UNSUPPORTED,
                f"torch.compile does not work here ({type(error).__name__}: {reason}): it needs a C++ compiler, and "
                "on a GPU Triton; install them, or use --kernels triton",
                {"feature": "torch.compile"},
            ) from error

    def rms_norm(self, x_TD: torch.Tensor, w_D: torch.Tensor, eps: float) -> torch.Tensor:
        _mark_rows(x_TD)
        return self._compiled_norm(x_TD, w_D, eps)

    def rope_write_kv(
        self,
        qkv: DeferredNormGemm,
        angles: RopeAngles,
        target: KvTarget,
        keys_SKd: torch.Tensor,
        values_SKd: torch.Tensor,
        heads: HeadShape,
        norms: HeadNorms,
        factors_X: torch.Tensor | None = None,
    ) -> torch.Tensor:
        _mark_rows(qkv.out_TN, qkv.norm_input_TD, target.positions_T, target.row_slots_T, target.tokens_T)
        return self._compiled_rope(qkv, angles, target, keys_SKd, values_SKd, heads, norms, factors_X)

    def silu_mul(self, gate_up: DeferredNormGemm, eps: float) -> torch.Tensor:
        _mark_rows(gate_up.out_TN, gate_up.norm_input_TD)
        return self._compiled_silu(gate_up, eps)


def _mark_rows(*tensors: torch.Tensor | None) -> None:
    """Their first size is not compiled in. One row is a case of its own to the compiler, whatever is said."""
    for tensor in tensors:
        if tensor is not None and tensor.shape[0] > 1:
            torch._dynamo.mark_dynamic(tensor, 0)
