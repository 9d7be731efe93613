"""Words that the device copies, from the host and back."""

from __future__ import annotations

import pytest
import torch

from radixmesh.kernels.copy_words import WordCopies


@pytest.mark.parametrize("num", [1, 3, 16, 1024, 1025, 5000])
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_words_are_copied_and_nothing_else_is_written(
    num: int, start: int, dtype: torch.dtype, device: torch.device
) -> None:
    """To places of any alignment, from the host and back; twice: by the JIT's launch, and of the kernel it found."""
    pinned = {"dtype": dtype, "pin_memory": device.type == "cuda"}
    source = torch.arange(6000, dtype=torch.int32).to(dtype)
    on_host, back = torch.empty(6000, **pinned).copy_(source), torch.empty(6000, **pinned)
    copies = WordCopies()
    copy = copies.ints if dtype == torch.int32 else copies.bytes
    target, expected = torch.empty(6000, dtype=dtype, device=device), torch.full((6000,), 5, dtype=dtype)
    expected[start : start + num] = source[start : start + num]
    at = start * source.element_size()
    for _ in range(2):
        target.fill_(5)
        copy(on_host.data_ptr() + at, target.data_ptr() + at, num)
        assert torch.equal(target.cpu(), expected)
        back.fill_(5)
        copy(target.data_ptr() + at, back.data_ptr() + at, num)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(back, expected)
