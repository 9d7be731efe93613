"""Fetch of a few integers by the device itself from pinned host memory: the copy engines may be busy with KV.

A small copy to the device waits there for all that other streams have given the engine before, which is milliseconds of
KV that comes back from the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # Integers of a program.


# Any number of integers to any place: a kernel that is compiled while requests wait would hold them up.
@triton.jit(do_not_specialize=["num"], do_not_specialize_on_alignment=["source_ptr", "target_ptr"])
def _fetch_ints_kernel(source_ptr, target_ptr, num, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target_ptr + at, tl.load(source_ptr + at, mask=at < num), mask=at < num)


def fetch_ints(source_N: torch.Tensor, target_N: torch.Tensor) -> None:
    """Copies int32 [N] from pinned memory of the host (of the device itself in tests) to memory of the device, in order
    with the work of the current stream; both contiguous, N > 0. The source must stay as it is until then."""
    for numbers in (source_N, target_N):
        assert numbers.dtype == torch.int32 and numbers.is_contiguous(), (numbers.dtype, numbers.stride())
    assert len(source_N) == len(target_N) > 0, (source_N.shape, target_N.shape)
    _fetch_ints_kernel[(triton.cdiv(len(source_N), _BLOCK),)](source_N, target_N, len(source_N), BLOCK=_BLOCK)


def fetch_ints_reference(source_N: torch.Tensor, target_N: torch.Tensor) -> None:
    """`fetch_ints` in torch."""
    target_N.copy_(source_N)
