"""Benchmark of PDL GEMM candidates: each is checked against the baseline, then timed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch

from radixmesh.daemons.worker.cuda.gemm.backend import GemmBackend
from radixmesh.daemons.worker.cuda.gemm.pdl_gemm import GemmEpilogue, PdlKernel, PdlShape
from radixmesh.daemons.worker.cuda.gemm.timed_graph import TimedGraph, beyond_cache
from radixmesh.kernels.gemm_sm90.variants import GemmConfig
from radixmesh.kernels.silu_mul import silu_mul

_EPS = 1e-5
_MAX_ERROR = 0.02
_NUM_SQUARE_SUMS = 32


class PdlBenchmark(ABC):
    """Benchmark of one GEMM shape."""

    @abstractmethod
    def candidate(self, config: GemmConfig | None) -> Callable[[], float]:
        """Returns a function that times the candidate once, in microseconds; None is the baseline backend.

        Raises RuntimeError if the candidate does not run or its result is wrong.
        """


CreateBenchmark = Callable[[PdlShape, Sequence[torch.Tensor]], PdlBenchmark]


class GraphBenchmark(PdlBenchmark):
    """Times candidates in a CUDA graph, each launch with the weights of another layer.

    Every launch follows another PDL GEMM. In a step attention lies between some of them; it triggers the dependent
    launch early too.
    """

    def __init__(
        self,
        kernel: PdlKernel,
        others: GemmBackend,
        stream: torch.cuda.Stream,
        shape: PdlShape,
        weights: Sequence[torch.Tensor],
    ) -> None:
        self._kernel, self._others, self._stream, self._shape = kernel, others, stream, shape
        self._weights = beyond_cache(weights, weights[0].nbytes)
        device = weights[0].device
        self._x_TK = torch.randn(shape.num_rows, shape.num_in, dtype=shape.dtype, device=device)
        num_out = shape.num_out // (1 + (shape.use is GemmEpilogue.GATED))
        self._out_TN = torch.zeros(shape.num_rows, num_out, dtype=shape.dtype, device=device)
        # Split as by the output projection.
        self._square_sums = (
            self._x_TK.float().square().sum(dim=1).div_(_NUM_SQUARE_SUMS).expand(_NUM_SQUARE_SUMS, -1).contiguous()
        )
        # Outputs of the candidates: their graphs write to these buffers.
        self._left: list[torch.Tensor] = []
        torch.cuda.synchronize(device)

    def candidate(self, config: GemmConfig | None) -> Callable[[], float]:
        square_sums = None
        if config is not None:
            square_sums = self._square_sums_of(config)
            self._check(config, square_sums)
        return TimedGraph(
            [partial(self._launch, config, w_NK, square_sums) for w_NK in self._weights], self._stream
        ).micros

    def _square_sums_of(self, config: GemmConfig) -> torch.Tensor | None:
        """Partial sums of squares that the GEMM reads (gated) or writes (added)."""
        if self._shape.use is GemmEpilogue.ADDED:
            self._left.append(self._kernel.new_square_sums(self._x_TK, self._weights[0], config))
            return self._left[-1]
        return self._square_sums if self._shape.use is GemmEpilogue.GATED else None

    def _check(self, config: GemmConfig, square_sums: torch.Tensor | None) -> None:
        use, is_gated = self._shape.use, self._shape.use is GemmEpilogue.GATED
        if not all(self._kernel.accepts(self._x_TK, w, self._out_TN, is_gated=is_gated) for w in self._weights):
            raise RuntimeError("the weights do not lie as the kernel expects")
        with torch.cuda.stream(self._stream):
            expected = self._expected(self._weights[0])
            # A gated GEMM without partial sums of squares computes them itself.
            for given in (square_sums, None) if is_gated else (square_sums,):
                self._out_TN.fill_(0.0 if use is GemmEpilogue.ADDED else float("nan"))
                self._launch(config, self._weights[0], given)
                _compare(self._out_TN, expected)
            if use is GemmEpilogue.ADDED and square_sums is not None:
                _compare(square_sums.sum(dim=0), self._out_TN.float().square().sum(dim=1))
            self._out_TN.zero_()

    def _expected(self, w_NK: torch.Tensor) -> torch.Tensor:
        result_TN = self._others.linear(self._x_TK, w_NK)
        if self._shape.use is GemmEpilogue.GATED:
            return silu_mul(result_TN, norm_input_TD=self._x_TK, eps=_EPS)
        return result_TN

    def _launch(self, config: GemmConfig | None, w_NK: torch.Tensor, square_sums: torch.Tensor | None) -> None:
        x_TK, out_TN, use = self._x_TK, self._out_TN, self._shape.use
        if config is not None and use is GemmEpilogue.GATED:
            self._kernel.gate_up_silu(x_TK, w_NK, config, eps=_EPS, out=out_TN, square_sums=square_sums)
        elif config is not None:
            residual_TN = out_TN if use is GemmEpilogue.ADDED else None
            self._kernel.linear(x_TK, w_NK, config, residual_TN=residual_TN, out=out_TN, square_sums_out=square_sums)
        elif use is GemmEpilogue.GATED:
            silu_mul(self._others.linear(x_TK, w_NK), out_TN, norm_input_TD=x_TK, eps=_EPS)
        elif use is GemmEpilogue.ADDED:
            self._others.add_linear(x_TK, w_NK, out_TN)
        else:
            self._others.linear(x_TK, w_NK)


def _compare(found: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error < _MAX_ERROR:
        raise RuntimeError(f"differs from others' result by {error:.3g}")
