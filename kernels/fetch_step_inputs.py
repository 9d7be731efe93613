"""Fetch of a decode step's inputs by the device itself from pinned host memory: no copy stands between two steps.

R staging slots in host memory, used as a ring; N numbers of a slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PAIRS = 1024  # Pairs that are read at a time.


# A size serves all below it down to the next power of two: steps of any number of rows are fetched, and a kernel that
# is compiled while requests wait would hold them up.
@triton.jit(do_not_specialize=["num_quads"])
def _fetch_step_inputs_kernel(
    staging_ptr, next_ptr, buffer_ptr, num_quads, ROWS: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    num_head = 4 * num_quads
    row = tl.load(next_ptr)
    inputs_ptr = staging_ptr + row.to(tl.int64) * STRIDE
    # Both reads are under way at once: the bus takes longer than all else here.
    num_pairs = tl.load(inputs_ptr)
    at = tl.arange(0, BLOCK)
    tl.store(buffer_ptr + at, tl.load(inputs_ptr + at, mask=at < num_head), mask=at < num_head)
    end = num_head + 2 * num_pairs
    first = num_head
    while first < end:
        pair_at = first + tl.arange(0, 2 * PAIRS)
        tl.store(buffer_ptr + pair_at, tl.load(inputs_ptr + pair_at, mask=pair_at < end), mask=pair_at < end)
        first += 2 * PAIRS
    # All threads have read it.
    tl.debug_barrier()
    tl.store(next_ptr, (row + 1) % ROWS)


def fetch_step_inputs(
    staging_RN: torch.Tensor, next_1: torch.Tensor, buffer_N: torch.Tensor, num_head: int
) -> torch.Tensor:
    """Copies staging slot `next` to the buffer and advances `next`; returns the buffer. All int32. Can be captured: the
    kernel advances the ring index itself.

    staging [R, N]: pinned memory of the host (of the device itself in tests); slot 0 follows the last one. A slot
    begins with a number of pairs, which follow its first `num_head` numbers, a multiple of four. The rest of the buffer
    stays as it is.
    """
    for numbers in (staging_RN, next_1, buffer_N):
        assert numbers.dtype == torch.int32 and numbers.is_contiguous(), (numbers.dtype, numbers.stride())
    assert 0 < num_head <= staging_RN.shape[1] == len(buffer_N) and num_head % 4 == 0, (num_head, staging_RN.shape)
    block = triton.next_power_of_2(num_head)
    _fetch_step_inputs_kernel[(1,)](
        staging_RN, next_1, buffer_N, num_head // 4, ROWS=len(staging_RN), STRIDE=staging_RN.stride(0), BLOCK=block,
        PAIRS=_PAIRS, num_warps=min(max(block // 128, 1), 16),
    )  # fmt: skip
    return buffer_N


def fetch_step_inputs_reference(
    staging_RN: torch.Tensor, next_1: torch.Tensor, buffer_N: torch.Tensor, num_head: int
) -> torch.Tensor:
    """`fetch_step_inputs` in torch, with the host waiting."""
    inputs_N = staging_RN[int(next_1)]
    end = num_head + 2 * int(inputs_N[0])
    buffer_N[:end] = inputs_N[:end]
    next_1.add_(1).remainder_(len(staging_RN))
    return buffer_N
