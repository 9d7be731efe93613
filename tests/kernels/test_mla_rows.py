"""Rows around attention over latents, and a router's logits, against torch."""

from __future__ import annotations

import pytest
import torch
from support.rounding import kernel_tolerance, sum_tolerance

from radixmesh.kernels.mla_rows import (
    LatentNorm,
    head_gemm,
    head_gemm_reference,
    mla_rows,
    mla_rows_reference,
)
from radixmesh.kernels.moe.router_logits import router_logits, router_logits_reference
from radixmesh.kernels.rope_kv import KvTarget, RopeAngles

_PAGE_SIZE, _NUM_PAGES = 4, 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("sizes", [(4, 12, 8, 16), (20, 32, 16, 48), (1, 8, 20, 24)], ids=str)
def test_queries_and_latents_are_those_of_torch(
    sizes: tuple[int, int, int, int], is_interleaved: bool, dtype: torch.dtype, device: torch.device
) -> None:
    num_heads, nope, rope, rank = sizes
    num_rows, query_size = 3, num_heads * (nope + rope)
    # As one GEMM leaves them: queries, latent and RoPE key side by side.
    rows = torch.randn(num_rows, query_size + rank + rope, device=device).to(dtype)
    q_THY, kv_TC = rows[:, :query_size].unflatten(1, (num_heads, -1)), rows[:, query_size:]
    norm = LatentNorm(torch.randn(rank, device=device).to(dtype), 1e-6, is_interleaved)
    angles = 6 * torch.rand(_NUM_PAGES * _PAGE_SIZE, rope // 2, device=device)
    tables = torch.randperm(_NUM_PAGES, device=device).int().reshape(2, 3)
    positions = torch.tensor([5, 0, 11], dtype=torch.int32, device=device)
    slots = torch.tensor([1, 0, 0], dtype=torch.int32, device=device)
    target = KvTarget(positions, slots, tables, _PAGE_SIZE)
    results = []
    for function in (mla_rows, mla_rows_reference):
        latents = torch.zeros(_NUM_PAGES * _PAGE_SIZE, rank + rope, device=device, dtype=dtype)
        q = function(q_THY, kv_TC, norm, RopeAngles(angles.cos(), angles.sin()), target, latents)
        results.append((q[..., rank:].float(), latents.float()))
    unit = 4 * torch.finfo(dtype).eps
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=unit, atol=unit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "num_out", "depth"), [(1, 48, 32), (17, 130, 12), (5, 32, 300)])
def test_heads_are_multiplied_as_in_torch(
    num_rows: int, num_out: int, depth: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Rows of a wider matrix, into a part of another: as queries are absorbed."""
    x_THK = torch.randn(num_rows, 3, depth + 8, device=device).to(dtype)[..., :depth]
    for w_HNK in (
        torch.randn(3, num_out, depth, device=device),
        torch.randn(3, depth, num_out, device=device).transpose(1, 2),
    ):
        whole = torch.zeros(num_rows, 3, num_out + 4, dtype=dtype, device=device)
        out = head_gemm(x_THK, w_HNK.to(dtype), whole[..., :num_out])
        want = head_gemm_reference(x_THK.float(), w_HNK.to(dtype).float())
        tolerance = kernel_tolerance(dtype, depth, float(want.abs().max()))
        torch.testing.assert_close(out.float(), want, **tolerance)
        assert out.data_ptr() == whole.data_ptr() and not whole[..., num_out:].any()
        alone = head_gemm(x_THK[-1:], w_HNK.to(dtype))
        assert torch.equal(alone[0], out[-1])


def test_the_reference_writes_into_a_part_of_a_tensor() -> None:
    x_THK, w_HNK, whole = torch.randn(4, 2, 8), torch.randn(2, 16, 8), torch.zeros(4, 2, 20)
    head_gemm_reference(x_THK, w_HNK, whole[..., :16])
    torch.testing.assert_close(whole[..., :16], torch.einsum("thk,hnk->thn", x_THK, w_HNK))
    assert not whole[..., 16:].any()


def test_no_rows_are_no_work() -> None:
    assert head_gemm(torch.zeros(0, 2, 8), torch.zeros(2, 16, 8)).shape == (0, 2, 16)
    assert router_logits(torch.zeros(0, 8), torch.zeros(3, 8)).shape == (1, 0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "depth", "num_parts"),
    [(5, 7, 150, 1), (9, 7, 150, 2), (40, 20, 150, 2), (20, 70, 2500, 10), (1030, 40, 300, 2)],
)
def test_router_logits_are_float32(
    num_rows: int, num_experts: int, depth: int, num_parts: int, dtype: torch.dtype, device: torch.device
) -> None:
    """One row a program, and tiles whose parts are of one step and of several."""
    x_TD, w_ED = torch.randn(num_rows, depth, device=device).to(dtype), torch.randn(num_experts, depth, device=device)
    parts_PTE, want = router_logits(x_TD, w_ED), router_logits_reference(x_TD, w_ED)
    assert parts_PTE.dtype == torch.float32 and len(parts_PTE) == num_parts
    got = parts_PTE.sum(dim=0)
    # Weights of 22 bits beside numbers of 16.
    tolerance = sum_tolerance(depth, float(want.abs().max()) + 10)
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)
    if num_rows <= 40:
        assert torch.equal(router_logits(x_TD[2:3], w_ED, is_deterministic=True)[:, 0], _fixed(x_TD, w_ED)[:, 2])


def _fixed(x_TD: torch.Tensor, w_ED: torch.Tensor) -> torch.Tensor:
    return router_logits(x_TD, w_ED, is_deterministic=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_router_logits_of_few_rows_may_include_the_norm(dtype: torch.dtype, device: torch.device) -> None:
    x_TD, w_ED = torch.randn(3, 100, device=device).to(dtype), torch.randn(7, 100, device=device)
    norm_D = torch.rand(100, device=device).to(dtype)
    (got,), want = router_logits(x_TD, w_ED, norm_D, 1e-6), router_logits_reference(x_TD, w_ED, norm_D, 1e-6)
    torch.testing.assert_close(got, want, **kernel_tolerance(dtype, 100, float(want.abs().max())))
