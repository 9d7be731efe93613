"""Products of 2 to 256 rows against torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from radixmesh.kernels.product import (
    num_square_parts,
    product,
    product_reference,
    product_silu,
    product_silu_reference,
)
from radixmesh.kernels.product_config import (
    MAX_ROWS,
    ProductConfig,
    ProductShape,
    ProductWorkspace,
    default_config,
)

_EPS = 1e-5
# The interpreter multiplies bfloat16 as integers.
_DTYPES = [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.float16]
_SMALL = ProductConfig(rows=16, block_n=64, block_k=32, num_stages=3)
_CONFIGS = [
    replace(_SMALL, num_splits=splits, use_tma=use_tma, num_warps=warps)
    for splits, use_tma, warps in [(1, True, 4), (1, False, 4), (2, False, 8), (3, True, 4)]
]


@dataclass(frozen=True)
class _Case:
    num_rows: int
    num_in: int
    num_out: int


# Rows, features in and features out that fill no tile; several tiles of rows; K shorter than the splits.
_CASES = [_Case(16, 72, 70), _Case(5, 136, 1), _Case(18, 96, 65), _Case(1, 8, 9)]


@pytest.fixture
def workspace(device: torch.device) -> ProductWorkspace:
    return ProductWorkspace(device, num_bytes=1 << 22, max_tiles=64)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("config", _CONFIGS, ids=str)
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_a_product_with_all_that_is_fused_equals_the_reference(
    case: _Case, config: ProductConfig, dtype: torch.dtype, device: torch.device, workspace: ProductWorkspace
) -> None:
    x, w = _operands(case, dtype, device)
    bias = torch.randn(case.num_out, device=device).to(dtype)
    residual = torch.randn(case.num_rows, case.num_out, device=device).to(dtype)
    _assert_near(product(x, w, workspace, config=config), product_reference(x, w))
    expected = product_reference(x, w, bias, residual, _EPS)
    product(x, w, workspace, bias_N=bias, residual_TN=residual, norm_eps=_EPS, out=residual, config=config)
    _assert_near(residual, expected)
    assert not workspace.arrivals.any(), "a graph's next replay counts from 0"


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("config", _CONFIGS, ids=str)
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_gate_and_up_equal_the_reference(
    case: _Case, config: ProductConfig, dtype: torch.dtype, device: torch.device, workspace: ProductWorkspace
) -> None:
    x, w = _operands(replace(case, num_out=2 * case.num_out), dtype, device)
    for eps in (None, _EPS):
        actual = product_silu(x, w, workspace, norm_eps=eps, config=config)
        _assert_near(actual, product_silu_reference(x, w, eps))
    assert not workspace.arrivals.any()


@pytest.mark.parametrize("config", _CONFIGS, ids=str)
@pytest.mark.parametrize("case", _CASES[1:3], ids=str)
def test_squares_of_one_product_norm_the_next(
    case: _Case, config: ProductConfig, device: torch.device, workspace: ProductWorkspace
) -> None:
    num_out = -(-case.num_out // 8) * 8
    x, w = _operands(replace(case, num_out=num_out), torch.float16, device)
    shape = ProductShape(num_rows=case.num_rows, num_out=num_out, num_in=case.num_in, is_gated=False)
    squares = torch.full((num_square_parts(shape, device, config), case.num_rows), torch.nan, device=device)
    hidden = torch.randn(case.num_rows, num_out, device=device).half()
    product(x, w, workspace, residual_TN=hidden, out=hidden, squares_out_PT=squares, config=config)
    torch.testing.assert_close(squares.sum(0), hidden.float().pow(2).sum(1), rtol=1e-5, atol=1e-4)
    _, w_next = _operands(_Case(1, num_out, 22), torch.float16, device)
    actual = product(hidden, w_next, workspace, norm_eps=_EPS, squares_PT=squares, config=config)
    _assert_near(actual, product_reference(hidden, w_next, norm_eps=_EPS))
    gated = product_silu(hidden, w_next, workspace, norm_eps=_EPS, squares_PT=squares, config=config)
    _assert_near(gated, product_silu_reference(hidden, w_next, _EPS))


def test_rows_may_be_strided_and_logits_wider(device: torch.device, workspace: ProductWorkspace) -> None:
    x, w = _operands(_Case(6, 128, 33), torch.float16, device)
    x = x[:, 32:96]
    w = w[:, :64].contiguous()
    for config in _CONFIGS[:2]:
        out = torch.empty(6, 33, device=device)
        product(x, w, workspace, out=out, config=config)
        torch.testing.assert_close(out, x.float() @ w.float().T, rtol=1e-4, atol=1e-4)


def test_splits_give_the_same_bits_every_time(device: torch.device, workspace: ProductWorkspace) -> None:
    x, w = _operands(_Case(7, 256, 64), torch.float16, device)
    config = replace(_SMALL, num_splits=5)
    first = product(x, w, workspace, config=config)
    assert all(torch.equal(first, product(x, w, workspace, config=config)) for _ in range(3))


def test_a_small_workspace_lowers_the_splits(device: torch.device) -> None:
    workspace = ProductWorkspace(device, num_bytes=3 * 4 * 16 * 65, max_tiles=1)
    shape = ProductShape(num_rows=16, num_out=64, num_in=1024, is_gated=False)
    assert workspace.clamped_splits(replace(_SMALL, num_splits=8), shape) == 3
    assert workspace.clamped_splits(replace(_SMALL, num_splits=8), replace(shape, num_out=65)) == 1
    x, w = _operands(_Case(16, 1024, 64), torch.float16, device)
    _assert_near(product(x, w, workspace, config=replace(_SMALL, num_splits=8)), product_reference(x, w))


@pytest.mark.parametrize(
    "num_out, num_in", [(5120, 3072), (3072, 8192), (128256, 3072), (4096, 14336), (2560, 9728), (8, 64)]
)
@pytest.mark.parametrize("is_gated", [False, True])
def test_defaults_fit_a_multiprocessor_and_fill_most(num_out: int, num_in: int, is_gated: bool) -> None:
    for num_rows in range(1, MAX_ROWS + 1, 5):
        shape = ProductShape(num_rows=num_rows, num_out=num_out, num_in=num_in, is_gated=is_gated)
        config = default_config(shape, 132)
        stage = (config.block_n * (1 + is_gated) + config.rows) * config.block_k * 2
        assert config.rows >= num_rows and stage * config.num_stages <= 227 << 10
        assert ProductWorkspace("meta").clamped_splits(config, shape) == config.num_splits
        programs = -(-num_out // config.block_n) * config.num_splits
        assert num_out < 1000 or programs >= 80, (shape, config)


def test_what_it_is_not_made_for_is_refused(device: torch.device, workspace: ProductWorkspace) -> None:
    for num_rows, num_in, dtype in ((MAX_ROWS + 1, 64, torch.float16), (2, 60, torch.float16), (2, 64, torch.float32)):
        x, w = _operands(_Case(num_rows, num_in, 8), dtype, device)
        with pytest.raises(AssertionError):
            product(x, w, workspace)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_rows", [2, 16, 31, 64, 100, 192, 256])
@pytest.mark.parametrize("num_out, num_in", [(5120, 3072), (3072, 8192), (9728, 2560)])
def test_a_graph_of_real_shapes_replays_alike(num_out: int, num_in: int, num_rows: int, device: torch.device) -> None:
    workspace = ProductWorkspace(device)
    x, w = _operands(_Case(num_rows, num_in, num_out), torch.bfloat16, device)
    residual = torch.randn(num_rows, num_out, device=device).bfloat16()
    hidden = torch.empty_like(residual)
    shape = ProductShape(num_rows=num_rows, num_out=num_out, num_in=num_in, is_gated=False)
    squares = torch.empty(num_square_parts(shape, device), num_rows, device=device)
    gated = torch.empty(num_rows, num_in // 2, device=device, dtype=torch.bfloat16)
    back = (torch.randn(num_in, num_out, device=device) / num_out**0.5).bfloat16()

    def step() -> None:
        hidden.copy_(residual)
        product(x, w, workspace, residual_TN=hidden, out=hidden, squares_out_PT=squares)
        product_silu(hidden, back, workspace, norm_eps=_EPS, squares_PT=squares, out=gated, use_pdl=True)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    _assert_near(hidden, product_reference(x, w, None, residual))
    expected = product_silu_reference(hidden, back, _EPS)
    first = gated.clone()
    for _ in range(20):
        gated.zero_()
        graph.replay()
        assert torch.equal(gated, first)
    _assert_near(first, expected)


def _operands(case: _Case, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(case.num_rows, case.num_in, device=device).to(dtype)
    w = (torch.randn(case.num_out, case.num_in, device=device) / case.num_in**0.5).to(dtype)
    return x, w


def _assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    unit = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=4 * unit, atol=4 * unit)
