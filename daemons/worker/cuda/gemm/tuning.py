"""Tuned GEMMs for a decoder's weights in the model's dtype: cuBLASLt's, and on Hopper the project's own."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

import torch

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.cuda.gemm.autotuner import (
    Autotuner,
    Candidate,
    GemmKernels,
    GraphBenchmarks,
    Kernel,
    MatrixGroup,
    Weight,
)
from radixmesh.daemons.worker.cuda.gemm.backend import (
    GemmBackend,
    GemmEpilogue,
    GemmKernel,
    GemmProblem,
    TorchGemm,
    TunedGemm,
)
from radixmesh.daemons.worker.cuda.gemm.cublaslt import CublasLt, check_small_gemm
from radixmesh.daemons.worker.cuda.gemm.cublaslt_kernels import CublasLtKernels
from radixmesh.daemons.worker.cuda.gemm.sm90_kernels import Sm90Kernels, check_kernel
from radixmesh.daemons.worker.models.decoder.weights import DecoderWeights, MlpWeights
from radixmesh.kernels.gemm_sm90.cuda_driver import CudaDriver
from radixmesh.kernels.gemm_sm90.gemm import DTYPES, GemmSm90
from radixmesh.kernels.gemm_sm90.nvrtc import Nvrtc

_log = get_logger(__name__)


def tuned_gemm(
    weights: DecoderWeights, sizes: Sequence[int], device: torch.device, *, use_pdl: bool = False
) -> GemmBackend:
    """For steps of `sizes` rows, of weights into which the norms are folded; torch for everything else.

    use_pdl: the project's own GEMMs compete too where the device has compute capability 9.0; they run on no other.
    """
    dtype = weights.final_norm_D.dtype
    table: dict[GemmProblem, GemmKernel] = {}

    def cublaslt() -> CublasLtKernels:
        lt = CublasLt(device)
        check_small_gemm(lt, dtype)
        return CublasLtKernels(lt)

    def sm90() -> Sm90Kernels:
        kernel = GemmSm90(CudaDriver(), Nvrtc().cubin)
        check_kernel(kernel, dtype, device)
        return Sm90Kernels(kernel, TunedGemm(table))

    table |= tune_kind(cublaslt, matrix_groups(weights), sizes, device, event="gemm_tuned", failed="gemm_not_tuned")
    if use_pdl and torch.cuda.get_device_capability(device) == (9, 0) and dtype in DTYPES:
        groups = matrix_groups(weights, has_gated=True)
        table |= tune_kind(sm90, groups, sizes, device, event="gemm_pdl_tuned", failed="gemm_pdl_not_used")
    return TunedGemm(table) if table else TorchGemm()


def tune_kind(
    create: Callable[[], GemmKernels[Weight, Candidate, Kernel]],
    groups: Sequence[MatrixGroup[Weight]],
    sizes: Sequence[int],
    device: torch.device,
    *,
    event: str,
    failed: str,
) -> dict[GemmProblem, Kernel]:
    """One kind's part of the table; none of it, and a line of log, where the device, the driver, the library or the
    compiler is not what it should be. event, failed: names of the log lines."""
    started = time.monotonic()
    try:
        table, report = Autotuner(GraphBenchmarks(device)).tune(create(), groups, sizes)
    # Also what CUDA itself reports: if it cannot go on, the capture behind this says so.
    except (RuntimeError, OSError, AttributeError, ctypes.ArgumentError) as error:
        _log.warning(failed, reason=f"{type(error).__name__}: {error}", field="tune_gemm")
        return {}
    finally:
        # Otherwise this memory counts as used when the KV pool is sized.
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    _log.info(
        event,
        measured=report.num_measured,
        chosen=len(report.chosen),
        left_out=report.num_left_out,
        in_table=len(table),
        saved_us=report.saved_us,
        configs=report.chosen,
        prepare_seconds=round(report.prepare_seconds, 3),
        seconds=round(time.monotonic() - started, 3),
    )
    return table


def matrix_groups(weights: DecoderWeights, *, has_gated: bool = False) -> list[MatrixGroup[torch.Tensor]]:
    """A dense decoder's, largest share of a step first; [N, K] views of weights that lie [out, in].

    has_gated: gate and up as one GEMM with SwiGLU, where their norm is folded and there is no bias between.
    """
    mlps = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, MlpWeights)]
    attentions = [layer.attention for layer in weights.layers]
    # In float16 norms are not folded into the weights: a kernel of its own computes them.
    is_gated = (
        has_gated and weights.final_norm_D.dtype != torch.float16 and all(mlp.b_gate_up_F2 is None for mlp in mlps)
    )
    matrices = [
        ([mlp.w_gate_up_DF2 for mlp in mlps], GemmEpilogue.GATED if is_gated else GemmEpilogue.PLAIN),
        ([mlp.w_down_FD for mlp in mlps], GemmEpilogue.ADDED),
        ([attention.w_qkv_DX for attention in attentions], GemmEpilogue.PLAIN),
        ([attention.w_o_QD for attention in attentions], GemmEpilogue.ADDED),
        ([weights.head_DO], GemmEpilogue.PLAIN),
    ]
    return [matrix_group([w_KN.t() for w_KN in group], epilogue) for group, epilogue in matrices if group]


def matrix_group(weights: Sequence[torch.Tensor], epilogue: GemmEpilogue) -> MatrixGroup[torch.Tensor]:
    """Weights [N, K] of one shape."""
    (num_out, num_in), dtype = weights[0].shape, weights[0].dtype
    return MatrixGroup(weights, weights[0].nbytes, num_out, num_in, dtype, epilogue)
