"""Pinned host memory for copies that the host does not wait for."""

from __future__ import annotations

import torch


class PinnedRing:
    """A ring of pinned staging buffers. One is used again only when the copies made from it are done.

    Callers of `take` call `fence` once the copies from the buffer are on the current stream. `take` waits, on the host,
    only where the host is `count` buffers ahead of the device.
    """

    def __init__(self, num_bytes: int, *, count: int = 4) -> None:
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        self._copied = [torch.cuda.Event() for _ in range(count)]  # type: ignore[no-untyped-call]
        self._index = 0

    def take(self) -> torch.Tensor:
        """uint8 [num_bytes] of arbitrary content."""
        self._index = (self._index + 1) % len(self._buffers)
        self._copied[self._index].synchronize()
        return self._buffers[self._index]

    def fence(self) -> None:
        """The buffer is in use until what the current stream holds by now has run."""
        self._copied[self._index].record()
