"""Pinned host memory for copies that the host does not wait for."""

from __future__ import annotations

import torch


class PinnedRing:
    """Some pinned buffers in turn. One comes up again only when the copies made from it are done.

    Who takes a buffer calls `fence` once the copies from it are on the current stream. `take` waits, on the host, only
    where the host is `count` turns ahead of the device.
    """

    def __init__(self, num_bytes: int, *, count: int = 4) -> None:
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        self._copied = [torch.cuda.Event() for _ in range(count)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def take(self) -> torch.Tensor:
        """uint8 [num_bytes] of arbitrary content."""
        self._turn = (self._turn + 1) % len(self._buffers)
        self._copied[self._turn].synchronize()
        return self._buffers[self._turn]

    def fence(self) -> None:
        """Ends the turn: the buffer is in use until what the current stream holds by now has run."""
        self._copied[self._turn].record()
