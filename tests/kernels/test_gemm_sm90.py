"""The sm90 GEMMs: the kernels' own sources, with their primitives emulated, against torch."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

import torch
from support.gemm_sm90_emulator import EmulatedGemmSm90, is_there, random_numbers, square_sums_by_tile
from support.rounding import excess, gated_tolerance, gemm_tolerance, sum_tolerance

from radixmesh.kernels.gemm_sm90.candidates import candidates
from radixmesh.kernels.gemm_sm90.gemm import gate_up_silu_reference, linear_reference
from radixmesh.kernels.gemm_sm90.variants import GemmConfig, variant_of
from radixmesh.kernels.inverse_rms import inverse_rms_reference

pytestmark = pytest.mark.skipif(not is_there(), reason="the emulation is built with g++")

_BF16, _F16 = torch.bfloat16, torch.float16
# A variant takes two seconds to build: the daily suite has one of each kind.
_FULL = pytest.mark.full


# Ragged rows, features out within a tile and k blocks; more blocks than stages; clusters with uneven parts.
@pytest.mark.parametrize(
    ("tile", "stages", "split_k", "multicast", "num_rows", "num_out", "num_in", "dtype", "is_added"),
    [
        (64, 3, 1, 1, 9, 72, 200, _BF16, False),
        pytest.param(64, 2, 4, 1, 3, 136, 520, _F16, True, marks=_FULL),
        pytest.param(128, 4, 1, 1, 64, 128, 384, _BF16, True, marks=_FULL),
        (128, 4, 3, 1, 50, 200, 712, _BF16, True),
        (256, 3, 2, 1, 97, 264, 264, _F16, False),
        (64, 3, 1, 4, 40, 200, 520, _BF16, True),
        pytest.param(128, 2, 2, 2, 61, 392, 712, _BF16, True, marks=_FULL),
        pytest.param(128, 3, 8, 1, 8, 136, 520, _BF16, True, marks=_FULL),
    ],
)
def test_gemms_are_torchs(
    tmp_path: Path,
    tile: int,
    stages: int,
    split_k: int,
    multicast: int,
    num_rows: int,
    num_out: int,
    num_in: int,
    dtype: torch.dtype,
    is_added: bool,
) -> None:
    config = GemmConfig(tile=tile, split_k=split_k, stages=stages, multicast=multicast)
    variant = variant_of(config, num_rows, False, dtype)
    kernel = EmulatedGemmSm90(variant, tmp_path)
    assert kernel.shared_bytes == variant.shared_bytes
    x_TK, w_NK = random_numbers(num_rows, num_in, dtype=dtype), random_numbers(num_out, num_in, dtype=dtype)
    residual_TN = random_numbers(num_rows, num_out, dtype=dtype) if is_added else None
    found = [kernel.run(x_TK, w_NK, residual_TN=residual_TN, seed=seed) for seed in range(3)]
    expected_TN = linear_reference(x_TK, w_NK, residual_TN)
    assert excess(found[0], expected_TN, gemm_tolerance(x_TK, w_NK, expected_TN, residual_TN)) <= 1
    # The order of sums does not depend on who comes first.
    assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.parametrize(
    ("tile", "split_k", "multicast", "num_rows", "num_mlp", "num_in", "eps", "dtype"),
    [
        (128, 1, 1, 64, 136, 392, 1e-5, _BF16),
        pytest.param(64, 4, 1, 5, 40, 1000, 1e-6, _F16, marks=_FULL),
        (128, 2, 1, 30, 64, 256, None, _BF16),
        pytest.param(128, 2, 2, 30, 200, 456, 1e-5, _BF16, marks=_FULL),
        (64, 2, 4, 30, 200, 456, 1e-5, _BF16),
        pytest.param(256, 2, 1, 20, 136, 328, 1e-5, _F16, marks=_FULL),
        pytest.param(128, 2, 2, 230, 128, 264, 1e-5, _BF16, marks=_FULL),
    ],
)
def test_gate_and_up_are_torchs(
    tmp_path: Path,
    tile: int,
    split_k: int,
    multicast: int,
    num_rows: int,
    num_mlp: int,
    num_in: int,
    eps: float | None,
    dtype: torch.dtype,
) -> None:
    variant = variant_of(GemmConfig(tile=tile, split_k=split_k, stages=3, multicast=multicast), num_rows, True, dtype)
    kernel = EmulatedGemmSm90(variant, tmp_path)
    x_TK, w_2FK = (
        random_numbers(num_rows, num_in, dtype=dtype),
        random_numbers(2 * num_mlp, num_in, dtype=dtype) * num_in**-0.5,
    )
    found = kernel.run(x_TK, w_2FK, eps=-1.0 if eps is None else eps)
    expected_TF = gate_up_silu_reference(x_TK, w_2FK, eps)
    factor_T1 = None if eps is None else inverse_rms_reference(x_TK, eps)
    assert excess(found, expected_TF, gated_tolerance(x_TK, w_2FK, expected_TF, factor_T1)) <= 1


# Rows in tiles of their own; ragged in all ways.
@pytest.mark.parametrize(
    ("tile", "row_tile", "stages", "multicast", "num_rows", "num_out", "num_in", "dtype", "is_added"),
    [
        pytest.param(80, 64, 3, 1, 70, 168, 328, _BF16, True, marks=_FULL),
        (96, 64, 4, 2, 130, 104, 712, _F16, False),
        (48, 128, 2, 1, 136, 88, 520, _BF16, True),
        pytest.param(64, 64, 3, 4, 250, 72, 456, _BF16, True, marks=_FULL),
    ],
)
def test_gemms_in_tiles_of_rows_are_torchs(
    tmp_path: Path,
    tile: int,
    row_tile: int,
    stages: int,
    multicast: int,
    num_rows: int,
    num_out: int,
    num_in: int,
    dtype: torch.dtype,
    is_added: bool,
) -> None:
    config = GemmConfig(tile=tile, split_k=1, stages=stages, multicast=multicast, row_tile=row_tile)
    variant = variant_of(config, num_rows, False, dtype)
    kernel = EmulatedGemmSm90(variant, tmp_path)
    assert kernel.shared_bytes == variant.shared_bytes
    x_TK, w_NK = random_numbers(num_rows, num_in, dtype=dtype), random_numbers(num_out, num_in, dtype=dtype)
    residual_TN = random_numbers(num_rows, num_out, dtype=dtype) if is_added else None
    found = [kernel.run(x_TK, w_NK, residual_TN=residual_TN, seed=seed) for seed in range(2)]
    expected_TN = linear_reference(x_TK, w_NK, residual_TN)
    assert excess(found[0], expected_TN, gemm_tolerance(x_TK, w_NK, expected_TN, residual_TN)) <= 1
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(GemmConfig(tile=64, split_k=1, stages=3), marks=_FULL),
        GemmConfig(tile=128, split_k=3, stages=2),
        pytest.param(GemmConfig(tile=64, split_k=2, stages=3, multicast=4), marks=_FULL),
        GemmConfig(tile=96, split_k=1, stages=3, multicast=2, row_tile=64),
    ],
    ids=str,
)
def test_squares_of_results_are_left_by_tiles(tmp_path: Path, config: GemmConfig) -> None:
    """Of the numbers as they are stored; rows and columns that are not there have none."""
    num_rows, num_out, num_in = 70, 200, 456
    variant = variant_of(config, num_rows, False, _BF16)
    num_tiles = variant.num_tiles(num_out)
    assert num_tiles == -(-num_out // config.tile)
    square_sums = torch.full((num_tiles + 1, num_rows), -1.0)
    x_TK, w_NK, before_TN = (
        random_numbers(num_rows, num_in),
        random_numbers(num_out, num_in),
        random_numbers(num_rows, num_out),
    )
    found = EmulatedGemmSm90(variant, tmp_path).run(x_TK, w_NK, residual_TN=before_TN, square_sums_out=square_sums)
    # No square is negative.
    rtol = 2 * sum_tolerance(config.tile, 1.0)
    torch.testing.assert_close(square_sums[:-1], square_sums_by_tile(found, config.tile), rtol=rtol, atol=0.0)
    assert bool((square_sums[-1] == -1.0).all())


@pytest.mark.parametrize(
    ("num_rows", "config"),
    [
        pytest.param(9, GemmConfig(tile=128, split_k=1, stages=3), marks=_FULL),
        pytest.param(9, GemmConfig(tile=64, split_k=2, stages=3, multicast=2), marks=_FULL),
        pytest.param(130, GemmConfig(tile=128, split_k=1, stages=3), marks=_FULL),
        (130, GemmConfig(tile=64, split_k=2, stages=3, multicast=2)),
    ],
    ids=str,
)
def test_squares_that_were_left_make_the_norm(tmp_path: Path, num_rows: int, config: GemmConfig) -> None:
    num_mlp, num_in = 72, 328
    kernel = EmulatedGemmSm90(variant_of(config, num_rows, True, _BF16), tmp_path)
    x_TK, w_2FK = random_numbers(num_rows, num_in), random_numbers(2 * num_mlp, num_in) * num_in**-0.5
    # Not x's: it is these that count.
    square_sums = torch.rand(5, num_rows) * num_in
    found = kernel.run(x_TK, w_2FK, eps=1e-5, square_sums=square_sums)
    factor_T1 = (square_sums.sum(dim=0) / num_in + 1e-5).rsqrt()[:, None]
    gate_TF, up_TF = ((x_TK.float() @ w_2FK.float().t()) * factor_T1).chunk(2, dim=1)
    expected_TF = (torch.nn.functional.silu(gate_TF) * up_TF).to(x_TK.dtype)
    assert excess(found, expected_TF, gated_tolerance(x_TK, w_2FK, expected_TF, factor_T1)) <= 1


@pytest.mark.parametrize("num_rows", [1, 8, 64, 100, 256])
@pytest.mark.parametrize(
    ("num_out", "num_in", "is_gated"),
    [(5120, 3072, False), (3072, 8192, False), (14336, 4096, True), (128256, 2560, False), (72, 136, False)],
)
def test_candidates_fit_a_multiprocessor(num_rows: int, num_out: int, num_in: int, is_gated: bool) -> None:
    configs = candidates(num_rows, num_out, num_in, is_gated=is_gated)
    assert configs and len(set(configs)) == len(configs)
    for config in configs:
        variant = variant_of(config, num_rows, is_gated, _BF16)
        assert variant.shared_bytes * variant.a_multiprocessor <= 227 << 10 and variant.stages >= 2
        assert config.split_k <= -(-num_in // 64) and config.cluster <= 8
        # The accumulators leave registers for the rest.
        assert variant.sums_a_thread + 40 <= 65536 // (variant.num_threads * variant.a_multiprocessor)
