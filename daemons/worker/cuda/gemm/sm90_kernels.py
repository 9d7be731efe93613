"""The project's GEMMs for Hopper (`kernels/gemm_sm90`) as a kind of GEMM kernel: a candidate is a configuration.

Legend: T rows, N features out, K features in, F mlp size. Weights are [out, in].
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

import torch

from radixmesh.daemons.worker.cuda.gemm.autotuner import GemmKernels, Operands, TuningPolicy, refused, spread
from radixmesh.daemons.worker.cuda.gemm.backend import GemmBackend, GemmEpilogue, GemmKernel, GemmProblem
from radixmesh.kernels.gemm_sm90.candidates import cache_bytes, candidates, few_rows_candidates
from radixmesh.kernels.gemm_sm90.gemm import MAX_ROWS, GemmSm90, gate_up_silu_reference, linear_reference
from radixmesh.kernels.gemm_sm90.variants import GemmConfig, Variant, variant_of
from radixmesh.kernels.silu_mul import silu_mul

_PADDED_ROWS = 8
"""Kernels pad rows of x to so many: fewer are as fast."""
_USUAL_ROWS = (64, 256, 128, 32, 16, _PADDED_ROWS)
# Reads from the L2 cache cost power, and power bounds a step under load: of two configurations that are equally fast
# alone, the one that reads more is slower then.
_CACHE_US_BYTE = 2e-8
# Kernels of few_rows.cu overlap more with those around them than others do, which timing one GEMM does not show: four
# of them, a layer of 8B at 5 rows, take 4 us less than alone, four others 3 us more.
_MORE_THAN_FEW_ROWS_US = 1.5
_EPS = 1e-5
_MAX_CHECK_ERROR, _MAX_CANDIDATE_ERROR = 0.01, 0.02
_NUM_SQUARE_SUMS = 32
# split_k by number of rows of the small GEMMs that are checked before the first use.
_CHECKED = {5: 1, 37: 2, 64: 3}


class Sm90Gemm(GemmKernel):
    """A configuration for one problem, with weight prefetch under PDL (programmatic dependent launch)."""

    def __init__(self, kernel: GemmSm90, config: GemmConfig, epilogue: GemmEpilogue) -> None:
        self._kernel, self._config = kernel, config
        self._is_gated, self._is_added = epilogue is GemmEpilogue.GATED, epilogue is GemmEpilogue.ADDED

    def accepts(self, x_TK: torch.Tensor, w_NK: torch.Tensor, out: torch.Tensor) -> bool:
        return self._kernel.accepts(x_TK, w_NK, out, self._is_gated)

    def run(
        self,
        x_TK: torch.Tensor,
        w_NK: torch.Tensor,
        out: torch.Tensor,
        *,
        eps: float = 0.0,
        square_sums: torch.Tensor | None = None,
        square_sums_out: torch.Tensor | None = None,
    ) -> None:
        if self._is_gated:
            self._kernel.gate_up_silu(x_TK, w_NK, self._config, eps=eps, out=out, square_sums=square_sums)
        else:
            residual_TN = out if self._is_added else None
            self._kernel.linear(
                x_TK, w_NK, self._config, residual_TN=residual_TN, out=out, square_sums_out=square_sums_out
            )

    def new_square_sums(self, x_TK: torch.Tensor, w_NK: torch.Tensor) -> torch.Tensor | None:
        return self._kernel.new_square_sums(x_TK, w_NK, self._config)


class Sm90Kernels(GemmKernels[torch.Tensor, GemmConfig, GemmKernel]):
    """For steps of up to MAX_ROWS rows. others: the baseline."""

    # A PDL GEMM may be slower alone: it overlaps with the kernels before and after it, which timing one GEMM does not
    # show. The budget is for measuring only: compiling comes before, and a second start finds kernels in the cache.
    policy = TuningPolicy(allowed_us=2.0, budget_s=10.0)

    def __init__(self, kernel: GemmSm90, others: GemmBackend) -> None:
        self._kernel, self._others = kernel, others

    def measured_rows(self, sizes: Sequence[int]) -> Sequence[int]:
        """The usual ones; behind the first the largest, which no larger one serves. Last those of one row with some
        drafts: between them and _PADDED_ROWS other tilings of few_rows.cu are the fastest."""
        served = [size for size in sizes if size <= MAX_ROWS]
        usual = [num_rows for num_rows in _USUAL_ROWS if num_rows in served]
        few = [size for size in served if _PADDED_ROWS // 2 < size < _PADDED_ROWS]
        return list(dict.fromkeys([*usual[:1], *([max(served)] if served else []), *usual, *few]))

    def candidates(self, problem: GemmProblem) -> Mapping[GemmConfig, float]:
        num_rows, num_out, num_in, is_gated = _sizes(problem)
        read = {
            config: cache_bytes(config, num_rows, num_out, num_in, is_gated=is_gated)
            for config in candidates(num_rows, num_out, num_in, is_gated=is_gated)
        }
        least = min(read.values(), default=0.0)
        penalties = {config: (nbytes - least) * _CACHE_US_BYTE for config, nbytes in read.items()}
        few = few_rows_candidates(num_rows, num_out, num_in, is_gated=is_gated)
        more_us = _MORE_THAN_FEW_ROWS_US if few else 0.0
        return {config: us + more_us for config, us in penalties.items()} | dict.fromkeys(few, 0.0)

    def prepare(self, problems: Collection[GemmProblem]) -> None:
        """A kernel that does not compile says so when it is launched."""
        self._kernel.prepare(_variant(problem, config) for problem in problems for config in self.candidates(problem))

    def operands(self, problem: GemmProblem, weights: Sequence[torch.Tensor]) -> Sm90Operands:
        return Sm90Operands(self._kernel, self._others, problem, weights[0].device)

    def bind(
        self, measured: Mapping[GemmProblem, GemmConfig | None], sizes: Sequence[int]
    ) -> dict[GemmProblem, GemmKernel]:
        table = spread(measured, [size for size in sizes if size <= MAX_ROWS])
        for problem, chosen in sorted(measured.items(), key=lambda item: item[0].num_rows):
            if problem.num_rows <= _PADDED_ROWS and chosen is not None:
                fewer = (problem._replace(num_rows=size) for size in sizes if size < problem.num_rows)
                table = dict.fromkeys(fewer, chosen) | table
        # Sizes between those that were measured have kernels of their own.
        self._kernel.prepare(_variant(problem, config) for problem, config in table.items())
        kernels: dict[GemmProblem, GemmKernel] = {}
        for problem, config in table.items():
            try:
                self._kernel.load(_variant(problem, config))
            except (RuntimeError, OSError) as error:
                refused(problem, config, error)
            else:
                kernels[problem] = Sm90Gemm(self._kernel, config, problem.epilogue)
        return kernels


class Sm90Operands(Operands[torch.Tensor, GemmConfig]):
    """Every launch follows another PDL GEMM. In a step attention lies between some of them; it triggers the dependent
    launch early too."""

    def __init__(self, kernel: GemmSm90, others: GemmBackend, problem: GemmProblem, device: torch.device) -> None:
        num_rows, num_out, num_in, self._is_gated = _sizes(problem)
        dtype, self._epilogue = _dtype(problem), problem.epilogue
        self._kernel, self._others = kernel, others
        self._x_TK = torch.randn(num_rows, num_in, dtype=dtype, device=device)
        self._out_TN = torch.zeros(num_rows, num_out, dtype=dtype, device=device)
        # Split as by the output projection.
        self._square_sums = (
            self._x_TK.float().square().sum(dim=1).div_(_NUM_SQUARE_SUMS).expand(_NUM_SQUARE_SUMS, -1).contiguous()
        )
        # Partial sums that candidates write: their graphs hold these buffers.
        self._square_sums_out: dict[GemmConfig, torch.Tensor | None] = {}

    def check(self, candidate: GemmConfig, weights: Sequence[torch.Tensor]) -> None:
        kernel, x_TK, out_TN = self._bound(candidate), self._x_TK, self._out_TN
        if not all(kernel.accepts(x_TK, w_NK, out_TN) for w_NK in weights):
            raise RuntimeError("the weights do not lie as the kernel expects")
        is_added, first_NK = self._epilogue is GemmEpilogue.ADDED, weights[0]
        if is_added:
            self._square_sums_out[candidate] = kernel.new_square_sums(x_TK, first_NK)
        expected = self._others.linear(x_TK, first_NK)
        if self._is_gated:
            expected = silu_mul(expected, norm_input_TD=x_TK, eps=_EPS)
        # A gated GEMM without partial sums of squares computes them itself.
        for square_sums in (self._square_sums, None) if self._is_gated else (None,):
            out_TN.fill_(0.0 if is_added else float("nan"))
            self._run(candidate, first_NK, square_sums)
            _compare(out_TN, expected)
        written = self._square_sums_out.get(candidate)
        if written is not None:
            _compare(written.sum(dim=0), out_TN.float().square().sum(dim=1))
        out_TN.zero_()

    def launch(self, candidate: GemmConfig | None, weight: torch.Tensor) -> None:
        if candidate is not None:
            self._run(candidate, weight, self._square_sums if self._is_gated else None)
        elif self._is_gated:
            silu_mul(self._others.linear(self._x_TK, weight), self._out_TN, norm_input_TD=self._x_TK, eps=_EPS)
        elif self._epilogue is GemmEpilogue.ADDED:
            self._others.add_linear(self._x_TK, weight, self._out_TN)
        else:
            self._others.linear(self._x_TK, weight)

    def _bound(self, candidate: GemmConfig) -> Sm90Gemm:
        return Sm90Gemm(self._kernel, candidate, self._epilogue)

    def _run(self, candidate: GemmConfig, w_NK: torch.Tensor, square_sums: torch.Tensor | None) -> None:
        self._bound(candidate).run(
            self._x_TK,
            w_NK,
            self._out_TN,
            eps=_EPS,
            square_sums=square_sums,
            square_sums_out=self._square_sums_out.get(candidate),
        )


def check_kernel(kernel: GemmSm90, dtype: torch.dtype, device: torch.device) -> None:
    """Computes small GEMMs (ragged, split-K, gated). Raises RuntimeError unless torch agrees."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    configs = {num_rows: GemmConfig(tile=128, split_k=split_k, stages=3) for num_rows, split_k in _CHECKED.items()}
    kernel.prepare(
        variant_of(config, num_rows, is_gated, dtype)
        for (num_rows, config), is_gated in itertools.product(configs.items(), (False, True))
    )
    for num_rows, config in configs.items():
        x_TK, w_NK, before_TN = random(num_rows, 456), random(272, 456), random(num_rows, 272)
        added_TN, gated_TF = before_TN.clone(), random(num_rows, 136)
        kernel.linear(x_TK, w_NK, config, residual_TN=added_TN, out=added_TN)
        kernel.gate_up_silu(x_TK, w_NK, config, eps=_EPS, out=gated_TF)
        _compare(added_TN, linear_reference(x_TK, w_NK, before_TN), _MAX_CHECK_ERROR)
        _compare(gated_TF, gate_up_silu_reference(x_TK, w_NK, _EPS), _MAX_CHECK_ERROR)


def _compare(found: torch.Tensor, expected: torch.Tensor, most: float = _MAX_CANDIDATE_ERROR) -> None:
    error = float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
    if not error < most:
        raise RuntimeError(f"a GEMM's result {tuple(found.shape)} differs from torch's by {error:.3g}")


def _sizes(problem: GemmProblem) -> tuple[int, int, int, bool]:
    """Rows, features out (of gate or up alone), features in; whether it is gated."""
    is_gated = problem.epilogue is GemmEpilogue.GATED
    return problem.num_rows, problem.num_out // (1 + is_gated), problem.num_in, is_gated


def _variant(problem: GemmProblem, config: GemmConfig) -> Variant:
    return variant_of(config, problem.num_rows, problem.epilogue is GemmEpilogue.GATED, _dtype(problem))


def _dtype(problem: GemmProblem) -> torch.dtype:
    assert isinstance(problem.form, torch.dtype), problem
    return problem.form
