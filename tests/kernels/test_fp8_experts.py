"""FP8 experts: grouped GEMMs of rows in groups of 128 with weights in blocks of 128 x 128, against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.fp8_experts import random_experts
from support.rounding import typical_chain_error

from radixmesh.kernels.fp8.quantized import FP8, GROUP
from radixmesh.kernels.moe.experts_config import ExpertsConfig, GroupedConfig
from radixmesh.kernels.moe.fp8_grouped_gemm import (
    default_fp8_config,
    fp8_routed_experts,
    fp8_routed_experts_reference,
    fp8_slot_experts,
    fp8_slot_experts_reference,
)
from radixmesh.kernels.moe.grouped_gemm import SlotRows, one_expert, routed_experts_reference
from radixmesh.kernels.moe.quantized_experts import QuantizedExperts
from radixmesh.kernels.moe.route import Routes

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_fp8_experts.py is for the GPU")

_CONFIG = default_fp8_config(1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "hidden", "mlp"),
    [
        (1, 256, 128),
        (9, 200, 328),
        *(pytest.param(*size, marks=pytest.mark.full) for size in ((9, 128, 64), (40, 128, 256))),
    ],
    ids=str,
)
def test_experts_compute_what_torch_does(num_rows: int, hidden: int, mlp: int, dtype: torch.dtype) -> None:
    """Also of sizes that no block divides, where the last one is smaller."""
    experts, x_TD, routes = random_experts(num_rows, 5, 2, hidden, mlp, dtype)
    residual_TD = torch.randn(num_rows, hidden).to(dtype) if num_rows > 1 else None
    want = fp8_routed_experts_reference(x_TD, routes, experts, residual_TD)
    got = fp8_routed_experts(x_TD, routes, experts, residual_TD=residual_TD, out=residual_TD)
    assert residual_TD is None or got.data_ptr() == residual_TD.data_ptr()
    # Few numbers lie so close to the middle of two of FP8 that a last bit of float32 decides; of bfloat16 numbers, with
    # their 8 bits, many do.
    share = 0.1 if dtype is torch.float32 else 1.0
    assert _error(got, want) < share * typical_chain_error(1, FP8) + 2 * typical_chain_error(2, dtype)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.full), torch.bfloat16], ids=str)
def test_rows_in_fp8_are_off_by_no_more_than_their_roundings(dtype: torch.dtype) -> None:
    """Against the dequantised weights: x and the gate's result are rounded to FP8, once each."""
    experts, x_TD, routes = random_experts(20, 5, 3, 384, 256, dtype)
    weights = [torch.stack([of(e).dequantized() for e in range(5)]) for of in (experts.gate, experts.up, experts.down)]
    want = routed_experts_reference(x_TD, routes, torch.cat(weights[:2], dim=1), weights[2])
    error = _error(fp8_routed_experts(x_TD, routes, experts), want)
    # Gate and up are read together, so that an error of x counts twice.
    assert error < typical_chain_error(3, FP8), error
    assert error > 0.2 * typical_chain_error(3, FP8), "rows were not made FP8"


@pytest.mark.parametrize("tile_rows", [16, *(pytest.param(rows, marks=pytest.mark.full) for rows in (32, 64))])
def test_a_rows_bits_do_not_depend_on_the_others(tile_rows: int) -> None:
    """All rows on two experts, in tiles that they share, and each row alone."""
    experts, x_TD, _ = random_experts(20, 4, 2, 200, 136, torch.bfloat16)
    routes = Routes(torch.tensor([[1, 3]] * 20, dtype=torch.int32), torch.rand(20, 2))
    config = replace(_CONFIG, tile_rows=tile_rows)
    together = fp8_routed_experts(x_TD, routes, experts, config=config)
    for row in (0, 17, 19):
        own = Routes(*(part[row : row + 1] for part in routes))
        assert torch.equal(fp8_routed_experts(x_TD[row : row + 1], own, experts, config=config)[0], together[row])


def test_a_configuration_changes_nothing_but_time() -> None:
    experts, x_TD, routes = random_experts(17, 4, 2, 128, 256, torch.float32)
    want = fp8_routed_experts(x_TD, routes, experts)
    for tile_rows, columns in ((16, 128), (32, 32), (64, 64)):
        down = GroupedConfig(columns=columns, depth=GROUP, num_warps=4, num_stages=2)
        config = ExpertsConfig(tile_rows=tile_rows, gate_up=replace(_CONFIG.gate_up, num_warps=8), down=down)
        torch.testing.assert_close(fp8_routed_experts(x_TD, routes, experts, config=config), want, rtol=0.02, atol=0.02)


def test_bytes_in_unused_slots_reach_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nothing has written yet may hold NaN."""
    experts, x_TD, routes = random_experts(3, 8, 2, 128, 192, torch.float32)
    want = fp8_routed_experts(x_TD, routes, experts)
    empty = torch.empty

    def full_of_nan(*shape: int, **options: object) -> torch.Tensor:
        tensor = empty(*shape, **options)  # type: ignore[call-overload]
        return tensor.view(torch.uint8).fill_(0x7F).view(FP8) if tensor.dtype == FP8 else tensor.fill_(2**30)

    monkeypatch.setattr(torch, "empty", full_of_nan)
    assert torch.equal(fp8_routed_experts(x_TD, routes, experts), want)


def test_no_rows_are_no_work() -> None:
    experts, x_TD, routes = random_experts(3, 4, 2, 128, 64, torch.float32)
    none = fp8_routed_experts(x_TD[:0], Routes(*(part[:0] for part in routes)), experts)
    assert none.shape == (0, 128)


def test_experts_of_wrong_shapes_are_refused() -> None:
    experts = QuantizedExperts.empty(2, 200, 72, torch.device("cpu"))
    with pytest.raises(AssertionError):
        replace(experts, down_scales_EGH=experts.down_scales_EGH[:, :1])
    with pytest.raises(AssertionError):
        replace(experts, w_down_EDF=experts.w_down_EDF.view(torch.uint8))


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_computed_where_they_lie_by_slot(dtype: torch.dtype) -> None:
    """Bit for bit what routes to one expert give, whatever lies where no row is."""
    counts, num_rows = [3, 0, 20, 1, 9], 20
    experts, _, _ = random_experts(1, len(counts), 1, 200, 136, dtype)
    x_PXD = torch.full((len(counts), num_rows, 200), float("nan"), dtype=dtype)
    for slot, count in enumerate(counts):
        x_PXD[slot, :count] = torch.randn(count, 200)
    rows = SlotRows(x_PXD, torch.tensor(counts, dtype=torch.int32), 40, 33)
    got, want = fp8_slot_experts(rows, experts), fp8_slot_experts_reference(rows, experts)
    for slot, count in enumerate(counts):
        if not count:
            continue
        assert _error(got[slot, :count], want[slot, :count]) < typical_chain_error(1, FP8)
        routes = one_expert(slot, count, x_PXD.device)
        config = default_fp8_config(33, len(counts))
        once = fp8_routed_experts(x_PXD[slot, :count].contiguous(), routes, experts, config=config)
        assert torch.equal(got[slot, :count], once)
