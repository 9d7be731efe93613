"""Reductions and scans by a kernel's own function, which the interpreter does faster here, are as they were."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for CPUs")


@triton.jit
def _halved_sum(a, b):
    """Depends on the order: nothing that an interpreter knows by its name."""
    return a * 0.5 + b


@triton.jit
def _later_highest(a, number, b, other):
    is_b = b >= a
    return tl.where(is_b, b, a), tl.where(is_b, other, number)


@triton.jit
def _kernel(
    x_ptr, sums_ptr, totals_ptr, best_ptr, numbers_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr,
    LEFT: tl.constexpr, IS_REVERSE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(sums_ptr + at, tl.associative_scan(x, AXIS, _halved_sum, reverse=IS_REVERSE))
    out = tl.arange(0, LEFT)
    tl.store(totals_ptr + out, tl.reduce(x, AXIS, _halved_sum))
    best, number = tl.reduce((x, at), AXIS, _later_highest)
    tl.store(best_ptr + out, best)
    tl.store(numbers_ptr + out, number)


@pytest.mark.parametrize("is_reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(4, 8), (1, 4), (8, 1)])
def test_functions_combine_in_their_order(shape: tuple[int, int], axis: int, is_reverse: bool) -> None:
    x = torch.randint(0, 5, shape).float()
    sums, left = torch.empty_like(x), shape[1 - axis]
    totals, best, numbers = torch.empty(left), torch.empty(left), torch.empty(left, dtype=torch.int32)
    _kernel[(1,)](x, sums, totals, best, numbers, M=shape[0], N=shape[1], AXIS=axis, LEFT=left, IS_REVERSE=is_reverse)
    rows, ids = x.movedim(axis, 1), torch.arange(x.numel()).view(shape).movedim(axis, 1)
    want, given = torch.empty_like(rows), rows.flip(1) if is_reverse else rows
    want[:, 0] = given[:, 0]
    for number in range(1, rows.shape[1]):
        want[:, number] = want[:, number - 1] * 0.5 + given[:, number]
    assert torch.equal(sums.movedim(axis, 1), want.flip(1) if is_reverse else want)
    forward = rows[:, 0]
    for number in range(1, rows.shape[1]):
        forward = forward * 0.5 + rows[:, number]
    assert torch.equal(totals, forward)
    assert torch.equal(best, rows.amax(dim=1))
    last = rows.shape[1] - 1 - rows.flip(1).argmax(dim=1)
    assert torch.equal(numbers, ids.gather(1, last[:, None])[:, 0].int())
