"""Autotuner of PDL GEMMs: chooses by measurement which GEMMs of decode steps use them; runs once at startup."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from radixmesh.daemons.runtime.telemetry.logs import get_logger
from radixmesh.daemons.worker.cuda.gemm.backend import GemmBackend
from radixmesh.daemons.worker.cuda.gemm.cublaslt_tuning import MatrixGroup, fastest, matrix_groups
from radixmesh.daemons.worker.cuda.gemm.pdl_benchmark import CreateBenchmark, GraphBenchmark
from radixmesh.daemons.worker.cuda.gemm.pdl_gemm import (
    GemmEpilogue,
    PdlGemm,
    PdlKernel,
    PdlShape,
    spread_configs,
)
from radixmesh.daemons.worker.cuda.gemm.pdl_kernel import Sm90Kernel, check_kernel
from radixmesh.daemons.worker.cuda.model.device_model import GemmUse, TunableMatrices
from radixmesh.kernels.gemm_sm90.candidates import cache_bytes, candidates
from radixmesh.kernels.gemm_sm90.cuda_driver import CudaDriver
from radixmesh.kernels.gemm_sm90.gemm import DTYPES, MAX_ROWS, GemmSm90
from radixmesh.kernels.gemm_sm90.nvrtc import Nvrtc
from radixmesh.kernels.gemm_sm90.variants import GemmConfig

_log = get_logger(__name__)

_USUAL_ROWS = (64, 256, 128, 32, 16, 8)
# For measuring only: compiling comes before, and a second start finds kernels in the cache.
_BUDGET_S = 10.0
# A PDL GEMM may be this much slower alone: it overlaps with the kernels before and after it, which timing one GEMM
# does not show.
_ALLOWED_US = 2.0
# Reads from the L2 cache cost power, and power bounds a step under load: of two configurations that are equally fast
# alone, the one that reads more is slower then.
_CACHE_US_BYTE = 2e-8


def create_pdl_gemm(
    matrices: Sequence[TunableMatrices],
    dtype: torch.dtype,
    sizes: Sequence[int],
    device: torch.device,
    others: GemmBackend,
) -> GemmBackend:
    """For steps of `sizes` rows whose norms are folded into the weights. `others`, and a line of log, where the device,
    the driver or the compiler is not what it should be. sm_90a code runs on compute capability 9.0 alone."""
    if torch.cuda.get_device_capability(device) != (9, 0) or dtype not in DTYPES:
        return others
    started = time.monotonic()
    try:
        kernel = Sm90Kernel(GemmSm90(CudaDriver(), Nvrtc().cubin))
        check_kernel(kernel, dtype, device)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        tuner = PdlTuner(partial(GraphBenchmark, kernel, others, stream), time.monotonic)
        gemm = tuner.tune(kernel, _uses(matrices), sizes, others)
    except (RuntimeError, OSError, AttributeError) as error:
        _log.warning("gemm_pdl_not_used", reason=f"{type(error).__name__}: {error}", field="tune_gemm")
        return others
    finally:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    _log.info(
        "gemm_pdl_tuned",
        measured=tuner.num_measured,
        chosen=tuner.num_chosen,
        left_out=tuner.num_left_out,
        in_table=len(gemm),
        saved_us=tuner.saved_us,
        configs=tuner.chosen,
        compile_seconds=round(tuner.compile_seconds, 3),
        seconds=round(time.monotonic() - started, 3),
    )
    return gemm


class PdlTuner:
    """Measures shapes by their share of a step until the budget is spent. clock: seconds."""

    def __init__(
        self, create_benchmark: CreateBenchmark, clock: Callable[[], float], budget_s: float = _BUDGET_S
    ) -> None:
        self._create_benchmark = create_benchmark
        self._clock = clock
        self._budget_s = budget_s
        self.num_measured = self.num_chosen = self.num_left_out = 0
        # Of a step, by its rows; what is read from the cache counted in.
        self.saved_us: dict[int, float] = {}
        # By rows x features out x in, and the use.
        self.chosen: dict[str, str] = {}
        self.compile_seconds = 0.0

    def tune(
        self,
        kernel: PdlKernel,
        groups: Sequence[tuple[MatrixGroup, GemmEpilogue]],
        sizes: Sequence[int],
        others: GemmBackend,
    ) -> PdlGemm:
        """For steps of `sizes` rows, up to MAX_ROWS; groups: largest share of a step first."""
        planned: dict[PdlShape, Sequence[torch.Tensor]] = {}
        for num_rows in _measured_rows(sizes):
            for group, use in groups:
                planned.setdefault(PdlShape.of(num_rows, group.weights[0], use), group.weights)
        configs = {shape: _configs(shape) for shape in planned}
        self._prepare(kernel, ((shape, config) for shape in planned for config in configs[shape]))
        deadline = self._clock() + self._budget_s
        measured: dict[PdlShape, GemmConfig | None] = {}
        for shape, weights in planned.items():
            if self._clock() >= deadline:
                self.num_left_out += 1
                continue
            measured[shape] = self._best(shape, weights, configs[shape])
        table = spread_configs(measured, [size for size in sizes if size <= MAX_ROWS])
        # Sizes between those that were measured have kernels of their own.
        self._prepare(kernel, table.items())
        table = {shape: config for shape, config in table.items() if _is_loaded(kernel, shape, config)}
        return PdlGemm(kernel, table, others)

    def _prepare(self, kernel: PdlKernel, needed: Iterable[tuple[PdlShape, GemmConfig]]) -> None:
        started = self._clock()
        kernel.prepare(needed)
        self.compile_seconds += self._clock() - started

    def _best(
        self, shape: PdlShape, weights: Sequence[torch.Tensor], configs: Sequence[GemmConfig]
    ) -> GemmConfig | None:
        benchmark = self._create_benchmark(shape, weights)
        takes: dict[int | None, Callable[[], float]] = {None: benchmark.candidate(None)}
        read = [_cache_bytes(shape, config) for config in configs]
        for order, config in enumerate(configs):
            penalty_us = (read[order] - min(read)) * _CACHE_US_BYTE
            try:
                takes[order] = partial(_later, benchmark.candidate(config), penalty_us)
            except (RuntimeError, OSError) as error:
                _refused(shape, config, error)
        self.num_measured += 1
        best, saved_us = fastest(takes, 0.0, _ALLOWED_US)
        if best is None:
            return None
        self.num_chosen += 1
        total_us = self.saved_us.get(shape.num_rows, 0.0) + saved_us * len(weights)
        self.saved_us[shape.num_rows] = round(total_us, 1)
        name = f"{shape.num_rows}x{shape.num_out}x{shape.num_in} {shape.use.value}"
        self.chosen[name] = str(configs[best])
        return configs[best]


def _measured_rows(sizes: Sequence[int]) -> list[int]:
    """The usual ones; first the largest, which no larger one serves."""
    served = [size for size in sizes if size <= MAX_ROWS]
    usual = [num_rows for num_rows in _USUAL_ROWS if num_rows in served]
    return list(dict.fromkeys([*usual[:1], *([max(served)] if served else []), *usual]))


def _is_loaded(kernel: PdlKernel, shape: PdlShape, config: GemmConfig) -> bool:
    """True if it can be launched: a GEMM that cannot is left to others here, not found by the first step."""
    try:
        kernel.load(shape, config)
    except (RuntimeError, OSError) as error:
        _refused(shape, config, error)
        return False
    return True


def _refused(shape: PdlShape, config: GemmConfig, error: Exception) -> None:
    _log.warning("gemm_config_refused", shape=str(shape), config=str(config), reason=str(error))


def _configs(shape: PdlShape) -> list[GemmConfig]:
    is_gated = shape.use is GemmEpilogue.GATED
    num_out = shape.num_out // (1 + is_gated)
    return candidates(shape.num_rows, num_out, shape.num_in, is_gated=is_gated)


def _cache_bytes(shape: PdlShape, config: GemmConfig) -> float:
    is_gated = shape.use is GemmEpilogue.GATED
    return cache_bytes(config, shape.num_rows, shape.num_out // (1 + is_gated), shape.num_in, is_gated=is_gated)


def _later(take: Callable[[], float], micros: float) -> float:
    return take() + micros


def _uses(matrices: Sequence[TunableMatrices]) -> list[tuple[MatrixGroup, GemmEpilogue]]:
    """In the order of `matrices`. Without a deferred norm, a kernel of its own norms the rows and another computes the
    gate."""
    uses = []
    for group in matrices:
        is_gated = group.use is GemmUse.GATED and group.has_deferred_norm
        use = GemmEpilogue.ADDED if group.use is GemmUse.ADDED else GemmEpilogue.PLAIN
        uses += [(of, GemmEpilogue.GATED if is_gated else use) for of in matrix_groups([group])]
    return uses
