"""RoPE and the write to the KV pool against torch."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.rounding import sum_tolerance

from radixmesh.kernels.deferred_norm import DeferredNormGemm
from radixmesh.kernels.rope_kv import (
    HeadNorms,
    HeadShape,
    KvTarget,
    RopeAngles,
    rope_write_kv,
    rope_write_kv_reference,
)

_PAGE_SIZE = 4
_NUM_PAGES = 24


@dataclass(frozen=True)
class _Case:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_rows: int
    has_norm: bool = False
    has_bias: bool = False
    num_features: int | None = None


# Relative error of the longest sum of squares.
_SUM = sum_tolerance(3072, 1.0)

_CASES = [
    _Case(4, 2, 64, 1),
    _Case(24, 8, 128, 3),
    _Case(3, 1, 80, 5),
    _Case(2, 2, 96, 4, has_norm=True),
    _Case(16, 8, 128, 2, has_norm=True),
    _Case(9, 3, 64, 4),
    _Case(40, 20, 64, 2),
    _Case(6, 2, 64, 3, num_features=96),
    _Case(24, 8, 128, 3, has_bias=True, num_features=3072),
    _Case(4, 4, 64, 2, has_norm=True, num_features=256),
    _Case(2, 1, 80, 3, has_norm=True, has_bias=True, num_features=1000),
    _Case(2, 2, 64, 2, has_bias=True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_equals_the_reference(case: _Case, dtype: torch.dtype, device: torch.device) -> None:
    d, kv_shape = case.head_dim, ((_NUM_PAGES + 1) * _PAGE_SIZE, case.num_kv_heads, case.head_dim)
    qkv = torch.randn(case.num_rows, (case.num_heads + 2 * case.num_kv_heads) * d, device=device).to(dtype)
    angles = torch.rand(16, d // 2, device=device) * 6
    positions, slots, tables = _targets(case.num_rows, device)
    norms = torch.randn(2, d, device=device).to(dtype) if case.has_norm else (None, None)
    # Factors of rows are not near 1, so that one left out is seen.
    norm_input = None if case.num_features is None else _rows(case.num_rows, case.num_features, device).to(dtype)
    bias = torch.randn(qkv.shape[1], device=device).to(dtype) if case.has_bias else None
    results = []
    for function in (rope_write_kv, rope_write_kv_reference):
        keys, values = torch.zeros(2, *kv_shape, device=device, dtype=dtype)
        q = function(
            DeferredNormGemm(qkv, bias, norm_input),
            _angles(angles),
            KvTarget(positions, slots, tables, _PAGE_SIZE),
            keys,
            values,
            HeadShape(case.num_heads, case.num_kv_heads, d),
            HeadNorms(*norms),
        )
        results.append((q, keys, values))
    (q, keys, values), (expected_q, expected_keys, expected_values) = results
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(q, expected_q, rtol=max(2 * unit, _SUM), atol=4 * unit)
    torch.testing.assert_close(keys, expected_keys, rtol=max(2 * unit, _SUM), atol=4 * unit)
    if case.num_features is None and not case.has_bias:
        assert torch.equal(values, expected_values)
    torch.testing.assert_close(values, expected_values, rtol=max(2 * unit, _SUM), atol=4 * unit)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "stored_dim"),
    [
        (torch.float32, torch.float16, 64),
        (torch.float32, torch.bfloat16, 32),
        (torch.bfloat16, torch.float16, 48),
        (torch.float16, torch.float32, 128),
    ],
)
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_a_pool_of_another_dtype_with_longer_rows(dtype, kv_dtype, stored_dim, num_kv_heads, device) -> None:
    d, num_rows, num_heads = 32, 5, 3
    qkv = torch.randn(num_rows, (num_heads + 2 * num_kv_heads) * d, device=device).to(dtype)
    angles = torch.rand(16, d // 2, device=device) * 6
    positions, slots, tables = _targets(num_rows, device)
    results = []
    for function in (rope_write_kv, rope_write_kv_reference):
        stored = torch.zeros(2, (_NUM_PAGES + 1) * _PAGE_SIZE, num_kv_heads, stored_dim, device=device, dtype=kv_dtype)
        target, heads = KvTarget(positions, slots, tables, _PAGE_SIZE), HeadShape(num_heads, num_kv_heads, d)
        q = function(DeferredNormGemm(qkv), _angles(angles), target, *stored[..., :d], heads, HeadNorms())
        assert q.dtype == dtype and (stored[..., d:] == 0).all()
        results.append((q, stored))
    (q, stored), (expected_q, expected) = results
    unit = max(torch.finfo(dtype).eps, torch.finfo(kv_dtype).eps)
    torch.testing.assert_close(q, expected_q, rtol=max(2 * unit, _SUM), atol=4 * unit)
    torch.testing.assert_close(stored, expected, rtol=2 * unit, atol=4 * unit)
    assert expected.abs().amax(-1).count_nonzero() == 2 * num_rows * num_kv_heads


def test_a_row_is_scaled_by_its_own_factor_whoever_is_beside_it(device: torch.device) -> None:
    qkv, norm_input = torch.randn(5, 8 * 64, device=device), _rows(5, 96, device)
    positions, slots, tables = _targets(5, device)
    angles = torch.rand(16, 32, device=device)
    results = []
    for rows in (slice(0, 5), slice(3, 4)):
        keys, values = torch.zeros(2, (_NUM_PAGES + 1) * _PAGE_SIZE, 2, 64, device=device)
        target = KvTarget(positions[rows], slots[rows], tables, _PAGE_SIZE)
        gemm = DeferredNormGemm(qkv[rows], norm_input_TD=norm_input[rows])
        q = rope_write_kv(gemm, _angles(angles), target, keys, values, HeadShape(4, 2, 64), HeadNorms())
        indexes = tables[slots[3].item(), positions[3].item() // _PAGE_SIZE] * _PAGE_SIZE + positions[3] % _PAGE_SIZE
        results.append((q[3 if len(q) > 1 else 0], keys[indexes], values[indexes]))
    for together, alone in zip(*results, strict=True):
        assert torch.equal(together, alone)


def test_rows_of_another_number_are_refused(device: torch.device) -> None:
    pools = torch.zeros(2, 8, 1, 64, device=device)
    indexes = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(AssertionError):
        rope_write_kv(
            DeferredNormGemm(torch.ones(2, 4 * 64, device=device), norm_input_TD=torch.ones(3, 96, device=device)),
            _angles(torch.ones(4, 32, device=device)),
            KvTarget(indexes, indexes, indexes[:, None], 4),
            *pools,
            HeadShape(2, 1, 64),
            HeadNorms(),
        )


def _angles(angles_PD2: torch.Tensor) -> RopeAngles:
    return RopeAngles(angles_PD2.cos(), angles_PD2.sin())


def _rows(num_rows: int, num_features: int, device: torch.device) -> torch.Tensor:
    """Each of another size."""
    sizes = 2.0 ** torch.arange(-1, num_rows - 1, device=device)
    return torch.randn(num_rows, num_features, device=device) * sizes[:, None]


def test_padding_writes_the_dummy_page_alone(device: torch.device) -> None:
    num_rows, dummy_slot = 5, 3
    qkv = torch.randn(num_rows, 4 * 64, device=device)
    tables = torch.full((dummy_slot + 1, 4), _NUM_PAGES, dtype=torch.int32, device=device)
    tables[0, 0] = 7
    slots = torch.tensor([0] + [dummy_slot] * (num_rows - 1), dtype=torch.int32, device=device)
    positions = torch.tensor([2, 0, 0, 0, 0], dtype=torch.int32, device=device)
    keys, values = torch.zeros(2, (_NUM_PAGES + 1) * _PAGE_SIZE, 1, 64, device=device)
    angles = torch.zeros(4, 32, device=device)
    target = KvTarget(positions, slots, tables, _PAGE_SIZE)
    rope_write_kv(DeferredNormGemm(qkv), _angles(angles), target, keys, values, HeadShape(2, 1, 64), HeadNorms())
    written = keys.abs().sum((1, 2)).nonzero().flatten().tolist()
    assert written == [7 * _PAGE_SIZE + 2, _NUM_PAGES * _PAGE_SIZE]
    assert torch.equal(values[7 * _PAGE_SIZE + 2, 0], qkv[0, 3 * 64 :])


def _targets(num_rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Distinct (position, slot) pairs, and tables in which no two slots share a page."""
    tables = torch.randperm(_NUM_PAGES).reshape(6, 4).to(torch.int32)
    chosen = torch.randperm(6 * 16)[:num_rows]
    positions, slots = (chosen % 16).to(torch.int32), (chosen // 16).to(torch.int32)
    return positions.to(device), slots.to(device), tables.to(device)
