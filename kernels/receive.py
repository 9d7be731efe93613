"""A decode step's numbers, fetched by the device itself from memory of the host: no copy stands between two steps.

R rows of host memory that are filled in turn, N numbers of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_PAIRS = 1024  # That are read at a time.


@triton.jit
def _receive_kernel(
    posts_ptr, num_received_ptr, buffer_ptr, ROWS: tl.constexpr, STRIDE: tl.constexpr, HEAD: tl.constexpr,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    num_received = tl.load(num_received_ptr)
    post_ptr = posts_ptr + (num_received % ROWS).to(tl.int64) * STRIDE
    # Both reads are under way at once: the bus takes longer than all else here.
    num_pairs = tl.load(post_ptr)
    at = tl.arange(0, BLOCK)
    tl.store(buffer_ptr + at, tl.load(post_ptr + at, mask=at < HEAD), mask=at < HEAD)
    end = HEAD + 2 * num_pairs
    first = HEAD
    while first < end:
        at = first + tl.arange(0, 2 * PAIRS)
        tl.store(buffer_ptr + at, tl.load(post_ptr + at, mask=at < end), mask=at < end)
        first += 2 * PAIRS
    # All threads have read it.
    tl.debug_barrier()
    tl.store(num_received_ptr, num_received + 1)


def receive(
    posts_RN: torch.Tensor, num_received_1: torch.Tensor, buffer_N: torch.Tensor, num_head: int
) -> torch.Tensor:
    """Takes the next post to the buffer, and counts it: int32, all of them. Gives the buffer; can be captured.

    posts [R, N]: pinned memory of the host (of the device itself in tests). Post number n is in row n % R; it begins
    with a number of pairs, which follow its first `num_head` numbers. The rest of the buffer stays as it is.
    """
    for numbers in (posts_RN, num_received_1, buffer_N):
        assert numbers.dtype == torch.int32 and numbers.is_contiguous(), (numbers.dtype, numbers.stride())
    assert 0 < num_head <= posts_RN.shape[1] == len(buffer_N), (num_head, posts_RN.shape, buffer_N.shape)
    block = triton.next_power_of_2(num_head)
    _receive_kernel[(1,)](
        posts_RN, num_received_1, buffer_N, ROWS=len(posts_RN), STRIDE=posts_RN.stride(0), HEAD=num_head, BLOCK=block,
        PAIRS=_PAIRS, num_warps=min(max(block // 128, 1), 16),
    )  # fmt: skip
    return buffer_N


def receive_reference(
    posts_RN: torch.Tensor, num_received_1: torch.Tensor, buffer_N: torch.Tensor, num_head: int
) -> torch.Tensor:
    """What `receive` does and returns, in torch, with the host waiting."""
    post_N = posts_RN[int(num_received_1) % len(posts_RN)]
    end = num_head + 2 * int(post_N[0])
    buffer_N[:end] = post_N[:end]
    num_received_1 += 1
    return buffer_N
