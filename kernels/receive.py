"""A decode step's numbers, fetched by the device itself from memory of the host: no copy stands between two steps.

R rows of host memory that are filled in turn, N numbers of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PAIRS = 1024  # That are read at a time.


# A size serves all below it down to the next power of two: steps of any number of rows are received, and a kernel that
# is compiled while requests wait would hold them up.
@triton.jit(do_not_specialize=["num_quads"])
def _receive_kernel(
    posts_ptr, next_ptr, buffer_ptr, num_quads, ROWS: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    num_head = 4 * num_quads
    row = tl.load(next_ptr)
    post_ptr = posts_ptr + row.to(tl.int64) * STRIDE
    # Both reads are under way at once: the bus takes longer than all else here.
    num_pairs = tl.load(post_ptr)
    at = tl.arange(0, BLOCK)
    tl.store(buffer_ptr + at, tl.load(post_ptr + at, mask=at < num_head), mask=at < num_head)
    end = num_head + 2 * num_pairs
    first = num_head
    while first < end:
        pair_at = first + tl.arange(0, 2 * PAIRS)
        tl.store(buffer_ptr + pair_at, tl.load(post_ptr + pair_at, mask=pair_at < end), mask=pair_at < end)
        first += 2 * PAIRS
    # All threads have read it.
    tl.debug_barrier()
    tl.store(next_ptr, (row + 1) % ROWS)


def receive(posts_RN: torch.Tensor, next_1: torch.Tensor, buffer_N: torch.Tensor, num_head: int) -> torch.Tensor:
    """Takes the post in row `next` to the buffer, and turns to the row after it: int32, all of them. Gives the buffer;
    can be captured.

    posts [R, N]: pinned memory of the host (of the device itself in tests); the row after the last is the first one. A
    post begins with a number of pairs, which follow its first `num_head` numbers, a multiple of four. The rest of the
    buffer stays as it is.
    """
    for numbers in (posts_RN, next_1, buffer_N):
        assert numbers.dtype == torch.int32 and numbers.is_contiguous(), (numbers.dtype, numbers.stride())
    assert 0 < num_head <= posts_RN.shape[1] == len(buffer_N) and num_head % 4 == 0, (num_head, posts_RN.shape)
    block = triton.next_power_of_2(num_head)
    _receive_kernel[(1,)](
        posts_RN, next_1, buffer_N, num_head // 4, ROWS=len(posts_RN), STRIDE=posts_RN.stride(0), BLOCK=block,
        PAIRS=_PAIRS, num_warps=min(max(block // 128, 1), 16),
    )  # fmt: skip
    return buffer_N


def receive_reference(
    posts_RN: torch.Tensor, next_1: torch.Tensor, buffer_N: torch.Tensor, num_head: int
) -> torch.Tensor:
    """What `receive` does and returns, in torch, with the host waiting."""
    post_N = posts_RN[int(next_1)]
    end = num_head + 2 * int(post_N[0])
    buffer_N[:end] = post_N[:end]
    next_1.add_(1).remainder_(len(posts_RN))
    return buffer_N
