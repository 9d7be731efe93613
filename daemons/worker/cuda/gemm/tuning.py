"""Tuned GEMMs for a model's matrices in its own dtype: cuBLASLt's, and on Hopper the project's own."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

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
from radixmesh.daemons.worker.cuda.gemm.tuning_notes import KindNotes, TuningNotes, unknown
from radixmesh.daemons.worker.cuda.model.device_model import TunableMatrices
from radixmesh.kernels.gemm_sm90.cuda_driver import CudaDriver
from radixmesh.kernels.gemm_sm90.gemm import DTYPES, GemmSm90
from radixmesh.kernels.gemm_sm90.nvrtc import Nvrtc

_log = get_logger(__name__)


def tuned_gemm(
    matrices: Sequence[TunableMatrices],
    dtype: torch.dtype,
    sizes: Sequence[int],
    device: torch.device,
    *,
    use_pdl: bool = False,
    notes: TuningNotes | None = None,
) -> GemmBackend:
    """For steps of `sizes` rows; torch for everything else. matrices: the largest share of a step first.

    use_pdl: the project's own GEMMs compete too where the device has compute capability 9.0; they run on no other.
    notes: of earlier starts, to which this one's are added.
    """
    table: dict[GemmProblem, GemmKernel] = {}
    of_sm90 = None if notes is None else notes.kind("sm90")

    def cublaslt() -> CublasLtKernels:
        lt = CublasLt(device)
        check_small_gemm(lt, dtype)
        return CublasLtKernels(lt)

    # Compilers have cores of their own while the device measures the library's kernels.
    with ThreadPoolExecutor(1) as beside:
        groups, compiling = plain_groups(matrices, has_gated=True), None
        if use_pdl and torch.cuda.get_device_capability(device) == (9, 0) and dtype in DTYPES:
            compiling = beside.submit(
                compiled_sm90, groups, sizes, lambda: GemmSm90(CudaDriver(), Nvrtc().cubin), of_sm90
            )
        table |= tune_kind(
            cublaslt,
            plain_groups(matrices),
            sizes,
            device,
            event="gemm_tuned",
            failed="gemm_not_tuned",
            notes=None if notes is None else notes.kind("cublaslt"),
        )
    if compiling is not None:
        compiled = compiling

        def sm90() -> Sm90Kernels:
            kernel = compiled.result()
            check_kernel(kernel, dtype, device)
            return Sm90Kernels(kernel, TunedGemm(table))

        table |= tune_kind(
            sm90, groups, sizes, device, event="gemm_pdl_tuned", failed="gemm_pdl_not_used", notes=of_sm90
        )
    if notes is not None:
        notes.keep()
    return TunedGemm(table) if table else TorchGemm()


def compiled_sm90(
    groups: Sequence[MatrixGroup[torch.Tensor]],
    sizes: Sequence[int],
    create: Callable[[], GemmSm90],
    notes: KindNotes | None = None,
) -> GemmSm90:
    """The project's own GEMMs with all candidates compiled that are to be measured; nothing is launched. Raises what
    `create` does."""
    started = time.monotonic()
    kernel = create()
    kernels = Sm90Kernels(kernel, TorchGemm())
    problems = [group.problem(num_rows) for num_rows in kernels.measured_rows(sizes) for group in groups]
    kernels.prepare(unknown(notes, problems))
    _log.info("gemm_pdl_compiled", seconds=round(time.monotonic() - started, 3))
    return kernel


def tune_kind(
    create: Callable[[], GemmKernels[Weight, Candidate, Kernel]],
    groups: Sequence[MatrixGroup[Weight]],
    sizes: Sequence[int],
    device: torch.device,
    *,
    event: str,
    failed: str,
    notes: KindNotes | None = None,
) -> dict[GemmProblem, Kernel]:
    """One kind's part of the table; none of it, and a line of log, where the device, the driver, the library or the
    compiler is not what it should be. event, failed: names of the log lines. notes: choices of earlier starts."""
    started = time.monotonic()
    try:
        table, report = Autotuner(GraphBenchmarks(device), notes=notes).tune(create(), groups, sizes)
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
        noted=report.num_noted,
        in_table=len(table),
        saved_us=report.saved_us,
        configs=report.chosen,
        prepare_seconds=round(report.prepare_seconds, 3),
        seconds=round(time.monotonic() - started, 3),
    )
    return table


def plain_groups(matrices: Sequence[TunableMatrices], *, has_gated: bool = False) -> list[MatrixGroup[torch.Tensor]]:
    """Those that are all in the model's dtype, in the same order. has_gated: gate and up are one GEMM with SwiGLU where
    their norm is deferred; otherwise a kernel behind a plain one computes the gate."""
    groups = []
    for group in matrices:
        weights = [w_NK for w_NK in group.matrices if isinstance(w_NK, torch.Tensor)]
        epilogue = group.epilogue
        if epilogue is GemmEpilogue.GATED and not (has_gated and group.has_deferred_norm):
            epilogue = GemmEpilogue.PLAIN
        if len(weights) == len(group.matrices):
            groups.append(matrix_group(weights, epilogue))
    return groups


def matrix_group(weights: Sequence[torch.Tensor], epilogue: GemmEpilogue) -> MatrixGroup[torch.Tensor]:
    """Weights [N, K] of one shape."""
    (num_out, num_in), dtype = weights[0].shape, weights[0].dtype
    return MatrixGroup(weights, weights[0].nbytes, num_out, num_in, dtype, epilogue)
