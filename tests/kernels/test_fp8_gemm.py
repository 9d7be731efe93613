"""The choice of FP8 GEMMs: when the library computes them, and the tiles that our kernel takes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from support.rounding import random_gemm_tolerance

from radixmesh.daemons.worker.cuda.fp8.gemm import (
    ScaledMmGemm,
    TorchFp8Gemm,
    TritonFp8Gemm,
    TunedFp8Gemm,
    check_small_gemm,
    tried_library,
)
from radixmesh.daemons.worker.cuda.fp8.tuning import (
    Fp8Kernels,
    create_fp8_gemm,
    fp8_groups,
    matrix_group,
    measured_sizes,
)
from radixmesh.daemons.worker.cuda.gemm.autotuner import Autotuner, Benchmark, Benchmarks, Operands, Timing
from radixmesh.daemons.worker.cuda.gemm.backend import GemmEpilogue, GemmProblem
from radixmesh.daemons.worker.cuda.model.device_model import TunableMatrices
from radixmesh.kernels.fp8.linear import TileConfig, default_tile, other_tiles
from radixmesh.kernels.fp8.quantize_rows import quantize_rows
from radixmesh.kernels.fp8.quantized import QuantizedMatrix, quantize_matrix

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_fp8_on_gpu.py is for the GPU")

_CPU = torch.device("cpu")


def _library(x, w, *, scale_a, scale_b, out_dtype, use_fast_accum):
    """torch._scaled_mm as an H200 has it: the sizes, strides and options that it checks, and the GEMM."""
    (num_rows, num_in), num_out = x.shape, w.shape[1]
    assert x.dtype == w.dtype == torch.float8_e4m3fn and x.is_contiguous() and w.t().is_contiguous()
    assert scale_a.dtype == scale_b.dtype == torch.float32
    if num_in % 16 or num_out % 16:
        raise RuntimeError("must be divisible by 16")
    if tuple(scale_a.shape) == (num_rows, 1) and tuple(scale_b.shape) == (1, num_out) and num_in > 128:
        assert scale_a.stride(1) == scale_b.stride(1) == 1
        rows, columns = scale_a, scale_b
    else:
        groups = -(-num_in // 128)
        assert tuple(scale_a.shape) == (num_rows, groups) and scale_a.stride() == (1, num_rows), scale_a.stride()
        assert tuple(scale_b.shape) == (groups, -(-num_out // 128)) and scale_b.stride() == (1, groups)
        assert num_rows % 4 == 0 and groups % 4 == 0, "columns of scales begin at multiples of 16 bytes"
        if use_fast_accum:
            raise RuntimeError("scaled_gemm doesn't support fast accum with 1x128 blockwise scaling")
        rows = scale_a.repeat_interleave(128, 1)[:, :num_in]
        columns = scale_b.repeat_interleave(128, 0)[:num_in].repeat_interleave(128, 1)[:, :num_out]
        return ((x.float() * rows) @ (w.float() * columns)).to(out_dtype)
    return ((x.float() @ w.float()) * rows * columns).to(out_dtype)


def _use_library(monkeypatch, scaled_mm):
    """torch has no public name for its FP8 GEMM."""
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)


def test_the_library_is_taken_where_it_computes_what_it_should(monkeypatch):
    _use_library(monkeypatch, _library)
    ours = TritonFp8Gemm()
    assert tried_library(ours, _CPU).groupings == {False, True}

    def without_blocks(x, w, **options):
        if options["scale_b"].shape[0] > 1:
            raise NotImplementedError("DeepSeek style (1x128, 128x128) scaling requires cublasLt >= 12.9")
        return _library(x, w, **options)

    _use_library(monkeypatch, without_blocks)
    assert tried_library(ours, _CPU).groupings == {False}

    def mixed_up(x, w, *, scale_a, **options):
        return _library(x, w, scale_a=scale_a.roll(1, 0).t().contiguous().t(), **options)

    _use_library(monkeypatch, mixed_up)
    assert tried_library(ours, _CPU).groupings == set()


def test_torchs_own_library_of_a_cpu_agrees():
    """A GEMM whose weights have a scale per row."""
    check_small_gemm(ScaledMmGemm(TorchFp8Gemm()), _CPU, is_grouped=False)


@pytest.mark.parametrize(
    ("num_rows", "num_out", "num_in", "is_grouped", "dtype", "is_library"),
    [
        (3, 48, 160, False, torch.bfloat16, True),
        (3, 256, 512, True, torch.bfloat16, True),
        (1, 256, 512, True, torch.bfloat16, True),
        (3, 256, 384, True, torch.bfloat16, False),
        (3, 192, 512, True, torch.bfloat16, False),
        (3, 48, 160, False, torch.float32, False),
        (3, 40, 160, False, torch.bfloat16, False),
        (3, 48, 168, False, torch.bfloat16, False),
    ],
)
def test_what_the_library_does_not_take_ours_computes(
    num_rows, num_out, num_in, is_grouped, dtype, is_library, monkeypatch
):
    calls = []
    _use_library(monkeypatch, lambda *args, **options: calls.append(1) or _library(*args, **options))
    w = quantize_matrix(torch.randn(num_out, num_in), is_grouped=is_grouped)
    rows = quantize_rows(torch.randn(num_rows, num_in), is_grouped=is_grouped)
    got = ScaledMmGemm(TritonFp8Gemm()).linear(rows, w, dtype)
    want = TorchFp8Gemm().linear(rows, w, dtype)
    torch.testing.assert_close(got, want, **random_gemm_tolerance(dtype, num_in, want))
    assert bool(calls) is is_library


def _matrices() -> list[TunableMatrices]:
    """Of two layers, whose gate and up are not FP8."""
    square, wide = (quantize_matrix(torch.randn(size, 256), is_grouped=True) for size in (256, 512))
    return [
        TunableMatrices((torch.zeros(512, 256),) * 2, GemmEpilogue.PLAIN),
        TunableMatrices((square, square), GemmEpilogue.ADDED),
        TunableMatrices((wide, wide), GemmEpilogue.PLAIN),
        TunableMatrices((square, square), GemmEpilogue.ADDED),
    ]


class _SetTimes(Benchmarks):
    """Microseconds of the baseline, of the default tile and of the other one."""

    def __init__(self, baseline_us: float, default_us: float, other_us: float) -> None:
        self._times_us = baseline_us, default_us, other_us
        self.created: list[tuple[GemmProblem, int]] = []

    def create(
        self, problem: GemmProblem, operands: Operands[QuantizedMatrix, TileConfig], weights: Sequence[QuantizedMatrix]
    ) -> Benchmark[TileConfig]:
        self.created.append((problem, len(weights)))
        size = problem.num_rows, problem.num_out
        return _Times(dict(zip((None, default_tile(*size), other_tiles(*size)[0]), self._times_us, strict=True)))


class _Times(Benchmark[TileConfig]):
    def __init__(self, times_us: dict[TileConfig | None, float]) -> None:
        self._times_us = times_us

    def candidate(self, candidate: TileConfig | None) -> Timing:
        return lambda: self._times_us[candidate]


@pytest.mark.parametrize(
    ("baseline_us", "default_us", "other_us", "chosen"),
    [
        (90.0, 100.0, 100.0, None),
        (100.0, 99.0, 120.0, None),
        (100.0, 90.0, 120.0, default_tile),
        (100.0, 95.0, 90.0, lambda *size: other_tiles(*size)[0]),
        (80.0, 95.0, 90.0, None),
    ],
)
def test_the_fastest_is_chosen_for_each_shape_and_size(baseline_us, default_us, other_us, chosen):
    benchmarks = _SetTimes(baseline_us, default_us, other_us)
    kernels = Fp8Kernels(ScaledMmGemm(TritonFp8Gemm()), TritonFp8Gemm(), torch.bfloat16)
    table, _ = Autotuner(benchmarks).tune(kernels, fp8_groups(_matrices()), (16, 64))
    created = sorted((*problem[:3], count) for problem, count in benchmarks.created)
    assert created == [(16, 256, 256, 4), (16, 512, 256, 2), (64, 256, 256, 4), (64, 512, 256, 2)]
    wanted = [] if chosen is None else [problem for problem, _ in benchmarks.created]
    assert table == {problem: chosen(problem.num_rows, problem.num_out) for problem in wanted}


@pytest.mark.parametrize("is_grouped", [False, True])
def test_candidates_run_on_the_weights_of_all_layers(is_grouped, monkeypatch):
    calls: list[str] = []

    class Ours(TritonFp8Gemm):
        def in_tiles(self, rows, w, dtype, tile):
            calls.append(str(tile))
            return super().in_tiles(rows, w, dtype, tile)

    _use_library(monkeypatch, lambda *args, **options: calls.append("library") or _library(*args, **options))
    ours = Ours()
    matrices = [quantize_matrix(torch.randn(256, 512), is_grouped=is_grouped) for _ in range(2)]
    problem = matrix_group(matrices).problem(17)
    kernels = Fp8Kernels(ScaledMmGemm(ours), ours, torch.bfloat16)
    operands = kernels.operands(problem, matrices)
    candidates = [None, *kernels.candidates(problem)]
    for candidate in candidates:
        for w in matrices:
            operands.launch(candidate, w)
    assert calls == [name for tile in candidates for name in 2 * [str(tile or "library")]]
    # Without a library the baseline is the default tile.
    calls.clear()
    without = Fp8Kernels(ScaledMmGemm(ours, frozenset()), ours, torch.bfloat16).operands(problem, matrices)
    without.launch(None, matrices[0])
    assert calls == ["None"]


def test_steps_take_what_was_chosen_for_the_next_larger_size():
    seen = []

    class Ours(TritonFp8Gemm):
        def in_tiles(self, rows, w, dtype, tile):
            seen.append(tile)
            return super().in_tiles(rows, w, dtype, tile)

    ours = Ours()
    small, large = (TileConfig(rows=n, columns=32, num_warps=4, num_stages=3) for n in (16, 64))
    w, other = (quantize_matrix(torch.randn(n, 256), is_grouped=True) for n in (48, 64))
    group = matrix_group([w])
    table = {group.problem(4): small, group.problem(16): large}
    gemm = TunedFp8Gemm(ScaledMmGemm(ours, frozenset()), ours, table, (4, 8, 16))
    expected_tiles = ((1, w, small), (4, w, small), (5, w, None), (9, w, large), (20, w, large), (4, other, None))
    for num_rows, matrix, expected in expected_tiles:
        rows = quantize_rows(torch.randn(num_rows, 256), is_grouped=True)
        got = gemm.linear(rows, matrix, torch.float32)
        want = TorchFp8Gemm().linear(rows, matrix, torch.float32)
        torch.testing.assert_close(got, want, **random_gemm_tolerance(torch.float32, 256, want))
        assert seen.pop() == expected and not seen


def test_sizes_end_with_the_largest_step():
    assert measured_sizes(1) == (16,)
    assert measured_sizes(64) == (16, 64)
    assert measured_sizes(65) == (16, 64, 256)
    assert measured_sizes(8192) == (16, 64, 256, 512, 2048)


def test_where_nothing_is_measured_the_library_is_taken_but_in_deterministic_mode():
    options = {"max_rows": 64, "use_pdl": False}
    plain = create_fp8_gemm([], torch.bfloat16, _CPU, is_deterministic=False, is_tuned=True, **options)
    fixed = create_fp8_gemm([], torch.bfloat16, _CPU, is_deterministic=True, is_tuned=True, **options)
    assert isinstance(plain, ScaledMmGemm) and isinstance(fixed, TritonFp8Gemm)
